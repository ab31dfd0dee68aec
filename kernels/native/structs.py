"""The structures that Python and C share, field by field as in the C source; `check` compares their sizes."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p

from ..errors import BackendUnavailable
from ..formats import row_bytes
from ..matrix import Matrix


class CMatrix(Structure):
    _fields_ = (("data", c_void_p), ("type", c_int32), ("rows", c_int32), ("cols", c_int32), ("row_bytes", c_int32))

    @classmethod
    def of(cls, matrix: Matrix) -> CMatrix:
        """The matrix as C sees it. Whoever holds the result keeps the matrix alive."""
        size = row_bytes(matrix.type, matrix.cols)
        return cls(matrix.data.ctypes.data, int(matrix.type), matrix.rows, matrix.cols, size)


class CExpert(Structure):
    _fields_ = (
        ("gate", CMatrix),
        ("up", CMatrix),
        ("down", CMatrix),
        ("gate_bias", c_void_p),
        ("up_bias", c_void_p),
        ("down_bias", c_void_p),
    )


class CBank(Structure):
    _fields_ = (
        ("experts", c_void_p),
        ("count", c_int32),
        ("activation", c_int32),
        ("inputs", c_int32),
        ("hidden", c_int32),
        ("outputs", c_int32),
    )


class CCache(Structure):
    _fields_ = (("keys", c_void_p), ("values", c_void_p), ("capacity", c_int64))


class CAttention(Structure):
    _fields_ = (
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("width", c_int32),
        ("value_width", c_int32),
        ("window", c_int32),
        ("scale", c_float),
        ("softcap", c_float),
        ("sinks", c_void_p),
        ("is_half", c_int32),
    )


class CStep(Structure):
    _fields_ = (
        ("op", c_int32),
        ("layer", c_int32),
        ("meet", c_int32),
        ("wanted", c_int32),
        ("inputs", c_int32 * 3),
        ("out", c_int32),
        ("width", c_int32),
        ("out_width", c_int32),
        ("n", c_int32 * 5),
        ("f", c_float),
        ("memory", c_int32),
        ("part", c_int32),
        ("vector", c_void_p),
        ("second", c_void_p),
        ("matrix", CMatrix),
        ("attention", CAttention),
        ("bank", c_void_p),
    )


class CRun(Structure):
    _fields_ = (
        ("rows", c_int32),
        ("wanted_count", c_int32),
        ("tokens", c_void_p),
        ("positions", c_void_p),
        ("wanted", c_void_p),
        ("sequence", c_void_p),
        ("caches", c_void_p),
        ("slots", c_void_p),
        ("ids", c_void_p),
        ("given", c_void_p),
        ("most_keys", c_int64),
        ("bad_layer", c_int32),
        ("hidden", c_void_p),
        ("hidden_quantised", c_void_p),
        ("expert_rows", c_void_p),
        ("index", c_void_p),
        ("ns", c_void_p),
    )


_SHARED = (CStep, CRun, CMatrix, CExpert, CBank, CCache, CAttention)


def declare(library: ctypes.CDLL) -> None:
    """Tell ctypes the functions' arguments. BackendUnavailable when the two sides disagree on a structure."""
    library.swarm_variant.restype = ctypes.c_char_p
    library.swarm_pool_new.restype = c_void_p
    library.swarm_pool_new.argtypes = (c_int32,)
    library.swarm_pool_threads.argtypes = (c_void_p,)
    library.swarm_pool_free.argtypes = (c_void_p,)
    library.swarm_run.argtypes = (c_void_p, c_void_p, c_int32, POINTER(CRun))
    library.swarm_expert_rows.argtypes = (
        *(c_void_p, c_void_p, c_void_p, c_int32),
        *(c_void_p, c_int32, c_void_p, c_int32),
    )
    library.swarm_dequantise.argtypes = (POINTER(CMatrix), c_void_p)
    sizes = (c_int32 * len(_SHARED))()
    library.swarm_sizes(sizes)
    ours = [ctypes.sizeof(each) for each in _SHARED]
    if list(sizes) != ours:
        raise BackendUnavailable(f"native: C and Python disagree on structures: {list(sizes)} and {ours} bytes")
