"""The driver seam: `api` defines what a driver is; `host` and `cuda` are the two drivers."""
