"""Mistakes by which a graph goes on with what was true at its capture."""

from __future__ import annotations

import numpy as np

import ostinato as ost
from ostinato.step import Cause
from tests.planted.programme import (
    EXACT,
    STATE,
    Caught,
    Programme,
    Values,
    plant,
)


@plant(
    Caught.CHECK,
    r"argument 1 of operation 0 \(total\) is n=3 in the graph and n=5 now; "
    r"the first node to differ is node 0 \(total\), argument 3 \(out\) at \[0\]: ",
    thread="huggingface/transformers#45323",
    cause=Cause.FROZEN,
    verify=1,
)
class FrozenLength(Programme):
    """A length that changes from call to call is a host number of a launch, and not in the key.

    Right: the length is a size of the step.
    """

    takes = "x: input, out: output"
    calls = 6
    buckets = EXACT

    def make(self) -> None:
        self.x, self.out, self.length = self.array(range(1, 9)), self.zeros(1), 0

    def run(self, stream: ost.Stream, sizes: ost.Sizes) -> None:
        length = self.length if self.planted else sizes.length
        self.launch("total", 1, self.x, length, self.everything, self.out)

    def sizes(self, number: int) -> dict[str, int]:
        self.length = 3 if number < 3 else 5
        return {} if self.planted else {"length": self.length}

    def wanted(self, number: int) -> list[float]:
        return [6] if number < 3 else [15]


@plant(
    Caught.CHECK,
    "operation 1 is nothing in the graph and increment now",
    thread="NVIDIA/TensorRT-LLM#15216",
    cause=Cause.UNDECLARED,
    verify=1,
)
class BranchNotTaken(Programme):
    """A branch on the host was not taken when the graph was made: it counts tokens, for a penalty.

    Right: what the branch asks for is a size of the step.
    """

    takes = "x: input, kv: state"
    calls = 6
    buckets = EXACT

    def make(self) -> None:
        self.x, self.kv = self.array([1] * 8), self.zeros(8)
        self.counts, self.penalty = self.zeros(1, np.int32), False

    def run(self, stream: ost.Stream, mode: int = 0) -> None:
        self.launch("axpy", 8, self.x, self.one, self.kv, 8)
        if self.penalty:
            self.launch("increment", 1, self.counts, 1)

    def sizes(self, number: int) -> dict[str, int]:
        self.penalty = number >= 3
        return {} if self.planted else {"mode": 1 + self.penalty}

    def answer(self) -> Values:
        return self.read(self.kv, self.counts)

    def wanted(self, number: int) -> list[float]:
        return [number + 1] * 8 + [max(0, number - 2)]


@plant(
    Caught.CHECK,
    "operation 0 is axpy in the graph and add now",
    thread="local-inference-lab/vllm#298",
    cause=Cause.FROZEN,
    verify=1,
)
class TwoKindsOfWork(Programme):
    """A prompt of as many rows as a decode step replays the decode step's graph.

    Right: the kind is part of the key.
    """

    takes = "x: input, kv: state rows"
    calls = 6
    buckets = EXACT

    def make(self) -> None:
        self.x, self.zero, self.kv = self.array(range(8)), self.zeros(8), self.zeros(8)
        self.prefill = False

    def run(self, stream: ost.Stream, sizes: ost.Sizes) -> None:
        rows = sizes.rows
        if self.prefill:
            self.launch("add", rows, self.x, self.zero, self.kv, rows)  # sets the state
        else:
            self.launch("axpy", rows, self.x, self.one, self.kv, rows)  # advances it

    def sizes(self, number: int) -> dict[str, int]:
        self.prefill = number >= 3
        return {"rows": 8} if self.planted else {"rows": 8, "kind": 1 + self.prefill}

    def wanted(self, number: int) -> Values:
        return np.arange(8) * (number + 1 if number < 3 else 1)


@plant(
    Caught.CHECK,
    r"argument 1 of operation 0 \(add\) is b=0x\w+ in the graph and b=0x\w+ now",
    thread="vllm-project/vllm#48941",
    cause=Cause.FROZEN,
    verify=1,
)
class ReplacedWeights(Programme):
    """New weights come in a new buffer; the graph reads the old one, which it keeps alive.

    Right: they are copied into the old one.
    """

    takes = "x: input, out: output"

    def make(self) -> None:
        self.x, self.w, self.out = self.array([1] * 8), self.array([2] * 8), self.zeros(8)

    def run(self, stream: ost.Stream, sizes: ost.Sizes) -> None:
        self.launch("add", 8, self.x, self.w, self.out, 8)

    def call(self, number: int) -> None:
        if number == 3 and self.planted:
            self.w = self.array([7] * 8)
        elif number == 3:
            self.write(self.w, 7)
        super().call(number)

    def wanted(self, number: int) -> list[float]:
        return [3 if number < 3 else 8] * 8


