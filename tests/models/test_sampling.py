"""Sampling: the generator's known answers, each filter, and ties."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ostinato.errors import InputError, ModelFormatError
from ostinato.models.files.advice import read_advice
from ostinato.models.files.checkpoint import GgufTokenizerSource, JsonTokenizerSource
from ostinato.models.sampling import (
    READABLE,
    SamplingOptions,
    changed,
    log_probabilities,
    penalised,
    philox4x32,
    sample,
    uniform,
)

LOGITS = hnp.arrays(np.float32, st.integers(1, 40), elements=st.floats(-30, 30, width=32))


def row(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def drawn(
    logits: np.ndarray,
    *given: Any,
    position: int = 0,
    history: Any = (),
    answer: int = 0,
    **named: Any,
) -> int:
    return sample(logits, SamplingOptions(*given, **named), position, history, answer)


def chosen(logits: np.ndarray, draws: int = 400, **options: Any) -> np.ndarray:
    """How often each index came, as a share."""
    counts = np.zeros(logits.size)
    for position in range(draws):
        counts[drawn(logits, position=position, **options)] += 1
    return counts / draws


# Random123's kat_vectors, the lines "philox4x32 10".
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter: Any, key: Any, expected: Any) -> None:
    assert philox4x32(counter, key) == expected


def test_positions_do_not_repeat() -> None:
    assert len({philox4x32((i, 0, 0, 0), (7, 0)) for i in range(2000)}) == 2000


def test_uniform_is_the_first_word() -> None:
    assert uniform(0, 0) == np.float32((0x6627E8D5 >> 8) * 2.0**-24)
    assert uniform(0, 0).dtype == np.float32
    assert uniform(1 << 32, 5) != uniform(0, 5)  # the seed's high word counts
    draws = np.array([uniform(3, position) for position in range(4000)])
    assert draws.min() >= 0
    assert draws.max() < 1
    assert abs(draws.mean() - 0.5) < 0.02


def test_greedy_takes_the_first_of_the_largest() -> None:
    assert drawn(row(1, 3, 3, 2)) == 1
    assert drawn(row(np.nan, -1, -np.inf)) == 1
    assert drawn(row(np.nan, np.nan)) == 0
    for position in range(16):  # nothing is drawn, whatever the random number
        assert drawn(row(-np.inf, -np.inf), temperature=1.0, position=position) == 0
        assert drawn(row(0, np.inf, np.inf), temperature=1.0, position=position) == 1


def test_shares_follow_the_softmax() -> None:
    logits = row(0, 1, 2)
    expected = np.exp(logits) / np.exp(logits).sum()
    assert np.abs(chosen(logits, 4000, temperature=1.0) - expected).max() < 0.03


def test_temperature_sharpens_and_flattens() -> None:
    logits = row(0, 1)
    assert chosen(logits, temperature=0.05)[1] == 1.0
    assert abs(chosen(logits, 2000, temperature=100.0)[1] - 0.5) < 0.05
    for temperature in (1e-30, 1e-300, 5e-324):  # these are 0, or overflow, in float32
        assert drawn(row(1, 5, 4), temperature=temperature) == 1


def test_top_k() -> None:
    logits = row(5, 1, 5, 5, 4)
    assert set(np.flatnonzero(chosen(logits, temperature=5.0, top_k=2))) == {0, 2}
    assert set(np.flatnonzero(chosen(logits, temperature=5.0, top_k=3))) == {0, 2, 3}
    assert drawn(logits, temperature=5.0, top_k=1) == 0
    assert (chosen(logits, temperature=5.0, top_k=99) > 0).all()


def test_top_p() -> None:
    logits = np.log(row(0.1, 0.5, 0.25, 0.15))
    assert set(np.flatnonzero(chosen(logits, temperature=1.0, top_p=0.4))) == {1}
    assert set(np.flatnonzero(chosen(logits, temperature=1.0, top_p=0.6))) == {1, 2}
    assert set(np.flatnonzero(chosen(logits, temperature=1.0, top_p=0.89))) == {1, 2, 3}
    assert set(np.flatnonzero(chosen(logits, temperature=1.0, top_p=1.0))) == {0, 1, 2, 3}
    assert set(np.flatnonzero(chosen(logits, temperature=1.0, top_p=1e-9))) == {1}


@pytest.mark.parametrize("temperature", [5e-324, 1e-40, 1.0, 1e20, 3.4e38])
def test_a_token_of_no_probability_is_never_chosen(temperature: float) -> None:
    logits = row(1, -np.inf, 2, np.nan)
    assert set(np.flatnonzero(chosen(logits, temperature=temperature))) <= {0, 2}


def test_ties_are_drawn_lower_index_first() -> None:
    # Four equal ones: the draw's quarter is the index.
    for position in range(50):
        expected = int(uniform(9, position) * 4)
        assert drawn(np.zeros(4, np.float32), 1.0, seed=9, position=position) == expected


@given(
    LOGITS,
    st.floats(0.01, 10),
    st.integers(0, 45),
    st.floats(0.01, 1.0),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32 - 1),
)
def test_same_arguments_same_token(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, seed: int, position: int
) -> None:
    first = drawn(logits, temperature, top_k, top_p, seed, position=position)
    assert 0 <= first < logits.size
    assert drawn(logits.copy(), temperature, top_k, top_p, seed, position=position) == first
    if top_k:  # never below the k-th largest
        assert logits[first] >= np.sort(logits)[::-1][: min(top_k, logits.size)][-1]


@given(LOGITS, st.integers(0, 1000))
def test_top_k_of_one_is_greedy(logits: np.ndarray, position: int) -> None:
    assert drawn(logits, 1.0, 1, 1.0, 5, position=position) == drawn(logits)


def test_logits_are_not_changed() -> None:
    logits = row(1, np.nan, 3)
    before = logits.copy()
    drawn(logits, 0.7, 2, 0.9, 1, position=1)
    assert np.array_equal(logits, before, equal_nan=True)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": 3.5e38},  # infinite in float32
        {"top_k": -1},
        {"top_k": 1.5},
        {"top_k": True},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": float("nan")},
        {"seed": -1},
        {"seed": 1 << 64},
        {"min_p": -0.1},
        {"min_p": 1.5},
        {"min_p": float("nan")},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": 101},
        {"repetition_penalty": "1"},
        {"frequency_penalty": 2.1},
        {"frequency_penalty": float("nan")},
        {"presence_penalty": -2.1},
        {"presence_penalty": None},
        {"logit_bias": 5},
        {"logit_bias": {5: 100.5}},
        {"logit_bias": {-1: 1}},
        {"logit_bias": {1.5: 1}},
        {"logit_bias": {1: "1"}},
        {"logit_bias": dict.fromkeys(range(1025), 1.0)},
    ],
)
def test_bad_options(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(options))):
        SamplingOptions(**options)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((1, 4), np.float32), ((0,), np.float32), ((3,), np.float64)]
)
def test_bad_logits(shape: tuple[int, ...], dtype: type) -> None:
    with pytest.raises(InputError, match="logits"):
        sample(np.zeros(shape, dtype))


def test_min_p_is_a_part_of_the_likeliest() -> None:
    logits = np.log(row(0.1, 0.5, 0.25, 0.15))
    kept = {0.0: {0, 1, 2, 3}, 0.25: {1, 2, 3}, 0.4: {1, 2}, 0.6: {1}, 1.0: {1}}
    for min_p, tokens in kept.items():
        assert set(np.flatnonzero(chosen(logits, temperature=1.0, min_p=min_p))) == tokens
    # The temperature comes first: a high one leaves more tokens that are likely enough.
    assert set(np.flatnonzero(chosen(logits, temperature=9.0, min_p=0.6))) == {0, 1, 2, 3}
    both = chosen(logits, temperature=1.0, min_p=0.25, top_k=2)
    assert set(np.flatnonzero(both)) == {1, 2}


def test_a_repetition_penalty_counts_each_token_once_in_both_signs() -> None:
    logits = row(3, -2, 1, -1)
    once, often = penalised(logits, [0, 1], 2.0), penalised(logits, [1, 0, 0, 1, 0], 2.0)
    assert once.tolist() == often.tolist() == [1.5, -4, 1, -1]
    assert penalised(logits, [], 2.0).tolist() == logits.tolist() == [3, -2, 1, -1]
    assert drawn(row(3, 2), repetition_penalty=2.0, history=[0]) == 1
    assert drawn(row(-3, -2), repetition_penalty=0.5, history=[0]) == 0, "below 1 it attracts"
    assert drawn(row(3, 2), repetition_penalty=2.0) == 0
    # Infinite ones stay what they are, and what overflows is the likeliest.
    assert drawn(row(np.inf, 2), repetition_penalty=100.0, history=[0]) == 0
    assert drawn(row(-np.inf, -np.inf), 1.0, repetition_penalty=9.0, history=[1]) == 0
    assert drawn(row(1e38, 2e38), 1.0, repetition_penalty=0.01, history=[0]) == 0


def test_penalties_of_the_answer_count_its_tokens_alone() -> None:
    """OpenAI's formula: less the count times the one, and less the other where there is a count."""
    logits, history = row(3, -2, 1, 0, 7), [4, 4, 0, 1, 0, 0]
    both = SamplingOptions(frequency_penalty=0.5, presence_penalty=0.25)
    assert changed(logits, both, history, 2).tolist() == [1.25, -2.75, 1, 0, 7]
    assert changed(logits, both, history).tolist() == [1.25, -2.75, 1, 0, 5.75]
    assert changed(logits, both, history, 6).tolist() == changed(logits, both).tolist()
    attracts = SamplingOptions(frequency_penalty=-2.0)
    assert changed(logits, attracts, history, 2).tolist() == [9, 0, 1, 0, 7]
    # First the repetition penalty, of the prompt's tokens too; the bias comes last.
    all_three = SamplingOptions(
        repetition_penalty=2.0, presence_penalty=1.0, logit_bias={1: 5, 2: -1, 3: 0}
    )
    assert all_three.logit_bias == ((1, 5.0), (2, -1.0)), "0 changes nothing"
    assert changed(logits, all_three, history, 2).tolist() == [0.5, 0, 0, 0, 3.5]
    allowed = np.array([0, 1, 0, 1, 0], bool)
    inf = np.inf
    assert changed(logits, all_three, history, 2, allowed).tolist() == [-inf, 0, -inf, 0, -inf]
    assert logits.tolist() == [3, -2, 1, 0, 7]
    assert drawn(row(3, 2.5), presence_penalty=1, history=[0, 1], answer=1) == 0
    assert drawn(row(3, 2.5), presence_penalty=1, history=[0, 1]) == 0
    assert drawn(row(3, 2.5), presence_penalty=1, history=[1, 0], answer=1) == 1
    assert drawn(row(3, 2.5), logit_bias={1: 1}) == 1


