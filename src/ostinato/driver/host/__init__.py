"""The host driver: the CPU with CUDA's rules; `driver.HostDriver` is the whole of it."""
