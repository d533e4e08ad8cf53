"""Functions that wait for the GPU in the middle, as people write them, in `graphed`.

    python -m benchmarks.torch_waits [--works assertion,gcn] [--compile] [--calls N] [--out DIR]

Each work is called eagerly, by `graphed`, and with `--compile` by
torch.compile(mode="reduce-overhead"), with new random inputs for each comparison; the answers of
`graphed` are compared with eager ones bit by bit (`right`) or within 1e-5 (`close`).  Times are
those of whole calls, with the wait for the GPU at their end, in turns, block by block.  There is no
bound by hand: a person would cut the function into several.  `of_eager` is the part of the eager
time; `how` is what `graphed` has made of it, with the reason of an eager run.  `steady_s` is the
time of all calls from the first one to the second replay, or of 12 without a replay; for
torch.compile that of five calls.  A work whose library is missing is listed as "not installed".
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import ostinato as ost
from benchmarks import common

BLOCK = 10
CHECKS = 12
"""Calls whose answers are compared."""
Made = tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]
"""A function, and a function that draws its arguments."""


def works_on(torch: Any, where: str) -> dict[str, Callable[[], Made]]:
    nn, functional = torch.nn, torch.nn.functional

    def randn(*shape: int) -> Any:
        return torch.randn(*shape, device=where)

    def net(*sizes: int) -> Any:
        layers = [m for a, b in pairwise(sizes) for m in (nn.Linear(a, b), nn.GELU())]
        return nn.Sequential(*layers[:-1]).to(where).eval()

    def assertion() -> Made:
        model = net(256, 256, 256, 256, 256, 64)

        def function(x: Any) -> Any:
            assert torch.isfinite(x).all(), "the input is not finite"
            y = model(x)
            assert torch.isfinite(y).all(), "the output is not finite"
            return y

        return function, lambda: (randn(16, 256),)

    def mask() -> Made:
        first, second = net(128, 256, 128), net(128, 256, 10)
        valid = torch.arange(512, device=where) % 3 > 0

        def function(x: Any) -> Any:
            return second(first(x)[valid]).sum(0)

        return function, lambda: (randn(512, 128),)

    def equal() -> Made:
        model = net(256, 256, 256, 256)
        last = torch.zeros(8, 256, device=where)

        def function(x: Any) -> Any:
            return model(last) if torch.equal(x, last) else model(x) + 1

        return function, lambda: (randn(8, 256),)

    def length() -> Made:
        model = net(64, 128, 128, 64)
        lengths = torch.tensor([17, 30, 9, 24], device=where)

        def function(x: Any) -> Any:
            return model(x[:, : int(lengths.max().item())]).mean(1)

        return function, lambda: (randn(4, 40, 64),)

    def solve() -> Made:
        def function(a: Any, b: Any) -> Any:
            a = a @ a.mT + torch.eye(32, device=where)
            return torch.linalg.solve(a, b).tanh()

        return function, lambda: (randn(8, 32, 32), randn(8, 32, 4))

    def cholesky() -> Made:
        def function(a: Any, b: Any) -> Any:
            a = a @ a.mT + 32 * torch.eye(32, device=where)
            lower = torch.linalg.cholesky(a)
            return torch.cholesky_solve(b, lower), lower.diagonal(dim1=-2, dim2=-1).log().sum(-1)

        return function, lambda: (randn(8, 32, 32), randn(8, 32, 4))

    def kalman() -> Made:
        f, h = randn(16, 16) / 8, randn(8, 16) / 4

        def function(x: Any, p: Any, zs: Any) -> Any:
            for z in zs:
                x, p = f @ x, f @ p @ f.mT + torch.eye(16, device=where)
                s = h @ p @ h.mT + torch.eye(8, device=where)
                gain = p @ h.mT @ torch.linalg.inv(s)
                x, p = x + gain @ (z - h @ x), p - gain @ h @ p
            return x

        return function, lambda: (randn(16, 1), torch.eye(16, device=where), randn(20, 8, 1))

    def policy() -> Made:
        body, head = net(64, 128, 128), net(128, 128, 6)

        def function(x: Any) -> Any:
            choice = torch.distributions.Categorical(logits=head(body(x)))
            action = choice.sample()
            return action, choice.log_prob(action), choice.entropy()

        return function, lambda: (randn(32, 64),)

    def normal() -> Made:
        body = net(64, 128, 32)

        def function(x: Any) -> Any:
            found = torch.distributions.Normal(body(x), 1.0)
            action = found.rsample()
            return action, found.log_prob(action).sum(-1)

        return function, lambda: (randn(32, 64),)

    def constant() -> Made:
        model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3)).to(where).eval()

        def function(x: Any) -> Any:
            mean = torch.tensor([0.485, 0.456, 0.406], device=where)
            spread = torch.tensor([0.229, 0.224, 0.225]).to(where)
            return model((x - mean[:, None, None]) / spread[:, None, None])

        return function, lambda: (randn(2, 3, 32, 32),)

    def process() -> Made:
        import gpytorch

        class Model(gpytorch.models.ExactGP):  # type: ignore[misc]
            def __init__(self, x: Any, y: Any, likelihood: Any) -> None:
                super().__init__(x, y, likelihood)
                self.mean_module = gpytorch.means.ConstantMean()
                self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

            def forward(self, x: Any) -> Any:
                found = gpytorch.distributions.MultivariateNormal
                return found(self.mean_module(x), self.covar_module(x))

        likelihood = gpytorch.likelihoods.GaussianLikelihood().to(where)
        x = torch.linspace(0, 1, 64, device=where)
        model = Model(x, torch.sin(6 * x), likelihood).to(where).eval()
        likelihood.eval()

        def function(at: Any) -> Any:
            found = likelihood(model(at))
            return found.mean, found.variance

        return function, lambda: (torch.rand(32, device=where),)

    def ode(method: str) -> Callable[[], Made]:
        def make() -> Made:
            from torchdiffeq import odeint

            model = net(8, 64, 8)
            times = torch.linspace(0, 1, 6, device=where)
            options: dict[str, Any] = {} if method == "rk4" else {"rtol": 1e-2, "atol": 1e-2}

            def function(y: Any) -> Any:
                return odeint(lambda t, y: model(y), y, times, method=method, **options)

            return function, lambda: (randn(16, 8),)

        return make

    def graph_net(kind: str) -> Callable[[], Made]:
        def make() -> Made:
            from torch_geometric import nn as layers

            layer = getattr(layers, kind)
            first, second = layer(32, 64).to(where).eval(), layer(64, 16).to(where).eval()
            edges = torch.randint(0, 200, (2, 1000), device=where)

            def function(x: Any) -> Any:
                return second(first(x, edges).relu(), edges)

            return function, lambda: (randn(200, 32),)

        return make

    def conformer() -> Made:
        import torchaudio

        model = torchaudio.models.Conformer(
            input_dim=80, num_heads=4, ffn_dim=128, num_layers=4, depthwise_conv_kernel_size=31
        )
        model = model.to(where).eval()
        lengths = torch.tensor([100, 80], device=where)
        return lambda x: model(x, lengths)[0], lambda: (randn(2, 100, 80),)

    def filtering() -> Made:
        import torchaudio

        b, a = torch.tensor([0.2, 0.3], device=where), torch.tensor([1.0, -0.4], device=where)
        spectrum = torchaudio.transforms.MelSpectrogram(16000, n_fft=400).to(where)

        def function(x: Any) -> Any:
            return spectrum(torchaudio.functional.lfilter(x, a, b, clamp=False))

        return function, lambda: (randn(2, 4000),)

    def vision() -> Made:
        import timm

        model = timm.create_model("vit_tiny_patch16_224", pretrained=False).to(where).eval()
        return model, lambda: (randn(1, 3, 224, 224),)

    def boxes() -> Made:
        from torchvision import ops

        at = torch.rand(100, 2, device=where) * 50
        found = torch.cat([at, at + 10], 1)
        score = torch.rand(100, device=where)
        head = net(16, 64, 4)

        def function(x: Any) -> Any:
            kept = ops.nms(found, score, 0.5)
            return ops.clip_boxes_to_image(found[kept] + head(x)[kept], (64, 64))

        return function, lambda: (randn(100, 16),)

    def detection() -> Made:
        from torchvision.models import detection as models

        model = models.fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None)
        model = model.to(where).eval()
        return lambda x: model([x])[0]["boxes"], lambda: (torch.rand(3, 160, 160, device=where),)

    def sentences() -> Made:
        from transformers import BertConfig, BertModel

        config = BertConfig(
            vocab_size=1000,
            hidden_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=256,
        )
        model = BertModel(config).to(where).eval()
        present = torch.ones(4, 24, dtype=torch.long, device=where)
        present[1, 10:] = 0

        def function(ids: Any) -> Any:
            found = model(ids, attention_mask=present).last_hidden_state
            return functional.normalize((found * present[..., None]).sum(1), dim=-1)

        return function, lambda: (torch.randint(0, 1000, (4, 24), device=where),)

    def multivariate() -> Made:
        body = net(32, 64, 16)
        spread = torch.eye(16, device=where) * 2

        def function(x: Any, y: Any) -> Any:
            found = torch.distributions.MultivariateNormal(body(x), covariance_matrix=spread)
            return found.log_prob(y)

        return function, lambda: (randn(8, 32), randn(8, 16))

    def unique() -> Made:
        model = net(32, 64, 32)
        groups = torch.arange(64, device=where) % 5

        def function(x: Any) -> Any:
            names, which = torch.unique(groups, return_inverse=True)
            sums = torch.zeros(len(names), 32, device=where).index_add_(0, which, model(x))
            return sums / torch.bincount(which)[:, None]

        return function, lambda: (randn(64, 32),)

    return {
        "assertion": assertion,
        "mask": mask,
        "equal": equal,
        "length": length,
        "solve": solve,
        "cholesky": cholesky,
        "kalman": kalman,
        "policy": policy,
        "normal": normal,
        "multivariate": multivariate,
        "constant": constant,
        "unique": unique,
        "gpytorch": process,
        "ode fixed": ode("rk4"),
        "ode adaptive": ode("dopri5"),
        "gcn": graph_net("GCNConv"),
        "gat": graph_net("GATConv"),
        "conformer": conformer,
        "filter": filtering,
        "timm": vision,
        "nms": boxes,
        "detection": detection,
        "sentences": sentences,
    }


def _compared(torch: Any, one: Any, other: Any) -> str:
    leaves = torch.utils._pytree.tree_leaves
    pairs = list(zip(leaves(one), leaves(other), strict=True))
    if all(a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs):
        return "right"
    if all(a.shape == b.shape and torch.allclose(a, b, 1e-5, 1e-5) for a, b in pairs):
        return "close"
    return "WRONG"


def measure(torch: Any, name: str, made: Made, calls: int, compiles: bool) -> dict[str, object]:
    """Compares and times one work."""
    from ostinato.interop.torch import graphed

    function, draw = made
    step = graphed(function, name=name)
    answers: dict[str, int] = {}
    steady, replays = 0.0, 0
    for call in range(CHECKS):
        args = draw()
        torch.manual_seed(call)
        expected = function(*[a.clone() for a in args])
        torch.manual_seed(call)
        torch.cuda.synchronize()
        began = time.perf_counter()
        found = step(*args)
        torch.cuda.synchronize()
        steady += (time.perf_counter() - began) * (replays < 2)
        replays = step.statistics().replays
        answer = _compared(torch, found, expected)
        if answer == "WRONG":
            torch.manual_seed(call)
            if _compared(torch, function(*args), expected) == "WRONG":
                answer = "eager runs differ"
        answers[answer] = answers.get(answer, 0) + 1
    ways: dict[str, Callable[..., Any]] = {"eager": function, "graphed": step}
    row: dict[str, object] = {"work": name, "answers": answers, "steady_s": round(steady, 3)}
    args = draw()
    if compiles:
        torch._dynamo.reset()
        began = time.perf_counter()
        compiled: Any = torch.compile(function, mode="reduce-overhead")
        try:
            for _ in range(5):
                torch.compiler.cudagraph_mark_step_begin()
                compiled(*args)
            torch.cuda.synchronize()
            ways["compiled"] = compiled
        except Exception as error:
            row["compile_failed"] = f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
        row["compile_steady_s"] = round(time.perf_counter() - began, 3)
    us = common.call_times(torch, ways, args, max(1, calls // BLOCK), BLOCK)
    row |= common.of_graphed(step, us)
    step.close()
    return row


def main() -> int:
    parser = common.options(__doc__)
    parser.add_argument("--works", default="", help="some of them, with commas between")
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--compile", action="store_true", help="torch.compile beside them")
    chosen = parser.parse_args()
    torch = common.torch_with_cuda(chosen.device)
    if torch is None:
        return 0
    device = ost.open_device(chosen.device)
    calls = 40 if chosen.quick else chosen.calls
    rows: list[dict[str, object]] = []
    skipped: dict[str, str] = {}
    works = works_on(torch, "cuda")
    for name in tuple(filter(None, chosen.works.split(","))) or works:
        torch.manual_seed(0)
        try:
            with torch.no_grad():
                rows.append(measure(torch, name, works[name](), calls, chosen.compile))
            print(rows[-1], flush=True)
        except ImportError as error:
            skipped[name] = f"not installed: {error}"
        except Exception as error:
            skipped[name] = f"{type(error).__name__}: {str(error)[:300]}"
        if name in skipped:
            print(name, skipped[name], flush=True)
    columns = ("work", "eager_us", "graphed_us", "compiled_us", "of_eager", "steady_s")
    print(common.table("functions that wait", rows, (*columns, "replays", "eager", "answers")))
    common.emit(
        "torch_waits",
        device,
        chosen.out,
        ceiling={"what": "none by hand: a person would cut the function into several"},
        settings={"calls": calls, "torch": torch.__version__, "quick": chosen.quick},
        rows=rows,
        skipped=skipped,
        summary={
            **common.summary_of_graphed(rows),
            "of_eager_most": max((float(str(row["of_eager"])) for row in rows), default=None),
        },
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
