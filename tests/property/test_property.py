"""Random lives of the library beside a NumPy oracle, on the host driver.

`python -m tests.property --help` for other seeds and longer lives.
"""

from __future__ import annotations

import json
import re

import pytest

from tests.conftest import open_test_device
from tests.property.__main__ import main
from tests.property.engine import find
from tests.property.mutations import MUTATIONS
from tests.property.threads import ThreadRules

HEAD = "from tests.property.__main__ import kind_of"
"""Begins a printed program."""


def lives(*options: str) -> None:
    assert main(options) == 0


@pytest.mark.parametrize("seed", range(1, 5))
def test_some_hundred_steps_agree_with_the_oracle(seed: int) -> None:
    lives("--programs", "1", "--length", "400", "--seed", str(seed))


@pytest.mark.parametrize("device", ["host", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_programs_agree_with_the_oracle_on_both_drivers(
    device: str, request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str]
) -> None:
    """On a GPU in a process of their own, since one that fails may take the context with it."""
    if device != "host":
        open_test_device(device, request.config).close()
    lives("--device", device, "--programs", "60")
    counted = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert counted["programs"] == 60 and counted["steps"] == 60 * 40
    assert counted["launches"] > 100 and counted["changes"] > 100, counted
    assert {"ClosedError", "UpdateRefusedError", "InputError"} <= counted["refused"].keys()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [10_002, 10_003])  # with the compiled launch call, and without
def test_ten_thousand_steps_agree_with_the_oracle(seed: int) -> None:
    lives("--programs", "1", "--length", "10000", "--seed", str(seed))


def test_the_command_prints_a_program_that_fails_again(capsys: pytest.CaptureFixture[str]) -> None:
    with MUTATIONS["nothing_is_switched_off"]():
        assert main(["--programs", "300"]) == 1
        *lines, last = capsys.readouterr().out.splitlines()
        assert json.loads(last)["failed"]["kind"].startswith("AssertionError")
        steps = re.search(r"reduced from \d+ steps to (\d+):", "\n".join(lines))
        assert steps and int(steps[1]) < 8, lines
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
