"""Small models of transformers in `graph_generate`, on the CPU with captures that are tapes.

A replay computes again what its capture computed, with the numbers that Python had then: a position
that a cache counts in Python would be old in it."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")
transformers: Any = pytest.importorskip("transformers")

from benchmarks.torch_generate import (
    CALLS,
    MODELS,
    STATIC,
    call,
    change_weights,
    compared,
    outcome,
    small,
)
from ostinato.interop import torch as interop
from ostinato.interop.generate_call import CACHE_NAMES
from ostinato.interop.transformers import graph_generate

pytestmark = pytest.mark.filterwarnings("ignore")
QUICK = ["Llama", "Gemma2", "MPT", "Mamba"]
TOKENS = 28
"""So many that the sliding windows, of 24 tokens, are full after half of them."""
GREEDY = CALLS[0]


@pytest.fixture(autouse=True)
def on_tape(make_chained: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def valid(self: Any, inputs: Any, config: Any) -> bool:
        """As transformers decides on a GPU."""
        (cache,) = [inputs[name] for name in CACHE_NAMES if inputs.get(name) is not None]
        dynamic = type(cache) is transformers.DynamicCache
        return cache.is_compileable and not dynamic and not config.disable_compile

    name = "_valid_auto_compile_criteria"
    mixin = next(k for k in transformers.GenerationMixin.__mro__ if name in vars(k))
    monkeypatch.setattr(mixin, name, valid)
    monkeypatch.setattr(interop, "graphed", make_chained)


@pytest.fixture
def device(host_device: Any) -> Any:
    return host_device


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MODELS],
)
def test_every_token_is_that_of_an_eager_run_and_steps_are_replays(name: str) -> None:
    try:
        model = small(name, "cpu")
    except AttributeError:
        pytest.skip(f"this transformers has no {name}")
    with graph_generate(model) as steps:
        before = call(model, TOKENS, GREEDY)
        assert len({*before.flatten().tolist()}) > 8, "it says the same all the time"
        for seed in (1, 2):
            assert compared(model, TOKENS, seed) == ({"equal": len(CALLS)}, [1.0] * len(CALLS))
            change_weights(model)
        assert not torch.equal(call(model, TOKENS, GREEDY), before)
        found = outcome(steps)
        assert float(str(found["replayed"])) > 0.8, found


@pytest.mark.parametrize("name", ["Mistral", "Gemma3"])
def test_windows_count_their_tokens(name: str) -> None:
    """What is done with a cache after the call: another call goes on with it."""
    model = small(name, "cpu")
    given = {"return_dict_in_generate": True}
    with graph_generate(model) as steps:
        for new in (4, 20):
            caches = []
            for options in ({}, {}, STATIC):
                made = call_whole(model, new, **given, **options)
                caches.append(made.past_key_values)
            for ours, theirs in zip(caches[1].layers, caches[2].layers, strict=True):
                assert int(ours.get_seq_length()) == int(theirs.get_seq_length()) == 7 + new
                assert torch.equal(ours.keys, theirs.keys)
        assert steps.step.statistics().replays > 20 and not steps.passed_on


def call_whole(model: Any, tokens: int, **options: Any) -> Any:
    torch.manual_seed(1)
    ids = torch.tensor([[5, 99, 130, 2, 7, 45, 17, 61]])
    return model.generate(ids, max_new_tokens=tokens, do_sample=False, **options)


@pytest.mark.parametrize("how", ["get_seq_length", "get_mask_sizes"])
def test_a_model_that_reads_the_position_of_a_window_runs_eagerly(how: str) -> None:
    """The position scales the logits, as one of a model that makes positions or masks by itself."""
    model = small("Gemma2", "cpu")
    forward = type(model).forward

    def reading(self: Any, *args: Any, **kwargs: Any) -> Any:
        cache = next(kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None)
        layer = cache.layers[0]
        read = layer.get_seq_length() if how == "get_seq_length" else layer.get_mask_sizes(1)[1]
        found = forward(self, *args, **kwargs)
        found.logits = (found.logits * (1 + int(read))).cos()
        return found

    model.forward = types.MethodType(reading, model)
    with graph_generate(model) as steps:
        for _ in range(2):
            ours, wanted = (call(model, TOKENS, GREEDY, **o) for o in ({}, STATIC))
            assert torch.equal(ours, wanted)
        assert steps.step.statistics().replays == 0
        assert f"reads the position of a sliding window ({how})" in steps.explain()


def test_several_tokens_at_once_over_windows_run_eagerly() -> None:
    model = small("Mistral", "cpu")
    caches = [transformers.StaticCache(config=model.config, max_cache_len=64) for _ in range(2)]
    parameters = inspect.signature(model.forward).parameters
    name = next(each for each in CACHE_NAMES if each in parameters)
    ids = torch.tensor([[5, 99, 130, 2, 7, 45, 17, 61] * 5])
    with graph_generate(model) as steps, torch.no_grad():
        compiled = model.get_compiled_call(None)
        for at in (*range(10), *range(10, 34, 6), *range(34, 40)):
            piece = ids[:, at : at + (6 if 10 <= at < 34 else 1)]
            count = piece.shape[1]
            given = {"input_ids": piece, "position_ids": torch.arange(at, at + count)[None]}
            logits = []
            for run, cache in zip((compiled, model), caches, strict=True):
                seen = cache.layers[0].get_mask_sizes(count)[0]
                given["attention_mask"] = torch.ones(1, 1, count, seen, dtype=torch.bool)
                call = run if at else model  # the first call makes the cache's memory
                logits.append(call(**given, return_dict=True, **{name: cache}).logits)
            assert torch.equal(*logits), at
        assert steps.passed_on == {"several tokens at once, over sliding windows": 4}
        assert steps.step.statistics().replays == 13


def test_states_that_are_not_there_yet_are_made_eagerly() -> None:
    """Mamba's first tokens after a reset go another way through its layers."""
    model = small("Mamba", "cpu")
    caches = [transformers.StaticCache(config=model.config, max_cache_len=64) for _ in range(2)]
    parameters = inspect.signature(model.forward).parameters
    name = next(each for each in CACHE_NAMES if each in parameters)
    ids = torch.tensor([[5, 99, 130, 2, 7, 45]])
    with graph_generate(model) as steps, torch.no_grad():
        for turn in range(3):
            compiled = model.get_compiled_call(None) if turn else model
            for at in range(6):
                given = {"input_ids": ids[:, at : at + 1], "return_dict": True}
                if at == 1:
                    compiled = model.get_compiled_call(None)
                ours, theirs = (
                    run(**given, **{name: cache}).logits
                    for run, cache in zip((compiled, model), caches, strict=True)
                )
                assert torch.equal(ours, theirs)
            for cache in caches:
                cache.reset()
        assert steps.passed_on == {"a LinearAttentionLayer without a state yet": 2}
        assert steps.step.statistics().replays == 14
