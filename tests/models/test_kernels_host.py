"""The host kernels, NumPy's and the compiled ones on every instruction set of this processor, each
against plain float64, and what they must not touch."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from ostinato.driver.host.kernel import HostKernel
from ostinato.models.config import RopeScaling, rope_inverse_frequencies
from ostinato.models.host import packed_kernels as kernels_packed
from ostinato.models.host.kernels import HOST_KERNELS
from ostinato.models.packed import PackedMatrix, PackedPart
from ostinato.models.plan import mask_words, rope_table
from ostinato.models.program import (
    ACTIVE,
    FROM_STATE,
    LOGPROBS,
    MOST_BIASES,
    OPTIONS,
    SAMPLE,
    BufferArgument,
    decode_program,
    describe,
    loop_call,
)
from ostinato.models.sampling import SamplingOptions, sample, uniform
from tests.models import reference_llama as reference
from tests.models.model_files import packed_matrix
from tests.models.random_models import llama

NAN = np.float32(np.nan)
F32 = {"rtol": 2e-5, "atol": 2e-5}


class Launch:
    """The launch that a kernel is given: it may set conditions."""

    def __init__(self) -> None:
        self.conditions: dict[int, int] = {}

    def set_conditional(self, handle: int, value: int) -> None:
        self.conditions[handle] = value


def run(
    kernels: Mapping[str, HostKernel], name: str, launch: Launch | None = None, **arguments: Any
) -> None:
    """Calls a kernel as the driver does: flat views, read-only where the signature says so.  A
    compiled kernel gets a matrix of float32 as a packed one."""
    kernel = kernels[name]
    values = []
    for parameter in kernel.signature.parameters:
        value = arguments.pop(parameter.name)
        if parameter.name in ("weight", "table") and parameter.dtype != value.dtype:
            value = in_parts(value)
        if parameter.pointer and value is not None:
            value = value.reshape(-1).view(parameter.dtype)
            if not any(p.name == parameter.name and p.writable for p in kernel.pointers):
                value = value.view()
                value.setflags(write=False)
        values.append(value)
    assert not arguments, f"{name} takes no {sorted(arguments)}"
    kernel.function(launch, *values)


def in_parts(matrix: np.ndarray) -> np.ndarray:
    """The packed matrix, in up to three parts of different sizes."""
    matrix = np.atleast_2d(matrix)
    rows, columns = matrix.shape
    cuts = sorted({0, rows // 5, rows // 2, rows})
    layout = PackedMatrix(
        columns, tuple(PackedPart("F32", end - start) for start, end in pairwise(cuts))
    )
    return packed_matrix(layout, [matrix[a:b].view(np.uint8) for a, b in pairwise(cuts)])


@pytest.fixture(
    params=["numpy", *(kernels_packed._extension.INSTRUCTIONS if kernels_packed.compiled() else ())]
)
def kernels(request: pytest.FixtureRequest) -> Mapping[str, HostKernel]:
    if request.param == "numpy":
        return HOST_KERNELS
    return kernels_packed.kernels_of(2, request.param)


def live_rows(*rows: tuple[int, int, int, int]) -> np.ndarray:
    return np.array(rows, np.int32)


def random(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


config_of = partial(llama, layers=1, inner=33, vocabulary=37, context_length=64)


SHAPES = [(1, 1, 2), (3, 1, 6), (4, 2, 16), (9, 3, 64), (8, 1, 10), (8, 8, 4)]


# ------------------------------------------------------------------------------------------ program


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("added", [{}, {"qkv_bias": True, "qk_norm": True, "windows": (5,)}])
def test_program_matches_the_kernels(sampled: bool, added: dict[str, Any]) -> None:
    program = decode_program(config_of(4, 2, 16, **added), sampled=sampled)
    for call in program:
        names = [name for name, _ in call.arguments]
        assert names == [p.name for p in HOST_KERNELS[call.kernel].signature.parameters]
    text = describe(program)
    assert len(text.splitlines()) == len(program) == (8 if sampled else 6) + bool(added)
    assert "cache[0]" in text
    assert str(BufferArgument("wo", 3)) == "wo[3]"


def test_five_launches_a_layer() -> None:
    assert len(decode_program(replace(config_of(4, 2, 16), layers=7))) == 1 + 5 * 7 + 2


# -------------------------------------------------------------------------------------------- embed


def test_embed_resolves_rows_and_refuses_what_lies_outside(
    kernels: Mapping[str, HostKernel],
) -> None:
    table, x = random((11, 5)), np.full((8, 5), NAN)
    state = np.array([(7, 3, 4, 0), (8, 9, 10, 1)], np.int32)
    on = ACTIVE | SAMPLE
    rows = live_rows(
        (4, 2, 0, on),
        (0, 0, 0, on | FROM_STATE),  # token 7 at 3
        (0, 0, 1, on | FROM_STATE),  # has stopped
        (11, 0, 0, on),  # no such token
        (1, 20, 0, on),  # no such position
        (1, 0, 2, on),  # no such sequence
        (1, -1, 0, on),
        (1, 0, 0, SAMPLE),  # padding
    )
    live, history = np.full((8, 4), 77, np.int32), np.full((2, 20), -7, np.int32)
    run(
        kernels, "embed", rows=rows, state=state, live=live, table=table, x=x, history=history,
        row_count=8, hidden=5, vocabulary=11, sequences=2, context=20,
    )  # fmt: skip
    assert live[0].tolist() == [4, 2, 0, on]
    assert live[1].tolist() == [7, 3, 0, on | FROM_STATE]
    assert not (live[2:, 3] & ACTIVE).any()
    np.testing.assert_array_equal(x[:2], table[[4, 7]])
    assert not x[2:].any()
    assert (history[0, 2], history[0, 3]) == (4, 7)
    assert np.count_nonzero(history == -7) == 38, "nothing else is noted"


# ---------------------------------------------------------------------------------------- attention


def qkv_case(heads: int, kv_heads: int, size: int, count: int, **more: Any) -> dict[str, Any]:
    config = config_of(heads, kv_heads, size, **more)
    width = (heads + 2 * kv_heads) * size
    return {
        "config": config,
        "x": random((count, config.hidden), 1),
        "norm": random((config.hidden,), 2),
        "weight": random((width, config.hidden), 3) / np.float32(np.sqrt(config.hidden)),
        "bias": random((width,), 8) if config.qkv_bias else None,
        "rope": rope_table(config, 64),
        "cache": np.full((2, 2, kv_heads, 64, size), NAN),
        "q": np.full((count, heads, size), NAN),
        "workspace": np.full((count, width + config.hidden), NAN),
    }


def expected_qkv(case: dict[str, Any], positions: np.ndarray) -> tuple[np.ndarray, ...]:
    config = case["config"]
    h = reference.rms_norm(case["x"], case["norm"], config.norm_epsilon)
    all_heads = h @ case["weight"].T.astype(np.float64)
    if config.qkv_bias:
        all_heads += case["bias"]
    all_heads = all_heads.reshape(len(h), -1, config.head_size)
    q, k, v = np.split(all_heads, [config.heads, config.heads + config.kv_heads], axis=1)
    if config.qk_norm:
        q = reference.rms_norm(q, case["q_norm"], config.norm_epsilon)
        k = reference.rms_norm(k, case["k_norm"], config.norm_epsilon)
    inverse = rope_inverse_frequencies(config)
    return reference.rotate(q, positions, inverse), reference.rotate(k, positions, inverse), v


@pytest.mark.parametrize(("heads", "kv_heads", "size"), SHAPES)
@pytest.mark.parametrize(
    "kind", ["plain", "scaled rope", "bias", "bias, apart", "norms", "bias and norms"]
)
def test_norm_qkv_rope(
    kernels: Mapping[str, HostKernel], heads: int, kv_heads: int, size: int, kind: str
) -> None:
    """`apart`: in two launches, as with norms of heads."""
    case = qkv_case(
        heads, kv_heads, size, 7, rope_theta=50.0, qkv_bias="bias" in kind, qk_norm="norms" in kind,
        rope_scaling=RopeScaling(8.0, 1.0, 4.0, 16) if kind == "scaled rope" else None,
    )  # fmt: skip
    config = case.pop("config")
    # A piece of sequence 1's prompt, padding, and single tokens of both sequences.
    rows = [(0, 30, 1), (0, 31, 1), (0, 32, 1), None, (0, 63, 0), (0, 2, 1), (0, 5, 1)]
    live = live_rows(*((0, 3, 0, 0) if r is None else (*r, ACTIVE) for r in rows))
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_size": size}
    product = {"live": live, "row_count": 7, "epsilon": config.norm_epsilon, **sizes}
    if config.qk_norm or "apart" in kind:
        qkv = np.full((7, (heads + 2 * kv_heads) * size), NAN)
        names = ("x", "norm", "weight", "workspace")
        run(
            kernels, "norm_qkv", **product, qkv=qkv, hidden=config.hidden,
            **{name: case[name] for name in names},
        )  # fmt: skip
        norms = [random((size,), seed) if config.qk_norm else None for seed in (9, 10)]
        case |= {"q_norm": norms[0], "k_norm": norms[1]}
        names = ("bias", "q_norm", "k_norm", "rope", "cache", "q")
        kept = qkv.copy()
        run(
            kernels, "norm_rope", **product, qkv=qkv, sequences=2, context=64,
            **{name: case[name] for name in names},
        )  # fmt: skip
        np.testing.assert_array_equal(qkv, kept)
    else:
        sizes = {"hidden": config.hidden, "sequences": 2, "context": 64}
        run(kernels, "norm_qkv_rope", **product, **case, **sizes)
    q, k, v = expected_qkv({**case, "config": config}, live[:, 1])
    written = np.zeros((2, 64), bool)
    for i, row in enumerate(rows):
        if row is None:
            continue
        _, position, sequence = row
        written[sequence, position] = True
        np.testing.assert_allclose(case["q"][i], q[i], **F32)
        np.testing.assert_allclose(case["cache"][0, sequence, :, position], k[i], **F32)
        np.testing.assert_allclose(case["cache"][1, sequence, :, position], v[i], **F32)
    untouched = case["cache"].transpose(1, 3, 0, 2, 4)[~written]
    assert np.isnan(untouched).all(), "only the rows' own positions are written"


@pytest.mark.parametrize(("heads", "kv_heads", "size"), SHAPES)
@pytest.mark.parametrize(("count", "first"), [(1, 0), (1, 63), (1, 17), (5, 0), (33, 31)])
@pytest.mark.parametrize("window", [0, 1, 17, 18, 19, 64, 1000])
def test_attention(
    kernels: Mapping[str, HostKernel], heads: int, kv_heads: int, size: int, count: int, first: int,
    window: int,
) -> None:  # fmt: skip
    cache = np.full((2, 3, kv_heads, 64, size), NAN)  # what was not written must not be read
    end = first + count
    cache[:, 1, :, :end] = random((2, kv_heads, end, size), 4)
    seen = max(0, first + 1 - window) if window else 0
    cache[:, 1, :, :seen] = NAN
    q, out = random((count + 1, heads, size), 5), np.zeros((count + 1, heads, size), np.float32)
    live = live_rows(*((0, first + i, 1, ACTIVE) for i in range(count)), (0, 9, 2, 0))
    run(
        kernels, "attention", live=live, q=q, cache=cache, attended=out, workspace=out[:0].copy(),
        row_count=count + 1, heads=heads, kv_heads=kv_heads, head_size=size, sequences=3,
        context=64, window=window, scale=1 / np.sqrt(size),
    )  # fmt: skip
    cache[:, 1, :, :seen] = 0
    k, v = cache[0, 1, :, :end].swapaxes(0, 1), cache[1, 1, :, :end].swapaxes(0, 1)
    wanted = reference.attend(q[:count], k, v, first, window=window)
    np.testing.assert_allclose(out[:count], wanted, **F32)
    assert not out[count:].any()


def test_attention_of_a_long_piece_is_cut_into_products(monkeypatch: pytest.MonkeyPatch) -> None:
    from ostinato.models.host import kernels as kernels_host

    monkeypatch.setattr(kernels_host, "_CHUNK", 100)
    test_attention(HOST_KERNELS, 3, 1, 6, 33, 31, 0)
    test_attention(HOST_KERNELS, 3, 1, 6, 33, 31, 5)


def test_attention_of_a_batch_keeps_sequences_apart(kernels: Mapping[str, HostKernel]) -> None:
    cache = random((2, 2, 2, 16, 4), 6)
    q, out = random((3, 4, 4), 7), np.zeros((3, 4, 4), np.float32)
    # Sequence 0 at 3, sequence 1 at 4 (rising, but another sequence), sequence 1 at 9 (not the next
    # position).
    live = live_rows((0, 3, 0, ACTIVE), (0, 4, 1, ACTIVE), (0, 9, 1, ACTIVE))
    run(
        kernels, "attention", live=live, q=q, cache=cache, attended=out, workspace=out, row_count=3,
        heads=4, kv_heads=2, head_size=4, sequences=2, context=16, window=0, scale=0.5,
    )  # fmt: skip
    for i, (_, position, sequence, _) in enumerate(live.tolist()):
        k, v = cache[:, sequence, :, : position + 1].swapaxes(1, 2)
        np.testing.assert_allclose(
            out[i : i + 1], reference.attend(q[i : i + 1], k, v, position), **F32
        )


# ------------------------------------------------------------------------------------- the products


@pytest.mark.parametrize("name", ["output_residual", "down_residual"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_products_into_the_residual(
    kernels: Mapping[str, HostKernel], name: str, count: int
) -> None:
    hidden, width = 13, 21
    source, weight, x = random((count + 1, width)), random((hidden, width), 1), random((6, hidden))
    expected = x[:count] + source[:count].astype(np.float64) @ weight.T.astype(np.float64)
    before = x.copy()
    live = live_rows(*((0, i, 0, ACTIVE) for i in range(count)), (0, 0, 0, 0))
    run(
        kernels, name, live=live, **{"attended" if name == "output_residual" else "inner": source},
        weight=weight, x=x, workspace=np.full((6, hidden), NAN), row_count=count + 1,
        hidden=hidden, width=width,
    )  # fmt: skip
    np.testing.assert_allclose(x[:count], expected, **F32)
    np.testing.assert_array_equal(x[count:], before[count:])


@pytest.mark.parametrize("count", [1, 2, 70])
def test_norm_gate_up(kernels: Mapping[str, HostKernel], count: int) -> None:
    hidden, width = 13, 21
    x, norm, weight = random((count, hidden)), random((hidden,), 1), random((2 * width, hidden), 2)
    weight[:3] *= 400  # gates far below -88: no overflow may show
    inner = np.full((count, width), NAN)
    run(
        kernels, "norm_gate_up", live=live_rows(*((0, i, 0, ACTIVE) for i in range(count))), x=x,
        norm=norm, weight=weight, inner=inner, workspace=np.full((count, 2 * width + hidden), NAN),
        row_count=count, hidden=hidden, width=width, epsilon=1e-5,
    )  # fmt: skip
    h = reference.rms_norm(x, norm, 1e-5)
    gate, up = np.split(h @ weight.T.astype(np.float64), 2, axis=1)
    np.testing.assert_allclose(inner, reference.silu(gate) * up, rtol=1e-4, atol=1e-4)


def head_case(
    kernels: Mapping[str, HostKernel], live: np.ndarray, sequences: int
) -> tuple[np.ndarray, np.ndarray]:
    hidden, vocabulary = 12, 37
    x, norm = random((len(live), hidden)), random((hidden,), 1)
    weight, logits = random((vocabulary, hidden), 2), np.full((sequences, vocabulary), NAN)
    run(
        kernels, "head", live=live, x=x, norm=norm, weight=weight, logits=logits,
        workspace=logits.copy(), row_count=len(live), hidden=hidden, vocabulary=vocabulary,
        epsilon=1e-5,
    )  # fmt: skip
    return logits, reference.rms_norm(x, norm, 1e-5) @ weight.T.astype(np.float64)


@pytest.mark.parametrize(
    "sequences_of_rows",
    [[0], [2], [0, 1, 2], [1, 2], [2, 0], [0, 2], [3, 1, 5, 4, 0], list(range(6))],
)
def test_head_writes_each_sequences_logits_in_place(
    kernels: Mapping[str, HostKernel], sequences_of_rows: list[int]
) -> None:
    rows = [
        (0, 5, 1, ACTIVE),
        *((0, 1, sequence, ACTIVE | SAMPLE) for sequence in sequences_of_rows),
    ]
    logits, expected = head_case(kernels, live_rows(*rows, (0, 0, 1, SAMPLE)), 6)
    for row, sequence in enumerate(sequences_of_rows, 1):
        np.testing.assert_allclose(logits[sequence], expected[row], **F32)
    others = [sequence for sequence in range(6) if sequence not in sequences_of_rows]
    assert np.isnan(logits[others]).all()


@pytest.mark.parametrize(
    "name",
    [
        *("norm_qkv_rope", "norm_qkv", "norm_rope", "attention", "output_residual"),
        *("norm_gate_up", "down_residual", "head", "sample"),
    ],
)
def test_a_step_of_padding_alone_does_nothing(kernels: Mapping[str, HostKernel], name: str) -> None:
    arguments: dict[str, Any] = {}
    for parameter in HOST_KERNELS[name].signature.parameters:
        filled = random((6144,)) if parameter.dtype == np.float32 else np.full(6144, 7, np.int64)
        arguments[parameter.name] = filled if parameter.pointer else 2
    arguments["live"] = live_rows((1, 1, 1, SAMPLE), (1, 1, 1, 0))
    before = copy.deepcopy(arguments)
    run(kernels, name, **arguments)
    for given, value in arguments.items():
        np.testing.assert_array_equal(value, before[given], err_msg=given)


# ------------------------------------------------------------------------------ sampling, advancing


def options_of(*rows: tuple[float, float, int, int, int], more: Any = (0.0, 1.0)) -> np.ndarray:
    """`more`: min_p, repetition penalty and what follows of all rows."""
    more = (*more, *(0,) * (7 - len(more)))
    return np.array([(*row, *more) for row in rows], OPTIONS)


def sampled(
    live: np.ndarray, logits: np.ndarray, options: np.ndarray, **given: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of all sequences, 55 where none was chosen; and their rings of 6."""
    sequences, vocabulary = logits.shape
    values = {
        "stops": np.full(16, -1, np.int32),
        "state": np.full((sequences, 4), 55, np.int32),
        "ring": np.full((sequences, 6, 2), 55, np.int32),
        "history": np.zeros((sequences, 30), np.int32),
        "kept": np.zeros((sequences, 30), np.uint32),
        "biases": np.zeros((sequences, MOST_BIASES, 2), np.int32),
        "allowed": np.zeros((sequences, mask_words(vocabulary)), np.uint32),
        "masks": np.zeros((sequences, mask_words(vocabulary)), np.uint32),
        "logprobs": np.zeros((sequences, 6, LOGPROBS.itemsize // 4), np.int32),
        "context": 30,
        **given,
    }
    run(
        HOST_KERNELS, "sample", live=live, logits=logits, options=options, **values,
        row_count=len(live), vocabulary=vocabulary, stop_count=16, ring_size=6,
    )  # fmt: skip
    return values["state"][:, 0], values["ring"]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 3.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.9), (40, 0.3)])
