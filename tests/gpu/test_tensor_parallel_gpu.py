"""Two GPUs as ranks of one decoder, by NCCL: processes, their answers, and their faults."""

from __future__ import annotations

import json

import pytest

from ostinato.device import open_device
from ostinato.distributed import new_group_id
from ostinato.distributed.nccl import load_nccl
from ostinato.errors import NotAvailableError
from tests.distributed.starting import (
    MOMENTS,
    finish,
    ranks,
    require_typed_errors,
    start,
    waits,
)

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def _two_gpus() -> None:
    try:
        open_device("cuda:1").close()
        load_nccl()
    except NotAvailableError as error:
        pytest.skip(f"no device: {error}")


@pytest.mark.parametrize(
    ("way", "weights"),
    [("exchange", "cuda"), ("library", "cuda"), ("exchange", "Q8_0"), ("exchange", "Q4_K_M")],
)
def test_two_gpus_give_the_tokens_of_one(
    way: str, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the margin rule, and the same bits on both; of a file's packed weights too, as they are
    by themselves."""
    monkeypatch.setenv("OSTINATO_COLLECTIVES", way)
    code, out, err = finish(start(weights, "alone", ""))
    assert code == 0, err
    one = json.loads(out)
    found = ranks(2, weights)
    assert one["weights"].startswith("packed") == (weights != "cuda")
    assert [code for code, _, _ in found] == [0, 0], found
    first, second = (json.loads(out) for _, out, _ in found)
    assert first == second and first["weights"] == one["weights"]
    assert not first["eager"]
    for step, (mine, other) in enumerate(zip(one["tokens"], first["tokens"], strict=True)):
        if mine != other:
            assert step < len(one["margins"]) and one["margins"][step] < 0.05
            break


def test_runs_repeat_bit_for_bit() -> None:
    assert ranks(2, "cuda")[0][1] == ranks(2, "cuda")[0][1]


def test_exchanges_in_peer_memory() -> None:
    """`exchange_program`: sums and gathers of all lengths, eager, replayed and in loops, against
    NumPy; then a rank that does not come ends the wait on the other's device."""
    group = new_group_id(2, deadline=60)
    started = [
        start(str(rank), group, program="exchange_program.py", group=f"{rank}/2/{group}")
        for rank in range(2)
    ]
    found = [finish(process) for process in started]
    assert [code for code, _, _ in found] == [0, 1], found
    assert json.loads(found[0][1])["lost"] == "rank 1 raised ValueError: over"


QUICK = {"kill": "loop", "stop": "between", "raise": "prompt"}


@pytest.mark.parametrize(
    ("fault", "moment"),
    [
        pytest.param(fault, moment, marks=[] if QUICK.get(fault) == moment else [pytest.mark.slow])
        for fault in ("kill", "stop", "raise", "key", "build")
        for moment in MOMENTS
    ],
)
def test_a_fault_of_one_rank_is_a_typed_error_on_the_other(fault: str, moment: str) -> None:
    deadline = 15 if waits(fault, moment) else 60
    require_typed_errors(ranks(2, "cuda", deadline=deadline, faulty=f"{fault} {moment}"), fault)
