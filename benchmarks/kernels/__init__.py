"""Checks the decoder's CUDA kernels against NumPy, and times them, on one GPU."""
