"""`HeldReplay`: a graph of a step that is looked up and leased once, and launched many times."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from ostinato.driver.closeable import Closeable
from ostinato.driver.context import Context
from ostinato.driver.stream import Stream
from ostinato.errors import ClosedError
from ostinato.graph import GraphExec


@dataclass(slots=True, eq=False)
class HeldCounts:
    """The number of launches of a held graph.  `used` and `padded` are the sums of the real and of
    the bucketed sizes of one launch."""

    used: int
    padded: int
    launches: int = 0


class HeldReplay(Closeable):
    """Many replays of one key of a step (`GraphedStep.hold`), for one thread.

    `close()`, or the end of a `with` block, gives the graph back.

    Each launch counts as a call of the step, and takes the stream's turn as a call does.  An
    eviction takes the key out of the cache at once; the executable is closed with this object.
    """

    __slots__ = ("__weakref__", "_counts", "_finalizer", "_lease", "_replay")

    def __init__(
        self, context: Context, replay: Callable[[], None], lease: ExitStack, counts: HeldCounts
    ) -> None:
        self._replay = replay
        self._lease = lease
        self._counts = counts
        # If the object is dropped without `close`, the context ends the lease, outside of captures.
        self._finalizer = weakref.finalize(self, context.retire, lease.close)
        self._finalizer.atexit = False

    def __repr__(self) -> str:
        state = ", closed" if self._replay is _let_go else ""
        return f"<HeldReplay, {self.launches} launches{state}>"

    @property
    def launches(self) -> int:
        """The number of replays so far."""
        return self._counts.launches

    def launch(self) -> None:
        """Replays the graph once, in stream order.  Does not wait.

        Raises the errors of `GraphExec.launch`, and ClosedError after `close()`.
        """
        self._replay()
        self._counts.launches += 1

    def close(self) -> None:
        """Gives the graph back to the cache; launches under way finish.  Idempotent."""
        self._finalizer.detach()
        self._replay = _let_go
        self._lease.close()


def launch_in_turn(stream: Stream, executable: GraphExec) -> None:
    """Replays a graph, but not during another thread's eager run or capture on the stream."""
    with stream.turn.lock:
        executable.launch(stream)


def _let_go() -> None:
    raise ClosedError("the graph is not held any more; hold it again")
