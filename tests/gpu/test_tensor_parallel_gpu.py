"""Two GPUs as ranks of one decoder: processes, their answers and faults, and a server of theirs."""

from __future__ import annotations

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ostinato.device import open_device
from ostinato.distributed import Group, local_groups, new_group_id
from ostinato.distributed.nccl import load_nccl
from ostinato.errors import NotAvailableError
from ostinato.models import Decoder
from tests.cli import commands
from tests.distributed.products_program import CUTS
from tests.distributed.starting import (
    MOMENTS,
    End,
    finish,
    ranks,
    require_typed_errors,
    start,
    waits,
)
from tests.distributed.test_decoder_ranks import FIRST, SHAPES, drafts_beside_steps, masked

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
    *margins, last = one["margins"]
    for step, (mine, other) in enumerate(zip(one["tokens"], first["tokens"], strict=True)):
        if mine != other:
            assert step < len(margins) and margins[step] < 0.05
            break
    assert one["last"] == first["last"] or last < 0.05


def test_runs_repeat_bit_for_bit() -> None:
    assert ranks(2, "cuda")[0][1] == ranks(2, "cuda")[0][1]


def test_masks_of_rank_0_are_those_of_both() -> None:
    """Steps, prompts and runs, beside a sequence without; ranks are threads here."""

    def rank_thread(group: Group) -> list[Any]:
        model = SHAPES[FIRST].checkpoint()
        with (
            open_device(f"cuda:{group.rank}") as device,
            Decoder(device, model, group=group, sequences=3, stop_tokens=()) as decoder,
        ):
            return masked(decoder, group.rank)

    with local_groups(2, deadline=60) as groups:
        first, second = groups.run(rank_thread)
    assert first == second


def test_drafts_of_both_are_the_tokens_of_single_steps() -> None:
    def rank_thread(group: Group) -> list[list[int]]:
        options: dict[str, Any] = {"sequences": 2, "stop_tokens": (), "lookup": 3, "max_rows": 8}
        with (
            open_device(f"cuda:{group.rank}") as device,
            Decoder(device, SHAPES[FIRST].checkpoint(), group=group, **options) as decoder,
        ):
            return drafts_beside_steps(decoder)

    with local_groups(2, deadline=60) as groups:
        first, second = groups.run(rank_thread)
    assert first == second


def both(program: str) -> list[End]:
    """What both ranks of a program end with."""
    group = new_group_id(2, deadline=60)
    started = [
        start(str(rank), group, program=program, group=f"{rank}/2/{group}") for rank in range(2)
    ]
    return [finish(process) for process in started]


def test_exchanges_in_peer_memory() -> None:
    """`exchange_program`: sums and gathers of all lengths, eager, replayed and in loops, against
    NumPy; then a rank that does not come ends the wait on the other's device."""
    found = both("exchange_program.py")
    assert [code for code, _, _ in found] == [0, 1], found
    assert json.loads(found[0][1])["lost"] == "rank 1 raised ValueError: over"


def test_products_of_several_rows_add_the_sums_of_both() -> None:
    """`products_program`: the same results on both, and NumPy's."""
    found = both("products_program.py")
    assert [code for code, _, _ in found] == [0, 0], found
    assert found[0][1] == found[1][1] and set(json.loads(found[0][1])) == set(CUTS)


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


# -------------------------------------------------------------------------------------- the server

TWO = ("--device", "cuda:0", "--tensor-parallel", "2")


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("openai")
    pytest.importorskip("ostinato.serve.server")
    from tests.serve.test_ranks import write_endless

    sizes = {"hidden": 256, "heads": 4, "kv_heads": 2, "head_size": 64, "inner": 512}
    return write_endless(tmp_path_factory.mktemp("model") / "endless.gguf", **sizes)


def test_a_server_of_two_gpus_gives_the_answers_of_generate(endless: Path) -> None:
    """One after the other, with the same bits; then many at once, none of which is lost."""
    from tests.serve.serving import client
    from tests.serve.test_ranks import LONG, ended, serving

    options = ("-m", str(endless), "-n", "40", "--max-context", "512", "--raw", "-q")
    prompts = ("ab", "the 12 ab", "q er the")
    wanted = [commands.process("generate", one, *options, *TWO).out[:-1] for one in prompts]
    more = ("--max-context", "512", "--no-reuse", "--slots", "8")
    with serving(endless, *more, *TWO) as (process, url, _):
        create = client(url).completions.create
        asked = LONG | {"max_tokens": 40}
        found = [create(**{**asked, "prompt": one}).choices[0].text for one in prompts]
        assert found == wanted and len(set(found)) == 3
        with ThreadPoolExecutor(32) as pool:
            answers = list(pool.map(lambda _: create(**{**LONG, "max_tokens": 200}), range(64)))
        assert {one.usage.completion_tokens for one in answers} == {200}
        process.terminate()
        status, err = ended(process)
    assert status == 0 and "67 answers begun (67 length)" in err, err


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_lost_ends_the_server_of_two_gpus(
    endless: Path, fault: signal.Signals
) -> None:
    """After a time without requests that is longer than the deadline."""
    from tests.serve.test_ranks import ended, failures, serving

    deadline = 40
    options = ("--max-context", "32768", *TWO)
    with serving(endless, *options, deadline=str(deadline)) as (process, url, others):
        time.sleep(1.2 * deadline)
        begin = time.monotonic()
        found = failures(url, process, lambda: os.kill(others[0], fault))
        status, err = ended(process)
        assert time.monotonic() - begin < 2 * deadline
    for error in found:
        assert "rank 1" in error["message"] and error["code"] == "failed", error
    assert status == 1 and "error: rank 1" in err and "2 failed" in err
