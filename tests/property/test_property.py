"""Random lives of the library beside a NumPy oracle, on the host driver.

`python -m tests.property --help` for other seeds and longer lives.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import open_test_device
from tests.property.__main__ import main
from tests.property.engine import find, live, replay
from tests.property.mutations import MUTATIONS
from tests.property.threads import ThreadRules, Uncompiled

HEAD = "from tests.property.__main__ import kind_of"
"""Begins a printed program."""
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("kind", "seed"), [(ThreadRules, 1), (ThreadRules, 2), (ThreadRules, 3), (Uncompiled, 4)]
)
def test_some_hundred_steps_agree_with_the_oracle(kind: type[ThreadRules], seed: int) -> None:
    live(kind, seed, 400)


@pytest.mark.parametrize("device", ["host", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_programs_agree_with_the_oracle_on_both_drivers(
    device: str, request: pytest.FixtureRequest
) -> None:
    if device != "host":
        open_test_device(device, request.config).close()
    # In a process of its own: a program that fails on a GPU may take the context with it.
    command = [sys.executable, "-m", "tests.property", "--device", device, "--programs", "60"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    counted = json.loads(ended.stdout.splitlines()[-1])
    assert counted["programs"] == 60 and counted["steps"] == 60 * 40
    assert counted["launches"] > 100 and counted["changes"] > 100, counted
    assert {"ClosedError", "UpdateRefusedError", "InputError"} <= counted["refused"].keys()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ThreadRules, Uncompiled])
def test_ten_thousand_steps_agree_with_the_oracle(kind: type[ThreadRules]) -> None:
    live(kind, 10_000, 10_000)


@pytest.mark.slow
def test_a_failure_is_printed_as_the_few_steps_that_make_it() -> None:
    with MUTATIONS["half_a_capture_stays_in_the_graph"]():
        with pytest.raises(AssertionError) as caught:
            live(ThreadRules, 0, 2_000)
        _, found, *programme = str(caught.value).splitlines()
        steps = re.match(r"reduced to (\d+) steps", found)
        assert steps and int(steps[1]) == len(programme) < 8, caught.value
        with pytest.raises(type(caught.value.__cause__)):
            replay(ThreadRules, "\n".join(programme))
    replay(ThreadRules, "\n".join(programme))


def test_the_command_prints_a_program_that_fails_again(capsys: pytest.CaptureFixture[str]) -> None:
    with MUTATIONS["nothing_is_switched_off"]():
        assert main(["--programs", "300"]) == 1
        *lines, last = capsys.readouterr().out.splitlines()
        assert json.loads(last)["failed"]["kind"].startswith("AssertionError")
        code = "\n".join(lines[lines.index(HEAD) :])
        with pytest.raises(AssertionError):
            exec(code, {})
    exec(code, {})


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mistake_in_the_library_is_found(name: str) -> None:
    for seed in range(4):
        with MUTATIONS[name]():
            failure = find(ThreadRules, seed, 10_000)
        if failure is not None:
            assert not failure.kind.startswith(("AttributeError", "NameError")), failure.kind
            assert find(ThreadRules, seed, len(failure.steps)) is None, "it fails without, too"
            return
    pytest.fail("four lives of 10,000 steps went well")
