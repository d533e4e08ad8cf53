"""Graphs of torch's functions in a folder: one process saves them, the next one restores them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.foreign import library

library("torch")

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

PROGRAM = """
import json, sys
import ostinato as ost
saving, folder = sys.argv[1] == "save", sys.argv[2]
if saving:
    ost.graphfile.collect_modules()  # before torch loads a kernel
import torch
from ostinato.interop.torch import graphed

torch.manual_seed(1 if saving else 2)  # other weights: they are bound by name
held = [torch.empty(1 << 20, device="cuda") for _ in range(0 if saving else 3)]  # other addresses
layers = [m for _ in range(2) for m in (torch.nn.Linear(64, 64), torch.nn.GELU())]
mlp = torch.nn.Sequential(*layers).cuda().eval()

def norm(x):
    return {"scaled": torch.softmax(x * 2, -1), "pair": (x + 1, x > 0)}

def decode(x, place, cache):
    cache.index_copy_(0, place, x)
    return (cache * 2).sum(0), cache

def dropped(x):
    return torch.nn.functional.dropout(x, 0.5)

def leaves(value):
    return [t for t in torch.utils._pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]

def static_args():
    return torch.zeros(8, 16, device="cuda")

works = {
    "mlp": (mlp, {}, lambda: (torch.randn(4, 64, device="cuda"),)),
    "norm": (norm, {}, lambda: (torch.randn(3, 50, device="cuda"),)),
    "decode": (decode, {"static": ("cache",)}, lambda: (
        torch.randn(1, 16, device="cuda"), torch.randint(0, 8, (1,), device="cuda"))),
    "dropped": (dropped, {}, lambda: (torch.randn(64, device="cuda"),)),
}
report = {}
with torch.inference_mode():
    for name, (function, options, draw) in works.items():
        step = graphed(function, name=name, store=f"{folder}/{name}", **options)
        fixed = [static_args()] if options else []
        other = [f.clone() for f in fixed]
        wrong = 0
        for call in range(4):
            args = draw()
            torch.manual_seed(call)
            found = [t.clone() for t in leaves(step(*args, *fixed))]
            torch.manual_seed(call)
            wanted = leaves(function(*args, *other))
            pairs = [*zip(found, wanted, strict=True), *zip(fixed, other, strict=True)]
            wrong += sum(not torch.equal(a, b) for a, b in pairs)
        torch.cuda.synchronize()
        refused = step.save() if saving else {}
        s = step.statistics()
        report[name] = dict(wrong=wrong, refused=list(refused.values()), restored=s.restored,
                            eager=s.eager, captures=s.captures, not_restored=dict(s.not_restored))
        step.close()
print(json.dumps(report))
"""


ROOT = Path(__file__).parents[2]


def python(program: str, *arguments: str, cwd: Path) -> str:
    """What a program prints in a process of its own."""
    paths = [str(ROOT), str(ROOT / "src"), *filter(None, sys.path)]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run(what: str, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        python(PROGRAM, what, str(folder), cwd=folder).splitlines()[-1]
    )
    return found


def test_the_sample_of_the_page(tmp_path: Path) -> None:
    """docs/torch.md"""
    text = (ROOT / "docs" / "torch.md").read_text(encoding="utf-8")
    (block,) = [b for b in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "save()" in b]
    model = "import torch\nmodel = torch.nn.Linear(8, 8).cuda().eval()\n"
    program = block.replace("step = ", f"{model}step = ")
    calls = (
        "with torch.inference_mode():\n    for _ in range(3): step(torch.ones(2, 8, device='cuda'))"
    )
    assert python(program.replace("...  ", f"{calls}  "), cwd=tmp_path).strip() == "{}"
    assert len([*(tmp_path / "graphs" / "graphs").glob("*.graph")]) == 1


def test_the_next_process_restores(tmp_path: Path) -> None:
    saved = run("save", tmp_path)
    assert all(one["wrong"] == 0 for one in saved.values()), saved
    assert saved["dropped"]["refused"], "random numbers of torch cannot be saved"
    restored = run("restore", tmp_path)
    assert all(one["wrong"] == 0 for one in restored.values()), (saved, restored)
    for name, one in restored.items():
        if saved[name]["refused"]:
            assert one["restored"] == 0 and one["captures"] == 1 and one["not_restored"]
        else:
            assert (one["restored"], one["captures"], one["eager"]) == (1, 0, 0), (name, one)
    for name in ("mlp", "norm"):
        assert not saved[name]["refused"], saved[name]
