"""Bytes to numbers: the GGUF reader, quant formats, reference ops, backends, the combine.

Importing this package before numpy sets one BLAS thread: a product split over threads would sum in another order,
and workers on one machine would fight for its cores.
"""

import os

for _variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
    os.environ[_variable] = "1"
