"""Ranks with CUDA kernels and no GPU: their own kernels and programs, by the kernels' emulator."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ostinato as ost
from benchmarks.kernels.checks import to_bf16
from ostinato.bench.random_weights import PackedCheckpoint, random_checkpoint
from ostinato.distributed import Group, local_groups
from ostinato.distributed.exchange import ExchangeCollectives
from ostinato.errors import GroupError
from ostinato.models.cuda import lowering as kc
from ostinato.models.cuda.backend import CudaBackend
from ostinato.models.decoder import Decoder
from ostinato.models.program import ACTIVE, CARRYING_SUM, decode_program
from ostinato.models.sampling import GREEDY, SamplingOptions, sample
from ostinato.models.sharding import (
    COLLECTIVES,
    BoundCollective,
    Sharding,
    carrying_sums,
    shard_program,
)
from tests.distributed.products_program import CUTS, compare
from tests.distributed.test_decoder_ranks import drafts_beside_steps
from tests.distributed.test_exchange import emulate, on_ranks
from tests.distributed.test_local import outcomes
from tests.emulator.emulator import Emulator
from tests.models.emulated import NumpyProducts, emulate_decoders
from tests.models.random_models import RandomModel, llama

MODEL = RandomModel(llama(6, 2, 64, hidden=192, inner=512, vocabulary=302, layers=2))
OPTIONS: dict[str, Any] = {"max_context": 40, "stop_tokens": (), "max_rows": 2, "sequences": 2}
PROMPT = MODEL.tokens(3)
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator needs g++")
SAMPLING = SamplingOptions(temperature=0.8, top_k=40, top_p=0.9, seed=5, repetition_penalty=1.2)


@pytest.mark.parametrize(
    "collectives", [pytest.param("library", marks=pytest.mark.slow), "exchange"]
)
def test_ranks_agree_with_one_device_on_the_emulator(
    monkeypatch: pytest.MonkeyPatch, collectives: str
) -> None:
    emulate_decoders(monkeypatch, threads=True)  # ranks wait for each other
    if collectives == "exchange":
        emulate(monkeypatch)
    with ost.open_device("host") as device, Decoder(device, MODEL.checkpoint(), **OPTIONS) as one:
        tokens = [one.prefill(PROMPT)]
        logits = [one.logits()]
        for _ in range(4):
            tokens.append(one.decode())
            logits.append(one.logits())

    def work(group: Group) -> dict[str, Any]:
        with (
            ost.open_device("host") as device,
            Decoder(
                device, MODEL.checkpoint(), group=group, collectives=collectives, **OPTIONS
            ) as decoder,
        ):
            found: dict[str, Any] = {"logits": []}
            greedy = [decoder.prefill(PROMPT)]  # two rows, then one that samples
            found["logits"].append(decoder.logits())
            for _ in range(4):  # eager, captured, replayed
                greedy.append(decoder.decode())
                found["logits"].append(decoder.logits())
            found["greedy"] = greedy
            decoder.reset()
            loops = [decoder.prefill(PROMPT), decoder.decode()]
            found["loops"] = loops + list(decoder.run(count=3, tokens_per_launch=3))
            decoder.reset()
            both = [decoder.prefill(PROMPT, 0), decoder.prefill(PROMPT[:2], 1)]
            found["batch"] = [both, *(decoder.decode_batch((0, 1)) for _ in range(3))]
            decoder.set_sampling(SAMPLING)
            decoder.reset()
            drawn = [decoder.prefill(PROMPT)]
            for _ in range(3):
                seen = decoder.tokens()
                drawn.append(decoder.decode())
                answer = sample(decoder.logits(), SAMPLING, len(seen), seen)
                found.setdefault("reference", []).append(answer)
            found["drawn"] = drawn
            decoder.set_sampling(GREEDY)
            assert not decoder.statistics().quarantined
            workspace = decoder.plan.buffers["workspace"]
            assert not workspace.array[: kc.COUNTER_BYTES // 4].any()
            return found

    with local_groups(2) as groups:
        first, second = (dict(r) for r in groups.run(work))  # type: ignore[call-overload]
    for wanted, mine, other in zip(logits, first.pop("logits"), second.pop("logits"), strict=True):
        assert mine.tobytes() == other.tobytes()
        # Sums in another order now and then round a key or value to the bfloat16 beside it.
        assert np.linalg.norm(mine - wanted) / np.linalg.norm(wanted) < 1e-3
    assert first == second
    assert first["greedy"] == tokens == first["loops"]
    assert [pair[0] for pair in first["batch"]] == tokens[:4]
    assert first["drawn"][1:] == first["reference"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "head_size", "inner", "kinds", "ways"),
    [
        ("Q8_0", 32, 256, "Q8_0", ("auto", "bf16")),
        ("Q4_K_M", 128, 512, "Q4_K, Q6_K", ("auto",)),
        ("Q5_1", 32, 256, "Q5_1", ("auto",)),
    ],
)
def test_a_ranks_share_of_packed_weights(
    monkeypatch: pytest.MonkeyPatch,
    recipe: str,
    head_size: int,
    inner: int,
    kinds: str,
    ways: tuple[str, ...],
) -> None:
    """Packed, by itself or as asked for, or bfloat16; either is made of the share's bytes on the
    device.  Biases, norms of heads and an embedding that is the
    output head are shared too."""
    config = llama(
        4, 2, head_size, hidden=256, inner=inner, vocabulary=302, layers=2, tied_embeddings=True,
        qkv_bias=True, qk_norm=True,
    )  # fmt: skip
    monkeypatch.setattr("ostinato.models.cuda.backend.pays", lambda _: True)
    emulate_decoders(monkeypatch)

    def checkpoint() -> PackedCheckpoint:
        return PackedCheckpoint(config, recipe, "made")

    def decoding(group: Group | None, weights: Any) -> tuple[str, list[int], bytes]:
        with (
            ost.open_device("host") as device,
            Decoder(device, checkpoint(), group=group, weights=weights, **OPTIONS) as decoder,
        ):
            tokens = [decoder.prefill(PROMPT), *(decoder.decode() for _ in range(3))]
            found = decoder.statistics().weights, tokens, decoder.logits().tobytes()
            assert not decoder.statistics().quarantined
            return found

    ones = {way: decoding(None, way) for way in ways}
    assert ones["auto"][0] == f"packed ({kinds})"
    for way, one in ones.items():
        with local_groups(2) as groups:
            several = groups.run(lambda group, way=way: decoding(group, way))  # type: ignore[misc]
        assert several[0] == several[1] and several[0][:2] == one[:2]
        mine, wanted = (np.frombuffer(found[2], np.float32) for found in (several[0], one))
        assert np.linalg.norm(mine - wanted) / np.linalg.norm(wanted) < 2e-3


def emulated_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CUDA backend, and ranks' kernels that wait for each other, by the emulator."""
    emulate(monkeypatch)
    emulate_decoders(monkeypatch, threads=True)


