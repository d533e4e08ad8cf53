"""Which values are whole numbers, numbers and tokens, in all calls of models that take them."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ostinato.device import Device, open_device
from ostinato.errors import InputError
from ostinato.models.arguments import number, quoted, token_ids, whole
from ostinato.models.decoder import Decoder
from ostinato.models.generate import TextGenerator
from ostinato.models.sampling import SamplingOptions, sample, uniform


class Five(enum.IntEnum):
    FIVE = 5


FIVES = [5, np.int64(5), np.uint8(5), np.array(5), Five.FIVE]
NOT_WHOLE = [True, np.True_, 5.0, np.float32(5), 5.5, "5", b"5", None, [5], np.array([5, 5]), 5j]


@pytest.mark.parametrize("value", FIVES, ids=repr)
def test_whole_numbers_become_plain_ints(value: Any) -> None:
    assert type(whole(value, "x")) is int
    assert token_ids([value], 6, "x") == [5]
    assert type(token_ids([value], 6, "x")[0]) is int


@pytest.mark.parametrize(
    "value", [5, 5.0, np.float32(5), np.float16(5), np.int8(5), Fraction(5), Five.FIVE], ids=repr
)
def test_real_numbers_become_plain_floats(value: Any) -> None:
    assert number(value, "x") == 5.0
    assert type(number(value, "x")) is float


@pytest.mark.parametrize("value", NOT_WHOLE, ids=repr)
def test_what_is_no_whole_number_is_refused(value: Any) -> None:
    with pytest.raises(InputError, match=r"^x is .*, must be a whole number"):
        whole(value, "x")
    with pytest.raises(InputError, match=r"^x\[1\] is .*, must be a token id"):
        token_ids([0, value], 6, "x")


def test_bounds() -> None:
    for least, most, words in ((6, None, "6 or more"), (None, 4, "at most 4"), (6, 9, "6 to 9")):
        with pytest.raises(InputError, match=f"x is 5, must be {words}"):
            whole(5, "x", least, most)


@pytest.mark.parametrize("value", [math.nan, math.inf, 10**400, True, "1", None, 1j], ids=quoted)
def test_what_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(InputError, match=r"x is .*, must be a finite number"):
        number(value, "x")


@pytest.mark.parametrize("tokens", [5, None, "abc", b"abc", bytearray(b"abc")], ids=repr)
def test_what_is_no_sequence_of_tokens_is_refused(tokens: Any) -> None:
    with pytest.raises(InputError, match="must be a sequence of token ids"):
        token_ids(tokens, 280, "x")


@pytest.mark.parametrize(
    "value",
    ["x" * 10**7, ["x" * 10**7] * 9, {"a": [[["x" * 999] * 99] * 99] * 99}, 10**9999, "\ud800"],
    ids=("text", "list", "nested", "number", "surrogate"),
)
def test_quotes_are_short(value: object) -> None:
    assert len(quoted(value)) <= 160
    quoted(value).encode()


@pytest.fixture(scope="module")
def opened(tiny: Path) -> Iterator[TextGenerator]:
    sizes: Any = {"sequences": np.int64(2), "max_context": np.int32(64)}
    with open_device("host") as device, TextGenerator(device, tiny, **sizes) as made:
        yield made


@pytest.fixture
def generator(opened: TextGenerator) -> TextGenerator:
    """A reset generator without an end token."""
    opened.decoder.reset()
    opened.decoder.set_stop_tokens(())
    for sequence in range(2):
        opened.decoder.set_sampling(SamplingOptions(), sequence)
    return opened


def test_numpy_tokens_are_not_dropped(generator: TextGenerator) -> None:
    """They were: [1, np.int64(5), 7] became [1, 7]."""
    plain = generator.generate([1, 5, 7], max_tokens=np.int64(3))
    list(plain)
    for prompt in ([1, np.int64(5), 7], np.array([1, 5, 7]), (1, np.uint16(5), Five.FIVE + 2)):
        mixed = generator.generate(prompt, max_tokens=3, tokens_per_launch=np.int64(1))
        list(mixed)
        assert mixed.summary().prompt_tokens == 3
        assert mixed.token_ids == plain.token_ids


@pytest.mark.parametrize("wrong", [1.0, True, "5", None, 280, -1], ids=repr)
def test_what_is_no_token_of_a_prompt_is_said(generator: TextGenerator, wrong: Any) -> None:
    with pytest.raises(InputError, match=r"prompt\[1\]"):
        generator.generate([1, wrong, 7])


@pytest.mark.parametrize("prompt", [5, None, b"abc", {"role": "user", "content": "x"}], ids=repr)
def test_what_is_no_prompt_is_said(generator: TextGenerator, prompt: Any) -> None:
    with pytest.raises(InputError, match="must be text, messages or token ids"):
        generator.generate(prompt)


@pytest.mark.parametrize("prompt", [5, None, b"abc", {"role": "user"}, [5], ["abc"]], ids=repr)
def test_what_cannot_be_encoded_is_said(generator: TextGenerator, prompt: Any) -> None:
    with pytest.raises(InputError, match=r"^(prompt is|message 0 is) "):
        generator.encode(prompt)


def test_a_system_message_is_text(generator: TextGenerator) -> None:
    with pytest.raises(InputError, match="system is 5, must be text"):
        generator.encode("abc", system=5)  # type: ignore[arg-type]


# Every public call that takes a whole number, with that number.
Call = Callable[[TextGenerator, Any], object]
CALLS: dict[str, Call] = {
    "generate max_tokens": lambda g, n: g.generate([1], max_tokens=n),
    "generate tokens_per_launch": lambda g, n: g.generate([1], tokens_per_launch=n),
    "set_sampling sequence": lambda g, n: g.decoder.set_sampling(SamplingOptions(), n),
    "set_sampling limit": lambda g, n: g.decoder.set_sampling(SamplingOptions(), limit=n),
    "set_stop_tokens": lambda g, n: g.decoder.set_stop_tokens([n]),
    "tokens": lambda g, n: g.decoder.tokens(n),
    "stopped": lambda g, n: g.decoder.stopped(n),
    "reset": lambda g, n: g.decoder.reset(n),
    "truncate count": lambda g, n: g.decoder.truncate(n),
    "truncate sequence": lambda g, n: g.decoder.truncate(1, n),
    "prefill token": lambda g, n: g.decoder.prefill([n]),
    "prefill sequence": lambda g, n: g.decoder.prefill([3], n),
    "decode": lambda g, n: g.decoder.decode(n),
    "decode_batch": lambda g, n: g.decoder.decode_batch([n]),
    "run sequence": lambda g, n: g.decoder.run(n),
    "run count": lambda g, n: g.decoder.run(count=n),
    "run tokens_per_launch": lambda g, n: g.decoder.run(tokens_per_launch=n),
    "run ahead": lambda g, n: g.decoder.run(ahead=n),
    "run_batch sequences": lambda g, n: g.decoder.run_batch([0, n] if n == 1 else [n]),
    "logits": lambda g, n: g.decoder.logits(n),
    "graph": lambda g, n: g.decoder.graph(n),
    "decode ids": lambda g, n: g.tokenizer.decode([n]),
    "push": lambda g, n: g.tokenizer.stream_decoder().push(n),
    "token_bytes": lambda g, n: g.tokenizer.token_bytes(n),
    "token_text": lambda g, n: g.tokenizer.token_text(n),
    "top_k": lambda g, n: SamplingOptions(top_k=n),
    "seed": lambda g, n: SamplingOptions(seed=n),
    "sample position": lambda g, n: sample(np.zeros(3, np.float32), SamplingOptions(1.0), n),
    "uniform": lambda g, n: uniform(1, n),
}


@pytest.mark.parametrize("what", CALLS)
def test_every_whole_number_may_be_numpys_and_nothing_else(
    generator: TextGenerator, what: str
) -> None:
    generator.decoder.prefill([3, 4, 5])
    generator.decoder.prefill([3, 4, 5], 1)
    generator.tokenizer.decode([1])  # 1.0 and True must not find what is kept for 1
    for wrong in (1.0, True, np.float32(1), "1", [1]):
        with pytest.raises(InputError):
            CALLS[what](generator, wrong)
    CALLS[what](generator, np.int64(1))


OPTIONS = ["sequences", "max_rows", "max_context", "library_rows", "warmups", "threads"]


@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_a_decoder(host_device: Device, tiny: Path, option: str) -> None:
    for wrong in (1.0, True, "1", 1.5):
        with pytest.raises(InputError, match=option):
            Decoder(host_device, tiny, **{option: wrong})
    with Decoder(host_device, tiny, **{option: np.int64(20)}) as decoder:
        decoder.prefill([1, 2])


def test_a_wrong_stop_token_is_said_before_anything_is_loaded(
    host_device: Device, tiny: Path
) -> None:
    free, _ = host_device.memory_info()
    with pytest.raises(InputError, match=r"stop_tokens\[1\]"):
        Decoder(host_device, tiny, stop_tokens=[1, 2.5])  # type: ignore[list-item]
    assert host_device.memory_info()[0] == free


def test_numpys_numbers_draw_the_same_random_ones() -> None:
    """NumPy's integers wrap around where Python's grow."""
    for seed, position in ((5, 7), ((1 << 63) + 5, (1 << 31) + 3)):
        expected = uniform(seed, position)
        assert uniform(np.uint64(seed), np.int64(position)) == expected
        logits = np.random.default_rng(0).standard_normal(99, np.float32)
        plain = sample(logits, SamplingOptions(1.0, top_k=50, seed=seed), position)
        options = SamplingOptions(np.float32(1.0), top_k=np.int8(50), seed=np.uint64(seed))
        assert sample(logits, options, np.int64(position)) == plain


@pytest.mark.parametrize("name", ["temperature", "top_p"])
def test_sampling_numbers(name: str) -> None:
    for wrong in ("0.5", True, None, math.nan, [0.5]):
        with pytest.raises(InputError, match=name):
            SamplingOptions(**{name: wrong})
    assert getattr(SamplingOptions(**{name: np.float32(0.5)}), name) == 0.5
