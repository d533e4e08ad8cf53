"""`model.generate` of transformers: eager, graphed, accelerated, and with torch.compile.

    python -m benchmarks.generate                     the 1B shape with random weights (GPU)
    python -m benchmarks.generate --device host       the tiny shape on the CPU: shows that it runs

Greedy, 128 tokens after a prompt of 16, batches of 1 and 8.  Only `generate` is called, and a
streamer notes when each token arrives.  Ways:

    eager         transformers with default options
    static        over a static cache, eagerly
    graphed       interop.transformers.graph_generate: each step is a replay, over a static cache
    accelerated   interop.transformers.accelerate: our decoder on the model's own weights
    compile       cache_implementation="static", for which transformers compiles the step
    nothing       over a static cache, with an empty step: the time of the loop on the host
    decoder       not through `generate`: the accelerated model's decoder by itself
    step          not through `generate`: the device's time for the step of transformers, from a
                  graph that is replayed without waiting

`token_us`: time for each token after the first one, the median of several calls.  `setup_seconds`:
time until a way can be called.  `first_seconds`: time of the first call, including compilation and
capture.  `equal`: the fraction of tokens before their row's first difference from "static"; in
bfloat16 two kernels may choose differently if two logits are nearly equal.
"""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import ostinato as ost
from benchmarks import common
from ostinato.bench.shapes import SHAPES, traffic
from ostinato.interop.generate_call import CACHE_NAMES
from ostinato.models import SamplingOptions

PROMPT = 16
COLUMNS = (
    "way",
    "batch",
    "token_us",
    "tokens_per_s",
    "first_token_ms",
    "setup_seconds",
    "first_seconds",
    "equal",
)


class Arrivals:
    """A streamer that notes the times at which tokens arrive."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Does nothing, since no tokens are held back."""


class Nothing:
    """A compiled call that computes nothing."""

    def __init__(self, model: Any, batch: int) -> None:
        import torch
        from transformers.modeling_outputs import CausalLMOutputWithPast

        parameter = next(model.parameters())
        self._logits = torch.zeros(
            (batch, 1, model.config.vocab_size), dtype=parameter.dtype, device=parameter.device
        )
        self._made = CausalLMOutputWithPast

    def __call__(self, **inputs: Any) -> Any:
        held = {name: inputs[name] for name in CACHE_NAMES if name in inputs}
        return self._made(logits=self._logits, **held)


def one_call(model: Any, ids: Any, tokens: int, **options: Any) -> tuple[list[float], Any]:
    """Calls `generate`.  Returns each token's time in seconds from the call, and the answer."""
    arrivals = Arrivals()
    began = time.perf_counter()
    answer = model.generate(
        ids, max_new_tokens=tokens, do_sample=False, streamer=arrivals, **options
    )
    return [at - began for at in arrivals.times[1:]], answer[:, ids.shape[1] :].tolist()


def measured(
    name: str, model: Any, ids: Any, tokens: int, calls: int, **options: Any
) -> tuple[dict[str, object], list[list[int]]]:
    """Measures calls of `generate`.  Returns a row, and the tokens."""
    began = time.perf_counter()
    one_call(model, ids, tokens, **options)
    first = time.perf_counter() - began
    one_call(model, ids, tokens, **options)
    per_token, starts = [], []
    answer: list[list[int]] = []
    for _ in range(calls):
        arrivals, answer = one_call(model, ids, tokens, **options)
        assert len(arrivals) == tokens, f"{name}: {len(arrivals)} steps of {tokens}"
        per_token.append((arrivals[-1] - arrivals[0]) / (tokens - 1))
        starts.append(arrivals[0])
    spent = statistics.median(per_token)
    row = {
        "way": name,
        "batch": ids.shape[0],
        "token_us": round(spent * 1e6, 1),
        "tokens_per_s": round(ids.shape[0] / spent, 1),
        "first_token_ms": round(statistics.median(starts) * 1e3, 2),
        "first_seconds": round(first, 2),
        "least_token_us": round(min(per_token) * 1e6, 1),
    }
    return row, answer


