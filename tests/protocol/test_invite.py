"""The invite string: what is written is read back; whatever else comes is refused in one line that says what to do."""

from __future__ import annotations

import base64
import hashlib
import ipaddress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import ProtocolError
from protocol.invite import MAX_HOSTS, PREFIX, Invite, endpoint_of, is_host, parse_invite

KEYS = {"server_key": bytes(range(32)), "secret_key": bytes(range(32, 64))}
INVITE = Invite(hosts=("192.168.0.7",), port=7610, expires=1_900_000_000, **KEYS)

hosts = (
    st.ip_addresses().map(str)
    | st.from_regex(r"[a-z0-9]([a-z0-9-]{0,8}[a-z0-9])?(\.[a-z]{2,8})?", fullmatch=True).filter(is_host)
    | st.ip_addresses(network=ipaddress.ip_network("fe80::/64")).map(lambda a: f"{a}%eth0")
)
invites = st.builds(
    Invite,
    hosts=st.lists(hosts, min_size=1, max_size=MAX_HOSTS).map(tuple),
    port=st.integers(1, 65535),
    server_key=st.binary(min_size=32, max_size=32),
    secret_key=st.binary(min_size=32, max_size=32),
    expires=st.integers(0, (1 << 53) - 1),
)


def refusal(text: str) -> str:
    with pytest.raises(ProtocolError) as caught:
        parse_invite(text)
    told = str(caught.value)
    assert "\n" not in told
    assert told.isprintable()
    assert len(told) < 300
    return told


def sealed(body: bytes) -> str:
    """A string with the right checksum around any body."""
    check = hashlib.sha256(PREFIX.encode() + body).digest()[:4]
    return PREFIX + base64.urlsafe_b64encode(body + check).rstrip(b"=").decode()


@given(invites)
def test_round_trip(invite: Invite) -> None:
    text = str(invite)
    assert text.isascii()
    assert " " not in text
    assert parse_invite(f"\n {text}\t\r\n") == invite


def test_it_is_short_enough_for_a_qr_code_and_keeps_its_secret() -> None:
    assert len(str(INVITE)) < 140
    assert "secret" not in repr(INVITE)


@given(st.data(), invites)
def test_any_changed_character_is_found(data: st.DataObject, invite: Invite) -> None:
    text = str(invite)
    at = data.draw(st.integers(0, len(text) - 1))
    new = data.draw(st.characters(codec="utf-8").filter(lambda c: c != text[at]))
    refusal(text[:at] + new + text[at + 1 :])


@given(invites, st.data())
def test_a_cut_or_doubled_string_is_found(invite: Invite, data: st.DataObject) -> None:
    text = str(invite)
    refusal(text[: data.draw(st.integers(0, len(text) - 1))])
    refusal(text + text)


@settings(max_examples=500)
@given(st.text(max_size=300) | st.text(max_size=300).map(lambda text: PREFIX + text))
def test_any_text_is_refused(text: str) -> None:
    refusal(text)


@settings(max_examples=500)
@given(st.binary(max_size=200))
def test_any_body_with_the_right_checksum_is_read_or_refused(body: bytes) -> None:
    try:
        invite = parse_invite(sealed(body))
    except ProtocolError as error:
        assert "\n" not in str(error)
    else:
        assert parse_invite(str(invite)) == invite


HEAD = (1_900_000_000).to_bytes(8, "big") + (7610).to_bytes(2, "big") + bytes(64)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "this is no invite: it is empty; copy it again"),
        ("swarm2:abc", "it begins with 'swarm1:', not with 'swarm2:'"),
        ("http://x", "not with 'http://'"),
        ("\x1b[2Jhello", "not with ' [2Jhel'"),
        (PREFIX, "nothing comes after 'swarm1:'"),
        (PREFIX + "a b", "' ' cannot be in one"),
        (PREFIX + "AAAA", "its checksum does not match; copy it again, whole"),
        (PREFIX + "A" * 5000, "5007 characters are too many"),
        (sealed(HEAD + b"\0"), "names 1 to 8 hosts, not 0"),
        (sealed(HEAD + b"\x09" + b"\x01a" * 9), "names 1 to 8 hosts, not 9"),
        (sealed(HEAD + b"\x01\x05abc"), "hosts are cut short"),
        (sealed(HEAD + b"\x02\x01a"), "'' is neither an address nor a host name"),
        (sealed(HEAD + b"\x01\x03a b"), "'a b' is neither an address"),
        (sealed(HEAD + b"\x01\x01a!"), "of a later version; update"),
        (sealed(bytes(10) + bytes(64) + b"\x01\x01a"), "port 0 is not from 1 to 65535"),
        (sealed(b"\xff" * 8 + HEAD[8:] + b"\x01\x01a"), "is no time at which"),
    ],
)
def test_what_is_wrong_is_told(text: str, told: str) -> None:
    assert told in refusal(text)


@pytest.mark.parametrize(
    ("host", "is_one"),
    [
        ("10.0.0.1", True),
        ("::1", True),
        ("fe80::1%eth0", True),
        ("box", True),
        ("box.local", True),
        ("a_b.example.", True),
        ("10.0.0.300", False),
        ("fe80::1%a b", False),
        ("[::1]", False),
        ("a..b", False),
        ("-a", False),
        ("a;b", False),
        ("bücher", False),
        ("", False),
        ("a" * 254, False),
    ],
)
def test_hosts(host: str, is_one: bool) -> None:
    assert is_host(host) is is_one


def test_addresses_of_zeromq() -> None:
    assert endpoint_of("10.0.0.1", 5) == "tcp://10.0.0.1:5"
    assert endpoint_of("fe80::1", 5) == "tcp://[fe80::1]:5"
