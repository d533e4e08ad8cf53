"""`python -m benchmarks.prompt_attention --out DIR`: a prompt's attention beside torch's.

Compares the attention of a whole prompt in one layer, in the decoder's pieces, with PyTorch's
`scaled_dot_product_attention` by several backends, over the same queries, keys and values in
bfloat16; on a device with warpgroups also our kernel without them.  All run in CUDA graphs, in
turns; figures are medians.  The last line is JSON, which is also in
`DIR/prompt_attention-{device}.json`.

The physics: scores and mixed values need 4 * heads * head_size operations for each token and each
position that it attends to; their rate is compared with a large product of torch in the same run.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import ostinato as ost
from benchmarks import common
from benchmarks.kernels.checks import from_bf16, to_bf16
from ostinato.bench.shapes import shape_named
from ostinato.models.config import LlamaConfig
from ostinato.models.cuda import library
from ostinato.models.cuda.backend import load_kernel
from ostinato.models.cuda.lowering import CudaLaunch
from ostinato.models.cuda.products import PIECE_ROWS
from ostinato.models.cuda.shapes import default_tuning, has_warpgroups
from ostinato.models.plan import PlanSizes
from ostinato.models.program import ACTIVE, BufferArgument, decode_program

SHAPES, TOKENS = ("1B", "8B"), (1024, 4096, 16384)
_WAYS = ("FLASH_ATTENTION", "CUDNN_ATTENTION")
_SIDE = 8192  # rows and columns of the matrices whose product gives the ceiling
_ROUNDS = 7


def _launch(device: ost.Device, config: LlamaConfig, rows: int, warpgroups: bool) -> CudaLaunch:
    """Returns the decoder's launch for the attention of a piece of that many rows."""
    step = library.lower_with_library(
        decode_program(config, sampled=False),
        config,
        rows=rows,
        tuning=default_tuning(config, rows=rows, context=max(TOKENS), most=PIECE_ROWS),
        single=default_tuning(config),
        multiprocessors=device.properties.multiprocessors,
        warpgroups=warpgroups,
    )
    kernel = "warpgroup_attention" if warpgroups else "piece_attention"
    return next(one for one in step if isinstance(one, CudaLaunch) and one.kernel == kernel)


def ours(
    device: ost.Device,
    config: LlamaConfig,
    tokens: int,
    queries: Any,
    cache: Any,
    repeats: int,
    warpgroups: bool,
) -> tuple[Callable[[], float], Callable[[], np.ndarray]]:
    """Returns a function that times a prompt's attention (µs), and one that reads the result,
    [tokens, heads, size]."""
    sizes = PlanSizes(rows=library.piece_rows(config), context=tokens)
    stream = device.create_stream()
    held = {"q": device.array(queries), "cache": device.array(cache)}
    held["workspace"] = device.zeros(1 << 18, np.float32)
    out = device.zeros((tokens, config.query_size), np.uint16)
    pieces, start = [], 0
    while start < tokens:
        count = sizes.piece(tokens - start, sizes.rows)
        live = np.zeros((count, 4), np.int32)
        live[:, 1], live[:, 3] = start + np.arange(count), ACTIVE
        launch = _launch(device, config, count, warpgroups)
        rows = slice(start, start + count)
        places = held | {"live": device.array(live), "q": held["q"][rows]}
        places["product_in"] = out[rows]
        values = {"rows": count, "sequences": 1, "context": tokens}
        given = [
            places[v.name] if isinstance(v, BufferArgument) else values.get(v, v)
            for _, v in launch.arguments
        ]
        pieces.append((load_kernel(device.modules, launch), launch.config, given))
        start += count
    with ost.capture(stream) as under_way:
        for _ in range(repeats):
            for kernel, shape, given in pieces:
                ost.launch(stream, kernel, shape, *given)
    graph = under_way.graph.instantiate(upload=stream)

    marks = device.create_event(timing=True), device.create_event(timing=True)

    def timed() -> float:
        stream.record(marks[0])
        graph.launch(stream)
        stream.record(marks[1])
        marks[1].synchronize()
        return marks[1].elapsed_since(marks[0]) * 1e6 / repeats

    return timed, lambda: from_bf16(device.to_numpy(out)).reshape(tokens, config.heads, -1)


