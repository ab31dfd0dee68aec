"""What a prediction takes for granted where nothing was measured: how fast kernels read weights, what a call costs."""

from __future__ import annotations

#: What kernels read of quantised weights a second, as a part of what memory gives to a plain read: measured with
#: Q4_K_M experts of Qwen3-30B-A3B's shape. numpy unpacks them first, on one core.
OF_A_PLAIN_READ = {"numpy": 0.005}
OF_A_PLAIN_READ_COMPILED = 0.3
LOCAL_CALL_S = 900e-6  #: a call to a worker on this machine that slept meanwhile, there and back, over CURVE
NETWORK_CALL_S = 1e-3  #: to one on another
NETWORK_BYTES_PER_S = 125e6  #: 1 Gbit/s


def speed_of(backend: str, core_bytes_per_s: float, threads: int) -> float:
    """Bytes of weights a second that a backend on this machine is taken to read."""
    if backend in OF_A_PLAIN_READ:
        return core_bytes_per_s * OF_A_PLAIN_READ[backend]
    return core_bytes_per_s * threads * OF_A_PLAIN_READ_COMPILED
