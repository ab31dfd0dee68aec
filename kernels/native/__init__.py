"""Our C kernels: compiled for the machine at first use, called through ctypes."""
