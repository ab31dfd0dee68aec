"""THE op table: each operation's one form, its arguments with their kinds, its shape rule, and its meaning in a line.

The checker, the binding and the tests read this table; a backend offers one function for each row. New operation:
one row here, one function in the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from .errors import Mismatch

MAX_WIDTH = 1 << 20  #: values a row
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")

#: Refused as operations, with a word of why: a definition has no control flow and opens nothing.
REFUSED_WORDS = frozenset(
    "if else elif while for loop do switch case goto break continue return call def exec eval import include "
    "open read write http socket env system shell lambda".split()
)


class Kind(Enum):
    """What an argument's position takes."""

    READ = "r"  # a register that is read
    CHANGE = "r!"  # a register that is changed in place
    CHOSEN = "w"  # the ids and weights that top_k gave
    MATRIX = "T"
    VECTOR = "T "  # a tensor of one row
    NUMBER = "n"
    COUNT = "n "  # a whole number from 1 up
    WIDTH = "width"  # a count, `rest`, or `half`
    WORD = "word"

    @property
    def is_register(self) -> bool:
        """Whether the position takes a register."""
        return self in (Kind.READ, Kind.CHANGE, Kind.CHOSEN)

    @property
    def is_tensor(self) -> bool:
        """Whether the position takes a tensor."""
        return self in (Kind.MATRIX, Kind.VECTOR)


@dataclass(frozen=True, slots=True)
class Arg:
    """One argument: its name (the same in the reference function) and its kind."""

    name: str
    kind: Kind

    @property
    def is_matrix(self) -> bool:
        """Whether the argument stays quantised; other tensors are dequantised once, when a model is bound."""
        return self.kind is Kind.MATRIX


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """A row of the table. `results`: 0 in place, 1, or None for as many as there are widths."""

    name: str
    meaning: str
    positional: tuple[Arg, ...]
    named: tuple[Arg, ...] = ()
    results: int | None = 0
    facts: Mapping[str, str] = field(
        default_factory=dict
    )  #: numbers that the op itself reads from the metadata, as a definition writes them
    words: Mapping[str, tuple[str, tuple[str, ...]]] = field(
        default_factory=dict
    )  #: words likewise, with those that are known
    rule: Rule
    off: tuple[str, float] | None = None  #: (argument, value) at which the op does nothing
    on_weights: bool = False  #: may change what top_k gave: its weights
    needs_rows: bool = False  #: reads tokens, positions or the sequences' memory
    knows_layer: bool = False  #: is told its layer's index
    has_memory: bool = False  #: owns a slot of memory for each layer and sequence
    variadic: bool = False  #: the last positional argument repeats
    sections: tuple[str, ...] = ("prologue", "block", "epilogue")

    @property
    def form(self) -> str:
        """How the op is written, for messages."""
        args = ", ".join(a.name for a in self.positional) + (", ..." if self.variadic else "")
        named = ", ".join(f"{a.name}: ..." for a in self.named)
        target = {0: "", 1: "dst = ", None: "a, b = "}[self.results]
        return f"{target}{self.name}({args}{'; ' + named if named else ''})"


def _by(dims: tuple[int, ...]) -> str:
    return " x ".join(map(str, dims))


def _same(s: Shapes) -> tuple[Register, ...]:
    return ()


def _embed(s: Shapes) -> tuple[Register, ...]:
    if len(s.dims["weight"]) != 2:
        raise Mismatch("weight", f"has dimensions {_by(s.dims['weight'])}; an embedding has 2")
    return (Register(s.dims["weight"][0]),)


def _rms_norm(s: Shapes) -> tuple[Register, ...]:
    s.vector("weight", s.width("x"))
    return (s.registers["x"],)


def _matmul(s: Shapes) -> tuple[Register, ...]:
    dims, width = s.dims["weight"], s.width("x")
    if len(dims) > 2:
        raise Mismatch("weight", f"has dimensions {_by(dims)}; a matrix has 2, a single output row 1")
    if dims[0] != width:
        raise Mismatch("weight", f"takes {dims[0]} inputs and the register has {width}")
    return (Register(dims[1] if len(dims) == 2 else 1, s.registers["x"].last),)


def _copy(s: Shapes) -> tuple[Register, ...]:
    return (s.registers["x"],)


def _last(s: Shapes) -> tuple[Register, ...]:
    return (Register(s.width("x"), last=True),)


def _heads(s: Shapes, register: str, heads: int) -> int:
    width = s.width(register)
    if width % heads:
        raise Mismatch(register, f"has {width} values, no multiple of {heads} heads")
    return width // heads


