"""What the proofs of the decoder share: models, ways of running, and what is right."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ostinato.device import Device
from ostinato.models.config import LlamaConfig, RopeScaling
from ostinato.models.decoder import Decoder
from ostinato.models.stepper import TokenRing
from tests.models import reference_llama
from tests.models.random_models import RandomModel, llama

RELATIVE = {"host": 1e-5, "cuda": 2e-2}
"""The limits of `furthest` between logits and those in float32.  On the host only the order of sums
differs; on a GPU, the KV cache and the inputs of products of several rows are bfloat16."""

SCALED = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=256)
SHAPES = {
    "group 3, head 64, tied": llama(9, 3, 64, inner=520, vocabulary=301, tied_embeddings=True),
    "group 4, head 128, scaled rope": llama(
        4, 1, 128, hidden=328, inner=264, vocabulary=1003, context_length=601, rope_scaling=SCALED
    ),
    "group 8, head 64": llama(
        8, 1, 64, hidden=256, inner=1000, vocabulary=517, context_length=1021, layers=2
    ),
    "group 1, head 128, tied": llama(
        2, 2, 128, inner=712, vocabulary=259, tied_embeddings=True, context_length=509
    ),
}
FAMILIES = {
    "biases, as Qwen2": llama(
        14, 2, 64, hidden=448, inner=520, vocabulary=301, qkv_bias=True, rope_theta=1e6, layers=2
    ),
    "norms of heads, as Qwen3": llama(
        4, 2, 128, hidden=256, inner=264, vocabulary=517, qk_norm=True, rope_theta=1e6, layers=2,
        tied_embeddings=True, context_length=601,
    ),
    "windows, as Mistral": llama(
        8, 2, 64, hidden=256, inner=264, vocabulary=259, layers=2, windows=(128, 128)
    ),
    "all of it": llama(
        2, 1, 80, hidden=96, inner=104, vocabulary=131, context_length=509, qkv_bias=True,
        qk_norm=True, windows=(0, 50, 1), rope_magnitude=1.3,
    ),
}  # fmt: skip
"""The additions of other families to Llama's layers, and all at once, which no published model has.
Positions 127 and 128 are a window's last and the first beyond it."""
SHAPES |= FAMILIES
"""With odd vocabularies and odd contexts (the last position is tested too)."""
FIRST = next(iter(SHAPES))

WIDE = {
    "as SmolLM2-135M": llama(
        9, 3, 64, inner=1536, vocabulary=49152, tied_embeddings=True, rope_theta=1e5
    ),
    "as SmolLM2-360M": llama(15, 5, 64, inner=2560, vocabulary=49152, tied_embeddings=True),
    "as Llama-3.2-1B": llama(
        32, 8, 64, inner=8192, vocabulary=128256, tied_embeddings=True, layers=2, rope_theta=5e5
    ),
    "as Qwen2.5-0.5B": llama(
        14, 2, 64, inner=4864, vocabulary=32003, tied_embeddings=True, layers=2, rope_theta=1e6,
        qkv_bias=True,
    ),
    "as Qwen3-0.6B": llama(
        16, 8, 128, hidden=1024, inner=3072, vocabulary=32003, tied_embeddings=True, layers=2,
        rope_theta=1e6, qk_norm=True,
    ),
    "as Llama-3.1-8B": llama(32, 8, 128, inner=14336, vocabulary=128256, layers=1, rope_theta=5e5),
}  # fmt: skip
"""The widths of real models, a few layers deep: what is tuned for a shape is tuned for these."""

PER_LAUNCH = 4
"""Tokens of a launch with a loop in it; what is left over of a count goes one by one."""


@dataclass(frozen=True)
class Way:
    """How single tokens are decoded: the decoder's options, and those of `run` (None: `decode`)."""

    options: dict[str, Any]
    run: dict[str, int] | None = None

    def decode(self, decoder: Decoder, count: int) -> None:
        if self.run is None:
            for _ in range(count):
                decoder.decode()
        else:
            assert len(list(decoder.run(count=count, **self.run))) == count

    def decode_batch(self, decoder: Decoder, sequences: Sequence[int], count: int) -> None:
        if self.run is None:
            for _ in range(count):
                decoder.decode_batch(sequences)
        else:
            assert len(list(decoder.run_batch(sequences, count=count, **self.run))) == count

    def check(self, decoder: Decoder) -> None:
        """Asserts that the decoder went this way."""
        numbers = decoder.statistics()
        assert not numbers.quarantined
        assert (numbers.launches_replayed > 0) == (self.options.get("graphs", True))
        loops = sum(step.replays for name, step in numbers.steps.items() if " x " in name)
        assert (loops > 0) == ("tokens_per_launch" in (self.run or {}))


