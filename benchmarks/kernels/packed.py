"""`python -m benchmarks.kernels.packed --out DIR [--shape 1B] [--skip-checks] [--steps-only]`

Products of one row with packed weights: checks every type against NumPy, then times each product
of a model shape by itself with several launch shapes, then whole steps.  The last line is JSON,
which is also in `DIR/packed-{device}.json`.

The physics: a product reads its packed weights once, so its minimum time is bytes over bandwidth.
A product by itself is timed in a chain of launches over copies of its weights that together do not
fit L2; each launch overlaps with the previous one, as in a step.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from typing import TYPE_CHECKING, Any

import ostinato as ost
from benchmarks import common
from benchmarks.kernels.checks import Bench, cases, config_of
from benchmarks.kernels.timing import StepBench
from ostinato.bench.shapes import SHAPES
from ostinato.models.config import LlamaConfig
from ostinato.models.cuda import lowering as kc
from ostinato.models.cuda.bricks import BRICK, FORMAT_OF, FORMATS, Packing, Part
from ostinato.models.cuda.shapes import (
    PRODUCTS,
    REGISTERS,
    PackedShape,
    Product,
    Tuning,
    default_tuning,
    packed_shape,
    products_of,
)
from ostinato.models.program import decode_program

if TYPE_CHECKING:
    from benchmarks.kernels.rig import Gpu, Memory

_MATRICES = {
    "qkv": "layers.0.wqkv",
    "output": "layers.0.wo",
    "gate_up": "layers.0.w_gate_up",
    "down": "layers.0.w_down",
}
_BEYOND_L2 = 300 << 20
_LAUNCHES = 40
_TENSORS = ("wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down", "embed", "head")
_TYPES = ("Q8_0", "Q4_0", "Q4_K", "Q6_K")

_MULTIPROCESSORS = 132
_WARPS = ((4, 2), (8, 1), (8, 2), (16, 1), (7, 1), (7, 2), (14, 1))  # split, teams
_RESIDENT_WARPS = 24  # the most warps of a multiprocessor


def rule_of(name: str, product: Product, kind: str) -> PackedShape:
    bits = FORMATS[kind].unit // 128
    shape = packed_shape(
        name, product, bits=bits, k_types=kind.endswith("K"), multiprocessors=_MULTIPROCESSORS
    )
    assert isinstance(shape, PackedShape)
    return shape


def cuts(name: str, product: Product, kind: str) -> list[PackedShape]:
    """Returns launch shapes to try: blocks that fill the chip once or several times, whose warps
    hold as many bricks as the registers have room for."""
    bricks, tiles = -(-product.inputs // BRICK), -(-product.pairs // 8)
    rule = rule_of(name, product, kind)
    made: dict[PackedShape, None] = {rule: None}
    for (split, teams), resident, waves, depth in itertools.product(
        _WARPS, (1, 2, 3), (1, 2, 4), (1, 2)
    ):
        span, warps = -(-bricks // split), split * teams
        turns = max(1, round(tiles / (teams * _MULTIPROCESSORS * resident * waves)))
        registers = 45 + depth * (44 if kind == "Q8_0" else 30)
        if (
            split > bricks
            or (split % 7 == 0) != (bricks % 7 == 0 and bricks > 16)
            or warps * resident > _RESIDENT_WARPS
            or depth > turns * span
            or registers * 32 * warps * resident > REGISTERS
            or tiles / (teams * turns) < 0.9 * _MULTIPROCESSORS
        ):
            continue
        made[PackedShape(split, teams, turns, depth, resident)] = None
    return list(made)


CHECKED = config_of(8, 2, 64, inner=1536, vocabulary=1003, tied_embeddings=True, layers=1)
RAGGED = config_of(9, 3, 64, inner=480, vocabulary=301, layers=1)


def check(gpu: Gpu) -> None:
    """Checks every type against NumPy."""
    benches = []
    for config, kinds in (
        (CHECKED, [*FORMAT_OF]),
        (RAGGED, [kind for kind in FORMAT_OF if not kind.endswith("_K")]),
    ):
        for kind in kinds:
            types = dict.fromkeys(_TENSORS, kind)
            if kind == "Q4_K":
                types |= {"wv": "Q6_K", "w_down": "Q6_K"}
            made = Bench(gpu, config, max_rows=1, sequences=2, context=300, types=types)
            benches.append((kind, made))
    gpu.preload([one for _, made in benches for one in made.launches(1)])
    for kind, made in benches:
        worst: dict[str, float] = {}
        for case in cases(made, 1):
            for kernel, error in made.check(case).items():
                worst[kernel] = max(worst.get(kernel, 0.0), error)
        shown = " ".join(f"{kernel} {error:.0e}" for kernel, error in worst.items() if error)
        print(f"ok {kind} hidden {made.config.hidden}: {shown}", flush=True)


class ProductBench:
    """A product of a model shape by itself, over copies of packed weights."""

    def __init__(self, gpu: Gpu, step: StepBench) -> None:
        self.gpu, self.step, self.config = gpu, step, step.config
        self.base = default_tuning(
            self.config,
            context=step.context,
            multiprocessors=gpu.multiprocessors,
            clusters=True,
            fast_memory=gpu.fast_memory,
        )
        self.base = replace(self.base, block=None)
        self._copies: dict[tuple[str, str], list[Memory]] = {}

    def how(self, name: str, kind: str) -> Packing:
        return (Part(kind, kc.products_of(self.config)[name].pairs),)

    def launch(self, name: str, kind: str, shape: PackedShape) -> kc.CudaLaunch:
        tuning = replace(self.base, packed={name: shape})
        head = "embed" if self.config.tied_embeddings else "head"
        cut = kc.Lowering(self.config, 1, tuning, {_MATRICES.get(name, head): self.how(name, kind)})
        call = next(c for c in decode_program(self.config) if PRODUCTS.get(c.kernel) == name)
        return cut.launch([call], after="embed")

    def copies(self, name: str, kind: str) -> list[Memory]:
        key = (name, kind)
        if key not in self._copies:
            how, inputs = self.how(name, kind), kc.products_of(self.config)[name].inputs
            made = [self.step.packed(how, inputs)]
            while sum(one.nbytes for one in made) < _BEYOND_L2 and len(made) < _LAUNCHES:
                made.append(self.step.packed(how, inputs))
            self._copies[key] = made
        return self._copies[key]

    def time(self, name: str, kind: str, shape: PackedShape) -> tuple[float, int]:
        """Times a launch.  Returns µs, and the bytes of its weights."""
        launch, copies = self.launch(name, kind, shape), self.copies(name, kind)

        def submit() -> None:
            for index in range(_LAUNCHES):
                self.step.where["one"] = copies[index % len(copies)]
                self.step.submit([_with_weight(launch)], 1)

        graph = self.gpu.capture(submit)
        us = self.gpu.time(graph, repeats=5, rounds=3) / _LAUNCHES
        self.gpu.destroy(graph)
        return us, copies[0].nbytes


def _with_weight(launch: kc.CudaLaunch) -> kc.CudaLaunch:
    given = tuple(
        (n, kc.BufferArgument("one") if n == "weight" else v) for n, v in launch.arguments
    )
    return replace(launch, arguments=given)


def time_products(
    bench: ProductBench, kinds: Sequence[str]
) -> tuple[list[dict[str, Any]], dict[tuple[str, str], PackedShape]]:
    wanted = [
        (name, kind, shape)
        for kind in kinds
        for name, product in products_of(bench.config).items()
        if kind != "Q6_K" or name in ("down", "head")
        for shape in cuts(name, product, kind)
    ]
    begin = time.perf_counter()
    launches = [bench.launch(*one) for one in wanted]
    bench.gpu.preload(launches)
    print(f"{len(launches)} kernels compiled in {time.perf_counter() - begin:.1f} s", flush=True)
    bench.step.set_position(1, 20)
    bench.step.submit(
        [one for one in bench.step.launches(1, bench.base) if one.kernel == "embed"], 1
    )
    rows: list[dict[str, Any]] = []
    best: dict[tuple[str, str], PackedShape] = {}
    for name, kind in dict.fromkeys((name, kind) for name, kind, _ in wanted):
        found = []
        for other, of_kind, shape in wanted:
            if (other, of_kind) != (name, kind):
                continue
            try:
                us, nbytes = bench.time(name, kind, shape)
            except RuntimeError as error:
                print(f"{kind} {name} {shape}: {error}", flush=True)
                continue
            found.append((us, shape))
            rows.append(
                {
                    "what": "product", "type": kind, "product": name, "us": round(us, 3),
                    "cut": astuple(shape),
                    "gb_per_second": round(nbytes / us / 1e3),
                }
            )  # fmt: skip
        found.sort(key=lambda pair: pair[0])
        best[name, kind] = found[0][1]
        rule = rule_of(name, products_of(bench.config)[name], kind)
        shown = "  ".join(
            f"{','.join(map(str, astuple(s)))}: {us:.2f} us {nbytes / us / 1e3:.0f}"
            for us, s in found
            if s == rule or us < 1.1 * found[0][0]
        )
        print(f"{kind:5} {name:8} {nbytes / 1e6:6.2f} MB  {shown}", flush=True)
    return rows, best


def time_steps(
    gpu: Gpu,
    config: LlamaConfig,
    recipes: Sequence[str | None],
    best: Mapping[tuple[str, str], PackedShape],
) -> Iterator[dict[str, Any]]:
    """Times steps with the default launch shapes, with one of them changed, and with each product's
    best shape by itself; yields rows."""
    for recipe in recipes:
        bench = StepBench(gpu, config, recipe=recipe)
        rule = default_tuning(
            config,
            context=2048,
            multiprocessors=gpu.multiprocessors,
            clusters=True,
            fast_memory=gpu.fast_memory,
        )
        kind = {"Q4_K_M": "Q4_K"}.get(str(recipe), str(recipe))
        tuned = {name: best[name, kind] for name in products_of(config) if (name, kind) in best}
        if recipe == "Q4_K_M" and ("head", "Q6_K") in best:
            tuned["head"] = best["head", "Q6_K"]
        tunings: dict[str, Tuning] = {"rule": rule}
        if recipe is not None:
            for name, shape in tuned.items():
                tunings[f"best alone: {name}"] = replace(rule, packed={name: shape})
            if tuned:
                tunings["best alone"] = replace(rule, packed=tuned)
        gpu.preload([one for t in tunings.values() for one in bench.launches(1, t)])
        for label, tuning in tunings.items():
            for position in (20, 500) if label in ("rule", "best alone") else (20,):
                us = bench.time_step(1, tuning, position)
                yield {
                    "what": "step", "recipe": recipe or "bf16", "tuning": label,
                    "position": position, "us": round(us, 2), "bytes": bench.weight_bytes(),
                }  # fmt: skip
                print(
                    f"{recipe or 'bf16':7} at {position:3} {label:24} {us:7.1f} us "
                    f"{1e6 / us:6.0f} tok/s, {bench.weight_bytes() / 1e6:.0f} MB, "
                    f"{bench.weight_bytes() / us / 1e3:.0f} GB/s",
                    flush=True,
                )
        tuning = rule
        for kernel, times in bench.profile(1, tuning, 20).items():
            yield {"what": "kernel", "recipe": recipe or "bf16", "kernel": kernel, **times}
            print(
                f"{recipe or 'bf16':7} {kernel:16} x{times['launches']:<3} alone "
                f"{times['alone_us']:6.2f} us, adds {times['adds_us']:6.2f}",
                flush=True,
            )
        gpu.free_all()


def main() -> int:
    parser = common.options(__doc__)
    parser.add_argument("--shape", default="1B")
    parser.add_argument("--types", default=",".join(_TYPES))
    parser.add_argument("--skip-checks", action="store_true")
    parser.add_argument("--steps-only", action="store_true", help="no product by itself")
    parser.add_argument("--recipes", default="bf16,Q8_0,Q4_0,Q4_K_M", help="of whole steps")
    chosen = parser.parse_args()
    recipes = [None if one == "bf16" else one for one in chosen.recipes.split(",")]
    from benchmarks.kernels.rig import Gpu

    gpu = Gpu()
    print(gpu.device_name, gpu.capability, gpu.multiprocessors, flush=True)
    if not chosen.skip_checks:
        check(gpu)
        gpu.free_all()
    config = SHAPES[chosen.shape]
    bench = ProductBench(gpu, StepBench(gpu, replace(config, layers=1)))
    rows: list[dict[str, Any]] = []
    best: dict[tuple[str, str], PackedShape] = {}
    if not chosen.steps_only:
        rows, best = time_products(bench, chosen.types.split(","))
    gpu.free_all()
    rows += time_steps(gpu, config, recipes, best)
    with ost.open_device(chosen.device) as device:
        common.emit(
            "packed",
            device,
            chosen.out,
            ceiling={"what": "every packed weight once"},
            settings={"shape": chosen.shape, "types": chosen.types},
            rows=rows,
            skipped={},
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
