"""Definitions read and checked without a model: what is accepted, and each refusal with its place and its fix."""

from __future__ import annotations

from pathlib import Path

import pytest
from definitions import EPILOGUE, HEAD, PROLOGUE, load, problems, text
from hypothesis import given, settings
from hypothesis import strategies as st

from archdefs import OPS, ArchdefError, load_library
from archdefs.syntax import parse

NORM = "h = rms_norm(x, blk.{i}.norm.weight)"


def only(found: list[tuple[int, int, str]]) -> tuple[int, int, str]:
    assert len(found) == 1, found
    return found[0]


def test_a_plain_definition_loads(tmp_path: Path) -> None:
    definition = load(tmp_path, text(f"\n{NORM}\nadd(x, h)"))
    assert definition.name == "tiny"
    assert definition.steps_per_layer == 2
    assert len(definition.sha256) == 64


def test_built_in_definitions_load() -> None:
    library = load_library()
    assert not library.broken
    expected = {"llama", "qwen2", "qwen3", "gemma3", "qwen3moe", "qwen2moe", "olmoe", "granitemoe"}
    assert expected <= set(library.definitions)


@pytest.mark.parametrize(
    ("block", "line", "column", "message"),
    [
        ("siluu(x)", 6, 3, "no operation 'siluu'; did you mean 'silu'?"),
        ("h = silu(x)", 6, 3, "'silu' changes a register in place: write silu(x)"),
        ("rms_norm(x, blk.{i}.norm.weight)", 6, 3, "'rms_norm' gives one result: write dst = rms_norm(x, weight)"),
        ("add(x)", 6, 3, "'add' takes 2 arguments, not 1: add(x, y)"),
        ("add(x, x, x)", 6, 3, "'add' takes 2 arguments, not 3: add(x, y)"),
        ("add(x, y)", 6, 10, "register 'y' is read before it is written"),
        ("add(x, 3)", 6, 10, "'y' is a register here"),
        ("add(x, none)", 6, 10, "'none' can only be the last choice of a named number or tensor"),
        ("scale(x, none)", 6, 12, "'none' can only be the last choice of a named number or tensor"),
        ("scale(x, 1 | 2)", 6, 12, "a number is always present: what stands after it is never reached"),
        ("scale(x, blk.{i}.norm.weight)", 6, 12, "'blk.{i}.norm.weight' is a tensor's name where a number is needed"),
        ("rope(x, 0)", 6, 11, "'heads' is a whole number from 1 up, not 0"),
        ("rope(x, 1.5)", 6, 11, "'heads' is a whole number from 1 up, not 1.5"),
        ("rope(x, 1; bass: 2)", 6, 14, "'rope' has no argument 'bass'; did you mean 'base'?"),
        ("rope(x, 1; base: 2, base: 3)", 6, 23, "'base' is given twice"),
        ("silu(x; base: 2)", 6, 11, "'silu' has no argument 'base'; it takes none"),
        ("silu = copy(x)", 6, 3, "'silu' cannot name a register: lower-case, and no word of the language"),
        ("block = copy(x)", 6, 3, "'block' cannot name a register: lower-case, and no word of the language"),
        ("Ha = copy(x)", 6, 3, "'Ha' cannot name a register: lower-case, and no word of the language"),
        ("a, a = split(x, half, half)", 6, 3, "one register takes two results"),
        ("a, b = split(x, half)", 6, 3, "1 widths for 2 results: write a, b = split(x, width, ...; unit: ...)"),
        ("h = last(x)", 6, 7, "'last' belongs in a epilogue section"),
        ("h = matmul(x, 3)", 6, 17, "'weight' is a tensor's name as the GGUF has it"),
        ("h = matmul(x", 6, 15, "expected ',' after an argument, found the end of the line"),
        ("h = matmul x", 6, 14, "expected '(' after matmul, found 'x'"),
        ("h = copy(x) x", 6, 15, "nothing may follow an operation; found 'x'"),
        ("h = copy(x) ?", 6, 15, "'?' has no meaning here"),
        ("scale(x, log(head_count))", 6, 12, "'log' cannot be called here; only sqrt and inverse can be, on a key"),
    ],
)
def test_each_mistake_is_told_with_its_place(tmp_path: Path, block: str, line: int, column: int, message: str) -> None:
    assert only(problems(tmp_path, text(f"\n{block}"))) == (line, column, message)