def equal(tokens: Sequence[Sequence[int]], reference: Sequence[Sequence[int]]) -> float:
    """Returns the fraction of all tokens that come before the first difference of their row."""
    same = 0
    for one, other in zip(tokens, reference, strict=True):
        pairs = zip(one, other, strict=True)
        same += next((i for i, (a, b) in enumerate(pairs) if a != b), len(one))
    return round(same / sum(map(len, reference)), 3)


def device_step(model: Any, batch: int, tokens: int) -> float:
    """Returns the device's microseconds for a step of transformers in the middle of an answer."""
    from benchmarks.peers.transformers_loop import DecodeLoop

    loop = DecodeLoop(model, batch=batch, length=PROMPT + tokens, how="graph")
    times = []
    for _ in range(3):
        loop.place(PROMPT)
        loop.synchronize()
        began = time.perf_counter()
        loop.run(tokens - 1)
        loop.synchronize()
        times.append((time.perf_counter() - began) / (tokens - 1))
    return min(times) * 1e6


def by_decoder(handle: Any, prompts: list[list[int]], tokens: int, calls: int) -> float:
    """Returns the microseconds for a token of the decoder by itself."""
    decoder, times = handle.decoder, []
    for _ in range(calls):
        for row, prompt in enumerate(prompts):
            decoder.reset(row)
            decoder.set_sampling(SamplingOptions(), row)
            decoder.prefill(prompt, row)
        began = time.perf_counter()
        if len(prompts) == 1:
            chosen = sum(1 for _ in decoder.run(0, count=tokens - 1))
        else:
            chosen = sum(1 for _ in decoder.run_batch(range(len(prompts)), count=tokens - 1))
        times.append((time.perf_counter() - began) / chosen)
    return statistics.median(times) * 1e6


# -------------------------------------------------------------------------------------------- ways


@dataclass
class Opened:
    """A way that is set up: options for `generate`, further fields of the row, its handle."""

    options: dict[str, Any] = field(default_factory=dict)
    details: Callable[[], dict[str, object]] = dict
    handle: Any = None


STATIC = {"cache_implementation": "static"}


@contextmanager
def eager(model: Any, device: ost.Device, batch: int) -> Iterator[Opened]:
    yield Opened()


@contextmanager
def static(model: Any, device: ost.Device, batch: int) -> Iterator[Opened]:
    yield Opened({**STATIC, "disable_compile": True})


@contextmanager
def nothing(model: Any, device: ost.Device, batch: int) -> Iterator[Opened]:
    if model.device.type != "cuda":
        raise RuntimeError("transformers asks for a compiled call only on a GPU")
    call = Nothing(model, batch)
    model.get_compiled_call = lambda config: call
    try:
        yield Opened(STATIC)
    finally:
        del model.get_compiled_call


@contextmanager
def graphed(model: Any, device: ost.Device, batch: int) -> Iterator[Opened]:
    from ostinato.interop.transformers import graph_generate

    def details() -> dict[str, object]:
        numbers = steps.step.statistics()
        found = {"replays": numbers.replays, "captures": numbers.captures, "eager": numbers.eager}
        return {**found, "passed_on": steps.passed_on, "rebound": numbers.rebound}

    with closing(graph_generate(model, device=device)) as steps:
        yield Opened(STATIC, details, steps)


@contextmanager
def accelerated(model: Any, device: ost.Device, batch: int) -> Iterator[Opened]:
    from ostinato.interop.transformers import accelerate

    def details() -> dict[str, object]:
        numbers = handle.statistics()
        assert not numbers.passed_on, numbers.passed_on
        return {
            "peak_extra_bytes": numbers.peak_extra_bytes,
            "copied_bytes": numbers.copied_bytes,
            "shared_bytes": numbers.shared_bytes,
            "plan_bytes": numbers.plan_bytes,
        }

    with closing(accelerate(model, device=device, sequences=batch, max_context=256)) as handle:
        yield Opened({}, details, handle)


@contextmanager
def compiled(model: Any, device: ost.Device, batch: int) -> Iterator[Opened]:
    if model.device.type != "cuda":
        raise RuntimeError("transformers compiles by itself only on a GPU")
    yield Opened(STATIC)


