"""A tolerance run: units of work in order, each written down as it is done, so that a run that was stopped goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import BackboneError
from . import measures, operations, partials
from .measures import Floats
from .passage import Passage
from .sides import GivesPartials, MayChange, Piece, Side, refuse_unlike

CHUNK = 64  #: rows of a window that are run at once
LEVELS = (1, 2, 3, 4, 5, 6)
BY_WINDOW = frozenset({2, 3, 4, 6})
MOST_FLIPS = 200  #: of routing, that are kept of a window

Progress = Callable[[str, int, int], None]
Found = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is asked for."""

    passage: Passage
    levels: Collection[int]
    prompts: int
    prompt_tokens: int
    tokens: int  #: of a generation
    seed: int


class Journal:
    """What is done of a run, a line each, under a key that says what the run is. A torn last line is done again."""

    def __init__(self, path: Path | None, key: str) -> None:
        self._path, self.done = path, dict[str, Found]()
        if path is None:
            return
        with suppress(OSError, ValueError, KeyError, TypeError):
            first, *lines = path.read_text(encoding="utf-8").split("\n")
            if json.loads(first)["key"] == key:
                for line in lines[:-1]:
                    entry = json.loads(line)
                    self.done[entry["unit"]] = entry["found"]
        entries = [json.dumps({"unit": unit, "found": found}) for unit, found in self.done.items()]
        part = path.with_suffix(f".{os.getpid()}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text("\n".join([json.dumps({"key": key}), *entries, ""]), encoding="utf-8")
            part.replace(path)
        except OSError as error:
            raise self._unwritable(path, error) from None

    def _unwritable(self, path: Path, error: OSError) -> BackboneError:
        return BackboneError(f"{path}: what is done of a run cannot be kept there: {error.strerror}")

    def add(self, unit: str, found: Found) -> None:
        """A unit is done."""
        self.done[unit] = found
        if self._path is not None:
            try:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"unit": unit, "found": found}) + "\n")
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                raise self._unwritable(self._path, error) from None

    def remove(self) -> None:
        """The run has ended."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def run(a: Side, b: Side, work: Work, journal: Journal, progress: Progress) -> dict[str, Found]:
    """Do what is not done yet; every unit's findings by its name."""
    refuse_unlike(a, b)
    units = [*_levels_1(a, b, work), *_windows(a, b, work), *_generations(a, b, work)]
    for number, (unit, do) in enumerate(units):
        progress(unit, number, len(units))
        if unit not in journal.done:
            found = do()
            for side in (a, b):
                if isinstance(side, MayChange):
                    side.refuse_changed()  # before it is written down: what was found is of something else
            journal.add(unit, found)
    return {unit: journal.done[unit] for unit, _ in units}


Unit = tuple[str, Callable[[], Found]]


def _levels_1(a: Side, b: Side, work: Work) -> list[Unit]:
    session = a.session or b.session
    if 1 not in work.levels or session is None:
        return []
    model = session.model
    units: list[Unit] = [
        (f"operation {case.name}", partial(operations.measure, case, a, b))
        for case in operations.cases(model, work.seed, a, b)
    ]
    if model.expert_tensors:
        units.append(("merging", lambda: {n: operations.merging(model, s, work.seed) for n, s in (("a", a), ("b", b))}))
    return units


# ---- windows


def _windows(a: Side, b: Side, work: Work) -> list[Unit]:
    if not BY_WINDOW & set(work.levels):
        return []
    count = len(work.passage.windows)
    return [(f"window {i + 1} of {count}", partial(window, a, b, work.passage, i)) for i in range(count)]


def window(a: Side, b: Side, passage: Passage, number: int) -> Found:
    """Both sides over a window, B with A's routing where A has any and B takes it."""
    if isinstance(a, GivesPartials) or isinstance(b, GivesPartials):
        return partials.window(a, b, passage, number, CHUNK)
    tokens = passage.windows[number]
    walks = a.begin(number), b.begin(number)
    if walks[0] is None or walks[1] is None:
        return {}
    found = _Window(passage.first, passage.tokens_and_next(number))
    for at in range(0, len(tokens), CHUNK):
        chunk = tokens[at : at + CHUNK]
        piece_a = walks[0].run(chunk, None)
        found.add(at, piece_a, walks[1].run(chunk, piece_a.ids))
    return found.as_found()


