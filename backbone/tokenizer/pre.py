"""`tokenizer.ggml.pre`: how byte-level BPE cuts text into words before merging. One row a name; data, not code.

The expressions are those that llama.cpp runs, which now and then differ from a model's own tokenizer.json; each is
applied in turn to the pieces that the one before left, and what matches and what does not are both pieces.

Code points that Unicode 16 and later assigned are taken for unassigned, as llama.cpp takes them, whatever the Unicode
version of the library at hand is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


def _ranges(text: str) -> str:
    """Code points and ranges of them, in hexadecimal, as the inside of a character class."""
    ends = ([chr(int(end, 16)) for end in part.split("-")] for part in text.split())
    return "".join("-".join(pair) for pair in ends)


#: By category, what Unicode 16 and later assigned.
_SINCE_UNICODE_16 = {
    "L": _ranges(
        "1c89-1c8a a7cb-a7cd a7da-a7dc 105c0-105f3 10d4a-10d65 10d6f-10d85 10ec2-10ec4 11380-11389 1138b 1138e "
        "11390-113b5 113b7 113d1 113d3 11bc0-11be0 13460-143fa 16100-1611d 16d40-16d6c 18cff 1e5d0-1e5ed 1e5f0"
    ),
    "N": _ranges("10d40-10d49 116d0-116e3 11bf0-11bf9 16130-16139 16d70-16d79 1ccf0-1ccf9 1e5f1-1e5fa"),
    "P": _ranges("1b4e-1b4f 1b7f 10d6e 113d4-113d5 113d7-113d8 11be1 16d6d-16d6f 1e5ff"),
    "M": _ranges(
        "897 10d69-10d6d 10efc 113b8-113c0 113c2 113c5 113c7-113ca 113cc-113d0 113d2 113e1-113e2 11f5a 1611e-1612f "
        "1e5ee-1e5ef"
    ),
    "S": _ranges(
        "2427-2429 31e4-31e5 10d8e-10d8f 1cc00-1ccef 1cd00-1ceb3 1f8b2-1f8bb 1f8c0-1f8c1 1fa89 1fa8f 1fabe 1fac6 1fadc "
        "1fadf 1fae9 1fbcb-1fbef"
    ),
}


def _of_unicode_15(expression: str) -> str:
    """An expression whose categories leave out what came later."""
    for category, later in _SINCE_UNICODE_16.items():
        expression = expression.replace(rf"\p{{{category}}}", rf"[\p{{{category}}}&&[^{later}]]")
    return expression


_CONTRACTIONS = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_PUNCTUATION_RUN = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_PUNCTUATION_RUN}|{_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_PUNCTUATION_RUN}|{_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
# Letters outside of ASCII count as upper and as lower case at once.
_UPPER, _LOWER = r"((?=[\p{L}])([^a-z]))", r"((?=[\p{L}])([^A-Z]))"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_GPT4O = _CASED.replace("%s", f"{_CONTRACTIONS}?") + rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_TEKKEN = _CASED.replace("%s", "") + rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_HAN = (
    "\u4e00-\u9fff\u3400-\u4dbf\U00020000-\U0002a6df\U0002a700-\U0002b73f\U0002b740-\U0002b81f\U0002b820-\U0002ceaf"
    "\U0002ceb0-\U0002ebef\uf900-\ufaff\U0002f800-\U0002fa1f"
)
_NOT_HAN = rf"[\p{{L}}&&[^{_HAN}]]"
_KIMI = rf"[{_HAN}]+|[^\r\n\p{{L}}\p{{N}}]?{_NOT_HAN}+{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_PUNCTUATION_RUN}|{_SPACES}"
_ASCII_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*"
    rf"|{_SPACES}",
)
# The letters with case of Unicode, as DeepSeek's first tokenizer lists them.
_CASED_LETTERS = _ranges(
    "41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376-377 37b-37d 37f 386 388-38a 38c "
    "38e-3a1 3a3-3f5 3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd 1c90-1cba 1cbd-1cbf 1d00-1d2b "
    "1d6b-1d77 1d79-1d9a 1e00-1f15 1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57 1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4 "
    "1fb6-1fbc 1fbe 1fc2-1fc4 1fc6-1fcc 1fd0-1fd3 1fd6-1fdb 1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113 "
    "2115 2119-211d 2124 2126 2128 212a-212d 212f-2134 2139 213c-213f 2145-2149 214e 2183-2184 2c00-2c7b "
    "2c7e-2ce4 2ceb-2cee 2cf2-2cf3 a640-a66d a680-a69b a722-a76f a771-a787 a78b-a78e ab70-abbf fb00-fb06 "
    "fb13-fb17 ff21-ff3a ff41-ff5a 10400-1044f 104b0-104d3 104d8-104fb 10c80-10cb2 10cc0-10cf2 118a0-118df "
    "1e900-1e943 "
)
# These ranges reach over Unicode's spaces, which are spaces first.
_CJK = r"[\S&&[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]]+"
_DEEPSEEK_LLM = (
    "[\r\n]",
    rf"\s?[{_CASED_LETTERS}]+",
    r"\s?[\S&&[!-/:-~！-／：-～‘-‟\u3000-。]]+",
    r"\s+\z",
    _CJK,
    r"\p{N}+",
)
_DIGITS_THEN_GPT2 = (r"\p{N}", _GPT2)


@dataclass(frozen=True, slots=True)
class Pre:
    """How a vocabulary cuts text. `ignore_merges`: a word that is a token is taken whole."""

    expressions: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False  #: where the metadata does not say


def _rows() -> dict[str, Pre]:
    rows = dict[str, Pre]()

    def row(names: str, *expressions: str, ignore_merges: bool = False, add_bos: bool = False) -> None:
        pre = Pre(tuple(map(_of_unicode_15, expressions)), ignore_merges, add_bos)
        rows.update(dict.fromkeys(names.split(), pre))

    row(
        "default",
        r"[\p{P}\$\+<=>\^~\|]+",
        _GPT2,
        r"\p{N}+",
        "[0-9][0-9][0-9]",
    )
    row("llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2", _LLAMA3, ignore_merges=True, add_bos=True)
    row("dbrx smaug-bpe chatglm-bpe", _LLAMA3)
    row("glm4 glm5", _LLAMA3, ignore_merges=True)
    row("minicpm5", r"\p{N}{1,3}", _QWEN2.replace(r"|\p{N}|", r"|\p{N}+|"), ignore_merges=True)
    row("qwen2 deepseek-r1-qwen kormo megrez stablelm2 hunyuan solar-open grok-2", _QWEN2)
    row("qwen35", _QWEN35)
    row("gpt-2 phi-2 mpt olmo jais trillion granite-docling gigachat a.x-4.0 mellum exaone4", _GPT2)
    row("smollm starcoder refact command-r codeshell exaone minerva-7b mellum2", *_DIGITS_THEN_GPT2)
    row("falcon", r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")
    row("deepseek-llm", *_DEEPSEEK_LLM)
    row("deepseek-coder", "[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")
    row("deepseek-v3 hunyuan-dense joyai-llm hy_v4", *_DEEPSEEK3)
    row("gpt-4o llama4 kanana2 talkie minimax-m2", _GPT4O)
    row("tekken", _TEKKEN, ignore_merges=True, add_bos=True)
    row("kimi-k2", _KIMI)
    row(
        "bailingmoe bailingmoe2 llada-moe",
        rf"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|{_WORD}|\p{{N}}|{_PUNCTUATION_RUN}|\s*[\r\n]|\s+(?!\S)|\s+",
    )
    row("seed-coder", rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}")
    row("bloom poro-chat gpt3-finnish", r" ?[^(\s|.,!?…。，、।۔،)]+")
    row("viking", r" ?[^(\s|.,!?…。，、।۔،)]+", r"\p{N}")
    return rows


PRE_TOKENIZERS: Mapping[str, Pre] = _rows()
