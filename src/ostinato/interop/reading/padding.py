"""Dynamic axes: pads sizes to their buckets, and finds the axes of results that are cut back.
Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ostinato.errors import InputError
from ostinato.step import Buckets


@dataclass(frozen=True, slots=True)
class DynamicAxis:
    """An axis of a result that is cut back to a dynamic size."""

    axis: int
    size: int
    """The index of the size among the sizes of the call's dynamic arrays."""


class Padding:
    """The arguments with a dynamic axis, and the buckets of their sizes."""

    def __init__(self, axes: Mapping[str, int], buckets: Buckets) -> None:
        self.axes = dict(axes)
        self.buckets = buckets

    def padded(self, name: str, shape: Sequence[int]) -> tuple[tuple[int, ...], int]:
        """Returns the shape with the size replaced by its bucket, and the axis counted from the
        front.

        Raises InputError for a shape without that axis, and a size over the limit of the buckets.
        """
        axis = self.axes[name]
        at = axis + len(shape) if axis < 0 else axis
        if not 0 <= at < len(shape):
            raise InputError(
                f"dynamic={{{name!r}: {axis}}}: the array has {len(shape)} axes (shape "
                f"{tuple(shape)})"
            )
        padded = list(shape)
        padded[at] = self.buckets.bucket(shape[at])
        return tuple(padded), at


def cuts(
    real: Sequence[Sequence[int]],
    padded: Sequence[Sequence[int]],
    sizes: Sequence[int],
    capacities: Sequence[int],
) -> list[list[DynamicAxis]] | str:
    """Finds the axes of each result to cut, from its shapes with real and with padded arguments.

    `sizes` and `capacities` are those of the dynamic arrays, in order.  An axis whose lengths
    differ must have the size of a dynamic array and that array's bucket; otherwise returns a
    reason.
    """
    found: list[list[DynamicAxis]] = []
    for index, (small, large) in enumerate(zip(real, padded, strict=True)):
        if len(small) != len(large):
            return f"result {index} has {len(small)} axes, and {len(large)} with padding"
        cut = []
        for axis, (n, m) in enumerate(zip(small, large, strict=True)):
            if n == m:
                continue
            pairs = list(zip(sizes, capacities, strict=True))
            if (n, m) not in pairs:
                return (
                    f"axis {axis} of result {index} has {n} elements, and {m} with padding, which "
                    "are not the size and the bucket of a dynamic argument"
                )
            cut.append(DynamicAxis(axis, pairs.index((n, m))))
        found.append(cut)
    return found
