"""The `native` backend: our C kernels on this machine's CPU, in the canonical order."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

import numpy as np

from ..cores import usable_cores
from ..errors import KernelError
from ..interface import F32, I32, ExpertBank, ExpertWeights, NumericClass, Operation, Options, one_shape
from ..native import build
from ..native.memory import address
from ..native.program import NativeProgram
from ..native.structs import CBank, CExpert, CMatrix, CRun
from .cpu import cpu_model

#: Activations of experts by their number in the C source.
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}


class NativeBackend:
    """Compiled kernels with a pool of threads. The pool starts with the first computation."""

    name = "native"
    memory_bytes = 0

    def __init__(self, options: Options, library: ctypes.CDLL | None = None) -> None:
        """On a library that is loaded already, else on this machine's own.

        BackendUnavailable when there is no compiler, or what it made does not load.
        """
        self._library = library or build.load()
        self.variant: str = self._library.swarm_variant().decode()
        self.device = f"{cpu_model()} ({self.variant})"
        self.threads = options.threads or usable_cores()
        self.numeric_class = NumericClass(name="canonical-1", activations=options.activations)
        self._is_i16 = options.activations == "i16"
        self.half_cache = options.kv_cache == "f16"
        self._pool: int | None = None

    def _threads(self) -> int:
        """The pool's address."""
        if self._pool is None:
            pool: int | None = self._library.swarm_pool_new(self.threads)
            if pool is None:
                raise KernelError("native: no memory for threads")
            self._pool = pool
            self.threads = self._library.swarm_pool_threads(pool)
            weakref.finalize(self, self._library.swarm_pool_free, pool)
        return self._pool

    def program(self, operations: Seq[Operation], slot_widths: Seq[int]) -> NativeProgram:
        """Bind a whole program."""
        return NativeProgram(self, operations, slot_widths)

    def load(self, experts: Mapping[int, ExpertWeights]) -> NativeBank:
        """Experts where they are, with their addresses."""
        return NativeBank(self, experts)

    @property
    def quantised_floats(self) -> Callable[[int], int] | None:
        """Floats that so many activations take when they are quantised; None in the F32 class."""
        return self._library.swarm_quantised_floats if self._is_i16 else None

    def run(self, steps: int, count: int, run: CRun) -> None:
        """Run steps at an address. KernelError when there is no memory."""
        if self._library.swarm_run(self._threads(), steps, count, ctypes.byref(run)):
            raise KernelError("native: no memory for what the threads need")

    def bank_of(self, bank: ExpertBank) -> CBank:
        """What C knows of a bank."""
        if not isinstance(bank, NativeBank):
            raise TypeError(f"a bank of another backend: {type(bank).__name__}")
        return bank.bank

    def expert_rows(self, bank: CBank, x: F32, pairs: I32) -> F32:
        """Rows [P, outputs] of pairs [P, 2]."""
        out = np.empty((len(pairs), bank.outputs), np.float32)
        x, pairs = np.ascontiguousarray(x, np.float32), np.ascontiguousarray(pairs, np.int32)
        failed = self._library.swarm_expert_rows(
            *(self._threads(), ctypes.addressof(bank), address(x), len(x)),
            *(address(pairs), len(pairs), address(out), self._is_i16),
        )
        if failed:
            raise KernelError(f"native: no memory for {len(pairs)} rows")
        return out


class NativeBank:
    """Experts of one layer."""

    def __init__(self, backend: NativeBackend, experts: Mapping[int, ExpertWeights]) -> None:
        one = one_shape(experts.values())
        self._backend, self._weights = backend, dict(experts)  # C knows only addresses
        self._table = (CExpert * (max(experts) + 1))()
        for i, e in experts.items():
            biases = [None if b is None else address(b) for b in (e.gate_bias, e.up_bias, e.down_bias)]
            self._table[i] = CExpert(CMatrix.of(e.gate), CMatrix.of(e.up), CMatrix.of(e.down), *biases)
        self.bank = CBank(
            ctypes.addressof(self._table),
            len(self._table),
            ACTIVATIONS[one.activation],
            one.gate.cols,
            one.gate.rows,
            one.down.rows,
        )

    def rows(self, x: F32, pairs: I32) -> F32:
        """Unweighted rows [P, width] float32 for pairs [P, 2] of (row of x [R, D], expert)."""
        return self._backend.expert_rows(self.bank, x, pairs)