def test_ranks_that_draft_have_the_tokens_of_single_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    emulated_ranks(monkeypatch)

    def work(group: Group) -> list[list[int]]:
        options = OPTIONS | {"max_rows": 8, "lookup": 3}
        with (
            ost.open_device("host") as device,
            Decoder(device, MODEL.checkpoint(), group=group, **options) as decoder,
        ):
            return drafts_beside_steps(decoder)

    with local_groups(2) as groups:
        one, other = groups.run(work)
    assert one == other


@pytest.mark.parametrize(
    ("ranks", "recipe"),
    [
        (2, None),
        *[pytest.param(*one, marks=pytest.mark.slow) for one in ((2, "Q4_K_M"), (4, "Q8_0"))],
    ],
)
def test_products_that_add_sums_over_ranks_agree_with_sums_apart(
    monkeypatch: pytest.MonkeyPatch, ranks: int, recipe: str | None
) -> None:
    """Eager, captured, replayed, in loops, and behind pieces of prompts of two rows; also when the
    number of exchanges passes 2^32.  The same tokens: a pair loses a bit on its way."""
    config = llama(8, 2, 64, hidden=256, inner=1024, vocabulary=304, layers=2)
    emulated_ranks(monkeypatch)

    def decoding(group: Group) -> tuple[int, list[int], bytes]:
        with (
            ost.open_device("host") as device,
            Decoder(
                device, random_checkpoint(config, recipe=recipe), group=group, **OPTIONS,
                weights="packed" if recipe else "auto", collectives="exchange",
            ) as decoder,
        ):  # fmt: skip
            decoder.plan.buffers["sums"].array[32 : 32 + 128].view(np.uint32)[:] = 2**32 - 4
            group.barrier()
            tokens, logits = [decoder.prefill(PROMPT[:1])], [decoder.logits()]
            for _ in range(4):
                tokens.append(decoder.decode())
                logits.append(decoder.logits())
            tokens += decoder.run(count=2, tokens_per_launch=2)
            decoder.reset()
            tokens += [decoder.prefill(PROMPT), decoder.decode()]
            logits.append(decoder.logits())
            numbers = decoder.statistics()
            assert not numbers.quarantined
            return numbers.launches_per_token, tokens, np.array(logits).tobytes()

    found = []
    for apart in (False, True):
        if apart:
            monkeypatch.setattr(CudaBackend, "exchanges_sums", lambda *_, **__: False)
        with local_groups(ranks) as groups:
            several = groups.run(decoding)
        assert all(one == several[0] for one in several)
        found.append(several[0])
    (launches, tokens, logits), (apart_launches, apart_tokens, apart_logits) = found
    assert launches == apart_launches - 2 * config.layers - 2  # and the choice of the best logit
    assert tokens == apart_tokens
    mine, wanted = (np.frombuffer(one, np.float32) for one in (logits, apart_logits))
    assert np.linalg.norm(mine - wanted) / np.linalg.norm(wanted) < 1e-3


