"""Benchmarks: each states the physics first, measures, and ends with one line of JSON."""
