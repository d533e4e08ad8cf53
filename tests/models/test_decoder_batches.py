"""Batches: rows are right, write nowhere else, and do not depend on each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ostinato.device import Device
from ostinato.errors import InputError, LogitsError
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

SEQUENCES = 64
BATCH = replace(SHAPES[FIRST], layers=2, context_length=61)


def prompt_of(sequence: int) -> list[int]:
    return RandomModel(BATCH).tokens(1 + sequence * 7 % 40, seed=sequence)


@dataclass(frozen=True)
class Snapshot:
    """All that outlives a step."""

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
        buffer.set(np.full(buffer.shape, nan, buffer.dtype), decoder.stream)


@on_both(
    "lengths", host=[[3], [1, 20, 30, 5, 2], [40, 40, 1, 1]], cuda=[[1, 20, 30, 13], [40, 40, 9]]
)
def test_prompts_that_are_read_together_are_right(machine: Device, lengths: list[int]) -> None:
    """Behind what sequences hold, eager, captured and replayed, and then decoded together."""
    bound = RELATIVE[kind(machine)]
    prompts = [RandomModel(BATCH).tokens(n, seed=n + 100 * i) for i, n in enumerate(lengths)]
    order = list(reversed(range(len(prompts))))
    with open_decoder(machine, BATCH, sequences=8) as decoder:
        poison(decoder, "cache", "logits")
        for held in (0, 1, 4, 4):
            for sequence in order:
                decoder.reset(sequence)
                if held:
                    decoder.extend(prompts[0][:1] * held, sequence)
            poison(decoder, "x", "q", "attended", "inner")
            chosen = decoder.prefill_batch({one: prompts[one] for one in order})
            assert list(chosen) == order
            following = decoder.decode_batch(order)
            for sequence, token in zip(order, following, strict=True):
                tokens = decoder.tokens(sequence)
                wanted = (*prompts[0][:1] * held, *prompts[sequence], chosen[sequence], token)
                assert tokens == wanted
                logits = expected(BATCH, tokens, (len(tokens) - 3, len(tokens) - 2))
                assert chosen[sequence] == int(logits[0].argmax()) or _close(logits[0])
                error = difference(decoder.logits(sequence), logits[1])
                assert error < bound, f"sequence {sequence}: {error:.1e}"
        assert not decoder.statistics().quarantined


def _close(logits: npt.NDArray[np.float32]) -> bool:
    best = np.sort(logits)[-2:]
    return bool(best[1] - best[0] < 0.05 * logits.std())


def test_prompts_that_are_refused_leave_all_as_it_was(host_device: Device) -> None:
    with open_decoder(host_device, BATCH, sequences=3) as decoder:
        token = decoder.prefill([1, 2, 3], 1)
        wrong: list[Any] = [{}, {0: [1], 1: []}, {0: [1], 1: [BATCH.vocabulary]}, {0: [1], 7: [1]}]
        for prompts in (*wrong, [], [[1], [2]], [(0, [1])], "1", None, 3):
            with pytest.raises(InputError):
                decoder.prefill_batch(prompts)
            assert decoder.tokens(1) == (1, 2, 3, token) and decoder.tokens(0) == ()
        assert decoder.decode(1) == decoder.tokens(1)[-1]


@on_both("count", host=[1, 3, 8, 64], cuda=[1, 2, 3, 4, 7, 8, 13, 16, 31, 32, 50, 64])
def test_a_batch_is_right_and_writes_only_where_it_should(machine: Device, count: int) -> None:
    """Every buffer is NaN at first, so that reading what was never written would be seen too."""
    bound, others = RELATIVE[kind(machine)], range(count, SEQUENCES)
    with open_decoder(machine, BATCH, sequences=SEQUENCES) as decoder:
        poison(decoder, "cache", "logits")
        blank = Snapshot.of(decoder)
        written = np.zeros((SEQUENCES, BATCH.context_length), bool)
        for sequence in range(count):
            decoder.prefill(prompt_of(sequence), sequence)
            written[sequence, : len(prompt_of(sequence))] = True
        before = Snapshot.of(decoder)
        first = None
        for _ in range(3):  # eager, captured, replayed
            for sequence in range(count):
                decoder.truncate(len(prompt_of(sequence)) + 1, sequence)
            poison(decoder, "x", "q", "attended", "inner")
            if machine.name == "host":  # a GPU's has counters in it
                poison(decoder, "workspace")
            decoder.decode_batch(range(count))
            after = Snapshot.of(decoder)
            # Its own position of each sequence, and nothing else.  [layers, 2, sequences, kv_heads,
            # context, head_size] to [sequences, context, rest]:
            now, then, never = (
                s.cache.transpose(2, 4, 0, 1, 3, 5).reshape(SEQUENCES, BATCH.context_length, -1)
                for s in (after, before, blank)
            )
            assert now[written].tobytes() == then[written].tobytes()
            untouched = ~written
            for sequence in range(count):
                own = len(prompt_of(sequence))
                untouched[sequence, own] = False
                assert not np.isnan(values_in(now[sequence, own])).any()
            assert now[untouched].tobytes() == never[untouched].tobytes()
            for name in ("logits", "state", "ring"):
                idle, as_was = getattr(after, name)[others], getattr(blank, name)[others]
                assert idle.tobytes() == as_was.tobytes(), name
            first = first or after.logits.tobytes()
            assert after.logits.tobytes() == first
        assert after.ring.dtype == RING
        for sequence in range(count):
            tokens = decoder.tokens(sequence)
            assert tokens[:-2] == tuple(prompt_of(sequence))
            theirs = expected(BATCH, tokens[:-1], (len(tokens) - 2,))[0]
            error = difference(after.logits[sequence], theirs)
            assert error < bound, f"sequence {sequence}: {error:.1e}"
            assert tokens[-1] == int(after.logits[sequence].argmax())
            assert after.ring[sequence, len(tokens) - 1]["token"] == tokens[-1]
        assert not decoder.statistics().quarantined


def values_in(cache: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """The values of a KV cache of either dtype."""
    if cache.dtype == np.uint16:
        return (cache.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return cache


@on_both("bucket", host=[2, 8, 32], cuda=[2, 4, 8, 16, 32, 64])
def test_a_row_does_not_depend_on_the_others_of_its_bucket(machine: Device, bucket: int) -> None:
    """The same launches: so the same bits, whether the other rows pad or hold other sequences."""
    few = bucket // 2 + 1
    with open_decoder(machine, BATCH, sequences=SEQUENCES) as decoder:
        for sequence in range(bucket):
            decoder.prefill(prompt_of(sequence), sequence)

        def logits_of(sequences: Sequence[int]) -> dict[int, npt.NDArray[np.float32]]:
            for sequence in sequences:
                decoder.truncate(len(prompt_of(sequence)) + 1, sequence)
            decoder.decode_batch(sequences)
            return {sequence: decoder.logits(sequence) for sequence in sequences}

        for _ in range(3):
            full, part = logits_of(range(bucket)), logits_of(range(few))
            backwards = logits_of(range(bucket - 1, -1, -1))
            for sequence in range(few):
                assert part[sequence].tobytes() == full[sequence].tobytes()
            for sequence in range(bucket):
                assert difference(backwards[sequence], full[sequence]) < RELATIVE[kind(machine)]
        for sequence in (0, bucket - 1):  # and by itself, in a bucket of one
            alone = logits_of([sequence])
            assert difference(alone[sequence], full[sequence]) < RELATIVE[kind(machine)]


@on_both("count", host=[5], cuda=[2, 5, 64])
def test_every_way_gives_the_same_bits_for_a_batch(machine: Device, count: int) -> None:
    bits = {}
    for name, way in WAYS.items():
        with open_decoder(machine, BATCH, sequences=count, **way.options) as decoder:
            for attempt in range(2):
                decoder.reset()
                for sequence in range(count):
                    decoder.prefill(prompt_of(sequence), sequence)
                way.decode_batch(decoder, range(count), 2 * PER_LAUNCH + 3)
                tokens = [decoder.tokens(sequence) for sequence in range(count)]
                logits = [decoder.logits(sequence).tobytes() for sequence in range(count)]
                bits[name, attempt] = tokens, logits, Snapshot.of(decoder).state.tobytes()
            way.check(decoder)
    differing = [key for key, found in bits.items() if found != bits["eager", 0]]
    assert not differing


def damage(decoder: Decoder, sequence: int) -> None:
    """NaN in all that the KV cache holds of a sequence, and in no other's."""
    cache = decoder.plan.buffers["cache"]
    values = decoder.device.to_numpy(cache)
    values[:, :, sequence] = 0x7FFF if cache.dtype == np.uint16 else np.nan
    cache.set(values, decoder.stream)


