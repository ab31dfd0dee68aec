"""Every message there is: a closed set for each direction. None carries a router's matrix or its scores.

A life: Hello, Welcome, Assign, (Fetch, Chunk)*, Ready, (Run, Rows | Failed)*, Drain, Goodbye. The connection for
weights starts with Attach and carries only Fetch and Chunk. Before all that, over a connection of an invite's key:
Enrol, Enrolled.
"""

from __future__ import annotations

from dataclasses import dataclass

from .capabilities import ClassInfo
from .schema import bounded, exactly

MAX_LAYER = 4096
MAX_EXPERT = 1 << 16
MAX_WIDTH = 1 << 20
MAX_ROWS = 1 << 14
MAX_PAIRS = 1 << 17
MAX_SLICE_BYTES = 1 << 40
MAX_CHUNK_BYTES = 1 << 20
SHA_BYTES = 32
KEY_BYTES = 32
MAX_NAME = 64


# ---- worker to backbone


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of the connection for calls, after each handshake: what the worker is."""

    protocol: int
    build: str
    backend: str
    device: str
    numeric_class: ClassInfo
    wire_dtypes: tuple[str, ...] = bounded(8)
    memory_bytes: int = bounded((1 << 63) - 1)  #: what it may hold of experts; 0 where it sets no bound
    cached: tuple[bytes, ...] = bounded(1 << 14)  #: sha256 of slices that it holds already


@dataclass(frozen=True, slots=True)
class Attach:
    """First message of the connection for weights, of a key that says Hello on the other."""

    protocol: int


@dataclass(frozen=True, slots=True)
class Enrol:
    """The only message that an invite's key may send: the key that the worker will come with from now on."""

    protocol: int
    public_key: bytes = exactly(KEY_BYTES)  #: CURVE, raw
    name: str = bounded(MAX_NAME)  #: that it would like to have; empty: any


@dataclass(frozen=True, slots=True)
class Fetch:
    """Asks for a part of a slice."""

    sha256: bytes = exactly(SHA_BYTES)
    offset: int = bounded(MAX_SLICE_BYTES)
    length: int = bounded(MAX_CHUNK_BYTES)


@dataclass(frozen=True, slots=True)
class Ready:
    """An assignment's experts are loaded."""

    epoch: int
    layer: int = bounded(MAX_LAYER)


@dataclass(frozen=True, slots=True)
class Rows:
    """The answer to a Run. Tensor: rows in the order of the Run's pairs, [pairs, width] float32; or, where the Run's
    were, [pairs, width + 1] float16, the last value of each being the exponent of two by which it is scaled.
    """

    seq: int
    epoch: int
    compute_ns: int  #: of computing alone


@dataclass(frozen=True, slots=True)
class Failed:
    """A Run or an Assign that the worker cannot do. `seq` is 0 for an Assign."""

    seq: int
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The worker leaves."""

    reason: str


# ---- backbone to worker


@dataclass(frozen=True, slots=True)
class Welcome:
    """The worker is accepted, under this name."""

    name: str


@dataclass(frozen=True, slots=True)
class Enrolled:
    """The worker's key may come in from now on, under this name. What is not accepted is Refused."""

    server_key: bytes = exactly(KEY_BYTES)  #: the backbone's, by which the worker knows it again
    name: str = bounded(MAX_NAME)


@dataclass(frozen=True, slots=True)
class Refused:
    """The worker is not accepted; the reason says what would help."""

    reason: str


@dataclass(frozen=True, slots=True)
class Slice:
    """One expert's matrix or bias. A worker with the model file finds it by the tensor's name."""

    expert: int = bounded(MAX_EXPERT)
    part: str = bounded(16)  #: gate, up, down, gate_bias, up_bias, down_bias
    tensor: str = bounded(256)
    type_id: int = bounded(255)  #: ggml's
    rows: int = bounded(MAX_WIDTH)
    cols: int = bounded(MAX_WIDTH)
    sha256: bytes = bounded(SHA_BYTES)  #: of its bytes; empty for a worker that was given the file


@dataclass(frozen=True, slots=True)
class Assign:
    """Experts of a layer to hold from now on, in place of those of earlier epochs."""

    epoch: int
    layer: int = bounded(MAX_LAYER)
    activation: str = bounded(32)
    slices: tuple[Slice, ...] = bounded(1 << 13)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a slice. Tensor: bytes [length] uint8."""

    sha256: bytes = exactly(SHA_BYTES)
    offset: int = bounded(MAX_SLICE_BYTES)


@dataclass(frozen=True, slots=True)
class Run:
    """Compute expert rows. Tensors: x [rows, width] float32, or [rows, width + 1] float16 as in Rows; pairs [pairs, 2]
    int32 of (row of x, expert).
    """

    seq: int
    epoch: int
    layer: int = bounded(MAX_LAYER)


@dataclass(frozen=True, slots=True)
class Drain:
    """Finish what is under way, then leave."""

    reason: str


ToBackbone = Hello | Attach | Enrol | Fetch | Ready | Rows | Failed | Goodbye
ToWorker = Welcome | Enrolled | Refused | Assign | Chunk | Run | Drain
Message = ToBackbone | ToWorker
