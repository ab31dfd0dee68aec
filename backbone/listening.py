"""The address that the swarm listens at, and the hosts by which others reach it."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

from protocol.invite import endpoint_of, is_host

from .errors import UsageError

DEFAULT_LISTEN = "127.0.0.1:7610"
#: Addresses kept for documentation: nobody is there, and asking for the way to them sends nothing.
_ELSEWHERE = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))


@dataclass(frozen=True, slots=True)
class Address:
    """A host, an IPv6 address without its brackets, and a port."""

    host: str
    port: int

    @property
    def endpoint(self) -> str:
        """The address as ZeroMQ has it."""
        return endpoint_of(self.host, self.port)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        return is_loopback(self.host)

    @property
    def is_any(self) -> bool:
        """Whether it stands for all addresses of this machine."""
        return self.host in ("0.0.0.0", "::")  # noqa: S104 - told apart, not bound

    def at_port_of(self, endpoint: str) -> Address:
        """This host at the port that a socket got."""
        return Address(self.host, int(endpoint.rpartition(":")[2]))

    def __str__(self) -> str:
        return self.endpoint.removeprefix("tcp://")


def is_loopback(host: str) -> bool:
    """Whether a host is this machine to everybody who asks."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.rstrip(".").lower() == "localhost"


def parse_address(text: str, place: str, *, least_port: int = 1) -> Address:
    """An address of HOST:PORT, [IPV6]:PORT or *:PORT. UsageError names the place it came from."""
    host, colon, port = text.strip().rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    host = "0.0.0.0" if host == "*" else host[1:-1] if is_bracketed else host  # noqa: S104 - asked for
    is_number = port.isascii() and port.isdecimal() and least_port <= int(port[:6]) <= 65535
    if not colon or not is_number or not is_host(host) or (":" in host) != is_bracketed:
        raise UsageError(f"{place}: {text[:80]!r} is not HOST:PORT, such as 0.0.0.0:7610 or [::]:7610")
    return Address(host, int(port))


def reachable_hosts(listen: Address, advertise: str) -> tuple[str, ...]:
    """The hosts for an invite: `advertise` where it is given. UsageError where there is none to name."""
    if advertise:
        if not is_host(host := advertise.strip().removeprefix("[").removesuffix("]")):
            raise UsageError(f"--advertise: {advertise[:80]!r} is neither an address nor a host name; give no port")
        return (host,)
    if not listen.is_any:
        return (listen.host,)
    hosts = tuple(host for host in _own_addresses() if listen.host == "::" or ":" not in host)
    if not hosts:
        raise UsageError(f"{listen} stands for all addresses, and this machine has none; name it with --advertise HOST")
    return hosts


def _own_addresses() -> list[str]:
    """This machine's addresses on its way to other networks."""
    found = list[str]()
    for family, elsewhere in _ELSEWHERE:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as asker:
                asker.connect((elsewhere, 9))
                found.append(str(asker.getsockname()[0]))
        except OSError:
            continue
    return found
