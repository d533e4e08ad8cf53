"""`accelerate` on a GPU: small random models in bfloat16.

transformers' own tokens in bfloat16 are no reference: two logits that it rounds to the same value
are a tie there.  The reference is a float32 copy of the same weights, in transformers: each token
that was chosen greedily must have a logit near the largest one, whatever was chosen before it.
"""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from ostinato.device import Device
from ostinato.errors import UnsupportedModelError
from ostinato.models import SamplingOptions
from tests.gpu.foreign import library

torch = library("torch")
transformers = library("transformers")

from ostinato.interop.transformers import Accelerated, accelerate
from tests.test_accelerate import (
    BATCH,
    MASK,
    ROPE,
    Streamer,
    every_family,
    made,
    plain,
    reasons,
)

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
VOCABULARY = 1003
NEAR = 0.2
"""How far below the largest logit a greedy choice may be, in standard deviations of the logits."""
NINE = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3}
SOME_WINDOWS = {"use_sliding_window": True, "sliding_window": 48, "max_window_layers": 1}


def tiny(family: str = "Llama", seed: int = 3, **values: Any) -> Any:
    sizes = {"hidden_size": 256, "intermediate_size": 712, "head_dim": 64}
    settings = {"vocab_size": VOCABULARY, "max_position_embeddings": 2048, "dtype": torch.bfloat16}
    given = {**sizes, **settings, "initializer_range": 0.1, **values}
    return made(family, seed, given).to("cuda", torch.bfloat16)


@pytest.fixture
def model(cuda_device: Device, request: pytest.FixtureRequest) -> Any:
    """A Llama, if the test names no family."""
    return tiny(getattr(request, "param", "Llama"))


@pytest.fixture
def accelerated(model: Any, cuda_device: Device) -> Iterator[Accelerated]:
    with accelerate(model, device=cuda_device) as handle:
        yield handle


def ids(rows: list[list[int]], device: str = "cuda") -> Any:
    return torch.tensor(rows, device=device)