def test_log_probabilities_are_of_the_models_distribution() -> None:
    logits = np.log(row(0.1, 0.5, 0.25, 0.15)) + np.float32(7)
    chosen, tokens, top = log_probabilities(logits, 0, 3)
    assert np.allclose(np.exp([chosen, *top]), [0.1, 0.5, 0.25, 0.15])
    assert tokens.tolist() == [1, 2, 3]
    chosen, tokens, top = log_probabilities(row(2, -np.inf, 2), 1, 3)
    assert chosen == -np.inf == top[2] and tokens.tolist() == [0, 2, 1]
    assert top[0] == top[1] == np.log(np.float32(0.5))
    assert log_probabilities(logits, 2, 0)[1].size == 0


@given(LOGITS, st.floats(0, 1), st.floats(0.01, 100), st.integers(0, 999), st.data())
def test_what_is_chosen_is_likely_enough_after_the_penalty(
    logits: np.ndarray, min_p: float, penalty: float, position: int, data: st.DataObject
) -> None:
    history = data.draw(st.lists(st.integers(0, logits.size - 1), max_size=60))
    given = {"min_p": min_p, "repetition_penalty": penalty, "history": history}
    token = drawn(logits, 0.8, seed=5, position=position, **given)
    values = penalised(logits, history, penalty)
    if min_p:
        assert values[token] >= values.max() + 0.8 * np.log(min_p) - 1e-2 * abs(values.max()) - 1e-4
    assert drawn(logits, 0.0, **given) == drawn(values)


