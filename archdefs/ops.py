"""THE op table: each operation's one form, its arguments with their kinds, its shape rule, and its meaning in a line.

The checker, the binding and the tests read this table; a backend offers one function for each row. New operation:
one row here, one function in the reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from . import shapes

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
    rule: shapes.Rule
    off: tuple[str, float] | None = None  #: (argument, value) at which the op does nothing
    on_weights: bool = False  #: may change what top_k gave: its weights
    needs_rows: bool = False  #: reads tokens, positions or the sequences' memory
    knows_layer: bool = False  #: is told its layer's index
    has_memory: bool = False  #: owns a slot of memory for each layer and sequence
    keeps: tuple[str, ...] = ()  #: registers whose rows stay in that memory, for each position of the sequence
    variadic: bool = False  #: the last positional argument repeats
    sections: tuple[str, ...] = ("prologue", "block", "epilogue")

    @property
    def form(self) -> str:
        """How the op is written, for messages."""
        args = ", ".join(a.name for a in self.positional) + (", ..." if self.variadic else "")
        named = ", ".join(f"{a.name}: ..." for a in self.named)
        target = {0: "", 1: "dst = ", None: "a, b = "}[self.results]
        return f"{target}{self.name}({args}{'; ' + named if named else ''})"


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
        rule=shapes.rope,
        needs_rows=True,
    )


def _unary(name: str, meaning: str) -> Op:
    return Op(name=name, meaning=meaning, positional=(_X_CHANGED,), rule=shapes.same, on_weights=True)


_ROWS = (
    Op(
        name="embed",
        meaning="the tensor's row of each token",
        positional=(_MATRIX,),
        results=1,
        rule=shapes.embed,
        needs_rows=True,
        sections=("prologue", "block"),
    ),
    Op(
        name="rms_norm",
        meaning="x / sqrt(mean(x * x) + eps) * weight",
        positional=(_X, _VECTOR),
        results=1,
        facts=_EPS,
        rule=shapes.rms_norm,
    ),
    Op(
        name="matmul",
        meaning="weight times x; a 1-D weight is one output row",
        positional=(_X, _MATRIX),
        results=1,
        rule=shapes.matmul,
    ),
    Op(
        name="copy",
        meaning="the same values in a register of their own",
        positional=(_X,),
        results=1,
        rule=shapes.copy,
    ),
    Op(
        name="last",
        meaning="the rows whose logits are wanted",
        positional=(_X,),
        results=1,
        rule=shapes.last,
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
        rule=shapes.attention,
        needs_rows=True,
        has_memory=True,
        keeps=("k", "v"),
        sections=("block",),
    ),
    Op(
        name="top_k",
        meaning="ids of the largest scores, descending, ties to the lower id, with their weights",
        positional=(Arg("scores", Kind.READ), Arg("count", Kind.COUNT)),
        named=(Arg("weights", Kind.READ),),
        results=1,
        rule=shapes.top_k,
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
        rule=shapes.experts,
        sections=("block",),
    ),
    Op(name="add", meaning="x + y", positional=(_X_CHANGED, Arg("y", Kind.READ)), rule=shapes.pair),
    Op(
        name="mul",
        meaning="x * y; a y of width 1 scales the row",
        positional=(_X_CHANGED, Arg("y", Kind.READ)),
        rule=shapes.mul,
    ),
    Op(
        name="scale",
        meaning="x * factor",
        positional=(_X_CHANGED, Arg("factor", Kind.NUMBER)),
        rule=shapes.same,
        off=("factor", 1),
        on_weights=True,
    ),
    Op(
        name="softcap",
        meaning="cap * tanh(x / cap)",
        positional=(_X_CHANGED, Arg("cap", Kind.NUMBER)),
        rule=shapes.same,
        off=("cap", 0),
    ),
    Op(name="add_bias", meaning="x + bias", positional=(_X_CHANGED, Arg("bias", Kind.VECTOR)), rule=shapes.add_bias),
    Op(
        name="norm_heads",
        meaning="rms_norm of each head by one weight",
        positional=(_X_CHANGED, _VECTOR, Arg("heads", Kind.COUNT)),
        facts=_EPS,
        rule=shapes.norm_heads,
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
        rule=shapes.same,
    ),
    Op(
        name="split",
        meaning="the row cut into pieces of the given widths",
        positional=(_X, Arg("width", Kind.WIDTH)),
        named=(Arg("unit", Kind.COUNT),),
        results=None,
        rule=shapes.split,
        variadic=True,
    ),
    Op(
        name="split_heads",
        meaning="each head cut into pieces of the given widths",
        positional=(_X, Arg("heads", Kind.COUNT), Arg("width", Kind.WIDTH)),
        results=None,
        rule=shapes.split_heads,
        variadic=True,
    ),
)

OPS: Mapping[str, Op] = {op.name: op for op in _ROWS}