Way: TypeAlias = Callable[[Any, ost.Device, int], AbstractContextManager[Opened]]
WAYS: dict[str, Way] = {
    "eager": eager,
    "static": static,
    "graphed": graphed,
    "accelerated": accelerated,
    "compile": compiled,
    "nothing": nothing,
}


# ----------------------------------------------------------------------------------------- measure


def run_way(
    name: str,
    way: Way,
    model: Any,
    device: ost.Device,
    ids: Any,
    tokens: int,
    calls: int,
) -> tuple[list[dict[str, object]], list[list[int]]]:
    """Measures a way.  Returns its rows, and the tokens that it chose."""
    batch, began = ids.shape[0], time.perf_counter()
    with way(model, device, batch) as opened:
        set_up = round(time.perf_counter() - began, 2)
        row, answer = measured(name, model, ids, tokens, calls, **opened.options)
        rows = [row | {"setup_seconds": set_up} | opened.details()]
        if name == "accelerated":
            spent = by_decoder(opened.handle, ids.tolist(), tokens, calls)
            rate = round(batch * 1e6 / spent, 1)
            rows.append(
                {
                    "way": "decoder",
                    "batch": batch,
                    "token_us": round(spent, 1),
                    "tokens_per_s": rate,
                }
            )
        return rows, answer


def main(arguments: Sequence[str] | None = None) -> int:
    parser = common.options(__doc__)
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--without", nargs="*", default=[], help="ways to leave out")
    chosen = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    try:
        import torch
        from transformers.utils import logging

        from benchmarks.peers import transformers_loop
    except ImportError as error:
        print(f"not measured: {error}; install PyTorch and transformers")
        return 0
    logging.set_verbosity_error()
    on_gpu = chosen.device != "host"
    shape = chosen.shape or ("1B" if on_gpu and not chosen.quick else "tiny")
    config = SHAPES[shape]
    tokens = 16 if chosen.quick or not on_gpu else 128
    calls = 2 if chosen.quick or not on_gpu else 7
    rows: list[dict[str, object]] = []
    skipped = dict.fromkeys(chosen.without, "left out (--without)")
    with ost.open_device(chosen.device) as device:
        model = transformers_loop.random_llama(
            config,
            device="cuda" if on_gpu else "cpu",
            dtype=torch.bfloat16 if on_gpu else torch.float32,
        )
        model.generation_config.eos_token_id = None
        generator = torch.Generator().manual_seed(3)
        references: dict[int, list[list[int]]] = {}
        for batch in (1, 8):
            ids = torch.randint(0, config.vocabulary, (batch, PROMPT), generator=generator)
            ids = ids.to(model.device)
            for name, way in WAYS.items():
                if name in skipped:
                    continue

                label = f"{name}, batch {batch}"
                found = common.optional(
                    skipped, label, partial(run_way, name, way, model, device, ids, tokens, calls)
                )
                if isinstance(found, tuple):
                    more, answer = found
                    if name == "static":
                        references[batch] = answer
                    if name != "nothing" and batch in references:
                        more[0]["equal"] = equal(answer, references[batch])
                    rows += more
                transformers_loop.release()
            if on_gpu and "step" not in skipped:
                spent = common.optional(
                    skipped, f"step, batch {batch}", partial(device_step, model, batch, tokens)
                )
                if isinstance(spent, float):
                    rows.append({"way": "step", "batch": batch, "token_us": round(spent, 1)})
                transformers_loop.release()
        print(common.table(f"generate, {shape}, {tokens} tokens", rows, COLUMNS))
        moved = traffic(config, 2 if on_gpu else 4)
        common.emit(
            f"generate-{shape}",
            device,
            chosen.out,
            ceiling={
                "what": "bytes that a step reads of weights and of keys and values, at the least",
                "weight_bytes": moved.weights,
                "position_bytes": moved.position,
            },
            settings={"shape": shape, "prompt": PROMPT, "tokens": tokens, "calls": calls},
            rows=rows,
            skipped=skipped,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
