"""The compiled kernels: every tensor type, on every instruction set of this processor, against
NumPy over the dequantised weights."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from ostinato.bench.random_weights import random_blocks
from ostinato.device import Device, open_device
from ostinato.driver.host.kernel import HostKernel
from ostinato.errors import ContextPoisonedError, InputError, SettingsError
from ostinato.models.config import LlamaConfig, tensor_shapes
from ostinato.models.decoder import Decoder
from ostinato.models.files.dequantise import BLOCK_TYPES, SUPPORTED_TYPES, dequantise_rows
from ostinato.models.files.open import open_checkpoint
from ostinato.models.host import packed_kernels as kernels_packed
from ostinato.models.host.kernels import HOST_KERNELS
from ostinato.models.packed import PackedMatrix, PackedPart
from ostinato.models.plan import rope_table
from ostinato.models.program import ACTIVE, SAMPLE
from tests.models.model_files import packed_matrix, write_gguf
from tests.models.test_kernels_host import NAN, config_of, live_rows, random, run
from tests.processes import printed

pytestmark = pytest.mark.skipif(
    not kernels_packed.compiled(), reason="the extension was not built here"
)
INSTRUCTIONS = kernels_packed._extension.INSTRUCTIONS if kernels_packed.compiled() else ()

# Where a block has its float16 numbers.
HALVES = {
    "Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "IQ4_NL": (0,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip


def plain(kind: str, values: np.ndarray) -> np.ndarray:
    """The bytes of float32 values as F32, F16 or BF16."""
    if kind == "BF16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return values.astype({"F32": np.float32, "F16": np.float16}[kind]).view(np.uint8)


def blocks(kind: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Random bytes with sane scales, of either sign: every code occurs."""
    rng, block = np.random.default_rng(seed), BLOCK_TYPES[kind]
    if block.values == 1:
        return plain(kind, random((rows, columns), seed))
    found = rng.integers(0, 256, (rows, columns // block.values, block.size), np.uint8)
    for at in HALVES[kind]:
        values = (rng.standard_normal(found.shape[:2]) * 0.01).astype(np.float16)
        found[..., at : at + 2] = values[..., None].view(np.uint8)
    return found.reshape(rows, -1)


def matrix_of(kind: str, packed: np.ndarray, columns: int) -> np.ndarray:
    """The packed matrix of one part."""
    return packed_matrix(PackedMatrix(columns, (PackedPart(kind, len(packed)),)), [packed])


def values_of(kind: str, packed: np.ndarray, columns: int) -> np.ndarray:
    out = np.empty((len(packed), columns), np.float32)
    dequantise_rows(kind, np.ascontiguousarray(packed), out)
    return out


def close(found: np.ndarray, wanted: np.ndarray, relative: float = 1e-5) -> None:
    """Asserts that differences are at most `relative` of the largest value."""
    assert np.abs(found - wanted).max() <= relative * np.abs(wanted).max()


def residual(
    kernels: dict[str, HostKernel], weight: np.ndarray, source: np.ndarray, hidden: int
) -> np.ndarray:
    """source @ weight.T by way of a kernel that adds it to zeros."""
    count, width = source.shape
    x = np.zeros((count, hidden), np.float32)
    live = live_rows(*((0, i, 0, ACTIVE) for i in range(count)))
    run(
        kernels, "down_residual", live=live, inner=source, weight=weight, x=x,
        workspace=np.full((count, hidden), NAN), row_count=count, hidden=hidden, width=width,
    )  # fmt: skip
    return x


def check_values(kind: str, packed: np.ndarray, columns: int, instructions: str) -> None:
    """The embedding is a row's values and nothing else: they are the dequantiser's, bit by bit."""
    count = len(packed)
    x = np.full((count, columns), NAN)
    run(
        kernels_packed.kernels_of(1, instructions), "embed",
        rows=live_rows(*((i, 0, 0, ACTIVE) for i in range(count))),
        state=np.zeros((1, 4), np.int32), live=np.zeros((count, 4), np.int32),
        table=matrix_of(kind, packed, columns), x=x, history=np.zeros(1, np.int32),
        row_count=count, hidden=columns, vocabulary=count, sequences=1, context=1,
    )  # fmt: skip
    np.testing.assert_array_equal(x, values_of(kind, packed, columns))


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("kind", SUPPORTED_TYPES)
def test_values_are_those_of_the_dequantiser_bit_by_bit(kind: str, instructions: str) -> None:
    columns = 512 if BLOCK_TYPES[kind].values > 1 else 77
    check_values(kind, blocks(kind, 9, columns, 3), columns, instructions)


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("kind", SUPPORTED_TYPES)
@pytest.mark.parametrize("seed", range(3))
def test_products(kind: str, instructions: str, seed: int) -> None:
    """Random sizes; the same bits for any number of threads, and for each row alone."""
    rng, unit = np.random.default_rng(seed), BLOCK_TYPES[kind].values
    rows, count = int(rng.integers(1, 90)), int(rng.integers(2, 80))
    columns = int(rng.integers(1, 5)) * unit if unit > 1 else int(rng.integers(1, 300))
    packed = blocks(kind, rows, columns, seed)
    weight, source = matrix_of(kind, packed, columns), random((count, columns), seed + 1)
    kernels = kernels_packed.kernels_of(1, instructions)
    found = residual(kernels, weight, source, rows)
    wanted = source.astype(np.float64) @ values_of(kind, packed, columns).T.astype(np.float64)
    close(found, wanted, 3e-6)
    for threads in (2, 5):
        more = kernels_packed.kernels_of(threads, instructions)
        np.testing.assert_array_equal(residual(more, weight, source, rows), found)
    for index in range(count):
        one = residual(kernels, weight, source[index : index + 1], rows)
        np.testing.assert_array_equal(one[0], found[index])


def test_instruction_sets_agree_bit_by_bit() -> None:
    for kind in SUPPORTED_TYPES:
        weight, source = matrix_of(kind, blocks(kind, 33, 512, 1), 512), random((7, 512), 5)
        results = [
            residual(kernels_packed.kernels_of(1, name), weight, source, 33)
            for name in INSTRUCTIONS
        ]
        for result in results[1:]:
            np.testing.assert_array_equal(result, results[0])


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("kind", SUPPORTED_TYPES)
def test_infinite_nan_and_tiny_scales_are_values_like_others(kind: str, instructions: str) -> None:
    halves = np.array(
        [0x7C00, 0xFC00, 0x7E00, 0x0001, 0x8001, 0x03FF, 0x0000, 0x8000, 0x7BFF, 0x0400], np.uint16
    )
    block, columns = BLOCK_TYPES[kind], 512 if BLOCK_TYPES[kind].values > 1 else 100
    packed = blocks(kind, len(halves), columns, 4)
    for row, half in enumerate(halves):
        if kind in HALVES:
            of_row = packed[row].reshape(-1, block.size)
            for at in HALVES[kind]:
                of_row[:, at : at + 2] = np.frombuffer(half.tobytes(), np.uint8)
        elif kind != "F32":
            packed[row] = np.frombuffer(half.tobytes() * columns, np.uint8)
    check_values(kind, packed, columns, instructions)


# ----------------------------------------------------------------------- attention and gates


MIXED = live_rows(
    (0, 30, 1, ACTIVE), (0, 31, 1, ACTIVE), (0, 32, 1, ACTIVE | SAMPLE), (0, 3, 0, 0),
    (0, 63, 0, ACTIVE | SAMPLE), (0, 2, 1, ACTIVE), (0, 5, 2, ACTIVE | SAMPLE), (0, 9, 9, 0),
)  # fmt: skip
"""A piece of sequence 1's prompt, padding, and single tokens of three sequences."""


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("window", [0, 1, 21])
def test_attention_gives_a_row_the_same_bits_in_any_company(instructions: str, window: int) -> None:
    """A prompt of 40 rows in one piece, and row by row; by one thread and by five."""
    heads, kv_heads, size, count = 6, 2, 24, 40
    cache, q = random((2, 1, kv_heads, 64, size), 4), random((count, heads, size), 5)
    shape = {"heads": heads, "kv_heads": kv_heads, "head_size": size, "sequences": 1, "context": 64}

    def attended(threads: int, first: int, stop: int) -> np.ndarray:
        out = np.zeros((stop - first, heads, size), np.float32)
        live = live_rows(*((0, i, 0, ACTIVE) for i in range(first, stop)))
        run(
            kernels_packed.kernels_of(threads, instructions), "attention", live=live,
            q=q[first:stop].copy(), cache=cache, attended=out, workspace=np.zeros(1, np.float32),
            row_count=stop - first, window=window, scale=0.2, **shape,
        )  # fmt: skip
        return out

    whole = attended(1, 0, count)
    np.testing.assert_array_equal(attended(5, 0, count), whole)
    for index in range(count):
        np.testing.assert_array_equal(attended(5, index, index + 1)[0], whole[index])


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_gates_of_every_size_and_kind(instructions: str) -> None:
    """Far below -88, where the exponential is infinite; infinite; NaN."""
    gates = np.array(
        [-3e38, -1e4, -104, -89, -88.5, -87, -1, -1e-30, -0.0, 0, 1e-45, 1, 88, 89, 1e4, 3e38,
         np.inf, -np.inf, np.nan], np.float32,
    )  # fmt: skip
    weight = np.concatenate([gates, np.ones_like(gates)]).reshape(-1, 1)
    inner = {}
    for name, kernels, packed in (
        ("numpy", HOST_KERNELS, weight),
        ("packed", kernels_packed.kernels_of(1, instructions),
         matrix_of("F32", weight.view(np.uint8), 1)),
    ):  # fmt: skip
        inner[name] = np.full(len(gates), 7, np.float32)
        run(
            kernels, "norm_gate_up", live=live_rows((0, 0, 0, ACTIVE)), x=np.ones(1, np.float32),
            norm=np.ones(1, np.float32), weight=packed, inner=inner[name],
            workspace=np.zeros(2 * len(gates) + 1, np.float32), row_count=1, hidden=1,
            width=len(gates), epsilon=0.0,
        )  # fmt: skip
    np.testing.assert_allclose(inner["packed"], inner["numpy"], rtol=1e-6, atol=1e-37)


# ----------------------------------------------------------------------------------- hostile inputs


def test_what_lies_outside_of_an_argument_is_an_error_and_not_read() -> None:
    """One array after the other cut short, for every kernel."""
    kernels, config = kernels_packed.kernels_of(2), config_of(4, 2, 16)
    live, hidden = MIXED, 64
    weight = {n: matrix_of("Q8_0", blocks("Q8_0", n, hidden), hidden) for n in (64, 128, 37)}
    f32 = np.float32
    x, norm = np.zeros((8, 64), f32), np.zeros(64, f32)
    cache, q, ws = np.zeros((2, 3, 2, 64, 16), f32), np.zeros((8, 64), f32), np.zeros((8, 192), f32)
    sizes = {"heads": 4, "kv_heads": 2, "head_size": 16, "sequences": 3, "context": 64}
    calls: dict[str, dict[str, Any]] = {
        "embed": {
            "rows": live, "state": np.zeros((3, 4), np.int32), "live": live.copy(),
            "table": weight[37], "x": x, "history": np.zeros((3, 64), np.int32), "row_count": 8,
            "hidden": 64, "vocabulary": 37, "sequences": 3, "context": 64,
        },
        "norm_qkv_rope": {
            "live": live, "x": x, "norm": norm, "weight": weight[128], "bias": random((128,)),
            "rope": rope_table(config, 64), "cache": cache, "q": q, "workspace": ws, "row_count": 8,
            "hidden": 64, "epsilon": 1e-5, **sizes,
        },
        "norm_qkv": {
            "live": live, "x": x, "norm": norm, "weight": weight[128], "qkv": ws[:, :128].copy(),
            "workspace": ws[:, :64], "row_count": 8, "hidden": 64, "epsilon": 1e-5,
            **{name: sizes[name] for name in ("heads", "kv_heads", "head_size")},
        },
        "norm_rope": {
            "live": live, "qkv": ws[:, :128], "bias": random((128,)), "q_norm": random((16,)),
            "k_norm": random((16,)), "rope": rope_table(config, 64), "cache": cache, "q": q,
            "row_count": 8, "epsilon": 1e-5, **sizes,
        },
        "attention": {
            "live": live, "q": q, "cache": cache, "attended": q.copy(), "workspace": ws,
            "row_count": 8, "window": 0, "scale": 1.0, **sizes,
        },
        "output_residual": {
            "live": live, "attended": q, "weight": weight[64], "x": x, "workspace": ws[:, :64],
            "row_count": 8, "hidden": 64, "width": 64,
        },
        "norm_gate_up": {
            "live": live, "x": x, "norm": norm, "weight": weight[128], "inner": q, "workspace": ws,
            "row_count": 8, "hidden": 64, "width": 64, "epsilon": 1e-5,
        },
        "head": {
            "live": live, "x": x, "norm": norm, "weight": weight[37],
            "logits": np.zeros((3, 37), f32), "workspace": ws[:, :64], "row_count": 8, "hidden": 64,
            "vocabulary": 37, "epsilon": 1e-5,
        },
    }  # fmt: skip
    for name, arguments in calls.items():
        run(kernels, name, **arguments)
        for parameter in kernels[name].signature.parameters:
            if not parameter.pointer or (name, parameter.name) == ("attention", "workspace"):
                continue
            whole = np.ascontiguousarray(arguments[parameter.name]).reshape(-1)
            used = 7 if parameter.name not in ("rows", "live", "table", "weight") else 8
            short = whole[: len(whole) * used // 8 - 1] if used == 7 else whole[:-4]
            vectors = ("norm", "bias", "q_norm", "k_norm")
            if parameter.name in ("cache", "rope", "state", "logits", *vectors):
                short = whole[:-1]
            if parameter.name == "live" and name != "embed":
                short = whole[:-4]
            with pytest.raises(IndexError, match=name):
                run(kernels, name, **{**arguments, parameter.name: short})
    outside = live.copy()
    outside[0, 1] = 64
    for name in ("norm_qkv_rope", "norm_rope", "attention"):
        with pytest.raises(IndexError, match="row 0 is at position 64"):
            run(kernels, name, **{**calls[name], "live": outside})


def test_bytes_that_are_no_packed_matrix_are_refused() -> None:
    kernels = kernels_packed.kernels_of(1)
    weight = matrix_of("Q8_0", blocks("Q8_0", 32, 64), 64)
    source = random((2, 64))
    for at, message in ((0, "no packed matrix"), (8, "is needed"), (16, "no packed matrix"),
                        (24, "of type"), (28, "parts have|passes its end"), (32, "passes its end|"
                         "of type"), (38, "passes its end")):  # fmt: skip
        spoilt = weight.copy()
        spoilt[at] ^= 0x41
        with pytest.raises((ValueError, IndexError), match=message):
            residual(kernels, spoilt, source, 32)
    with pytest.raises(ValueError, match="is needed"):
        residual(kernels, weight, source, 31)
    with pytest.raises(TypeError, match="8 arguments"):
        kernels["down_residual"].function(None, source)


@pytest.mark.parametrize(
    ("columns", "parts", "message"),
    [
        (33, (PackedPart("Q8_0", 2),), "blocks of 32"),
        (128, (PackedPart("Q4_K", 2),), "blocks of 256"),
        (32, (PackedPart("Q3_K", 2),), "'Q3_K' is not known"),
        (32, (PackedPart("Q8_0", 0),), "0 rows"),
        (0, (PackedPart("F32", 1),), "1 rows of 0"),
        (32, (), "0 parts"),
        (32, (PackedPart("F32", 1),) * 4, "4 parts"),
        (1, (PackedPart("F32", 2**31),), "at most"),
    ],
)
def test_wrong_layouts(columns: int, parts: tuple[PackedPart, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        PackedMatrix(columns, parts)


# ------------------------------------------------------------------------------------------ threads


def test_threads_follow_the_processors_or_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OSTINATO_THREADS", raising=False)
    assert 1 <= kernels_packed.default_threads() <= 16
    monkeypatch.setenv("OSTINATO_THREADS", "3")
    assert kernels_packed.default_threads() == 3
    function = kernels_packed.packed_kernels()["head"].function
    assert function.__self__.threads == 3
    assert kernels_packed.packed_kernels(3)["head"].function is function, "decoders share them"
    for bad in ("0", "-1", "two", ""):
        monkeypatch.setenv("OSTINATO_THREADS", bad)
        with pytest.raises(SettingsError, match="OSTINATO_THREADS"):
            kernels_packed.default_threads()
    for count in (0, 1025, 1.5, True):
        with pytest.raises(InputError, match="threads"):
            kernels_packed.packed_kernels(count)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("max 100000\n", 1024), ("200000 100000\n", 2), ("50000 100000\n", 1), ("x\n", 1024),
        ("", 1024),
    ],
)  # fmt: skip
def test_a_containers_share_of_time_is_processors(tmp_path: Any, text: str, count: int) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert kernels_packed._quota(tmp_path / "cpu.max") == count
    assert kernels_packed._quota(tmp_path / "missing") == 1024


def test_many_callers_of_one_pool_each_get_their_own_results() -> None:
    kernels = kernels_packed.kernels_of(4)
    cases = []
    for seed in range(6):
        weight = matrix_of("Q4_0", blocks("Q4_0", 200, 256, seed), 256)
        source = random((seed % 3 * 9 + 1, 256), seed)
        cases.append((weight, source, residual(kernels, weight, source, 200)))

    def wrong(case: tuple[np.ndarray, np.ndarray, np.ndarray]) -> bool:
        weight, source, wanted = case
        return any(
            not np.array_equal(residual(kernels, weight, source, 200), wanted) for _ in range(200)
        )

    with ThreadPoolExecutor(6) as pool:
        assert not any(pool.map(wrong, cases))


PROGRAM = """
import os, sys, threading, time
import numpy as np
from ostinato.models.host import packed_kernels as kernels_packed
from tests.models.test_kernels_packed import *

weight, source = matrix_of("Q8_0", blocks("Q8_0", 400, 256), 256), random((3, 256))
wanted = residual(kernels_packed.kernels_of(1), weight, source, 400)
kernels = kernels_packed.kernels_of(5)

def right(count):
    for _ in range(count):
        assert np.array_equal(residual(kernels, weight, source, 400), wanted)
"""
WAYS = {
    "idle threads sleep, pools come and go, more threads than processors": """
right(50)
before = time.process_time()
time.sleep(1)
assert time.process_time() - before < 0.5, "of one second, with nothing to do"
of_five = kernels
for _ in range(50):
    kernels = kernels_packed.kernels_of(4)
    right(2)
assert len(os.listdir("/proc/self/task")) < 30
kernels = of_five
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
right(100)
""",
    "a forked child": """
right(20)
for busy in (False, True):
    stop = threading.Event()
    def work():
        while not stop.is_set():
            right(1)
    threads = [threading.Thread(target=work) for _ in range(2 * busy)]
    for thread in threads:
        thread.start()
    for _ in range(4):
        child = os.fork()
        if child == 0:
            right(20)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        right(5)
    stop.set()
    for thread in threads:
        thread.join()
""",
    "the end of the interpreter in the middle of a step": """
threading.Thread(target=right, args=(10**9,), daemon=True).start()
right(20)
""",
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="asks the operating system")
def test_threads_in_a_process_of_their_own(way: str) -> None:
    out = printed("-W", "ignore", "-c", PROGRAM + WAYS[way] + "\nprint('done')")
    assert out == "done\n"


# ------------------------------------------------------------------------------------------ decoder

WIDE = LlamaConfig(
    hidden=256, layers=2, heads=4, kv_heads=2, head_size=64, inner=512, vocabulary=280,
    context_length=64, tied_embeddings=True,
)  # fmt: skip


def model_of(path: Path, kinds: tuple[str, ...]) -> Path:
    """A model whose matrices are of these types, one after the other.

    Weights are about 0.06, so that no rounding grows on the way through the layers.
    """
    raw: dict[str, Any] = {}
    for index, (name, shape) in enumerate(tensor_shapes(WIDE).items()):
        if len(shape) == 2:
            kind = kinds[index % len(kinds)]
            if BLOCK_TYPES[kind].values > 1:
                packed = random_blocks(kind, shape, np.random.default_rng(index), 0.06)
            else:
                packed = plain(kind, random(shape, index) * np.float32(0.06))
            raw[name] = (packed, gguf.GGMLQuantizationType[kind])
    return write_gguf(path, config=WIDE, raw=raw)


@pytest.mark.parametrize(
    "kinds",
    [SUPPORTED_TYPES, *(pytest.param((k,), marks=pytest.mark.slow) for k in SUPPORTED_TYPES)],
)
def test_logits_are_numpys_over_the_dequantised_weights(
    host_device: Device, tmp_path: Path, kinds: tuple[str, ...]
) -> None:
    path, prompt = model_of(tmp_path / "m.gguf", kinds), [5, 9, 200, 31, 7, 7, 120]
    found = {}
    for name, way in (("packed", nullcontext()), ("numpy", kernels_packed.without_extension())):
        with way, Decoder(host_device, path, stop_tokens=(), threads=2) as decoder:
            assert decoder.backend.name == name
            decoder.prefill(prompt)
            found[name] = [decoder.logits()]
            for token in (3, 80, 11):
                decoder.prefill([token])
                found[name].append(decoder.logits())
    for one, other in zip(found["packed"], found["numpy"], strict=True):
        close(one, other, 1e-5)


def test_the_same_bits_however_a_prompt_and_a_batch_are_cut(
    host_device: Device, tmp_path: Path
) -> None:
    path, prompt = model_of(tmp_path / "m.gguf", SUPPORTED_TYPES), list(range(3, 40))
    logits = {}
    for threads, rows in ((1, 64), (2, 8), (5, 2), (1, 1)):
        with Decoder(
            host_device, path, stop_tokens=(), threads=threads, max_rows=max(rows, 2), sequences=2
        ) as decoder:
            decoder.prefill(prompt[:5], 1)
            for start in range(0, len(prompt), rows):
                decoder.prefill(prompt[start : start + rows])
            first = decoder.logits()
            decoder.decode_batch((0, 1))
            logits[threads, rows] = first, decoder.logits(0), decoder.logits(1)
    first, *others = logits.values()
    for other in others:
        for one, two in zip(first, other, strict=True):
            np.testing.assert_array_equal(one, two)


def test_weights_take_the_files_bytes_and_little_more(host_device: Device, tmp_path: Path) -> None:
    path = model_of(tmp_path / "m.gguf", ("Q4_1",))
    with open_checkpoint(path) as checkpoint, Decoder(host_device, checkpoint) as decoder:
        stored = sum(checkpoint.raw(name).size for name in checkpoint.tensor_names())
        assert stored <= decoder.weights.nbytes < stored + 256 * len(decoder.weights.tensors)
        embed = decoder.weights.buffer("embed")
        assert embed.dtype == np.uint8 and embed.nbytes < 280 * 256 * 20 / 32 + 256


def test_a_truncated_weight_poisons_the_device_and_is_named(tmp_path: Path) -> None:
    with open_device("host") as device:
        decoder = Decoder(device, model_of(tmp_path / "m.gguf", ("Q8_0",)), stop_tokens=())
        decoder.weights.buffer("w_down", 1).array[:8] = 0
        with pytest.raises(ContextPoisonedError, match=r"down_residual.*no packed matrix"):
            decoder.prefill([1, 2, 3])
