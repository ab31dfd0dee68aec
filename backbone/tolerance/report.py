"""A run's report: one JSON object, and the Markdown that is made of it alone.

`report.schema.json` of this package says what the object has.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kernels.backends.cpu import cpu_model
from kernels.cores import usable_cores

from ..errors import BackboneError, UsageError

FORMAT = 1
MOST_NAME = 60  #: characters of a part of a folder's name
TITLE = "# Tolerance reports"  #: by which an index is known as ours
JSON, MARKDOWN, INDEX = "report.json", "report.md", "README.md"
MOST_BYTES = 1 << 28
VERSIONS = ("numpy", "pyzmq", "pyopencl", "cupy-cuda13x", "cupy-cuda12x", "cupy-rocm-7-0")
LISTED_FLIPS = 20  #: in the Markdown; the JSON has more
PLOTS = {
    "drift": "Drift by layer, with guides sqrt(L) and L",
    "kl": "KL divergence, positions by decade",
    "flips": "Margins of top-1 flips",
    "rows": "Worst rows against float64, by rows in a call",
}

Report = Mapping[str, Any]
log = logging.getLogger(__name__)


def machine() -> dict[str, Any]:
    """What the run was made on."""
    return {"cpu": cpu_model(), "cores": usable_cores(), "system": f"{platform.system()} {platform.machine()}"}


def versions() -> dict[str, str]:
    """What took part, by name."""
    found = {"python": platform.python_version()}
    for name in VERSIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def folder_name(report: Report) -> str:
    """<model>-<A>-vs-<B>-<date>, as a file system takes it."""
    model = Path(report["model"]["name"]).stem
    parts = (model, report["a"]["asked"], "vs", report["b"]["asked"], report["date"][:10])
    return "-".join(re.sub(r"[^A-Za-z0-9._=-]+", "_", part).strip("_.-")[:MOST_NAME] for part in parts)


# ---- files


def write(report: Report, reports: Path, plots: Callable[[Report, Path], Iterable[str]]) -> Path:
    """Write a report's folder and the index of all. `plots` draws into the folder and names what it drew."""
    folder = _free(reports / folder_name(report), report)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / JSON).write_text(json.dumps(report, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        render(folder, plots)
        write_index(reports)
    except OSError as error:
        raise BackboneError(f"--out {folder}: cannot be written: {error.strerror}") from None
    return folder


def _free(folder: Path, report: Report) -> Path:
    """A folder that is not there, or has what the same command made before."""
    number, found = 1, folder
    while (found / JSON).exists():
        try:
            if read(found)["command"] == report["command"]:
                return found
        except UsageError:
            pass  # what cannot be read is not ours to replace
        number += 1
        found = folder.with_name(f"{folder.name}-{number}")
    return found


def write_index(reports: Path) -> None:
    """Write the index, unless there is a README of somebody else's."""
    path = reports / INDEX
    if path.exists() and not path.read_text(encoding="utf-8", errors="replace").startswith(TITLE):
        log.warning("%s is not ours: no index is written there", shown(path))
        return
    path.write_text(index(reports), encoding="utf-8")


def render(folder: Path, plots: Callable[[Report, Path], Iterable[str]]) -> None:
    """Make the plots and the Markdown of a report's JSON."""
    report = read(folder)
    for name in PLOTS:
        (folder / f"{name}.svg").unlink(missing_ok=True)  # of another run
    plots(report, folder)
    drawn = [name for name in PLOTS if (folder / f"{name}.svg").is_file()]
    (folder / MARKDOWN).write_text(markdown(report, drawn), encoding="utf-8")


def read(path: Path) -> Report:
    """A report by its folder or file. UsageError when it is none."""
    file = path / JSON if path.is_dir() else path
    try:
        with file.open("rb") as stream:
            data = stream.read(MOST_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror}") from None
    if len(data) > MOST_BYTES:
        raise UsageError(f"{file}: larger than {MOST_BYTES >> 20} MiB; this is no report")
    try:
        report = json.loads(data)
        is_ours = report["format"] == FORMAT and set(report["levels"]) == set("123456") and _has_numbers(report)
        markdown(report)  # whatever is shown of it later can be shown
        folder_name(report)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        is_ours = False
    if not is_ours:
        raise UsageError(f"{file}: is no report of format {FORMAT}; name a folder that 'backbone tolerance run' wrote")
    return dict(report)


def _has_numbers(report: Report) -> bool:
    """Whether all that levels are judged by are numbers."""
    values = [(level["found"] or {}).get("values", {}) for level in report["levels"].values()]
    return all(value is None or isinstance(value, (int, float)) for each in values for value in each.values())


def index(reports: Path) -> str:
    """The README of a folder of reports: a line for each."""
    lines = [
        TITLE,
        "",
        "Each folder has `report.json`, and `report.md` with plots, which are made of it alone. Made by "
        "`backbone tolerance run`; the exact command is in each report. `NOTES.md`, where there is one, explains.",
        "",
        "| report | model | A | B | positions | 1 | 2 | 3 | 4 | 5 | 6 | mean KL | top-1 |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for folder in sorted(path.parent for path in reports.glob(f"*/{JSON}")):
        try:
            report = read(folder)
        except UsageError as error:
            log.warning("%s; the index goes on without it", error)
            continue
        states = [_short(report["levels"][str(level)]) for level in range(1, 7)]
        kl, top = _value(report, 3, "mean_kl"), _value(report, 4, "top1_agreement")
        cells = [
            f"[{folder.name}]({folder.name}/{MARKDOWN})",
            report["model"]["name"],
            report["a"]["asked"],
            report["b"]["asked"],
            f"{report['text']['positions']:,}",
            *states,
            _number(kl),
            "" if top is None else f"{100 * top:.3f}%",
        ]
        lines.append(f"| {' | '.join(map(_cell, cells))} |")
    return "\n".join([*lines, ""])


def _value(report: Report, level: int, name: str) -> float | None:
    found = report["levels"][str(level)]["found"]
    return None if found is None else found["values"].get(name)


def _short(level: Mapping[str, Any]) -> str:
    return "identical" if level["identical"] and level["pass"] is not False else level["state"]


# ---- text


def _cell(text: Any) -> str:
    return _plain(str(text)).replace("|", "\\|")


def _plain(text: str) -> str:
    """Without what would move a terminal's cursor or begin a line."""
    return "".join(c if c.isprintable() else " " for c in text)


def _number(value: Any) -> str:
    if value is None:
        return "not finite"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.6g}" if value > 0.5 else f"{value:.3g}"  # of a share of nearly all the rest is what counts


def _table(heading: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    lines = [f"| {' | '.join(heading)} |", f"|{'---|' * len(heading)}"]
    return [*lines, *(f"| {' | '.join(map(_cell, row))} |" for row in rows), ""]


def summary(report: Report) -> list[str]:
    """A line for each level, for a terminal too."""
    lines = list[str]()
    for number, level in sorted(report["levels"].items()):
        bars = ", ".join(f"{bar['name']} {_number(bar['value'])} ({_bar(bar)})" for bar in level["bars"])
        same = "identical; " if level["identical"] else ""
        lines.append(
            f"{number} {level['title']}: {level['state']}{'; ' if bars or same else ''}{same}{bars}".rstrip("; ")
        )
    return lines


def _bar(bar: Mapping[str, Any]) -> str:
    sign = "" if isinstance(bar["bar"], bool) else "at least " if "agreement" in bar["name"] else "at most "
    return f"{sign}{_number(bar['bar'])}{'' if bar['holds'] else ': MISSED'}"


def markdown(report: Report, drawn: Sequence[str] = ()) -> str:
    """The whole report for people. `drawn`: names of the plots that lie beside it."""
    verdict = "pass" if report["pass"] else "fail"
    text, levels = report["text"], report["levels"]
    lines = [
        _plain(f"# {report['model']['name']}: {report['a']['asked']} vs {report['b']['asked']}: {verdict}"),
        "",
        f"{report['date']}, {report['seconds']:.0f} s. `{report['command']}`",
        "",
        *_table(
            ("level", "", "state", "identical", "bars"),
            (
                (
                    number,
                    level["title"],
                    level["state"],
                    "" if level["identical"] is None else _number(level["identical"]),
                    "; ".join(f"{bar['name']} {_number(bar['value'])} ({_bar(bar)})" for bar in level["bars"]),
                )
                for number, level in sorted(levels.items())
            ),
        ),
        f"Text {text['name']} (sha256 {text['sha256'][:12]}), {text['positions']:,} positions in {text['windows']} "
        f"windows. {_routing(report)} Policy: {report['policy']['source']}.",
        "",
        *_table(
            ("", "A", "B"),
            (
                (name, report["a"].get(key, ""), report["b"].get(key, ""))
                for name, key in (
                    ("kind", "kind"),
                    ("class", "class"),
                    ("precision", "precision"),
                    ("device", "device"),
                    ("wire", "wire"),
                )
            ),
        ),
    ]
    for number, make in _SECTIONS.items():
        level = levels[number]
        if level["found"] is not None:
            lines += [f"## {number}. {level['title']}", "", *make(level["found"])]
    if drawn:
        lines += ["## Plots", "", *(f"![{PLOTS[name]}]({name}.svg)" for name in drawn), ""]
    provenance = report["model"]
    told = ", ".join(f"{name} {value}" for name, value in sorted(report["versions"].items()))
    lines += [
        "## Made with",
        "",
        f"Weights {provenance['weights'][:12]}, archdef {provenance['archdef']['name']} "
        f"{provenance['archdef']['sha256'][:12]}, engine {provenance['engine']['version']} "
        f"{provenance['engine']['sha256'][:12]}, seed {report['seed']}. {report['machine']['cpu']}, "
        f"{report['machine']['cores']} cores, {report['machine']['system']}. {told}.",
        "",
    ]
    return "\n".join(lines)


def _routing(report: Report) -> str:
    """Whose routing B had."""
    if report["b"].get("routing") == "its own" or report["a"]["kind"] in ("kld", "server"):
        return "Each side has its own routing."
    return "Levels 2, 3, 4 and 6 run B with A's routing, where there is any."


def _operations(found: Mapping[str, Any]) -> list[str]:
    rows = list[Sequence[Any]]()
    for case in found["cases"]:
        for side in ("a", "b"):
            if case[side] is None:
                if f"{side}_failed" in case:
                    rows.append((case["case"], side.upper(), f"failed: {case[f'{side}_failed']}", "", "", "", ""))
                continue
            widths = [
                f"{width}: {_number(w['worst'])}" for width, w in sorted(case[side].items(), key=lambda i: int(i[0]))
            ]
            least = min(w["least_cosine"] for w in case[side].values())
            largest = [w["largest"] for w in case[side].values()]
            rows.append(
                (
                    case["case"],
                    side.upper(),
                    ", ".join(widths),
                    f"{1 - least:.1e}",
                    _number(None if None in largest else max(largest)),
                    _number(all(w["equals_wider"] for w in case[side].values())),
                    _number(case["identical"]),
                )
            )
    heading = (
        "case",
        "side",
        "worst row, relative L2, by width",
        "1 - least cosine",
        "max \\|d\\|",
        "same at every width",
        "A = B",
    )
    lines = _table(heading, rows)
    for side, merged in sorted((found["merging"] or {}).items()):
        if merged is not None and merged["exponent"] is not None:
            fit = merged["exponent"]
            lines += [
                f"{side.upper()}'s combine: merging k experts' rows, the error grows as k^{fit['exponent']:.2f} "
                f"[{fit['low']:.2f}, {fit['high']:.2f}] (0.5 is sqrt(k), 1 is k), from {merged['error'][0]:.2e} to "
                f"{merged['error'][-1]:.2e} over {merged['merged'][-1]} experts.",
                "",
            ]
    return lines


def _drift(found: Mapping[str, Any]) -> list[str]:
    rows = [(each["layer"], _number(each["mean"]), _number(each["max"])) for each in found["layers"]]
    fit = found["exponent"]
    grows = (
        "Nothing to fit."
        if fit is None
        else f"It grows as L^{fit['exponent']:.2f} "
        f"[{fit['low']:.2f}, {fit['high']:.2f}] (0.5 is sqrt(L), 1 is linear; 95%, resampled by window)."
    )
    return [grows, "", *_table(("layer", "mean relative L2 of the residual", "max"), rows)]


def _logits(found: Mapping[str, Any]) -> list[str]:
    rows = [
        (name, *(_number(found[key][part]) for part in ("mean", "median", "p99", "max")))
        for name, key in (("KL, nats", "kl"), ("L-infinity", "l_inf"), ("relative L2", "l2"))
    ]
    return _table(("", "mean", "median", "p99", "max"), rows)


def _decisions(found: Mapping[str, Any]) -> list[str]:
    routing = found["routing"]
    behind = (
        f" Routing: B's own router, behind A's routing, would have decided {routing['differing']} of "
        f"{routing['decisions']:,} times otherwise."
    )
    flips = f"Top-1: {found['flips_in_all']} of {found['positions']:,} positions flip."
    lines = [flips + (behind if routing["decisions"] else ""), ""]
    if found["flips"]:
        rows = [
            (f["window"], f["position"], f["a"], f["b"], _number(f["margin_a"]), _number(f["margin_b"]))
            for f in found["flips"][:LISTED_FLIPS]
        ]
        lines += _table(("window", "position", "A's token", "B's token", "A's margin", "B's margin"), rows)
    if routing["flips"]:
        rows = [
            (f["window"], f["position"], f["layer"], f["a"], f["b"], _number(f["gap"]))
            for f in routing["flips"][:LISTED_FLIPS]
        ]
        lines += _table(("window", "position", "layer", "A's experts", "B's", "gap of B's scores"), rows)
    return lines


def _generations(found: Mapping[str, Any]) -> list[str]:
    rows = [
        (i + 1, len(each["a"]), "none" if each["diverged"] is None else each["diverged"])
        for i, each in enumerate(found["prompts"])
    ]
    return _table(("prompt", "tokens", "first divergence"), rows)


def _perplexity(found: Mapping[str, Any]) -> list[str]:
    a, b, ratio = found["a"], found["b"], found["log_ratio"]
    return [
        f"A {a['value']:.4f} ± {a['error']:.4f}, B {b['value']:.4f} ± {b['error']:.4f}, over {found['tokens']:,} "
        f"tokens; ln(B/A) {ratio['value']:.3e} ± {ratio['error']:.1e}.",
        "",
    ]


_SECTIONS: Mapping[str, Callable[[Mapping[str, Any]], list[str]]] = {
    "1": _operations,
    "2": _drift,
    "3": _logits,
    "4": _decisions,
    "5": _generations,
    "6": _perplexity,
}


def compared(first: Report, second: Report) -> list[list[str]]:
    """Rows of a table: each value of both reports, and the second's ratio to the first."""
    rows = list[list[str]]()
    for number in sorted(first["levels"]):
        one, two = first["levels"][number], second["levels"][number]
        rows.append([f"{number} {one['title']}", _short(one), _short(two), ""])
        values = [(level["found"] or {}).get("values", {}) for level in (one, two)]
        for name in dict.fromkeys([*values[0], *values[1]]):
            a, b = (each.get(name) for each in values)
            ratio = f"{b / a:.3g}" if a and b is not None else ""
            rows.append([f"  {name}", *("" if v is None else _number(v) for v in (a, b)), ratio])
    return rows


def shown(path: Path) -> str:
    """A path as the user would write it here."""
    try:
        return os.path.relpath(path)
    except ValueError:
        return str(path)
