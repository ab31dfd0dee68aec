"""Prompts to tokens: prefill in chunks, decode step by step, stop where asked. Knows no command line and no sockets."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kernels.interface import F32
from kernels.state import Rows, Sequence, Taps

from .clock import Clock
from .errors import ContextFull, UsageError
from .executor import interleave
from .experts import ExpertSource
from .model import Model
from .sampling import Sampler, SamplingOptions
from .stops import StopStrings
from .tokenizer import StreamDecoder, Tokenizer

CHUNK_ROWS = 512  #: of a prompt, run at once: an expert's weights are unpacked once for all its rows


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """What ends an answer and how its tokens are chosen."""

    max_tokens: int = 128
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    digest: bool = False  #: keep the sha256 of each token's logits
    sampling: SamplingOptions = field(default_factory=SamplingOptions)


@dataclass(slots=True, kw_only=True)
class Timing:
    """Tokens and the seconds they took."""

    tokens: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassChange:
    """Experts went over to another numeric class while an answer was made."""

    token: int  #: index in the answer of the first token whose logits are of the new class map
    before: str  #: digest of the earlier map
    after: str  #: digest of the new one


@dataclass(slots=True, kw_only=True)
class Answer:
    """What came of a prompt. `stop`: eos, limit (-n), length (the context is full), stop (a string) or cancelled."""

    prompt_ids: list[int]
    ids: list[int] = field(default_factory=list)  #: with the end token that stopped it
    text: str = ""  #: without it
    stop: str = "cancelled"
    prompt: Timing = field(default_factory=Timing)
    decode: Timing = field(default_factory=Timing)
    logits_sha256: list[str] = field(default_factory=list)
    class_changes: list[ClassChange] = field(default_factory=list)
    is_in_doubt: bool = False  #: a worker was found to be wrong that may have had a part in it


class Engine:
    """One loaded model that runs tokens; a sequence's memory can be kept between requests."""

    def __init__(
        self,
        model: Model,
        experts: ExpertSource,
        *,
        context: int,
        chunk_rows: int = CHUNK_ROWS,
        clock: Clock | None = None,
    ) -> None:
        self.model = model
        self.experts = experts
        self.context = context
        self._chunk_rows = chunk_rows
        self._clock = clock  #: told where the time goes

    def new_sequence(self) -> Sequence:
        """An empty sequence."""
        return self.model.executor.sequence()

    def extend(
        self,
        sequence: Sequence,
        tokens: Seq[int],
        *,
        want_all: bool = False,
        taps: Taps | None = None,
        given_ids: Mapping[int, NDArray[np.int32]] | None = None,
    ) -> F32:
        """Run tokens at the sequence's end. Logits [1, vocabulary] after the last, or [T, vocabulary] after each.

        `taps` collects routing, scores and residuals; `given_ids` (layer: [T, k]) replaces the routers' choice.
        """
        parts = list(self.extend_in_chunks(sequence, tokens, want_all=want_all, taps=taps, given_ids=given_ids))
        return np.concatenate(parts) if len(parts) > 1 else parts[0]

    def extend_in_chunks(
        self,
        sequence: Sequence,
        tokens: Seq[int],
        *,
        want_all: bool = False,
        taps: Taps | None = None,
        given_ids: Mapping[int, NDArray[np.int32]] | None = None,
    ) -> Iterator[F32]:
        """As `extend`, giving each chunk's logits (none but for the last chunk, unless all are wanted)."""
        first = len(sequence.tokens)
        self.refuse_unfit(tokens, first)
        batches = list[Rows]()
        for start in range(0, len(tokens), self._chunk_rows):
            ids = np.asarray(tokens[start : start + self._chunk_rows], dtype=np.int32)
            is_last = start + len(ids) == len(tokens)
            wanted = np.arange(len(ids)) if want_all else np.arange(len(ids) - 1, len(ids)) if is_last else np.arange(0)
            positions = np.arange(first + start, first + start + len(ids), dtype=np.int64)
            given = {layer: of[start : start + len(ids)] for layer, of in given_ids.items()} if given_ids else None
            batches.append(Rows(ids, positions, [sequence] * len(ids), wanted, taps, given))
        # Taps are filled in the order of rows: chunks then run one after another.
        yield from self.run_batches(batches, at_once=1 if taps is not None else 2)

    def run_batches(self, batches: Seq[Rows], *, at_once: int = 2, clock: Clock | None = None) -> Iterator[F32]:
        """Run batches in order, each of one or several sequences; logits [wanted, vocabulary] of each.

        `clock` is told where the time goes, in place of the engine's own.

        When one fails, all of them are forgotten: a sequence never holds part of what was to be run.
        """
        before = {id(s): (s, len(s.tokens)) for rows in batches for s in rows.sequences}
        try:
            runs = [self.model.executor.run(rows, self.experts, clock or self._clock) for rows in batches]
            for rows, logits in zip(batches, interleave(runs, at_once=at_once), strict=True):
                for sequence, token in zip(rows.sequences, rows.tokens.tolist(), strict=True):
                    sequence.tokens.append(token)
                yield logits
        except BaseException:
            self.experts.abandon()
            for sequence, length in before.values():
                sequence.truncate(length)
            raise

    def step(self, sequence: Sequence, token: int) -> F32:
        """Run one more token; logits [vocabulary]."""
        logits: F32 = self.extend(sequence, [token])[0]
        return logits

    def choose(self, sampler: Sampler, row: F32, sequence: Sequence) -> int:
        """The next token of a sequence, for its logits [vocabulary]."""
        if self._clock is None:
            return sampler.choose(row, sequence.tokens)
        self._clock.mark()
        token = sampler.choose(row, sequence.tokens)
        self._clock.lap("sampling")
        return token

    def refuse_unfit(self, tokens: Seq[int], first: int = 0) -> None:
        """UsageError for tokens that cannot be run at position `first`: too many, none, or unknown ones."""
        if first + len(tokens) > self.context:
            raise ContextFull(
                f"{first + len(tokens)} tokens do not fit the context of {self.context}; raise it with -c"
            )
        if not tokens:
            raise UsageError("there is no token to run: give a prompt")
        worst = max(tokens) if max(tokens) >= self.model.vocabulary else min(tokens)
        if not 0 <= worst < self.model.vocabulary:
            raise UsageError(f"token id {worst} is not in the vocabulary (0 to {self.model.vocabulary - 1})")

    def generate(
        self,
        prompt_ids: Seq[int],
        tokenizer: Tokenizer,
        options: GenerateOptions,
        *,
        sequence: Sequence | None = None,
        on_text: Callable[[str], None] = lambda text: None,
        on_prompt: Callable[[int, int], None] = lambda done, total: None,
    ) -> Answer:
        """Answer a prompt. `sequence` may hold a prefix of it already. Text goes to `on_text` as it becomes certain.

        KeyboardInterrupt from a callback or a step ends the answer with stop "cancelled" and is not raised again.
        """
        turn = Turn(self, prompt_ids, tokenizer, options, sequence=sequence, on_text=on_text)
        try:
            logits = np.empty((0, 0), np.float32)
            for part in self.extend_in_chunks(turn.sequence, turn.left):
                logits = part
                on_prompt(len(turn.sequence.tokens), len(turn.answer.prompt_ids))
            token = turn.advance(logits[0] if len(logits) else logits)
            while token is not None:
                token = turn.advance(self.step(turn.sequence, token))
        except KeyboardInterrupt:
            turn.cancel()
        turn.finish()
        return turn.answer


