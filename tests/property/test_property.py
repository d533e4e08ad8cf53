"""Random lives of the library beside a NumPy oracle, on the host driver.

`python -m tests.property --help` for other seeds and longer lives.
"""

from __future__ import annotations

import re

import pytest

from tests.property.engine import find, live, replay
from tests.property.mutations import MUTATIONS
from tests.property.threads import ThreadRules


class Uncompiled(ThreadRules):
    """Without the compiled launch call."""

    compiled = False


@pytest.mark.parametrize(
    ("kind", "seed"), [(ThreadRules, 1), (ThreadRules, 2), (ThreadRules, 3), (Uncompiled, 4)]
)
def test_some_hundred_steps_agree_with_the_oracle(kind: type[ThreadRules], seed: int) -> None:
    live(kind, seed, 400)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ThreadRules, Uncompiled])
def test_ten_thousand_steps_agree_with_the_oracle(kind: type[ThreadRules]) -> None:
    live(kind, 10_000, 10_000)


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
