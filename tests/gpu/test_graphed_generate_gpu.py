"""`graph_generate(model)` on a GPU: three of transformers' models, small and random.

The reference is `generate` over the same static cache without a compiled call, so all kernels are
the same, and so must be every token.
"""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest

from tests.gpu.foreign import library

torch = library("torch")
transformers = library("transformers")

from benchmarks.torch_generate import change_weights, compared, outcome, small
from ostinato.interop.reading import records
from ostinato.interop.transformers import GraphedModel, graph_generate

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
KINDS = ["Llama", "Qwen2", "GPT-2"]
IDS = [[5, 99, 130, 2, 7], [0, 0, 88, 31, 60], [0, 0, 0, 0, 44]]


def halves(kind: str) -> Any:
    return small(kind, "cuda").to(torch.bfloat16)


def ids(rows: list[list[int]] = IDS) -> Any:
    return torch.tensor(rows, device="cuda")


def eager(model: Any, prompt: Any, **options: Any) -> Any:
    return type(model).generate(
        model, prompt, cache_implementation="static", disable_compile=True, **options
    )


def same(model: Any, prompt: Any, *, seed: int = 1, **options: Any) -> Any:
    """The model's answer, which must be the eager one; torch's generator ends alike too."""
    torch.manual_seed(seed)
    wanted = eager(model, prompt, **options)
    state = torch.cuda.get_rng_state()
    torch.manual_seed(seed)
    found = model.generate(prompt, **options)
    assert found.tolist() == wanted.tolist()
    assert torch.equal(torch.cuda.get_rng_state(), state)
    return found


def replays(steps: GraphedModel) -> int:
    return int(steps.step.statistics().replays)


@pytest.mark.parametrize("kind", KINDS)
def test_every_token_is_the_eager_one(kind: str) -> None:
    """Also with a cache in the memory of one that is gone: torch gives it out again, to the same
    layers or to others."""
    model = halves(kind)
    with graph_generate(model) as steps:
        for call in range(4):
            found = same(model, ids(IDS[:1]), max_new_tokens=60, do_sample=False)
            gc.collect()
            # One eager step, then a capture, which is replayed at once.
            assert found.shape == (1, 65) and replays(steps) == 58 + 59 * call
        assert steps.step.statistics().captures == 1, steps.explain()
        same(model, ids(), max_new_tokens=40, do_sample=True, temperature=0.9, top_k=30)
        same(model, ids(), max_new_tokens=40, do_sample=True, seed=2)
        assert not steps.passed_on and not steps.step.statistics().quarantined, steps.explain()
    assert "get_compiled_call" not in vars(model)


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_is_bound_to_each_new_cache(kind: str) -> None:
    """Caches that live at the same time are in other memory, each of them."""
    model = halves(kind)
    options = {"max_new_tokens": 60, "do_sample": False}
    wanted = eager(model, ids(IDS[:1]), **options)
    with graph_generate(model) as steps:
        answers, copies = [], []
        for _ in range(4):
            answers.append(model.generate(ids(IDS[:1]), return_dict_in_generate=True, **options))
            copies.append([one.keys.clone() for one in answers[-1].past_key_values.layers])
        assert all(torch.equal(answer.sequences, wanted) for answer in answers)
        places = {answer.past_key_values.layers[0].keys.data_ptr() for answer in answers}
        assert len(places) == 4
        for answer, before in zip(answers, copies, strict=True):
            layers = answer.past_key_values.layers
            assert all(torch.equal(a.keys, b) for a, b in zip(layers, before, strict=True)), (
                "a replay wrote to the cache of another call"
            )
        numbers = steps.step.statistics()
        assert numbers.replays == 58 + 3 * 59, steps.explain()
        assert (numbers.captures, numbers.rebound) == (1, 3), steps.explain()
        assert not numbers.quarantined, steps.explain()


def test_everything_on_a_stream_of_the_callers() -> None:
    """Prompts and weights are written there, behind work that takes long, and the answers are read
    there."""
    model = halves("Llama")
    options = {"max_new_tokens": 30, "do_sample": False}
    prompt = ids()
    with graph_generate(model) as steps, torch.no_grad():
        model.generate(prompt, **options)
        streams = [torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.current_stream()]
        answers = set()
        for stream in streams * 2:
            torch.cuda.synchronize()
            before = model.model.norm.weight.clone()
            model.model.norm.weight.neg_()
            wanted = eager(model, prompt, **options).tolist()
            model.model.norm.weight.copy_(before)
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                late = torch.zeros_like(prompt)
                torch.cuda._sleep(400_000_000)
                late.copy_(prompt)
                model.model.norm.weight.neg_()
                assert not stream.query(), "the prompt was there before it was asked for"
                found = (model.generate(late, **options) + 0).tolist()
            assert found == wanted
            answers.add(str(found))
        assert len(answers) == 2
        assert replays(steps) > 6 * 25 and not steps.passed_on, steps.explain()


