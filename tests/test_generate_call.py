"""What of a `generate` call is covered, and the reasons against: without torch or transformers."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from ostinato.interop.generate_call import (
    NotCovered,
    check_arguments,
    check_inputs,
    check_mode,
    prompts,
    wanted,
)
from ostinato.models import SamplingOptions

PROCESSORS = "transformers.generation.logits_process"
CRITERIA = "transformers.generation.stopping_criteria"


def fake(module: str, name: str, **attributes: Any) -> Any:
    return type(name, (), {"__module__": module, **attributes})()


class Ids:
    """As much of a tensor as is read."""

    def __init__(self, *ids: int) -> None:
        self.tolist = lambda: list(ids)


def length(most: int) -> Any:
    return fake(CRITERIA, "MaxLengthCriteria", max_length=most)


def ends(*ids: int) -> Any:
    return fake(CRITERIA, "EosTokenCriteria", eos_token_id=Ids(*ids))


def penalty(ignored: object) -> Any:
    return fake(
        PROCESSORS, "RepetitionPenaltyLogitsProcessor", penalty=1.3, prompt_ignore_length=ignored
    )


PENALTY = penalty(None)
WARMTH = fake(PROCESSORS, "TemperatureLogitsWarper", temperature=0.7)
SOME = {"filter_value": -math.inf, "min_tokens_to_keep": 1}
TOP_K = fake(PROCESSORS, "TopKLogitsWarper", top_k=50, **{**SOME, "min_tokens_to_keep": 2})
TOP_P = fake(PROCESSORS, "TopPLogitsWarper", top_p=0.9, **SOME)
MIN_P = fake(PROCESSORS, "MinPLogitsWarper", min_p=0.05, **SOME)


def test_what_is_covered_becomes_our_options() -> None:
    asked = wanted([PENALTY, WARMTH, TOP_K, TOP_P, MIN_P], [length(40), ends(3, 9)], draws=True)
    assert asked.sampling == SamplingOptions(0.7, 50, 0.9, 0, 0.05, 1.3)
    assert asked.max_length == 40 and asked.stop_tokens == (3, 9)
    asked = wanted([], [length(40), length(30)], draws=True)
    assert asked.sampling == SamplingOptions(temperature=1.0)
    assert asked.max_length == 30 and asked.stop_tokens is None
    for one in (PENALTY, penalty(Ids(0, 0))):
        found = wanted([one], [length(9)], draws=False).sampling
        assert found == SamplingOptions(repetition_penalty=1.3)


@pytest.mark.parametrize(
    ("processors", "criteria", "draws", "reason"),
    [
        ([fake("mine", "TemperatureLogitsWarper", temperature=2.0)], [length(9)], True, "Temper"),
        ([type("Warmer", (type(WARMTH),), {})()], [length(9)], True, "processor Warmer"),
        ([fake(PROCESSORS, "NoRepeatNGramLogitsProcessor")], [length(9)], False, "NoRepeatNGram"),
        ([WARMTH], [length(9)], False, "processor TemperatureLogitsWarper"),
        ([TOP_K, WARMTH], [length(9)], True, "order"),
        ([TOP_K, TOP_K], [length(9)], True, "order"),
        ([WARMTH, PENALTY], [length(9)], True, "order"),
        (
            [fake(PROCESSORS, "TopPLogitsWarper", top_p=0.9, filter_value=-50.0)],
            [length(9)],
            True,
            "filter_value",
        ),
        (
            [fake(PROCESSORS, "TopPLogitsWarper", top_p=0.9, min_tokens_to_keep=2)],
            [length(9)],
            True,
            "min_tokens_to_keep",
        ),
        ([penalty(4)], [length(9)], True, "prompt_ignore_length"),
        ([penalty(Ids(0, 2))], [length(9)], True, "prompt_ignore_length"),
        ([fake(PROCESSORS, "TopPLogitsWarper", top_p=0.0, **SOME)], [length(9)], True, "top_p"),
        ([], [length(9), fake(CRITERIA, "MaxTimeCriteria")], False, "criterion MaxTimeCriteria"),
        ([], [type("Mine", (type(length(9)),), {})()], False, "criterion Mine"),
        ([], [ends(3)], False, "no MaxLengthCriteria"),
    ],
)
def test_the_rest_has_a_reason(
    processors: list[Any], criteria: list[Any], draws: bool, reason: str
) -> None:
    with pytest.raises(NotCovered, match=reason):
        wanted(processors, criteria, draws=draws)


class Tensor:
    """Its comparisons are tensors, which are neither true nor false."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> Any:
        return self

    def __bool__(self) -> bool:
        raise RuntimeError("ambiguous")


