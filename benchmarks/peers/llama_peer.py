"""llama.cpp on the CPU, through llama-cpp-python, with the GGUF file of our decoder."""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import ostinato as ost
from ostinato.bench.ways import Timed, random_tokens
from ostinato.models.host.packed_kernels import default_threads

__all__ = ["LLAMA_CPP", "LlamaCpp", "open_llama_cpp"]

LLAMA_CPP = "llama.cpp"
# The number of prompt tokens that llama.cpp reads at once, its default.
_PIECE = 512


def open_llama_cpp(device: ost.Device, path: Path | None) -> LlamaCpp | str:
    """Returns the peer, or the reason if it cannot run here."""
    if not device.capabilities.host_memory_is_device_memory:
        return f"is measured on the CPU, and this is {device.name}"
    if path is None or path.suffix != ".gguf":
        return "reads GGUF files: give one as the model"
    if importlib.util.find_spec("llama_cpp") is None:
        return "llama_cpp (llama-cpp-python) not installed"
    return LlamaCpp(path)


class LlamaCpp:
    """Greedy decoding of one sequence, with as many threads as our decoder."""

    name = LLAMA_CPP
    ours = False
    multiple = 1
    no_prompts = ""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._threads = default_threads()
        self._library: Any = importlib.import_module("llama_cpp")
        self._model: Any = None
        self._positions = 0
        self._next = 0
        self.versions = {"llama-cpp-python": str(self._library.__version__)}
        self.load_seconds = 0.0

    def reserve(self, batch: int, positions: int) -> None:
        """Loads the model with room for that many positions, unless it has it.  Raises ValueError
        for more than one sequence."""
        if batch != 1:
            raise ValueError("decodes one sequence here")
        if self._model is not None and self._positions >= positions:
            return
        self.close()
        begin = time.perf_counter()
        self._model = self._library.Llama(
            str(self._path),
            n_ctx=positions,
            n_batch=_PIECE,
            n_threads=self._threads,
            n_threads_batch=self._threads,
            verbose=False,
        )
        self._positions, self.load_seconds = positions, time.perf_counter() - begin

    def _logits(self) -> npt.NDArray[np.float32]:
        found = self._library.llama_get_logits_ith(self._model.ctx, -1)
        return np.ctypeslib.as_array(found, shape=(self._model.n_vocab(),))

    def _take(self, tokens: Sequence[int]) -> None:
        self._model.eval(tokens)
        self._next = int(self._logits().argmax())

    def place(self, batch: int, context: int) -> None:
        self._model.reset()
        self._take(random_tokens(self._model.n_vocab(), max(1, context), (5, 0)))

    def decode(self, tokens: int) -> Timed:
        arrivals: list[float] = []
        begin = time.perf_counter()
        for _ in range(tokens):
            self._take([self._next])
            arrivals.append(time.perf_counter() - begin)
        return Timed(arrivals[-1], tuple(arrivals))

    def piece(self, tokens: int) -> int:
        return min(tokens, _PIECE)

    def prompt(self, tokens: Sequence[int]) -> Timed:
        self._model.reset()
        begin = time.perf_counter()
        self._take(tokens)
        return Timed(time.perf_counter() - begin)

    def details(self) -> dict[str, object]:
        return {"threads": self._threads, "load_seconds": self.load_seconds}

    def close(self) -> None:
        model, self._model = self._model, None
        if model is not None:
            model.close()
