"""Tests of the known ways to get a silent wrong answer out of a graph."""
