"""How a program becomes launches of the CUDA backend, without a GPU."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ostinato.bench.random_weights import PackedCheckpoint
from ostinato.device import Device
from ostinato.driver.api import KernelNodeParams, MemoryRange
from ostinato.driver.signature import Access
from ostinato.driver.stream import Operation
from ostinato.errors import NotAvailableError, UnsupportedModelError
from ostinato.graph.order import dependencies
from ostinato.models.backend import DeviceModel
from ostinato.models.config import LlamaConfig
from ostinato.models.cuda import lowering as kc
from ostinato.models.cuda.backend import CudaBackend
from ostinato.models.cuda.bricks import formats_of
from ostinato.models.cuda.library import ProductCall, lower_with_library
from ostinato.models.cuda.products import PIECE_ROWS
from ostinato.models.cuda.shapes import default_tuning
from ostinato.models.cuda.tunings import known_of
from ostinato.models.decoder import Decoder, backend_for
from ostinato.models.plan import PlanSizes
from ostinato.models.program import (
    ABSENT,
    SAMPLED_ROWS,
    BufferArgument,
    decode_program,
    loop_call,
)
from tests.models.model_files import CONFIG, write_gguf
from tests.models.random_models import llama

MODEL = llama(3, 1, 64, inner=136, vocabulary=257, context_length=512, tied_embeddings=True)


@dataclass
class FakeKernel:
    name: str
    options: Any
    shared: int = 0

    def allow_shared(self, nbytes: int) -> None:
        self.shared = nbytes


@dataclass
class FakeModules:
    made: list[FakeKernel] = field(default_factory=list)
    loaded: list[FakeKernel] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def get_or_compile(self, source: Any, name: str, *, options: Any) -> FakeKernel:
        with self.lock:
            self.made.append(FakeKernel(name, options))
            return self.made[-1]

    def preload(self, kernels: Iterable[FakeKernel]) -> None:
        self.loaded += kernels


@dataclass
class FakeDevice:
    """Just what a backend asks of a device."""

    properties: Any
    capabilities: Any
    modules: FakeModules = field(default_factory=FakeModules)
    name: str = "cuda:0"
    driver: Any = field(default_factory=lambda: SimpleNamespace(cuda_context=None))


@pytest.fixture
def gpu(host_device: Device) -> FakeDevice:
    return FakeDevice(
        replace(host_device.properties, compute_capability=(9, 0), multiprocessors=132),
        replace(host_device.capabilities, source_language="cuda"),
    )


WHOLE = replace(MODEL, hidden=256, heads=4, inner=512, vocabulary=301, layers=8)
ALL = replace(WHOLE, qkv_bias=True, qk_norm=True, windows=(9, 0) * 4)
STEPS = [
    *((how, rows) for how in ("plain", "clusters") for rows in (1, 2, 64)),
    *(("packed", rows) for rows in (1, 16)),
    *(("library", rows) for rows in (16, 64, 512)),
    ("library, warpgroups", 512),
]


def step_of(how: str, model: LlamaConfig, rows: int, kind: str) -> tuple[Any, ...]:
    library = how.startswith("library")
    last_row = library and rows > SAMPLED_ROWS
    lookup = min(rows - 1, 7) if kind == "lookup" and not last_row else 0
    program = decode_program(model, sampled=kind != "not sampled", last_row=last_row, lookup=lookup)
    if kind in ("loop", "lookup"):
        program = (*program, loop_call())
    sizes: Any = {"rows": rows, "context": 512}
    if library:
        tunings = {"tuning": default_tuning(model, **sizes, most=PIECE_ROWS)}
        tunings["single"] = default_tuning(model, context=512)
        has = {"warpgroups": how.endswith("warpgroups")}
        return lower_with_library(program, model, rows=rows, **tunings, **has)
    if how == "packed":
        checkpoint = PackedCheckpoint(model, "Q4_K_M", "a chain")
        formats = formats_of(model, lambda name: checkpoint.raw(name).type)
        assert len(set(formats.values())) > 2
        return kc.lower(program, model, **sizes, formats=formats)
    tuning = default_tuning(model, **sizes, clusters=how == "clusters")
    return kc.lower(program, model, **sizes, tuning=tuning)


@pytest.mark.parametrize(("how", "rows"), STEPS)
@pytest.mark.parametrize("kind", ["sampled", "not sampled", "loop", "lookup"])
@pytest.mark.parametrize("model", [WHOLE, ALL], ids=["llama", "all"])
def test_every_launch_touches_what_the_one_before_wrote(
    how: str, rows: int, kind: str, model: LlamaConfig
) -> None:
    """A recorded graph is then a chain, also in a loop's body: a kernel that starts early waits for
    the one before it alone, and thereby for all earlier ones."""
    addresses: dict[str, int] = {}

    def place(value: Any) -> MemoryRange:
        # A last row is part of its buffer.
        name = str(replace(value, last=False))
        start = addresses.setdefault(name, 0x1000 * (1 + len(addresses)))
        return MemoryRange(start + 48, 16) if value.last else MemoryRange(start, 64)

    operations = []
    for one in step_of(how, model, rows, kind):
        if isinstance(one, ProductCall):
            reads = [place(one.weight), place(one.inputs), place(one.workspace)]
            reads += [place(one.out)] if one.product.accumulate else []
            writes, name = [place(one.out), place(one.workspace)], one.name
        else:
            reads, writes, name = [], [], one.kernel
            parameters = one.signature.parameters
            for parameter, (_, value) in zip(parameters, one.arguments, strict=True):
                if parameter.pointer and value != ABSENT:
                    assert isinstance(value, BufferArgument)
                    reads += [place(value)] if Access.READ in parameter.access else []
                    writes += [place(value)] if Access.WRITE in parameter.access else []
        params: Any = KernelNodeParams.__new__(KernelNodeParams)
        operations.append(Operation(params, name, tuple(reads), tuple(writes)))
    assert dependencies(operations) == [[i - 1] if i else [] for i in range(len(operations))]


@pytest.mark.parametrize("rows", [1, 16])
def test_every_kernel_is_loaded_once_with_its_shared_memory(gpu: FakeDevice, rows: int) -> None:
    backend = backend_for(gpu, library_rows=None)  # type: ignore[arg-type]
    assert isinstance(backend, CudaBackend)
    assert backend.dtype == np.uint16
    program = decode_program(MODEL)
    bound = backend.bind(program, DeviceModel(MODEL, 512), rows)
    tuning = default_tuning(MODEL, rows=rows, context=512, clusters=gpu.capabilities.clusters)
    lowered = kc.lower(program, MODEL, rows=rows, context=512, tuning=tuning)
    assert [one.kernel.name for one in bound] == [one.kernel for one in lowered]
    assert sorted(k.name for k in gpu.modules.made) == sorted({one.kernel for one in lowered})
    assert {id(k) for k in gpu.modules.loaded} == {id(k) for k in gpu.modules.made}
    for one, wanted in zip(bound, lowered, strict=True):
        made: Any = one.kernel
        assert (one.config, one.arguments) == (wanted.config, wanted.arguments)
        assert made.options == wanted.options
        assert made.shared == one.config.shared
    # A step without an end is the beginning of one with: their launches are shared.
    without = backend.bind(decode_program(MODEL, sampled=False), DeviceModel(MODEL, 512), rows)
    assert [one.config for one in without] == [one.config for one in bound[: len(without)]]


def test_the_workspace_serves_every_bucket(gpu: FakeDevice) -> None:
    backend = CudaBackend(gpu, library_rows=None)  # type: ignore[arg-type]
    buckets = PlanSizes(rows=48).buckets
    assert list(buckets) == [1, 2, 4, 8, 16, 32, 48]
    most = backend.workspace_bytes(DeviceModel(MODEL, 512), buckets)
    sizes = [{"rows": rows, "context": 512} for rows in buckets]
    known = known_of(gpu)  # type: ignore[arg-type]
    each = [
        kc.workspace_bytes(MODEL, **size, tuning=default_tuning(MODEL, **size, **known))
        for size in sizes
    ]
    assert most == max(each) > min(each)


@pytest.mark.parametrize("rows", [1, 16, 64])
@pytest.mark.parametrize("inner", [11008, 27648])
def test_blocks_fit_gpus_with_99_kib_of_shared_memory(
    gpu: FakeDevice, rows: int, inner: int
) -> None:
    """Compute capability 8.6, 8.9 and 12.0."""
    model = replace(MODEL, hidden=4096, heads=32, kv_heads=8, head_size=128, inner=inner)
    program, here = decode_program(model), DeviceModel(model, 512)
    large = backend_for(gpu, library_rows=None)  # type: ignore[arg-type]
    most = max(one.config.shared for one in large.bind(program, here, rows))
    gpu.properties = replace(gpu.properties, max_shared_per_block=99 * 1024)
    backend = backend_for(gpu, library_rows=None)  # type: ignore[arg-type]
    bound = backend.bind(program, here, rows)
    assert max(one.config.shared for one in bound) <= (99 - 3) * 1024
    assert (most > (99 - 3) * 1024) == (rows > 1 or inner == 27648)
    # All buffers of the launches exist, also those of one row with too many inputs.
    bounds = {v.name for one in bound for _, v in one.arguments if isinstance(v, BufferArgument)}
    buffers = backend.buffers(here, rows)
    assert ("product_in" in bounds) == ("product_in" in buffers) == (rows > 1 or inner == 27648)


def test_gpus_with_less_shared_memory_are_refused(gpu: FakeDevice) -> None:
    gpu.properties = replace(gpu.properties, max_shared_per_block=64 * 1024)
    with pytest.raises(NotAvailableError, match=r"64 KiB of shared memory.* need 99"):
        backend_for(gpu)  # type: ignore[arg-type]


def test_old_gpus_are_refused(gpu: FakeDevice) -> None:
    gpu.properties = replace(gpu.properties, compute_capability=(7, 5))
    with pytest.raises(NotAvailableError, match=r"compute capability 7\.5"):
        backend_for(gpu)  # type: ignore[arg-type]


def test_what_the_kernels_cannot_do_is_said_before_anything_is_loaded(
    host_device: Device, tmp_path: Any, gpu: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = replace(CONFIG, inner=92)
    path = write_gguf(tmp_path / "odd.gguf", config=odd, values=None)
    own = CudaBackend(gpu, library_rows=None)  # type: ignore[arg-type]
    monkeypatch.setattr("ostinato.models.decoder.backend_for", lambda _, **given: own)
    free, _ = host_device.memory_info()
    with pytest.raises(UnsupportedModelError, match="inner is 92"):
        Decoder(host_device, path)
    with pytest.raises(UnsupportedModelError, match="65 rows"):
        Decoder(host_device, write_gguf(tmp_path / "tiny.gguf"), max_rows=65)
    assert host_device.memory_info()[0] == free
