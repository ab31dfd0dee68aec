"""A broker's URL, password and CA: what can be used, and one line for what cannot, in which no password shows."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.broker import parse_broker
from protocol.errors import ProtocolError
from protocol.presence import Endpoint

FIRST = "one two "
SECRET = {"password": "hidden-word"}


def refusal(url: str, **given: str) -> str:
    with pytest.raises(ProtocolError) as caught:
        parse_broker(url, **given)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_a_url_says() -> None:
    broker = parse_broker("mqtts://a%40b@box.lan:99", **SECRET)
    assert (broker.endpoint, broker.is_encrypted, broker.user, broker.password) == (
        Endpoint("box.lan", 99),
        True,
        "a@b",
        SECRET["password"],
    )
    assert str(broker) == "mqtts://box.lan:99"
    assert "hidden-word" not in repr(broker)
    assert parse_broker("mqtt://box").endpoint == Endpoint("box", 1883)
    assert parse_broker("mqtts://[::1]/").endpoint == Endpoint("::1", 8883)


@pytest.mark.parametrize(
    "url",
    [
        "box",
        "http://box",
        "mqtt://",
        "mqtt://box:x",
        "mqtt://box:0",
        "mqtt://box:65536",
        "mqtt://a b",
        "mqtt://box/topic",
        "mqtt://box?x",
        "mqtt://box#x",
        "mqtt://[::1",
        "mqtt://%0a@box",
        "mqtt://" + "x" * 2000,
    ],
)
def test_what_is_no_broker_is_refused(url: str) -> None:
    assert refusal(url) == "not mqtt://[USER@]HOST[:PORT] or mqtts://[USER@]HOST[:PORT]"


@given(st.text(max_size=40) | st.text(max_size=30).map(lambda text: f"mqtts://{text}"))
def test_any_text_is_a_broker_or_one_line(url: str) -> None:
    try:
        broker = parse_broker(url)
    except ProtocolError as error:
        assert str(error).isprintable()
    else:
        assert 1 <= broker.endpoint.port <= 65535


def test_a_password_stands_in_no_url_and_shows_nowhere() -> None:
    assert refusal("mqtt://user:hidden@box") == (
        "a URL is no place for a password; set EXPERTSWARM_MQTT_PASSWORD or name a password file"
    )
    assert "there is a password, and no user" in refusal("mqtt://box", **SECRET)
    assert "a CA is for an encrypted connection" in refusal("mqtt://box", ca_file="ca.crt")


def test_a_password_files_first_line_is_the_password(tmp_path: Path) -> None:
    (file := tmp_path / "password").write_text(f"{FIRST}\nrest")
    assert parse_broker("mqtt://u@box", **SECRET, password_file=str(file)).password == FIRST
    for content, told in ((b"", "is no password"), (b"\n", "is no password"), (b"\xff", "not UTF-8"), (b"x" * 9999, "is no password")):  # fmt: skip
        file.write_bytes(content)
        assert told in refusal("mqtt://u@box", password_file=str(file))
    assert "cannot be read: No such file" in refusal("mqtt://u@box", password_file=str(tmp_path / "none"))


def test_a_ca_file_is_read_before_anything_is_connected(tmp_path: Path) -> None:
    (file := tmp_path / "ca.crt").write_text("nothing")
    with pytest.raises(ProtocolError, match="holds no certificate"):
        parse_broker("mqtts://box", ca_file=str(file)).client_options("x")
    with pytest.raises(ProtocolError, match="cannot be read: No such file"):
        parse_broker("mqtts://box", ca_file=str(tmp_path / "none")).client_options("x")
    context = parse_broker("mqtts://box").client_options("x")["tls_context"]
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname
    assert parse_broker("mqtt://box").client_options("x")["tls_context"] is None
