"""The benchmarks run, and write what they promise; what they measure here is of no account."""

from __future__ import annotations

import ctypes
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ostinato as ost
from benchmarks import (
    black_box,
    change_cost,
    choice,
    cold_start,
    commits,
    common,
    decode,
    divergences,
    host,
    join,
    launch_cost,
    load,
    lookup,
    node_times,
    observe,
    peers,
    replay_cost,
    soak,
    startup,
    streams,
    tuning,
    weights,
)
from benchmarks.peers.llama_peer import LLAMA_CPP, open_llama_cpp
from ostinato.bench.decode import DecodeResult, measure
from ostinato.bench.options import DecodeOptions
from ostinato.bench.random_weights import random_checkpoint
from ostinato.bench.report import SCHEMA
from ostinato.bench.shapes import SHAPES, traffic
from ostinato.device import Device
from ostinato.driver import launcher
from ostinato.models.files.dequantise import BLOCK_TYPES
from ostinato.models.files.open import open_checkpoint
from tests.models.model_files import write_gguf
from tests.processes import printed, python
from tools import figures

TINY = SHAPES["tiny"]
ROOT = Path(__file__).resolve().parents[1]
RESULT_KEYS = {
    "schema",
    "benchmark",
    "ceiling",
    "summary",
    "machine",
    "settings",
    "rows",
    "skipped",
}
MACHINE_KEYS = {"device", "driver", "driver_version", "cpus", "python", "versions", "commit"}

needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler")


def last_line(text: str) -> dict[str, Any]:
    result = json.loads(text.rstrip().splitlines()[-1])
    assert isinstance(result, dict)
    return result


Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a benchmark on the host device, and gives its result."""

    def quickly(benchmark: Any, *options: str) -> dict[str, Any]:
        where = ("--device", "host", "--quick", "--out", str(tmp_path))
        assert benchmark.main([*where, *options]) == 0
        result = last_line(capsys.readouterr().out)
        assert set(result) == RESULT_KEYS
        return result

    return quickly


@pytest.mark.parametrize(
    "benchmark",
    [
        *(replay_cost, launch_cost, change_cost, black_box, soak, join, weights, node_times),
        pytest.param(streams, marks=pytest.mark.slow),
    ],
    ids=lambda b: b.__name__,
)
def test_each_prints_a_table_and_writes_its_results(
    benchmark: object,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OSTINATO_COMMIT", "abc123")
    name = benchmark.__name__.rpartition(".")[2]  # type: ignore[attr-defined]
    options = ["--device", "host", "--quick", "--out", str(tmp_path)]
    assert benchmark.main(options) == 0  # type: ignore[attr-defined]
    printed = capsys.readouterr().out
    result = last_line(printed)
    (path,) = tmp_path.glob("*.json")
    assert path.name.startswith(f"{name}-host")
    assert json.loads(path.read_text(encoding="utf-8")) == result
    assert set(result) == RESULT_KEYS
    assert result["benchmark"] == name and result["schema"] == SCHEMA
    machine, rows, ceiling = result["machine"], result["rows"], result["ceiling"]
    assert isinstance(machine, dict) and isinstance(rows, list) and isinstance(ceiling, dict)
    assert set(machine) >= MACHINE_KEYS and machine["commit"] == "abc123"
    assert rows and all(isinstance(row, dict) for row in rows)
    assert ceiling["what"] and "us" in ceiling
    for row in rows:  # each one is a line of the table
        first = next(value for value in row.values() if isinstance(value, str))
        assert first in printed


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the results files of which tables are made."""
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    figures.results.cache_clear()
    yield tmp_path
    figures.results.cache_clear()


def test_each_planted_divergence_of_ours_is_named(run: Run, tables: Path) -> None:
    result = run(divergences)
    assert [row for row in result["rows"] if not row["right"]] == []
    ours = {name: work for name, work in divergences.WORKS.items() if work.kind == divergences.OURS}
    assert set(result["skipped"]) == set(divergences.WORKS) - set(ours)
    summary = result["summary"]
    assert summary["plants"] == summary["right"] == sum(len(work.plants) for work in ours.values())
    assert summary["controls"] == summary["controls_right"] == len(ours)
    assert sum(len(work.plants) for work in divergences.WORKS.values()) == 40
    next(tables.glob("divergences-host*.json")).rename(tables / "divergences-nvidia-h200.json")
    *_, layers, decoder = figures.divergences()
    assert layers.startswith("| layers, ours | 17 | 17 | none | ")
    assert decoder.startswith("| decoder, ours | 3 | 3 | none | ")


