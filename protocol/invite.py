"""The invite: all that a worker needs to enrol, as one line of text that survives a copy, a chat and a QR code.

    swarm1:BODY        BODY: URL-safe base64 without padding of
    expiry (8 bytes, unix seconds), port (2), server key (32), one-time secret key (32),
    number of hosts (1), each host with its length (1) before it; then the first 4 bytes of the sha256 of all this

Numbers are big-endian. Keys are CURVE keys as raw bytes.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import ipaddress
import re
import struct
from dataclasses import dataclass, field

from .errors import ProtocolError
from .schema import one_line

PREFIX = "swarm1:"
KEY_BYTES = 32
MAX_HOSTS = 8
MAX_HOST = 253
MAX_TEXT = 4096
MAX_EXPIRES = (1 << 53) - 1
_CHECK_BYTES = 4
_HEAD = struct.Struct(f">QH{KEY_BYTES}s{KEY_BYTES}sB")
_BODY = re.compile(r"[A-Za-z0-9_-]+")
_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_COPY = "copy it again, whole, from what 'backbone invite' printed"


def is_host(text: str) -> bool:
    """Whether a text is an IPv4 or IPv6 address, the latter without brackets, or a host name."""
    if not 0 < len(text) <= MAX_HOST or not text.isascii():
        return False
    try:
        ipaddress.ip_address(text)
    except ValueError:
        labels = text.removesuffix(".").split(".")
        # A last label of digits alone would be an address that is none, such as 10.0.0.300.
        return all(map(_LABEL.fullmatch, labels)) and not labels[-1].isdecimal()
    return "%" not in text or re.fullmatch(r"[0-9A-Fa-f:.]+%[A-Za-z0-9._-]+", text) is not None


def endpoint_of(host: str, port: int) -> str:
    """A host and a port as ZeroMQ's address."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Invite:
    """Where a backbone is, and the key that lets a worker enrol there until it expires. ProtocolError for bad ones."""

    hosts: tuple[str, ...]  #: in the order in which to try them
    port: int
    server_key: bytes
    secret_key: bytes = field(repr=False)  #: a CURVE secret; the backbone lists its public half
    expires: int  #: unix seconds

    def __post_init__(self) -> None:
        if not 1 <= len(self.hosts) <= MAX_HOSTS:
            raise ProtocolError(f"an invite names 1 to {MAX_HOSTS} hosts, not {len(self.hosts)}")
        for host in self.hosts:
            if not is_host(host):
                raise ProtocolError(f"{one_line(host, 64)!r} is neither an address nor a host name")
        if not 1 <= self.port <= 65535:
            raise ProtocolError(f"port {self.port} is not from 1 to 65535")
        if len(self.server_key) != KEY_BYTES or len(self.secret_key) != KEY_BYTES:
            raise ProtocolError(f"a key has {KEY_BYTES} bytes")
        if not 0 <= self.expires <= MAX_EXPIRES:
            raise ProtocolError(f"{self.expires} is no time at which an invite could expire")

    def __str__(self) -> str:
        hosts = [host.encode("ascii") for host in self.hosts]
        body = _HEAD.pack(self.expires, self.port, self.server_key, self.secret_key, len(hosts))
        body += b"".join(bytes([len(host)]) + host for host in hosts)
        return PREFIX + base64.urlsafe_b64encode(body + _check(body)).rstrip(b"=").decode("ascii")


def parse_invite(text: str) -> Invite:
    """The invite of a string; white space around it is passed over. ProtocolError says what is wrong with it."""
    word = text.strip() if len(text) <= MAX_TEXT else text
    if not word.startswith(PREFIX):
        shown = f"it begins with {PREFIX!r}, not with {one_line(word[: len(PREFIX)], 32)!r}"
        raise ProtocolError(f"this is no invite: {shown if word else 'it is empty'}; {_COPY}")
    if len(word) > MAX_TEXT:
        raise ProtocolError(f"this is no invite: {len(word)} characters are too many; {_COPY}")
    body = _decoded(word.removeprefix(PREFIX))
    expires, port, server_key, secret_key, count = _HEAD.unpack_from(body)
    hosts, rest = list[str](), body[_HEAD.size :]
    for _ in range(count):
        length = rest[0] if rest else 0
        hosts.append(rest[1 : 1 + length].decode("latin-1"))
        if len(hosts[-1]) != length:
            raise ProtocolError("this invite's hosts are cut short")
        rest = rest[1 + length :]
    if rest:
        raise ProtocolError("this invite has something behind its hosts: it is of a later version; update expertswarm")
    return Invite(hosts=tuple(hosts), port=port, server_key=server_key, secret_key=secret_key, expires=expires)


def _decoded(text: str) -> bytes:
    """The body, whole and with the right checksum."""
    if not _BODY.fullmatch(text):
        odd = next((c for c in text if not _BODY.fullmatch(c)), "")
        what = f"{one_line(odd, 8)!r} cannot be in one" if odd else f"nothing comes after {PREFIX!r}"
        raise ProtocolError(f"this invite is damaged: {what}; {_COPY}")
    try:
        data = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except (binascii.Error, ValueError):
        data = b""
    body, check = data[:-_CHECK_BYTES], data[-_CHECK_BYTES:]
    # Bits behind the last byte are not checked by base64: the text has to be the one that is made of these bytes.
    is_whole = base64.urlsafe_b64encode(data).rstrip(b"=").decode("ascii") == text
    if len(body) < _HEAD.size or not is_whole or check != _check(body):
        raise ProtocolError(f"this invite is damaged: its checksum does not match; {_COPY}")
    return body


def _check(body: bytes) -> bytes:
    return hashlib.sha256(PREFIX.encode() + body).digest()[:_CHECK_BYTES]