@plant(
    Caught.CHECK,
    r"argument 2 of operation 0 \(axpy\) is y=0x\w+ in the graph and y=0x\w+ now",
    thread="sgl-project/sglang#27140",
    cause=Cause.FROZEN,
    verify=1,
)
class MovedState(Programme):
    """State is saved, freed and brought back at another address; the graph updates the old one.

    Right: it is brought back where it was.
    """

    takes = "first: state"

    def make(self) -> None:
        self.x, self.kv = self.array([1] * 8), self.zeros(8)
        self.first = self.kv

    def run(self, stream: ost.Stream, sizes: ost.Sizes) -> None:
        self.launch("axpy", 8, self.x, self.one, self.kv, 8)

    def call(self, number: int) -> None:
        if number == 3:
            saved = self.read(self.kv)
            if self.planted:
                self.kv = self.array(saved)
            else:
                self.write(self.kv, saved)
        super().call(number)

    def answer(self) -> Values:
        return self.read(self.kv)

    def wanted(self, number: int) -> list[float]:
        return [number + 1] * 8


@plant(
    Caught.CHECK,
    r"argument 1 of operation 0 \(add\) is b=0x\w+ in the graph and b=0x\w+ now",
    thread="huggingface/text-generation-inference#2180",
    cause=Cause.FROZEN,
    verify=1,
)
class AdapterByIndex(Programme):
    """The adapter is picked from a list in Python, so the graph has the one of its capture.

    Right: the picked one is copied to where the graph reads it.
    """

    takes = "x: input, out: output"

    def make(self) -> None:
        self.x, self.out, self.active = self.array([1] * 8), self.zeros(8), self.zeros(8)
        self.bank = [self.array([0] * 8), self.array([10] * 8)]

    def run(self, stream: ost.Stream, sizes: ost.Sizes) -> None:
        self.launch("add", 8, self.x, self.active, self.out, 8)

    def call(self, number: int) -> None:
        wanted = self.bank[number % 2]
        if self.planted:
            self.active = wanted
        else:
            ost.copy(self.stream, self.active, wanted)
        super().call(number)

    def wanted(self, number: int) -> list[float]:
        return [11 if number % 2 else 1] * 8


@plant(
    Caught.CHECK,
    r"src of operation 0 \(copy\) is 0x\w+ in the graph and 0x\w+ now",
    thread="microsoft/onnxruntime#32121",
    cause=Cause.FROZEN,
    verify=1,
)
class StagingByCounter(Programme):
    """The step copies from one of two pinned buffers, by a counter in Python.

    A copy in a graph reads the address of its capture, and what lies there at the replay.  Right:
    it is the same buffer each time.
    """

    takes = "x: state, out: output"
    calls = 6

    def make(self) -> None:
        self.pinned = [self.device.pinned(8, np.float32) for _ in range(2)]
        self.x, self.out, self.turn = self.zeros(8), self.zeros(8), 0

    def run(self, stream: ost.Stream, sizes: ost.Sizes) -> None:
        ost.copy(stream, self.x, self.pinned[self.turn])
        self.launch("add", 8, self.x, self.x, self.out, 8)

    def call(self, number: int) -> None:
        self.turn = number % 2 if self.planted else 0
        self.pinned[self.turn].array[:] = 10 * number
        super().call(number)

    def answer(self) -> Values:
        return self.read(self.out)

    def wanted(self, number: int) -> list[float]:
        return [20 * number] * 8


@plant(
    Caught.CHECK,
    r"argument 1 of operation 0 \(fill\) is value=\d+ in one run and value=\d+ in the next",
    thread="pytorch/pytorch#84614",
    cause=Cause.HOST_STATE,
)
class RandomNumbersFromTheHost(Programme):
    """The step draws from a generator on the host: the replays have what the capture drew.

    Right: the caller draws, and puts the number where the device reads it.
    """

    takes = "out: output"

    def make(self) -> None:
        self.out, self.drawn = self.zeros(8), 0
        self.x = self.array([1] * 8)
        self.number = ost.DeviceScalar(self.device, np.float32, initial=0, stream=self.stream)

    def draw(self) -> int:
        self.drawn += 1
        return self.drawn

    def run(self, stream: ost.Stream, sizes: ost.Sizes) -> None:
        self.launch("fill", 8, self.out, float(self.draw()) if self.planted else 0.0, 8)
        self.launch("axpy", 8, self.x, self.number, self.out, 8)

    def call(self, number: int) -> None:
        if not self.planted:
            self.number.set(self.draw(), self.stream)
        super().call(number)

    def wanted(self, number: int) -> list[float]:
        return [number + 1] * 8


@plant(
    Caught.CHECK,
    r"argument 0 of operation 0 \(add\) is a=0x\w+ in one run and a=0x\w+ in the next",
    thread="pytorch/pytorch#114844",
    cause=Cause.HOST_STATE,
)
class SwappedInPython(Programme):
    """The step's last line swaps two buffers by assignment, which no replay does.

    Captures and checks do it as well, so an eager run is out of step too.  Right: the device copies
    the new values to where they are read.
    """

    def make(self) -> None:
        self.x, self.newest, self.other = self.array([1] * 8), self.zeros(8), self.zeros(8)
        self.buffers = self.newest, self.other

    def slots(self) -> list[ost.Slot]:
        return [ost.Slot(f"buffer {i}", one, STATE) for i, one in enumerate(self.buffers)]

    def run(self, stream: ost.Stream, sizes: ost.Sizes) -> None:
        self.launch("add", 8, self.newest, self.x, self.other, 8)
        if self.planted:
            self.newest, self.other = self.other, self.newest
        else:
            ost.copy(stream, self.newest, self.other)

    def answer(self) -> Values:
        return self.read(self.newest)

    def wanted(self, number: int) -> list[float]:
        return [number + 1] * 8
