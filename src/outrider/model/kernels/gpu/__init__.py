"""Triton kernels for CUDA devices, each beside its torch twin. Imported only when a CUDA device is asked for."""
