"""Files as read-only arrays that are page cache, not heap. Python's own mmap keeps a descriptor open for each: with a
model's thousands of slices a process would run out of them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.restype = ctypes.c_int
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value


def mapped(path: Path) -> U8:
    """A file's bytes [nbytes], unmapped with the last view of them. Read into memory where it cannot be mapped.

    OSError when it cannot be read.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0) if size else None
        if address in (None, _FAILED):  # an empty file, or a system that has as many mappings as it allows
            data = np.fromfile(file, np.uint8)
            data.flags.writeable = False
            return data
    memory = (ctypes.c_uint8 * size).from_address(address)
    weakref.finalize(memory, _libc.munmap, address, size)
    array: U8 = np.ctypeslib.as_array(memory)
    array.flags.writeable = False
    return array