def test_what_a_work_did_not_reach_counts_as_wrong(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error costs its plant, and a process that ends what comes after."""
    own = dict.fromkeys(("no such method", "no such method either"), "absent")
    broken = replace(divergences.WORKS["decoder"], plants=own)
    monkeypatch.setitem(divergences.WORKS, "decoder", broken)
    with ost.open_device("host") as device:
        rows = [*divergences.measure("decoder", device, True)]
    assert [row["right"] for row in rows] == [True, False, False]
    assert "absent" in rows[1]["error"]
    monkeypatch.setattr(divergences, "_LIMIT", 0.01)  # the process does not know of the exchange
    result = run(divergences, "--works", "decoder")
    assert [row["right"] for row in result["rows"]] == [False, False, False]
    assert all("took longer" in row["error"] for row in result["rows"])


def test_programs_are_compared_with_themselves_observed(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a program that needs no GPU, which is slower if it is observed, and one that ends."""
    program = tmp_path / "program.py"
    program.write_text(
        """
import json, sys
if "vision" in sys.argv[1]:
    raise SystemExit("no such library")
print("a line of a library")
print(json.dumps({"ready": 1}), flush=True)
for line in sys.stdin:
    word, *_ = line.split()
    if word == "answers":
        found = {"digests": ["a", "b"], "nodes": [3, 4], "captured": 2, "capture_end_ms": 0.5}
    else:
        drift = [100.0 + i for i in range(9)]  # a step becomes slower and slower, closed or open
        found = {"closed_us": drift[::2], "open_us": [1.01 * us for us in drift[1::2]]}
        found |= {"replays": 2, "replay_us": 3.0, "observed_replay_us": 3.25}
    print(json.dumps(found), flush=True)
"""
    )
    monkeypatch.setattr(observe, "_PROGRAM", program)
    monkeypatch.setattr(common, "torch_with_cuda", lambda device: np)  # of which a version is asked
    result = run(observe, "--programs", "vision model,Triton kernel")
    assert "no such library" in result["skipped"]["vision model"]
    (row,) = result["rows"]
    assert (row["least"], row["slower_percent"], row["most"]) == pytest.approx((1, 1, 1))
    assert (row["closed_least"], row["closed_most"]) == pytest.approx((0, 0), abs=0.01)
    assert row["computed_percent"] == round(100 * 2 * 0.25 / 104, 3)
    assert (row["answers"], row["listed"], row["nodes"]) == ("equal", 2, 7)
    assert result["summary"] == {
        "programs": 1,
        "equal": 1,
        "all_listed": 1,
        "below": 0,
        "computed_below": 1,
    }


def test_two_trees_are_compared_call_by_call(run: Run) -> None:
    rows = run(commits, "--before", str(commits.ROOT))["rows"]
    assert [row["call"] for row in rows] == ["start", *commits.COUNTS]
    assert all(row["least"] <= row["ratio"] <= row["most"] for row in rows)


def test_the_host_has_no_default_shapes_to_measure(run: Run) -> None:
    result = run(tuning)
    assert result["rows"] == []
    assert result["skipped"] == {"all": "host has no launch shapes to choose"}


def test_replay_cost_measures_both_of_our_ways(run: Run) -> None:
    rows = run(replay_cost)["rows"]
    paths = ("compiled", "ctypes") if launcher.compiled() else ("ctypes",)
    names = [
        f"ostinato {path}, {by}" for path in paths for by in ("prepared call", "GraphExec.launch")
    ]
    if launcher.compiled():
        steps = ("HeldReplay.launch", "GraphedStep", "GraphedStep, another size")
        names += [f"ostinato compiled, {step}" for step in steps]
    assert {(r["kernels"], r["launched by"]) for r in rows} == {
        (n, name) for n in (1, 8) for name in names
    }
    assert all(r["median_us"] > 0 and r["back_to_back_us"] > 0 for r in rows)


def test_the_start_up_is_split_into_phases(run: Run) -> None:
    *phases, total = [row["median_ms"] for row in run(startup, "--shape", "tiny")["rows"]]
    assert all(phase >= 0 for phase in phases) and len(phases) > 8
    assert sum(phases) == pytest.approx(total, rel=1e-3, abs=0.1)


@pytest.mark.slow
def test_a_store_is_compared_with_captures_from_process_start(run: Run) -> None:
    result = run(cold_start)
    rows = result["rows"]
    assert result["skipped"] == {"decode": "it needs a GPU"}
    assert [(row["way"], row["graphs"]) for row in rows] == [("capture", 4), ("restore", 4)]
    assert all(0 < row["graphs_ms"] < row["total_ms"] for row in rows)


def test_loading_is_measured_and_every_way_checked(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = ",".join(kind for kind in BLOCK_TYPES if not kind.endswith("_K"))
    result = run(load, "--shape", "tiny", "--types", kinds)
    assert result["benchmark"] == "load-tiny"
    assert {row["type"] for row in result["rows"]} == set(kinds.split(","))
    assert all(row["median_ms"] > 0 and row["gigabytes"] >= 0 for row in result["rows"])
    # A way that makes something else is found.
    made = load.ours

    def wrong(device: Device, checkpoint: load.RandomFile, threads: int) -> load.Loaded:
        answer = made(device, checkpoint, threads)
        if threads == 16:
            answer.tensors["embed"] = lambda: np.zeros(1)
        return answer

    monkeypatch.setattr(load, "ours", wrong)
    with pytest.raises(AssertionError, match=r"F32, host, 16 threads: embed"):
        run(load, "--shape", "tiny", "--types", "F32")


@pytest.mark.parametrize(
    ("ranks", "name"),
    [("1", "serve-tiny"), pytest.param("2", "serve-tiny-2-ranks", marks=pytest.mark.slow)],
)
def test_serving_is_measured_beside_the_same_batches(run: Run, ranks: str, name: str) -> None:
    serve = pytest.importorskip("benchmarks.serve")
    result = run(serve, "--shape", "tiny", "--ranks", ranks)
    assert result["benchmark"] == name
    *served, soaked = result["rows"]
    assert [row["clients"] for row in served] == [1, 3]
    for row in served:
        assert row["tokens_per_second"] > 0 and row["first_token_ms"] > 0
        assert 0 < row["rows_per_step"] <= row["clients"]
    assert soaked["answers"] >= 18 and soaked["device_grew_bytes"] == 0


def test_the_choice_of_tokens_is_measured_beside_greedy_steps(run: Run) -> None:
    result = run(choice, "--shape", "tiny")
    assert result["benchmark"] == "choice-tiny"
    rows, skipped = result["rows"], result["skipped"]
    names = [row["what"] for row in rows]
    assert names[0] == "greedy" and rows[0]["more_us"] == 0
    assert ("grammar on 1 row" in names) == ("grammar" not in skipped)
    assert all(row["step_us"] > 0 for row in rows)
    made = [name for name in names if name.startswith(("masks", "grammar"))]
    assert [row["what"] for row in rows if row["mask_us"] is not None] == made


@pytest.mark.parametrize("sequences", [1, 3])
def test_drafts_are_measured_at_given_rates(run: Run, sequences: int) -> None:
    result = run(lookup, "--model", "", "--lookup", "3,7", "--sequences", str(sequences))
    assert result["benchmark"] == ("lookup-tiny-3-sequences" if sequences > 1 else "lookup-tiny")
    assert list(result["skipped"]) == ["texts"]
    found = {(row["what"], row["lookup"]): row for row in result["rows"]}
    for each in (1, 2, 4, 8):
        rows = {n: found[f"tiny, {each} a step", n] for n in (0, 3, 7)}
        assert rows[0]["tokens_per_step"] == rows[0]["times"] == 1
        for drafts in (3, 7):  # the last step may give more than are left
            wanted = min(each, drafts + 1)
            assert rows[drafts]["tokens_per_step"] == pytest.approx(wanted, rel=0.15)
    assert all(row["equal"] == 1 for row in result["rows"])
    assert all(row["tokens_per_second"] > 0 for row in result["rows"])


def test_decoding_is_measured_beside_the_peers_that_are_here(run: Run, tmp_path: Path) -> None:
    result = run(decode, "--shape", "tiny")
    assert result["benchmark"] == "decode-tiny"
    assert {row["way"] for row in result["rows"]} == {"eager", "capture", "record", "while 4"}
    assert set(result["skipped"]) == set(peers.PEERS)
    assert json.loads(next(tmp_path.glob("decode-tiny-host*.json")).read_text()) == result


class _Loop:
    """Stands for another library's decoder, which breaks at its second run."""

    whole_graph = True

    def __init__(self, model: object, *, batch: int, length: int, how: str) -> None:
        self.how, self.runs, self.at = how, 0, -1
        self.length = length

    def place(self, position: int) -> None:
        self.at = position

    def prompt(self, tokens: Sequence[int]) -> int:
        assert self.how == "eager" and self.at == 0 and len(tokens) < self.length
        self.at = len(tokens)
        return 0

    def run(self, tokens: int) -> None:
        self.runs += 1
        if self.how == "graph" and self.runs > 1:
            raise RuntimeError("CUDA error: something\nwith details")


class _Library:
    DecodeLoop = _Loop

    @staticmethod
    def release() -> None:
        """Nothing is held."""


class _ThreePeers(peers.Peers):
    def _open(self, device: Device, config: object, positions: int) -> str:
        self._library = _Library
        return ""


def beside(device: Device, **given: Any) -> DecodeResult:
    """A comparison with all peers of `_Library`."""
    options = DecodeOptions(contexts=(4,), tokens=4, rounds=2, seconds=20, **given)
    wanted = [name for name in peers.PEERS if name != LLAMA_CPP]
    others = partial(_ThreePeers, device, wanted)
    return measure(device, lambda: random_checkpoint(TINY), options, open_others=others)


def test_a_peer_that_fails_is_left_out_and_named(host_device: Device) -> None:
    found = beside(host_device, tokens_per_launch=(4,))
    rows = Counter(row.way for row in found.rows)
    assert rows == Counter(["eager", "capture", "record", "while 4", "transformers"])
    assert found.skipped["torch.cuda.graph, batch 1, context 4"] == (
        "RuntimeError: CUDA error: something"
    )
    # 20 seconds are too few to begin compiling.
    assert "compiling takes longer" in found.skipped["torch.compile, batch 1, context 4"]
    (peer,) = (row for row in found.rows if not row.ours)
    best = min(row.token_us for row in found.rows if row.ours)
    assert peer.ours_is == pytest.approx(peer.token_us / best)


def test_a_peer_takes_prompts_whole(host_device: Device) -> None:
    found = beside(host_device, prompts=(130,))
    rows = {row.way: row for row in found.prompts}
    assert set(rows) == {"eager", "capture", "record", "transformers"}
    peer, bytes_of = rows["transformers"], traffic(TINY, 4)
    assert peer.piece == 130 and not peer.ours and peer.rounds == 2
    assert found.traffic.position == bytes_of.position
    moved = found.traffic.step(1, 130)
    assert peer.floor_us == pytest.approx(moved / found.bandwidth.best * 1e6)
    best = min(row.first_token_us for row in found.prompts if row.ours)
    assert peer.ours_is == pytest.approx(peer.first_token_us / best)
    for name in ("torch.cuda.graph", "torch.compile"):
        assert "one token" in found.skipped[f"{name}, prompt 130"]


def test_peers_that_are_not_here_say_why(host_device: Device) -> None:
    found = peers.Peers(host_device, list(peers.PEERS), TINY, None, 64, lambda: 100.0)
    assert set(found.skipped) == set(peers.PEERS) and not found.contestants
    assert "GGUF" in found.skipped.pop(LLAMA_CPP)
    assert all("host" in why for why in found.skipped.values())
    found.close()


def test_llama_cpp_says_what_it_needs(host_device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "not installed" in str(open_llama_cpp(host_device, Path("m.gguf")))
    assert "GGUF" in str(open_llama_cpp(host_device, Path("folder")))
    away = replace(host_device.capabilities, host_memory_is_device_memory=False)
    monkeypatch.setattr(Device, "capabilities", away)
    assert "on the CPU" in str(open_llama_cpp(host_device, Path("m.gguf")))


def test_the_soak_counts_and_watches_memory(host_device: Device) -> None:
    part = soak.replays(host_device, 500)
    assert part.patches == 500 // soak.PATCH_EVERY
    assert len(part.samples) == soak.POINTS and part.samples[-1].done == 500
    part = soak.rounds(host_device, 40)
    assert part.samples[-1].done == 40 and part.left == 0


def test_a_leak_is_not_flat() -> None:
    part = soak.Part("leaks")
    for done, used in ((1, 0), (2, soak.DEVICE_SLACK + 1)):
        part.samples.append(soak.Sample(done, used, 0, 0))
    assert not part.flat
    part.samples[-1] = soak.Sample(2, 0, 0, 0)
    assert part.flat
    part.left = 1
    assert not part.flat


def test_a_wrong_answer_ends_the_benchmark(host_device: Device) -> None:
    stream, chain = host_device.create_stream(), common.Chain(host_device, 3)
    with pytest.raises(AssertionError, match="nobody"):
        chain.check("nobody", stream)  # nothing was launched
    chain.submit(stream)
    chain.check("eager", stream)
    with pytest.raises(AssertionError, match="wrong"):
        common.optional({}, "C", lambda: chain.check("wrong", stream))
    skipped: dict[str, str] = {}
    assert common.optional(skipped, "torch", lambda: __import__("no_such_library")) is None
    assert "no_such_library" in skipped["torch"]


@needs_gcc
def test_the_c_loops_compile_and_call() -> None:
    calls = {"launch": 0, "wait": 0}
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)

    def launch(executable: int, stream: int) -> int:
        assert (executable, stream) == (11, 22)
        calls["launch"] += 1
        return 0

    def wait(stream: int, _: int) -> int:
        calls["wait"] += 1
        return 0

    keep = kind(launch), kind(wait)
    addresses = [ctypes.cast(function, ctypes.c_void_p) for function in keep]
    contender = replay_cost.CLoop().contender("C", *addresses, 11, 22, keep)
    times = contender.bursts(10, 4)
    assert calls == {"launch": 10, "wait": 3} and len(times) == 10
    assert all(time > 0 for time in times)
    assert contender.back_to_back(5) > 0
    assert calls == {"launch": 15, "wait": 4}
    common.build_c(change_cost.C_CHANGES)
    with pytest.raises(RuntimeError, match="gcc"):
        common.build_c("this is no C")


@needs_gcc
def test_c_gets_kernels_as_cuda_h_lays_them_out(host_device: Device) -> None:
    # The driver's own structure, as the CUDA driver writes it.
    from ostinato.driver.cuda.libcuda import KernelParams

    ours = change_cost._Kernel
    theirs = {name: getattr(KernelParams, name).offset for name, *_ in KernelParams._fields_}
    assert ctypes.sizeof(ours) == ctypes.sizeof(KernelParams)
    assert ours.grid.offset == theirs["gridDimX"] and ours.block.offset == theirs["blockDimX"]
    assert ours.shared.offset == theirs["sharedMemBytes"]
    assert ours.kernel_params.offset == theirs["kernelParams"]
    assert ours.kern.offset == theirs["kern"] and ours.context.offset == theirs["ctx"]


def test_medians() -> None:
    found = common.measured([3000, 1000, 2000, 10_000, 4000])
    assert (found.median, found.p90, found.least, found.count) == (3.0, 10.0, 1.0, 5)


def test_the_package_runs_those_that_are_named(tmp_path: Path) -> None:
    options = ("--device", "host", "--quick", "--out", str(tmp_path))
    out = printed("-m", "benchmarks", "change_cost", *options)
    assert last_line(out)["benchmark"] == "change_cost"
    refused = python("-m", "benchmarks", "no_such")
    assert refused.returncode != 0 and "replay_cost" in refused.stderr


def test_kernels_are_the_same_in_both_languages(device: Device) -> None:
    stream, chain = device.create_stream(), common.Chain(device, 4)
    with ost.capture(stream) as capture:
        chain.submit(stream)
    run = capture.graph.instantiate(upload=stream)
    run.launch(stream)
    chain.check("graph", stream)


@pytest.mark.slow
def test_the_cpu_beside_llama_cpp_idle_and_busy(
    smollm2_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`smollm2_path`: the model has to be there."""
    assert host.main(["--quick", "--types", "Q4_1", "--out", str(tmp_path)]) == 0
    rows = last_line(capsys.readouterr().out)["rows"]
    ours = [row for row in rows if row["way"] == "ostinato"]
    assert [row["machine"] for row in ours] == ["idle", "one core busy"]
    assert all(row["tokens_per_second"] > 0 and row["memory_mb"] > 100 for row in ours)


def test_a_copy_in_another_type_holds_the_same_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_gguf(tmp_path / "model.gguf", kind="Q4_1")
    monkeypatch.setattr(host, "pull", lambda name: model)
    original, copied = open_checkpoint(model), open_checkpoint(host.model_of("F32", tmp_path))
    with original, copied:
        assert copied.config == original.config
        assert original.raw("layers.1.wq").type == "Q4_1"
        for name in ("embed", "layers.1.wq", "layers.1.w_down", "final_norm"):
            assert copied.raw(name).type == "F32"
            assert np.array_equal(copied.tensor(name), original.tensor(name))
