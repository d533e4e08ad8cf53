"""The kernels of the layer program on a CPU: NumPy, and compiled on packed weights."""
