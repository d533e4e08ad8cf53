"""`--tensor-parallel`: ranks that a command starts, on the host device, and how all of them end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import typer

from ostinato.bench import floor
from ostinato.cli import ranks
from ostinato.cli.ranks import rank_devices, rank_threads
from ostinato.errors import InputError
from tests.cli.commands import Answer, here, refused, start
from tests.cli.terminal import Terminal
from tests.models.model_files import CONFIG, write_gguf

PATIENCE = 120.0  # against hangs alone
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return str(write_gguf(path, config=replace(CONFIG, context_length=32768)))


def children(pid: int) -> list[int]:
    """The processes of other ranks that a process started."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):  # it has ended
                parent = (folder / "stat").read_text(encoding="ascii").rpartition(")")[2].split()[1]
                if int(parent) == pid and b"ostinato.cli.rank" in (folder / "cmdline").read_bytes():
                    found.append(int(folder.name))
    return sorted(found)


def alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def until_gone(pids: list[int]) -> None:
    end = time.monotonic() + PATIENCE
    while any(map(alive, pids)):
        assert time.monotonic() < end, f"still there: {[pid for pid in pids if alive(pid)]}"
        time.sleep(0.02)


@contextmanager
def answering(
    tiny: str, *more: str, size: int = 2, deadline: str = "60"
) -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """The command in the middle of a long answer, and its other ranks' processes.  At the end none
    of them is there."""
    long = ("-n", "32000", "--max-context", "32768")  # greedy: it has no end token
    options = ("-m", tiny, *long, "--tensor-parallel", str(size), *more)
    process = start("generate", "ab", *options, OSTINATO_GROUP_DEADLINE=deadline)
    others: list[int] = []
    try:
        assert process.stdout is not None
        assert process.stdout.read(20), process.communicate()
        others = children(process.pid)
        assert len(others) == size - 1
        yield process, others
        until_gone(others)
    finally:
        for pid in (process.pid, *others):
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def ended(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    _, err = process.communicate(timeout=PATIENCE)
    return process.returncode, err.decode()


# ---------------------------------------------------------------------------------- what it gives


def test_ranks_give_the_answer_of_one_device(tiny: str) -> None:
    options = ("ab", "-m", tiny, "-n", "24", "-s", "5", "--json", "--stop", "no such")

    def found(*more: str) -> dict[str, object]:
        answer = here("generate", *options, *more)
        assert answer.status == 0, answer
        return json.loads(answer.out)

    for sampled in ((), ("-t", "1", "--tokens-per-launch", "4")):
        one, two = found(*sampled), found(*sampled, "--tensor-parallel", "2")
        assert two["token_ids"] == one["token_ids"] and two["text"] == one["text"]
        assert (one["ranks"], one["collectives"]) == (1, "")
        assert (two["ranks"], two["collectives"]) == (2, "the group's channel")
        assert not two["one_by_one"]


def test_packed_shares(tiny: str, tmp_path: Path) -> None:
    """A file's quantised matrices, split between blocks; where a block would be cut, all ranks
    refuse it, and it is said once."""
    config = replace(CONFIG, hidden=128, inner=128, heads=4, kv_heads=2, head_size=32)
    path = str(write_gguf(tmp_path / "q.gguf", config=config, kind="Q8_0"))
    options = ("-n", "6", "--raw", "--json", "--weights", "packed", "--threads", "1")
    one = here("generate", "ab", "-m", path, *options)
    two = here("generate", "ab", "-m", path, *options, "--tensor-parallel", "2")
    assert two.status == 0, two
    assert json.loads(two.out)["token_ids"] == json.loads(one.out)["token_ids"]
    narrow = replace(config, inner=96)
    path = str(write_gguf(tmp_path / "n.gguf", config=narrow, kind="Q8_0"))
    cut = here("generate", "ab", "-m", path, *options, "--tensor-parallel", "2")
    assert cut.status == 1 and cut.err.count("no whole number of blocks of 32") == 1, cut


def test_a_comparison_of_ranks(tmp_path: Path) -> None:
    options = ("--shape", "tiny", "--quick", "--context", "0", "--batch", "1,2", "--prompt", "5")
    with mock.patch.object(floor, "_HOST_ROUNDS", 1):
        answer = here("bench", *options, "--tensor-parallel", "2", "--out", str(tmp_path))
    assert answer.status == 0, answer
    result = json.loads(answer.out.splitlines()[-1])
    assert result["settings"]["ranks"] == 2
    assert result["settings"]["collectives"] == "the group's channel"
    assert result["summary"]["tokens_equal"] and not result["skipped"]
    ways = {row["way"] for row in result["rows"] if row["kind"] == "decode"}
    assert ways == {"eager", "capture", "record", "while 4"}
    assert {row["batch"] for row in result["rows"] if row["kind"] == "decode"} == {1, 2}
    assert "ranks exchange by: the group's channel" in answer.out
    assert next(tmp_path.glob("*.json")).name.startswith("decode-tiny-batches-0-prompt-2-ranks")


def test_what_a_comparison_of_ranks_does_not_do() -> None:
    options = ("--shape", "tiny", "--profile", "--tensor-parallel", "2")
    refused(here("bench", *options), "--profile")


# ------------------------------------------------------------------------------------------- chat


def test_a_conversation_of_ranks_is_that_of_one(tiny: str) -> None:
    """Also a second turn, of which the cache holds a part, a message that does not fit, and none
    that is answered after it."""
    options = ("-m", tiny, "-n", "6", "-t", "1", "-s", "7", "--max-context", "256")
    script = f"one\n/stats\n{'long ' * 300}\ntwo\n/stats\n".encode()
    one = here("chat", *options, input=script)
    two = here("chat", *options, "--tensor-parallel", "2", input=script)
    assert two.out == one.out and two.out.count("\n") > 1
    assert two.status == one.status == 1 and "the context is full" in one.err
    assert [line for line in two.err.splitlines() if "turn" in line] == [
        line for line in one.err.splitlines() if "turn" in line
    ]


def test_ctrl_c_stops_an_answer_and_the_ranks_answer_the_next_message(tiny: str) -> None:
    endless = ("-m", tiny, "-n", "32000", "--max-context", "32768", "-t", "0")
    with Terminal("chat", *endless, "--tensor-parallel", "2") as terminal:
        for message in ("one", "two"):
            terminal.until("> ")
            terminal.send(f"{message}\r")
            terminal.until(f"{message}\r\n")
            time.sleep(0.2)  # Ctrl-C in the prompt, in a step or between two
            terminal.send("\x03")
            terminal.until("(stopped; ")
        terminal.until("> ")
        others = children(terminal.process.pid)
        assert len(others) == 1
        terminal.send("\x04")
        assert terminal.end() == 0
    until_gone(others)
    assert "rror" not in terminal.said


def test_a_rank_that_died_between_two_messages_ends_the_conversation(tiny: str) -> None:
    # Greedy: a drawn answer may end before the limit.
    options = "-n", "5", "--temperature", "0", "--tensor-parallel", "2"
    with Terminal("chat", "-m", tiny, *options) as terminal:
        terminal.until("> ")
        terminal.send("one\r")
        terminal.until("see --max-tokens)")
        terminal.until("> ")
        (other,) = children(terminal.process.pid)
        os.kill(other, signal.SIGKILL)
        until_gone([other])
        terminal.send("two\r")
        assert terminal.end() == 1
    assert "error: rank 1 died" in terminal.said


# ------------------------------------------------------------------------------------ the devices


@pytest.mark.parametrize(
    ("count", "device", "gpus", "wanted"),
    [
        (1, None, 8, [None]),
        (1, "cuda:3", 8, ["cuda:3"]),
        (2, None, 2, ["cuda:0", "cuda:1"]),
        (2, "cuda", 2, ["cuda:0", "cuda:1"]),
        (2, "cuda:6", 8, ["cuda:6", "cuda:7"]),
        (3, None, 0, ["host"] * 3),
        (3, "cpu", 8, ["host"] * 3),
    ],
)
def test_each_rank_has_a_device(
    count: int, device: str | None, gpus: int, wanted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OSTINATO_DEVICE", raising=False)
    monkeypatch.setattr("ostinato.driver.cuda.driver.gpu_count", lambda: gpus)
    assert rank_devices(count, device) == wanted
    if device is not None:
        monkeypatch.setenv("OSTINATO_DEVICE", device)
        assert count == 1 or rank_devices(count, None) == wanted


@pytest.mark.parametrize(("device", "gpus"), [(None, 1), ("cuda:7", 8), ("cuda", 0)])
def test_too_few_gpus(device: str | None, gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OSTINATO_DEVICE", raising=False)
    monkeypatch.setattr("ostinato.driver.cuda.driver.gpu_count", lambda: gpus)
    with pytest.raises(typer.BadParameter, match=f"2 ranks need .* this machine has {gpus}"):
        rank_devices(2, device)


def test_wrong_devices_are_found_before_anything_is_started() -> None:
    for name in ("nonsense", "cuda:x", "host:1"):
        with pytest.raises(InputError, match="there is no device"):
            rank_devices(2, name)
    refused(here("generate", "x", "--tensor-parallel", "0"), "--tensor-parallel")


def test_ranks_on_a_cpu_share_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSTINATO_THREADS", "9")
    assert rank_threads(["host"] * 4, None) == 2
    assert rank_threads(["host"] * 16, None) == 1
    assert rank_threads(["host"] * 4, 3) == 3
    assert rank_threads(["host"], None) is None
    assert rank_threads(["cuda:0", "cuda:1"], None) is None


# ----------------------------------------------------------------------------------------- faults


def test_ctrl_c_ends_all_and_the_summary_is_there(tiny: str) -> None:
    with answering(tiny) as (process, _):
        process.send_signal(signal.SIGINT)
        status, err = ended(process)
    assert status == 130
    assert " tokens (interrupted) at " in err and "rank 1" not in err


def test_sigterm_ends_all(tiny: str) -> None:
    with answering(tiny) as (process, _):
        process.terminate()
        status, err = ended(process)
    assert (status, err) == (143, "terminated\n")


@pytest.mark.parametrize(
    ("number", "size", "words"),
    [
        pytest.param(signal.SIGKILL, 2, "rank 1 died", id="killed"),
        pytest.param(signal.SIGTERM, 4, "rank 1 died", id="terminated", marks=SLOW),
        pytest.param(signal.SIGSTOP, 4, "rank 1 has not been heard of", id="stopped", marks=SLOW),
    ],
)
def test_the_death_of_a_rank_is_an_error(
    tiny: str, number: signal.Signals, size: int, words: str
) -> None:
    deadline = "6" if number == signal.SIGSTOP else "60"
    with answering(tiny, size=size, deadline=deadline) as (process, others):
        os.kill(others[0], number)
        code, err = ended(process)
    assert code == 1
    assert err.startswith(f"error: {words}"), err
    assert (f"rank 1 was ended by {number.name}" in err) == (number != signal.SIGSTOP)


def test_the_death_of_rank_0_ends_the_others(tiny: str) -> None:
    with answering(tiny) as (process, _):
        process.kill()
        assert ended(process)[0] == -signal.SIGKILL


def with_rank(program: str, *arguments: str) -> Answer:
    """The command, whose other ranks run this."""
    with mock.patch.object(ranks, "_PROGRAM", program):
        return here(*arguments)


RANK = "import os, sys, ostinato.cli.rank as rank\n"


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (
            "import sys; sys.exit('no luck')",
            "rank 1: no luck\n"
            "error: the process of rank 1 ended with status 1 before it was in the group\n",
        ),
        (
            RANK + "def broken(*a, **k): print('so far'); 1 / 0\n"
            "rank.WORKS = {'follow': broken}; rank.main()",
            "ZeroDivisionError: division by zero\n"
            "rank 1: error: this is a defect of ostinato; please report these lines\n"
            "error: rank 1 raised ZeroDivisionError: division by zero\n",
        ),
        (
            RANK + "from ostinato.errors import ModelError\n"
            "def broken(*a, **k): raise ModelError('a bad file')\n"
            "rank.WORKS = {'follow': broken}; rank.main()",
            "error: rank 1 raised ModelError: a bad file\n",
        ),
        (
            RANK + "end = os._exit; os._exit = lambda status: end(status or 7); rank.main()",
            "error: the work was done, but rank 1 ended with status 7\n",
        ),
    ],
    ids=["does not start", "raises", "raises what is known", "fails at the end"],
)
def test_what_a_rank_says_and_how_it_ends_is_told(tiny: str, program: str, words: str) -> None:
    answer = with_rank(program, "generate", "ab", "-m", tiny, "-n", "4", "--tensor-parallel", "2")
    assert answer.status == 1
    assert answer.err.endswith(words), answer.err
    assert not children(os.getpid())


def test_an_error_of_all_ranks_is_said_once(tiny: str) -> None:
    answer = here("generate", "ab", "-m", tiny, "--tensor-parallel", "3")
    assert answer.status == 1
    assert (
        answer.err == "error: heads is 4, which 3 ranks cannot share: it must be a multiple of 3\n"
    )