def check_greedy(
    model: Any, answer: Any, prompt: Any, mask: Any = None, ends: tuple[int, ...] = (), pad: int = 0
) -> None:
    """`answer` begins with the prompt, and every token after it is near the likeliest one; after an
    end token there is padding alone."""
    length = prompt.shape[1]
    assert answer.device == prompt.device and answer.dtype == torch.long
    assert torch.equal(answer[:, :length], prompt)
    reference = copy.deepcopy(model).float()
    mask = torch.ones_like(prompt) if mask is None else mask
    full = torch.cat([mask, torch.ones_like(answer[:, length:])], dim=-1)
    positions = (full.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = reference(answer, attention_mask=full, position_ids=positions).logits
    scores = logits[:, length - 1 : -1]
    for row, tokens in enumerate(answer[:, length:].tolist()):
        ended = False
        for step, token in enumerate(tokens):
            if ended:
                assert token == pad, f"row {row}, step {step}: {token} after the end"
                continue
            one = scores[row, step]
            below = float((one.max() - one[token]) / one.std())
            assert below <= NEAR, f"row {row}, step {step}: {below:.2f} deviations below the best"
            ended = token in ends


@pytest.mark.parametrize(
    ("family", "values"),
    [
        ("Llama", {}),
        ("Llama", {"tie_word_embeddings": True, **NINE}),
        ("Llama", {"head_dim": 128, "num_key_value_heads": 1, "rms_norm_eps": 1e-3}),
        ("Llama", {"rope_parameters": ROPE}),
        ("Mistral", {"sliding_window": 48}),
        ("Mistral", {"sliding_window": None}),
        ("Qwen2", {}),
        ("Qwen2", {"tie_word_embeddings": True, **SOME_WINDOWS}),
        ("Qwen3", {"rope_parameters": ROPE}),
        ("Qwen3", {"head_dim": 128, "rms_norm_eps": 1e-3, **SOME_WINDOWS}),
    ],
    ids=lambda part: part if isinstance(part, str) else " ".join(part),
)
def test_greedy_tokens_are_the_likeliest(
    cuda_device: Device, family: str, values: dict[str, Any]
) -> None:
    model = tiny(family, **values)
    prompt = ids([[5, 99, 130, 2, 7, 40]])
    with accelerate(model, device=cuda_device) as handle:
        found = model.generate(prompt, max_new_tokens=200, do_sample=False)
        assert found.shape == (1, 206) and len(set(found[0].tolist())) > 20
        check_greedy(model, found, prompt)
        numbers = handle.statistics()
        assert numbers.accelerated == 1 and not numbers.passed_on and numbers.tokens == 200
        assert numbers.decoder is not None and numbers.decoder.launches_replayed > 150
        assert not numbers.decoder.quarantined


@every_family
def test_batches(model: Any, accelerated: Accelerated) -> None:
    prompt, mask = ids(BATCH), ids(MASK)
    free = model.generate(prompt, attention_mask=mask, max_new_tokens=40, do_sample=False)
    assert free.shape == (3, 45)
    check_greedy(model, free, prompt, mask)
    ends = (int(free[0, 12]), int(free[2, 20]))
    options = {"eos_token_id": list(ends), "pad_token_id": 9, "do_sample": False}
    found = model.generate(prompt, attention_mask=mask, max_new_tokens=40, **options)
    check_greedy(model, found, prompt, mask, ends, 9)
    # The same steps until a row ends; then there are fewer rows, and sums in another order.
    until = min(i for i in range(5, 45) for row in range(3) if int(free[row, i]) in ends) + 1
    assert torch.equal(found[:, :until], free[:, :until])
    by_pad = model.generate(prompt, pad_token_id=0, max_new_tokens=10, do_sample=False)
    assert torch.equal(by_pad, free[:, :15])
    holes = ids([[1, 0, 0, 1, 1], [1, 1, 1, 0, 1], [0, 1, 0, 0, 1]])
    found = model.generate(prompt, attention_mask=holes, max_new_tokens=20, do_sample=False)
    check_greedy(model, found, prompt, holes)
    many = model.generate(ids(BATCH * 5), max_new_tokens=10, do_sample=False, pad_token_id=0)
    check_greedy(model, many, ids(BATCH * 5), ids(MASK * 5))
    assert not reasons(accelerated) and accelerated.statistics().decoders == 3


def test_a_prompt_in_pieces_and_inputs_on_the_host(model: Any, accelerated: Accelerated) -> None:
    generator = torch.Generator().manual_seed(2)
    long = torch.randint(0, VOCABULARY, (1, 700), generator=generator)
    found = model.generate(long.cuda(), max_new_tokens=20, do_sample=False)
    check_greedy(model, found, long.cuda())
    short = model.generate(long[:, :9], max_new_tokens=5, do_sample=False)
    assert short.device.type == "cpu"
    check_greedy(model, short.cuda(), long[:, :9].cuda())
    assert not reasons(accelerated)


@every_family
def test_weights_and_inputs_that_are_still_being_written(
    model: Any, accelerated: Accelerated
) -> None:
    """Both are written on torch's stream, behind work that takes long; our stream must wait."""
    prompt = ids([[5, 99, 130, 2]])
    before = model.generate(prompt, max_new_tokens=12, do_sample=False)
    with torch.no_grad():
        for change in (
            lambda: model.lm_head.weight.mul_(-1),
            lambda: model.model.norm.weight.mul_(-1),
            lambda: model.model.layers[1].self_attn.v_proj.weight.mul_(-2),
            *(
                lambda parameter=parameter: parameter.mul_(-2)
                for name, parameter in model.model.layers[1].named_parameters()
                if "bias" in name or "q_norm" in name
            ),
        ):
            torch.cuda._sleep(200_000_000)
            change()
            found = model.generate(prompt, max_new_tokens=12, do_sample=False)
            assert not torch.equal(found, before)
            check_greedy(model, found, prompt)
            before = found
    other = torch.zeros_like(prompt)
    torch.cuda._sleep(200_000_000)
    other.copy_(ids([[700, 3, 3, 8]]))
    check_greedy(
        model, model.generate(other, max_new_tokens=12, do_sample=False), ids([[700, 3, 3, 8]])
    )
    assert not reasons(accelerated)


def test_everything_on_a_stream_of_the_callers(model: Any, accelerated: Accelerated) -> None:
    """Prompts and weights are written there, behind work that takes long, and the answers are read
    there.  A stream of torch's does not wait for the default one, nor that one for it."""
    first, second = [[700, 3, 3, 8]], [[5, 99, 130, 2]]
    default = torch.cuda.current_stream()
    streams = [torch.cuda.Stream(), torch.cuda.Stream(), default]
    sources = [ids(first), ids(second)]
    found = []
    with torch.no_grad():
        for stream, source in zip(streams, sources * 2, strict=False):
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                prompt = torch.zeros_like(source)
                torch.cuda._sleep(400_000_000)
                prompt.copy_(source)
                assert not stream.query(), "the prompt was there before it was asked for"
                answer = model.generate(prompt, max_new_tokens=30, do_sample=False)
                torch.cuda._sleep(400_000_000)
                found.append((source, answer.clone(), copy.deepcopy(model)))
                # The answer's memory is given back here, where it may be written at once.
                del answer
                torch.full_like(source.expand(64, 4), -1)
                model.model.norm.weight.mul_(-1)
                model.model.layers[1].self_attn.v_proj.weight.mul_(-2)
        torch.cuda.synchronize()
        for source, answer, as_it_was in found:
            check_greedy(as_it_was, answer, source)
    assert len({str(answer[0, 4:].tolist()) for _, answer, _ in found}) == 3
    assert not reasons(accelerated)


def test_threads_with_streams_of_their_own(model: Any, accelerated: Accelerated) -> None:
    prompts = [BATCH, [[700, 3, 3, 8]]]  # the larger one first: then there is one decoder
    wanted = [
        model.generate(ids(rows), max_new_tokens=30, do_sample=False).tolist() for rows in prompts
    ]
    wrong: list[object] = []

    def work(rows: list[list[int]], right: list[list[int]]) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(6):
                    prompt = torch.zeros(len(rows), len(rows[0]), dtype=torch.long, device="cuda")
                    torch.cuda._sleep(20_000_000)
                    prompt.copy_(torch.tensor(rows))
                    found = model.generate(prompt, max_new_tokens=30, do_sample=False)
                    if found.tolist() != right:
                        wrong.append(found.tolist())
        except BaseException as error:
            wrong.append(error)

    threads = [
        threading.Thread(target=work, args=pair) for pair in zip(prompts, wanted, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and not reasons(accelerated)
    assert accelerated.statistics().accelerated == 14


def test_modes_and_a_model_that_moves(model: Any, accelerated: Accelerated) -> None:
    prompt = ids([[5, 99, 130, 2]])
    wanted = model.generate(prompt, max_new_tokens=12, do_sample=False)
    for mode in (
        torch.inference_mode,
        torch.enable_grad,
        lambda: torch.autocast("cuda", dtype=torch.float16),
        lambda: torch.device("cuda"),
    ):
        with mode():
            streamer = Streamer()
            found = model.generate(prompt, max_new_tokens=12, do_sample=False, streamer=streamer)
            assert torch.equal(found, wanted) and streamer.seen[-1] == "end"
            told = [token for each in streamer.seen[1:-1] for token in each]
            assert [*streamer.seen[0][0], *told] == wanted[0].tolist()
    assert not reasons(accelerated)
    plain(model, prompt, max_new_tokens=3)  # torch's libraries take memory for themselves
    held = torch.cuda.memory_allocated()
    model.to("cpu")
    model.generate(prompt.cpu(), max_new_tokens=3, do_sample=False)
    model.to("cuda")
    model.generate(prompt, max_new_tokens=3, do_sample=False)
    assert accelerated.statistics().passed_on == {"parameters were replaced or moved": 2}
    accelerated.close()
    assert torch.cuda.memory_allocated() <= held + (1 << 20), "the memory before was kept"
    with accelerate(model, device=accelerated.device) as again:
        assert torch.equal(model.generate(prompt, max_new_tokens=12, do_sample=False), wanted)
        model.half()
        model.generate(prompt, max_new_tokens=3, do_sample=False)
        assert reasons(again) == ["parameters were replaced or moved"]


def test_sampling(model: Any, accelerated: Accelerated) -> None:
    prompt = ids([[5, 99, 130, 2]])
    options = {"max_new_tokens": 30, "do_sample": True, "num_return_sequences": 3}
    torch.manual_seed(1)
    first, second = (model.generate(prompt, **options).tolist() for _ in range(2))
    assert len({tuple(row) for row in (*first, *second)}) == 6
    torch.manual_seed(1)
    assert [model.generate(prompt, **options).tolist() for _ in range(2)] == [first, second]
    best = model.generate(prompt, max_new_tokens=30, do_sample=True, top_k=1, temperature=0.5)
    check_greedy(model, best, prompt)
    # What is drawn, against the distribution of the float32 copy.
    reference = copy.deepcopy(model).float()
    with torch.no_grad():
        scores = reference(prompt).logits[:, -1] / 0.8
    likeliest = scores.topk(6).indices[0].tolist()
    expected = scores.topk(6).values.softmax(-1)[0].tolist()
    drawn = torch.cat(
        [
            model.generate(
                prompt,
                max_new_tokens=1,
                do_sample=True,
                temperature=0.8,
                top_k=6,
                num_return_sequences=64,
            )[:, -1]
            for _ in range(16)
        ]
    ).tolist()
    assert len(drawn) == 1024
    for token, share in zip(likeliest, expected, strict=True):
        spread = (share * (1 - share) * 1024) ** 0.5
        assert abs(drawn.count(token) - share * 1024) <= 5 * spread + 0.05 * 1024
    # The kernels' logits may put another token sixth.
    assert sum(token not in likeliest for token in drawn) < 0.05 * 1024
    assert not reasons(accelerated)


def test_memory_is_shared(cuda_device: Device) -> None:
    """At most a layer's fused weights twice at any time, and afterwards nothing but the norms."""
    model = tiny(hidden_size=1024, intermediate_size=4096, num_hidden_layers=6)
    prompt = ids([[5, 99, 130]])
    with torch.no_grad():
        wanted = model(prompt).logits.clone()
    layer = sum(p.numel() for p in model.model.layers[0].parameters()) * 2
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with accelerate(model, device=cuda_device) as handle:
        numbers = handle.statistics()
        peak = torch.cuda.max_memory_allocated() - before
        assert numbers.peak_extra_bytes < layer
        # The prompt that is tried here needs a little too.
        assert peak <= numbers.peak_extra_bytes + numbers.copied_bytes + (8 << 20), peak
        gc.collect()
        assert torch.cuda.memory_allocated() - before <= numbers.copied_bytes + (8 << 20)
        assert numbers.copied_bytes == 13 * 1024 * 4
        weights = handle.decoder.weights
        addresses = {name: buffer.range for name, buffer in weights.tensors.items()}
        for index, one in enumerate(model.model.layers):
            attention, mlp = one.self_attn, one.mlp
            for fused, parts in {
                "wqkv": (attention.q_proj, attention.k_proj, attention.v_proj),
                "wo": (attention.o_proj,),
                "w_gate_up": (mlp.gate_proj, mlp.up_proj),
                "w_down": (mlp.down_proj,),
            }.items():
                at = addresses[f"layers.{index}.{fused}"].address
                for part in parts:
                    assert part.weight.data_ptr() == at
                    at += part.weight.numel() * 2
        assert addresses["embed"].address == model.model.embed_tokens.weight.data_ptr()
        with torch.no_grad():
            assert torch.allclose(model(prompt).logits, wanted, atol=0.02 * float(wanted.std()))
        check_greedy(model, model.generate(prompt, max_new_tokens=9, do_sample=False), prompt)
    with accelerate(model, device=cuda_device) as again:
        assert again.statistics().peak_extra_bytes == 0, "fused weights were fused again"
        check_greedy(model, model.generate(prompt, max_new_tokens=9, do_sample=False), prompt)
    # At once: a cycle through a model that was copied would wait for the collector.
    assert torch.cuda.memory_allocated() - before <= 8 << 20
    assert "generate" not in vars(model)


def test_the_model_may_end_before_the_decoder(cuda_device: Device) -> None:
    """The decoder keeps the memory that it reads."""
    model = tiny()
    handle = accelerate(model, device=cuda_device)
    wanted = model.generate(ids([[5, 99, 130]]), max_new_tokens=9, do_sample=False)
    for parameter in model.parameters():
        parameter.data = torch.empty(0, dtype=parameter.dtype, device="cuda")
    gc.collect()
    filler = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(8)]
    decoder = handle.decoder
    decoder.reset(0)
    decoder.set_sampling(SamplingOptions())
    tokens = [decoder.prefill([5, 99, 130])]
    tokens += [decoder.decode() for _ in range(8)]
    assert tokens == wanted[0, 3:].tolist()
    del filler
    handle.close()


def test_other_types_are_refused(cuda_device: Device) -> None:
    for dtype in (torch.float16, torch.float32):
        with pytest.raises(UnsupportedModelError, match="bfloat16"):
            accelerate(tiny().to(dtype), device=cuda_device)
    with pytest.raises(UnsupportedModelError, match="multiple of 8"):
        accelerate(tiny(intermediate_size=700), device=cuda_device)
