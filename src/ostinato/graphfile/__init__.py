"""Graphs in files: the format, saving, loading, and a check that a file does what its graph did."""
