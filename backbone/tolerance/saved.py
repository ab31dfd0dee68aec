"""`saved:FILE`: a run of one of our own sides, kept with all that levels 2 to 6 ask of it.

The archive (see `archive`) has `run.json`, whose fields `_Run` checks, and by window i and its row r, in steps of
`chunk`: `w<i>/tokens` int32 [T]; `w<i>/r<r>/logits` [R, V], where any row of them counts; `w<i>/r<r>/ids.<layer>` int32
[R, k]; `.../scores.<layer>` [R, E]; `.../residuals.<layer>` [R, W]. Floats are float32, or the oracle's float64.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kernels.interface import F32, I32, DenseBackend

from ..errors import UsageError
from ..provenance import SHA256
from ..session import Session
from ..settings import Settings
from .archive import ArchiveReader, ArchiveWriter
from .measures import Floats
from .passage import Passage
from .sides import Given, Piece, Side

FORMAT, VERSION = "expertswarm run", 1
MEMBER = "run.json"
MOST_JSON = 1 << 26
CHUNK, MOST_CHUNK = 64, 256  #: rows of a window that lie together
FLOATS = ("<f4", "<f8")
MOST_VOCABULARY, MOST_WINDOWS, MOST_ROWS, MOST_LAYERS, MOST_WIDTH = 1 << 21, 1 << 20, 1 << 20, 1 << 12, 1 << 20
PRECISIONS = ("f64", "f32", "i16", "f16", "outside")
#: What a report says of a side, as far as it is text.
TOLD = ("asked", "kind", "backend", "class", "class_map", "device", "wire")
MOST_TEXT = 300

Progress = Callable[[str, int, int], None]


# ---- writing


def save(
    side: Side, passage: Passage, path: Path, progress: Progress, *, prompts: int, prompt_tokens: int, tokens: int
) -> None:
    """Run a side over a passage with its own routing, and `tokens` greedy tokens after each of so many prompts.

    The file is there whole at the end, or not at all. UsageError for a side without a model of its own.
    """
    if side.session is None:
        raise UsageError(f"{side.told.get('asked')}: only a model that is run here can be saved")
    found = _Found()
    with ArchiveWriter(path) as archive:
        for number in range(len(passage.windows)):
            progress(f"window {number + 1} of {len(passage.windows)}", number, len(passage.windows))
            _save_window(side, passage, number, archive, found)
        generations = list[dict[str, Any]]()
        for prompt in passage.prompts(prompts, prompt_tokens):
            progress(f"generation {len(generations) + 1}", len(passage.windows), len(passage.windows))
            given = side.generate(prompt, tokens)
            generations.append({"prompt": list(prompt), "asked": tokens, "tokens": given})
        archive.json(
            MEMBER,
            {
                "format": FORMAT,
                "version": VERSION,
                "weights": side.session.digest.result(),
                "told": {key: str(side.told[key]) for key in TOLD if key in side.told},
                "numeric_class": side.numeric_class,
                "precision": side.precision,
                "passage": {
                    "name": passage.name,
                    "sha256": passage.sha256,
                    "first": passage.first,
                    "after": list(passage.after),
                    "lengths": [len(window) for window in passage.windows],
                },
                "chunk": CHUNK,
                "logits": found.logits,
                "routing": found.routing,
                "residuals": found.residuals,
                "generations": [one for one in generations if one["tokens"] is not None],
            },
        )


class _Found:
    """Shapes and dtypes, as the first rows have them."""

    def __init__(self) -> None:
        self.logits: dict[str, Any] = {}
        self.routing: dict[str, dict[str, Any]] = {}
        self.residuals: dict[str, dict[str, Any]] = {}


def _save_window(side: Side, passage: Passage, number: int, archive: ArchiveWriter, found: _Found) -> None:
    walk, window = side.begin(number), passage.windows[number]
    if walk is None:
        raise UsageError(f"{side.told.get('asked')}: has no logits that could be saved")
    archive.array(f"w{number}/tokens", np.asarray(window, np.int32))
    for at in range(0, len(window), CHUNK):
        piece, place = walk.run(window[at : at + CHUNK], None), f"w{number}/r{at}"
        found.logits = {"vocabulary": piece.logits.shape[1], "dtype": piece.logits.dtype.str}
        if at + len(piece.logits) > passage.first:
            archive.array(f"{place}/logits", piece.logits)
        for layer, ids in piece.ids.items():
            scores = piece.scores[layer]
            found.routing[str(layer)] = {
                "chosen": ids.shape[1],
                "experts": scores.shape[1],
                "dtype": scores.dtype.str,
            }
            archive.array(f"{place}/ids.{layer}", ids.astype(np.int32))
            archive.array(f"{place}/scores.{layer}", scores)
        for layer, rows in piece.residuals.items():
            found.residuals[str(layer)] = {"width": rows.shape[1], "dtype": rows.dtype.str}
            archive.array(f"{place}/residuals.{layer}", rows)


# ---- reading


@dataclass(frozen=True, slots=True)
class _Routing:
    chosen: int
    experts: int
    dtype: str


@dataclass(frozen=True, slots=True)
class _Residual:
    width: int
    dtype: str


class _Run:
    """`run.json` of a file, each field of it checked."""

    def __init__(self, place: str, content: Mapping[str, Any]) -> None:
        self._place = place
        if (content.get("format"), content.get("version")) != (FORMAT, VERSION):
            raise self._error("format", f"is not {FORMAT!r} version {VERSION}")
        self.weights = self._text(content, "weights")
        if not SHA256.fullmatch(self.weights):
            raise self._error("weights", "is no sha256")
        told = self._object(content, "told")
        self.told = {key: self._text(told, key) for key in TOLD if key in told}
        self.numeric_class, self.precision = self._text(content, "numeric_class"), self._text(content, "precision")
        if self.precision not in PRECISIONS:
            raise self._error("precision", f"is none of {', '.join(PRECISIONS)}")
        passage = self._object(content, "passage")
        self.name, self.sha256 = self._text(passage, "name"), self._text(passage, "sha256")
        self.lengths = self._ids(passage, "lengths", 1, MOST_ROWS, MOST_WINDOWS)
        self.first = self._number(passage, "first", 0, MOST_ROWS)
        self.chunk = self._number(content, "chunk", 1, MOST_CHUNK)
        logits = self._object(content, "logits")
        self.vocabulary = self._number(logits, "vocabulary", 2, MOST_VOCABULARY)
        self.dtype = self._dtype(logits)
        self.after = self._ids(passage, "after", 0, self.vocabulary - 1, len(self.lengths))
        if not self.lengths or len(self.after) not in (0, len(self.lengths)):
            raise self._error("after", "is of other windows")
        self.routing = dict[int, _Routing]()
        for layer, one in self._layers(content, "routing"):
            experts = self._number(one, "experts", 1, MOST_WIDTH)
            self.routing[layer] = _Routing(self._number(one, "chosen", 1, experts), experts, self._dtype(one))
        self.residuals = {
            layer: _Residual(self._number(one, "width", 1, MOST_WIDTH), self._dtype(one))
            for layer, one in self._layers(content, "residuals")
        }
        self.generations = [self._generation(one) for one in self._list(content, "generations", MOST_WINDOWS)]

    def _generation(self, one: Any) -> tuple[tuple[int, ...], int, list[int]]:
        if not isinstance(one, dict):
            raise self._error("generations", "holds what is no object")
        most = self.vocabulary - 1
        prompt, asked = self._ids(one, "prompt", 0, most, MOST_ROWS), self._number(one, "asked", 0, MOST_ROWS)
        return tuple(prompt), asked, self._ids(one, "tokens", 0, most, asked)

    def _layers(self, content: Mapping[str, Any], key: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
        layers = self._object(content, key)
        for name, one in layers.items():
            if not (name.isascii() and name.isdecimal() and len(name) < 6 and isinstance(one, dict)):
                raise self._error(key, "is not by layer")
            yield int(name), one

    def _object(self, content: Mapping[str, Any], key: str) -> dict[str, Any]:
        found = content.get(key)
        if not isinstance(found, dict) or len(found) > MOST_LAYERS:
            raise self._error(key, "is no object of a run")
        return found

    def _list(self, content: Mapping[str, Any], key: str, most: int) -> list[Any]:
        found = content.get(key)
        if not isinstance(found, list) or len(found) > most:
            raise self._error(key, f"is no list of at most {most}")
        return found

    def _ids(self, content: Mapping[str, Any], key: str, least: int, most: int, count: int) -> list[int]:
        found = self._list(content, key, count)
        if not all(type(one) is int and least <= one <= most for one in found):
            raise self._error(key, f"holds what is no number from {least} to {most}")
        return found

    def _number(self, content: Mapping[str, Any], key: str, least: int, most: int) -> int:
        found = content.get(key)
        if type(found) is not int or not least <= found <= most:
            raise self._error(key, f"is no number from {least} to {most}")
        return found

    def _text(self, content: Mapping[str, Any], key: str) -> str:
        found = content.get(key)
        if not isinstance(found, str) or len(found) > MOST_TEXT or not found.isprintable():
            raise self._error(key, f"is no text of at most {MOST_TEXT} characters")
        return found

    def _dtype(self, content: Mapping[str, Any]) -> str:
        found = content.get("dtype")
        if not isinstance(found, str) or found not in FLOATS:
            raise self._error("dtype", f"is none of {', '.join(FLOATS)}")
        return found

    def _error(self, field: str, what: str) -> UsageError:
        return UsageError(f"{self._place}: {MEMBER}: {field!r} {what}; save the run anew")


class SavedSide:
    """The side that was saved. It takes nobody's routing, and has nothing of single operations."""

    def __init__(self, archive: ArchiveReader, place: str) -> None:
        self._archive, self._place, self._run = archive, place, _Run(place, archive.json(MEMBER, MOST_JSON))
        run = self._run
        self.numeric_class, self.precision = run.numeric_class, run.precision
        self.told: Mapping[str, Any] = {
            **run.told,
            "asked": place.partition(" ")[2],
            "kind": "saved",
            "of": run.told.get("asked", ""),
            "precision": run.precision,
            "routing": "its own",
            "weights": run.weights,
            "file_sha256": archive.sha256,
            "workers": [],
        }
        self._windows = tuple(self._window(i) for i in range(len(run.lengths)))
        self.passage: Passage | None = Passage(run.name, run.sha256, self._windows, run.first, tuple(run.after))
        self.backend: DenseBackend | None = None
        self.session: Session | None = None
        self.holds: Mapping[int, Collection[int]] | None = None

    def _window(self, number: int) -> tuple[int, ...]:
        tokens = self._archive.array(f"w{number}/tokens", "<i4", (self._run.lengths[number],))
        if tokens.min() < 0 or tokens.max() >= self._run.vocabulary:
            raise UsageError(f"{self._place}: w{number}/tokens.npy holds no token ids; save the run anew")
        return tuple(tokens.tolist())

    def refuse_other(self, other: Side) -> None:
        """By the sha256 of the weights; and the shapes, for the file may lie: routing goes into the other's kernels."""
        run, session = self._run, other.session
        weights = other.told.get("weights", run.weights) if session is None else session.digest.result()
        if weights != run.weights:
            raise UsageError(
                f"{self._place}: is a run of another model (sha256 {run.weights[:16]}, not {weights[:16]})"
            )
        if session is None:
            return
        model = session.model
        chosen = {step.layer: step.constants["count"] for step in model.program.steps if step.op == "top_k"}
        mine = {layer: (model.expert_count(layer), chosen[layer]) for layer in model.expert_tensors}
        saved = {layer: (one.experts, one.chosen) for layer, one in run.routing.items()}
        if model.vocabulary != run.vocabulary or mine != saved:
            raise UsageError(f"{self._place}: vocabulary or routing is not that of the model; save the run anew")

    def begin(self, window: int) -> _SavedWalk:
        """Rows of a window, read as they are asked for."""
        return _SavedWalk(self._archive, self._place, self._run, self._windows[window], window)

    def rows(self, layer: int, x: F32, ids: I32) -> None:
        """Nothing: other inputs were not kept."""

    def generate(self, prompt: Sequence[int], count: int) -> list[int] | None:
        """Of a prompt that was saved with as many tokens, or an end before them."""
        for saved, asked, tokens in self._run.generations:
            if saved == tuple(prompt) and (asked >= count or len(tokens) < asked):
                return tokens[:count]
        return None


