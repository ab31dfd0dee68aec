"""SentencePiece-style merging by score, as `tokenizer.ggml.model` "llama" asks for.

A piece's score is the rank of its merge, not a probability: of all neighbouring pairs that form a piece, the best
scored is merged first, ties to the left; what forms no piece falls back to its bytes.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import Any

from .errors import TokenizerError


class Spm:
    """Merges characters to pieces."""

    def __init__(self, ids: Mapping[str, int], scores: Any, unknown_id: int | None) -> None:
        self._ids = ids
        self._scores: list[float] = scores.tolist()
        self._bytes = [ids.get(f"<0x{byte:02X}>", ids.get(chr(byte))) for byte in range(256)]
        self._unknown_id = unknown_id

    def encode(self, text: str) -> list[int]:
        """Ids of a text whose spaces are U+2581 already."""
        if not text:
            return []
        pieces, left, right = list(text), list(range(-1, len(text) - 1)), [*range(1, len(text)), -1]
        queue = list[tuple[float, int, int, str]]()
        for at in range(len(text) - 1):
            self._offer(queue, pieces, at, at + 1)
        while queue:
            _, at, after, merged = heapq.heappop(queue)
            # A pair is stale when either side was merged since: their texts then no longer add up.
            if not pieces[at] or not pieces[after] or pieces[at] + pieces[after] != merged or right[at] != after:
                continue
            pieces[at], pieces[after] = merged, ""
            right[at] = right[after]
            if right[after] >= 0:
                left[right[after]] = at
                self._offer(queue, pieces, at, right[at])
            if left[at] >= 0:
                self._offer(queue, pieces, left[at], at)
        ids, at = list[int](), 0
        while at >= 0:
            ids += self._piece(pieces[at])
            at = right[at]
        return ids

    def _offer(self, queue: list[tuple[float, int, int, str]], pieces: list[str], at: int, after: int) -> None:
        merged = pieces[at] + pieces[after]
        if (token := self._ids.get(merged)) is not None:
            heapq.heappush(queue, (-self._scores[token], at, after, merged))

    def _piece(self, piece: str) -> list[int]:
        """A finished piece is a token, or a single character of none: every merge made a token."""
        if (token := self._ids.get(piece)) is not None:
            return [token]
        found = [self._bytes[byte] for byte in piece.encode("utf-8")]
        if any(token is None for token in found):
            if self._unknown_id is None:
                raise TokenizerError(f"the vocabulary has neither {piece!r}, nor its bytes, nor an unknown token")
            return [self._unknown_id]
        return [token for token in found if token is not None]