@pytest.mark.parametrize(
    ("arguments", "processes", "reason"),
    [
        ({"position_ids": Tensor()}, 1, "argument position_ids"),
        ({"past_key_values": Tensor()}, 1, "argument past_key_values"),
        ({"cache": Tensor()}, 1, "argument cache"),
        ({"custom_generate": "someone/something"}, 1, "custom_generate"),
        ({"synced_gpus": True}, 1, "synced_gpus"),
        ({"tokenizer": object()}, 1, "tokenizer"),
        ({"cache_implementation": "paged"}, 1, "paged"),
        ({}, 2, "group of processes"),
    ],
)
def test_arguments_that_change_what_generate_is(
    arguments: dict[str, Any], processes: int, reason: str
) -> None:
    with pytest.raises(NotCovered, match=reason):
        check_arguments(arguments, processes=processes)


def test_arguments_that_do_not() -> None:
    check_arguments(
        {"inputs": Tensor(), "synced_gpus": False, "tokenizer": None, "max_new_tokens": 4}
    )


def config(mode: str = "greedy_search", **values: Any) -> Any:
    found = {"return_dict_in_generate": False, "is_assistant": False, **values}
    return SimpleNamespace(get_generation_mode=lambda: SimpleNamespace(value=mode), **found)


def test_modes() -> None:
    check_mode(config())
    check_mode(config("sample"))
    for wrong, reason in (
        (config("beam_search"), "beam_search"),
        (config("a later one"), "a later one"),
        (config(return_dict_in_generate=True), "return_dict_in_generate"),
        (config(is_assistant=True), "assists"),
    ):
        with pytest.raises(NotCovered, match=reason):
            check_mode(wrong)


def test_inputs_of_the_model() -> None:
    cache = fake("transformers.cache_utils", "DynamicCache")
    check_inputs({"attention_mask": Tensor(), "past_key_values": cache, "labels": None})
    check_inputs({"attention_mask": Tensor(), "cache": cache, "labels": None})
    with pytest.raises(NotCovered, match="argument pixel_values"):
        check_inputs({"pixel_values": Tensor()})
    with pytest.raises(NotCovered, match="QuantizedCache"):
        check_inputs({"past_key_values": fake("transformers.cache_utils", "QuantizedCache")})
    with pytest.raises(NotCovered, match="QuantizedCache"):
        check_inputs({"cache": fake("transformers.cache_utils", "QuantizedCache")})


def test_what_a_mask_leaves_out_is_taken_out() -> None:
    ids = [[0, 0, 5], [7, 8, 9]]
    assert prompts(ids, None, history=True) == ids
    assert prompts(ids, [[0, 0, 1], [1, 1, 1]], history=False) == [[5], [7, 8, 9]]
    assert prompts(ids, [[1, 0, 1], [1, 1, 1]], history=False) == [[0, 5], [7, 8, 9]]
    for mask, history, reason in (
        ([[0, 0, 1], [1, 1, 1]], True, "penalises"),
        ([[1, 1, 0], [1, 1, 1]], False, "last token"),
        ([[0, 0, 0], [1, 1, 1]], False, "last token"),
        ([[0, 0, 0.5], [1, 1, 1]], False, "other values"),
        ([[0, 1], [1, 1]], False, "another shape"),
        ([[0, 0, 1]], False, "another shape"),
    ):
        with pytest.raises(NotCovered, match=reason):
            prompts(ids, mask, history=history)
    assert prompts(ids, [[0, 0, 1], [1, 1, 1]], history=False, windowed=True) == [[5], [7, 8, 9]]
    with pytest.raises(NotCovered, match="between tokens"):
        prompts(ids, [[0, 0, 1], [1, 0, 1]], history=False, windowed=True)
    with pytest.raises(NotCovered, match="empty"):
        prompts([[]], None, history=False)
