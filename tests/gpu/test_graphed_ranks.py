"""Graphed functions with NCCL's collectives on two GPUs, under torchrun."""

from __future__ import annotations

import pytest

from ostinato.device import open_device
from ostinato.errors import NotAvailableError
from tests.interop.test_ranks_torch import (
    require_apart,
    require_dropped,
    require_named,
    require_raised,
    require_together,
    started,
)

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def _two_gpus() -> None:
    pytest.importorskip("torch.distributed.run")
    try:
        open_device("cuda:1").close()
    except NotAvailableError as error:
        pytest.skip(f"no device: {error}")


@pytest.mark.parametrize("scenario", ["together", "closed", "collected"])
def test_all_ranks_capture_and_replay(scenario: str) -> None:
    require_together(started(scenario), captures=1, replays=3)


def test_functional_collectives_in_a_group_of_their_own() -> None:
    require_together(started("functional"), captures=1, replays=5)


def test_messages_to_single_ranks_are_not_captured() -> None:
    for one in started("single"):
        assert one["right"] and (one["captures"], one["replays"]) == (0, 0), one
        assert "(send, recv)" in one["reasons"][0]


def test_no_rank_has_a_graph_if_one_cannot_capture() -> None:
    require_apart(started("apart"))


def test_an_exception_of_one_rank_while_all_capture() -> None:
    require_raised(started("raised"))


def test_a_rank_that_captures_again_alone_is_an_error() -> None:
    require_named(started("again", deadline=10), "runs it for the first time")


def test_a_rank_that_runs_eagerly_alone_is_an_error() -> None:
    found = started("eagerly", deadline=10)
    error = found[1]["error"]
    assert "rank 0 did not come" in error and "while this rank runs it eagerly" in error


def test_a_training_step_of_distributed_data_parallel() -> None:
    require_together(started("parallel"), captures=1, replays=8)


@pytest.mark.parametrize("scenario", ["early", "stepping", "unsynced", "sharded"])
def test_what_cannot_always_be_captured_is_right(scenario: str) -> None:
    assert all(one["right"] for one in started(scenario))


def test_the_end_of_a_group_drops_its_graphs_alone() -> None:
    require_dropped(started("destroyed"))