class Turn:
    """An answer in the making: takes logits, gives the token to run next. Whoever runs the tokens drives it."""

    def __init__(
        self,
        engine: Engine,
        prompt_ids: Seq[int],
        tokenizer: Tokenizer,
        options: GenerateOptions,
        *,
        sequence: Sequence | None = None,
        on_text: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.answer = Answer(prompt_ids=list(prompt_ids))
        self.sequence = sequence or engine.new_sequence()
        self.answer.prompt.tokens = len(self.left)
        self._engine, self._options, self._eos_ids = engine, options, tokenizer.eos_ids
        self._stream = _Stream(tokenizer, options, self.answer, on_text)
        self._changes = _Changes(engine.experts, self.answer)
        self._sampler = Sampler(options.sampling)
        self._started = time.perf_counter()
        self._timing = self.answer.prompt

    @property
    def left(self) -> list[int]:
        """Tokens of the prompt that are yet to be run."""
        return self.answer.prompt_ids[len(self.sequence.tokens) :]

    def advance(self, row: F32) -> int | None:
        """Choose the token after those that were run, by its logits [vocabulary]. None: the answer has ended."""
        if self._timing is self.answer.prompt:
            self._lap()
            self._timing = self.answer.decode
        answer, options = self.answer, self._options
        if self._is_full():
            return None
        self._changes.note()
        token = self._engine.choose(self._sampler, row, self.sequence)
        if options.digest:
            answer.logits_sha256.append(logits_sha256(row))
        answer.ids.append(token)
        answer.decode.tokens += 1
        if token in self._eos_ids and not options.ignore_eos:
            answer.stop = "eos"
        elif self._stream.feed(token):
            answer.stop = "stop"
        elif not self._is_full():
            return token
        return None

    def cancel(self) -> None:
        """It was broken off, also where it had just ended."""
        self.answer.stop = "cancelled"

    def finish(self) -> None:
        """Once nothing more is run for it: show what was held back, stop its time."""
        self._lap()
        self._changes.note()
        self._stream.finish()

    def _lap(self) -> None:
        now = time.perf_counter()
        self._timing.seconds += now - self._started
        self._started = now

    def _is_full(self) -> bool:
        answer = self.answer
        if len(answer.ids) >= self._options.max_tokens:
            answer.stop = "limit"
        # The last token chosen is not in the sequence yet and needs a place of its own.
        elif len(answer.prompt_ids) + len(answer.ids) >= self._engine.context:
            answer.stop = "length"
        else:
            return False
        return True


class _Changes:
    """Changes of the class map, and of whom to believe, while an answer is made."""

    def __init__(self, experts: ExpertSource, answer: Answer) -> None:
        self._experts, self._answer = experts, answer
        self._known = len(experts.class_changes)  #: the earlier ones belong to earlier answers
        self._doubts = experts.doubts

    def note(self) -> None:
        """Those that are new hold from the token on that is chosen next."""
        new = self._experts.class_changes[self._known :]
        token = len(self._answer.ids)
        self._answer.class_changes += [ClassChange(token=token, before=c.before, after=c.after) for c in new]
        self._known += len(new)
        self._answer.is_in_doubt = self._experts.doubts != self._doubts


class _Stream:
    """Token ids to text: whole characters, stop strings held back."""

    def __init__(
        self, tokenizer: Tokenizer, options: GenerateOptions, answer: Answer, on_text: Callable[[str], None]
    ) -> None:
        self._decoder = StreamDecoder(tokenizer)
        self._stops = StopStrings(options.stop)
        self._answer = answer
        self._on_text = on_text

    def feed(self, token: int) -> bool:
        """Show what became certain; whether a stop string ended the text."""
        self._show(self._stops.feed(self._decoder.feed(token)))
        return self._stops.found is not None

    def finish(self) -> None:
        """Show what was held back, once the answer has ended."""
        if self._stops.found is None:
            self._show(self._stops.feed(self._decoder.flush()))
            if self._stops.found is None:
                self._show(self._stops.flush())

    def _show(self, text: str) -> None:
        if text:
            self._answer.text += text
            self._on_text(text)


def common_prefix(cached: list[int], ids: list[int]) -> int:
    """How many tokens of what is cached begin the prompt; one is left to run, since its logits are needed."""
    same = next((i for i, (a, b) in enumerate(zip(cached, ids, strict=False)) if a != b), min(len(cached), len(ids)))
    return min(same, len(ids) - 1)


def logits_sha256(row: NDArray[np.float32]) -> str:
    """sha256 of the bits of one row of logits, little-endian float32."""
    return hashlib.sha256(np.ascontiguousarray(row, dtype="<f4").tobytes()).hexdigest()
