"""`backbone status`: versions, settings, definitions, backends and models, and what of them is broken."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable
from typing import Any

from .. import status
from ..client import find_server
from ..knobs import KNOBS
from ..results import worker_lines
from ..settings import add_flags

UNHASHED = "not hashed yet"


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "status",
        help="show versions, settings, definitions, backends and models",
        description="Show what there is and what the settings make of it. Exit code 1: something they name is broken.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_flags(parser, *(knob.name for knob in KNOBS))
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Show the status; 1 when something that the settings name is broken."""
    found = status.collect(args, os.environ)
    server = find_server(None)
    found["server"] = server.status if server is not None else None
    print(json.dumps(found) if args.json else as_text(found))
    return 1 if found["problems"] else 0


def as_text(found: dict[str, Any]) -> str:
    """The status for people: a block a subject, what is broken last."""
    blocks = [
        ("expertswarm", [f"version {found['engine']['version']}, sources {found['engine']['sha256']}"]),
        ("versions", [", ".join(f"{name} {version}" for name, version in found["versions"].items())]),
        ("settings", _columns([(s["variable"], s["value"], s["source"]) for s in found["settings"].values()])),
        (
            "architectures (steps a layer, origin, sha256)",
            _columns([(a["name"], a["steps_per_layer"], a["origin"], a["sha256"]) for a in found["architectures"]]),
        ),
        ("backends", _columns([(b["name"], b["reason"] or "available") for b in found["backends"]])),
        ("pre-tokenizers (tokenizer.ggml.pre)", [", ".join(found["pre_tokenizers"])]),
        ("models in the local caches", _models(found["models"])),
        ("embedded model", _models([found["embedded_model"]])),
        ("running server", _server(found["server"])),
        ("model of these settings", _models([found["model"]] if found["model"] else [])),
        ("definitions that did not load", [e for broken in found["broken_definitions"] for e in broken["errors"]]),
        ("problems", found["problems"]),
    ]
    return "\n\n".join("\n".join([title, *_indented(lines or ["none"])]) for title, lines in blocks)


def _server(server: dict[str, Any] | None) -> list[str]:
    if server is None:
        return []
    load = server["load"]
    lines = [
        f"{server['model']} on {server['url']}, process {server['pid']}, context {server['context']}",
        f"{load['running']} of {load['parallel']} answers under way, {load['waiting']} of {load['queue']} waiting",
    ]
    token = server["token"]
    for what, time in (("predicted", token["predicted"]), (f"mean of {token['timed']}", token["actual"])):
        if time is not None:
            parts = ", ".join(f"{part} {time[part] * 1e3:.2f}" for part in ("dense", "wire", "straggler"))
            lines.append(f"a token alone takes {time['seconds'] * 1e3:.2f} ms ({parts}), {what}")
    lines += worker_lines(server["workers"], server["computed_locally"], server["failures"])
    if server["earlier_workers"]:
        lines.append(f"{server['earlier_workers']} more workers were lost before these")
    return lines


def _indented(texts: list[str]) -> list[str]:
    """Lines under a title. A definition's error has several: it shows the place."""
    return [f"  {_plain(line)}" for text in texts for line in text.split("\n")]


def _models(models: Iterable[dict[str, Any]]) -> list[str]:
    return _columns([(m["name"], _size(m["bytes"]), m["sha256"] or UNHASHED, m["path"]) for m in models])


def _size(count: int | None) -> str:
    return "?" if count is None else f"{count / 1e6:.1f} MB"


def _columns(rows: list[tuple[Any, ...]]) -> list[str]:
    """Rows with aligned columns, all to the left: names and places are no numbers."""
    cells = [["" if cell is None else _plain(str(cell)) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]


def _plain(text: str) -> str:
    """Text without control characters: names of files are not ours, and a terminal obeys what it prints."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
