"""PyTorch: graphed functions, adopted graphs, streams and tensors.

from ostinato.interop.torch import graphed

step = graphed(model)          # or a function; the same signature
with torch.inference_mode():
    y = step(x)                # eager, then captured, then replayed
print(step.explain())
"""

from __future__ import annotations

from ostinato.interop.torch.adopting import adopt_graph, as_tensor, external_stream, use_stream
from ostinato.interop.torch.graphing import GraphedModule, graphed
from ostinato.interop.torch.observing import GraphObservation, ObservedGraph, observe, observed

__all__ = [
    "GraphObservation",
    "GraphedModule",
    "ObservedGraph",
    "adopt_graph",
    "as_tensor",
    "external_stream",
    "graphed",
    "observe",
    "observed",
    "use_stream",
]
