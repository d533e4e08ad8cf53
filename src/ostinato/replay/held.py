"""`HeldReplay`: a step's graph, decided on and leased once, launched many times."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from ostinato.driver.closeable import Closeable
from ostinato.errors import ClosedError

__all__ = ["HeldReplay"]


class HeldReplay(Closeable):
    """Many replays of one key of a step (`GraphedStep.hold`), for one thread.  `close()` or `with`
    lets go.

    Each launch counts as a call of the step.  An eviction meanwhile takes the key out of the cache
    at once, and the executable is closed when this is.
    """

    __slots__ = ("_lease", "_replay", "launches", "padded", "used")

    def __init__(
        self, replay: Callable[[], None], lease: ExitStack, *, used: int, padded: int
    ) -> None:
        self._replay = replay
        self._lease = lease
        self.launches = 0
        """Replays so far."""
        self.used = used
        self.padded = padded
        """Real and bucketed sizes of each, added up."""

    def launch(self) -> None:
        """One replay, in stream order.  Does not wait.

        Raises what `GraphExec.launch` raises, and ClosedError once it was let go.
        """
        self._replay()
        self.launches += 1

    def close(self) -> None:
        """Lets go of the graph; launches under way go on.  Idempotent."""
        self._replay = _let_go
        self._lease.close()


def _let_go() -> None:
    raise ClosedError("the graph is not held any more; hold it again")
