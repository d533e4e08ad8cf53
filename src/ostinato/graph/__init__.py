"""Graphs: captured, recorded or built by hand; read, compared, drawn, instantiated and changed."""

from ostinato.graph.capturing import Capture, capture, capture_function
from ostinato.graph.executable import GraphExec, UpdateReport
from ostinato.graph.graph import Conditional, Graph
from ostinato.graph.lifting import lift
from ostinato.graph.node import Argument, Node, Pointer, every_node
from ostinato.graph.order import Recorded
from ostinato.graph.plan import LeftWord, RebindReport, ReboundWord
from ostinato.graph.recording import Recording, build_graph, record
from ostinato.graph.submissions import Submission, first_missing, operations, submissions
from ostinato.graph.words import Touch
from ostinato.launching import launch, prepare

__all__ = [
    "Argument",
    "Capture",
    "Conditional",
    "Graph",
    "GraphExec",
    "LeftWord",
    "Node",
    "Pointer",
    "RebindReport",
    "ReboundWord",
    "Recorded",
    "Recording",
    "Submission",
    "Touch",
    "UpdateReport",
    "build_graph",
    "capture",
    "capture_function",
    "every_node",
    "first_missing",
    "launch",
    "lift",
    "operations",
    "prepare",
    "record",
    "submissions",
]