def _attention(s: Shapes) -> tuple[Register, ...]:
    heads, kv_heads = s.count("heads"), s.count("kv_heads")
    if heads % kv_heads:
        raise Mismatch("", f"{heads} heads are no multiple of {kv_heads} kv heads")
    key = _heads(s, "k", kv_heads)
    if _heads(s, "q", heads) != key:
        raise Mismatch("q", f"has {_heads(s, 'q', heads)} values a head and k has {key}")
    if "sinks" in s.dims:
        s.vector("sinks", heads)
    return (Register(heads * _heads(s, "v", kv_heads)),)


def _top_k(s: Shapes) -> tuple[Register, ...]:
    count, width = s.count("count"), s.width("scores")
    if count > width:
        raise Mismatch("count", f"is {count}, and there are {width} to choose from")
    if "weights" in s.registers and s.width("weights") != width:
        raise Mismatch("weights", f"has {s.width('weights')} values and the scores have {width}")
    return (Register(count, s.registers["scores"].last, choices_of=width),)


def _experts(s: Shapes) -> tuple[Register, ...]:
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


def _pair(s: Shapes) -> tuple[Register, ...]:
    x, y = s.registers["x"], s.registers["y"]
    if x.width != y.width:
        raise Mismatch("y", f"has {y.width} values and the first register has {x.width}")
    return ()


def _mul(s: Shapes) -> tuple[Register, ...]:
    return () if s.width("y") == 1 else _pair(s)


def _add_bias(s: Shapes) -> tuple[Register, ...]:
    s.vector("bias", s.width("x"))
    return ()


def _norm_heads(s: Shapes) -> tuple[Register, ...]:
    s.vector("weight", _heads(s, "x", s.count("heads")))
    return ()


def _rope(s: Shapes) -> tuple[Register, ...]:
    head, dims = _heads(s, "x", s.count("heads")), s.count("dimensions")
    if dims % 2 or dims > head:
        raise Mismatch("", f"rotates {dims} values of a head; an even number of at most {head} is needed")
    if s.numbers["base"] <= 0 or s.numbers["factor"] <= 0:
        raise Mismatch("", f"base {s.numbers['base']:g} and factor {s.numbers['factor']:g} must be above 0")
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


def _split(s: Shapes) -> tuple[Register, ...]:
    unit = int(s.numbers.get("unit", 1))
    return tuple(Register(w, s.registers["x"].last) for w in _cut(s.width("x"), s.widths, unit))


def _split_heads(s: Shapes) -> tuple[Register, ...]:
    heads = s.count("heads")
    cut = _cut(_heads(s, "x", heads), s.widths, 1)
    return tuple(Register(heads * w, s.registers["x"].last) for w in cut)


_X, _X_CHANGED = Arg("x", Kind.READ), Arg("x", Kind.CHANGE)
_MATRIX, _VECTOR = Arg("weight", Kind.MATRIX), Arg("weight", Kind.VECTOR)
_EPS = {"eps": "attention.layer_norm_rms_epsilon"}
_ROPE_FACTS = {
    "dimensions": "rope.dimension_count | head_dim",
    "base": "rope.freq_base | 10000",
    "factor": "rope.scaling.factor | rope.scale_linear | 1",
    "original_context": "rope.scaling.original_context_length | context_length | 0",
    "beta_fast": "rope.scaling.yarn_beta_fast | 32",
    "beta_slow": "rope.scaling.yarn_beta_slow | 1",
    "log_multiplier": "rope.scaling.yarn_log_multiplier | 0",
    "attn_factor": "rope.scaling.attn_factor | 1",
}


def _rope_row(name: str, pairs: str) -> Op:
    return Op(
        name=name,
        meaning=f"rotate {pairs} of each head by angles of the row's position",
        positional=(_X_CHANGED, Arg("heads", Kind.COUNT)),
        named=(Arg("base", Kind.NUMBER), Arg("factor", Kind.NUMBER), Arg("freqs", Kind.VECTOR)),
        facts=_ROPE_FACTS,
        words={"scaling": ("rope.scaling.type | linear", ("none", "linear", "yarn"))},
        rule=_rope,
        needs_rows=True,
    )


def _unary(name: str, meaning: str) -> Op:
    return Op(name=name, meaning=meaning, positional=(_X_CHANGED,), rule=_same, on_weights=True)


