"""The decoder's CUDA kernels by themselves: correct against NumPy, and how fast, on one GPU."""
