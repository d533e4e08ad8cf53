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

from benchmarks.torch_generate import change_weights, compared, outcome
from benchmarks.torch_generate import small as small_model
from ostinato.interop.reading import records
from ostinato.interop.transformers import GraphedModel, graph_generate

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
KINDS = ["llama", "qwen2", "gpt2"]
IDS = [[5, 99, 130, 2, 7], [0, 0, 88, 31, 60], [0, 0, 0, 0, 44]]


def small(kind: str, **values: Any) -> Any:
    torch.manual_seed(3)
    sizes = {"vocab_size": 1003, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    if kind == "gpt2":
        config = transformers.GPT2Config(n_embd=128, n_layer=3, n_head=4, **sizes, **values)
        model = transformers.GPT2LMHeadModel(config)
    else:
        name = {"llama": "Llama", "qwen2": "Qwen2"}[kind]
        config = getattr(transformers, f"{name}Config")(
            hidden_size=128,
            intermediate_size=264,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.1,
            **sizes,
            **values,
        )
        model = getattr(transformers, f"{name}ForCausalLM")(config)
    return model.eval().to("cuda", torch.bfloat16)


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
    model = small(kind)
    options = {"max_new_tokens": 60, "do_sample": False}
    with graph_generate(model) as steps:
        found = same(model, ids(IDS[:1]), **options)
        assert found.shape == (1, 65)
        # One eager step, then a capture, which is replayed at once.
        assert replays(steps) == 58 and steps.step.statistics().captures == 1
        same(model, ids(), max_new_tokens=40, do_sample=True, temperature=0.9, top_k=30)
        same(model, ids(), max_new_tokens=40, do_sample=True, seed=2)
        assert not steps.passed_on and not steps.step.statistics().quarantined, steps.explain()
    assert "get_compiled_call" not in vars(model)


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_is_bound_to_each_new_cache(kind: str) -> None:
    """Caches that live at the same time are in other memory, each of them."""
    model = small(kind)
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


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_is_bound_to_a_cache_in_the_memory_of_one_that_is_gone(kind: str) -> None:
    """torch gives the same memory out again, to the same layers or to others."""
    model = small(kind)
    options = {"max_new_tokens": 60, "do_sample": False}
    with graph_generate(model) as steps:
        for _ in range(4):
            same(model, ids(IDS[:1]), **options)
            gc.collect()
        numbers = steps.step.statistics()
        assert numbers.replays == 58 + 3 * 59 and numbers.captures == 1, steps.explain()


def test_everything_on_a_stream_of_the_callers() -> None:
    """Prompts and weights are written there, behind work that takes long, and the answers are read
    there."""
    model = small("llama")
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
    model = small("llama")
    options = {"max_new_tokens": 30, "do_sample": False}
    other = [[7, 2, 130, 99, 5], [9, 9, 9, 9, 1], [4, 3, 2, 1, 6]]
    prompts = [IDS, [[8, 8, 700, 3, 2]], [[5, 99, 130, 2, 7]], other]
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


def test_processors_criteria_and_streamers_are_transformers() -> None:
    class Streamer(transformers.generation.streamers.BaseStreamer):
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def put(self, value: Any) -> None:
            self.seen.append(value.tolist())

        def end(self) -> None:
            self.seen.append("end")

    model = small("llama")
    end = int(eager(model, ids(), max_new_tokens=12, do_sample=False)[1, -1])
    with graph_generate(model, max_cache_len=128) as steps:
        streamers = [Streamer(), Streamer()]
        for options in (
            {"max_new_tokens": 30, "eos_token_id": end},
            {"max_new_tokens": 30, "no_repeat_ngram_size": 2, "repetition_penalty": 1.3},
            {"max_new_tokens": 30, "min_new_tokens": 20, "eos_token_id": end},
            {"max_new_tokens": 50, "do_sample": True, "typical_p": 0.9},
        ):
            before = replays(steps)
            same(model, ids(), **{"do_sample": False, **options})
            assert replays(steps) > before, steps.explain()
        eager(model, ids(), max_new_tokens=9, streamer=streamers[0], do_sample=False)
        model.generate(ids(), max_new_tokens=9, streamer=streamers[1], do_sample=False)
        assert streamers[0].seen == streamers[1].seen
        full = [
            call(
                max_new_tokens=9, return_dict_in_generate=True, output_scores=True, do_sample=False
            )
            for call in (
                lambda **o: eager(model, ids(), **o, max_cache_len=128),
                lambda **o: model.generate(ids(), **o),
            )
        ]
        assert all(map(torch.equal, full[0].scores, full[1].scores))
        for ours, theirs in zip(
            full[1].past_key_values.layers, full[0].past_key_values.layers, strict=True
        ):
            assert torch.equal(ours.keys[:, :, :13], theirs.keys[:, :, :13])
            assert int(ours.cumulative_length) == int(theirs.cumulative_length)
        # One shape of the cache for all lengths: two keys at most (with and without a mask).
        assert steps.step.statistics().captures <= 2, steps.explain()


def test_weights_that_move_and_change() -> None:
    model = small("llama")
    with graph_generate(model) as steps:
        before = same(model, ids(), max_new_tokens=30, do_sample=False)
        with torch.no_grad():
            model.model.norm.weight.mul_(-1)
        after = same(model, ids(), max_new_tokens=30, do_sample=False)
        assert not torch.equal(before, after)
        weight = model.model.layers[1].mlp.down_proj.weight
        weight.data = weight.data.clone() * 2
        same(model, ids(), max_new_tokens=30, do_sample=False)
        model.load_state_dict(small("llama").state_dict(), assign=True)
        assert torch.equal(same(model, ids(), max_new_tokens=30, do_sample=False), before)
        assert not steps.step.statistics().quarantined, steps.explain()


def test_checked_against_eager_runs() -> None:
    model = small("qwen2")
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
    model = small_model(name, "cuda")
    with graph_generate(model) as steps:
        for seed in range(4):
            answers, _ = compared(model, 40, seed)
            assert answers == {"equal": 4}, answers
            change_weights(model)
        found = outcome(steps)
        assert float(str(found["replayed"])) > 0.7, found
