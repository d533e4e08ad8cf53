"""Decoding over several GPUs of one host: tokens a second of each shape, on one GPU and on more.

    python -m benchmarks.tensor_parallel                     1B and 8B, 1 and 2 GPUs, batch 1 and 32
    python -m benchmarks.tensor_parallel --shape 1B --ranks 2 --way exchange
    python -m benchmarks.tensor_parallel --soak 100000       also a soak of that many tokens
    python -m benchmarks.tensor_parallel --device host --quick

The physics.  A rank reads its share of the weights for a token, so the minimum time is the weights'
bytes over the bandwidth of all ranks.  The time of hops does not decrease: two sums over the ranks
for each layer, and one exchange at the end of the step, each of some microseconds, in which nothing
is read.  Each number of ranks above one is measured with both ways to exchange: "exchange", small
messages in each other's memory, and "library", all by NCCL.

Sums in each other's memory are also measured with all of them computed in parts ("in parts"): what
a second exchange costs, and the bytes a microsecond, choose between the two
(`distributed.exchange.HOP_BYTES`).

Prompts of 512 and 4,096 tokens are read at once by one sequence, after a first reading of each.

The peer is transformers' Llama of the same shape, split by its own plan (`tp_plan="auto"`) under
torchrun: launch by launch, and one step as a `torch.cuda.graph`.

`--soak`: four sequences generate answers of 100 tokens over and over, with the first shape; the
answers that differ from the first one of their sequence, on any rank, and the growth of memory in
the second half are counted.

Each measurement is a stage in processes of its own, one for each GPU, with a time limit: a stage
that fails or hangs is listed under `skipped`, and the next one starts new processes.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np

import ostinato as ost
from benchmarks import common
from benchmarks.soak import resident
from ostinato.bench.random_weights import random_checkpoint
from ostinato.bench.shapes import shape_named, traffic
from ostinato.distributed import Collectives, Group, join_group, new_group_id, open_collectives
from ostinato.distributed.exchange import ExchangeCollectives
from ostinato.models import Decoder, LlamaConfig

PROMPT = 16
PROMPTS = (512, 4096)
"""Tokens of the prompts that are read at once."""
WARMUP = 32
"""The number of tokens of a warm-up."""
ANSWER = 100
COLUMNS = (
    "shape", "weights", "ranks", "batch", "way", "tokens_per_second", "token_us", "step_us",
    "prompt", "same_on_ranks", "load_s", "first_s",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = common.options(__doc__)
    parser.add_argument("--shape", action="append", help="1B and 8B if none is given")
    parser.add_argument(
        "--weights", action="append", help="bf16 if none is given; q8_0, q4_k_m, ... are packed"
    )
    parser.add_argument("--ranks", type=int, action="append", help="1 and 2 if none is given")
    parser.add_argument("--batch", type=int, action="append", help="1 and 32 if none is given")
    parser.add_argument(
        "--way",
        action="append",
        help="exchange and library if none is given; processes on the host have only library",
    )
    parser.add_argument("--tokens", type=int, default=200, help="timed, after a warm-up of 32")
    parser.add_argument("--seconds", type=float, default=225.0, help="for all stages together")
    parser.add_argument("--soak", type=int, default=0, help="so many tokens over and over")
    parser.add_argument(
        "--kind",
        action="append",
        choices=("collectives", "decode", "prompts", "torch"),
        help="all if none is given",
    )
    parser.add_argument("--stage", help="for the processes that this program starts")
    chosen = parser.parse_args(arguments)
    if chosen.stage:
        return stage(json.loads(chosen.stage))
    on_host = chosen.device == "host"
    shapes = chosen.shape or (["tiny"] if on_host or chosen.quick else ["1B", "8B"])
    ranks = chosen.ranks or [2, 1]
    batches = chosen.batch or [1, 32]
    tokens = 8 if chosen.quick else chosen.tokens
    end = time.monotonic() + chosen.seconds
    rows: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    ways = chosen.way or (["library"] if on_host else ["exchange", "library"])
    kinds = chosen.weights or ["bf16"]
    most = max(ranks)
    plan: list[dict[str, Any]] = []
    wanted = chosen.kind or ["collectives", "decode", "prompts", "torch"]
    if most > 1:
        plan.append({"kind": "collectives", "ranks": most, "ways": ways})
    decoding = [
        {"kind": "decode", "shape": shape, "weights": weights, "ranks": count, "way": way}
        for weights in kinds
        for shape in shapes
        for count in ranks
        # Only the first kind of weights runs all ways: the exchanges are the same for all kinds.
        for way in (["one"] if count == 1 else ways if weights == kinds[0] else ways[:1])
    ]
    plan += [one for one in decoding if one["weights"] == kinds[0]]
    plan += [{**one, "kind": "prompts"} for one in decoding if one["weights"] == kinds[0]]
    if chosen.soak and most > 1:
        settings = {"shape": shapes[0], "weights": kinds[0], "way": ways[0]}
        plan.append({"kind": "soak", **settings, "ranks": most})
    missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if missing:
        print(f"# not beside transformers: {' and '.join(missing)} not installed", flush=True)
    elif most > 1:
        plan += [{"kind": "torch", "shape": shape, "ranks": most} for shape in shapes]
    plan += [one for one in decoding if one["weights"] != kinds[0]]
    plan = [one for one in plan if one["kind"] in (*wanted, "soak")]
    for one in plan:
        words = [one["kind"], one.get("shape", ""), one.get("weights", "")]
        words += ["on", str(one["ranks"]), one.get("way", "")]
        name = " ".join(word for word in words if word)
        left = end - time.monotonic()
        if left < 10 and not on_host:
            skipped[name] = "no time was left"
            continue
        begin = time.monotonic()
        found, error = run_stage(
            {
                **one,
                "device": chosen.device,
                "batches": batches,
                "tokens": chosen.soak if one["kind"] == "soak" else tokens,
            },
            min(left, 110.0) if not on_host else 600.0,
        )
        rows += found
        if error:
            skipped[name] = error
        took = time.monotonic() - begin
        print(f"# {name}: {took:.1f} s{', FAILED: ' + error[-1500:] if error else ''}", flush=True)
        for row in found:
            print(f"#   {json.dumps(row)}", flush=True)
    decoded = [row for row in rows if row["kind"] in ("decode", "prompts", "torch")]
    print(common.table("tokens a second of the whole batch", decoded, COLUMNS))
    ceiling: dict[str, Any] = {
        shape: {"weight_bytes": traffic(shape_named(shape), 2).weights} for shape in shapes
    }
    with ost.open_device(chosen.device) as device:
        common.emit(
            "tensor_parallel",
            device,
            chosen.out,
            ceiling=ceiling,
            settings={"prompt": PROMPT, "tokens": tokens, "batches": batches},
            rows=rows,
            skipped=skipped,
        )
    return 1 if skipped else 0


# ------------------------------------------------------------------------------------- stages


def run_stage(given: dict[str, Any], seconds: float) -> tuple[list[dict[str, Any]], str]:
    """Runs a stage, with one process for each rank.  Returns the rows of rank 0, and the error."""
    size = given["ranks"]
    program = ["-m", "benchmarks.tensor_parallel", "--stage"]
    if given["kind"] == "torch":
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
        commands = [[*torchrun, *program, json.dumps(given)]]
    else:
        group = new_group_id(size, deadline=60) if size > 1 else ""
        ranks = ({**given, "rank": rank, "group": group} for rank in range(size))
        commands = [[*program, json.dumps(rank)] for rank in ranks]
    # The ranks inherit the environment, with the machine's settings for NCCL.
    processes = [
        subprocess.Popen(
            [sys.executable, *one],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ,
        )
        for one in commands
    ]
    end = time.monotonic() + seconds
    rows: list[dict[str, Any]] = []
    errors = []
    for rank, process in enumerate(processes):
        try:
            out, err = process.communicate(timeout=max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            out, err = _ended(process)
            errors.append(f"rank {rank}: killed after {seconds:.0f} s")
        if process.returncode:
            errors.append(f"rank {rank}: status {process.returncode}: {err.strip()[-1200:]}")
        if rank == 0:
            rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    return rows, " | ".join(errors)


def _ended(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Ends a process, and returns its output.  torchrun ends its workers when it is terminated."""
    process.terminate()
    try:
        return process.communicate(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()


def stage(given: dict[str, Any]) -> int:
    """Runs one rank of a stage; rank 0 prints a line of JSON for each row."""
    if given["kind"] == "torch":
        for row in peer(given):
            if os.environ["RANK"] == "0":
                print(json.dumps({"kind": "torch", **row}), flush=True)
        return 0
    rank, size, on_host = given["rank"], given["ranks"], given["device"] == "host"
    group: Group | None = None
    try:
        if size > 1:
            group = join_group(given["group"], rank=rank, size=size, deadline=40)
        with ost.open_device("host" if on_host else f"cuda:{rank}") as device:
            work = {"decode": decode, "prompts": prompts, "collectives": collectives, "soak": soak}
            for row in work[given["kind"]](given, device, group):
                if rank == 0:
                    print(json.dumps({"kind": given["kind"], **row}), flush=True)
    except BaseException as error:
        traceback.print_exc()
        if group is not None:
            group.fail(error)
        return 1
    finally:
        if group is not None:
            group.close()
    return 0


def open_decoder(
    given: dict[str, Any],
    device: ost.Device,
    group: Group | None,
    most: int,
    *,
    context: int = 1024,
    max_rows: int | None = 64,
) -> Decoder:
    """Opens a decoder with random weights, for up to `most` sequences."""
    config, on_host = shape_named(given["shape"]), given["device"] == "host"
    recipe = None if given["weights"] == "bf16" else given["weights"]
    with random_checkpoint(config, recipe=recipe) as checkpoint:
        return Decoder(
            device,
            checkpoint,
            max_context=min(context, config.context_length),
            max_rows=None if max_rows is None else max(max_rows, most),
            sequences=most,
            stop_tokens=(),
            weights="auto" if recipe is None or on_host else "packed",
            group=group,
            collectives=None if group is None else given["way"],
        )


def answers_of(decoder: Decoder, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Resets the decoder, and returns the token after each prompt and `count` more, with one
    sequence for each prompt."""
    decoder.reset()
    answers = [[decoder.prefill(prompt, one)] for one, prompt in enumerate(prompts)]
    for step in decoder.run_batch(list(range(len(prompts))), count=count):
        for one, token in step.items():
            answers[one].append(token)
    return answers


def prompts_of(config: LlamaConfig, batch: int, rng: np.random.Generator) -> list[list[int]]:
    return rng.integers(0, config.vocabulary, (batch, PROMPT)).tolist()


def decode(given: dict[str, Any], device: ost.Device, group: Group | None) -> Any:
    config = shape_named(given["shape"])
    on_host = given["device"] == "host"
    batches = [b for b in given["batches"] if not on_host or b <= 4]
    begin = time.perf_counter()
    decoder = open_decoder(given, device, group, max(batches))
    load = time.perf_counter() - begin
    tokens = given["tokens"]
    with decoder:
        rng = np.random.default_rng(5)
        for batch in batches:
            begin = time.perf_counter()
            prompts = prompts_of(config, batch, rng)
            answers = answers_of(decoder, prompts, 8 if on_host else WARMUP)
            first = time.perf_counter() - begin
            times = []
            begin = time.perf_counter()
            for step in decoder.run_batch(list(range(batch)), count=tokens):
                for one, token in step.items():
                    answers[one].append(token)
                now = time.perf_counter()
                times.append(now - begin)
                begin = now
            mean = sum(times) / len(times)
            same = None
            if group is not None:
                told = group.exchange("answers", json.dumps(answers).encode())
                same = len(set(told)) == 1
            numbers = decoder.statistics()
            yield {
                "shape": given["shape"],
                "weights": numbers.weights,
                "ranks": given["ranks"],
                "batch": batch,
                "way": "one GPU" if group is None else decoder.collectives,
                "tokens_per_second": round(batch / mean, 1),
                "token_us": round(mean * 1e6 / batch, 1),
                "step_us": round(statistics.median(times) * 1e6, 1),
                "same_on_ranks": same,
                "load_s": round(load, 1),
                "first_s": round(first, 1),
                "answer": answers[0][:40],
                "launches": numbers.launches_per_token,
                "quarantined": {str(k): v[:300] for k, v in numbers.quarantined.items()},
            }


def prompts(given: dict[str, Any], device: ost.Device, group: Group | None) -> Any:
    """Measures the reading of prompts by one sequence, in pieces as large as the decoder makes
    them."""
    config = shape_named(given["shape"])
    on_host = given["device"] == "host"
    lengths = (16,) if on_host else PROMPTS
    rng = np.random.default_rng(7)
    begin = time.perf_counter()
    decoder = open_decoder(given, device, group, 1, context=max(lengths) + 8, max_rows=None)
    load = time.perf_counter() - begin
    with decoder:
        for length in lengths:
            tokens = rng.integers(0, config.vocabulary, length).tolist()
            chosen, times = [], []
            for _ in range(5):  # the first two are launched one by one, and captured
                decoder.reset()
                if group is not None:
                    group.barrier()
                begin = time.perf_counter()
                chosen.append(decoder.prefill(tokens))
                times.append(time.perf_counter() - begin)
            told = [b""] if group is None else group.exchange("tokens", json.dumps(chosen).encode())
            yield {
                "shape": given["shape"],
                "weights": decoder.statistics().weights,
                "ranks": given["ranks"],
                "batch": 1,
                "way": "one GPU" if group is None else decoder.collectives,
                "prompt": length,
                "tokens_per_second": round(length / statistics.median(times[2:]), 1),
                "prompt_ms": round(1e3 * statistics.median(times[2:]), 2),
                "same_on_ranks": None if group is None else len(set(told)) == 1,
                "load_s": round(load, 1),
                "first_s": round(times[0], 2),
            }


def soak(given: dict[str, Any], device: ost.Device, group: Group | None) -> Any:
    """Generates the same answers over and over, and compares them with the first ones on every
    rank."""
    assert group is not None
    prompts = prompts_of(shape_named(given["shape"]), 4, np.random.default_rng(6))
    rounds = max(2, -(-given["tokens"] // (ANSWER * len(prompts))))
    first: list[list[int]] = []
    different = 0
    begin = time.perf_counter()
    with open_decoder(given, device, group, len(prompts)) as decoder:
        for number in range(rounds):
            answers = answers_of(decoder, prompts, ANSWER - 1)
            first = first or answers
            different += sum(mine != known for mine, known in zip(answers, first, strict=True))
            if number == rounds // 2:
                before = (device.memory_info()[0], resident())
        grown = [
            before[0] - device.memory_info()[0],
            resident() - before[1],
        ]
        told = group.exchange("soak", json.dumps([first, different, grown]).encode())
        ranks = [json.loads(one) for one in told]
        yield {
            "shape": given["shape"],
            "weights": decoder.statistics().weights,
            "ranks": given["ranks"],
            "batch": len(prompts),
            "way": decoder.collectives,
            "answers": rounds * len(prompts),
            "tokens": rounds * len(prompts) * ANSWER,
            "different": sum(one[1] for one in ranks),
            "same_on_ranks": all(one[0] == first for one in ranks),
            "grown_mib": [[round(n / 2**20, 1) for n in one[2]] for one in ranks],
            "seconds": round(time.perf_counter() - begin, 1),
        }


def peer(given: dict[str, Any]) -> Any:
    """Runs a rank of transformers' own tensor parallel decoding, started by torchrun."""
    import torch
    import transformers

    from benchmarks.peers.transformers_loop import DecodeLoop, llama_config

    config = shape_named(given["shape"])
    llama = llama_config(config, context=min(1024, config.context_length))
    with torch.device("meta"):
        shapes = {k: v.shape for k, v in transformers.LlamaForCausalLM(llama).state_dict().items()}
    if config.tied_embeddings:
        del shapes["lm_head.weight"]
    some = torch.randn(1 << 22, generator=torch.Generator().manual_seed(1)).bfloat16() * 0.02
    weights = {}
    for name, shape in shapes.items():
        count = shape.numel()
        weights[name] = some.repeat(-(-count // len(some)))[:count].view(shape)
        weights[name] += len(shape) == 1  # weights of norms are around 1
    begin = time.perf_counter()
    model = transformers.LlamaForCausalLM.from_pretrained(
        None, config=llama, state_dict=weights, tp_plan="auto", dtype=torch.bfloat16
    )
    load = time.perf_counter() - begin
    on_host = given["device"] == "host"
    ways = {"eager": "launch by launch", "graph": "torch.cuda.graph"}
    for how, words in ways.items():
        if on_host and how == "graph":
            continue
        for batch in given["batches"]:
            torch.manual_seed(2)  # the same tokens on all ranks
            begin = time.perf_counter()
            loop = DecodeLoop(model, batch=batch, length=llama.max_position_embeddings, how=how)
            first, seconds = time.perf_counter() - begin, []
            tokens = given["tokens"] if how == "graph" else max(1, given["tokens"] // 8)
            for _ in range(3):
                loop.place(PROMPT + WARMUP)
                begin = time.perf_counter()
                loop.run(tokens)
                seconds.append((time.perf_counter() - begin) / tokens)
            step = statistics.median(seconds)
            yield {
                "shape": given["shape"],
                "weights": "bfloat16",
                "ranks": given["ranks"],
                "batch": batch,
                "way": f"transformers {transformers.__version__}, tp_plan, {words}",
                "tokens_per_second": round(batch / step, 1),
                "token_us": round(step * 1e6 / batch, 1),
                "step_us": round(step * 1e6, 1),
                "load_s": round(load, 1),
                "first_s": round(first, 1),
            }
            del loop
    torch.distributed.destroy_process_group()


def collectives(given: dict[str, Any], device: ost.Device, group: Group | None) -> Any:
    """Measures the microseconds of one collective among many in a graph."""
    assert group is not None
    count = 4 if given["device"] == "host" else 200
    kinds = ("accumulate", "all_reduce", "all_gather")
    for way in given["ways"]:
        with open_collectives(group, device, way) as made:
            yield from _timed(made, made.name.split(" (")[0], kinds, device, group, count)
        if way == "exchange":
            beyond = open_collectives(group, device, "library")
            with ExchangeCollectives(group, device, beyond, hop_bytes=-1) as made:
                yield from _timed(made, f"{made.name}, in parts", kinds[:2], device, group, count)


def _timed(
    made: Collectives,
    way: str,
    kinds: Sequence[str],
    device: ost.Device,
    group: Group,
    count: int,
) -> Any:
    stream = device.create_stream()
    for kind in kinds:
        for floats in (2, 2048, 4096, 16384, 32768, 65536, 131072, 262144):
            source = device.zeros((1, floats), np.float32)
            target = device.zeros((1, floats), np.float32)
            out = device.zeros((1, floats * group.size), np.float32)
            if kind == "accumulate":
                operations = made.accumulate(target, source)
            elif kind == "all_reduce":
                operations = made.all_reduce(source, target)
            else:
                operations = made.all_gather(source, out)
            with ost.capture(stream) as under_way:
                for _ in range(count):
                    for operation in operations:
                        stream.submit(operation)
            with under_way.graph.instantiate(upload=stream) as executable:
                times = []
                for _ in range(5 if count > 4 else 1):
                    group.barrier()
                    begin = time.perf_counter()
                    executable.launch(stream)
                    with group.watching("a graph of collectives"):
                        stream.synchronize()
                    times.append((time.perf_counter() - begin) / count)
            nodes = [node.name for node in under_way.graph.nodes()][: len(operations)]
            yield {
                "collective": kind,
                "bytes": floats * 4,
                "ranks": group.size,
                "way": way,
                "us": round(min(times) * 1e6, 2),
                "nodes": nodes,
            }


if __name__ == "__main__":
    sys.exit(main())