WAYS = {
    "eager": Way({"graphs": False}),
    "captured": Way({}),
    "recorded": Way({"build": "record"}),
    "captured, launched ahead": Way({}, {"ahead": 2}),
    "captured, WHILE": Way({}, {"tokens_per_launch": PER_LAUNCH}),
    "recorded, WHILE": Way({"build": "record"}, {"tokens_per_launch": PER_LAUNCH}),
}


MODES: dict[str, dict[str, Any]] = {
    "captured": {},
    "captured at once": {"warmups": 0},
    "recorded": {"build": "record"},
    "checked": {"verify": "first"},
    "checked always": {"verify": 1},
    "host sets rows": {"device_state": False},
}
"""Options of a decoder that change how its steps run, and no answer."""


def answer(decoder: Decoder, prompt: Sequence[int], count: int) -> list[tuple[int, bytes]]:
    """Tokens after a prompt, step by step, each with the logits that it was chosen from."""
    decoder.reset()
    found = []
    for number in range(count):
        token = decoder.prefill(prompt) if number == 0 else decoder.decode()
        found.append((token, decoder.logits().tobytes()))
    return found


def check_ways(
    opened: Callable[..., Decoder], run: Callable[[Decoder], object], *ways: dict[str, Any]
) -> list[int]:
    """`run` gives the same bits eagerly, and in each way first eagerly, then captured or recorded,
    then replayed.  `opened`: makes the decoder, from the options of a way.  Returns the number of
    graphs of each way."""
    graphs = []
    with opened(graphs=False) as eager:
        wanted = run(eager)
        assert eager.statistics().launches_replayed == 0
    for options in ways:
        with opened(**options) as decoder:
            for _ in range(3):
                assert run(decoder) == wanted, options
            numbers = decoder.statistics()
            assert not numbers.quarantined and not numbers.one_by_one, options
            assert (numbers.launches_replayed > 0) == options.get("graphs", True), options
            if "verify" in options:
                assert sum(step.verified for step in numbers.steps.values()) >= 3
            graphs.append(numbers.graphs_captured)
    return graphs


@contextmanager
def interrupted(at: int) -> Iterator[None]:
    """Raises KeyboardInterrupt in place of the block's wait number `at` for tokens."""
    wait, calls = TokenRing.wait, 0

    def interrupt(*arguments: Any, **options: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            raise KeyboardInterrupt
        wait(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(TokenRing, "wait", interrupt)
        yield


def on_both(name: str, host: Iterable[object], cuda: Iterable[object]) -> pytest.MarkDecorator:
    """Cases of a test that takes `machine`: fewer on the host, which is slower and has one way."""
    cases = [pytest.param("host", case, id=f"host-{case}") for case in host]
    marks = pytest.mark.gpu
    cases += [pytest.param("cuda", case, id=f"cuda-{case}", marks=marks) for case in cuda]
    return pytest.mark.parametrize(("machine", name), cases, indirect=["machine"])


@functools.lru_cache(1)  # the widest takes 5 GB
def values_of(config: LlamaConfig) -> dict[str, npt.NDArray[np.float32]]:
    return RandomModel(config).values()


def kind(device: Device) -> str:
    return device.name.partition(":")[0]


def open_decoder(device: Device, config: LlamaConfig, **options: Any) -> Decoder:
    options = {"max_context": config.context_length, "stop_tokens": (), **options}
    return Decoder(device, RandomModel(config).checkpoint(), **options)


def difference(ours: npt.NDArray[Any], theirs: npt.NDArray[Any]) -> float:
    """Relative to the norm."""
    wrong = ours.astype(np.float64) - theirs
    return float(np.linalg.norm(wrong) / np.linalg.norm(theirs))


def furthest(ours: npt.NDArray[Any], theirs: npt.NDArray[Any]) -> float:
    """The larger of `difference` and the largest difference relative to the largest logit."""
    largest = np.abs(ours.astype(np.float64) - theirs).max() / np.abs(theirs).max()
    return max(difference(ours, theirs), float(largest))


@functools.lru_cache(8)
def expected(config: LlamaConfig, tokens: tuple[int, ...], after: tuple[int, ...]) -> Any:
    return reference_llama.logits(config, values_of(config), tokens, after=after, dtype=np.float32)
