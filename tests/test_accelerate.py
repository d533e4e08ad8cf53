"""`accelerate` on the host driver: models of transformers in float32 on the CPU, with their own
`generate` as the reference."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ostinato as ost
from ostinato.errors import ClosedError, InputError, UnsupportedModelError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

from ostinato.interop.transformers import Accelerated, accelerate

pytestmark = pytest.mark.filterwarnings("ignore")
VOCABULARY = 131
ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}


SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
# Windows are shorter than most prompts and answers here.
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 6},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "Qwen3": {"head_dim": 8},
}
every_family = pytest.mark.parametrize("model", FAMILIES, indirect=True)


def tiny(family: str = "Llama", seed: int = 3, **values: Any) -> Any:
    """A small model whose next token depends on all tokens before, or on those in its windows."""
    return made(family, seed, {**FAMILIES[family], **values})


def made(family: str, seed: int, values: dict[str, Any]) -> Any:
    settings = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": None,
        "initializer_range": 0.2,
        **values,
    }
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**settings)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            if "bias" in name:
                parameter.normal_(0, 0.5)
    return model


def family_of(model: Any) -> str:
    return type(model).__name__.removesuffix("ForCausalLM")


PROMPT = [[5, 99, 130, 2, 7]]
BATCH = [[5, 99, 130, 2, 7], [0, 0, 88, 31, 60], [0, 0, 0, 0, 44]]
MASK = [[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [0, 0, 0, 0, 1]]
GAPS = [[0, 1, 0, 0, 1], [1, 1, 0, 0, 1], [1, 0, 1, 0, 1]]


def ids(rows: list[list[int]] = PROMPT, dtype: Any = torch.long) -> Any:
    return torch.tensor(rows, dtype=dtype)


@pytest.fixture
def model(request: pytest.FixtureRequest) -> Any:
    """A Llama, if the test names no family."""
    return tiny(getattr(request, "param", "Llama"))


@pytest.fixture
def accelerated(model: Any) -> Iterator[Accelerated]:
    with accelerate(model) as handle:
        yield handle


def plain(model: Any, *args: Any, **kwargs: Any) -> Any:
    """What transformers itself answers."""
    return type(model).generate(model, *args, **kwargs)


def same(model: Any, *args: Any, **kwargs: Any) -> Any:
    """The model's answer, which must be transformers', type and shape too."""
    wanted = plain(model, *args, **kwargs)
    found = model.generate(*args, **kwargs)
    assert type(found) is type(wanted) and found.dtype == wanted.dtype
    assert found.device == wanted.device
    assert found.tolist() == wanted.tolist()
    return found


def reasons(handle: Accelerated) -> list[str]:
    numbers = handle.statistics()
    assert numbers.calls == numbers.accelerated + sum(numbers.passed_on.values())
    return list(numbers.passed_on)


@pytest.mark.parametrize(
    ("family", "values"),
    [
        ("Llama", {}),
        ("Llama", {"tie_word_embeddings": True}),
        ("Llama", {"num_key_value_heads": 4, "head_dim": 8, "rms_norm_eps": 1e-3}),
        ("Llama", {"rope_parameters": ROPE}),
        ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}}),
        ("Mistral", {"rope_parameters": YARN}),
        ("Qwen2", {"rope_parameters": {**YARN, "attention_factor": 1.0, "truncate": False}}),
        ("Qwen3", {"rope_scaling": {**YARN, "mscale": 2.0, "mscale_all_dim": 0.5}}),
        ("Mistral", {"head_dim": 8}),
        ("Mistral", {"sliding_window": None}),
        ("Qwen2", {"layer_types": SLIDING}),
        ("Qwen2", {"use_sliding_window": False, "head_dim": 32, "tie_word_embeddings": True}),
        ("Qwen3", {"rope_parameters": ROPE, "rms_norm_eps": 1e-3, "head_dim": 32}),
        ("Qwen3", FAMILIES["Qwen2"]),
    ],
    ids=lambda part: part if isinstance(part, str) else " ".join(part),
)
def test_logits_and_tokens_are_those_of_transformers(family: str, values: dict[str, Any]) -> None:
    model = tiny(family, **values)
    with accelerate(model) as handle:
        found = same(model, ids(), max_new_tokens=60, do_sample=False)
        assert found.shape == (1, 65) and len(set(found[0, 5:].tolist())) > 5
        assert handle.statistics().accelerated == 1 and not reasons(handle)
        decoder = handle.decoder
        with torch.no_grad():
            theirs = model(found[:, :-1]).logits[0, -1].numpy()
        assert np.abs(decoder.logits(0) - theirs).max() < 1e-4 * np.abs(theirs).max()


def test_frequencies_that_were_rounded_are_taken_as_they_are() -> None:
    """`model.to(bfloat16)` rounds those of the rope too; they are what the model then computes
    with."""
    model = tiny(rope_parameters=ROPE).to(torch.bfloat16).to(torch.float32)
    with accelerate(model) as handle:
        same(model, ids(), max_new_tokens=100, do_sample=False)
        assert not reasons(handle)


@every_family
def test_batches_are_padded_as_transformers_pads(model: Any, accelerated: Accelerated) -> None:
    """Left padding by mask, and by the pad token alone; ends at different steps.  A window counts
    padding between tokens too, unless it is longer than all of it."""
    free = plain(model, ids(BATCH), attention_mask=ids(MASK), max_new_tokens=12)
    ends = [int(free[0, 8]), int(free[2, 10])]
    for options in (
        {"attention_mask": ids(MASK)},
        {"attention_mask": ids(MASK), "eos_token_id": ends, "pad_token_id": 9},
        {"attention_mask": ids(MASK).bool(), "eos_token_id": ends},
        {"pad_token_id": 0, "eos_token_id": ends},
        {"pad_token_id": 0},
        {"pad_token_id": 31},  # which is in the middle of a prompt, and so left out
        {"attention_mask": ids(GAPS)},
        {},
    ):
        same(model, ids(BATCH), max_new_tokens=12, **options)
    short = same(model, ids(BATCH), attention_mask=ids(MASK), max_new_tokens=30, eos_token_id=ends)
    assert (short == ends[0]).any(), "nothing ended"
    same(model, ids(BATCH), attention_mask=ids(GAPS), max_new_tokens=1)
    between = {"padding between tokens of a model with sliding windows": 2}
    windowed = any(accelerated.config.windows)
    assert accelerated.statistics().passed_on == (between if windowed else {})


def test_every_way_to_say_how_long(model: Any, accelerated: Accelerated) -> None:
    same(model, ids(), max_new_tokens=1)
    same(model, ids(), max_length=9)
    same(model, ids(BATCH), attention_mask=ids(MASK), max_length=6)
    same(model, ids())  # 20 tokens
    same(model, inputs=ids(), generation_config=transformers.GenerationConfig(max_new_tokens=3))
    same(model, input_ids=ids(), max_new_tokens=3)
    same(model, ids(dtype=torch.int32), max_new_tokens=3)
    same(model, ids(), max_new_tokens=4, use_cache=False)
    same(model, ids(), max_new_tokens=4, cache_implementation="static")
    same(model, max_new_tokens=4)  # from the first token
    model.generation_config.max_new_tokens = 7
    model.generation_config.eos_token_id = int(plain(model, ids(), max_new_tokens=4)[0, -1])
    assert same(model, ids()).shape[1] < 12
    with pytest.raises(ValueError, match="max_new_tokens"):
        model.generate(ids(), max_new_tokens=0)
    assert not reasons(accelerated)


def test_repetition_is_penalised_alike(model: Any, accelerated: Accelerated) -> None:
    found = same(model, ids(), max_new_tokens=30, repetition_penalty=1.8)
    assert found.tolist() != plain(model, ids(), max_new_tokens=30).tolist()
    same(model, ids(BATCH), max_new_tokens=8, repetition_penalty=1.8)
    assert not reasons(accelerated)
    same(model, ids(BATCH), attention_mask=ids(MASK), max_new_tokens=8, repetition_penalty=1.8)
    # Old releases of transformers penalise padding too; newer ones tell how much of it to ignore.
    assert re.search("penalises|prompt_ignore_length", reasons(accelerated)[0])


class Streamer(transformers.generation.streamers.BaseStreamer):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def put(self, value: Any) -> None:
        assert value.device.type == "cpu" and value.dtype == torch.long
        self.seen.append(value.tolist())

    def end(self) -> None:
        self.seen.append("end")


@pytest.mark.parametrize("rows", [PROMPT, BATCH])
def test_streamers_get_the_same(
    model: Any, accelerated: Accelerated, rows: list[list[int]]
) -> None:
    end = int(plain(model, ids(rows), max_new_tokens=5)[-1, -1])
    options = {"max_new_tokens": 9, "eos_token_id": end, "pad_token_id": 3}
    ours, theirs = Streamer(), Streamer()
    plain(model, ids(rows), streamer=theirs, **options)
    model.generate(ids(rows), streamer=ours, **options)
    assert ours.seen == theirs.seen and ours.seen[-1] == "end"
    passed = Streamer()
    model.generate(ids(rows), streamer=passed, max_time=1e9, **options)
    assert passed.seen == theirs.seen, "the prompt came twice"
    assert reasons(accelerated) == ["the stopping criterion MaxTimeCriteria"]


def test_sampling_draws_what_transformers_draws(model: Any, accelerated: Accelerated) -> None:
    """Frequencies of a next token against the distribution that transformers makes."""
    options = {"do_sample": True, "temperature": 1.6, "top_k": 12, "top_p": 0.9, "min_p": 0.02}
    with torch.no_grad():
        scores = model(ids()).logits[:, -1]
    lists = transformers.generation.logits_process
    for processor in (
        lists.TemperatureLogitsWarper(1.6),
        lists.TopKLogitsWarper(12),
        lists.TopPLogitsWarper(0.9),
        lists.MinPLogitsWarper(0.02),
    ):
        scores = processor(ids(), scores)
    expected = scores.softmax(-1)[0].numpy()
    counts = np.zeros(VOCABULARY)
    torch.manual_seed(5)
    for _ in range(30):
        drawn = model.generate(ids(), max_new_tokens=1, num_return_sequences=32, **options)
        assert drawn.shape == (32, 6)
        counts += np.bincount(drawn[:, -1].numpy(), minlength=VOCABULARY)
    total = counts.sum()
    spread = np.sqrt(total * expected * (1 - expected))
    assert 3 <= np.count_nonzero(expected) <= 12
    assert not counts[expected == 0].any()
    assert np.all(np.abs(counts - total * expected) <= 5 * spread + 1)
    assert not reasons(accelerated)


@every_family
def test_seeds_come_from_torch(model: Any, accelerated: Accelerated) -> None:
    options = {"max_new_tokens": 12, "do_sample": True, "num_return_sequences": 3}
    torch.manual_seed(1)
    first, second = (model.generate(ids(), **options).tolist() for _ in range(2))
    assert len({tuple(row) for row in (*first, *second)}) == 6, "rows draw the same numbers"
    torch.manual_seed(1)
    assert [model.generate(ids(), **options).tolist() for _ in range(2)] == [first, second]
    before = torch.get_rng_state()
    same(model, ids(), max_new_tokens=3, do_sample=False)
    assert torch.equal(torch.get_rng_state(), before), "greedy decoding drew a number"
    best = plain(model, ids(), max_new_tokens=9, do_sample=False).tolist()
    assert model.generate(ids(), max_new_tokens=9, do_sample=True, top_k=1).tolist() == best
    assert not reasons(accelerated)


def test_what_is_not_covered_goes_to_transformers(model: Any, accelerated: Accelerated) -> None:
    cases = {
        "the mode beam_search": {"num_beams": 3},
        "the logits processor NoRepeatNGramLogitsProcessor": {"no_repeat_ngram_size": 2},
        "the stopping criterion MaxTimeCriteria": {"max_time": 1e9},
        "the argument position_ids": {"position_ids": torch.arange(5)[None] + 3},
        "the argument custom_generate": {"custom_generate": type(model)._sample},
        "more positions than the model was made for (256)": {"max_new_tokens": 300},
        "the argument output_hidden_states": {"output_hidden_states": True},
    }
    for reason, options in cases.items():
        same(model, ids(), **{"max_new_tokens": 6, "do_sample": False, **options})
        assert reasons(accelerated)[-1] == reason
    full = model.generate(ids(), max_new_tokens=4, return_dict_in_generate=True, output_scores=True)
    assert len(full.scores) == 4 and reasons(accelerated)[-1] == "return_dict_in_generate"
    cache = transformers.DynamicCache(config=model.config)
    same_start = plain(model, ids(), max_new_tokens=4)
    assert model.generate(ids(), max_new_tokens=4, past_key_values=cache).equal(same_start)
    assert cache.get_seq_length() == 8, "a cache of the caller's was not filled"
    right = ids([[1, 1, 1, 0, 0]])
    same(model, ids(), attention_mask=right, max_new_tokens=4)
    assert "last token" in reasons(accelerated)[-1]
    with pytest.raises(ValueError, match="typo"):
        model.generate(ids(), typo=1)
    stops = list(range(40, 60))
    same(model, ids(), eos_token_id=stops, max_new_tokens=40)
    assert "16 at most" in reasons(accelerated)[-1]
    same(model, ids(), eos_token_id=[-1, 500], max_new_tokens=4)
    assert accelerated.statistics().accelerated == 1


@pytest.mark.parametrize(("family", "values"), [("Llama", {}), ("Mistral", {"sliding_window": 20})])
def test_more_rows_and_positions_get_a_larger_decoder(
    family: str, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(family, **values)
    with accelerate(model, sequences=1, max_context=16) as handle:
        same(model, ids(), max_new_tokens=8)
        assert handle.statistics().decoders == 1
        same(model, ids(BATCH), max_new_tokens=8)
        same(model, ids(), max_new_tokens=40)
        numbers = handle.statistics()
        assert numbers.decoders == 3 and not numbers.passed_on
        sizes = handle.decoder.plan.sizes
        assert (sizes.sequences, sizes.context) == (4, 64)
        same(model, ids(BATCH), max_new_tokens=40)
        assert handle.statistics().decoders == 3

        def full(*args: Any, **options: Any) -> Any:
            raise UnsupportedModelError("injected")

        with monkeypatch.context() as patched:
            patched.setattr("ostinato.interop.transformers.accelerating.Decoder", full)
            same(model, ids(PROMPT * 65), max_new_tokens=3)
        assert "no decoder of 65 sequences: injected" in reasons(handle)[0]
        same(model, ids(), max_new_tokens=8)
        assert handle.statistics().accelerated == 5


@every_family
def test_weights_changed_in_place_count(model: Any, accelerated: Accelerated) -> None:
    before = same(model, ids(), max_new_tokens=20)
    with torch.no_grad():
        model.model.norm.weight.mul_(-1)
        model.model.layers[1].self_attn.k_proj.weight.mul_(3)
        model.model.layers[0].input_layernorm.weight.data.add_(0.5)
        model.lm_head.weight[7] *= 2
    assert same(model, ids(), max_new_tokens=20).tolist() != before.tolist()
    before = same(model, ids(), max_new_tokens=20)
    for name, parameter in model.model.layers[1].named_parameters():
        if parameter.ndim == 1:  # norms and biases: those that are copied
            with torch.no_grad():
                parameter.mul_(-2)
            after = same(model, ids(), max_new_tokens=20)
            assert after.tolist() != before.tolist(), name
            before = after
    other = tiny(family_of(model), seed=4)
    model.load_state_dict(other.state_dict())
    same(model, ids(), max_new_tokens=20)
    assert not reasons(accelerated)


class Negated(transformers.models.llama.modeling_llama.LlamaRMSNorm):  # type: ignore[misc]
    def forward(self, x: Any) -> Any:
        return -super().forward(x)


def wrap(model: Any) -> None:
    layer = model.model.layers[1].mlp
    layer.down_proj = torch.nn.Sequential(layer.down_proj, torch.nn.Tanh())


def hook(model: Any) -> None:
    model.model.layers[1].register_forward_hook(lambda module, args, output: output * 2)


def move(model: Any) -> None:
    weight = model.model.layers[0].self_attn.o_proj.weight
    weight.data = weight.data * 2


def patch(model: Any) -> None:
    model.model.norm.forward = lambda x: -x


def parametrise(model: Any) -> None:
    torch.nn.utils.parametrize.register_parametrization(
        model.model.layers[0].mlp.gate_proj, "weight", torch.nn.Tanh()
    )


@pytest.mark.parametrize(
    ("model", "change", "refused"),
    [
        ("Llama", "layers[2].mlp.up_proj.weight = new(96, 64)", None),
        ("Llama", move, None),
        ("Llama", "model.load_state_dict(tiny(seed=4).state_dict(), assign=True)", None),
        ("Llama", "model.resize_token_embeddings(140)", None),
        ("Llama", wrap, "Sequential in place of a Linear"),
        ("Llama", hook, "a hook on a LlamaDecoderLayer"),
        ("Llama", patch, "a forward of its own"),
        ("Llama", parametrise, "ParametrizedLinear"),
        ("Llama", "model.lm_head.bias = new(VOCABULARY)", "a bias"),
        ("Llama", "norm.__class__ = Negated", "Negated in place of transformers' LlamaRMSNorm"),
        ("Llama", "norm.variance_epsilon = 100.0", "epsilon"),
        ("Llama", "layers[1].self_attn.scaling *= 4", "scale of the attention"),
        ("Llama", "rope.inv_freq.mul_(0.3)", "turns otherwise"),
        ("Llama", "rope.inv_freq = rope.inv_freq * 0.3", "turns otherwise"),
        ("Llama", "rope.attention_scaling = 2.0", "another scale of its rope"),
        ("Llama", "rope.rope_type = 'dynamic'", "its rope is dynamic, and default in its config"),
        ("Llama", "config.rope_parameters['rope_theta'] = 500.0", "turns otherwise"),
        ("Llama", "config.num_hidden_layers = 2", "it has 3 layers"),
        ("Llama", "model.set_attn_implementation('eager')", None),
        ("Llama", "model.config = copy.deepcopy(config)", "a LlamaModel with a config of its own"),
        ("Mistral", "config.sliding_window = 3", None),
        ("Qwen2", "config.sliding_window = 3", "a window of 6, which is 3 in its config"),
        ("Qwen2", "config.layer_types[0] = SLIDING[0]", "a window of 0, which is 6 in its config"),
        ("Qwen2", "layers[1].self_attn.k_proj.bias = None", "without a bias"),
        ("Qwen2", "layers[1].self_attn.v_proj.bias = new(32)", None),
        ("Qwen2", "layers[1].self_attn.o_proj.bias = new(64)", "a bias that its family does not"),
        ("Qwen3", "layers[1].self_attn.k_norm.weight = new(8)", None),
        ("Qwen3", "layers[1].self_attn.q_norm.variance_epsilon = 100.0", "epsilon"),
    ],
    indirect=["model"],
)
def test_a_model_that_is_not_what_it_was_is_transformers(
    model: Any, change: Any, refused: str | None
) -> None:
    """Accelerated again, it is computed as it is now, or refused."""
    inner = model.model
    names = {"layers": inner.layers, "norm": inner.norm, "rope": inner.rotary_emb, "model": model}
    with accelerate(model) as handle:
        same(model, ids(), max_new_tokens=6)
        if callable(change):
            change(model)
        else:
            exec(change, {**globals(), **names, "config": model.config})
        same(model, ids(), max_new_tokens=6)
        assert handle.statistics().accelerated == 1 and len(reasons(handle)) == 1
    if refused is not None:
        with pytest.raises(UnsupportedModelError, match=refused):
            accelerate(model)
        return
    with accelerate(model) as handle:
        same(model, ids(), max_new_tokens=9)
        assert not reasons(handle)


def new(*shape: int) -> Any:
    return torch.nn.Parameter(torch.randn(shape) * 10)


def test_another_forward_of_a_class_is_transformers(
    model: Any, accelerated: Accelerated, monkeypatch: pytest.MonkeyPatch
) -> None:
    same(model, ids(), max_new_tokens=6)
    monkeypatch.setattr(type(model.model.norm), "forward", lambda self, x: -x)
    same(model, ids(), max_new_tokens=6)
    assert len(reasons(accelerated)) == 1


def test_dropout_in_training_is_transformers() -> None:
    model = tiny(attention_dropout=0.5)
    with accelerate(model) as handle:
        model.generate(ids(), max_new_tokens=3)
        model.train()
        model.generate(ids(), max_new_tokens=3)
        assert reasons(handle) == ["training with dropout"]


def test_what_transformers_and_its_users_leave_behind_does_no_harm(
    model: Any, accelerated: Accelerated, tmp_path: Path
) -> None:
    """Hooks, and values of the config that the logits do not depend on."""
    model(ids(), output_hidden_states=True, output_attentions=True)
    model.save_pretrained(tmp_path)
    model.config.use_cache = False
    model.config.pad_token_id = 3
    same(model, ids(), max_new_tokens=3)
    assert not reasons(accelerated)


def test_copies_of_the_model_have_their_own_generate(
    model: Any, accelerated: Accelerated, tmp_path: Path
) -> None:
    """A copy that called the original's decoder would answer with the original's weights."""
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            other.model.norm.weight.mul_(-1)
        calls = accelerated.statistics().calls
        found = other.generate(ids(), max_new_tokens=9)
        assert found.equal(plain(other, ids(), max_new_tokens=9))
        assert not found.equal(model.generate(ids(), max_new_tokens=9))
        assert accelerated.statistics().calls == calls + 1
        with accelerate(other) as theirs:
            same(other, ids(), max_new_tokens=9)
            assert theirs.statistics().accelerated == 1
    model.save_pretrained(tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert loaded.generate(ids(), max_new_tokens=9).equal(plain(model, ids(), max_new_tokens=9))


@every_family
def test_parameters_keep_working(model: Any) -> None:
    """The same objects, with gradients, before and after closing."""
    before = dict(model.named_parameters())
    values = {name: p.detach().clone() for name, p in before.items()}
    wanted = model(ids()).logits.detach().clone()
    handle = accelerate(model)
    queries = model.model.layers[0].self_attn.q_proj.weight
    keys = model.model.layers[0].self_attn.k_proj.weight
    assert queries.untyped_storage().data_ptr() == keys.untyped_storage().data_ptr()
    for closed in (False, True):
        if closed:
            handle.close()
            del handle
            gc.collect()
        now = dict(model.named_parameters())
        assert all(now[name] is p for name, p in before.items())
        assert all(torch.equal(now[name], values[name]) for name in values)
        assert torch.equal(model(ids()).logits, wanted)
        model(ids()).logits.sum().backward()
        assert queries.grad is not None and queries.grad.abs().sum() > 0
        model.zero_grad()
    assert "generate" not in vars(model)
    assert same(model, ids(), max_new_tokens=3).shape == (1, 8)


def test_closing_and_accelerating_again(model: Any) -> None:
    first = accelerate(model)
    with pytest.raises(InputError, match="accelerated already"):
        accelerate(model)
    kept = model.generate
    first.close()
    first.close()
    assert kept(ids(), max_new_tokens=4).equal(plain(model, ids(), max_new_tokens=4))
    assert first.statistics().calls == 0, "a closed one was asked"
    with ost.open_device("host") as device, accelerate(model, device=device) as second:
        same(model, ids(), max_new_tokens=4)
        assert second.device is device and not reasons(second)
    same(model, ids(), max_new_tokens=4)


def test_a_failure_leaves_the_model_as_it_was(model: Any) -> None:
    with pytest.raises(InputError, match="max_context"):
        accelerate(model, max_context=0)
    assert "generate" not in vars(model)
    same(model, ids(), max_new_tokens=4)


@every_family
def test_another_computation_is_noticed(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that the classes do not show: here, the attention of the whole family."""
    monkeypatch.setattr(sys.modules[type(model).__module__], "rotate_half", lambda x: x)
    with pytest.raises(UnsupportedModelError, match="logits differ"):
        accelerate(model)
    assert "generate" not in vars(model)