def test_activation_of_experts_is_a_known_word(tmp_path: Path) -> None:
    lines = "s = matmul(x, blk.{i}.router.weight)\nw = top_k(s, 2)\nd = experts(x, w, a, b, c, sillu)"
    assert only(problems(tmp_path, text(f"\n{lines}")))[2] == "no activation 'sillu'; did you mean 'silu'?"


REFUSED = (
    "if else elif while for loop do switch case goto break continue return call def exec eval import include open read "
    "write http socket env system shell lambda"
).split()


@pytest.mark.parametrize("word", REFUSED)
def test_control_flow_and_the_outside_are_refused(tmp_path: Path, word: str) -> None:
    assert word not in OPS
    _, _, message = only(problems(tmp_path, text(f"\n{word}(x)")))
    assert message.startswith(f"no operation {word!r}: a definition has no control flow and opens nothing")


def test_all_problems_of_a_file_come_at_once(tmp_path: Path) -> None:
    content = text("\nsiluu(x)\nadd(x, y)", "\nh = matmul(x", epilogue="epilogue\n  y = copy(z)\n")
    assert [line for line, _, _ in problems(tmp_path, content)] == [6, 7, 9, 10, 11]


def test_problem_shows_the_line_with_a_caret(tmp_path: Path) -> None:
    with pytest.raises(ArchdefError) as raised:
        load(tmp_path, text("\nsiluu(x)"))
    place = f"{tmp_path}/tiny.archdef:6:3: no operation 'siluu'; did you mean 'silu'?"
    assert str(raised.value) == f"{place}\n  siluu(x)\n  ^"


def test_of_a_very_long_line_only_the_place_is_shown(tmp_path: Path) -> None:
    with pytest.raises(ArchdefError) as raised:
        load(tmp_path, text("\n" + " " * 5000 + "siluu(x)" + " " * 5000))
    _, shown, caret = str(raised.value).split("\n")
    assert len(shown) <= 200
    assert shown[len(caret) - 1 :].startswith("siluu(x)")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "the file must begin with 'arch NAME'"),
        ("arch tiny\n" + PROLOGUE + "block\n" + EPILOGUE, "'kind decoder' must follow the 'arch' line"),
        (HEAD + "block\n" + EPILOGUE, "'block' cannot come first; the order is prologue, block, epilogue"),
        (HEAD + PROLOGUE + EPILOGUE, "'epilogue' cannot come after 'prologue'; the order is prologue, block, epilogue"),
        (HEAD + PROLOGUE + "block\n", "there is no 'epilogue' section"),
        ("arch tiny\nkind encoder\n", "kind 'encoder' is not known; there is 'decoder'"),
        ("arch a b\nkind decoder\n", "'a b' is no architecture's name"),
        (HEAD + "  x = copy(x)\n" + text("")[len(HEAD) :], "'x' stands before 'prologue'; steps belong to a section"),
        (text("", prologue="prologue\n"), "the prologue must set x, the residual register"),
        (text("", epilogue="epilogue\n"), "the epilogue must set logits, the result"),
        (text("", head=HEAD + "param p\n"), "param p needs a number"),
        (text("", head=HEAD + "param p 1\nparam p 2\n"), "param p is given twice"),
        (text(" layers 6/6"), "a layer's remainder is from 0 to 5, not 6"),
        (text(" layers 0,1/p"), "'p' is no param of this file; a whole number is needed"),
        (text(" layers 1.5/6"), "1.5 is not a whole number"),
        (text(" when x"), "'when' is no condition of a block; there are with, without, layers, where"),
        (text("", epilogue=EPILOGUE.replace("output.weight", "blk.{i}.o")), "'blk.{i}.o': {i} is a layer's index"),
    ],
)
def test_structure_is_checked(tmp_path: Path, content: str, message: str) -> None:
    found = [m for _, _, m in problems(tmp_path, content)]
    assert any(m.startswith(message) for m in found), found


