"""`graph_generate(model)` without a GPU: where transformers' `generate` gives its steps
away, with a stand-in for what captures and replays them."""

from __future__ import annotations

import copy
import gc
import inspect
import re
import sys
import types
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ostinato.errors import InputError, NotAvailableError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

from benchmarks.torch_generate import small
from ostinato.interop.generate_call import CACHE_NAMES
from ostinato.interop.reading.guards import Guards, same
from ostinato.interop.reading.stored import Description, code_text
from ostinato.interop.torch.library import Torch
from ostinato.interop.transformers import graph_generate

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.filterwarnings("ignore")


class StandIn:
    """Runs a function, and keeps what it was called with.  Its answers are copies, in memory and
    objects of their own, as those of replays are."""

    unavailable = ""

    def __init__(self, function: Any, static: tuple[str, ...], **options: Any) -> None:
        assert static == ("cached",)
        self.function, self.options = function, options
        self.caches: list[Any] = []
        self.shapes: list[Any] = []
        self.closed = False

    def __call__(self, cache: Any, named: str, full: tuple[bool, ...], **inputs: Any) -> Any:
        assert not self.closed and named in CACHE_NAMES
        self.caches.append(cache)
        self.shapes.append({n: v.shape for n, v in inputs.items() if isinstance(v, torch.Tensor)})
        kind, kept, cached = self.function(cache, named, full, **inputs)
        assert not any(v is cache for v in kept.values())
        return kind, {n: v.clone() for n, v in kept.items()}, cached

    def explain(self) -> str:
        return "a table"

    def save(self, *, check: bool = True) -> dict[str, str]:
        return {"a key": f"checked: {check}"}

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module = types.ModuleType("ostinato.interop.torch")
    module.graphed = StandIn  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ostinato.interop.torch", module)
    # transformers compiles nothing on a CPU by itself.
    mixin = transformers.GenerationMixin
    own = mixin._valid_auto_compile_criteria

    def valid(self: Any, kwargs: Any, config: Any) -> bool:
        caches = [kwargs[name] for name in CACHE_NAMES if name in kwargs]
        static = any(isinstance(cache, transformers.StaticCache) for cache in caches)
        return static and not config.disable_compile

    assert callable(own)
    monkeypatch.setattr(mixin, "_valid_auto_compile_criteria", valid)
    yield


IDS = [[5, 99, 130, 2, 7], [0, 0, 88, 31, 60]]


def eager(model: Any, **options: Any) -> Any:
    """transformers' own answer over the same kind of cache."""
    return type(model).generate(
        model,
        torch.tensor(IDS),
        cache_implementation="static",
        disable_compile=True,
        **options,
    )


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "GPT-2"])
def test_steps_go_through_it_and_nothing_else_changes(kind: str) -> None:
    model = small(kind, "cpu")
    with graph_generate(model) as steps:
        for options in (
            {"max_new_tokens": 9, "do_sample": False},
            {"max_new_tokens": 12, "do_sample": True, "temperature": 0.7, "top_k": 40},
            {"max_new_tokens": 6, "num_beams": 3, "do_sample": False},
            {"max_new_tokens": 9, "no_repeat_ngram_size": 2, "repetition_penalty": 1.4},
            {"max_new_tokens": 9, "return_dict_in_generate": True, "output_scores": True},
        ):
            before = len(steps.step.caches)
            torch.manual_seed(1)
            wanted = eager(model, **options)
            assert len(steps.step.caches) == before
            torch.manual_seed(1)
            found = model.generate(torch.tensor(IDS), **options)
            if not isinstance(wanted, torch.Tensor):
                assert all(map(torch.equal, wanted.scores, found.scores))
                wanted, found = wanted.sequences, found.sequences
            assert torch.equal(wanted, found)
            # transformers runs the steps of beams without its compiled call.
            ran = 0 if "num_beams" in options else options["max_new_tokens"] - 1
            assert len(steps.step.caches) == before + ran
        assert not steps.passed_on
        # Each call has a cache of its own, and all its steps work on that one.
        caches = {id(cache) for cache in steps.step.caches}
        assert len(caches) == 4
        assert all(shapes["input_ids"][1] == 1 for shapes in steps.step.shapes)


def test_the_cache_is_the_one_of_the_call() -> None:
    model = small("Llama", "cpu")
    with graph_generate(model) as steps:
        answer = model.generate(
            torch.tensor(IDS), max_new_tokens=9, return_dict_in_generate=True, do_sample=False
        )
        assert answer.past_key_values is steps.step.caches[-1]
        again = model.generate(torch.tensor(IDS), max_new_tokens=9, do_sample=False)
        assert torch.equal(answer.sequences, again)


