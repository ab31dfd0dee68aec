"""What the worker's state machine wants done."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.messages import Assign, Failed, Fetch, Goodbye, Ready, Run, Slice


@dataclass(frozen=True, slots=True)
class SendHello:
    """Say what the worker is, over the connection for calls."""


@dataclass(frozen=True, slots=True)
class SendAttach:
    """Name the connection for weights."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send over the connection for calls."""

    message: Ready | Failed | Goodbye


@dataclass(frozen=True, slots=True)
class SendFetch:
    """Ask for a chunk, over the connection for weights."""

    message: Fetch


@dataclass(frozen=True, slots=True)
class Keep:
    """Keep these slices and no others; let go of a layer's experts, where one is named."""

    slices: frozenset[bytes]
    layer: int | None = None


@dataclass(frozen=True, slots=True)
class Check:
    """Hash a slice that lies on this machine; report `slice_right` or `slice_wrong`."""

    piece: Slice
    size: int


@dataclass(frozen=True, slots=True)
class Store:
    """Put a chunk behind what is here of its slice; report `chunk_stored`, and after the last one `slice_right` or
    `slice_wrong`.
    """

    sha256: bytes
    size: int
    offset: int


@dataclass(frozen=True, slots=True)
class Load:
    """Put the assignment's experts together; report `loaded` or `not_loaded`."""

    assign: Assign


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute a call's rows and send them, or say why not."""

    run: Run


@dataclass(frozen=True, slots=True)
class Progress:
    """How much of what is fetched is here."""

    bytes_done: int
    bytes_total: int


@dataclass(frozen=True, slots=True)
class Ignored:
    """Something that was not asked for."""

    reason: str


@dataclass(frozen=True, slots=True)
class End:
    """Leave. An empty reason is somebody's wish, any other an error."""

    reason: str
    may_retry: bool = False  #: nobody said no


Action = SendHello | SendAttach | Send | SendFetch | Keep | Check | Store | Load | Compute | Progress | Ignored | End
