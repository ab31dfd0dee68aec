"""Small definitions and models (metadata and dimensions, no arrays) for the archdef tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from archdefs import ArchdefError, Definition, Program, bind, load_definition

HEAD = "arch tiny\nkind decoder\n"
PROLOGUE = "prologue\n  x = embed(token_embd.weight)\n"
EPILOGUE = "epilogue\n  x = rms_norm(x, output_norm.weight)\n  x = last(x)\n  logits = matmul(x, output.weight)\n"


def text(*blocks: str, head: str = HEAD, prologue: str = PROLOGUE, epilogue: str = EPILOGUE) -> str:
    """A whole definition around blocks, each given as its lines after the word `block`."""
    body = "".join(
        "block" + first + "\n" + "".join(f"  {line.strip()}\n" for line in rest)
        for first, *rest in (block.split("\n") for block in blocks)
    )
    return head + prologue + body + epilogue


def load(folder: Path, content: str, name: str = "tiny") -> Definition:
    """Write a definition and load it."""
    path = folder / f"{name}.archdef"
    path.write_text(content, encoding="utf-8")
    return load_definition(path)


def problems(folder: Path, content: str, name: str = "tiny") -> list[tuple[int, int, str]]:
    """Line, column and message of every problem of a definition; empty when it loads."""
    try:
        load(folder, content, name)
    except ArchdefError as error:
        return [(p.span.line, p.span.column, p.message) for p in error.problems]
    return []


def metadata(**keys: Any) -> dict[str, Any]:
    """Metadata of a tiny model of two layers; `__` in a keyword stands for a point."""
    found: dict[str, Any] = {
        "general.architecture": "tiny",
        "tiny.block_count": 2,
        "tiny.context_length": 64,
        "tiny.embedding_length": 8,
        "tiny.attention.head_count": 2,
        "tiny.attention.head_count_kv": 1,
        "tiny.attention.layer_norm_rms_epsilon": 1e-6,
        "tiny.expert_used_count": 2,
    }
    found.update({f"tiny.{key.replace('__', '.')}": value for key, value in keys.items()})
    return {key: value for key, value in found.items() if value is not None}


def dims(**tensors: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The tiny model's tensors in GGUF order, inputs first; `blk_` in a keyword stands for both layers."""
    found: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (8, 32),
        "output_norm.weight": (8,),
        "output.weight": (8, 32),
    }
    for i in range(2):
        found |= {
            f"blk.{i}.norm.weight": (8,),
            f"blk.{i}.q.weight": (8, 8),
            f"blk.{i}.k.weight": (8, 4),
            f"blk.{i}.v.weight": (8, 4),
            f"blk.{i}.router.weight": (8, 4),
            f"blk.{i}.gate.weight": (8, 16, 4),
            f"blk.{i}.up.weight": (8, 16, 4),
            f"blk.{i}.down.weight": (16, 8, 4),
        }
    found.update({name.replace("__", "."): value for name, value in tensors.items()})
    return found


def bound(
    folder: Path, content: str, meta: dict[str, Any] | None = None, shapes: dict[str, Any] | None = None
) -> Program:
    """Load a definition and bind it to the tiny model, or to what is given."""
    return bind(load(folder, content), meta or metadata(), shapes or dims(), "tiny.gguf")


def bind_problems(folder: Path, content: str, meta: Any = None, shapes: Any = None) -> list[str]:
    """`line: message` of every problem found when binding; empty when it binds."""
    try:
        bound(folder, content, meta, shapes)
    except ArchdefError as error:
        return [f"{p.span.line}: {p.message}" for p in error.problems]
    return []