class _Window:
    """What is found of a window, chunk by chunk. Positions before `first` are run and not counted."""

    def __init__(self, first: int, tokens: Sequence[int]) -> None:
        self._first, self._tokens = first, np.asarray(tokens, np.int64)
        self._values: dict[str, list[Floats]] = {name: [] for name in ("kl", "l_inf", "l2", "nll_a", "nll_b")}
        self._identical = self._counted = 0
        self._flips: list[Found] = []
        self._drift = dict[int, list[Floats]]()
        self._drifted = 0
        self._decisions = self._agreed = 0
        self._routing_flips: list[Found] = []

    def add(self, at: int, a: Piece, b: Piece) -> None:
        """The rows from position `at` on."""
        skip = max(0, self._first - at)
        if skip < len(a.logits):
            self._logits(at + skip, a, b, skip)
        for layer in a.residuals.keys() & b.residuals.keys():
            mine, theirs = a.residuals[layer][skip:], b.residuals[layer][skip:]
            self._drift.setdefault(layer, []).append(measures.relative_l2(mine, theirs))
            self._drifted += int(not measures.same_bits(mine, theirs).all())
        for layer in a.ids.keys() & b.scores.keys():
            self._routing(at + skip, layer, a, b, skip)

    def _logits(self, at: int, piece_a: Piece, piece_b: Piece, skip: int) -> None:
        a, b = piece_a.logits[skip:], piece_b.logits[skip:]
        known = [piece.known[skip:] for piece in (piece_a, piece_b) if piece.known is not None]
        found = measures.distances(a, b, np.logical_and.reduce(known) if known else None)
        for name, values in (("kl", found.kl), ("l_inf", found.l_inf), ("l2", found.l2)):
            self._values[name].append(values)
        self._identical += int(found.same_bits.sum())
        self._counted += len(a)
        top_a, top_b = measures.tops(a), measures.tops(b)
        for row in np.nonzero(top_a.ids != top_b.ids)[0]:
            self._flips.append(
                {
                    "position": at + int(row),
                    "a": int(top_a.ids[row]),
                    "b": int(top_b.ids[row]),
                    "margin_a": float(top_a.margins[row]),
                    "margin_b": float(top_b.margins[row]),
                }
            )
        targets = self._tokens[at + 1 : at + 1 + len(a)]  # the last row's is in no window
        if len(targets):
            for name, rows, piece in (("nll_a", a, piece_a), ("nll_b", b, piece_b)):
                nll = measures.token_nll(rows[: len(targets)], targets, are_log_probs=piece.known is not None)
                self._values[name].append(nll)

    def _routing(self, at: int, layer: int, a: Piece, b: Piece, skip: int) -> None:
        taken = a.ids[layer][skip:]
        if not len(taken):
            return
        own = measures.own_choice(b.scores[layer][skip:], taken.shape[1])
        gaps = measures.gaps(b.scores[layer][skip:], taken.shape[1])
        differs = (np.sort(own, axis=1) != np.sort(taken, axis=1)).any(axis=1)
        self._decisions += len(taken)
        self._agreed += int(len(taken) - differs.sum())
        for row in np.nonzero(differs)[0][: MOST_FLIPS - len(self._routing_flips)]:
            self._routing_flips.append(
                {
                    "position": at + int(row),
                    "layer": layer,
                    "a": taken[row].tolist(),
                    "b": own[row].tolist(),
                    "gap": float(gaps[row]),
                }
            )

    def as_found(self) -> Found:
        """All of it as JSON takes it."""
        values = {name: np.concatenate(parts).tolist() if parts else [] for name, parts in self._values.items()}
        parts_of = {str(layer): np.concatenate(parts) for layer, parts in sorted(self._drift.items())}
        drift = {layer: {"mean": float(of.mean()), "max": float(of.max())} for layer, of in parts_of.items() if len(of)}
        return {
            **values,
            "counted": self._counted,
            "identical": self._identical,
            "flips": self._flips,
            "drift": drift,
            "residuals_identical": bool(drift) and not self._drifted,
            "decisions": self._decisions,
            "agreed": self._agreed,
            "routing_flips": self._routing_flips,
        }


# ---- generations


def _generations(a: Side, b: Side, work: Work) -> list[Unit]:
    if 5 not in work.levels:
        return []
    picked = work.passage.prompts(work.prompts, work.prompt_tokens)
    return [
        (f"generation {i + 1} of {len(picked)}", partial(generation, a, b, prompt, work.tokens))
        for i, prompt in enumerate(picked)
    ]


def generation(a: Side, b: Side, prompt: Sequence[int], count: int) -> Found:
    """Greedy tokens of both, each with its own routing; `diverged` is the first that differs.

    A side that gives fewer has stopped at an end token, which is its last: what the other says after it has no match.
    """
    mine, theirs = a.generate(prompt, count), b.generate(prompt, count)
    if mine is None or theirs is None:
        return {}
    diverged = next((i for i, (x, y) in enumerate(zip(mine, theirs, strict=False)) if x != y), None)
    if diverged is None and not (mine and theirs) and (mine or theirs):
        diverged = 0
    return {"prompt": list(prompt), "a": mine, "b": theirs, "diverged": diverged}


def unit_kind(unit: str) -> str:
    """operation, merging, window or generation."""
    return unit.split(" ", 1)[0]
