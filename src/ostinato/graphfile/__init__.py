"""Graphs in files: saved in one process, loaded in another at other addresses, and checked there.

A graph knows nothing of files: this package reads and makes graphs by their public methods.
docs/graph-file.md describes the format and what cannot be saved.
"""

from ostinato.driver.cuda.collecting import collect_modules
from ostinato.graphfile.checking import check
from ostinato.graphfile.loading import LoadedGraph, load
from ostinato.graphfile.saving import save
from ostinato.graphfile.survey import Twin

__all__ = ["LoadedGraph", "Twin", "check", "collect_modules", "load", "save"]
