"""Names for packages built on the library, beside those of `ostinato` for its users.

A program that captures and replays graphs needs none of them.  `distributed`, `relational`,
`interop` and `serve` are such packages: they import `ostinato`, this module and a few others
(`tests/test_layers.py` has the list), and no private name.
"""

from ostinato.driver.api import parse_bytes, whole_number
from ostinato.driver.closeable import Closeable
from ostinato.driver.extension import load_extension
from ostinato.driver.forking import new_lock
from ostinato.driver.host.kernel import HostLaunch
from ostinato.driver.interrupts import uninterrupted
from ostinato.driver.stream import wait_for_streams
from ostinato.errors import causes
from ostinato.explain.black_box import armed
from ostinato.explain.times import NotLaunched
from ostinato.graph.node import every_node
from ostinato.step.check import Memory, check_runs
from ostinato.step.engine import Call, Change, Engine, Options, Work
from ostinato.step.fills import FILL, fill_kernel, replace_small_fills
from ostinato.step.statistics import Counts, table

__all__ = [
    "FILL",
    "Call",
    "Change",
    "Closeable",
    "Counts",
    "Engine",
    "HostLaunch",
    "Memory",
    "NotLaunched",
    "Options",
    "Work",
    "armed",
    "causes",
    "check_runs",
    "every_node",
    "fill_kernel",
    "load_extension",
    "new_lock",
    "parse_bytes",
    "replace_small_fills",
    "table",
    "uninterrupted",
    "wait_for_streams",
    "whole_number",
]
