"""Graph files: graphs saved in one process, loaded in another at other addresses, and checked
there.

This package reads and makes graphs by their public methods; `graph` does not depend on it.
docs/graph-file.md describes the format and what cannot be saved.
"""

from ostinato.driver.cuda.collecting import collect_modules
from ostinato.graphfile.checking import check
from ostinato.graphfile.loading import LoadedGraph, load
from ostinato.graphfile.saving import save
from ostinato.graphfile.survey import Twin

__all__ = ["LoadedGraph", "Twin", "check", "collect_modules", "load", "save"]