def test_sample_is_the_reference(temperature: float, top_k: int, top_p: float) -> None:
    logits, seed = random((3, 101), 3) * 4, (1 << 63) + 12345
    options = options_of(
        (0.0, 1.0, 0, 0, 99), (temperature, top_p, seed, top_k, 99), (0.0, 1.0, 0, 0, 99)
    )
    for position in range(20):
        live = live_rows(
            (0, 4, 2, ACTIVE), (0, position, 1, ACTIVE | SAMPLE), (0, 4, 0, ACTIVE | SAMPLE)
        )
        tokens, _ = sampled(live, logits, options)
        assert tokens[2] == 55
        given = SamplingOptions(temperature, top_k, top_p, seed)
        assert tokens[1] == sample(logits[1], given, position + 1)
        assert tokens[0] == logits[0].argmax()
    assert uniform(seed, 1) != uniform(seed, 2)


@pytest.mark.parametrize("logit", [NAN, np.inf, -np.inf])
@pytest.mark.parametrize("penalty", [1.0, 1.5])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_largest_logit_that_is_not_finite_chooses_no_token(
    logit: float, penalty: float, temperature: float
) -> None:
    """Minus infinity is the largest where all are."""
    logits = random((1, 9))
    logits[0, slice(None) if logit == -np.inf else 4] = logit
    options = options_of((temperature, 1.0, 0, 0, 9), more=(0.5, penalty))
    tokens, ring = sampled(live_rows((0, 0, 0, ACTIVE | SAMPLE)), logits, options)
    assert tokens[0] == -1
    assert ring[0, 1].tolist() == [-1, 3], "it stops the sequence"


