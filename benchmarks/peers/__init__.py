"""Other libraries that decode, as far as they are installed here."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ostinato as ost
from benchmarks.peers.llama_peer import LLAMA_CPP, LlamaCpp, open_llama_cpp
from ostinato.bench.decode import first_line
from ostinato.bench.ways import Timed
from ostinato.models import LlamaConfig

__all__ = ["PEERS", "Peer", "Peers"]

PEERS: dict[str, str] = {
    "transformers": "eager",
    "torch.cuda.graph": "graph",
    "torch.compile": "compile",
    LLAMA_CPP: "",
}
"""The `how` of `transformers_loop.DecodeLoop`, by the peer's name.  These peers are transformers'
Llama in bfloat16 with a static cache: eager, one step captured by torch, and compiled in the mode
"reduce-overhead".  llama.cpp reads the model's own GGUF file, on the CPU."""

# The least time that torch.compile needs, as observed, with a margin (seconds).
_COMPILING = 45.0
# The length of a cache is a multiple of this, as a careful user would choose.
_ROUND = 64


class Peers:
    """The requested peers that can run here, on one model that they share.

    `skipped` has the reasons of the others.  Implements `ostinato.bench.decode.OpenOthers`.
    """

    def __init__(
        self,
        device: ost.Device,
        wanted: Sequence[str],
        config: LlamaConfig,
        path: Path | None,
        positions: int,
        left: Callable[[], float],
    ) -> None:
        self.skipped: dict[str, str] = {}
        self.contestants: list[Peer | LlamaCpp] = []
        self.versions: dict[str, str] = {}
        self._library: Any = None
        self._model: Any = None
        if LLAMA_CPP in wanted:
            wanted = [name for name in wanted if name != LLAMA_CPP]
            opened = open_llama_cpp(device, path)
            if isinstance(opened, str):
                self.skipped[LLAMA_CPP] = opened
            else:
                self.contestants.append(opened)
                self.versions.update(opened.versions)
        if not wanted:
            return
        try:
            why = self._open(device, config, positions)
        except Exception as error:  # a library that fails here is left out
            why = first_line(error)
        if why:
            self.skipped.update(dict.fromkeys(wanted, why))
            return
        self.contestants += [Peer(name, self._library, self._model, left) for name in wanted]

    def _open(self, device: ost.Device, config: LlamaConfig, positions: int) -> str:
        """Makes the model.  Returns an empty text, or the reason if it cannot run here."""
        if device.driver.cuda_context is None:
            return f"runs on CUDA devices, and this is {device.name}"
        missing = [n for n in ("torch", "transformers") if importlib.util.find_spec(n) is None]
        if missing:
            return f"{' and '.join(missing)} not installed"
        from benchmarks.peers import transformers_loop

        self._library = transformers_loop
        self.versions.update(self._library.versions())
        self._model = self._library.random_llama(config, context=positions, device=device.name)
        return ""

    def close(self) -> None:
        """Frees the memory.  Idempotent."""
        for peer in self.contestants:
            peer.close()
        self.contestants, self._model = [], None
        if self._library is not None:
            gc.collect()  # modules are in reference cycles
            self._library.release()


class Peer:
    """One of the peers.  `reserve` for another batch or length compiles again."""

    ours = False
    multiple = 1

    def __init__(self, name: str, library: Any, model: Any, left: Callable[[], float]) -> None:
        self.name = name
        self._library, self._model, self._left = library, model, left
        self._loop: Any = None
        self._at: tuple[int, int] = (0, 0)
        self.no_prompts = ""
        if PEERS[name] != "eager":
            self.no_prompts = "what it prepares is a step of one token"
        self.ready_seconds = 0.0
        """Seconds that the last `reserve` took for compiling and capturing."""

    def reserve(self, batch: int, positions: int) -> None:
        """Makes a cache of that many positions and few more, since the attention reads all of them,
        used or not.  Raises the library's errors, and TimeoutError."""
        length = -(-positions // _ROUND) * _ROUND
        if self._loop is not None and self._at == (batch, length):
            return
        self.close()
        if self.name == "torch.compile" and self._left() < _COMPILING:
            raise TimeoutError(f"{self._left():.0f} s are left, and compiling takes longer")
        begin = time.perf_counter()
        self._loop = self._library.DecodeLoop(
            self._model, batch=batch, length=length, how=PEERS[self.name]
        )
        self._at, self.ready_seconds = (batch, length), time.perf_counter() - begin

    def place(self, batch: int, context: int) -> None:
        self._loop.place(context)

    def decode(self, tokens: int) -> Timed:
        begin = time.perf_counter()
        self._loop.run(tokens)
        return Timed(time.perf_counter() - begin)

    def piece(self, tokens: int) -> int:
        return tokens

    def prompt(self, tokens: Sequence[int]) -> Timed:
        self._loop.place(0)
        begin = time.perf_counter()
        self._loop.prompt(tokens)
        return Timed(time.perf_counter() - begin)

    def details(self) -> dict[str, object]:
        return {
            "ready_seconds": self.ready_seconds,
            "cache_positions": self._at[1],
            "whole_graph": self._loop is not None and self._loop.whole_graph,
        }

    def close(self) -> None:
        if self._loop is not None:
            self._loop = None
            if PEERS[self.name] == "compile":
                self._library.release()  # torch recompiles a function only a few times