def theirs(
    torch: Any, way: str, queries: Any, cache: Any, repeats: int
) -> tuple[Callable[[], float], Callable[[], Any]]:
    """Returns the same functions for one of torch's backends."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    attend = torch.nn.functional.scaled_dot_product_attention
    q = torch.from_numpy(queries).cuda().bfloat16().transpose(0, 1)[None].contiguous()
    k, v = (torch.from_numpy(part.view(np.int16)).cuda().view(torch.bfloat16) for part in cache)
    with sdpa_kernel(getattr(SDPBackend, way)):
        for _ in range(3):
            attend(q, k, v, is_causal=True, enable_gqa=True)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(repeats):
                out = attend(q, k, v, is_causal=True, enable_gqa=True)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def timed() -> float:
        marks[0].record()
        graph.replay()
        marks[1].record()
        marks[1].synchronize()
        return float(marks[0].elapsed_time(marks[1]) * 1e3 / repeats)

    return timed, lambda: out[0].transpose(0, 1).float().cpu().numpy()


def _rate(torch: Any) -> float:
    """Measures the operations a second of a large product of random matrices."""
    a, b = (torch.randn(_SIDE, _SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    marks, found = [torch.cuda.Event(enable_timing=True) for _ in range(2)], []
    for _ in range(_ROUNDS + 2):
        marks[0].record()
        torch.mm(a, b)
        marks[1].record()
        marks[1].synchronize()
        found.append(marks[0].elapsed_time(marks[1]) / 1e3)
    return 2 * _SIDE**3 / statistics.median(found[2:])


def measure(
    torch: Any, device: ost.Device, shape: str, tokens: int, rate: float, skipped: dict[str, str]
) -> list[dict[str, object]]:
    config = shape_named(shape)
    random = np.random.default_rng(tokens)
    queries = random.standard_normal((tokens, config.heads, config.head_size)).astype(np.float32)
    keys = random.standard_normal((2, 1, config.kv_heads, tokens, config.head_size))
    cache = to_bf16(keys)
    operations = 2.0 * config.query_size * tokens * (tokens + 1)
    repeats = max(1, round(2e-3 * rate / 3 / operations))  # some 2 ms a round
    warpgroups = has_warpgroups(device.properties.compute_capability)
    ways = {"ours": ours(device, config, tokens, queries, cache, repeats, warpgroups)}
    if warpgroups:
        ways["without warpgroups"] = ours(
            device, config, tokens, queries, cache, repeats, warpgroups=False
        )
    for way in _WAYS:
        try:
            ways[way] = theirs(torch, way, queries, cache, repeats)
        except RuntimeError as error:
            skipped[f"{shape}, {tokens}: {way}"] = str(error).splitlines()[0]
    times: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(_ROUNDS + 2):
        for way, (timed, _) in ways.items():
            spent = timed()
            times[way] += [spent] if number >= 2 else []
    wanted, rows = ways["ours"][1](), []
    for way, (_, read) in ways.items():
        us, apart = statistics.median(times[way]), read() - wanted
        rows.append(
            {
                "shape": shape,
                "tokens": tokens,
                "way": way,
                "us": round(us, 2),
                "least_us": round(min(times[way]), 2),
                "teraflops": round(operations / us / 1e6, 1),
                "of_product": round(operations / us / 1e-6 / rate, 3),
                "apart": float(f"{np.linalg.norm(apart) / np.linalg.norm(wanted):.2e}"),
            }
        )
    return rows


def main() -> int:
    parser = common.options(__doc__)
    chosen = parser.parse_args()
    torch = common.torch_with_cuda(chosen.device)
    if torch is None:
        return 0
    skipped: dict[str, str] = {}
    rows: list[dict[str, object]] = []
    with ost.open_device(chosen.device) as device:
        rate = _rate(torch)
        for shape in SHAPES:
            for tokens in TOKENS[:1] if chosen.quick else TOKENS:
                rows += measure(torch, device, shape, tokens, rate, skipped)
        columns = ("shape", "tokens", "way", "us", "teraflops", "of_product", "apart")
        print(common.table("a prompt's attention in one layer", rows, columns))
        common.emit(
            "prompt_attention",
            device,
            chosen.out,
            ceiling={
                "what": "4 * heads * head_size operations a pair, over a large product's rate",
                "product_teraflops": round(rate / 1e12, 1),
            },
            settings={"torch": torch.__version__, "rounds": _ROUNDS, "quick": chosen.quick},
            rows=rows,
            skipped=skipped,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