_ROWS = (
    Op(
        name="embed",
        meaning="the tensor's row of each token",
        positional=(_MATRIX,),
        results=1,
        rule=_embed,
        needs_rows=True,
        sections=("prologue", "block"),
    ),
    Op(
        name="rms_norm",
        meaning="x / sqrt(mean(x * x) + eps) * weight",
        positional=(_X, _VECTOR),
        results=1,
        facts=_EPS,
        rule=_rms_norm,
    ),
    Op(
        name="matmul",
        meaning="weight times x; a 1-D weight is one output row",
        positional=(_X, _MATRIX),
        results=1,
        rule=_matmul,
    ),
    Op(
        name="copy",
        meaning="the same values in a register of their own",
        positional=(_X,),
        results=1,
        rule=_copy,
    ),
    Op(
        name="last",
        meaning="the rows whose logits are wanted",
        positional=(_X,),
        results=1,
        rule=_last,
        needs_rows=True,
        sections=("epilogue",),
    ),
    Op(
        name="attention",
        meaning="causal attention over the sequence's keys and values",
        positional=(Arg("q", Kind.READ), Arg("k", Kind.READ), Arg("v", Kind.READ)),
        named=(
            Arg("window", Kind.NUMBER),
            Arg("sinks", Kind.VECTOR),
            Arg("scale", Kind.NUMBER),
            Arg("scale_width", Kind.NUMBER),
            Arg("kv_heads", Kind.COUNT),
            Arg("softcap", Kind.NUMBER),
        ),
        results=1,
        facts={"heads": "attention.head_count", "kv_heads": "attention.head_count_kv | attention.head_count"},
        rule=_attention,
        needs_rows=True,
        has_memory=True,
        sections=("block",),
    ),
    Op(
        name="top_k",
        meaning="ids of the largest scores, descending, ties to the lower id, with their weights",
        positional=(Arg("scores", Kind.READ), Arg("count", Kind.COUNT)),
        named=(Arg("weights", Kind.READ),),
        results=1,
        rule=_top_k,
        knows_layer=True,
        needs_rows=True,
        sections=("block",),
    ),
    Op(
        name="experts",
        meaning="the chosen experts' feed-forwards, merged by their weights; leaves the backbone",
        positional=(
            _X,
            Arg("w", Kind.CHOSEN),
            Arg("gate", Kind.MATRIX),
            Arg("up", Kind.MATRIX),
            Arg("down", Kind.MATRIX),
            Arg("activation", Kind.WORD),
        ),
        named=(Arg("gate_bias", Kind.MATRIX), Arg("up_bias", Kind.MATRIX), Arg("down_bias", Kind.MATRIX)),
        results=1,
        rule=_experts,
        sections=("block",),
    ),
    Op(name="add", meaning="x + y", positional=(_X_CHANGED, Arg("y", Kind.READ)), rule=_pair),
    Op(
        name="mul",
        meaning="x * y; a y of width 1 scales the row",
        positional=(_X_CHANGED, Arg("y", Kind.READ)),
        rule=_mul,
    ),
    Op(
        name="scale",
        meaning="x * factor",
        positional=(_X_CHANGED, Arg("factor", Kind.NUMBER)),
        rule=_same,
        off=("factor", 1),
        on_weights=True,
    ),
    Op(
        name="softcap",
        meaning="cap * tanh(x / cap)",
        positional=(_X_CHANGED, Arg("cap", Kind.NUMBER)),
        rule=_same,
        off=("cap", 0),
    ),
    Op(name="add_bias", meaning="x + bias", positional=(_X_CHANGED, Arg("bias", Kind.VECTOR)), rule=_add_bias),
    Op(
        name="norm_heads",
        meaning="rms_norm of each head by one weight",
        positional=(_X_CHANGED, _VECTOR, Arg("heads", Kind.COUNT)),
        facts=_EPS,
        rule=_norm_heads,
    ),
    _rope_row("rope", "halves (i, i + n/2)"),
    _rope_row("rope_pairs", "neighbours (2i, 2i+1)"),
    _unary("softmax", "exp(x - max) / sum over the row"),
    _unary("sigmoid", "1 / (1 + exp(-x))"),
    _unary("silu", "x * sigmoid(x)"),
    _unary("gelu", "x / 2 * (1 + erf(x / sqrt(2)))"),
    _unary("gelu_tanh", "x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))"),
    _unary("relu", "max(x, 0)"),
    Op(
        name="normalize",
        meaning="chosen weights divided by their sum, at least 2^-14",
        positional=(Arg("w", Kind.CHOSEN),),
        rule=_same,
    ),
    Op(
        name="split",
        meaning="the row cut into pieces of the given widths",
        positional=(_X, Arg("width", Kind.WIDTH)),
        named=(Arg("unit", Kind.COUNT),),
        results=None,
        rule=_split,
        variadic=True,
    ),
    Op(
        name="split_heads",
        meaning="each head cut into pieces of the given widths",
        positional=(_X, Arg("heads", Kind.COUNT), Arg("width", Kind.WIDTH)),
        results=None,
        rule=_split_heads,
        variadic=True,
    ),
)

OPS: Mapping[str, Op] = {op.name: op for op in _ROWS}
