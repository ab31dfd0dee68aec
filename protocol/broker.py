"""Which MQTT broker to use, and as whom: a URL, a password that stands in no command line, a CA. Opens no socket."""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from .errors import ProtocolError
from .invite import is_host
from .presence import Endpoint

PORTS = {"mqtt": 1883, "mqtts": 8883}
MAX_URL = 1024
MAX_PASSWORD_BYTES = 4096
KEEPALIVE_S = 15  #: a member that is silent for half as long again is dead to the broker
TIMEOUT_S = 5.0  #: for an answer of the broker's
MOST_QUEUED = 1024  #: messages that have come and were not looked at; more are dropped
#: What becomes of a connection is said once, by whoever uses it.
_QUIET = logging.getLogger(f"{__name__}.client")
_QUIET.setLevel(logging.CRITICAL)
_FORM = "not mqtt://[USER@]HOST[:PORT] or mqtts://[USER@]HOST[:PORT]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Broker:
    """Where the broker is, and how to come in. Without a CA file an encrypted one's CA is one of the system's."""

    endpoint: Endpoint
    is_encrypted: bool
    user: str = ""
    password: str = field(default="", repr=False)
    ca_file: str = ""

    def __str__(self) -> str:
        return f"{'mqtts' if self.is_encrypted else 'mqtt'}://{self.endpoint}"

    def client_options(self, client_id: str) -> dict[str, Any]:
        """What aiomqtt.Client wants to know. ProtocolError when the CA file is of no use."""
        return {
            "hostname": self.endpoint.host,
            "port": self.endpoint.port,
            "username": self.user or None,
            "password": self.password or None,
            "identifier": client_id,
            "logger": _QUIET,
            "keepalive": KEEPALIVE_S,
            "timeout": TIMEOUT_S,
            "max_queued_incoming_messages": MOST_QUEUED,
            "tls_context": self._tls_context(),
        }

    def _tls_context(self) -> ssl.SSLContext | None:
        if not self.is_encrypted:
            return None
        try:
            return ssl.create_default_context(cafile=self.ca_file or None)
        except ssl.SSLError:
            raise ProtocolError(f"{self.ca_file}: holds no certificate of a CA (PEM)") from None
        except OSError as error:
            raise ProtocolError(f"{self.ca_file}: cannot be read: {error.strerror}") from None


def parse_broker(url: str, *, password: str = "", password_file: str = "", ca_file: str = "") -> Broker:
    """The broker of a URL. A password file's first line goes before `password`. ProtocolError says what is wrong.

    The URL is never shown: it may hold a password, which it must not.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise ProtocolError(_FORM) from None
    if parts.password is not None:
        raise ProtocolError("a URL is no place for a password; set EXPERTSWARM_MQTT_PASSWORD or name a password file")
    is_bare = parts.path in ("", "/") and not parts.query and not parts.fragment
    if len(url) > MAX_URL or parts.scheme not in PORTS or not is_bare or not is_host(host) or port == 0:
        raise ProtocolError(_FORM)
    user = unquote(parts.username or "")
    if not user.isprintable():
        raise ProtocolError(_FORM)
    password = _first_line(password_file) if password_file else password
    if password and not user:
        raise ProtocolError("there is a password, and no user; name it: mqtts://USER@HOST")
    is_encrypted = parts.scheme == "mqtts"
    if ca_file and not is_encrypted:
        raise ProtocolError("a CA is for an encrypted connection: mqtts://")
    endpoint = Endpoint(host, PORTS[parts.scheme] if port is None else port)
    return Broker(endpoint=endpoint, is_encrypted=is_encrypted, user=user, password=password, ca_file=ca_file)


def _first_line(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            line = file.readline(MAX_PASSWORD_BYTES + 1).decode("utf-8").rstrip("\r\n")
    except OSError as error:
        raise ProtocolError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ProtocolError(f"{path}: its first line is not UTF-8") from None
    if not 0 < len(line) <= MAX_PASSWORD_BYTES:
        raise ProtocolError(f"{path}: its first line is no password")
    return line