# ------------------------------------------------------------------------- what a model's files say

OWN = SamplingOptions(0.6, top_k=20, top_p=0.9, min_p=0.1, repetition_penalty=1.05)
ADVICE: list[tuple[dict[str, Any], SamplingOptions]] = [
    ({}, READABLE),
    ({"eos_token_id": 2, "temperature": None}, READABLE),
    (
        {
            "do_sample": True,
            "temperature": 0.6,
            "top_k": 20,
            "top_p": 0.9,
            "min_p": 0.1,
            "repetition_penalty": 1.05,
        },
        OWN,
    ),
    # If a way to draw is set, the other options are off.
    ({"temperature": 0.6, "top_p": 0.9}, SamplingOptions(0.6, top_p=0.9)),
    ({"top_k": 20}, SamplingOptions(1.0, top_k=20)),
    # A penalty alone says nothing of how to draw.
    ({"repetition_penalty": 1.3}, READABLE.with_named(repetition_penalty=1.3)),
    ({"do_sample": False, "top_k": 20}, SamplingOptions()),
    ({"do_sample": False, "repetition_penalty": 1.2}, SamplingOptions(repetition_penalty=1.2)),
]


@pytest.mark.parametrize(("given", "wanted"), ADVICE)
def test_a_folders_generation_config_is_the_default(
    tmp_path: Path, given: dict[str, Any], wanted: SamplingOptions
) -> None:
    source = JsonTokenizerSource(tmp_path)
    assert read_advice(source).options() == READABLE, "there is no such file"
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    assert read_advice(source).options() == wanted