@pytest.mark.parametrize(
    ("family", "values", "reason"),
    [
        ("Llama", {"attention_bias": True}, "attention_bias"),
        ("Llama", {"mlp_bias": True}, "mlp_bias"),
        ("Llama", {"hidden_act": "gelu"}, "hidden_act"),
        ("Llama", {"rope_parameters": {**ROPE, "rope_type": "dynamic"}}, "'dynamic' is not"),
        # Its attention has no window, and the cache of `generate` has one.
        ("Llama", {"sliding_window": 8}, "a DynamicSlidingWindowLayer of 8: remove sliding"),
        ("Llama", {"attention_chunk_size": 8}, "attention_chunk_size"),
        ("Mistral", {"layer_types": ["full_attention"] * 3}, "layer_types"),
        ("Qwen2", {"use_sliding_window": False, "layer_types": SLIDING}, "layer_types"),
        ("Qwen3", {"attention_bias": True}, "attention_bias"),
    ],
)
def test_others_of_a_family_are_refused(family: str, values: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        accelerate(tiny(family, **values))


def test_other_models_are_refused(model: Any) -> None:
    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=50)
    with pytest.raises(UnsupportedModelError, match="supported: llama, mistral, qwen2, qwen3"):
        accelerate(transformers.GPT2LMHeadModel(config))
    with pytest.raises(UnsupportedModelError, match="float16"):
        accelerate(tiny().to(torch.float16))
    mixed = tiny()
    mixed.model.norm.to(torch.float64)
    with pytest.raises(UnsupportedModelError, match="float64"):
        accelerate(mixed)
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    accelerate(tiny()).close()
    model.model.layers[1].mlp.up_proj.weight = torch.nn.Parameter(
        model.model.layers[0].mlp.up_proj.weight.data
    )
    with pytest.raises(UnsupportedModelError, match="share their memory"):
        accelerate(model)


