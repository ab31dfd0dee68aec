"""Small made-up vocabularies, as metadata and as GGUF files without tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tinygguf import ARRAY, BOOL, F32, I32, STRING, U32, Tiny

_FORMS = {"tokens": STRING, "merges": STRING, "scores": F32, "token_type": I32}


def byte_characters() -> list[str]:
    """GPT-2's character for each byte, in the order of bytes."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = iter(range(0x100, 0x200))
    return [chr(byte if byte in plain else next(moved)) for byte in range(256)]


def byte_level(text: str) -> str:
    """A text as a byte-level vocabulary writes it."""
    characters = byte_characters()
    return "".join(characters[byte] for byte in text.encode())


def bpe(extra: Sequence[str] = (), merges: Sequence[str] = (), pre: str = "gpt-2", **keys: Any) -> dict[str, Any]:
    """Metadata of a byte-level vocabulary: a token for each byte, then `extra`. A key that is None is left out."""
    tokens = [*byte_characters(), *extra]
    kinds = keys.pop("token_type", [1] * len(tokens))
    return _keys({"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": kinds, "merges": list(merges)} | keys)


def spm(pieces: Mapping[str, float], *, with_bytes: bool = True, **keys: Any) -> dict[str, Any]:
    """Metadata of an SPM vocabulary: unknown, BOS, EOS, the bytes, then pieces with their scores."""
    texts = [f"<0x{byte:02X}>" for byte in range(256)] if with_bytes else []
    tokens = ["<unk>", "<s>", "</s>", *texts, *pieces]
    scores = [0.0] * (3 + len(texts)) + list(pieces.values())
    kinds = [2, 3, 3] + [6] * len(texts) + [1] * len(pieces)
    return _keys({"model": "llama", "tokens": tokens, "scores": scores, "token_type": kinds} | keys)


def _keys(keys: Mapping[str, Any]) -> dict[str, Any]:
    return {f"tokenizer.ggml.{name}": value for name, value in keys.items() if value is not None}


def every_pair(pre: str) -> dict[str, Any]:
    """A byte-level vocabulary in which any two bytes merge: moving a cut by a byte changes the ids around it.

    Some longer words are tokens that no merge makes, for `ignore_merges`.
    """
    characters = byte_characters()
    # A fixed shuffle of the ranks, by a multiplication modulo a prime.
    order = sorted(range(1 << 16), key=lambda i: (i + 1) * 40503 % 65537)
    pairs = [(characters[i >> 8], characters[i & 255]) for i in order]
    words = ("abc", "ABC", "Abc", "don't", "ĠĠĠ", "12345", "Ġhello")
    merges = [f"{first} {second}" for first, second in pairs]
    return bpe([*map("".join, pairs), *words], merges, pre, bos_token_id=0, add_bos_token=False)


def write_vocabulary(metadata: Mapping[str, Any], path: Path) -> Path:
    """A GGUF file with this metadata and no tensors."""
    tiny = Tiny().key("general.architecture", STRING, "llama")
    for name, value in metadata.items():
        if isinstance(value, (list, tuple)):
            tiny.key(name, ARRAY, (_FORMS[name.rpartition(".")[2]], value))
        else:
            tiny.key(name, STRING if isinstance(value, str) else BOOL if isinstance(value, bool) else U32, value)
    return tiny.write(path)
