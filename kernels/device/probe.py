"""Which class a device is of, by the bits of a known answer: experts with every function in them, small numbers too."""

from __future__ import annotations

import hashlib

import numpy as np

from ..formats import GGMLType
from ..interface import F32, ExpertBank, ExpertWeights
from ..matrix import Matrix
from .bank import ACTIVATIONS, DeviceBank
from .kernels import Kernels
from .room import Room

#: sha256 of the canonical class's rows for `questions`.
CANONICAL = "5e8ba95acd5e4f8992f0afc86626857e039a0a54d8b2c23569c4dfc2cf7015fc"


def questions() -> list[tuple[dict[int, ExpertWeights], F32]]:
    """Layers of experts with rows for them: the same on every machine, for they come of integers alone."""
    found = list[tuple[dict[int, ExpertWeights], F32]]()
    for number, word in enumerate(ACTIVATIONS):
        gate, up, down = (
            _matrix(7 * number + part, *shape) for part, shape in enumerate([(48, 64), (48, 64), (64, 48)])
        )
        x = _numbers(100 + number, 3 * 64).reshape(3, 64)
        x[1] *= np.float32(2.0**-70)  # products of these and weights as small end below 2^-126
        found.append(({0: ExpertWeights(gate=gate, up=up, down=down, activation=word)}, x))
    return found


def _numbers(seed: int, count: int) -> F32:
    """Numbers of many sizes: a congruential generator gives sign, a 20-bit fraction and a power of two."""
    state, values = seed + 1, np.empty(count, np.float32)
    for i in range(count):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        bits = state >> 33
        values[i] = np.float32(
            (1 + bits % 2**20 / 2**20) * 2.0 ** (bits // 2**20 % 16 - 13) * (1 - 2 * (bits >> 30 & 1))
        )
    return values


def _matrix(seed: int, rows: int, cols: int) -> Matrix:
    values = _numbers(seed, rows * cols).reshape(rows, cols)
    values[::5] *= np.float32(2.0**-66)
    data = np.ascontiguousarray(values).view(np.uint8).reshape(rows, 4 * cols)
    return Matrix(GGMLType.F32, rows, cols, data)


def digest(banks: list[tuple[ExpertBank, F32]]) -> str:
    """sha256 of the rows that banks of `questions` give."""
    whole = hashlib.sha256()
    for bank, x in banks:
        pairs = np.stack([np.arange(len(x)), np.zeros(len(x))], axis=1).astype(np.int32)
        whole.update(np.ascontiguousarray(bank.rows(x, pairs), "<f4").tobytes())
    return whole.hexdigest()


def is_canonical(kernels: Kernels, room: Room) -> bool:
    """Whether a device gives the bits that every kernel of the canonical class gives."""
    return digest([(DeviceBank("probe", kernels, room, experts), x) for experts, x in questions()]) == CANONICAL
