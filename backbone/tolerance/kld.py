"""`kld:FILE`: what llama-perplexity's `--kl-divergence-base` writes (llama.cpp, tools/perplexity/perplexity.cpp).

Little-endian: "_logits_"; int32 n_ctx, n_vocab, n_chunk; int32 tokens [n_chunk, n_ctx] as the text has them; and of
each chunk the positions n_ctx/2 to n_ctx - 2, a row each: float32 scale, float32 min, uint16 q [n_vocab], padded to an
even count. A token's log-probability is scale * q + min. What is less likely than e^-16 of the likeliest has q = 0 and
may be anything below: such are not *known*, and no distance is measured in them. Taken as they are written, they would
add up to 5e-5 nats to each KL. Each chunk was run with BOS in place of its first token, where texts begin with BOS.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from kernels.gguf import open_gguf
from kernels.interface import F32, I32, DenseBackend

from ..discovery import resolve_model
from ..errors import UsageError
from ..session import Session
from ..settings import Settings
from ..tokenizer import load_tokenizer
from .measures import F64
from .passage import Passage
from .sides import Given, Piece, Side, told_of_outside

MAGIC = b"_logits_"
HEAD = struct.Struct("<8s3i")
ROW_HEAD_BYTES = 8  # scale and min
STEPS = 65535  # of q
RANGE = 16.0  #: nats below the likeliest, at which q is 0
ROUNDING = 1e-3  #: of such sums in float32
MOST_CONTEXT, MOST_VOCABULARY, MOST_CHUNKS = 1 << 20, 1 << 21, 1 << 20
LEAST_SUM, MOST_SUM = 0.9, 1.01  #: of a row's known probabilities


class KldFile:
    """A file that was looked at as far as its tokens; rows are read as they are asked for."""

    def __init__(self, file: BinaryIO, place: str) -> None:
        self._file, self._place = file, place
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        head = file.read(HEAD.size)
        if len(head) < HEAD.size or not head.startswith(MAGIC):
            raise UsageError(f"{place}: is no file of llama-perplexity --kl-divergence-base")
        _, self.context, self.vocabulary, self.chunks = HEAD.unpack(head)
        for what, value, least, most in (
            ("n_ctx", self.context, 4, MOST_CONTEXT),
            ("n_vocab", self.vocabulary, 2, MOST_VOCABULARY),
            ("n_chunk", self.chunks, 1, MOST_CHUNKS),
        ):
            if not least <= value <= most:
                raise UsageError(f"{place}: {what} is {value}, which is not from {least} to {most}; write it anew")
        self.first = self.context // 2
        self.rows = self.context - 1 - self.first
        self._row_bytes = ROW_HEAD_BYTES + 2 * (2 * ((self.vocabulary + 1) // 2))
        self._start = HEAD.size + 4 * self.chunks * self.context
        wanted = self._start + self.chunks * self.rows * self._row_bytes
        if size != wanted:
            raise UsageError(f"{place}: has {size} bytes where {wanted} are due; was llama-perplexity stopped?")
        tokens = np.frombuffer(self._read(HEAD.size, 4 * self.chunks * self.context), "<i4")
        if tokens.min() < 0 or tokens.max() >= self.vocabulary:
            raise UsageError(f"{place}: holds tokens that are not in its vocabulary; write it anew")
        self.tokens = tokens.reshape(self.chunks, self.context)  # [n_chunk, n_ctx]
        file.seek(0)
        whole = hashlib.sha256()
        while block := file.read(1 << 20):
            whole.update(block)
        self.sha256 = whole.hexdigest()

    def log_probs(self, chunk: int, at: int, count: int) -> tuple[F64, NDArray[np.bool_]]:
        """[count, V] of the positions from `first` + at on, and which are known. UsageError where they are none."""
        start = self._start + (chunk * self.rows + at) * self._row_bytes
        raw = np.frombuffer(self._read(start, count * self._row_bytes), np.uint8).reshape(count, self._row_bytes)
        head = raw[:, :ROW_HEAD_BYTES].copy().view("<f4").astype(np.float64)  # [count, 2]
        q = raw[:, ROW_HEAD_BYTES:].copy().view("<u2")[:, : self.vocabulary]
        scale, least = head[:, :1], head[:, 1:]
        with np.errstate(invalid="ignore", over="ignore"):
            reach = scale * STEPS
            fine = (scale >= 0) & (reach <= RANGE + ROUNDING) & (least >= -1e6) & (least + reach <= ROUNDING)
        if fine.all():
            found = scale * q + least
            known = (q > 0) | (reach < RANGE - ROUNDING)
            sums = np.where(known, np.exp(found), 0).sum(axis=1)
            if ((sums >= LEAST_SUM) & (sums <= MOST_SUM)).all():
                return found, known
        raise UsageError(f"{self._place}: chunk {chunk + 1} holds what are no log-probabilities; write it anew")

    def _read(self, start: int, count: int) -> bytes:
        self._file.seek(start)
        data = self._file.read(count)
        if len(data) != count:
            raise UsageError(f"{self._place}: became shorter while it was read")
        return data


class KldSide:
    """llama.cpp's log-probabilities: no routing, residuals or generation."""

    def __init__(self, file: KldFile, place: str, name: str, start: Sequence[int]) -> None:
        self._file, self._place = file, place
        self.numeric_class, self.precision = "", "outside"
        self.told: Mapping[str, Any] = told_of_outside(place, "kld", "llama.cpp") | {"file_sha256": file.sha256}
        # The last token of a chunk has no row: it is what the row before it predicts.
        windows = [(*(start[:1] or row[:1]), *row[1:-1]) for row in file.tokens.tolist()]
        after = tuple(file.tokens[:, -1].tolist())
        sha256 = hashlib.sha256(file.tokens.tobytes()).hexdigest()  # of which text, not of what was computed
        self._windows = tuple(windows)
        self.passage: Passage | None = Passage(name, sha256, self._windows, file.first, after)
        self.backend: DenseBackend | None = None
        self.session: Session | None = None
        self.holds: Mapping[int, Collection[int]] | None = None

    def refuse_other(self, other: Side) -> None:
        """By the size of the vocabulary, which is all that the file says of its model."""
        if other.session is not None and other.session.model.vocabulary != self._file.vocabulary:
            raise UsageError(
                f"{self._place}: has {self._file.vocabulary} tokens and the model {other.session.model.vocabulary}"
            )

    def begin(self, window: int) -> _KldWalk:
        """A chunk, row by row."""
        return _KldWalk(self._file, self._place, self._windows[window], window)

    def rows(self, layer: int, x: F32, ids: I32) -> None:
        """Nothing."""

    def generate(self, prompt: Sequence[int], count: int) -> None:
        """Nothing."""


