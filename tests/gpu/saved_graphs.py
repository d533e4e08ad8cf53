"""Twenty graphs of other libraries: saved in one process, run in another without these libraries.

    python -m tests.gpu.saved_graphs [NAME ...]

prints a table and, as its last line, JSON.  Each graph is compared bit by bit with its original, on
the inputs that are in the file and on new ones; or it is refused, with the reason.  The exit status
is 1 if one gives other bytes, or is refused for a reason that is not known here.

The saving process is `--save FOLDER [NAME ...]`.  It writes NAME.graph, NAME.in.npz (new inputs),
NAME.first.npz and NAME.expected.npz (what the original gives for the stored and the new ones), and
outcomes.json.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

import ostinato as ost
from ostinato.graphfile.container import open_file
from tests.graphfile import file_runner

ROOT = Path(__file__).parents[2]
NAMES = (
    *("linear_gelu", "linear_bf16", "layer_norm_softmax", "attention", "convolution", "sort"),
    *("fourier", "reduction", "embedding", "cumulative", "top_k", "forked", "loop", "dropout"),
    *("host_function", "triton_kernel", "cupy_elementwise", "cupy_sum", "cupy_fourier", "decode"),
)
REFUSED: Mapping[str, tuple[str, ...]] = {
    "dropout": ("draws random numbers",),
    "host_function": ("calls a function of this process",),
    # Tables and plans that the library made when it was warmed up: they have no name.
    "fourier": (
        "depend on memory without a name",
        "is only read and has no name",
        "a variable, lut_sp, that was changed",  # or tables in its modules' variables
    ),
    "cupy_fourier": (
        "depend on memory without a name",
        "is only read and has no name",
        "a variable, lut_sp, that was changed",
    ),
    "convolution": ("depend on memory without a name",),
}
"""What may be refused, and why."""
MUST_BE_REFUSED = ("dropout", "host_function")


# ------------------------------------------------------------------------------- the whole program


@dataclass(frozen=True)
class Verdict:
    """`kind`: "equal", "refused", "unexplained" (refused for a reason that is not known here),
    "wrong", or "missing" (its library)."""

    kind: str
    what: str


def verdict(folder: Path, name: str, outcomes: Mapping[str, str]) -> Verdict:
    """What came of one graph."""
    outcome = outcomes.get(name)
    if outcome is None or outcome.startswith("missing"):
        return Verdict("missing", outcome or "it was not begun")
    if not outcome.startswith("saved"):
        known = any(why in outcome for why in REFUSED.get(name, ()))
        return Verdict("refused" if known else "unexplained", outcome)
    if name in MUST_BE_REFUSED:
        return Verdict("wrong", "it was saved, and must be refused")
    if (error := folder / f"{name}.error.txt").exists():
        return Verdict("wrong", error.read_text())
    for found, wanted, which in (("stored", "first", "stored"), ("out", "expected", "new")):
        if not (folder / f"{name}.{found}.npz").exists():
            return Verdict("wrong", "the process that runs it ended")
        mine, theirs = (np.load(folder / f"{name}.{kind}.npz") for kind in (found, wanted))
        for output in theirs.files:
            if mine[output].tobytes() != theirs[output].tobytes():
                places = np.flatnonzero(mine[output].reshape(-1).view(np.uint8) != theirs[output])
                return Verdict(
                    "wrong",
                    f"other bytes of {output} for the {which} inputs: {places.size} of "
                    f"{theirs[output].size}, from {places[0]} to {places[-1]}; the file has the "
                    f"result of {of_the_file(folder, name, output)}",
                )
    return Verdict("equal", outcome)


def of_the_file(folder: Path, name: str, output: str) -> str:
    """Whose result for the stored inputs a file has, by which its check compared."""
    with open_file(folder / f"{name}.graph") as contents:
        digest = contents.manifest.tensors.get(f"results/{output}")
    kinds = {"first": "the original", "stored": "the restored graph"}
    found = [
        whose
        for kind, whose in kinds.items()
        if sha256(np.load(folder / f"{name}.{kind}.npz")[output].tobytes()).hexdigest() == digest
    ]
    return " and of ".join(found) or "neither"


def grown(path: Path) -> str:
    """Which named buffers lie in blocks that are larger than they are."""
    with open_file(path) as contents:
        manifest = contents.manifest
    pairs = [(b, manifest.blocks[b.block].nbytes) for b in manifest.buffers]
    found = [f"{b.name} ({b.nbytes} of {whole} bytes)" for b, whole in pairs if whole > b.nbytes]
    return f"; in larger blocks: {', '.join(found)}" if found else ""


def run_elsewhere(folder: Path) -> str:
    """Runs all files of a folder in processes that have this library alone; what they said."""
    paths = [str(ROOT), *(p for p in sys.path if p)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, file_runner.__file__, str(folder), "cuda"]
    while True:
        left = len(list(folder.glob("*.error.txt")))
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 100 or len(list(folder.glob("*.error.txt"))) == left:
            return done.stderr


def save_elsewhere(folder: Path, names: tuple[str, ...]) -> dict[str, str]:
    """The outcomes of a process that saves; how it ended, for graphs that it did not come to."""
    command = [sys.executable, "-m", "tests.gpu.saved_graphs", "--save", str(folder), *names]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    status = subprocess.run(command, env=environment, cwd=ROOT, check=False).returncode
    outcomes: dict[str, str] = {}
    if status:
        outcomes = dict.fromkeys(names or NAMES, f"the process that saves ended with {status}")
    with suppress(OSError):
        outcomes |= json.loads((folder / "outcomes.json").read_text())
    return outcomes


def main(names: tuple[str, ...]) -> int:
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="ostinato-") as name:
        folder = Path(name)
        outcomes = save_elsewhere(folder, names)
        said = run_elsewhere(folder)
        found = {one: verdict(folder, one, outcomes) for one in names or NAMES}
    print()
    for one, what in found.items():
        kind = "bit-equal on stored and new inputs" if what.kind == "equal" else what.kind
        print(f"{one:20} {kind}: {what.what[:1000]}")
    if said:
        print(said[-2000:], file=sys.stderr)
    counts = {
        kind: sum(what.kind == kind for what in found.values())
        for kind in ("equal", "refused", "unexplained", "wrong", "missing")
    }
    reasons = {n: v.what[:300] for n, v in found.items() if v.kind != "equal"}
    seconds = round(time.perf_counter() - begun, 1)
    print(json.dumps({"graphs": len(found), **counts, "seconds": seconds, "reasons": reasons}))
    return int(counts["wrong"] + counts["unexplained"] > 0)


# ------------------------------------------------------------------------------------------ graphs


@dataclass
class Captured:
    """A graph, and what its original is run with."""

    graph: ost.Graph
    outputs: dict[str, Any]
    replay: Callable[[], object]


@dataclass(frozen=True)
class Case:
    """One graph to save.  `capture` makes it on the given inputs; `renew` puts other values into
    them.  `twin`: whether a second capture proves which words are addresses."""

    inputs: dict[str, Any]
    capture: Callable[[dict[str, Any]], Captured]
    constants: dict[str, Any] = field(default_factory=dict)
    twin: bool = True
    renew: Callable[[dict[str, Any]], None] | None = None


Maker = Callable[[], Case]
CASES: dict[str, Maker] = {}


def case(make: Maker) -> Maker:
    CASES[make.__name__] = make
    return make


def torch_cases(device: ost.Device) -> None:
    import torch
    from torch.nn import functional as f

    def drawn(*shape: int, dtype: Any = torch.float32) -> Any:
        return torch.randn(shape, device="cuda", dtype=torch.float32).to(dtype)

    def of(inputs: dict[str, Any], work: Callable[[dict[str, Any]], Any], **constants: Any) -> Case:
        return Case(inputs, lambda given: torch_captured(device, given, work), constants)

    @case
    def linear_gelu() -> Case:
        w, b, v = drawn(512, 256), drawn(512), drawn(128, 512)
        return of(
            {"x": drawn(64, 256)},
            lambda t: f.linear(f.gelu(f.linear(t["x"], w, b)), v),
            w=w,
            b=b,
            v=v,
        )

    @case
    def linear_bf16() -> Case:
        """cuBLASLt's cluster kernels with tensor maps."""
        w = drawn(2048, 2048, dtype=torch.bfloat16)
        return of({"x": drawn(256, 2048, dtype=torch.bfloat16)}, lambda t: t["x"] @ w, w=w)

    @case
    def layer_norm_softmax() -> Case:
        w, b = drawn(256), drawn(256)
        return of(
            {"x": drawn(64, 256)},
            lambda t: f.layer_norm(t["x"], (256,), w, b).softmax(-1),
            w=w,
            b=b,
        )

    @case
    def attention() -> Case:
        q, k, v = (drawn(2, 8, 128, 64, dtype=torch.bfloat16) for _ in range(3))
        return of(
            {"q": q, "k": k, "v": v},
            lambda t: f.scaled_dot_product_attention(t["q"], t["k"], t["v"], is_causal=True),
        )

    @case
    def convolution() -> Case:
        w = drawn(16, 8, 3, 3)
        return of({"x": drawn(4, 8, 32, 32)}, lambda t: f.conv2d(t["x"], w, padding=1), w=w)

    @case
    def sort() -> Case:
        return of({"x": drawn(1 << 16)}, lambda t: t["x"].sort().values)

    @case
    def fourier() -> Case:
        return of({"x": drawn(64, 1024)}, lambda t: torch.fft.rfft(t["x"]).abs())

    @case
    def reduction() -> Case:
        return of({"x": drawn(512, 4096)}, lambda t: t["x"].sum(0) + t["x"].amax())

    @case
    def embedding() -> Case:
        table = drawn(1000, 64)
        x = torch.randint(0, 1000, (32,), device="cuda")
        return of({"x": x}, lambda t: table[t["x"]], table=table)

    @case
    def cumulative() -> Case:
        return of({"x": drawn(8, 4096)}, lambda t: t["x"].cumsum(-1))

    @case
    def top_k() -> Case:
        return of({"x": drawn(4, 32000)}, lambda t: t["x"].topk(5).values)

    @case
    def forked() -> Case:
        side = torch.cuda.Stream()

        def work(t: dict[str, Any]) -> Any:
            here = torch.cuda.current_stream()
            side.wait_stream(here)
            with torch.cuda.stream(side):
                a = t["x"] * 2
            b = t["x"] + 1
            here.wait_stream(side)
            return a @ b

        return of({"x": drawn(128, 128)}, work)

    @case
    def dropout() -> Case:
        """Random numbers: to be refused."""
        return of({"x": drawn(128)}, lambda t: f.dropout(t["x"], 0.5))

    @case
    def loop() -> Case:
        """y = tanh(y @ w), as often as `left` says, in a WHILE node of ours."""
        w = drawn(128, 128) / 8

        def work(t: dict[str, Any]) -> Any:
            return t["y"].copy_((t["y"] @ w).tanh())

        def capture(t: dict[str, Any]) -> Captured:
            body = torch_captured(device, t, work)
            graph = ost.Graph.create(device)
            again = graph.condition(1, reset_at_launch=True)
            repeat = graph.add_conditional("while", again)
            countdown = device.modules.get_or_compile(
                COUNTDOWN, "countdown", signature="handle: cond, left: *i32"
            )
            inner = repeat.bodies[0]
            counted = inner.add_kernel(countdown, ost.LaunchConfig(1, 1), again, t["left"])
            inner.add_child(body.graph, after=[counted])
            graph.keep.append(body)
            stream = device.create_stream()

            def replay() -> None:
                with graph.instantiate() as run:  # such a graph has one executable at a time
                    run.launch(stream)
                    stream.synchronize()

            return Captured(graph, {"y": t["y"], "left": t["left"]}, replay)

        def renew(t: dict[str, Any]) -> None:
            t["y"].normal_()
            t["left"].fill_(5)

        left = torch.full((1,), 3, dtype=torch.int32, device="cuda")
        inputs = {"y": drawn(32, 128), "left": left}
        return Case(inputs, capture, {"w": w}, twin=False, renew=renew)

    @case
    def host_function() -> Case:
        """To be refused."""

        def capture(t: dict[str, Any]) -> Captured:
            made = torch_captured(device, t, lambda t: t["x"] * 2)
            graph = ost.Graph.create(device)
            first = graph.add_child(made.graph)
            graph.add_call(lambda: None, after=[first])
            graph.keep.append(made)
            return Captured(graph, made.outputs, made.replay)

        return Case({"x": drawn(128)}, capture, twin=False)