def test_what_is_left_to_transformers() -> None:
    model = small("Llama", "cpu")
    with graph_generate(model) as steps:
        options = {"max_new_tokens": 12, "do_sample": False}
        handle = model.model.layers[0].register_forward_hook(lambda m, a, out: None)
        found = model.generate(torch.tensor(IDS), **options)
        handle.remove()
        assert torch.equal(found, eager(model, **options))
        assert steps.passed_on == {"a hook on a LlamaDecoderLayer": 1} and not steps.step.caches
        model.generate(torch.tensor(IDS), cache_implementation="dynamic", **options)
        model.generate(torch.tensor(IDS), disable_compile=True, **options)
        assert not steps.step.caches
        model.generate(torch.tensor(IDS), **options)
        assert len(steps.step.caches) == 11


def test_calls_that_a_static_cache_does_not_fit() -> None:
    """`generate` refuses a cache that is given beside the setting of one, and candidates of a
    prompt lookup go beyond its end."""
    model, short = small("Llama", "cpu"), {"max_new_tokens": 5, "do_sample": False}
    repeats = torch.tensor([[5, 99, 5, 99, 5, 99, 5]])
    long = eager(model, max_new_tokens=10, do_sample=False)
    with graph_generate(model) as steps:
        cache = transformers.DynamicCache(config=model.config)
        for given in (cache, transformers.StaticCache(config=model.config, max_cache_len=40)):
            parameters = inspect.signature(model.forward).parameters
            kept = {next(name for name in CACHE_NAMES if name in parameters): given}
            half = model.generate(torch.tensor(IDS), **kept, **short)
            assert torch.equal(model.generate(half, **kept, **short), long)
        assert len(steps.step.caches) == 8 and {*map(id, steps.step.caches)} == {id(given)}
        found = model.generate(repeats, max_new_tokens=20, prompt_lookup_num_tokens=3)
        assert torch.equal(found, type(model).generate(model, repeats, max_new_tokens=20))
        wanted = {"a DynamicCache, which is not static": 2, "a prompt lookup": 1}
        assert steps.passed_on == wanted
        assert model.generation_config.cache_implementation == "static"
        with pytest.raises(ValueError, match="Passing both"):
            model.generate(repeats, cache_implementation="offloaded", **kept, **short)
    assert not [name for name in vars(model) if name.startswith("_prepare")]


def test_a_model_that_prepares_caches_by_itself() -> None:
    model, made = small("Llama", "cpu"), []

    def own(config: Any, inputs: Any, *args: Any) -> None:
        name = next(n for n in CACHE_NAMES if n in inspect.signature(model.forward).parameters)
        made.append(transformers.StaticCache(config=model.config, max_cache_len=40))
        inputs[name] = made[-1]

    model._prepare_cache_for_generation = own
    wanted = eager(model, max_new_tokens=5, do_sample=False)
    with graph_generate(model) as steps:
        found = model.generate(torch.tensor(IDS), max_new_tokens=5, do_sample=False)
        assert torch.equal(found, wanted)
        assert {*map(id, steps.step.caches)} == {id(made[-1])}
    assert vars(model)["_prepare_cache_for_generation"] is own


def test_a_transformers_that_prepares_caches_in_another_way() -> None:
    from ostinato.interop.transformers import graphing

    model = small("Llama", "cpu")
    wanted = eager(model, max_new_tokens=5, do_sample=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphing, "_PREPARE", "_no_such_method")
        with graph_generate(model) as steps:
            found = model.generate(torch.tensor(IDS), max_new_tokens=5, do_sample=False)
            assert torch.equal(found, wanted) and steps.step.caches


def test_a_wrapper_of_a_model_is_refused() -> None:
    """PEFT passes names on to the model inside, whose `generate` would not ask the wrapper."""
    model = small("Llama", "cpu")

    class Wrapper:
        def __getattr__(self, name: str) -> Any:
            return getattr(model, name)

    with pytest.raises(InputError, match="get_base_model"):
        graph_generate(Wrapper())
    assert model.generation_config.cache_implementation is None


def test_a_model_whose_configuration_has_no_cache_is_named() -> None:
    """MPT's says `use_cache=False`."""
    model = small("MPT", "cpu")
    model.generation_config.use_cache = False
    with graph_generate(model) as steps:
        model.generate(torch.tensor(IDS), max_new_tokens=4)
        assert "1 passed on: no cache (use_cache=False)" in steps.explain()
        model.generate(torch.tensor(IDS), max_new_tokens=4, use_cache=True)
        assert len(steps.step.caches) == 3


