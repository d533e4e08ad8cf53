"""Users' mistakes, each planted on purpose: run-time verification finds every one.

And nothing else: the same programme without its mistake is right and no check complains of it.
"""

from __future__ import annotations

import re

import pytest

from ostinato.device import Device
from ostinato.errors import ClosedError, InputError, VerificationError
from ostinato.step import Cause
from tests.planted.programme import Played, Programme
from tests.planted.users import PLANTS, Caught, Plant, play


def those(*caught: Caught) -> pytest.MarkDecorator:
    found = [p for p in PLANTS if not caught or p.caught in caught]
    return pytest.mark.parametrize("plant", found, ids=lambda p: p.name)


@pytest.mark.parametrize("verify", ["off", "first", 1])
@those()
def test_without_the_mistake_it_is_right_and_silent(
    device: Device, plant: Plant, verify: object
) -> None:
    programme = plant.programme(device, planted=False, verify=verify, strict=True)
    played = play(programme)
    assert played.error is None
    assert_right(played)
    if programme.step is not None:
        statistics = programme.step.statistics()
        assert statistics.quarantined == {}
        assert statistics.replays >= 2, "it was really replayed"
        assert (statistics.verified > 0) is (verify != "off")


@those(Caught.CHECK)
def test_unchecked_the_mistake_gives_a_wrong_answer(device: Device, plant: Plant) -> None:
    if plant.cause is Cause.UNORDERED and device.name != "host":
        pytest.skip("it is wrong on some days only")
    programme = plant.programme(device, planted=True, verify="off")
    played = play(programme)
    assert played.error is None
    assert not played.right
    assert programme.step.statistics().quarantined == {}, "and nothing is said"


def checked(*, strict: bool) -> pytest.MarkDecorator:
    """Each plant that a check finds, and each way to ask for checks that is enough."""
    return pytest.mark.parametrize(
        ("plant", "verify"),
        [
            pytest.param(plant, verify, id=f"{plant.name}-{verify}")
            for plant in PLANTS
            for verify in ("first", 1)
            if plant.caught is Caught.CHECK and (verify == 1 or plant.verify == "first")
            if strict or plant.right_eagerly
        ],
    )


@checked(strict=False)
def test_a_check_finds_the_mistake_and_no_answer_is_wrong(
    device: Device, plant: Plant, verify: object
) -> None:
    programme = plant.programme(device, planted=True, verify=verify)
    played = play(programme)
    assert_right(played)
    assert_found(programme, plant)
    if plant.cause is not Cause.HOST_STATE:
        assert played.error is None, "it costs speed alone"
        return
    for _ in range(2):  # an eager run would be wrong as well, so there is none
        assert isinstance(played.error, VerificationError)
        assert re.search(plant.says, str(played.error))
        with pytest.raises(VerificationError):
            programme.call(0)


@checked(strict=True)
def test_a_strict_check_raises_before_an_answer_is_wrong(
    device: Device, plant: Plant, verify: object
) -> None:
    programme = plant.programme(device, planted=True, verify=verify, strict=True)
    played = play(programme)
    assert_right(played)
    assert isinstance(played.error, VerificationError)
    assert re.search(plant.says, str(played.error))
    assert_found(programme, plant)


@pytest.mark.parametrize("verify", ["off", "first"])
@those(Caught.BUILD)
def test_a_graph_with_the_mistake_is_not_made(device: Device, plant: Plant, verify: object) -> None:
    programme = plant.programme(device, planted=True, verify=verify)
    played = play(programme)
    assert played.error is None
    assert_right(played)
    statistics = programme.step.statistics()
    (why,) = statistics.quarantined.values()
    assert re.search(plant.says, why)
    assert statistics.replays == 0


@pytest.mark.parametrize("verify", ["off", "first"])
@those(Caught.ERROR)
def test_the_mistake_is_an_error(device: Device, plant: Plant, verify: object) -> None:
    try:
        programme = plant.programme(device, planted=True, verify=verify)
    except InputError as error:
        played = Played(error=error)
    else:
        played = play(programme)
    assert_right(played)
    assert isinstance(played.error, InputError | ClosedError)
    assert re.search(plant.says, str(played.error))


@pytest.mark.parametrize("verify", ["off", 1])
@those(Caught.REMADE)
def test_the_graph_is_made_again(device: Device, plant: Plant, verify: object) -> None:
    built = []
    for planted in (False, True):
        programme = plant.programme(device, planted=planted, verify=verify)
        played = play(programme)
        assert played.error is None
        assert_right(played)
        built.append(programme.step.statistics().captures)
    assert built[1] == built[0] + 1


def assert_right(played: Played) -> None:
    for number, (answer, wanted) in enumerate(played.answers):
        assert answer.tolist() == wanted.tolist(), f"call {number}"


def assert_found(programme: Programme, plant: Plant) -> None:
    """The finding has its cause, and says what and where; its key is replayed no more."""
    statistics = programme.step.statistics()
    (why,) = statistics.quarantined.values()
    assert re.search(plant.says, why)
    finding = statistics.last_check.finding
    assert finding is not None
    assert str(finding) in why
    assert plant.cause in (None, finding.cause)


def test_the_catalogue_is_what_it_says() -> None:
    assert len(PLANTS) >= 20
    threads = [plant.thread for plant in PLANTS if plant.thread is not None]
    assert len(threads) == len(set(threads)) >= len(PLANTS) / 2
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", thread) for thread in threads)
    for plant in PLANTS:
        assert plant.mistake.endswith(".")
