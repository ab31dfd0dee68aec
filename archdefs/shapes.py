"""The shape rule of each operation: what its results hold, or a Mismatch that says which argument does not fit.

Knows dimensions and numbers, neither arrays nor the language.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .errors import Mismatch


@dataclass(frozen=True, slots=True)
class Register:
    """What a register holds at a step: `width` values a row, for all rows or those that `last` kept."""

    width: int
    last: bool = False
    choices_of: int = 0  #: for what top_k gives: how many were chosen from


@dataclass(frozen=True, slots=True)
class Shapes:
    """An operation's resolved arguments, as its shape rule sees them."""

    registers: Mapping[str, Register]
    dims: Mapping[str, tuple[int, ...]]
    numbers: Mapping[str, float]
    widths: tuple[int | str, ...] = ()

    def width(self, name: str) -> int:
        """Values a row of a register argument."""
        return self.registers[name].width

    def count(self, name: str) -> int:
        """A number that was checked to be whole."""
        return int(self.numbers[name])

    def vector(self, name: str, length: int) -> None:
        """Demand a tensor of `length` values in one row."""
        dims = self.dims[name]
        if dims[0] != length or any(d != 1 for d in dims[1:]):
            raise Mismatch(name, f"has {_by(dims)} values where {length} are needed")


Rule = Callable[[Shapes], tuple[Register, ...]]


def _by(dims: tuple[int, ...]) -> str:
    return " x ".join(map(str, dims))


# The rules, each by the name of the operation that it is for; what an operation changes in place is no result.


def same(s: Shapes) -> tuple[Register, ...]:
    return ()


def embed(s: Shapes) -> tuple[Register, ...]:
    if len(s.dims["weight"]) != 2:
        raise Mismatch("weight", f"has dimensions {_by(s.dims['weight'])}; an embedding has 2")
    return (Register(s.dims["weight"][0]),)


def _eps(s: Shapes) -> None:
    if not 0 <= s.numbers["eps"] <= 1:
        raise Mismatch("", f"eps is {s.numbers['eps']:g}; from 0 to 1 is possible")


def rms_norm(s: Shapes) -> tuple[Register, ...]:
    _eps(s)
    s.vector("weight", s.width("x"))
    return (s.registers["x"],)


def matmul(s: Shapes) -> tuple[Register, ...]:
    dims, width = s.dims["weight"], s.width("x")
    if len(dims) > 2:
        raise Mismatch("weight", f"has dimensions {_by(dims)}; a matrix has 2, a single output row 1")
    if dims[0] != width:
        raise Mismatch("weight", f"takes {dims[0]} inputs and the register has {width}")
    return (Register(dims[1] if len(dims) == 2 else 1, s.registers["x"].last),)


def copy(s: Shapes) -> tuple[Register, ...]:
    return (s.registers["x"],)


def last(s: Shapes) -> tuple[Register, ...]:
    return (Register(s.width("x"), last=True),)


def _heads(s: Shapes, register: str, heads: int) -> int:
    width = s.width(register)
    if width % heads:
        raise Mismatch(register, f"has {width} values, no multiple of {heads} heads")
    return width // heads


def attention(s: Shapes) -> tuple[Register, ...]:
    heads, kv_heads = s.count("heads"), s.count("kv_heads")
    if heads % kv_heads:
        raise Mismatch("", f"{heads} heads are no multiple of {kv_heads} kv heads")
    key = _heads(s, "k", kv_heads)
    if _heads(s, "q", heads) != key:
        raise Mismatch("q", f"has {_heads(s, 'q', heads)} values a head and k has {key}")
    if "sinks" in s.dims:
        s.vector("sinks", heads)
    window, scale_width = s.numbers.get("window", 0), s.numbers.get("scale_width", 1)
    if window != int(window) or window < 0:
        raise Mismatch("window", f"is {window:g}; a whole number of positions is needed, or 0 for all")
    if scale_width <= 0:
        raise Mismatch("scale_width", f"is {scale_width:g}; a width is above 0")
    return (Register(heads * _heads(s, "v", kv_heads)),)


