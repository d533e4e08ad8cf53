"""`ostinato bench` on the host device: what it prints, writes and refuses; never how fast it is."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import typer

from ostinato import Source
from ostinato.bench import floor, random_weights, replays
from ostinato.bench.decode import Row, measure, prompt_tokens
from ostinato.bench.options import DecodeOptions, points_of, positions_of
from ostinato.bench.plot import decode_svg, profile_svg
from ostinato.bench.profile import Attribution, Profile, ProfileRow
from ostinato.bench.random_weights import random_checkpoint
from ostinato.bench.replays import Replays
from ostinato.bench.report import Result
from ostinato.bench.shapes import SHAPES, traffic
from ostinato.bench.ways import DecoderWay, LaunchMode, Timed, Times
from ostinato.cli.bench import Output, _finish, bench
from ostinato.device import Device
from ostinato.errors import InputError
from ostinato.models import Decoder, decode_program
from ostinato.models.config import tensor_shapes
from ostinato.models.host import packed_kernels
from ostinato.modules import CompileOptions
from ostinato.modules.compiler import compile_plan, plan_compilation
from tests.cli.commands import here, refused
from tests.cli.terminal import Terminal

TINY = SHAPES["tiny"]
KEYS = {"schema", "benchmark", "ceiling", "summary", "machine", "settings", "rows", "skipped"}
SVG = "{http://www.w3.org/2000/svg}"

HEADERS = 128 * (4 * TINY.layers + 1) if packed_kernels.compiled() else 0
"""Bytes that packed matrices have besides their values: four a layer, and the embedding."""


@pytest.fixture(scope="module", autouse=True)
def _one_round() -> Iterator[None]:
    """The memory's speed is whatever one round says."""
    with mock.patch.object(floor, "_HOST_ROUNDS", 1):
        yield


@pytest.mark.parametrize("recipe", random_weights.RECIPES)
def test_no_two_rows_of_packed_random_weights_are_the_same(recipe: str) -> None:
    """Else the first of equal logits is chosen, and the others' rows are never seen to count."""
    config = replace(TINY, hidden=1792, heads=7, kv_heads=1, head_size=256, vocabulary=20_000)
    with random_checkpoint(replace(config, inner=256), recipe=recipe) as checkpoint:
        rows = checkpoint.stored("embed").reshape(config.vocabulary, -1)
        assert len({row.tobytes() for row in rows}) == config.vocabulary


def test_rows_that_are_no_whole_blocks_have_the_types_that_llama_cpp_takes() -> None:
    with random_checkpoint(replace(TINY, inner=256), recipe="Q4_K_M") as checkpoint:
        kinds = {name: checkpoint.raw(f"layers.1.{name}").type for name in ("wq", "wv", "w_down")}
        assert kinds == {"wq": "Q5_0", "wv": "Q8_0", "w_down": "Q6_K"}
        assert checkpoint.raw("embed").type == "Q8_0"
    with pytest.raises(InputError, match="rows of 80 values, which are no whole blocks of Q5_0"):
        random_checkpoint(replace(TINY, inner=80), recipe="Q4_K_M")