def test_settings_are_put_back() -> None:
    model = small("Llama", "cpu")
    with graph_generate(model, max_cache_len=64, verify="first") as steps:
        assert steps.step.options == {"verify": "first"}
        assert model.generation_config.cache_implementation == "static"
        with pytest.raises(InputError, match="graphed already"):
            graph_generate(model)
        model.generate(torch.tensor(IDS), max_new_tokens=3)
        assert steps.step.caches[-1].layers[0].keys.shape[2] == 64
        other = copy.deepcopy(model)
        count = len(steps.step.caches)
        options = {"max_new_tokens": 3, "disable_compile": True}
        compiled = other.get_compiled_call(None)
        assert compiled is other._compiled_call, (
            "a copy of the model would run the original's steps"
        )
        other.generate(torch.tensor(IDS), **options)
        assert len(steps.step.caches) == count
        with graph_generate(other) as theirs:
            other.generate(torch.tensor(IDS), max_new_tokens=3)
            assert len(theirs.step.caches) == 2 and len(steps.step.caches) == count
    assert steps.step.closed and "get_compiled_call" not in vars(model)
    assert model.generation_config.cache_implementation is None
    assert model.generation_config.max_cache_len is None
    model.generation_config.cache_implementation = "offloaded_static"
    steps = graph_generate(model)
    assert model.generation_config.cache_implementation == "offloaded_static"
    model.generation_config.cache_implementation = "static"
    steps.close()
    steps.close()
    assert model.generation_config.cache_implementation == "static"
    # Settings of a user's own, given meanwhile, stay.
    first = model.generation_config
    first.cache_implementation = None
    with graph_generate(model):
        model.generation_config = transformers.GenerationConfig(cache_implementation="static")
    assert model.generation_config.cache_implementation == "static"
    assert first.cache_implementation is None


def test_a_store_finds_the_steps_of_another_model_of_the_same_kind() -> None:
    """Files of graphs are found by text, which depends on no weights, addresses or objects."""
    library = Torch.__new__(Torch)
    library.offset = torch.Tensor.storage_offset

    def text(model: Any) -> str:
        with graph_generate(model, store="folder") as steps:
            assert steps.step.options == {"store": "folder"}
            assert steps.save(check=False) == {"a key": "checked: False"}
            found, guards = Description(library), Guards(steps.step.function, library)
            found.guards(guards)
            assert same(guards.read().arrays, found.arrays)
            return "\n".join([*found.parts, code_text(steps.step.function)])

    first = text(small("Llama", "cpu"))
    torch.manual_seed(9)
    other = transformers.LlamaForCausalLM(small("Llama", "cpu").config).eval()
    assert text(other) == first
    other.config._attn_implementation = "eager"
    assert text(other) != first
    assert text(small("Qwen2", "cpu")) != first


def test_two_threads_with_caches_of_two_kinds() -> None:
    """Whether a cache can be replayed is of one call; here both calls take their steps in turns."""
    model = small("Llama", "cpu")
    with graph_generate(model) as steps:
        static = transformers.StaticCache(config=model.config, max_cache_len=32)
        dynamic = transformers.DynamicCache(config=model.config)
        prompt = torch.tensor(IDS)
        calls = []
        for cache in (static, dynamic):
            model(prompt, past_key_values=cache)
            calls.append((model.get_compiled_call(None), cache))
        for _ in range(3):
            for call, cache in calls:
                call(input_ids=prompt[:, -1:], past_key_values=cache, return_dict=True)
        assert steps.step.caches == [static] * 3
        assert sum(steps.passed_on.values()) == 3


def test_closed_in_the_middle_of_a_call() -> None:
    """The other steps run eagerly, over the same cache."""
    model = small("Llama", "cpu")
    wanted = eager(model, max_new_tokens=9, do_sample=False)
    steps = graph_generate(model)

    class Closes(transformers.generation.streamers.BaseStreamer):
        left = 4

        def put(self, value: Any) -> None:
            self.left -= 1
            if not self.left:
                steps.close()

        def end(self) -> None:
            pass

    streamer = Closes()
    found = model.generate(torch.tensor(IDS), max_new_tokens=9, do_sample=False, streamer=streamer)
    assert torch.equal(found, wanted)
    taken = len(steps.step.caches)
    assert 1 <= taken < 8 and steps.passed_on == {"closed": 8 - taken}


def test_without_a_device_generate_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StandIn, "unavailable", "no CUDA device")
    model = small("Llama", "cpu")
    wanted, own = model.generate(torch.tensor(IDS), max_new_tokens=3), dict(vars(model))
    with graph_generate(model) as steps:
        assert vars(model) == own
        assert model.generation_config.cache_implementation is None
        assert torch.equal(model.generate(torch.tensor(IDS), max_new_tokens=3), wanted)
        assert steps.step.caches == [] and "a table" in steps.explain()
    with pytest.raises(NotAvailableError, match="would run eagerly: no CUDA device"):
        graph_generate(model, strict=True)


def test_a_model_ends_with_its_last_user() -> None:
    model = small("Llama", "cpu")
    steps = graph_generate(model)
    model.generate(torch.tensor(IDS), max_new_tokens=3)
    steps.close()
    gc.collect()
    gc.disable()
    try:
        kept = weakref.ref(model)
        del model, steps
        assert kept() is None
    finally:
        gc.enable()


def test_the_code_on_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "transformers.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", page, flags=re.S)
    model = small("Llama", "cpu")
    exec(block, {"model": model, "inputs": {"input_ids": torch.tensor(IDS[:1])}})
    out = capsys.readouterr().out
    assert "1 of 1 calls by our decoder, 128 tokens" in out and "a table" in out