def test_file_name_and_architecture_must_agree(tmp_path: Path) -> None:
    line, column, message = only(problems(tmp_path, text(""), name="other"))
    assert (line, column) == (1, 6)
    assert message.endswith("rename the file to tiny.archdef or the architecture")


def test_architecture_may_begin_with_a_digit_or_hold_a_dash(tmp_path: Path) -> None:
    for name in ("gpt-oss", "3tiny"):
        content = text("", head=f"arch {name}  # a comment\nkind decoder\n")
        assert load(tmp_path, content, name=name).name == name


def test_a_file_of_more_than_64_kib_is_refused(tmp_path: Path) -> None:
    content = text("")
    fitting = content + "#" * (65536 - len(content))
    assert problems(tmp_path, fitting) == []
    assert only(problems(tmp_path, fitting + "#"))[2].startswith("the file is larger than 65536 bytes")


def test_513_steps_in_a_layer_are_refused(tmp_path: Path) -> None:
    assert problems(tmp_path, text("\n" + "\n".join(["relu(x)"] * 512))) == []
    line, _, message = only(problems(tmp_path, text("\n" + "\n".join(["relu(x)"] * 513))))
    assert (line, message) == (518, "513 steps in one section; at most 512 a layer are allowed")


def test_bytes_that_are_not_utf8_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny.archdef"
    path.write_bytes(b"arch tiny\xff\n")
    library = load_library(tmp_path)
    assert library.broken[str(path)] == [f"{path}:1:1: byte 9 is not UTF-8"]


def test_a_broken_file_of_the_operators_hides_the_built_in_one(tmp_path: Path) -> None:
    path = tmp_path / "qwen3.archdef"
    built_in = load_library().get("qwen3")
    path.write_text(built_in.text.replace("silu(g)", "siluu(g)"), encoding="utf-8")
    library = load_library(tmp_path)
    assert "qwen3" not in library.definitions
    assert "llama" in library.definitions
    with pytest.raises(ArchdefError) as raised:
        library.get("qwen3")
    message = str(raised.value)
    assert f"{path}:" in message
    assert "no operation 'siluu'; did you mean 'silu'?" in message
    with pytest.raises(ArchdefError, match="known: .*llama") as other:
        library.get("qwen9")
    assert "siluu" in str(other.value)  # the list of what did not load, with its errors


def test_a_file_of_the_operators_wins_by_name(tmp_path: Path) -> None:
    path = tmp_path / "qwen3.archdef"
    path.write_text(load_library().get("qwen3").text + "# mine\n", encoding="utf-8")
    mine = load_library(tmp_path).get("qwen3")
    assert mine.origin == str(path)
    assert mine.sha256 != load_library().get("qwen3").sha256


def test_a_missing_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ArchdefError, match="no folder of definitions"):
        load_library(tmp_path / "absent")


def test_a_folder_with_a_definitions_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "qwen3.archdef").mkdir()
    library = load_library(tmp_path)
    assert "qwen3" not in library.definitions
    assert "not a regular file" in library.broken[str(tmp_path / "qwen3.archdef")][0]


WORDS = st.sampled_from(
    [*OPS, "arch", "kind", "decoder", "param", "prologue", "block", "epilogue", "with", "without", "layers", "where"]
    + [
        "not",
        "none",
        "x",
        "h",
        "{i}",
        "blk.{i}.a",
        "(",
        ")",
        ",",
        ";",
        ":",
        "|",
        "=",
        "/",
        "1",
        "-2e3",
        "\n",
        "  ",
        "#",
    ]
)


@given(st.one_of(st.lists(WORDS, max_size=60).map(" ".join), st.text(max_size=200)))
@settings(max_examples=500, deadline=None)
def test_any_text_is_read_or_refused(content: str) -> None:
    try:
        document, found = parse("any.archdef", HEAD + content)
    except ArchdefError as error:
        found = error.problems
        assert found
    else:
        assert document.arch.text == "tiny"
    for problem in found:
        assert str(problem).startswith("any.archdef:")
