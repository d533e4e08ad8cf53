"""Ranks that repeat the calls of rank 0's decoder: their answers, their waits, and how they end."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

import ostinato as ost
from ostinato.distributed import Group, LocalGroups, local_groups
from ostinato.errors import (
    ClosedError,
    DisagreementError,
    GroupError,
    InputError,
    LogitsError,
    RankLostError,
)
from ostinato.models import Decoder, SamplingOptions
from tests.distributed.test_decoder_ranks import FIRST, SHAPES, masked
from tests.distributed.test_local import outcomes

MODEL = SHAPES[FIRST]
Work = Callable[[Decoder], Any]
OPTIONS: dict[str, Any] = {"stop_tokens": (), "threads": 1, "sequences": 3, "max_rows": 8}


def nothing(decoder: Decoder) -> None:
    pass


def leading(work: Work, prepared: Work = nothing, **options: Any) -> Callable[[Group | None], Any]:
    """`work` on rank 0's decoder, or on one device; the others follow.  Returns what `work` gives,
    and of the others their sequences.  `prepared`: what the others do before."""

    def call(group: Group | None) -> Any:
        first = group is None or group.rank == 0
        settings = OPTIONS | options | {"leads": first and group is not None}
        with (
            ost.open_device("host") as device,
            Decoder(device, MODEL.checkpoint(), group=group, **settings) as decoder,
        ):
            if first:
                return work(decoder)
            prepared(decoder)
            try:
                decoder.follow()
            except BaseException as error:
                if group is not None:  # before the decoder is closed, which waits for others
                    group.fail(error)
                raise
            return [decoder.tokens(sequence) for sequence in range(3)]

    return call


def everything(decoder: Decoder) -> list[Any]:
    """Each call that crosses, and runs that end in each way; the last result are the sequences."""
    told: list[tuple[int, int]] = []
    found: list[Any] = [
        decoder.prefill(MODEL.tokens(20), progress=lambda *now: told.append(now)),
        decoder.prefill_batch({1: iter(MODEL.tokens(5)), 2: MODEL.tokens(7)}),
        decoder.set_sampling(SamplingOptions(1.5, seed=3, top_k=40), 1),
        list(decoder.run_batch(range(3), count=5)),
    ]
    for _ in decoder.run(2):  # abandoned: what was computed ahead is dropped
        break
    found.append(decoder.decode(2))
    run = decoder.run_batch([0, 1], ahead=3)
    found += [next(run), next(run)]
    run.finish()  # what was computed ahead is taken
    found += [list(run), next(run, None)]
    with decoder.run(1) as closed:
        found.append(next(closed))
    found += [next(closed, None), decoder.decode_batch((1, 0))]
    taken: list[dict[int, int]] = []
    run = decoder.run_batch([0, 1])
    found += [run.take(3, taken.append), next(run), taken]
    run.finish()
    found += [run.take(9, taken.append), run.take(1, taken.append)]
    found += [list(decoder.run(0, count=8, tokens_per_launch=4)), decoder.logits().argmax()]
    decoder.extend(MODEL.tokens(3), 2)
    decoder.copy_prefix(4, 0, 2)
    decoder.truncate(6, 1)
    found += [decoder.keep_common(MODEL.tokens(4), 0), decoder.prefill([5, 6], 2)]
    decoder.set_stop_tokens([found[-1]])
    found += [decoder.prefill([5, 6], 0), told]
    decoder.reset(1)
    return [*found, [decoder.tokens(sequence) for sequence in range(3)]]


@pytest.mark.parametrize("size", [2, 4])
def test_the_calls_of_rank_0_give_what_they_give_on_one_device(size: int) -> None:
    """The bits of tokens; each other rank has the same sequences at the end."""
    one = leading(everything)(None)
    assert len({str(item) for item in one}) > 10
    with local_groups(size, deadline=60) as groups:
        first, *others = groups.run(leading(everything))
    assert first == one
    assert others == [one[-1]] * (size - 1)


def test_masks_of_rank_0_reach_the_ranks_that_follow() -> None:
    def work(decoder: Decoder) -> list[Any]:
        return masked(decoder)[-1]

    one = leading(work)(None)
    with local_groups(2, deadline=60) as groups:
        first, other = groups.run(leading(work))
    assert first == other == one


def alive(decoder: Decoder) -> int:
    """That the group works: a step of all ranks."""
    decoder.reset()
    return decoder.prefill(MODEL.tokens(5))


def test_an_error_that_all_ranks_have_is_raised_and_the_group_works_on() -> None:
    def work(decoder: Decoder) -> int:
        for wrong in (
            lambda: decoder.prefill([]),
            lambda: decoder.prefill(MODEL.tokens(5), 9),
            lambda: decoder.decode(1),
            lambda: decoder.prefill("text"),  # type: ignore[arg-type]
            lambda: decoder.prefill([object()]),  # type: ignore[list-item]
            lambda: decoder.prefill(b"12"),
            lambda: decoder.set_sampling(SamplingOptions(), 5),
            lambda: decoder.profile().__enter__(),
        ):
            with pytest.raises(InputError):
                wrong()
        run = decoder.run(0) if decoder.prefill(MODEL.tokens(5)) else None
        decoder.reset(1)
        with pytest.raises(ClosedError, match=r"ended by reset\(\)"):
            next(run or iter(()))
        return alive(decoder)

    with local_groups(2, deadline=60) as groups:
        assert groups.run(leading(work))[0] == leading(alive)(None)


def test_logits_of_nan_end_a_step_and_not_the_group() -> None:
    def broken(decoder: Decoder) -> None:
        decoder.plan.weights.buffer("final_norm").array[:] = float("nan")

    def work(decoder: Decoder) -> str:
        broken(decoder)
        with pytest.raises(LogitsError) as error:
            decoder.prefill(MODEL.tokens(5))
        decoder.reset(0)
        return str(error.value)

    with local_groups(2, deadline=60) as groups:
        assert "NaN" in groups.run(leading(work, broken))[0]  # type: ignore[operator]


def test_a_rank_that_raises_ends_the_call_of_rank_0() -> None:
    """At once: no deadline passes."""

    def out_of_memory(*args: object, **options: object) -> int:
        raise MemoryError("no room")

    def prepared(decoder: Decoder) -> None:
        decoder.prefill = out_of_memory  # type: ignore[method-assign]

    with local_groups(2, deadline=600) as groups:
        first, second = outcomes(groups, leading(alive, prepared))
    assert type(first) is RankLostError and str(first) == "rank 1 raised MemoryError: no room"
    assert type(second) is MemoryError


def test_an_error_of_rank_0_alone_ends_the_others() -> None:
    def work(decoder: Decoder) -> None:
        def progress(done: int, total: int) -> None:
            raise MemoryError("no room")

        with pytest.raises(MemoryError):
            decoder.prefill(MODEL.tokens(5), progress=progress)
        decoder.decode()

    with local_groups(2, deadline=600) as groups:
        found = outcomes(groups, leading(work))
    for one in found:
        assert type(one) is RankLostError and str(one) == "rank 0 raised MemoryError: no room"


@pytest.mark.parametrize("size", [1, 2])
def test_an_error_between_items_is_raised_once_all_ranks_have_taken_them(size: int) -> None:
    """No rank waits for another, and the run goes on behind these items."""

    def work(decoder: Decoder) -> list[Any]:
        seen: list[int] = []

        def each(token: int) -> None:
            seen.append(token)
            if len(seen) == 2:
                raise MemoryError("no room")

        decoder.prefill(MODEL.tokens(5))
        run = decoder.run()
        with pytest.raises(MemoryError, match="no room"):
            run.take(5, each)
        seen.append(next(run))
        decoder.reset(1)
        with pytest.raises(ClosedError):
            run.take(1, each)
        return [seen, decoder.decode(), decoder.tokens()]

    def one_by_one(decoder: Decoder) -> list[Any]:
        decoder.prefill(MODEL.tokens(5))
        seen = [decoder.decode() for _ in range(6)]
        return [[*seen[:2], seen[5]], decoder.decode(), decoder.tokens()]

    wanted = leading(one_by_one)(None)
    if size == 1:
        assert leading(work)(None) == wanted
        return
    with local_groups(size, deadline=60) as groups:
        assert groups.run(leading(work))[0] == wanted


def another_result(decoder: Decoder) -> None:
    """The ranks would go on with different tokens."""
    prefill = decoder.prefill
    decoder.prefill = lambda *args: prefill(*args) + 1  # type: ignore[method-assign]


def another_setting(decoder: Decoder) -> None:
    """A run would launch another number of steps."""
    decoder.device_state = False


@pytest.mark.parametrize("prepared", [another_result, another_setting])
def test_ranks_that_differ_are_told(prepared: Callable[[Decoder], None]) -> None:
    def work(decoder: Decoder) -> None:
        decoder.prefill(MODEL.tokens(5))
        for _ in decoder.run(count=9):
            pass
        decoder.reset()
        decoder.reset()

    with local_groups(2, deadline=60) as groups:
        found = outcomes(groups, leading(work, prepared))
    for one in found:
        assert type(one) is DisagreementError and "rank 1 got" in str(one)


def test_ranks_that_wait_do_so_beyond_the_deadline() -> None:
    def prepared(decoder: Decoder) -> None:
        assert decoder.group is not None
        decoder.group.deadline = 0.01

    def work(decoder: Decoder) -> str:
        time.sleep(0.3)
        decoder.reset()
        return "done"

    with local_groups(2, deadline=60) as groups:
        assert groups.run(leading(work, prepared))[0] == "done"


def test_rank_0_that_leaves_ends_those_that_wait() -> None:
    def work(group: Group) -> object:
        return "left" if group.rank == 0 else group.begin_exchange("next", endless=True)()

    with local_groups(3, deadline=600) as groups:
        first, *others = outcomes(groups, work)
    assert first == "left"
    for one in others:
        assert type(one) is RankLostError and str(one) == "rank 0 has left the group"


@pytest.mark.parametrize("other", ["follows nobody", "makes its own calls"])
def test_ranks_of_which_none_leads_or_one_does_not_follow(other: str) -> None:
    """Would wait for ever otherwise."""

    def work(group: Group) -> object:
        alone = other == "makes its own calls"
        with (
            ost.open_device("host") as device,
            Decoder(
                device, MODEL.checkpoint(), group=group, leads=alone and not group.rank, **OPTIONS
            ) as decoder,
        ):
            if group.rank and not alone:
                return decoder.follow()
            return alive(decoder)

    with local_groups(2, deadline=60) as groups:
        found = outcomes(groups, work)
    assert all(isinstance(one, GroupError) for one in found), found


def test_what_is_no_leader_and_what_cannot_follow() -> None:
    def refused(group: Group | None, *, leads: bool, words: str) -> None:
        with (
            ost.open_device("host") as device,
            pytest.raises(InputError, match=words),
            Decoder(device, MODEL.checkpoint(), group=group, leads=leads) as decoder,
        ):
            decoder.follow()

    refused(None, leads=True, words="leads=True is for rank 0")
    refused(None, leads=False, words=r"follow\(\) is for the ranks")
    with local_groups(2) as groups:
        refused(groups[1], leads=True, words="leads=True is for rank 0")


@pytest.fixture
def followed() -> Iterator[LocalGroups]:
    """A group whose rank 1 follows, on a thread; rank 0 is for this one, the main thread."""
    with local_groups(2, deadline=60) as groups:

        def follow() -> None:
            with suppress(GroupError):
                leading(nothing)(groups[1])

        thread = threading.Thread(target=follow)
        thread.start()
        yield groups
        thread.join()


def test_ctrl_c_waits_for_the_end_of_a_call(followed: LocalGroups) -> None:
    """All ranks make it; what follows is as if it had come between two calls."""

    def work(decoder: Decoder) -> list[int]:
        with pytest.raises(KeyboardInterrupt):
            decoder.prefill(
                MODEL.tokens(20), progress=lambda *now: signal.raise_signal(signal.SIGINT)
            )
        return [decoder.decode() for _ in range(4)]

    def whole(decoder: Decoder) -> list[int]:
        decoder.prefill(MODEL.tokens(20))
        return [decoder.decode() for _ in range(4)]

    assert leading(work)(followed[0]) == leading(whole)(None)
    followed[0].check()
