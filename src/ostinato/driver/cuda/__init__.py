"""The CUDA driver: libcuda through ctypes.  `driver.CudaDriver` is the entry point."""