@on_both("way", host=[w for w in WAYS if "recorded" not in w], cuda=WAYS)
def test_a_row_of_nan_ends_no_other(machine: Device, way: str) -> None:
    """The others have their tokens and go on; and the broken one's place can be used again."""
    every, others = range(4), (0, 1, 3)
    with open_decoder(machine, BATCH, sequences=4, **WAYS[way].options) as decoder:

        def decode(sequences: Sequence[int], steps: int) -> None:
            WAYS[way].decode_batch(decoder, sequences, steps)

        def begin(steps: int) -> None:
            decoder.reset()
            for sequence in every:
                decoder.prefill(prompt_of(sequence + 1), sequence)
            decode(every, steps)

        begin(3 * PER_LAUNCH)
        wanted = [decoder.tokens(sequence) for sequence in every]
        for _ in range(3):
            begin(3)
            before = decoder.tokens(2)
            damage(decoder, 2)
            with pytest.raises(LogitsError, match=r"sequence 2, position \d+: the log") as caught:
                decode(every, 3 * PER_LAUNCH - 3)
            error = caught.value
            assert error.failed == {2: len(before)} and decoder.tokens(2) == before
            assert error.chosen == {one: decoder.tokens(one)[-1] for one in others}
            decode(others, 3 * PER_LAUNCH - 4)
            assert [decoder.tokens(one) for one in others] == [wanted[one] for one in others]
        WAYS[way].check(decoder)


@on_both("broken", host=[(1,), (0, 3)], cuda=[(1,), (0, 3)])
def test_a_prompt_that_gives_nan_keeps_no_other_from_being_read(
    machine: Device, broken: tuple[int, ...]
) -> None:
    """In the same step and in the next one."""
    prompts = {one: RandomModel(BATCH).tokens(n, seed=n) for one, n in enumerate((39, 3, 40, 2))}
    good = [one for one in prompts if one not in broken]
    with open_decoder(machine, BATCH, sequences=4) as decoder:
        for attempt in range(4):
            decoder.reset()
            for one in prompts:
                decoder.extend([one], one)
            if attempt == 0:
                wanted = decoder.prefill_batch(prompts)
                continue
            for one in broken:
                damage(decoder, one)
            with pytest.raises(LogitsError) as caught:
                decoder.prefill_batch(prompts)
            assert caught.value.failed == {one: 1 + len(prompts[one]) for one in broken}
            assert caught.value.chosen == {one: wanted[one] for one in good}
            for one in good:
                assert decoder.tokens(one) == (one, *prompts[one], wanted[one])
            for one in broken:
                assert decoder.tokens(one) == (one,)
            assert len(decoder.decode_batch(good)) == len(good)
