"""Python imports this first in programs that are started with plugin.py's `sys.path`."""

import os

from tests.planted.faults import apply
from tests.planted.ours import FAULTS

apply(FAULTS[os.environ["PLANTED_FAULT"]])
