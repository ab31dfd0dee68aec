"""GPUs and phones: one device source for OpenCL, CUDA and HIP, and the host side over a device of eight calls."""