@pytest.mark.parametrize("temperature", [0.0, 2.0])
@pytest.mark.parametrize(("min_p", "penalty"), [(0.0, 1.4), (0.05, 1.0), (0.05, 0.7)])
def test_penalty_and_min_p_are_the_references(
    temperature: float, min_p: float, penalty: float
) -> None:
    """Sequence 1 is sampled; its history behind its position is another sequence's."""
    logits, context = random((2, 101), 5) * 4, 30
    model = logits.copy()
    history = np.random.default_rng(2).integers(101, size=(2, context), dtype=np.int32)
    history[1, :2] = np.argsort(logits[1])[-2:]  # the likeliest, so that the penalty shows
    options = options_of(*[(temperature, 0.9, 7, 40, 99)] * 2, more=(min_p, penalty))
    others = set()
    for position in range(20):
        live = live_rows((0, position, 1, ACTIVE | SAMPLE))
        tokens, _ = sampled(live, logits, options, history=history)
        plain = SamplingOptions(temperature, 40, 0.9, 7)
        given = replace(plain, min_p=min_p, repetition_penalty=penalty)
        seen = history[1, : position + 1]
        assert tokens[1] == sample(logits[1], given, position + 1, seen)
        others.add(tokens[1] == sample(logits[1], plain, position + 1))
    if temperature:
        assert False in others, "the options change something"
    assert logits.tobytes() == model.tobytes(), "the model's own stay"


