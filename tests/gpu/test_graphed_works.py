"""`graphed` on functions and models that torch and transformers ship: the same answers as eager."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.torch_works import MODELS, NAMES, make_work
from ostinato.device import Device
from tests.gpu.foreign import library

torch = library("torch")

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


def tensors(result: Any) -> list[Any]:
    leaves = torch.utils._pytree.tree_leaves(result)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def farthest(one: list[Any], other: list[Any]) -> float:
    """By how much two results differ; 0 if they are equal, NaN with NaN too."""
    assert [t.shape for t in one] == [t.shape for t in other]
    pairs = zip(one, other, strict=True)
    return max(
        0.0 if torch.equal(a, b) else float((a.double() - b.double()).abs().max()) for a, b in pairs
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_same_as_eager(cuda_device: Device, name: str) -> None:
    """Bit-equal, or within what two eager runs differ by."""
    from ostinato.interop.torch import graphed

    if name in MODELS:
        library("transformers")
    work = make_work(name)
    step: Any = graphed(work.function, device=cuda_device, static=work.static)
    statics = [work.fresh() for _ in range(3)]
    with torch.inference_mode():
        for number in range(6):
            args = work.draw()
            runs = []
            for run, static in zip((work.function, work.function, step), statics, strict=True):
                torch.manual_seed(number)
                runs.append([t.clone() for t in tensors(run(*args, *static))])
            assert runs[0], "no tensor in the result"
            allowed = farthest(runs[0], runs[1])
            assert farthest(runs[0], runs[2]) <= allowed, f"call {number}: {step.explain()}"
    statistics = step.statistics()
    assert (statistics.eager, statistics.captures, statistics.replays) == (1, 1, 5), step.explain()
    step.close()


@pytest.mark.parametrize("padded", [False, True])
def test_an_encoder_with_a_mask(cuda_device: Device, padded: bool) -> None:
    """Whether the mask masks anything is asked eagerly, which no graph can: other kernels then."""
    from ostinato.interop.torch import graphed

    library("transformers")
    work = make_work("encoder")
    mask = torch.ones(2, 16, dtype=torch.int64, device="cuda")
    if padded:
        mask[0, 10:] = 0
    step: Any = graphed(work.function, device=cuda_device)
    with torch.inference_mode():
        # torch sets the order of its attention kernels, which is in the key, in a process's first.
        work.function(*work.draw(), attention_mask=mask)
        for _ in range(4):
            (ids,) = work.draw()
            found = step(ids, attention_mask=mask).last_hidden_state
            wanted = work.function(ids, attention_mask=mask).last_hidden_state
            torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.05)
    assert step.statistics().replays == 3, step.explain()
    step.close()


@pytest.mark.parametrize("page", ["README.md", "docs/torch.md"])
def test_the_code_of_the_pages_runs(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    (block,) = [
        b
        for b in re.findall(r"^```py\w*\n(.*?)^```", text, flags=re.S | re.M)
        if "interop.torch" in b
        and "save()" not in b  # that one: test_graphed_store.py
        and "train_step" not in b
    ]
    inputs = [torch.randn(2, 8, device="cuda") for _ in range(4)]
    names: dict[str, Any] = {"torch": torch, "model": torch.nn.Linear(8, 8).cuda()}
    names |= {"inputs": inputs, "x": inputs[0]}
    exec(compile(block, page, "exec"), names)
    with torch.inference_mode():
        last = inputs[-1] if page.startswith("docs") else inputs[0]
        assert torch.equal(names["y"], names["model"](last))
        names["step"](last)
        assert names["step"].statistics().replays >= 1
    names["step"].close()


def test_the_training_step_of_the_page_runs() -> None:
    text = (ROOT / "docs/torch.md").read_text(encoding="utf-8")
    (block,) = [
        b for b in re.findall(r"^```py\w*\n(.*?)^```", text, flags=re.S | re.M) if "train_step" in b
    ]
    names: dict[str, Any] = {}
    exec(compile(block, "docs/torch.md", "exec"), names)
    step = names["train_step"]
    for _ in range(20):
        assert step(torch.randn(8, 16).cuda(), torch.randn(8, 1).cuda()).isfinite()
    assert step.statistics().replays >= 4, step.explain()
    assert names["scheduler"].last_epoch == 20
    step.close()


@pytest.mark.parametrize(("example", "replayed"), [("torch_step", 4), ("train", 1)])
def test_the_examples_run(example: str, replayed: int) -> None:
    result = subprocess.run(
        [sys.executable, f"examples/{example}.py"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *sys.path])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    # A busy host can measure that a chain is no faster than eager calls: it is given up then.
    given_up = "as a chain (" in result.stdout
    assert given_up or result.stdout.count("replayed") >= replayed, result.stdout
