"""Graphed functions of torch that communicate, under torchrun (`ranks_program.py`): on the CPU by
gloo, with captures that are tapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.processes import python

PROGRAM = Path(__file__).with_name("ranks_program.py")


@pytest.fixture(autouse=True)
def _torch() -> None:
    pytest.importorskip("torch.distributed.run")


def started(scenario: str, deadline: int = 60, **environment: str) -> list[dict[str, Any]]:
    """What the two ranks of a scenario print, by rank."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment["OSTINATO_GROUP_DEADLINE"] = str(deadline)
    done = python(*command, str(PROGRAM), scenario, **environment)
    lines = [json.loads(one) for one in done.stdout.splitlines() if one.startswith("{")]
    assert len(lines) == 2, done.stdout + done.stderr[-6000:]
    found = sorted(lines, key=lambda one: one["rank"])
    assert not [one["failed"] for one in found if "failed" in one], found
    # A rank that has not agreed leaves work behind that may never end.
    assert done.returncode == 0 or any("error" in one for one in found), done.stderr[-6000:]
    return found


def on_cpu(scenario: str, deadline: int = 60) -> list[dict[str, Any]]:
    return started(scenario, deadline, CUDA_VISIBLE_DEVICES="")


def require_together(found: list[dict[str, Any]], captures: int, replays: int) -> None:
    for one in found:
        assert one["right"] and not one["reasons"], one
        assert (one["captures"], one["replays"]) == (captures, replays), one


def require_apart(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert one["right"] and (one["captures"], one["replays"]) == (0, 0), one
    assert "rank 1 could not capture it: it cannot be captured" in found[0]["reasons"][0]
    assert found[1]["reasons"][0].startswith("it cannot be captured")


def require_raised(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert one["right"] and (one["captures"], one["replays"]) == (0, 0), one
        assert "ValueError: on one rank" in one["reasons"][0]
    assert "rank 1 could not capture it" in found[0]["reasons"][0]
    assert [one["caught"] for one in found] == ["", "on one rank"]


def require_named(found: list[dict[str, Any]], what: str) -> None:
    assert found[0]["right"] and found[1]["right"]
    error = found[1]["error"]
    assert error.startswith("DeadlineError: graphed") and "rank 0 did not come" in error
    assert f"while this rank {what}" in error


def require_dropped(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert one["right"] and one["kept"] == [0, 1] and one["after"]["captures"] == 1, one
        assert one["left"] == [0]
        assert "process group has not been initialized" in one["error"]


def test_all_ranks_capture_and_replay() -> None:
    require_together(on_cpu("together"), captures=1, replays=3)


@pytest.mark.slow
def test_a_training_step_of_distributed_data_parallel() -> None:
    require_together(on_cpu("parallel"), captures=1, replays=8)


def test_steps_of_python_are_not_replayed_between_ranks() -> None:
    for one in on_cpu("stepping"):
        assert one["right"] and (one["captures"], one["replays"]) == (0, 0), one
        assert "steps that Python makes, and it communicates" in one["reasons"][-1]


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["early", "unsynced", "sharded"])
def test_what_cannot_always_be_captured_is_right(scenario: str) -> None:
    """Steps of DistributedDataParallel that communicate now and then, and FSDP."""
    found = on_cpu(scenario)
    assert all(one["right"] for one in found)
    if scenario == "sharded":
        assert all("a tensor of the subclass" in one["reasons"][0] for one in found)


@pytest.mark.slow
def test_functional_collectives_in_a_group_of_their_own() -> None:
    require_together(on_cpu("functional"), captures=1, replays=5)


def test_no_rank_has_a_graph_if_one_cannot_capture() -> None:
    require_apart(on_cpu("apart"))


@pytest.mark.slow
def test_an_exception_of_one_rank_while_all_capture() -> None:
    require_raised(on_cpu("raised"))


def test_a_rank_that_captures_again_alone_is_an_error() -> None:
    require_named(on_cpu("again", deadline=5), "runs it for the first time")


def test_the_end_of_a_group_drops_its_graphs_alone() -> None:
    require_dropped(on_cpu("destroyed"))


@pytest.mark.parametrize("scenario", [pytest.param("closed", marks=pytest.mark.slow), "collected"])
def test_a_function_is_closed_before_its_group_ends(scenario: str) -> None:
    require_together(on_cpu(scenario), captures=1, replays=3)


def test_graphs_of_messages_to_single_ranks_end_with_their_group() -> None:
    assert all(one["right"] for one in on_cpu("uncounted"))
