"""Tokenizers against llama.cpp's ids, and against metadata that cannot be used."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shared_data import GOLDEN, SHARED, needs_shared
from vocabularies import bpe, byte_level, every_pair, spm

from backbone.tokenizer import PRE_TOKENIZERS, StreamDecoder, Tokenizer, TokenizerError, load_tokenizer
from backbone.tokenizer.pre import Pre
from kernels.gguf import open_gguf

FOLDER = GOLDEN / "tokenizers"
COLUMNS = {
    "ids": {"add_special": True, "parse_special": True},
    "ids_no_bos": {"add_special": False, "parse_special": True},
    "ids_no_parse_special": {"add_special": False, "parse_special": False},
}
COMMITTED, LARGE = ("gpt-2", "llama-spm"), ("llama-bpe", "qwen2")
EVERY_NAME = [*COMMITTED, *(pytest.param(name, marks=needs_shared) for name in LARGE)]
PRE = json.loads((FOLDER / "pre.json").read_text())
PRE_IDS = {name: group["ids"] for group in PRE["groups"] for name in group["names"]}


def golden(name: str) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads((FOLDER / f"{name}.json").read_text())["cases"]
    assert len(cases) == 200
    return cases


@cache
def vocabulary(name: str) -> Tokenizer:
    """The tokenizer of a file that holds a vocabulary and no tensors."""
    file = f"ggml-vocab-{name}.gguf"
    path = FOLDER / file
    if name in LARGE:
        assert SHARED is not None
        path = SHARED / "golden" / "tokenizers" / file
    return of_file(path)


def of_file(path: Path) -> Tokenizer:
    with open_gguf(path) as gguf:
        return load_tokenizer(gguf.metadata, path.name)


def hold_to_golden(tokenizer: Tokenizer, name: str) -> None:
    for column, options in COLUMNS.items():
        wrong = {c["text"]: ids for c in golden(name) if (ids := tokenizer.encode(c["text"], **options)) != c[column]}
        assert not wrong, column


def refusal(metadata: dict[str, Any]) -> str:
    """The one line with which metadata is refused, without the name of the model, which leads it."""
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer(metadata, "some.gguf")
    message = str(caught.value)
    assert message.startswith("some.gguf: ")
    assert "\n" not in message
    assert len(message) < 2000
    return message.removeprefix("some.gguf: ")


# What llama.cpp gives


@pytest.mark.parametrize("name", EVERY_NAME)
def test_every_string_in_every_column(name: str) -> None:
    hold_to_golden(vocabulary(name), name)


@pytest.mark.real_models
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_real_models(name: str) -> None:
    from real_models import real_model  # only where it may fetch

    hold_to_golden(of_file(real_model(name)), name)


@pytest.mark.parametrize("name", EVERY_NAME)
def test_round_trip(name: str) -> None:
    tokenizer = vocabulary(name)
    for case in golden(name):
        text = case["text"].replace("\u2581", " ") if name == "llama-spm" else case["text"]
        assert tokenizer.decode(tokenizer.encode(case["text"])) == text


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_round_trip_of_any_text(text: str) -> None:
    for name in COMMITTED:
        tokenizer = vocabulary(name)
        back = tokenizer.decode(tokenizer.encode(text, parse_special=False))
        assert back == (text.replace("\u2581", " ") if name == "llama-spm" else text)


def rows() -> dict[Pre, list[str]]:
    """The names of each way to cut."""
    found = dict[Pre, list[str]]()
    for name, pre in PRE_TOKENIZERS.items():
        found.setdefault(pre, []).append(name)
    return found


@pytest.mark.parametrize("names", rows().values(), ids=lambda names: names[0])
def test_every_pre_tokenizer_cuts_alike(names: list[str]) -> None:
    tokenizer = load_tokenizer(every_pair(names[0]), names[0])
    texts = PRE["strings"]
    found = {text: tokenizer.encode(text, parse_special=False) for text in texts}
    for name in names:
        wrong = {t: found[t] for t, ids in zip(texts, PRE_IDS[name], strict=True) if found[t] != ids}
        assert not wrong, name


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("\u1c89's", [157, 110, 231, 6, 82]),
        ("x\U00010d4a's \U000105c5y", [87, 172, 238, 113, 232, 6, 82, 220, 172, 238, 245, 227, 88]),
        ("1\U0001ccf32", [16, 172, 250, 111, 111, 17]),
        ("a\u0897b", [64, 156, 95, 245, 65]),
        ("\u2427\u1b4e!", [158, 238, 100, 157, 255, 236, 0]),
    ],
)
def test_what_unicode_16_assigned_counts_as_unassigned(text: str, ids: list[int]) -> None:
    assert vocabulary("gpt-2").encode(text, add_special=False) == ids


def test_every_golden_pre_tokenizer_is_known() -> None:
    assert set(PRE_IDS) == set(PRE_TOKENIZERS)


def test_bytes_without_a_token_are_left_out_and_part_their_neighbours() -> None:
    metadata = bpe(["ĊĊ"], ["Ċ Ċ"])
    metadata["tokenizer.ggml.tokens"][0x0B] = "something else"
    tokenizer = load_tokenizer(metadata, "x")
    assert tokenizer.encode("\n\v\n") == [10, 10]
    assert tokenizer.encode("\v") == []
    assert tokenizer.encode("\n\n") == [256]


def test_of_a_merge_that_comes_twice_the_first_counts() -> None:
    tokenizer = load_tokenizer(bpe(["ab", "bc"], ["a b", "b c", "a b"]), "x")
    assert tokenizer.encode("abc") == [256, ord("c")]


def test_a_merge_may_begin_with_a_space() -> None:
    tokenizer = load_tokenizer(bpe([" ", "a b", " a"], ["  a"]), "x")
    assert tokenizer.encode("a") == [ord("a")]


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_bos_where_the_metadata_does_not_say(name: str) -> None:
    ids = load_tokenizer(bpe(pre=name, bos_token_id=7), "x").encode("a")
    with_bos = set("llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 tekken".split())
    assert ids == ([7, ord("a")] if name in with_bos else [ord("a")])


def test_eos_where_the_metadata_asks_for_it() -> None:
    tokenizer = load_tokenizer(bpe(add_bos_token=True, add_eos_token=True, bos_token_id=1, eos_token_id=2), "x")
    assert tokenizer.encode("a") == [1, ord("a"), 2]
    assert tokenizer.encode("a", add_special=False) == [ord("a")]


# SPM


def test_spm_merges_the_best_scored_pair_first_and_ties_to_the_left() -> None:
    pieces = {"a": 0, "b": 0, "c": 0, "ab": -2, "bc": -1, "aa": -3, "▁": 0}
    tokenizer = load_tokenizer(spm(pieces, add_space_prefix=False, add_bos_token=False), "x")

    def shown(text: str) -> list[str]:
        return [tokenizer.text_of(i) for i in tokenizer.encode(text)]

    assert shown("abc") == ["a", "bc"]
    assert shown("aaa") == ["aa", "a"]
    assert shown("é b") == ["<0xC3>", "<0xA9>", "▁", "b"]


def test_spm_without_bytes_gives_the_unknown_token_or_an_error() -> None:
    pieces = {"a": 0.0, "▁": 0.0}
    assert load_tokenizer(spm(pieces, with_bytes=False), "x").encode("aé", add_special=False) == [4, 3, 0]


def test_spm_puts_the_space_before_the_text_and_behind_special_tokens() -> None:
    tokenizer = load_tokenizer(spm({"a": 0.0, "▁": -1.0}), "x")
    a, space = 259, 260
    assert tokenizer.encode("a") == [1, space, a]
    assert tokenizer.encode("a</s>a") == [1, space, a, 2, space, a]
    assert tokenizer.decode([1, space, a]) == "a"
    without = load_tokenizer(spm({"a": 0.0, "▁": -1.0}, add_space_prefix=False), "x")
    assert without.encode("a") == [1, a]


# Special tokens


def test_control_tokens_count_only_when_parsed_and_user_defined_ones_always() -> None:
    tokenizer = load_tokenizer(bpe(["<ctl>", "<user>"], token_type=[1] * 256 + [3, 4]), "x")
    assert tokenizer.encode("<ctl><user>") == [256, 257]
    assert tokenizer.encode("<ctl><user>", parse_special=False) == [*b"<ctl>", 257]


def test_the_longest_special_token_takes_its_places_first() -> None:
    tokenizer = load_tokenizer(bpe(["<a>", "<a><b>"], token_type=[1] * 256 + [3, 3]), "x")
    assert tokenizer.encode("<a><a><b>") == [256, 257]


def test_many_special_tokens_in_a_long_text_take_linear_time() -> None:
    tokenizer = load_tokenizer(bpe(["<a>"], token_type=[1] * 256 + [3]), "x")
    assert tokenizer.encode("<a>" * 400_000) == [256] * 400_000


def test_phi3_takes_the_blanks_behind_a_special_token_along() -> None:
    metadata = bpe(["<|user|>", "<|endoftext|>"], token_type=[1] * 256 + [3, 3]) | {"general.name": "Phi-3 mini"}
    tokenizer = load_tokenizer(metadata, "x")
    assert tokenizer.encode("<|user|> \n a") == [256, ord("a")]
    assert tokenizer.encode("<|endoftext|> a") == [257, 32, ord("a")]


# Streams


@given(st.lists(st.sampled_from("🙂👩\u200d🏽éa 中\n𝟙"), max_size=12).map("".join))
def test_a_stream_never_holds_half_a_character(text: str) -> None:
    for name in COMMITTED:
        tokenizer = vocabulary(name)
        decoder = StreamDecoder(tokenizer)
        pieces = [decoder.feed(i) for i in tokenizer.encode(text, add_special=False)]
        assert "\ufffd" not in "".join(pieces)
        assert decoder.flush() == ""
        assert "".join(pieces).removeprefix(" " if name == "llama-spm" and text else "") == text


def test_a_character_that_is_never_finished_is_replaced_at_the_end() -> None:
    decoder = StreamDecoder(load_tokenizer(bpe(), "x"))
    assert [decoder.feed(byte) for byte in "🙂".encode()] == ["", "", "", "🙂"]
    assert [decoder.feed(byte) for byte in "🙂".encode()[:3]] == ["", "", ""]
    assert decoder.flush() == "\ufffd"
    assert decoder.feed(ord("a")) == "a"


@given(st.lists(st.integers(0, 255), max_size=30))
def test_a_stream_of_any_bytes_is_what_they_decode_to(data: list[int]) -> None:
    tokenizer = load_tokenizer(bpe(), "x")
    decoder = StreamDecoder(tokenizer)
    streamed = "".join([*map(decoder.feed, data), decoder.flush()])
    assert streamed == bytes(data).decode("utf-8", "replace") == tokenizer.decode(data)


def test_control_tokens_are_not_streamed() -> None:
    tokenizer = load_tokenizer(bpe(["<ctl>"], token_type=[1] * 256 + [3]), "x")
    assert StreamDecoder(tokenizer).feed(256) == ""
    assert tokenizer.decode([256]) == "<ctl>"


# What ends an answer: llama.cpp's end-of-generation tokens of the same vocabularies

ENDS = [
    ("eos by its key", [], {"eos_token_id": 65}, {65}),
    ("eos by default", [], {}, {11}),
    ("chatml", ["<|im_start|>", "<|im_end|>", "<|endoftext|>"], {"eos_token_id": 257}, {257, 258}),
    ("llama 3", ["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"], {"eos_token_id": 258}, {256, 257, 258}),
    ("eot by its key", ["<stop>"], {"eot_token_id": 256, "eos_token_id": 65}, {65, 256}),
    ("infill", ["<|fim_prefix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"], {"eos_token_id": 65}, {65, 257, 258, 259}),
    ("gemma", ["<start_of_turn>", "<end_of_turn>", "<eos>"], {"eos_token_id": 258}, {257, 258}),
    ("harmony", ["<|return|>", "<|call|>", "<|end|>", "<|start|>", "<|channel|>"], {"eos_token_id": 256}, {256, 257}),
    ("end of a message without harmony", ["<|end|>", "<|user|>"], {"eos_token_id": 65}, {65, 256}),
    ("tool response", ["<|tool_response>", "</s>"], {"eos_token_id": 65}, {65, 256}),
]  # fmt: skip


@pytest.mark.parametrize(("extra", "keys", "ends"), [case[1:] for case in ENDS], ids=[case[0] for case in ENDS])
def test_what_ends_an_answer(extra: list[str], keys: dict[str, Any], ends: set[int]) -> None:
    assert load_tokenizer(bpe(extra, **keys), "x").eos_ids == ends


def test_harmony_shows_its_structure_and_hides_its_ends() -> None:
    extra = ["<|return|>", "<|call|>", "<|end|>", "<|start|>", "<|channel|>", "<|message|>"]
    tokenizer = load_tokenizer(bpe(extra, token_type=[1] * 256 + [3] * 6, eos_token_id=256), "x")
    shown = [tokenizer.token_bytes(i).decode() for i in range(256, 262)]
    assert shown == ["", "", "<|end|>", "<|start|>", "<|channel|>", "<|message|>"]


# What cannot be used


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "no tokenizer.ggml.model"),
        (bpe(model="wordpiece"), "tokenizer.ggml.model is 'wordpiece'; supported are 'gpt2' and 'llama'"),
        (bpe(model=3), "no tokenizer.ggml.model"),
        (bpe(tokens=None), "no list tokenizer.ggml.tokens"),
        (bpe(tokens="abc"), "no list tokenizer.ggml.tokens"),
        (bpe(tokens=[]), "tokenizer.ggml.tokens is empty"),
        (bpe(tokens=[1, 2]), "tokenizer.ggml.tokens is no list of strings"),
        (bpe(["a"]), "the token 'a' comes twice in tokenizer.ggml.tokens"),
        (bpe(["two\nlines", "two\nlines"]), r"the token 'two\nlines' comes twice"),
        (bpe(pre="x" * 10**6), f"tokenizer.ggml.pre is '{'x' * 60}', and"),
        (bpe(pre="no-such"), "tokenizer.ggml.pre is 'no-such', and how it cuts text is not known; known are "),
        (bpe() | {"tokenizer.ggml.pre": 4}, "tokenizer.ggml.pre is 4,"),
        ({k: v for k, v in bpe().items() if not k.endswith("pre")}, "tokenizer.ggml.pre is absent"),
        ({k: v for k, v in bpe().items() if not k.endswith("merges")}, "no list tokenizer.ggml.merges"),
        (bpe(merges=["x" * 10**7]), f"tokenizer.ggml.merges holds '{'x' * 60}', not two"),
        (bpe(merges=["ab"]), "tokenizer.ggml.merges holds 'ab', not two tokens with a space between"),
        (bpe(merges=["a "]), "tokenizer.ggml.merges holds 'a ', not two tokens"),
        (bpe(merges=[" a"]), "tokenizer.ggml.merges holds ' a', not two tokens"),
        (bpe(merges=[""]), "tokenizer.ggml.merges holds '', not two tokens"),
        (bpe(["\ud800"]), "tokens or merges cannot be used: "),
        (bpe(merges=["a b"]), "tokenizer.ggml.merges joins 'a' and 'b', and one of them or the whole is no token"),
        (bpe(["azz"], merges=["a zz"]), "tokenizer.ggml.merges joins 'a' and 'zz'"),
        (bpe(token_type=[1] * 10), "tokenizer.ggml.token_type has 10 entries for 256 tokens"),
        (bpe(token_type=3), "tokenizer.ggml.token_type is no list of whole numbers"),
        (bpe(token_type=["x"] * 256), "tokenizer.ggml.token_type is no list of whole numbers"),
        (bpe(token_type=[float("nan")] * 256), "tokenizer.ggml.token_type is no list of whole numbers"),
        (bpe(token_type=[]), "tokenizer.ggml.token_type has 0 entries for 256 tokens"),
        (spm({}, scores=["x"]), "tokenizer.ggml.scores is no list of numbers"),
        (bpe(add_bos_token=3), "tokenizer.ggml.add_bos_token is 3, not true or false"),
        (spm({}, scores=None), "no tokenizer.ggml.scores, by which pieces are merged"),
        (spm({}, scores=[0.0]), "tokenizer.ggml.scores has 1 entries for 259 tokens"),
        (spm({"a": float("nan")}), "tokenizer.ggml.scores holds values that are not finite"),
        (spm({}, add_space_prefix="yes"), "tokenizer.ggml.add_space_prefix is 'yes', not true or false"),
        (bpe(["<end>"], tokens=["<end>"], token_type=[1], add_bos_token=True), "tokenizer.ggml.add_bos_token is set, and no"),
    ],
)  # fmt: skip
def test_metadata_that_cannot_be_used(metadata: dict[str, Any], message: str) -> None:
    assert message in refusal(metadata)


def test_special_ids_outside_the_vocabulary_do_not_count() -> None:
    tokenizer = load_tokenizer(bpe(bos_token_id=256, eos_token_id=1 << 40), "x")
    assert tokenizer.bos_id == 11
    assert tokenizer.eos_ids == {11}
    assert tokenizer.encode("a") == [ord("a")]


@pytest.mark.parametrize("token", [-1, 256, 1 << 70])
def test_ids_outside_the_vocabulary(token: int) -> None:
    tokenizer = load_tokenizer(bpe(), "x")
    with pytest.raises(TokenizerError, match=rf"^token id {token} is not in the vocabulary \(0 to 255\)$"):
        tokenizer.decode([token])


@pytest.mark.parametrize("name", COMMITTED)
def test_lone_surrogates(name: str) -> None:
    with pytest.raises(TokenizerError, match="^character 2 of the text is a lone surrogate, not Unicode$"):
        vocabulary(name).encode("ab\ud800c")


def test_a_byte_token_that_is_none() -> None:
    metadata = spm({"a": 0.0})
    metadata["tokenizer.ggml.tokens"][3] = "<0xZZ>"
    with pytest.raises(TokenizerError, match="^x: byte token 3 is written '<0xZZ>', not like <0x0A>$"):
        load_tokenizer(metadata, "x").decode([3])


def test_token_kinds_that_do_not_exist_are_no_special_tokens() -> None:
    tokenizer = load_tokenizer(bpe(["<x>"], token_type=np.array([1] * 256 + [-7], np.int32)), "x")
    assert tokenizer.encode("<x>") == list(b"<x>")
    assert tokenizer.decode([256]) == ""


def test_characters_of_no_byte_in_a_token() -> None:
    assert load_tokenizer(bpe(["中"]), "x").decode([256]) == "中"


def test_byte_level_writing() -> None:
    assert byte_level(" é\n") == "ĠÃ©Ċ"


KEYS = [
    f"tokenizer.ggml.{name}"
    for name in "model pre tokens scores token_type merges bos_token_id eos_token_id eot_token_id unknown_token_id "
    "add_bos_token add_eos_token add_space_prefix fim_pre_token_id".split()
] + ["general.name"]
ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 400),
    st.integers(),
    st.floats(),
    st.sampled_from(["", "gpt2", "llama", "gpt-2", "qwen35", "phi-3", "\n"]),
    st.text(max_size=5),
    st.lists(st.text(max_size=3), max_size=6),
    st.lists(st.sampled_from(["a b", "ab", "ab c", "Ġ a", "<s>", "</s>", "<0x0A>", ""]), max_size=6),
    st.lists(st.integers(-1, 7), max_size=6).map(lambda kinds: np.array(kinds, np.int32)),
    st.lists(st.floats(width=32), max_size=6).map(lambda scores: np.array(scores, np.float32)),
)


@given(
    st.booleans(),
    st.dictionaries(st.sampled_from(KEYS), ANYTHING, min_size=1, max_size=4),
    st.text(max_size=12),
)
def test_any_metadata_is_used_or_refused(is_bpe: bool, changes: dict[str, Any], text: str) -> None:
    right = bpe(["ab", "<c>"], ["a b"], token_type=[1] * 257 + [3])
    metadata = right if is_bpe else spm({"a": 0.0, "ab": -1.0, "▁": 0.0})
    changed = {k: v for k, v in (metadata | changes).items() if v is not None}
    try:
        tokenizer = load_tokenizer(changed, "x")
        tokenizer.decode(tokenizer.encode(text))
    except TokenizerError as error:
        assert len(str(error).splitlines()) == 1