COUNTDOWN = ost.Source(
    r"""
extern "C" __device__ __cudart_builtin__ void CUDARTAPI cudaGraphSetConditional(
    cudaGraphConditionalHandle handle, unsigned int value);
extern "C" __global__ void countdown(cudaGraphConditionalHandle handle, int* left) {
    if (threadIdx.x == 0) cudaGraphSetConditional(handle, --*left > 0);
}
""",
    name="countdown",
)


def triton_cases(device: ost.Device) -> None:
    import torch
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def triton_add(x, y, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + at, tl.load(x + at, at < n) + tl.load(y + at, at < n), at < n)

    globals()["triton_add"] = triton_add
    globals()["tl"] = tl

    @case
    def triton_kernel() -> Case:
        def work(t: dict[str, Any]) -> Any:
            out = torch.empty_like(t["x"])
            triton_add[(4,)](t["x"], t["y"], out, 1000, BLOCK=256)
            return out

        inputs = {name: torch.randn(1000, device="cuda") for name in "xy"}
        return Case(inputs, lambda t: torch_captured(device, t, work))


def cupy_cases(device: ost.Device) -> None:
    import cupy

    from ostinato.interop.cupy import adopt_graph

    stream = cupy.cuda.Stream(non_blocking=True)

    def captured(t: dict[str, Any], work: Callable[[dict[str, Any]], Any]) -> Captured:
        cupy.cuda.Device().synchronize()
        with stream:
            for _ in range(2):
                work(t)
            stream.synchronize()
            stream.begin_capture(cupy.cuda.runtime.streamCaptureModeThreadLocal)
            out = work(t)
            graph = stream.end_capture()
        return Captured(adopt_graph(device, graph), {"out": out}, lambda: graph.launch(stream))

    def of(inputs: dict[str, Any], work: Callable[[dict[str, Any]], Any]) -> Case:
        return Case(inputs, lambda t: captured(t, work))

    def drawn(*shape: int, dtype: Any = cupy.float32) -> Any:
        return cupy.random.standard_normal(shape, dtype=cupy.float32).astype(dtype)

    @case
    def cupy_elementwise() -> Case:
        blend = cupy.ElementwiseKernel("T x, T y", "T z", "z = x * 3 + sqrt(abs(y))", "blend")
        return of({"x": drawn(5000), "y": drawn(5000)}, lambda t: blend(t["x"], t["y"]) * t["x"])

    @case
    def cupy_sum() -> Case:
        return of({"x": drawn(64, 2048)}, lambda t: t["x"].sum(axis=1))

    @case
    def cupy_fourier() -> Case:
        return of({"x": drawn(16, 1024, dtype=cupy.complex64)}, lambda t: cupy.fft.fft(t["x"]))