@pytest.mark.parametrize(
    ("token", "position", "limit", "stopped"),
    [(5, 3, 99, 0), (2, 3, 99, 1), (5, 3, 4, 1), (5, 3, 5, 0), (5, 15, 99, 1), (5, 14, 99, 0)],
)
def test_what_a_token_changes(token: int, position: int, limit: int, stopped: int) -> None:
    state, stops = np.full((2, 4), 77, np.int32), np.full(16, -1, np.int32)
    stops[[0, 15]] = (1, 2)
    live = live_rows((9, 0, 0, ACTIVE), (9, position, 1, ACTIVE | SAMPLE), (9, 0, 0, SAMPLE))
    logits = np.zeros((2, 8), np.float32)
    logits[1, token] = 1
    options = options_of((0.0, 1.0, 0, 0, 99), (0.0, 1.0, 0, 0, limit))
    _, ring = sampled(live, logits, options, state=state, stops=stops, context=16)
    assert state[1].tolist() == [token, position + 1, position + 2, stopped]
    assert ring[1, (position + 1) % 6].tolist() == [token, 2 * (position + 1) + stopped]
    ring[1, (position + 1) % 6] = 55
    assert (ring == 55).all()
    assert (state[0] == 77).all()


LIVE, STATE_ROW = ACTIVE | SAMPLE, ACTIVE | SAMPLE | FROM_STATE


