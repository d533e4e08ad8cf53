"""The host driver: the CPU with CUDA's rules.  `driver.HostDriver` is the entry point."""
