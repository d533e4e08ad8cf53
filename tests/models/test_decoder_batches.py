"""Batches: rows are right, write nowhere else, and do not depend on each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ostinato.device import Device
from ostinato.models.decoder import Decoder
from ostinato.models.program import RING
from tests.models.proof import (
    FIRST,
    PER_LAUNCH,
    RELATIVE,
    SHAPES,
    WAYS,
    difference,
    expected,
    kind,
    on_both,
    open_decoder,
)
from tests.models.random_models import RandomModel

SLOTS = 64
BATCH = replace(SHAPES[FIRST], layers=2, context_length=61)


def prompt_of(slot: int) -> list[int]:
    return RandomModel(BATCH).tokens(1 + slot * 7 % 40, seed=slot)


@dataclass(frozen=True)
class Snapshot:
    """What a step may leave behind: all that outlives it."""

    cache: npt.NDArray[Any]
    logits: npt.NDArray[np.float32]
    state: npt.NDArray[np.int32]
    ring: npt.NDArray[Any]

    @classmethod
    def of(cls, decoder: Decoder) -> Snapshot:
        """After all that was launched."""
        buffers, read = decoder.plan.buffers, decoder.device.to_numpy
        decoder.stream.synchronize()
        found = [read(buffers[name]) for name in ("cache", "logits", "state")]
        return cls(*found, decoder.plan.ring.array.copy())


def poison(decoder: Decoder, *names: str) -> None:
    """NaN all over some buffers."""
    for name in names:
        buffer = decoder.plan.buffers[name]
        nan = 0x7FFF if buffer.dtype == np.uint16 else np.nan
        buffer.copy_from(np.full(buffer.shape, nan, buffer.dtype), decoder.stream)


@on_both("count", host=[1, 3, 8, 64], cuda=[1, 2, 3, 4, 7, 8, 13, 16, 31, 32, 50, 64])
def test_a_batch_is_right_and_writes_only_where_it_should(machine: Device, count: int) -> None:
    """Every buffer is NaN at first, so that reading what was never written would be seen too."""
    bound, others = RELATIVE[kind(machine)], range(count, SLOTS)
    with open_decoder(machine, BATCH, slots=SLOTS) as decoder:
        poison(decoder, "cache", "logits")
        blank = Snapshot.of(decoder)
        written = np.zeros((SLOTS, BATCH.context_length), bool)
        for slot in range(count):
            decoder.prefill(prompt_of(slot), slot)
            written[slot, : len(prompt_of(slot))] = True
        before = Snapshot.of(decoder)
        first = None
        for _ in range(3):  # eager, captured, replayed
            for slot in range(count):
                decoder.truncate(len(prompt_of(slot)) + 1, slot)
            poison(decoder, "x", "q", "attended", "inner")
            decoder.decode_batch(range(count))
            after = Snapshot.of(decoder)
            # Its own position of each slot, and nothing else.  [layers, 2, slots, kv_heads,
            # context, head_size] to [slots, context, rest]:
            now, then, never = (
                s.cache.transpose(2, 4, 0, 1, 3, 5).reshape(SLOTS, BATCH.context_length, -1)
                for s in (after, before, blank)
            )
            assert now[written].tobytes() == then[written].tobytes()
            untouched = ~written
            for slot in range(count):
                own = len(prompt_of(slot))
                untouched[slot, own] = False
                assert not np.isnan(values_in(now[slot, own])).any()
            assert now[untouched].tobytes() == never[untouched].tobytes()
            for name in ("logits", "state", "ring"):
                idle, as_was = getattr(after, name)[others], getattr(blank, name)[others]
                assert idle.tobytes() == as_was.tobytes(), name
            first = first or after.logits.tobytes()
            assert after.logits.tobytes() == first
        assert after.ring.dtype == RING
        for slot in range(count):
            tokens = decoder.tokens(slot)
            assert tokens[:-2] == tuple(prompt_of(slot))
            theirs = expected(BATCH, tokens[:-1], (len(tokens) - 2,))[0]
            error = difference(after.logits[slot], theirs)
            assert error < bound, f"slot {slot}: {error:.1e}"
            assert tokens[-1] == int(after.logits[slot].argmax())
            assert after.ring[slot, len(tokens) - 1]["token"] == tokens[-1]
        assert not decoder.statistics().quarantined


def values_in(cache: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Of the KV cache, whatever its type."""
    if cache.dtype == np.uint16:
        return (cache.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return cache


@on_both("bucket", host=[2, 8, 32], cuda=[2, 4, 8, 16, 32, 64])
def test_a_row_does_not_depend_on_the_others_of_its_bucket(machine: Device, bucket: int) -> None:
    """The same launches: so the same bits, whether the other rows pad or hold other sequences."""
    few = bucket // 2 + 1
    with open_decoder(machine, BATCH, slots=SLOTS) as decoder:
        for slot in range(bucket):
            decoder.prefill(prompt_of(slot), slot)

        def logits_of(slots: Sequence[int]) -> dict[int, npt.NDArray[np.float32]]:
            for slot in slots:
                decoder.truncate(len(prompt_of(slot)) + 1, slot)
            decoder.decode_batch(slots)
            return {slot: decoder.logits(slot) for slot in slots}

        for _ in range(3):
            full, part = logits_of(range(bucket)), logits_of(range(few))
            backwards = logits_of(range(bucket - 1, -1, -1))
            for slot in range(few):
                assert part[slot].tobytes() == full[slot].tobytes()
            for slot in range(bucket):
                assert difference(backwards[slot], full[slot]) < RELATIVE[kind(machine)]
        for slot in (0, bucket - 1):  # and by itself, in a bucket of one
            alone = logits_of([slot])
            assert difference(alone[slot], full[slot]) < RELATIVE[kind(machine)]


@on_both("count", host=[5], cuda=[2, 5, 64])
def test_every_way_gives_the_same_bits_for_a_batch(machine: Device, count: int) -> None:
    bits = {}
    for name, way in WAYS.items():
        with open_decoder(machine, BATCH, slots=count, **way.options) as decoder:
            for attempt in range(2):
                decoder.reset()
                for slot in range(count):
                    decoder.prefill(prompt_of(slot), slot)
                way.decode_batch(decoder, range(count), 2 * PER_LAUNCH + 3)
                tokens = [decoder.tokens(slot) for slot in range(count)]
                logits = [decoder.logits(slot).tobytes() for slot in range(count)]
                bits[name, attempt] = tokens, logits, Snapshot.of(decoder).state.tobytes()
            way.check(decoder)
    differing = [key for key, found in bits.items() if found != bits["eager", 0]]
    assert not differing