def test_threads_with_streams_of_their_own() -> None:
    """Two shapes, and two caches of each shape in turns."""
    model = halves("Llama")
    options = {"max_new_tokens": 30, "do_sample": False}
    other = [[7, 2, 130, 99, 5], [9, 9, 9, 9, 1], [4, 3, 2, 1, 6]]
    prompts = [IDS, [[8, 8, 200, 3, 2]], [[5, 99, 130, 2, 7]], other]
    wanted = [eager(model, ids(rows), **options).tolist() for rows in prompts]
    wrong: list[object] = []
    with graph_generate(model) as steps:

        def work(rows: list[list[int]], right: list[list[int]]) -> None:
            try:
                with torch.cuda.stream(torch.cuda.Stream()):
                    for _ in range(5):
                        late = torch.zeros(len(rows), 5, dtype=torch.long, device="cuda")
                        torch.cuda._sleep(20_000_000)
                        late.copy_(torch.tensor(rows))
                        found = model.generate(late, **options).tolist()
                        if found != right:
                            wrong.append(found)
            except BaseException as error:
                wrong.append(error)

        threads = [
            threading.Thread(target=work, args=pair) for pair in zip(prompts, wanted, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong, steps.explain()
        assert replays(steps) > 100 and not steps.step.statistics().quarantined, steps.explain()


def test_processors_and_criteria_are_transformers() -> None:
    model = halves("Llama")
    end = int(eager(model, ids(), max_new_tokens=12, do_sample=False)[1, -1])
    with graph_generate(model, max_cache_len=128) as steps:
        for options in (
            {"max_new_tokens": 30, "eos_token_id": end},
            {"max_new_tokens": 30, "no_repeat_ngram_size": 2, "repetition_penalty": 1.3},
            {"max_new_tokens": 30, "min_new_tokens": 20, "eos_token_id": end},
            {"max_new_tokens": 50, "do_sample": True, "typical_p": 0.9},
        ):
            before = replays(steps)
            same(model, ids(), **{"do_sample": False, **options})
            assert replays(steps) > before, steps.explain()
        # One shape of the cache for all lengths: two keys at most (with and without a mask).
        assert steps.step.statistics().captures <= 2, steps.explain()


def test_weights_that_move_and_change() -> None:
    model = halves("Llama")
    with graph_generate(model) as steps:
        before = same(model, ids(), max_new_tokens=30, do_sample=False)
        with torch.no_grad():
            model.model.norm.weight.mul_(-1)
        after = same(model, ids(), max_new_tokens=30, do_sample=False)
        assert not torch.equal(before, after)
        weight = model.model.layers[1].mlp.down_proj.weight
        weight.data = weight.data.clone() * 2
        same(model, ids(), max_new_tokens=30, do_sample=False)
        model.load_state_dict(halves("Llama").state_dict(), assign=True)
        assert torch.equal(same(model, ids(), max_new_tokens=30, do_sample=False), before)
        assert not steps.step.statistics().quarantined, steps.explain()


def test_checked_against_eager_runs() -> None:
    model = halves("Qwen2")
    with graph_generate(model, verify=8) as steps:
        same(model, ids(), max_new_tokens=40, do_sample=False)
        numbers = steps.step.statistics()
        assert numbers.verified >= 3 and not numbers.quarantined, steps.explain()


@pytest.mark.parametrize(
    "name", ["Mistral", "Gemma2", "gpt-oss", "Bloom", "MPT", "Mamba", "Mamba2"]
)
def test_models_whose_caches_or_positions_are_not_llamas(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows fill up in the middle of each call, and each call has a cache of its own."""
    monkeypatch.setattr(records, "_GAIN", float("inf"))  # chains are kept, however long they take
    model = small(name, "cuda")
    with graph_generate(model) as steps:
        for seed in range(4):
            answers, _ = compared(model, 40, seed)
            assert answers == {"equal": 4}, answers
            change_weights(model)
        found = outcome(steps)
        assert float(str(found["replayed"])) > 0.7, found
