"""What a model answers by whoever computes its experts, for tests to compare."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from backbone.engine import Engine
from backbone.experts import ExpertSource
from backbone.model import Model


def bits(model: Model, experts: ExpertSource, tokens: Sequence[int], chunk: int = 512) -> bytes:
    """The logits after each token."""
    engine = Engine(model, experts, context=64, chunk_rows=chunk)
    return engine.extend(engine.new_sequence(), tokens, want_all=True).tobytes()


def greedy(model: Model, experts: ExpertSource, prompt: Sequence[int], count: int) -> list[int]:
    """The likeliest tokens after a prompt."""
    engine, ids = Engine(model, experts, context=64), list[int]()
    sequence = engine.new_sequence()
    row = engine.extend(sequence, prompt)[0]
    while len(ids) < count:
        ids.append(int(np.argmax(row)))
        row = engine.step(sequence, ids[-1])
    return ids