def test_weights_count_where_they_are_used_and_not_where_they_are_prefetched(
    host_device: Device,
) -> None:
    with random_checkpoint(TINY) as checkpoint:
        decoder = Decoder(host_device, checkpoint, max_context=32, stop_tokens=())
    with decoder:
        first, second = (decoder.weights.buffer("w_down", i) for i in range(2))
        steps = [("embed", [first]), ("product", [first, second]), ("product", [second])]
        operations: list[Any] = [
            SimpleNamespace(name=name, reads=reads, writes=None) for name, reads in steps
        ]
        rows = Attribution(decoder, 3, 5).of(operations)
        gathered = 3 * (decoder.weights.buffer("embed").nbytes // TINY.vocabulary)
        assert rows == [gathered, first.nbytes, second.nbytes]


def result_of(text: str) -> dict[str, Any]:
    result = json.loads(text.rstrip().splitlines()[-1])
    assert set(result) == KEYS and result["schema"] == "ostinato.benchmark/1"
    return result


def words_of(picture: Path) -> str:
    """All text in an SVG file, which has to be well-formed."""
    root = ET.fromstring(picture.read_text(encoding="utf-8"))
    assert root.tag == f"{SVG}svg"
    return " ".join(text for text in root.itertext())


def test_all_our_ways_are_compared(tmp_path: Path) -> None:
    picture = tmp_path / "pictures" / "bench.svg"
    options = ("--batch", "1,3", "--context", "9,0", "--tokens", "8", "--tokens-per-launch", "1,4")
    files = ("--out", str(tmp_path), "--plot", str(picture))
    answer = here(
        "bench", "--shape", "tiny", "--rounds", "1", *options, *files, OSTINATO_COMMIT="abc123"
    )
    assert answer.status == 0, answer.err
    result = result_of(answer.out)
    (path,) = tmp_path.glob("*.json")
    assert path.name.startswith("decode-tiny-batches-contexts-host")
    assert json.loads(path.read_text(encoding="utf-8")) == result
    rows = {(row["way"], row["batch"], row["context"]): row for row in result["rows"]}
    ways = ("eager", "capture", "record", "while 4")
    assert set(rows) == {(way, *at) for way in ways for at in ((1, 9), (3, 9), (1, 0))}
    assert result["summary"]["tokens_equal"] is True
    # At context 0 the host says where a sequence is: one step alone, then the loop.
    launches = {"eager": len(decode_program(TINY)), "capture": 1, "record": 1, "while 4": 1 / 4}
    for (way, batch, context), row in rows.items():
        if context or way != "while 4":
            assert row["launches_per_token"] == pytest.approx(launches[way])
        assert row["tokens_per_second"] == pytest.approx(batch * 1e6 / row["token_us"], rel=1e-2)
        assert row["of_floor"] == pytest.approx(row["floor_us"] / row["token_us"], rel=1e-2)
        assert way in answer.out
    assert not any(row["quarantined"] for row in rows.values())
    assert rows["eager", 3, 9]["floor_us"] > rows["eager", 1, 9]["floor_us"]
    assert rows["eager", 1, 9]["floor_us"] > rows["eager", 1, 0]["floor_us"]
    assert result["machine"]["commit"] == "abc123"
    assert result["ceiling"]["bandwidth_gb_per_s"] > 0
    assert result["skipped"] == {}
    words = words_of(picture)
    places = [
        f"batch {batch}, positions {at} to {at + 8}" for batch, at in ((1, 9), (3, 9), (1, 0))
    ]
    assert all(place in words for place in (*ways, *places, "the floor"))


def test_json_is_for_programs() -> None:
    """A terminal gets tables alone; `--json` is one object and nothing else."""
    options = ("--shape", "tiny", "--quick", "--tokens-per-launch", "1")
    answer = here("bench", *options, "--json")
    assert answer.status == 0, answer.err
    assert answer.out.count("\n") == 1 and set(json.loads(answer.out)) == KEYS
    with Terminal("bench", *options) as terminal:
        assert terminal.end() == 0, terminal.said
    assert "floor: " in terminal.said and '"schema"' not in terminal.said


def test_prompts_are_measured_beside_decoding(tmp_path: Path) -> None:
    options = ("--prompt", "70,5,256", "--batch", "2", "--context", "3", "--out", str(tmp_path))
    options += ("--library-rows", "0")  # nothing changes on the host
    answer = here("bench", "--shape", "tiny", "--quick", "--rounds", "1", *options)
    assert answer.status == 0, answer.err
    result = result_of(answer.out)
    (path,) = tmp_path.glob("*.json")
    assert path.name.startswith("decode-tiny-batch-2-3-prompt-own-products-host")
    assert Counter(row["kind"] for row in result["rows"]) == {"decode": 4, "prompt": 9}
    rows = {(r["way"], r["prompt"]): r for r in result["rows"] if r["kind"] == "prompt"}
    # The way with a loop has the decoder of "capture", and nothing of its own for prompts.
    assert set(rows) == {(way, n) for way in ("eager", "capture", "record") for n in (70, 5, 256)}
    assert result["summary"]["tokens_equal"] is True
    assert result["settings"]["prompts"] == [70, 5, 256]
    assert result["settings"]["library_rows"] is None
    bandwidth = result["ceiling"]["bandwidth_gb_per_s"] * 1e9
    for (way, prompt), row in rows.items():
        assert way in answer.out and row["ours"] and row["rounds"] == 1
        rate = row["tokens_per_second"] * row["first_token_us"] / 1e6
        assert rate == pytest.approx(prompt, rel=1e-2)
        assert row["of_floor"] == pytest.approx(row["floor_us"] / row["first_token_us"], rel=1e-2)
        assert row["piece"] == min(prompt, 64)
        nbytes = traffic(TINY, 4).prompt(prompt, 64)
        assert row["floor_us"] == pytest.approx(nbytes / bandwidth * 1e6, rel=2e-2)
    best = result["summary"]["prompt_tokens_per_second"]
    for prompt in (70, 5, 256):
        most = max(r["tokens_per_second"] for (_, n), r in rows.items() if n == prompt)
        assert best[str(prompt)] == pytest.approx(most, rel=1e-2)
    assert "prompts of tiny" in answer.out


def test_a_prompt_starts_in_an_empty_cache_and_leaves_none(host_device: Device) -> None:
    with random_checkpoint(TINY) as checkpoint:
        decoder = Decoder(host_device, checkpoint, max_context=100, stop_tokens=())
    with decoder:
        way = DecoderWay(LaunchMode("capture"), decoder, owns=True)
        first, other = prompt_tokens(TINY.vocabulary, 70, 0), prompt_tokens(TINY.vocabulary, 70, 1)
        assert first != other == prompt_tokens(TINY.vocabulary, 70, 1)
        expected = decoder.prefill(first)
        found = [way.prompt(tokens) for tokens in (other, first)]
        assert found[1].tokens == ((expected,),) and found[1].seconds > 0
        assert decoder.tokens() == ()
        way.place(1, 9)
        placed = way.decode(4).tokens
        way.prompt(other)
        way.place(1, 9)
        assert way.decode(4).tokens == placed


@pytest.mark.skipif(not packed_kernels.compiled(), reason="the compiled kernels were not built")
def test_quantised_random_weights_stay_packed() -> None:
    answer = here("bench", "--shape", "tiny", "--weights", "Q8_0", "--quick")
    result = result_of(answer.out)
    assert result["benchmark"] == "decode-tiny-q8_0"
    settings = result["settings"]
    assert settings["weights"].startswith("packed")
    assert settings["weights_on_device_bytes"] < traffic(TINY, 4).weights / 3


def test_a_profile_accounts_for_every_launch_and_byte(tmp_path: Path) -> None:
    picture, position = tmp_path / "profile.svg", 9
    options = ("--batch", "2", "--context", str(position), "--out", str(tmp_path))
    answer = here(
        "bench", "--profile", "--shape", "tiny", "--quick", *options, "--plot", str(picture)
    )
    assert answer.status == 0, answer.err
    result = result_of(answer.out)
    (path,) = tmp_path.glob("*.json")
    assert path.name.startswith("profile-tiny-batch-2-9-host")
    assert json.loads(path.read_text()) == result
    program = Counter(call.kernel for call in decode_program(TINY))
    assert {row["name"]: row["launches"] for row in result["rows"]} == program
    assert len(result["summary"]["launch_us"]) == program.total()
    assert all(row["us"] > 0 and row["alone_us"] > 0 for row in result["rows"])
    # Each weight once and the cache up to the position; besides, the rows of the embedding that
    # are gathered, and each position's keys and values when they are written.
    bytes_of = traffic(TINY, 4)
    gathered = 2 * TINY.hidden * 4
    total = sum(row["nbytes"] * row["launches"] for row in result["rows"])
    assert total == bytes_of.step(2, position + 1) + gathered + 2 * bytes_of.position + HEADERS
    words = words_of(picture)
    assert all(name in words and name in answer.out for name in program)
    # On the CPU each launch is timed alone, so there is no overlap to speak of.
    assert "nothing overlaps" in answer.out and "the overlap is" not in answer.out
    assert "launches, each by itself" in words


@pytest.mark.parametrize("source", [floor.SOURCE, replays.EMPTY], ids=lambda s: s.name)
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_its_own_kernels_compile(source: Source, capability: tuple[int, int]) -> None:
    made = compile_plan(plan_compilation(source, CompileOptions(), capability))
    assert made.log == "" and made.data


@pytest.mark.parametrize("burst", [1, 3])
def test_beginnings_of_a_step_leave_it_as_it_is(host_device: Device, burst: int) -> None:
    with random_checkpoint(TINY) as checkpoint:
        decoder = Decoder(host_device, checkpoint, max_context=32, stop_tokens=())
    with decoder:
        way = DecoderWay(LaunchMode("capture"), decoder, owns=False)
        way.place(1, 9)
        expected = way.decode(4).tokens
        way.place(1, 9)
        graph = decoder.graph(1)
        operations = [graph.labels[node.handle].operation for node in graph.nodes()]
        # The last launch is the one that takes the sequence further.
        timed = Replays(host_device, decoder.stream, operations[:-1], 1, lambda _: None)
        timed.burst = burst
        start, *ends = timed.ends()
        assert len(ends) == len(operations) - 1 and min(start, *ends) > 0
        event, alone = timed.alone()
        assert event > 0 and len(alone) == len(ends)
        assert way.decode(4).tokens == expected


def test_the_floor_counts_what_a_step_reads() -> None:
    for config in SHAPES.values():
        values = {name: int(np.prod(shape)) for name, shape in tensor_shapes(config).items()}
        if not config.tied_embeddings:
            del values["embed"]  # of the table only a row is read
        norms = sum(count for name, count in values.items() if name.endswith("norm"))
        found = traffic(config, 2)
        assert found.weights == 2 * (sum(values.values()) - norms) + 4 * norms
        assert found.position == config.layers * 2 * config.kv_heads * config.head_size * 2
        assert found.step(3, 5) == found.weights + 15 * found.position


def test_the_floor_of_a_prompt_counts_every_piece() -> None:
    bytes_of = traffic(SHAPES["8B"], 2)
    assert bytes_of.head == 128256 * 4096 * 2
    whole = bytes_of.prompt(150, 150)
    assert whole == bytes_of.weights + 150 * bytes_of.position == bytes_of.step(1, 150)
    pieces = bytes_of.prompt(150, 64)  # up to 64, 128 and 150
    assert pieces - whole == 2 * (bytes_of.weights - bytes_of.head) + 192 * bytes_of.position
    assert bytes_of.prompt(64, 64) == bytes_of.step(1, 64)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--shape", "7T"), "135M"),
        (("--weights", "q3_0"), "no recipe 'q3_0'"),
        (("--weights", "bf16"), "are for GPUs"),
        (("--batch", "65"), "65"),
        (("--batch", "0"), "1 to 64"),
        (("--batch", "1,1"), "twice"),
        (("--context", "256"), "256 positions"),
        (("--context", "ten"), "ten"),
        (("--tokens", "300"), "300"),
        (("--tokens", "8", "--tokens-per-launch", "9"), "9 tokens a launch"),
        (("--model", "nothing.gguf"), "not both"),
        (("--tokens-per-launch", "4,2,4"), "twice"),
        (("--prompt", "257"), "257 tokens"),
        (("--prompt", "0"), "0 tokens"),
        (("--prompt", "64,64"), "twice"),
        (("--prompt", "some"), "some"),
        (("--seconds", "nan"), "--seconds"),
        (("--seconds", "inf"), "--seconds"),
        (("--shape", ""), "no shape"),
        (("--batch", ""), "--batch"),
        (("--out", "~nosuchuser/x"), "--out"),
        (("--out", __file__), "--out"),
        (("--plot", str(Path(__file__).parent)), "--plot"),
        (("--plot", str(Path(__file__) / "bench.svg")), "--plot"),
    ],
)
def test_what_cannot_be_is_refused(options: tuple[str, ...], word: str) -> None:
    refused(here("bench", "--shape", "tiny", *options), word)