def transformers_cases(device: ost.Device) -> None:
    import torch

    from benchmarks.cold_start import LENGTH, PLACE, settle, state_of, weights_of
    from benchmarks.peers import transformers_loop as loops
    from ostinato.bench.shapes import SHAPES
    from ostinato.interop.torch import adopt_graph

    @case
    def decode() -> Case:
        """A greedy step of the 1B shape.  Its weights are in the file."""
        config = SHAPES["1B"]
        model = loops.random_llama(config)
        loop = loops.DecodeLoop(model, batch=1, length=LENGTH, how="eager")
        state = state_of(loop)
        settle(state, 1)

        def capture(t: dict[str, Any]) -> Captured:
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                loop._advance()
            graph.instantiate()
            return Captured(adopt_graph(device, graph), dict(t), graph.replay)

        def renew(t: dict[str, Any]) -> None:
            settle(t, 2, token=9, place=PLACE - 1)

        return Case(state, capture, weights_of(model), twin=False, renew=renew)


def memory(array: Any) -> ost.MemoryRange:
    """Of a tensor of torch or an array of CuPy."""
    if hasattr(array, "data_ptr"):
        return ost.MemoryRange(array.data_ptr(), array.numel() * array.element_size())
    return ost.MemoryRange(array.data.ptr, array.nbytes)


