"""Mistakes with rows behind the real size, and with sizes at the border of their room."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

import ostinato as ost
from ostinato.step import Buckets, Cause, PowersOfTwo
from tests.planted.programme import Caught, Programme, Values, plant


@plant(
    Caught.CHECK,
    "slot 'kv' at .* lets padding rows reach the answer",
    thread="vllm-project/vllm#43810",
    cause=Cause.PADDING,
)
class PaddedRowsWriteALiveSlot(Programme):
    """Padded rows are scattered too, to the row of another request that their index names."""

    takes = "x: input rows, at: input rows, kv: state"
    rows = 3

    def make(self) -> None:
        self.x, self.at = self.array([50, 60, 70] + [99] * 13), self.zeros(16, np.int32)
        self.write(self.at, [5, 6, 7] + [0] * 13)
        self.kv = self.array([10] + [-1] * 7)

    def run(self, stream: ost.Stream, sizes: ost.Sizes) -> None:
        self.launch("scatter", 1, self.x, self.at, self.kv, sizes.rows, self.rows_of(sizes))

    def sizes(self, number: int) -> dict[str, int]:
        return {"rows": self.rows}

    def wanted(self, number: int) -> list[float]:
        return [10, -1, -1, -1, -1, 50, 60, 70]


@plant(
    Caught.CHECK,
    r"32 bytes at 0x\w+: .*\(memory that no slot declares differs",
    thread="NVIDIA/TensorRT-LLM#13278",
    cause=Cause.UNDECLARED,
)
class PaddedRowsWriteUndeclaredMemory(PaddedRowsWriteALiveSlot):
    """Padded rows write to a cache that no slot of the step declares."""

    def slots(self) -> list[ost.Slot]:
        return super().slots()[:2]


@plant(
    Caught.CHECK,
    "slot 'kv' at .* lets padding rows reach the answer",
    thread="m0at/rvllm#32",
    cause=Cause.PADDING,
)
class EmptyBatch(PaddedRowsWriteALiveSlot):
    """A batch of no rows is padded to one, which writes to slot 0."""

    rows = 0

    def make(self) -> None:
        super().make()
        self.write(self.at, 0)

    def wanted(self, number: int) -> list[float]:
        return [10] + [-1] * 7


@plant(
    Caught.CHECK,
    "slot 'out' at .* lets padding rows reach the answer",
    thread="local-inference-lab/vllm#621",
    cause=Cause.PADDING,
)
class PaddingReachesASum(Programme):
    """A sum goes over all rows of the bucket; batches that fill it were right."""

    takes = "x: input rows, out: output"
    calls = 6

    def make(self) -> None:
        self.x, self.out = self.array(range(16)), self.zeros(1)

    def run(self, stream: ost.Stream, sizes: ost.Sizes) -> None:
        self.launch("total", 1, self.x, sizes.rows, self.rows_of(sizes), self.out)

    def sizes(self, number: int) -> dict[str, int]:
        return {"rows": 4 if number < 3 else 3}

    def wanted(self, number: int) -> list[float]:
        return [6] if number < 3 else [3]


@plant(
    Caught.CHECK,
    r"slot 'acc' at \[3\]: .* changes padding rows of a state",
    thread="vllm-project/vllm#13418",
    cause=Cause.PADDING_WRITTEN,
)
class PaddingAdvancesState(Programme):
    """State is advanced for all rows of the bucket; a row that is used later starts too far."""

    takes = "x: input rows, acc: state rows"
    calls = 6

    def make(self) -> None:
        self.x, self.acc = self.array([1] * 16), self.zeros(16)

    def run(self, stream: ost.Stream, sizes: ost.Sizes) -> None:
        if self.planted:
            self.launch("axpy", sizes.rows, self.x, self.one, self.acc, sizes.rows)
        else:
            self.launch(
                "axpy_rows", sizes.rows, self.x, self.one, self.acc, sizes.on_device("rows"), 1
            )

    def sizes(self, number: int) -> dict[str, int]:
        return {"rows": 3 if number < 4 else 4}

    def wanted(self, number: int) -> list[float]:
        return [number + 1] * 3 + [max(0, number - 3)] + [0] * 12


@plant(
    Caught.ERROR,
    "blocks=5: slot 'table' has only 4 rows",
    thread="vllm-project/vllm#8068",
)
class BeyondTheCapacity(Programme):
    """The rows fit their bucket, and another size is larger than the buffer that it measures."""

    takes = "x: input rows, table: state blocks, out: output rows"

    def make(self) -> None:
        self.x, self.table, self.out = self.array([1] * 16), self.array([2] * 4), self.zeros(16)

    def run(self, stream: ost.Stream, sizes: ost.Sizes) -> None:
        self.launch("add", sizes.rows, self.x, self.x, self.out, sizes.rows)

    def sizes(self, number: int) -> dict[str, int]:
        return {"rows": 3, "blocks": 5 if self.planted and number == 4 else 4}

    def answer(self) -> Values:
        return self.read(self.out)[:3]

    def wanted(self, number: int) -> list[float]:
        return [2] * 3


class _OwnBuckets:
    """A scheme of the user's own: 4, 8, 16."""

    limit = 16

    def __init__(self, border: int) -> None:
        self._border = border

    def bucket(self, size: int) -> int:
        return 4 if size <= self._border else PowersOfTwo(16, minimum=8).bucket(size)

    def __iter__(self) -> Iterator[int]:
        return iter((4, 8, 16))


@plant(
    Caught.ERROR,
    r"rows=5: the buckets of the cache \(_OwnBuckets\) give 4",
    thread="vllm-project/vllm#7999",
)
class BucketTooSmallAtItsBorder(Programme):
    """A bucket scheme of the user's own gives the largest size of a bucket one row too many."""

    takes = "acc: state rows"

    def make(self) -> None:
        self.x, self.acc = self.array([1] * 16), self.zeros(16)

    @property
    def buckets(self) -> Buckets:  # type: ignore[override]
        return _OwnBuckets(5 if self.planted else 4)

    def run(self, stream: ost.Stream, sizes: ost.Sizes) -> None:
        real = sizes.on_device("rows")
        self.launch("axpy_rows", sizes.rows, self.x, self.one, self.acc, real, 1)

    def sizes(self, number: int) -> dict[str, int]:
        return {"rows": 4 if number < 2 else 5}

    def wanted(self, number: int) -> list[float]:
        return [number + 1] * 4 + [max(0, number - 1)] + [0] * 11
