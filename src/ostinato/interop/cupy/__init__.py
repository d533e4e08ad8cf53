"""CuPy: graphed functions, adopted graphs, streams and arrays.

from ostinato.interop.cupy import graphed

step = graphed(function)       # the same signature
y = step(x)                    # eager, then captured, then replayed
print(step.explain())
"""

from __future__ import annotations

from ostinato.interop.cupy.adopting import adopt_graph, as_array, external_stream
from ostinato.interop.cupy.library import graphed

__all__ = ["adopt_graph", "as_array", "external_stream", "graphed"]
