"""Definitions bound to a model: conditions, numbers, shapes, slots, limits; all problems in one go."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from definitions import bind_problems, bound, dims, metadata, text

from archdefs import ArchdefError, Program
from archdefs.errors import did_you_mean

ATTENTION = """
h = rms_norm(x, blk.{i}.norm.weight)
q = matmul(h, blk.{i}.q.weight)
k = matmul(h, blk.{i}.k.weight)
v = matmul(h, blk.{i}.v.weight)
"""
EXPERTS = """
s = matmul(x, blk.{i}.router.weight)
softmax(s)
w = top_k(s, expert_used_count)
normalize(w)
d = experts(x, w, blk.{i}.gate.weight, blk.{i}.up.weight, blk.{i}.down.weight, silu)
"""


def ops(program: Program, layer: int = 0) -> list[str]:
    return [step.op for step in program.layers[layer]]


def test_a_program_is_flat_and_resolved(tmp_path: Path) -> None:
    program = bound(tmp_path, text(ATTENTION + "a = attention(q, k, v)\nadd(x, a)"))
    assert len(program.layers) == 2
    assert ops(program) == ["rms_norm", "matmul", "matmul", "matmul", "attention", "add"]
    norm, q, *_, attention, add = program.layers[1]
    assert norm.tensors == {"weight": "blk.1.norm.weight"}
    assert norm.constants == {"eps": 1e-6}
    assert attention.constants == {"heads": 2, "kv_heads": 1}
    assert attention.memory == 1  # a memory of its own for each layer
    assert program.memories == 2
    assert (attention.kept, add.kept) == (4 + 4, 0)  # k and v
    assert add.inputs[0] == add.outputs[0] == 0  # x is slot 0
    assert attention.inputs[0] == q.outputs[0]
    assert program.warnings[0].startswith(str(tmp_path))
    assert "that no step uses: blk.0.down.weight" in program.warnings[0]


def test_slots_are_reused(tmp_path: Path) -> None:
    lines = "\n".join(f"a{n} = copy(x)\nadd(x, a{n})" for n in range(20))
    program = bound(tmp_path, text(f"\n{lines}"))
    assert len(program.slot_widths) == 3  # x, one for all the copies, logits


def test_the_wait_stands_before_the_first_reader(tmp_path: Path) -> None:
    program = bound(tmp_path, text(EXPERTS + "e = copy(x)\nrelu(e)\nadd(d, e)\nadd(x, d)"))
    assert ops(program)[-6:] == ["experts", "copy", "relu", "collect", "add", "add"]
    experts, _, _, collect = program.layers[0][-6:-2]
    assert collect.inputs == experts.outputs
    unread = bound(tmp_path, text(EXPERTS))
    assert ops(unread)[-2:] == ["experts", "collect"]


def test_a_slot_in_flight_is_not_given_away(tmp_path: Path) -> None:
    program = bound(tmp_path, text(EXPERTS + "\n".join(f"e{n} = copy(x)" for n in range(9)) + "\nadd(x, d)"))
    steps = program.layers[0]
    at = next(i for i, s in enumerate(steps) if s.op == "experts")
    flying = steps[at].outputs[0]
    until = next(i for i, s in enumerate(steps) if s.op == "collect")
    assert all(flying not in (*s.inputs, *s.outputs) for s in steps[at + 1 : until])


def test_weights_of_what_was_chosen_change_in_place(tmp_path: Path) -> None:
    program = bound(tmp_path, text(EXPERTS))
    flags = {step.op: step.on_weights for step in program.layers[0]}
    assert flags["normalize"] is True
    assert flags["softmax"] is False
    softmax_after = text(EXPERTS.replace("normalize(w)", "softmax(w)").replace("softmax(s)\n", ""))
    assert next(s for s in bound(tmp_path, softmax_after).layers[0] if s.op == "softmax").on_weights


@pytest.mark.parametrize(
    ("condition", "meta", "shapes", "layers"),
    [
        ("", {}, {}, [0, 1]),
        (" layers 1/2", {}, {}, [1]),
        (" layers 0,1/p", {}, {}, [0, 1]),
        (" with blk.{i}.extra", {}, {"blk.1.extra": (8,)}, [1]),
        (" without blk.{i}.extra", {}, {"blk.1.extra": (8,)}, [0]),
        (" where flag", {"flag": 1}, {}, [0, 1]),
        (" where flag", {"flag": False}, {}, []),
        (" where flag", {}, {}, []),
        (" where not flag", {}, {}, [0, 1]),
        (" where flag", {"flag": [True, False]}, {}, [0]),
        (" where flag = 3", {"flag": np.array([3, 4])}, {}, [0]),
        (" where flag = 3", {}, {}, []),
        (" where not flag = 3", {}, {}, [0, 1]),
        (" where kind = yarn", {"kind": "yarn"}, {}, [0, 1]),
        (" where kind = yarn", {"kind": "linear"}, {}, []),
        (" where head_count = 2", {}, {}, [0, 1]),
        (" with blk.{i}.extra layers 0/2", {}, {"blk.1.extra": (8,)}, []),
    ],
)
def test_conditions(tmp_path: Path, condition: str, meta: dict, shapes: dict, layers: list[int]) -> None:  # type: ignore[type-arg]
    content = text("\nrelu(x)", f"{condition}\nsilu(x)", head="arch tiny\nkind decoder\nparam p 2\n")
    program = bound(tmp_path, content, metadata(**meta), dims() | shapes)
    assert [i for i in range(2) if "silu" in ops(program, i)] == layers
    assert any("runs for no layer" in w for w in program.warnings) == (not layers)


@pytest.mark.parametrize(
    ("written", "meta", "value"),
    [
        ("2.5", {}, 2.5),
        ("p", {}, 0.25),
        ("head_count", {}, 2),
        ("attention.head_count", {}, 2),
        ("block_count", {}, 2),
        ("absent | 3", {}, 3),
        ("absent | head_count", {}, 2),
        ("sqrt(embedding_length)", {}, float(np.float32(np.sqrt(8)))),
        ("sqrt(absent) | 7", {}, 7),
        ("inverse(head_count)", {}, 0.5),
        ("inverse(s)", {"s": 3.0}, float(np.float32(1) / np.float32(3))),
        ("head_dim", {}, 4),
        ("head_dim", {"attention__key_length": 6}, 6),
        ("embedding_per_head", {"attention__key_length": 6}, 4),
        ("yarn_score_scale | 9", {}, 1),
        (
            "yarn_score_scale",
            {"rope__scaling__yarn_log_multiplier": 0.1, "rope__scaling__factor": 40.0},
            (1 + 0.1 * np.log(40)) ** 2,
        ),
        ("entries", {"entries": np.array([0.5, 0.75], np.float32)}, 0.5),
    ],
)
def test_numbers(tmp_path: Path, written: str, meta: dict, value: float) -> None:  # type: ignore[type-arg]
    content = text(f"\nscale(x, {written})", head="arch tiny\nkind decoder\nparam p 0.25\n")
    (step,) = [s for s in bound(tmp_path, content, metadata(**meta)).layers[0] if s.op == "scale"] or [None]
    assert (step.constants["factor"] if step else 1) == pytest.approx(value, rel=1e-12)


def test_an_operation_whose_number_is_off_does_nothing(tmp_path: Path) -> None:
    assert ops(bound(tmp_path, text("\nscale(x, absent | 1)\nsoftcap(x, absent | 0)\nrelu(x)"))) == ["relu"]


def test_none_counts_as_not_written(tmp_path: Path) -> None:
    content = text("\nrope(x, head_count; freqs: rope_freqs.weight | none)")
    assert "freqs" not in bound(tmp_path, content).layers[0][0].tensors
    with_freqs = dims() | {"rope_freqs.weight": (2,)}
    assert bound(tmp_path, content, None, with_freqs).layers[0][0].tensors == {"freqs": "rope_freqs.weight"}


def test_tensor_alternatives_take_the_first_that_is_present(tmp_path: Path) -> None:
    content = text("\nrelu(x)").replace("matmul(x, output.weight)", "matmul(x, output.weight | token_embd.weight)")
    shapes = dims()
    del shapes["output.weight"]
    assert bound(tmp_path, content, None, shapes).epilogue[-1].tensors == {"weight": "token_embd.weight"}


def test_rope_reads_its_scaling_from_the_metadata(tmp_path: Path) -> None:
    content = text("\nrope(x, head_count)\nrope_pairs(x, head_count; base: 7, factor: 1)")
    plain, given = bound(tmp_path, content).layers[0]
    assert (plain.constants["base"], plain.constants["factor"]) == (10000, 1)
    assert (plain.constants["dimensions"], plain.constants["scaling"]) == (4, "linear")
    keys = metadata(rope__freq_base=5e5, rope__scaling__type="yarn", rope__scaling__factor=4.0, rope__dimension_count=2)
    scaled, given = bound(tmp_path, content, keys).layers[0]
    assert (scaled.constants["base"], scaled.constants["factor"], scaled.constants["scaling"]) == (5e5, 4.0, "yarn")
    assert (given.constants["base"], given.constants["factor"], given.constants["dimensions"]) == (7, 1, 2)


@pytest.mark.parametrize(
    ("block", "meta", "shapes", "problem"),
    [
        ("h = rms_norm(x, blk.{i}.norn.weight)", {}, {}, "6: layer 0: the model has no tensor blk.0.norn.weight; did you mean 'blk.0.norm.weight'? (and in 1 more layers)"),
        ("h = rms_norm(x, blk.{i}.k.weight)", {}, {}, "6: layer 0: rms_norm: blk.0.k.weight has 8 x 4 values where 8 are needed (and in 1 more layers)"),
        ("h = matmul(x, blk.{i}.down.weight)", {}, {}, "6: layer 0: matmul: blk.0.down.weight has dimensions 16 x 8 x 4; a matrix has 2, a single output row 1 (and in 1 more layers)"),
        ("h = matmul(x, blk.{i}.q.weight)", {}, {"blk.1.q.weight": (16, 8)}, "6: layer 1: matmul: blk.1.q.weight takes 16 inputs and the register has 8"),
        ("h = matmul(x, blk.{i}.k.weight)\nadd(x, h)", {}, {}, "7: layer 0: add: register 'h' has 4 values and the first register has 8 (and in 1 more layers)"),
        ("rope(x, 3)", {}, {}, "6: layer 0: rope: register 'x' has 8 values, no multiple of 3 heads (and in 1 more layers)"),
        ("rope(x, head_count)", {"rope__dimension_count": 6}, {}, "6: layer 0: rope: rotates 6 values of a head; an even number of at most 4 is needed (and in 1 more layers)"),
        ("rope(x, head_count)", {"rope__scaling__type": "longrope"}, {}, "6: layer 0: rope: rope.scaling.type is 'longrope'; known are none, linear, yarn (and in 1 more layers)"),
        ("rope(x, head_count)", {"rope__freq_base": 0.0}, {}, "6: layer 0: rope: base 0 must be at least 1 and factor 1 above 0 (and in 1 more layers)"),
        ("rope(x, head_cuont)", {}, {}, "6: layer 0: the model has no key tiny.head_cuont (nor tiny.attention.head_cuont); did you mean 'head_count'? (and in 1 more layers)"),
        ("rope(x, head_count)", {"attention__head_count": 0}, {}, "6: layer 0: a whole number from 1 up is needed here, not 0 (and in 1 more layers)"),
        ("a = attention(x, x, x; kv_heads: 2, window: w)", {"w": 0.5}, {}, "6: layer 0: attention: window is 0.5; a whole number of positions is needed, or 0 for all (and in 1 more layers)"),
        ("a = attention(x, x, x; kv_heads: 2, scale_width: w)", {"w": -1}, {}, "6: layer 0: attention: scale_width is -1; a width is above 0 (and in 1 more layers)"),
        ("scale(x, word)", {"word": "w"}, {}, "6: layer 0: word is the word 'w' where a number is needed (and in 1 more layers)"),
        ("scale(x, bad)", {"bad": float("nan")}, {}, "6: layer 0: bad is nan, not a finite number (and in 1 more layers)"),
        ("scale(x, short)", {"short": [2.0]}, {}, "6: layer 1: tiny.short has 1 entries and none for layer 1"),
        ("scale(x, inverse(zero))", {"zero": 0.0}, {}, "6: layer 0: inverse(zero): the value is 0 (and in 1 more layers)"),
        ("scale(x, sqrt(neg))", {"neg": -1.0}, {}, "6: layer 0: sqrt(neg): -1 is below 0 (and in 1 more layers)"),
        ("s = matmul(x, blk.{i}.router.weight)\nw = top_k(s, 5)", {}, {}, "7: layer 0: top_k: count is 5, and there are 4 to choose from (and in 1 more layers)"),
        ("s = matmul(x, blk.{i}.router.weight)\nw = top_k(s, 2)\nadd(x, w)", {}, {}, "8: layer 0: add: register 'w' holds chosen experts; only experts() and operations on their weights take it (and in 1 more layers)"),
        ("normalize(x)", {}, {}, "6: layer 0: normalize: register 'x' does not hold what top_k gives (and in 1 more layers)"),
        ("a, b = split(x, 3, 4)", {}, {}, "6: layer 0: split: width cannot cut 8 values into 3 x 4 of 1 (and in 1 more layers)"),
    ],
)  # fmt: skip
def test_shapes_and_numbers_are_checked(tmp_path: Path, block: str, meta: dict, shapes: dict, problem: str) -> None:  # type: ignore[type-arg]
    assert bind_problems(tmp_path, text(f"\n{block}"), metadata(**meta), dims() | shapes) == [problem]


@pytest.mark.parametrize(
    ("tensor", "shape", "problem"),
    [
        ("gate", (4, 16, 4), "takes 4 inputs and the register has 8"),
        ("up", (8, 12, 4), "is 8 x 12 x 4 and the gate is 8 x 16 x 4"),
        ("down", (12, 8, 4), "takes 12 inputs and the gate gives 16"),
        ("down", (16, 8, 3), "holds 4 experts (down: 3) and the router chooses from 4"),
        ("gate", (8, 16), "has dimensions 8 x 16; experts have 3: inputs, outputs, experts"),
    ],
)
def test_expert_shapes(tmp_path: Path, tensor: str, shape: tuple[int, ...], problem: str) -> None:
    (found,) = bind_problems(tmp_path, text(EXPERTS), None, dims() | {f"blk.1.{tensor}.weight": shape})
    assert found.endswith(problem)


def test_eps_below_zero_is_refused(tmp_path: Path) -> None:
    found = bind_problems(tmp_path, text("\nrelu(x)"), metadata(attention__layer_norm_rms_epsilon=-1.0))
    assert found == ["8: rms_norm: eps is -1; from 0 to 1 is possible"]


def test_attention_shapes(tmp_path: Path) -> None:
    content = text(ATTENTION + "a = attention(q, k, v)")
    (found,) = bind_problems(tmp_path, content, metadata(attention__head_count=3))
    assert "6 heads" not in found
    assert "register 'q' has 8 values, no multiple of 3 heads" in found
    (found,) = bind_problems(tmp_path, content, metadata(attention__head_count_kv=4))
    assert "2 heads are no multiple of 4 kv heads" in found


def test_split_gives_several_results(tmp_path: Path) -> None:
    program = bound(
        tmp_path, text("\na, b = split(x, 1, rest; unit: 2)\nc, d = split_heads(x, head_count, half, half)")
    )
    split, by_heads = program.layers[0]
    assert (split.constants["widths"], by_heads.constants["widths"]) == ((2, 6), (4, 4))
    assert len(set(split.outputs)) == 2


def test_a_register_is_gone_at_the_end_of_its_layer(tmp_path: Path) -> None:
    content = text(" layers 0/2\nh = copy(x)", "\nadd(x, h)")
    assert bind_problems(tmp_path, content) == [
        "8: layer 1: register 'h' is read, and no step of this layer's own list has set it"
    ]


def test_a_layer_that_runs_no_block(tmp_path: Path) -> None:
    assert bind_problems(tmp_path, text(" layers 0/2\nrelu(x)")) == ["5: layer 1 runs no block"]


def test_rows_kept_by_last_do_not_meet_all_rows(tmp_path: Path) -> None:
    epilogue = "epilogue\n  y = last(x)\n  add(x, y)\n  logits = matmul(y, output.weight)\n"
    (found,) = bind_problems(tmp_path, text("\nrelu(x)", epilogue=epilogue))
    assert found.endswith("one register holds all rows and the other only those that last() kept")


def test_logits_of_all_rows_are_refused(tmp_path: Path) -> None:
    epilogue = "epilogue\n  logits = matmul(x, output.weight)\n"
    (found,) = bind_problems(tmp_path, text("\nrelu(x)", epilogue=epilogue))
    assert found == "7: logits holds all rows; keep those that are wanted before the head: x = last(x)"


def test_layers_beyond_the_count_are_told_of(tmp_path: Path) -> None:
    program = bound(tmp_path, text("\nrelu(x)"), metadata(block_count=1))
    assert any("and 11 more" in warning for warning in program.warnings)  # of 16: both layers'


def test_a_param_with_the_name_of_a_key_is_an_error(tmp_path: Path) -> None:
    content = text("\nscale(x, head_count)", head="arch tiny\nkind decoder\nparam head_count 3\n")
    (found,) = bind_problems(tmp_path, content)
    assert found.startswith("3: param head_count has the name of the model's key tiny.attention.head_count")


def test_513_steps_from_several_blocks_are_refused(tmp_path: Path) -> None:
    half = "\n" + "\n".join(["relu(x)"] * 256)
    assert bind_problems(tmp_path, text(half, half)) == []
    assert bind_problems(tmp_path, text(half, half, "\nrelu(x)")) == [
        "520: layer 0 has 513 steps; at most 512 a layer are allowed (and in 1 more layers)"
    ]


def test_more_than_2_to_the_20_values_a_row_are_refused(tmp_path: Path) -> None:
    content = text("\nh = matmul(x, blk.{i}.q.weight)")
    wide = dims() | {"blk.0.q.weight": (8, 1 << 20)}
    assert bind_problems(tmp_path, content, None, wide) == []
    (found,) = bind_problems(tmp_path, content, None, wide | {"blk.0.q.weight": (8, (1 << 20) + 1)})
    assert found == "6: layer 0: matmul: gives 1048577 values a row; at most 1048576 are allowed"


@pytest.mark.parametrize(
    ("count", "word"), [(0, "0 layers"), (5000, "5000 layers"), (1 << 62, "layers"), (None, "no key")]
)
def test_hostile_layer_counts(tmp_path: Path, count: int | None, word: str) -> None:
    found = bind_problems(tmp_path, text("\nrelu(x)"), metadata(block_count=count))
    assert len(found) == 1
    assert word in found[0]


def test_a_thousand_layers_without_tensors_are_refused_soon(tmp_path: Path) -> None:
    # Each layer misses every tensor; what is near is looked for once, not a thousand times.
    many = {f"other.{n}.weight": (8,) for n in range(500)} | dims()
    with mock.patch("archdefs.facts.did_you_mean", wraps=did_you_mean) as near:
        found = bind_problems(tmp_path, text(ATTENTION), metadata(block_count=1000), many)
    assert all("(and in 997 more layers)" in problem for problem in found)
    assert near.call_count == len(found) == 4


def test_layers_for_prediction_are_left_out(tmp_path: Path) -> None:
    program = bound(tmp_path, text("\nrelu(x)"), metadata(nextn_predict_layers=1))
    assert len(program.layers) == 1
    assert not any("blk.1" in w for w in program.warnings)


def test_all_problems_of_a_model_come_at_once(tmp_path: Path) -> None:
    found = bind_problems(
        tmp_path, text("\nh = rms_norm(x, blk.{i}.a)\nadd(x, h)\ng = rms_norm(x, blk.{i}.b)\nscale(x, c)")
    )
    assert [f.split(":")[0] for f in found] == ["6", "8", "9"]  # line 7 follows from line 6 and is not blamed


def test_second_experts_in_a_layer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArchdefError, match=r"a second experts\(\)"):
        bound(
            tmp_path,
            text(EXPERTS + "e = experts(x, w, blk.{i}.gate.weight, blk.{i}.up.weight, blk.{i}.down.weight, silu)"),
        )