@pytest.mark.parametrize(
    ("metadata", "wanted"),
    [
        ({"general.name": "x"}, READABLE),
        (
            {
                "general.sampling.temp": 0.6,
                "general.sampling.top_k": 20,
                "general.sampling.top_p": 0.9,
                "general.sampling.min_p": 0.1,
                "general.sampling.penalty_repeat": 1.05,
            },
            OWN,
        ),
        # llama.cpp takes these for greedy, and for all tokens.
        ({"general.sampling.temp": -1.0, "general.sampling.top_k": -1}, SamplingOptions()),
    ],
)
def test_a_gguf_files_metadata_are_the_default(
    metadata: dict[str, Any], wanted: SamplingOptions
) -> None:
    assert read_advice(GgufTokenizerSource(Path("x.gguf"), metadata)).options() == wanted


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"temperature": "hot"}, "temperature is 'hot', must be a finite number"),
        ({"temperature": -1}, "temperature is -1"),
        ({"top_p": 0}, "top_p is 0"),
        ({"top_k": 2.5}, "top_k is 2.5, must be a whole number"),
        ({"repetition_penalty": [1]}, "repetition_penalty is"),
    ],
)
def test_advice_that_makes_no_sense_names_its_file(
    tmp_path: Path, given: dict[str, Any], words: str
) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps(given))
    advice = read_advice(JsonTokenizerSource(tmp_path))
    with pytest.raises(ModelFormatError) as raised:
        advice.options()
    assert str(file) in str(raised.value) and words in str(raised.value)


def test_who_names_the_likeliest_token_gets_it() -> None:
    """Defaults are for drawing: their penalty would change greedy answers."""
    assert OWN.with_named(temperature=0, seed=5) == SamplingOptions(seed=5)
    assert OWN.with_named(temperature=0.0, repetition_penalty=2.0) == SamplingOptions(
        repetition_penalty=2.0
    )
    assert OWN.with_named(top_k=3) == SamplingOptions(0.6, 3, 0.9, 0, 0.1, 1.05)
    with pytest.raises(InputError, match="temperature is -1"):
        OWN.with_named(temperature=-1)
