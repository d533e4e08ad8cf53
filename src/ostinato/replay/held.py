"""`HeldReplay`: a step's graph, decided on and leased once, launched many times."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from ostinato.driver.closeable import Closeable
from ostinato.driver.context import Context
from ostinato.errors import ClosedError

__all__ = ["HeldCounts", "HeldReplay"]


@dataclass(slots=True, eq=False)
class HeldCounts:
    """What a held graph was launched for; `used` and `padded` are the real and bucketed sizes of
    each launch, added up."""

    used: int
    padded: int
    launches: int = 0


class HeldReplay(Closeable):
    """Many replays of one key of a step (`GraphedStep.hold`), for one thread.  `close()` or `with`
    lets go.

    Each launch counts as a call of the step.  An eviction meanwhile takes the key out of the cache
    at once, and the executable is closed when this is.
    """

    __slots__ = ("__weakref__", "_counts", "_finalizer", "_lease", "_replay")

    def __init__(
        self, context: Context, replay: Callable[[], None], lease: ExitStack, counts: HeldCounts
    ) -> None:
        self._replay = replay
        self._lease = lease
        self._counts = counts
        # The silent last resort: the lease ends at the context's next pause between captures.
        self._finalizer = weakref.finalize(self, context.retire, lease.close)
        self._finalizer.atexit = False

    @property
    def launches(self) -> int:
        """Replays so far."""
        return self._counts.launches

    def launch(self) -> None:
        """One replay, in stream order.  Does not wait.

        Raises what `GraphExec.launch` raises, and ClosedError once it was let go.
        """
        self._replay()
        self._counts.launches += 1

    def close(self) -> None:
        """Lets go of the graph; launches under way go on.  Idempotent."""
        self._finalizer.detach()
        self._replay = _let_go
        self._lease.close()


def _let_go() -> None:
    raise ClosedError("the graph is not held any more; hold it again")
