"""Saves graphs that torch, Triton and CuPy captured: the process that has these libraries.

python -m tests.gpu.disk_foreign FOLDER: writes NAME.graph, NAME.in.npz (new inputs) and
NAME.expected.npz (what the original gives for them), and outcomes.json: "saved" or the refusal.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import ostinato as ost

Case = Callable[[], tuple[dict[str, Any], dict[str, Any], Callable[[dict[str, Any]], Any]]]
"""Inputs, constants, and what is captured: a function of the inputs that returns a tensor."""

CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def torch_cases() -> None:
    import torch
    from torch.nn import functional as f

    def drawn(*shape: int, dtype: Any = torch.float32) -> Any:
        return torch.randn(shape, device="cuda", dtype=torch.float32).to(dtype)

    @case
    def linear_gelu() -> Any:
        w, b, v = drawn(512, 256), drawn(512), drawn(128, 512)
        constants = {"w": w, "b": b, "v": v}
        return (
            {"x": drawn(64, 256)},
            constants,
            lambda t: f.linear(f.gelu(f.linear(t["x"], w, b)), v),
        )

    @case
    def linear_bf16() -> Any:
        """cuBLASLt's cluster kernels with tensor maps."""
        w = drawn(2048, 2048, dtype=torch.bfloat16)
        return {"x": drawn(256, 2048, dtype=torch.bfloat16)}, {"w": w}, lambda t: t["x"] @ w

    @case
    def layer_norm_softmax() -> Any:
        w, b = drawn(256), drawn(256)
        constants = {"w": w, "b": b}
        return (
            {"x": drawn(64, 256)},
            constants,
            lambda t: f.layer_norm(t["x"], (256,), w, b).softmax(-1),
        )

    @case
    def attention() -> Any:
        q, k, v = (drawn(2, 8, 128, 64, dtype=torch.bfloat16) for _ in range(3))
        return (
            {"q": q, "k": k, "v": v},
            {},
            lambda t: f.scaled_dot_product_attention(t["q"], t["k"], t["v"], is_causal=True),
        )

    @case
    def convolution() -> Any:
        w = drawn(16, 8, 3, 3)
        return {"x": drawn(4, 8, 32, 32)}, {"w": w}, lambda t: f.conv2d(t["x"], w, padding=1)

    @case
    def sort() -> Any:
        return {"x": drawn(1 << 16)}, {}, lambda t: t["x"].sort().values

    @case
    def fourier() -> Any:
        return {"x": drawn(64, 1024)}, {}, lambda t: torch.fft.rfft(t["x"]).abs()

    @case
    def reduction() -> Any:
        return {"x": drawn(512, 4096)}, {}, lambda t: t["x"].sum(0) + t["x"].amax()

    @case
    def embedding() -> Any:
        table = drawn(1000, 64)
        x = torch.randint(0, 1000, (32,), device="cuda")
        return {"x": x}, {"table": table}, lambda t: table[t["x"]]

    @case
    def cumulative() -> Any:
        return {"x": drawn(8, 4096)}, {}, lambda t: t["x"].cumsum(-1)

    @case
    def top_k() -> Any:
        return {"x": drawn(4, 32000)}, {}, lambda t: t["x"].topk(5).values

    @case
    def forked() -> Any:
        side = torch.cuda.Stream()

        def work(t: dict[str, Any]) -> Any:
            here = torch.cuda.current_stream()
            side.wait_stream(here)
            with torch.cuda.stream(side):
                a = t["x"] * 2
            b = t["x"] + 1
            here.wait_stream(side)
            return a @ b

        return {"x": drawn(128, 128)}, {}, work

    @case
    def dropout() -> Any:
        """Random numbers: to be refused."""
        return {"x": drawn(128)}, {}, lambda t: f.dropout(t["x"], 0.5)

    try:
        import triton
        import triton.language as tl
    except ImportError:
        return

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def triton_add(x, y, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + at, tl.load(x + at, at < n) + tl.load(y + at, at < n), at < n)

    globals()["triton_add"] = triton_add

    @case
    def triton_kernel() -> Any:
        def work(t: dict[str, Any]) -> Any:
            out = torch.empty_like(t["x"])
            triton_add[(4,)](t["x"], t["y"], out, 1000, BLOCK=256)
            return out

        return {"x": drawn(1000), "y": drawn(1000)}, {}, work


def memory(tensor: Any) -> ost.MemoryRange:
    return ost.MemoryRange(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def raw(tensor: Any) -> np.ndarray[Any, Any]:
    import torch

    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    found: np.ndarray[Any, Any] = flat.cpu().numpy()
    return found


def captured(device: ost.Device, inputs: Any, work: Any) -> tuple[Any, Any, Any]:
    """The graph, torch's graph, and its output."""
    import torch

    from ostinato.interop.torch import adopt_graph

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            work(inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        out = work(inputs)
    graph.instantiate()
    return adopt_graph(device, graph), graph, out


def save(device: ost.Device, folder: Path, name: str, made: Case) -> str:
    import torch

    inputs, constants, work = made()
    graph, original, out = captured(device, inputs, work)
    others = {n: t.clone() for n, t in inputs.items()}
    other, _, other_out = captured(device, others, work)
    areas = {n: memory(t) for n, t in inputs.items()}
    twin = {n: memory(t) for n, t in others.items()} | {"out": memory(other_out)}
    torch.cuda.synchronize()
    start = time.perf_counter()
    graph.save(
        folder / f"{name}.graph",
        inputs=areas,
        outputs={"out": memory(out)},
        constants={n: memory(t) for n, t in constants.items()},
        twin=ost.Twin(other, twin),
    )
    seconds = time.perf_counter() - start
    for tensor in inputs.values():  # new values, in another order
        tensor.copy_(tensor.flip(0).clone())
    original.replay()
    torch.cuda.synchronize()
    np.savez(folder / f"{name}.in.npz", **{n: raw(t) for n, t in inputs.items()})
    np.savez(folder / f"{name}.expected.npz", out=raw(out))
    return f"saved in {seconds:.2f} s"


def main(folder: Path, names: list[str]) -> None:
    ost.collect_modules()
    outcomes = {}
    with ost.open_device("cuda") as device:
        import torch

        torch.manual_seed(1)
        with torch.no_grad():
            torch_cases()
            for name, made in CASES.items():
                if names and name not in names:
                    continue
                try:
                    outcomes[name] = save(device, folder, name, made)
                except ost.OstinatoError as error:
                    outcomes[name] = f"{type(error).__name__}: {error}"
                except Exception:
                    outcomes[name] = traceback.format_exc()
                print(name, outcomes[name], flush=True)
                (folder / "outcomes.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