class _SavedWalk:
    def __init__(self, archive: ArchiveReader, place: str, run: _Run, window: tuple[int, ...], number: int) -> None:
        self._archive, self._place, self._run, self._number = archive, place, run, number
        self._window, self._at = window, 0

    def run(self, tokens: Sequence[int], given: Given | None) -> Piece:
        start, end = self._at, self._at + len(tokens)
        if tuple(tokens) != self._window[start:end]:
            raise UsageError(f"{self._place}: has no figures of these tokens; run it over its own passage")
        self._at, run = end, self._run
        ids, scores, residuals = dict[int, Any](), dict[int, Floats](), dict[int, Floats]()
        for layer, routing in run.routing.items():
            ids[layer] = self._rows(start, end, f"ids.{layer}", "<i4", routing.chosen)
            if ids[layer].min() < 0 or ids[layer].max() >= routing.experts:
                raise UsageError(f"{self._place}: window {self._number + 1}: no ids of experts; save the run anew")
            scores[layer] = self._rows(start, end, f"scores.{layer}", routing.dtype, routing.experts)
        for layer, residual in run.residuals.items():
            residuals[layer] = self._rows(start, end, f"residuals.{layer}", residual.dtype, residual.width)
        return Piece(self._rows(start, end, "logits", run.dtype, run.vocabulary), ids, scores, residuals)

    def _rows(self, start: int, end: int, name: str, dtype: str, width: int) -> Any:
        """Rows [end - start, width]; logits that do not count were not kept and are 0."""
        chunk, parts = self._run.chunk, []
        for at in range(start // chunk * chunk, end, chunk):
            shape = (min(chunk, len(self._window) - at), width)
            if name == "logits" and at + shape[0] <= self._run.first:
                rows: Any = np.zeros(shape, dtype)
            else:
                rows = self._archive.array(f"w{self._number}/r{at}/{name}", dtype, shape)
            parts.append(rows[max(0, start - at) : end - at])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


@contextmanager
def open_saved(flag: str, rest: str, settings: Settings, context: int) -> Iterator[Side]:
    """The side `saved:FILE`. UsageError says what is wrong with the file."""
    place = f"{flag} saved:{rest}"
    with closing(ArchiveReader(Path(rest), place)) as archive:
        yield SavedSide(archive, place)