def ranks_with_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, with products by NumPy in steps of 16 and more rows."""
    emulate(monkeypatch)
    monkeypatch.setattr(
        "ostinato.models.cuda.backend.open_products",
        lambda device, rows, stream=None: (NumpyProducts(device.device), "NumPy"),
    )
    emulate_decoders(monkeypatch, library_rows=16, threads=True)


@pytest.mark.parametrize(
    ("ranks", "hidden"),
    [
        (2, 192),
        *[pytest.param(*one, marks=pytest.mark.slow) for one in ((3, 80), (4, 192), (8, 4104))],
    ],
)
def test_ranks_that_share_rows_have_the_bits_of_sums_apart(
    monkeypatch: pytest.MonkeyPatch, ranks: int, hidden: int
) -> None:
    """In pieces of prompts with padding, and in smaller steps whose rows all sample; between steps
    of own products, which add to sums that must be clear; eager, captured, replayed.  Inputs of
    rows without a token are zero."""
    config = llama(
        2 * ranks, ranks, 16, hidden=hidden, inner=32 * ranks, vocabulary=48 * ranks, layers=2
    )
    ranks_with_a_library(monkeypatch)
    kernels: list[str] = []

    def decoding(group: Group) -> tuple[list[int], list[bytes]]:
        prompt = np.random.default_rng(3).integers(0, config.vocabulary, 90).tolist()
        with (
            ost.open_device("host") as device,
            Decoder(
                device, random_checkpoint(config), group=group, collectives="exchange",
                max_context=128, max_rows=128, sequences=2, stop_tokens=(),
            ) as decoder,
        ):  # fmt: skip
            tokens, logits = [], []
            for _ in range(3):
                decoder.reset()
                for begin, end in ((0, 70), (70, 90)):  # 128 rows, and 32
                    rounded = decoder.plan.buffers["product_next"].array
                    rounded[:] = 0x7FC0
                    group.barrier()
                    tokens += [decoder.prefill(prompt[begin:end])]
                    logits.append(decoder.logits().tobytes())
                    assert not (rounded[:58] if begin == 0 else rounded[20:32]).any()
                tokens += [decoder.prefill(prompt[:5], 1), *decoder.decode_batch((0, 1))]
                logits.append(decoder.logits().tobytes())
            assert not decoder.statistics().quarantined
            if group.rank == 0:
                kernels[:] = [n.name for n in decoder._steps.graph(128, sampled=True).nodes()]
            return tokens, logits

    found = []
    for apart in (False, True):
        if apart:
            monkeypatch.setattr(CudaBackend, "shared_buffers", lambda *_: {})
        with local_groups(ranks) as groups:
            several = groups.run(decoding)
        assert all(one == several[0] for one in several)
        assert kernels.count("rows_of_ranks") == (0 if apart else 2 * config.layers)
        assert kernels.count("norm_rows") == (2 * config.layers if apart else 1)
        found.append(several[0])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("count", "ranks"), [(1, emulated_ranks), (20, emulated_ranks), (20, ranks_with_a_library)]
)
def test_a_lost_rank_ends_the_waits_of_kernels(
    monkeypatch: pytest.MonkeyPatch, count: int, ranks: Callable[[pytest.MonkeyPatch], None]
) -> None:
    """Of products that add sums over ranks, and of sums whose rows ranks share."""
    config = llama(4, 2, 16, inner=64, vocabulary=32, layers=1)
    ranks(monkeypatch)

    def work(group: Group) -> None:
        with (
            ost.open_device("host") as device,
            Decoder(
                device, random_checkpoint(config), group=group, collectives="exchange",
                **OPTIONS | {"max_rows": 32},
            ) as decoder,
        ):  # fmt: skip
            decoder.prefill([1])
            decoder.decode()
            if group.rank == 1:
                raise ValueError("broken")
            for _ in range(30):
                if count == 1:
                    decoder.decode()
                else:
                    decoder.reset()
                    decoder.prefill([1] * count)

    begin = time.monotonic()
    with local_groups(2, deadline=300) as groups:
        error, other = outcomes(groups, work)
    assert time.monotonic() - begin < 100
    assert isinstance(other, ValueError)
    assert isinstance(error, GroupError) and "rank 1 raised ValueError" in str(error)


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize(
    ("ranks", "rows", "hidden"),
    [(2, 3, 256), (2, 7, 72), *[pytest.param(4, n, 192, marks=pytest.mark.slow) for n in (5, 17)]],
)
def test_a_sum_over_ranks_writes_the_inputs_of_the_next_product(
    ranks: int, rows: int, hidden: int, scattered: bool
) -> None:
    """Residual, rounded inputs and sums of squares; inputs of rows without a token are zero."""
    config = llama(4 * ranks, ranks, 16, hidden=hidden, inner=64 * ranks, vocabulary=304, layers=2)
    emulator, lock = Emulator(threads=True), threading.Lock()
    live = np.zeros((rows, 4), np.int32)
    live[:, 3] = ACTIVE
    live[rows // 2, 3] = 0
    norm = np.random.default_rng(1).standard_normal(hidden).astype(np.float32)

    def drawn(*seed: int) -> np.ndarray:
        return np.random.default_rng(seed).standard_normal((rows, hidden)).astype(np.float32)

    def work(group: Group, device: ost.Device, made: ExchangeCollectives) -> list[bytes]:
        sharding = Sharding(config, group.rank, ranks)
        how = made.layout.sum_of(rows * hidden, scattered=scattered)
        program = shard_program(decode_program(sharding.part), sharding, whole_logits=False)
        bound = [
            one if one.kernel not in COLLECTIVES else BoundCollective(one, made, rows)
            for one in carrying_sums(program, sharding, how)
        ]
        launches = [
            one
            for one in kc.lower(bound, sharding.part, rows=rows, context=64)
            if isinstance(one, kc.CudaLaunch)
        ]
        assert [one.kernel for one in launches].count("norm_rows") == 1
        first, *_, last = (one for one in launches if one.kernel == CARRYING_SUM)
        with lock:
            kernel = emulator.host_kernel(first.source, first.kernel, first.options)
            emulator.build(first.source, first.kernel, first.options)
        loaded = device.modules.get_or_compile(
            ost.Source(host={first.kernel: kernel}, name="residual"), first.kernel
        )
        assert "PANELS" not in dict(first.options.defines)
        x, next_in = device.array(drawn(9)), device.zeros((rows, hidden), np.uint16)
        buffers: dict[str, Any] = {
            "row_count": rows,
            "live": device.array(live), "x": x, "partial": device.zeros((rows, hidden), np.float32),
            "norm": device.array(norm), "next": next_in,
            "squares": device.zeros((2, rows, 2), np.uint64), "windows": made.windows,
        }  # fmt: skip
        residual, found = drawn(9), []
        with device.create_stream() as stream:
            for turn, launch in enumerate((first, last, first)):
                given = dict(launch.arguments)
                assert given["half"] == turn % 2 and given["next"] == kc.CARRIED
                parts = [drawn(rank, turn) for rank in range(ranks)]
                buffers["partial"].set(parts[group.rank], stream)
                buffers["squares"].set(np.zeros((2, rows, 2), np.uint64), stream)
                buffers["next"].set(np.full((rows, hidden), 0x7FC0, np.uint16), stream)
                names = launch.signature.parameters
                values = [buffers.get(one.name, given.get(one.name)) for one in names]
                stream.submit(ost.prepare(loaded, launch.config, *values))
                total = parts[0].copy()
                for part in parts[1:]:
                    total += part
                residual = residual + total
                assert (x.to_numpy(stream) == residual).all()
                assert not buffers["partial"].to_numpy(stream).any()
                wanted = to_bf16(residual * norm)
                wanted[rows // 2] = 0
                got = next_in.to_numpy(stream)
                assert (got == wanted).all()
                squares = buffers["squares"].to_numpy(stream)
                sums = squares[turn % 2, :, 0] + squares[turn % 2, :, 1] / 2.0**40
                lengths = (residual.astype(np.float64) ** 2).sum(1) * (live[:, 3] == ACTIVE)
                np.testing.assert_allclose(sums, lengths, rtol=1e-5)
                assert not squares[1 - turn % 2].any()
                found += [got.tobytes(), squares.tobytes()]
        return found

    found = on_ranks(ranks, work)
    assert all(one == found[0] for one in found)


@pytest.mark.parametrize(
    ("ranks", "cut"),
    [
        *[(2, cut) for cut in CUTS],
        (3, "clusters"),
        *[
            pytest.param(8, cut, marks=pytest.mark.slow)
            for cut in ("warps share inputs", "warpgroups")
        ],
    ],
)
def test_products_of_several_rows_add_the_sums_of_all_ranks(ranks: int, cut: str) -> None:
    """`products_program`, with ranks as threads."""
    emulator, lock = Emulator(threads=True), threading.Lock()

    def work(group: Group, device: ost.Device, made: ExchangeCollectives) -> list[bytes]:
        def load(launch: kc.CudaLaunch) -> ost.Kernel:
            known = (launch.source, launch.kernel, launch.options, launch.config)
            with lock:
                kernel = emulator.host_kernel(*known)
                emulator.build(*known[:3])
            loaded = device.modules.get_or_compile(kernel, launch.kernel)
            loaded.allow_shared(launch.config.shared)
            return loaded

        return compare(group, device, made, cut, load)

    found = on_ranks(ranks, work)
    assert all(one == found[0] for one in found)
