"""The tool that puts faults into the library makes each of them, in the function that it names."""

from __future__ import annotations

from tools import mutants

CALLS: list[int] = []


def judged(number: int) -> bool:
    """A statement, a condition, and an `and`."""
    CALLS.append(number)
    found = []
    if number > 1 and number < 5:
        found += [number]
    return bool(found)


def test_each_statement_condition_and_part_of_one_is_changed() -> None:
    (name,) = mutants.functions(__name__, "judged")
    assert name == "judged"
    right, found = judged.__code__, {}
    for words, code in mutants.mutants(judged):
        judged.__code__, CALLS[:] = code, []
        try:
            found[words.partition(": ")[2]] = [judged(n) for n in (0, 3, 9)], len(CALLS)
        finally:
            judged.__code__ = right
    both = "`number > 1 and number < 5` without "
    assert found == {
        "without `CALLS.append(number)`": ([False, True, False], 0),
        "not (number > 1 and number < 5)": ([True, False, True], 3),
        both + "`number > 1`": ([True, True, False], 3),
        both + "`number < 5`": ([False, True, True], 3),
        "without `found += [number]`": ([False, False, False], 3),
    }