class _KldWalk:
    def __init__(self, file: KldFile, place: str, window: tuple[int, ...], number: int) -> None:
        self._file, self._place, self._window, self._number, self._at = file, place, window, number, 0

    def run(self, tokens: Sequence[int], given: Given | None) -> Piece:
        """Rows before the first that counts are 0."""
        start, end = self._at, self._at + len(tokens)
        if tuple(tokens) != self._window[start:end]:
            raise UsageError(f"{self._place}: has no figures of these tokens; run it over its own passage")
        self._at = end
        logits = np.zeros((len(tokens), self._file.vocabulary))
        known = np.ones(logits.shape, np.bool_)
        skip = max(0, self._file.first - start)
        if skip < len(tokens):
            at = start + skip - self._file.first
            logits[skip:], known[skip:] = self._file.log_probs(self._number, at, len(tokens) - skip)
        return Piece(logits, known=known)


@contextmanager
def open_kld(flag: str, rest: str, settings: Settings, context: int) -> Iterator[Side]:
    """The side `kld:FILE` of the settings' model, which says whether texts begin with BOS."""
    place = f"{flag} kld:{rest}"
    with open_gguf(resolve_model(settings.model, os.environ)) as gguf:
        tokenizer = load_tokenizer(gguf.metadata, str(gguf.path))
        start = [one for one in tokenizer.encode("")[:1] if one == tokenizer.bos_id]
    with ExitStack() as stack:
        try:
            file = stack.enter_context(Path(rest).open("rb"))
        except OSError as error:
            raise UsageError(f"{place}: cannot be read: {error.strerror}") from None
        yield KldSide(KldFile(file, place), place, Path(rest).name, start)