def top_k(s: Shapes) -> tuple[Register, ...]:
    count, width = s.count("count"), s.width("scores")
    if count > width:
        raise Mismatch("count", f"is {count}, and there are {width} to choose from")
    if "weights" in s.registers and s.width("weights") != width:
        raise Mismatch("weights", f"has {s.width('weights')} values and the scores have {width}")
    return (Register(count, s.registers["scores"].last, choices_of=width),)


def experts(s: Shapes) -> tuple[Register, ...]:
    gate, up, down = (s.dims[name] for name in ("gate", "up", "down"))
    for name, dims in (("gate", gate), ("up", up), ("down", down)):
        if len(dims) != 3:
            raise Mismatch(name, f"has dimensions {_by(dims)}; experts have 3: inputs, outputs, experts")
    width, experts = s.width("x"), s.registers["w"].choices_of
    if gate[0] != width:
        raise Mismatch("gate", f"takes {gate[0]} inputs and the register has {width}")
    if up != gate:
        raise Mismatch("up", f"is {_by(up)} and the gate is {_by(gate)}")
    if down[0] != gate[1]:
        raise Mismatch("down", f"takes {down[0]} inputs and the gate gives {gate[1]}")
    if gate[2] != experts or down[2] != experts:
        raise Mismatch("gate", f"holds {gate[2]} experts (down: {down[2]}) and the router chooses from {experts}")
    for name, outputs in (("gate_bias", gate[1]), ("up_bias", gate[1]), ("down_bias", down[1])):
        if name in s.dims and s.dims[name] != (outputs, experts):
            raise Mismatch(name, f"is {_by(s.dims[name])} where {outputs} x {experts} is needed")
    return (Register(down[1], s.registers["x"].last),)


def pair(s: Shapes) -> tuple[Register, ...]:
    x, y = s.registers["x"], s.registers["y"]
    if x.width != y.width:
        raise Mismatch("y", f"has {y.width} values and the first register has {x.width}")
    return ()


def mul(s: Shapes) -> tuple[Register, ...]:
    return () if s.width("y") == 1 else pair(s)


def add_bias(s: Shapes) -> tuple[Register, ...]:
    s.vector("bias", s.width("x"))
    return ()


def norm_heads(s: Shapes) -> tuple[Register, ...]:
    _eps(s)
    s.vector("weight", _heads(s, "x", s.count("heads")))
    return ()


def rope(s: Shapes) -> tuple[Register, ...]:
    head, dims = _heads(s, "x", s.count("heads")), s.count("dimensions")
    if dims % 2 or dims > head:
        raise Mismatch("", f"rotates {dims} values of a head; an even number of at most {head} is needed")
    if s.numbers["base"] < 1 or s.numbers["factor"] <= 0:
        base, factor = s.numbers["base"], s.numbers["factor"]
        raise Mismatch("", f"base {base:g} must be at least 1 and factor {factor:g} above 0")
    if "freqs" in s.dims:
        s.vector("freqs", dims // 2)
    return ()


def _cut(total: int, widths: tuple[int | str, ...], unit: int) -> tuple[int, ...]:
    if "half" in widths:
        if widths != ("half", "half") or total % 2:
            raise Mismatch("width", f"half of {total} values: both widths must be 'half' and the number even")
        return (total // 2, total // 2)
    known = sum(int(w) * unit for w in widths if w != "rest")
    if widths.count("rest") > 1 or known > total or ("rest" not in widths and known != total):
        raise Mismatch("width", f"cannot cut {total} values into {_by(tuple(widths))} of {unit}")  # type: ignore[arg-type]
    cut = tuple(total - known if w == "rest" else int(w) * unit for w in widths)
    if 0 in cut:
        raise Mismatch("width", f"cutting {total} values leaves nothing for one result")
    return cut


def split(s: Shapes) -> tuple[Register, ...]:
    unit = int(s.numbers.get("unit", 1))
    return tuple(Register(w, s.registers["x"].last) for w in _cut(s.width("x"), s.widths, unit))


def split_heads(s: Shapes) -> tuple[Register, ...]:
    heads = s.count("heads")
    cut = _cut(_heads(s, "x", heads), s.widths, 1)
    return tuple(Register(heads * w, s.registers["x"].last) for w in cut)