def test_a_result_that_cannot_be_written_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = Result("decode", {}, {"best": 1}, {"device": "host"}, {}, [], {})
    assert json.loads(result.write(tmp_path).read_text(encoding="utf-8")) == result.to_dict()
    path = tmp_path / "decode-host.json"
    path.unlink()
    path.mkdir()  # in the way
    with pytest.raises(IsADirectoryError):
        _finish(result, Output(tmp_path, None, True), print, str)
    assert result_of(capsys.readouterr().out)["summary"] == {"best": 1}
    assert list(tmp_path.iterdir()) == [path]
    path.rmdir()
    with pytest.raises(OSError, match="full"):
        _finish(result, Output(tmp_path, Path("/dev/full"), True), print, lambda: "<svg/>")
    assert result_of(capsys.readouterr().out)["summary"] == {"best": 1}
    assert json.loads(path.read_text(encoding="utf-8")) == result.to_dict()


def test_ways_that_disagree_are_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    decode = DecoderWay.decode

    def wrong(self: DecoderWay, tokens: int) -> Timed:
        found = decode(self, tokens)
        if self.name != "record":
            return found
        (own,) = found.tokens
        return replace(found, tokens=((*own[:2], own[2] + 1, *own[3:]),))

    monkeypatch.setattr(DecoderWay, "decode", wrong)
    with pytest.raises(typer.Exit) as ended:
        bench(shape="tiny", device="host", quick=True)
    assert ended.value.exit_code == 1
    printed = capsys.readouterr().out
    summary = result_of(printed)["summary"]
    assert summary["tokens_equal"] is False
    (line,) = summary["unequal"]
    assert "token 2 of sequence 0" in line and "by record" in line
    assert f"NOT EQUAL: {line}" in printed