def areas(arrays: Mapping[str, Any]) -> dict[str, ost.MemoryRange]:
    return {name: memory(array) for name, array in arrays.items()}


def raw(device: ost.Device, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The bytes of arrays, after all work of the device."""
    device.synchronize()
    stream = device.create_stream()
    found = {}
    for name, area in areas(arrays).items():
        found[name] = np.empty(area.nbytes, np.uint8)
        device.driver.memcpy_to_host(found[name].data, area.address, stream.handle)
    stream.close()
    return found


def put(device: ost.Device, arrays: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Puts bytes into arrays."""
    stream = device.create_stream()
    for name, area in areas(arrays).items():
        device.driver.memcpy_from_host(area.address, values[name].data, stream.handle)
    stream.synchronize()
    stream.close()


def torch_captured(
    device: ost.Device, inputs: dict[str, Any], work: Callable[[dict[str, Any]], Any]
) -> Captured:
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
    return Captured(adopt_graph(device, graph), {"out": out}, graph.replay)


def save(device: ost.Device, folder: Path, name: str, made: Maker) -> str:
    given = made()
    inputs = given.inputs
    stored = raw(device, inputs)
    one = given.capture(inputs)
    put(device, inputs, stored)  # a warm-up may have changed state
    twin = None
    if given.twin:
        others = {n: a.copy() if hasattr(a, "get") else a.clone() for n, a in inputs.items()}
        other = given.capture(others)
        twin = ost.graphfile.Twin(other.graph, {**areas(others), **areas(other.outputs)})
    device.synchronize()
    start = time.perf_counter()
    ost.graphfile.save(
        one.graph,
        folder / f"{name}.graph",
        inputs=areas(inputs),
        outputs=areas(one.outputs),
        constants=areas(given.constants),
        twin=twin,
    )
    seconds = time.perf_counter() - start
    one.replay()
    np.savez(folder / f"{name}.first.npz", **raw(device, one.outputs))
    put(device, inputs, stored)
    if given.renew is not None:
        given.renew(inputs)
    else:  # the same values in another order
        put(device, inputs, {n: turned(stored[n], size_of(array)) for n, array in inputs.items()})
    np.savez(folder / f"{name}.in.npz", **raw(device, inputs))
    one.replay()
    np.savez(folder / f"{name}.expected.npz", **raw(device, one.outputs))
    return f"saved in {seconds:.2f} s, {len(one.graph)} nodes{grown(folder / f'{name}.graph')}"


def turned(data: np.ndarray[Any, Any], elements: int) -> np.ndarray[Any, Any]:
    """The bytes of so many elements, in the opposite order."""
    return data.reshape(elements, -1)[::-1].copy().reshape(-1)


def size_of(array: Any) -> int:
    """How many elements there are."""
    return int(array.numel() if hasattr(array, "numel") else array.size)


def saving(folder: Path, names: tuple[str, ...]) -> None:
    ost.graphfile.collect_modules()
    begun = time.perf_counter()
    outcomes: dict[str, str] = {}

    def note(name: str, outcome: str) -> None:
        outcomes[name] = outcome
        print(f"{time.perf_counter() - begun:6.1f} s  {name}: {outcome[:1000]}", flush=True)
        (folder / "outcomes.json").write_text(json.dumps(outcomes))

    (folder / "outcomes.json").write_text("{}")
    with ost.open_device("cuda") as device:
        import torch

        torch.manual_seed(1)
        for group in (torch_cases, triton_cases, cupy_cases, transformers_cases):
            before = set(CASES)
            try:
                group(device)
            except ImportError as error:
                note(group.__name__, f"missing: {error}")
            for name in [n for n in CASES if n not in before]:
                if names and name not in names:
                    continue
                try:
                    with torch.no_grad():
                        note(name, save(device, folder, name, CASES[name]))
                except ost.OstinatoError as error:
                    note(name, f"{type(error).__name__}: {error}")
                except Exception:
                    note(name, traceback.format_exc())


if __name__ == "__main__":
    if sys.argv[1:2] == ["--save"]:
        saving(Path(sys.argv[2]), tuple(sys.argv[3:]))
    else:
        sys.exit(main(tuple(sys.argv[1:])))