def test_calls_of_two_threads_wait_for_each_other(model: Any, accelerated: Accelerated) -> None:
    wanted = {n: plain(model, ids(), max_new_tokens=n).tolist() for n in (10, 14)}
    wrong: list[object] = []

    def work(count: int) -> None:
        for _ in range(6):
            if model.generate(ids(), max_new_tokens=count).tolist() != wanted[count]:
                wrong.append(count)

    threads = [threading.Thread(target=work, args=(n,)) for n in wanted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and accelerated.statistics().accelerated == 12


def test_a_call_inside_a_call_is_transformers(model: Any, accelerated: Accelerated) -> None:
    inner: list[Any] = []

    class Nested(Streamer):
        def put(self, value: Any) -> None:
            if not inner:
                inner.append(model.generate(ids(BATCH), max_new_tokens=3))

    outer = model.generate(ids(), max_new_tokens=6, streamer=Nested())
    assert outer.equal(plain(model, ids(), max_new_tokens=6))
    assert inner[0].equal(plain(model, ids(BATCH), max_new_tokens=3))
    assert reasons(accelerated) == ["called from inside a call"]


def test_an_interrupted_call_leaves_no_trace(model: Any, accelerated: Accelerated) -> None:
    class Stop(Streamer):
        def put(self, value: Any) -> None:
            super().put(value)
            if len(self.seen) == 4:
                raise KeyboardInterrupt

    for rows in (PROMPT, BATCH):
        with pytest.raises(KeyboardInterrupt):
            model.generate(ids(rows), max_new_tokens=9, streamer=Stop())
        same(model, ids(rows), max_new_tokens=9)
    assert not reasons(accelerated)


def storages() -> dict[int, int]:
    """The bytes of all memory that a tensor of this process is in, by address."""
    found = {}
    for one in gc.get_objects():
        # isinstance asks an object for its class, and some answer with a warning.
        if issubclass(type(one), torch.Tensor) and one.device.type == "cpu":
            storage = one.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


def test_nothing_is_kept_but_norms_and_biases() -> None:
    """Without the collector of cycles: on a GPU, what waits for it is memory that is missed."""
    model = tiny("Qwen2", hidden_size=128, intermediate_size=1024)
    prompt = ids()
    model(prompt)
    gc.collect()
    gc.disable()
    try:
        before = sum(storages().values())
        with accelerate(model) as handle:
            copied = handle.statistics().copied_bytes
            assert copied == (7 * 128 + 3 * (128 + 2 * 64)) * 4
            for _ in range(2):
                model.generate(prompt, max_new_tokens=5)
                model.generate(prompt, max_new_tokens=5, num_beams=2)
            # Weights on the host driver are in memory of ours; the tensors over it are counted.
            assert sum(storages().values()) <= before + copied + 4096
            other = copy.deepcopy(model)
            other.generate(prompt, max_new_tokens=5)
            assert sum(storages().values()) >= 1.9 * before
            del other
            assert sum(storages().values()) <= before + copied + 4096
        assert sum(storages().values()) <= before + copied + 4096
    finally:
        gc.enable()


def test_everything_ends_with_its_last_user() -> None:
    """No cycle through a model, accelerated or not any more, keeps it."""
    gc.disable()
    try:
        model = tiny()
        handle = accelerate(model)
        model.generate(ids(), max_new_tokens=3)
        parts = [weakref.ref(one) for one in (model, handle, handle.decoder, model.lm_head.weight)]
        del model
        assert parts[0]() is None
        assert "LlamaForCausalLM" in repr(handle) and handle.statistics().tokens == 3
        del handle
        assert [one() for one in parts] == [None] * 4
        model = tiny()
        with accelerate(model):
            kept = model.generate
            kept(ids(), max_new_tokens=3)
        parts = [weakref.ref(one) for one in (model, model.lm_head.weight)]
        del model
        assert [one() for one in parts] == [None] * 2
        with pytest.raises(ClosedError, match="the model of this generate is gone"):
            kept(ids(), max_new_tokens=3)
    finally:
        gc.enable()


@pytest.mark.parametrize("when", ["made", "called"])
def test_torchs_modes(when: str) -> None:
    """The decoder computes as ever; autocast would only round."""
    model = tiny()
    wanted = plain(model, ids(), max_new_tokens=9).tolist()
    modes = (
        torch.inference_mode,
        torch.no_grad,
        torch.enable_grad,
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: torch.device("meta"),
    )
    for mode in modes:
        if when == "made":
            with mode():
                handle = accelerate(model)
            found = model.generate(ids(), max_new_tokens=9)
        else:
            prompt = ids()
            handle = accelerate(model)
            with mode():
                found = model.generate(prompt, max_new_tokens=9, streamer=Streamer())
        assert found.tolist() == wanted
        assert not reasons(handle)
        handle.close()


def test_parameters_made_in_inference_mode_are_refused() -> None:
    """Their data cannot be moved: torch counts no versions of it."""
    with torch.inference_mode():
        model = tiny()
        wanted = model.generate(ids(), max_new_tokens=4)
        with pytest.raises(UnsupportedModelError, match="inference_mode"):
            accelerate(model)
        assert model.generate(ids(), max_new_tokens=4).equal(wanted)


def test_a_failure_while_weights_are_fused_leaves_them_in_torchs_memory(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> Any:
        raise MemoryError("as if there were none")

    wanted = plain(model, ids(), max_new_tokens=4)
    owned = {p.data_ptr() for p in model.parameters()}
    monkeypatch.setattr("ostinato.interop.transformers.families.adopt_weights", fail)
    with pytest.raises(MemoryError):
        accelerate(model)
    monkeypatch.undo()
    assert {p.data_ptr() for p in model.parameters()} != owned, "nothing was moved"
    for parameter in model.parameters():
        storage = parameter.untyped_storage()
        assert storage.nbytes() == parameter.numel() * 4, "a view of memory that is gone"
    assert plain(model, ids(), max_new_tokens=4).equal(wanted)
    with accelerate(model) as handle:
        same(model, ids(), max_new_tokens=4)
        assert not reasons(handle)


def test_training_halves_and_back(model: Any, accelerated: Accelerated) -> None:
    model.train()
    same(model, ids(), max_new_tokens=5)
    assert not reasons(accelerated)
    model.to(torch.float64)
    same(model, ids(), max_new_tokens=5)
    model.to(torch.float32)
    same(model, ids(), max_new_tokens=5)
    assert accelerated.statistics().passed_on == {"parameters were replaced or moved": 2}


def test_ends_in_the_prompt_and_no_padding(model: Any, accelerated: Accelerated) -> None:
    """An end token of the prompt ends nothing; without a pad token the end token is padding."""
    free = plain(model, ids(BATCH), attention_mask=ids(MASK), max_new_tokens=12)
    end = int(free[1, 9])
    rows = [[end, *row[:-1]] for row in BATCH]
    for options in (
        {"eos_token_id": end},
        {"eos_token_id": [end, 7]},
        {"eos_token_id": end, "pad_token_id": end},
        {"eos_token_id": end, "min_length": 0},
    ):
        same(model, ids(BATCH), attention_mask=ids(MASK), max_new_tokens=12, **options)
        same(model, ids(rows), attention_mask=ids([[1] * 5] * 3), max_new_tokens=12, **options)
    last = ids([[5, end]])
    same(model, last, max_new_tokens=6, eos_token_id=end)
    same(model, last, attention_mask=torch.ones_like(last), max_new_tokens=6, eos_token_id=end)
    assert not reasons(accelerated)


def test_a_prompt_that_is_no_prompt(model: Any, accelerated: Accelerated) -> None:
    with pytest.raises(InputError, match="vocabulary"):
        model.generate(ids([[5, 500]]), max_new_tokens=3)
    for options in ({"max_length": 5}, {"max_length": 3}):
        raised = []
        for call in (plain, lambda m, *a, **o: m.generate(*a, **o)):
            try:
                raised.append(call(model, ids(), **options).tolist())
            except Exception as error:
                raised.append((type(error), str(error)))
        assert raised[0] == raised[1]
    same(model, ids(), max_new_tokens=3)


@pytest.mark.parametrize("rows", [PROMPT, BATCH])
@pytest.mark.parametrize("at", [0, 1, 3, "end"])
def test_a_streamer_that_raises(
    model: Any, accelerated: Accelerated, rows: list[list[int]], at: int | str
) -> None:
    class Broken(Streamer):
        def put(self, value: Any) -> None:
            if len(self.seen) == at:
                raise ValueError("a broken pipe")
            super().put(value)

        def end(self) -> None:
            if at == "end":
                raise ValueError("a broken pipe")

    with pytest.raises(ValueError, match="a broken pipe"):
        model.generate(ids(rows), max_new_tokens=6, streamer=Broken())
    same(model, ids(rows), max_new_tokens=6)
    assert not reasons(accelerated)


@pytest.mark.parametrize("at", [0, 1, 3])
def test_closed_by_its_own_streamer(model: Any, at: int) -> None:
    wanted = plain(model, ids(), max_new_tokens=6)
    handle = accelerate(model)

    class Closes(Streamer):
        def put(self, value: Any) -> None:
            super().put(value)
            if len(self.seen) == at + 1:
                handle.close()

    with pytest.raises(ClosedError, match="close"):
        model.generate(ids(), max_new_tokens=6, streamer=Closes())
    assert model.generate(ids(), max_new_tokens=6).equal(wanted)


def test_closed_by_another_thread_in_the_middle_of_a_call(model: Any) -> None:
    """It waits for the call that is under way; calls that wait behind it are transformers'."""
    wanted = plain(model, ids(), max_new_tokens=12)
    handle = accelerate(model)
    begun, ended = threading.Event(), []

    class Slow(Streamer):
        def put(self, value: Any) -> None:
            super().put(value)
            if len(self.seen) == 2:
                begun.set()
                closing.start()
                closing.join(0.2)
                ended.append(handle.decoder is not None)

    closing = threading.Thread(target=handle.close)
    found: list[Any] = []
    work = threading.Thread(
        target=lambda: found.append(model.generate(ids(), max_new_tokens=12, streamer=Slow()))
    )
    work.start()
    assert begun.wait(60)
    found.append(model.generate(ids(), max_new_tokens=12))
    work.join(60)
    closing.join(60)
    assert ended == [True] and len(found) == 2
    assert all(one.equal(wanted) for one in found)
    assert "generate" not in vars(model)
    assert handle.statistics().decoder is None