@pytest.mark.parametrize(
    ("rows", "begins", "goes_on"),
    [
        ([(0, 0, 0, STATE_ROW)], True, True),
        ([(0, 0, 1, STATE_ROW)], False, False),  # stopped
        ([(0, 0, 1, STATE_ROW), (0, 0, 2, STATE_ROW)], True, True),
        ([(7, 3, 0, LIVE)], True, False),  # the host's row would be the same step again
        ([(7, 3, 1, LIVE)], True, False),  # and it does not look at the state
        ([(0, 0, 0, 0), (0, 0, 0, FROM_STATE), (0, 0, 0, ACTIVE | FROM_STATE)], False, False),
        ([(0, 0, 3, STATE_ROW), (0, 0, -1, STATE_ROW)], False, False),  # no such sequences
    ],
)
def test_continue_loop(rows: list[tuple[int, ...]], begins: bool, goes_on: bool) -> None:
    """Sequence 1 of 3 has stopped."""
    state = np.array([(5, 3, 4, 0), (5, 3, 4, 1), (5, 3, 4, 0)], np.int32)
    counter, launch = np.array([-9], np.int32), Launch()

    def call(start: int) -> tuple[int, int]:
        run(
            HOST_KERNELS,
            "continue_loop",
            launch,
            condition=77,
            counter=counter,
            rows=np.array(rows, np.int32),
            state=state,
            row_count=len(rows),
            sequences=3,
            start=start,
        )
        return int(counter[0]), launch.conditions[77]

    assert call(3) == (3, begins)
    assert call(0) == (2, goes_on)
    assert call(0) == (1, goes_on)
    assert call(0) == (0, 0), "the count is over"
    names = [name for name, _ in loop_call(3).arguments]
    assert names == [p.name for p in HOST_KERNELS["continue_loop"].signature.parameters]
    assert dict(loop_call(3).arguments)["start"] == 3
    assert dict(loop_call().arguments)["start"] == 0