def test_ways_that_disagree_after_a_prompt_are_an_error(
    host_device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = DecoderWay.prompt
    calls: Counter[str] = Counter()

    def wrong(self: DecoderWay, tokens: Sequence[int]) -> Timed:
        found = prompt(self, tokens)
        calls[self.name] += 1
        if self.name != "record" or calls["record"] != 5:  # the second round after three warm-ups
            return found
        return replace(found, tokens=((found.tokens[0][0] + 1,),))

    monkeypatch.setattr(DecoderWay, "prompt", wrong)
    options = DecodeOptions(contexts=(2,), tokens=2, prompts=(9,), rounds=2, seconds=60)
    (line,) = measure(host_device, lambda: random_checkpoint(TINY), options).unequal
    assert line.startswith("prompt 9: in round 2") and "by record" in line


def test_points_fall_in_context_and_end_with_the_model() -> None:
    options = DecodeOptions(batches=(1, 8), contexts=(20, 0, 255), tokens=16)
    batches, contexts = points_of(options, TINY)
    assert [(p.batch, p.context) for p in batches] == [(1, 20), (8, 20)]
    assert [(p.batch, p.context, p.first) for p in contexts] == [(1, 255, 240), (1, 0, 0)]
    (single,) = points_of(replace(options, batches=(2,)), TINY)
    assert [(p.batch, p.context) for p in single] == [(2, 255), (2, 20), (2, 0)]


def test_sequences_of_a_batch_stand_at_different_positions(host_device: Device) -> None:
    assert positions_of(3, 20, False) == (20, 20, 20)
    assert positions_of(4, 20, True) == (20, 15, 10, 5)
    assert positions_of(4, 0, True) == (0,) * 4
    options = DecodeOptions(
        batches=(3,), contexts=(40,), uneven=True, tokens=4, rounds=1, seconds=20
    )
    found = measure(host_device, lambda: random_checkpoint(TINY), options)
    even = measure(host_device, lambda: random_checkpoint(TINY), replace(options, uneven=False))
    assert not found.unequal and found.bandwidth and even.bandwidth
    assert len(found.rows) == len(even.rows) == 3
    us = found.rows[0].floor_us * found.bandwidth.best / 1e6
    assert us == pytest.approx(traffic(TINY, 4).step(3, (40 + 26 + 13) / 3 + 2.5) + HEADERS)


def test_random_weights_do_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(dtype: type) -> dict[str, np.ndarray[Any, Any]]:
        arrays = {
            name: np.zeros(shape, dtype if len(shape) == 2 else np.float32)
            for name, shape in tensor_shapes(TINY).items()
        }
        with random_checkpoint(TINY) as checkpoint:
            checkpoint.load(arrays)
        return arrays

    whole = loaded(np.float32)
    monkeypatch.setattr(random_weights, "_PIECE", 1000)
    pieces, halves = loaded(np.float32), loaded(np.uint16)
    for name, values in whole.items():
        assert np.array_equal(values, pieces[name])
        assert values.all(), "a weight is zero"
        if values.ndim == 2:
            assert np.array_equal(values.view(np.uint32) >> 16, halves[name])
    layers = [whole["layers.0.wq"], whole["layers.1.wq"], whole["layers.0.wo"]]
    assert len({layer.tobytes() for layer in layers}) == 3
    assert whole["layers.0.w_gate"].std() == pytest.approx(0.02, rel=0.1)


def test_times_of_runs() -> None:
    runs = [Timed(4e-3, (1e-3, 2e-3, 4e-3)), Timed(2e-3), Timed(8e-3)]
    found = Times.of(runs, 2)
    assert (found.median, found.least, found.most) == (2e3, 1e3, 4e3)
    assert found.between == pytest.approx(1.5e3) and found.rounds == 3
    assert Times.of(runs[1:], 2).between is None


def test_pictures_are_well_formed_whatever_the_names(tmp_path: Path) -> None:
    row = Row(
        way="a < b & c", ours=True, batch=1, context=0, first_position=0, tokens=8,
        tokens_per_second=100.0, token_us=1e4, token_min_us=1e4, token_max_us=1e4,
        between_us=None, rounds=1, floor_us=5e3, of_floor=0.5, ours_is=1.0,
    )  # fmt: skip
    rows = [row, replace(row, context=8191, tokens_per_second=3.0, floor_us=2e5)]
    for chosen in (rows, rows[:1], []):
        picture = tmp_path / "picture.svg"
        picture.write_text(decode_svg("x > y", "a & b", chosen), encoding="utf-8")
        words = words_of(picture)
        assert "decoding x > y on a & b" in words
        assert ("a < b & c" in words) == bool(chosen) == ("nothing was measured" not in words)
    assert "prefers-color-scheme: dark" in picture.read_text(encoding="utf-8")


@pytest.mark.parametrize(("step", "end"), [(100.0, 0.6), (60.0, 1.0), (50.0, 1.0)])
def test_launches_are_drawn_along_the_steps_time(step: float, end: float) -> None:
    launches = (20.0, 30.0)
    rows = tuple(ProfileRow(f"k{us}", 1, us, us, us, nbytes=0, floor_us=0) for us in launches)
    profile = Profile(
        batch=1, position=0, step_us=step, start_us=10.0, gap_us=1.0, event_us=1.0, alone_us=50.0,
        floor_us=5.0, bandwidth=floor.Bandwidth(1e12, 0, "measured"), rows=rows,
        launch_names=tuple(row.name for row in rows), launch_us=launches,
    )  # fmt: skip
    strip = [
        rect
        for rect in ET.fromstring(profile_svg("x", "y", profile)).iter(f"{SVG}rect")
        if rect.get("height") == "34"
    ]
    assert len(strip) == 3, "the start, and two launches"
    left, right = float(strip[0].get("x", 0)), 872.0
    last = float(strip[-1].get("x", 0)) + float(strip[-1].get("width", 0))
    assert (last - left) / (right - left) == pytest.approx(end, abs=0.002)
