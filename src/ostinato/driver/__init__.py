"""The driver seam: `api` says what a driver is, `host` and `cuda` are the two there are."""
