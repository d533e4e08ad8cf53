"""Fills measured figures of README.md and docs/ from the results files of the measurements.

A table is written by a function of `TABLES`, between two comments:

    <!-- table: replay_cost, written by make docs -->
    <!-- end -->

The figures of a paragraph are listed in a comment right after it, in the order of the text, with
the file of benchmarks/results and the place in that file:

    A kernel comes from disk in 1.6 ms.
    <!-- figures
    modules-nvidia-h200.json
    1.6 = rows[library=ostinato].disk_loaded_ms
    -->

A list at the end of the page names its paragraph by the first words:

    <!-- figures of: A kernel comes from disk
    modules-nvidia-h200.json
    1.6 = rows[library=ostinato].disk_loaded_ms
    -->

`filled` writes the file's value in the paragraph and in the list, with as many decimals as the page
has.  A place may be a product or quotient: `100 * rows[batch=8; way=capture].of_floor`.  A figure
that no results file has is listed without a place, under the file of the repository that contains
it (`docs/log: its heading` for an entry of the log), written as in the page.

`unlisted` finds figures with a unit of time, speed or size that are in no table and no list.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

__all__ = ["PAGES", "TABLES", "FigureError", "filled", "unlisted"]

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
# docs/log.md and docs/log are history; docs/cli.md and docs/errors.md are generated whole.
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "docs/correctness.md",
    "docs/design.md",
    "docs/howto/differences.md",
    "docs/howto/faults.md",
    "docs/howto/libraries.md",
    "docs/index.md",
    "docs/models.md",
    "docs/performance.md",
    "docs/relational.md",
    "docs/serve.md",
    "docs/torch.md",
    "docs/transformers.md",
)

NUMBER = r"\d[\d,]*(?:\.\d+)?"
_TABLE = re.compile(
    r"(<!-- table: (?P<name>\w+), written by make docs -->\n).*?(?=<!-- end -->)", re.S
)
_LIST = re.compile(r"<!-- figures(?: of: (?P<words>[^\n]+))?\n(?P<lines>.*?)-->", re.S)
_UNIT = r"(?:\s(?:µs|ms|s|seconds|tok/s|tokens a second|[GT]B/s|[GM]B|KiB|times|× C)|\s?%)"
_BETWEEN = r"(?:,|,? (?:and|or|to|of|beside|against|instead of)| ×)"
_MEASURED = re.compile(rf"(?<![\w.,-])(?:{NUMBER}{_BETWEEN} )*{NUMBER}{_UNIT}(?!\w)")
_MEASURED_CELL = re.compile(r"\|\s*\**(?:\d[\d,]*\.\d+|\d{1,3}(?:,\d{3})+)\**(?=\s*\|)")


class FigureError(Exception):
    """A figure cannot be filled in; the message has the text of the page and the reason."""


# ------------------------------------------------------------------------------- figures in a text


@functools.cache
def results(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def value_at(document: Any, place: str) -> float:
    """Returns the value at a place, such as `rows[kernels=1; launched by=C].median_us`, or of a
    product or quotient of places."""
    first, *others = re.split(r" ([*/]) ", place)
    value = _one_value(document, first)
    for operator, operand in zip(others[::2], others[1::2], strict=True):
        by = _one_value(document, operand)
        value = value * by if operator == "*" else value / by
    return value


def _one_value(document: Any, place: str) -> float:
    if re.fullmatch(NUMBER, place):
        return float(place.replace(",", ""))
    for key, wanted in re.findall(r"([^.\[]+)(?:\[([^\]]*)\])?\.?", place):
        document = document[int(key) if isinstance(document, list) else key]
        if wanted:
            document = row(document, dict(pair.split("=", 1) for pair in wanted.split("; ")))
    if not isinstance(document, int | float):
        raise FigureError(f"{place} is no number but {document!r:.60}")
    return float(document)


def row(rows: Sequence[dict[str, Any]], wanted: dict[str, Any]) -> dict[str, Any]:
    """Returns the only row with these values.  Raises FigureError if there is not exactly one."""
    found = [r for r in rows if all(str(r.get(k)) == str(v) for k, v in wanted.items())]
    if len(found) != 1:
        raise FigureError(f"{len(found)} rows have {wanted}")
    return found[0]


def written(value: float, like: str) -> str:
    """Formats the value with as many decimals as the text `like`."""
    return f"{value:,.{len(like.partition('.')[2])}f}"


def filled(page: str) -> str:
    """Returns the page with its tables and figures filled from the files.  Raises FigureError."""

    def table(found: re.Match[str]) -> str:
        return found[1] + "\n".join(TABLES[found["name"]]()) + "\n"

    page = _TABLE.sub(table, page)
    for number in range(len(_LIST.findall(page))):
        found = list(_LIST.finditer(page))[number]  # searched again: earlier changes may move it
        start, end = _paragraph_of(page, found)
        text, lines, _ = _follow(page[start:end], found["lines"].splitlines())
        page = page[: found.start("lines")] + "\n".join([*lines, ""]) + page[found.end("lines") :]
        page = page[:start] + text + page[end:]
    return page


def unlisted(page: str) -> list[str]:
    """Returns the texts that look like measured figures and are in no table and no list."""
    page = re.sub(r"^```.*?^```", "", page, flags=re.S | re.M)
    page = re.sub(r"<!-- [\w ]+:[^\n]* -->\n.*?<!-- end -->", "", page, flags=re.S)
    found = []
    for text, lines in _paragraphs(page):
        _, _, spans = _follow(text, lines)
        for match in (*_MEASURED.finditer(text), *_MEASURED_CELL.finditer(text)):
            numbers = re.compile(NUMBER).finditer(text, match.start(), match.end())
            if any((number.start(), number.end()) not in spans for number in numbers):
                found.append(match[0].strip("| "))
    return found


def _paragraphs(page: str) -> Iterator[tuple[str, list[str]]]:
    """Yields each paragraph with the lines of its list of figures; no lines if it has none."""
    lists = {_paragraph_of(page, found): found["lines"] for found in _LIST.finditer(page)}
    position = 0
    for start, end in (*sorted(lists), (len(page), len(page))):
        others = re.split(r"\n\s*\n", _LIST.sub("", page[position:start]))
        yield from ((text, []) for text in others)
        yield page[start:end], lists.get((start, end), "").splitlines()
        position = end


def _paragraph_of(page: str, found: re.Match[str]) -> tuple[int, int]:
    """Returns the begin and the end of a list's paragraph in the page."""
    if found["words"] is None:  # ends at the list, begins after a blank line or another comment
        before, end = page[: found.start()], found.start()
        ends = [before.rfind(mark) + len(mark) for mark in ("\n\n", "-->\n") if mark in before]
        return max(ends, default=0), end
    starts = [*re.finditer(rf"(?<=\n\n){re.escape(found['words'])}", page)]
    if len(starts) != 1:
        raise FigureError(f"{len(starts)} paragraphs begin with {found['words']!r}")
    start = starts[0].start()
    return start, page.index("\n\n", start) + 1


def _follow(text: str, lines: Iterable[str]) -> tuple[str, list[str], set[tuple[int, int]]]:
    """Returns the paragraph and its list with the files' values, and the spans of its figures."""
    document: Any = None
    position, new_lines, spans = 0, [], set()
    for line in lines:
        figure, equals, place = line.partition(" = ")
        if not re.fullmatch(NUMBER, figure):
            document = _source(line)
            new_lines.append(line)
            continue
        found = re.compile(rf"(?<![\w.,]){re.escape(figure)}(?!\d|[.,]\d)").search(text, position)
        if found is None:
            raise FigureError(f"{line!r}: no {figure} behind the figure before it in: {text}")
        if equals:
            try:
                new = written(value_at(document, place), figure)
            except (FigureError, KeyError, TypeError, ValueError) as error:
                raise FigureError(f"{line!r} cannot be looked up: {error!r}") from error
        elif isinstance(document, str) and re.search(rf"(?<![\d.,]){figure}(?!\d)", document):
            new = figure
        else:
            raise FigureError(f"{line!r}: the file above it does not say {figure}")
        text = text[: found.start()] + new + text[found.end() :]
        position = found.start() + len(new)
        spans.add((found.start(), position))
        new_lines.append(f"{new} = {place}" if equals else new)
    return text, new_lines, spans


def _source(line: str) -> Any:
    """Reads the source that a line names: a results file, which is parsed, or the text of a file of
    the repository or of an entry of the log."""
    if line.endswith(".json"):
        return results(line)
    name, _, heading = line.partition(": ")
    if name == "docs/log":
        files = (file.read_text(encoding="utf-8") for file in sorted((ROOT / name).glob("*.md")))
        entries = (text.partition(f"\n## {heading}\n")[2] for text in files)
        if not (found := "".join(entries)):
            raise FigureError(f"{name} has no entry {heading!r}")
        return found.partition("\n## ")[0]
    if name in PAGES or not (ROOT / name).is_file():
        raise FigureError(f"{line!r} is neither a figure nor a file that can say one")
    return (ROOT / name).read_text(encoding="utf-8")


# ------------------------------------------------------------------------------------------ tables

H100 = "nvidia-h100-80gb-hbm3.json"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for cells in rows:
        yield f"| {' | '.join(cells)} |"


def _launched(
    name: str, launched_by: Sequence[tuple[str, str]], **more: Any
) -> Iterator[list[str]]:
    for title, by in launched_by:
        found = row(results(name)["rows"], {"launched by": by, **more})
        yield [title, f"{found['median_us']:.1f}", f"{found['times_c']:.2f}"]


def replay_cost() -> Iterable[str]:
    ways = (
        ("a loop in C around cuGraphLaunch", "C"),
        ("**ostinato**, `GraphExec.launch`", "ostinato compiled, GraphExec.launch"),
        ("CuPy", "CuPy"),
        ("cuda.bindings", "cuda.bindings"),
        ("**ostinato**, `HeldReplay.launch`", "ostinato compiled, HeldReplay.launch"),
        ("**ostinato**, `GraphExec.launch`, no C compiler", "ostinato ctypes, GraphExec.launch"),
        ("PyTorch", "PyTorch"),
        ("cuda.core", "cuda.core"),
        ("**ostinato**, a call of a `GraphedStep`", "ostinato compiled, GraphedStep"),
    )
    name = "replay_cost-nvidia-h200.json"
    few, many = (list(_launched(name, ways, kernels=kernels)) for kernels in (1, 280))
    rows = [[*one, *other[1:]] for one, other in zip(few, many, strict=True)]
    rows.sort(key=lambda cells: float(cells[2]))
    return _table(("launched by", "1 kernel, µs", "× C", "280 kernels, µs", "× C"), rows)


def launch_cost() -> Iterable[str]:
    ways = (
        ("`cuLaunchKernelEx` in C", "C"),
        ("**ostinato**, `launch`", "ostinato, launch"),
        ("cuda.core", "cuda.core"),
        ("CuPy", "CuPy"),
        ("cuda.bindings", "cuda.bindings"),
        ("PyTorch, an operation", "PyTorch"),
    )
    return _table(("launched by", "µs", "× C"), _launched(f"launch_cost-{H100}", ways))


def change_cost() -> Iterable[str]:
    names = {
        "first patch": "the first `set`, of a graph of 1,000 kernels",
        "patch one": "a later `set` of a pointer",
        "patch a number": "a later `set` of a number",
        "patch prepared": "the same, by a `patcher`",
        "rebind all": "`rebind` of every pointer",
        "update": "`update` from another graph",
        "recapture": "capture again and instantiate",
    }
    rows = results("change_cost-nvidia-h200.json")["rows"]
    for_each = (
        (name, row(rows, {"change": key, "by": "ostinato"}), row(rows, {"change": key, "by": "C"}))
        for key, name in names.items()
    )
    return _table(
        ("change", "ostinato, µs", "C, µs", "× C"),
        (
            (name, _short(ours["median_us"]), _short(c["median_us"]), f"{ours['times_c']:.1f}")
            for name, ours, c in for_each
        ),
    )


def modules() -> Iterable[str]:
    rows = results("modules-nvidia-h200.json")["rows"]
    columns = ("disk_loaded_ms", "disk_launched_ms", "disk_total_ms")
    return _table(
        ("a kernel from disk, ms", "until loaded", "until its first launch is done",
         "the same, from the start of the process"),
        ([r["library"], *(f"{r[c]:,.1f}" for c in columns)] for r in rows),
    )  # fmt: skip


_PEERS = ("transformers", "torch.cuda.graph", "torch.compile")


def decode() -> Iterable[str]:
    shapes = [("SmolLM2-135M", "decode-135M-nvidia-h200.json", 1)]
    shapes += [
        ("Llama-3.2-1B", "decode-1B-batches-nvidia-h200.json", batch) for batch in (1, 8, 32, 64)
    ]
    rows = []
    for shape, name, batch in shapes:
        speeds = [_of_peer(name, peer, batch) for peer in _PEERS]
        ours = _decoded(name, "capture", batch=batch)
        rows.append(
            [f"{shape}, {batch}", *speeds, f"**{_count(ours['tokens_per_second'])}**", _share(ours)]
        )
    return _table(("shape, sequences", *_PEERS, "**one graph a token**", "of the floor"), rows)


def batches() -> Iterable[str]:
    numbers = (1, 8, 32, 64)
    measured = {"135M": numbers, "360M": numbers[:3], "1B": numbers, "8B": numbers[:2]}

    def cell(shape: str, batch: int) -> str:
        one = _decoded(f"decode-{shape}-batches-nvidia-h200.json", "capture", batch=batch)
        return f"{_speed(one)} ({_share(one)})"

    return _table(
        ("shape, so many sequences", *map(str, numbers)),
        ([s, *(cell(s, n) if n in own else "" for n in numbers)] for s, own in measured.items()),
    )


def lengths_h200() -> Iterable[str]:
    places = (300, 1000, 4000)

    def of(batch: int) -> list[dict[str, Any]]:
        name = f"decode-1B-batch-{batch}"
        even = [_decoded(f"{name}-contexts-nvidia-h200.json", "capture", context=p) for p in places]
        return [*even, _decoded(f"{name}-4000-uneven-nvidia-h200.json", "capture")]

    return _columns(
        ("positions", *map(_count, places), "spread up to 4,000"),
        ("32 sequences, tokens a second", of(32), _speed),
        ("of the floor", of(32), _share),
        ("64 sequences, tokens a second", of(64), _speed),
        ("of the floor", of(64), _share),
    )


def front() -> Iterable[str]:
    """The table of the site's first page: the best and the worst of the measured functions."""
    rows = results("torch_graphed-nvidia-h200.json")["rows"]
    ways = {
        "eager": "PyTorch, eager",
        "graphed": "**`graphed`**",
        "make_graphed": "`make_graphed_callables`",
        "by hand": "`torch.cuda.graph`, by hand",
    }

    def cell(work: str, way: str) -> str:
        text = _short(row(rows, {"work": work, "way": way})["median_us"])
        return f"**{text}**" if way == "graphed" else text

    return _table(
        ("one call, µs of the CPU (H200)", "a small Llama", "an encoder"),
        ([title, cell("Llama", way), cell("encoder", way)] for way, title in ways.items()),
    )


def summary() -> Iterable[str]:
    """The README's table of strong and weak figures; a line compares ways from one file."""
    torch, replays, changes = (
        f"{name}-nvidia-h200" for name in ("torch_graphed", "replay_cost", "change_cost")
    )
    prompts, cpu = "decode-1B-prompt-nvidia-h200", "host-host-x86-64-numpy-2-4-6"
    others = {"eager": "eager", "by hand": "by hand", "make_graphed": "`make_graphed_callables`"}
    llama = {"ostinato": "", "llama.cpp": "llama.cpp"}
    joins = {"replay, inner, not read": "", "eager, inner, not read": "eager launches"}
    lines: tuple[tuple[str, str, str, dict[str, Any], str, dict[str, str]], ...] = (
        ("a call of a small Llama, µs of the CPU", torch, "median_us", {"work": "Llama"}, "way",
         {"graphed": ""} | others),
        ("of an encoder, the least favourable of eleven works", torch, "median_us",
         {"work": "encoder"}, "way", {"graphed": ""} | others),
        ("one replay of a kernel, µs", replays, "median_us", {"kernels": 1}, "launched by",
         {"ostinato compiled, GraphExec.launch": "", "C": "C", "CuPy": "CuPy",
          "cuda.core": "cuda.core", "PyTorch": "PyTorch"}),
        ("a call of a `GraphedStep` like an earlier one, µs", replays, "median_us",
         {"kernels": 1}, "launched by", {"ostinato compiled, GraphedStep": "", "C": "C"}),
        ("one `set` of a pointer, µs", changes, "median_us", {"change": "patch one"}, "by",
         {"ostinato": "", "C": "C"}),
        ("`rebind` of all pointers of 280 kernels, µs", changes, "median_us",
         {"change": "rebind all"}, "by", {"ostinato": "", "C": "C"}),
        ("a kernel from disk, until its first launch is done, ms", "modules-nvidia-h200",
         "disk_launched_ms", {}, "library",
         {"ostinato": "", "cuda.core": "cuda.core", "CuPy": "CuPy"}),
        ("`generate` of a 1B Llama with `graphed`, tok/s", "generate-1B-nvidia-h200",
         "tokens_per_s", {"batch": 1}, "way", {"graphed": "", "eager": "transformers"}),
        ("the same with `accelerate`, tok/s", "generate-1B-nvidia-h200", "tokens_per_s",
         {"batch": 1}, "way", {"accelerated": "", "eager": "transformers"}),
        *(
            (f"a prompt of {_count(n)} tokens, 1B, tok/s", prompts, "tokens_per_second",
             {"kind": "prompt", "prompt": n}, "way",
             {"capture": "", "transformers": "transformers"})
            for n in (4096, 16384)
        ),
        ("SmolLM2-135M in BF16 on two CPU cores, tok/s", cpu, "tokens_per_second",
         {"type": "BF16", "machine": "idle"}, "way", llama),
        ("its prompt of 256 tokens, tok/s", cpu, "prompt_tokens_per_second",
         {"type": "BF16", "machine": "idle"}, "way", llama),
        ("a join of 1,000 rows, eight joiners in turn, µs", "join-nvidia-h200", "us",
         {"rows": "1,000"}, "joined by", {f"{w}, 8 joiners": title for w, title in joins.items()}),
        ("the same with one joiner, µs", "join-nvidia-h200", "us", {"rows": "1,000"},
         "joined by", joins),
    )  # fmt: skip

    def cells(
        name: str, field: str, wanted: dict[str, Any], key: str, ways: dict[str, str]
    ) -> Iterator[str]:
        rows = results(f"{name}.json")["rows"]
        ours, *others = (
            f"{title} {_short(row(rows, wanted | {key: way})[field])}".strip()
            for way, title in ways.items()
        )
        yield from (ours, ", ".join(others), f"`{name}`")

    head = ("", "ostinato", "others", "file")
    return _table(head, ([what, *cells(*where)] for what, *where in lines))


def contexts() -> Iterable[str]:
    name = f"decode-1B-contexts-{H100}"
    places = (0, 128, 500, 2048, 8191)
    ours = [_decoded(name, "capture", context=place) for place in places]
    return _columns(
        ("from position", *map(_count, places)),
        ("one graph a token, tokens a second", ours, _speed),
        ("of the floor", ours, _share),
        ("launch by launch", [_decoded(name, "eager", context=p) for p in places], _speed),
        ("a loop of 16 tokens a launch", [_decoded(name, "while 16", context=p) for p in places],
         _speed),
    )  # fmt: skip


def floor() -> Iterable[str]:
    files = {"135M": "135M", "360M": "360M", "1B": "1B-contexts", "8B": "8B"}
    speed = results(f"kernels-{H100}")["ceiling"]["bytes_per_second"]
    rows = []
    for shape, name in files.items():
        ceiling = results(f"decode-{name}-{H100}")["ceiling"]
        read, position = ceiling["weight_bytes"], ceiling["bytes_per_position"]
        rows.append(
            [
                shape,
                _size(read),
                f"{1e6 * read / speed:,.0f}",
                f"{1e6 * 500 * position / speed:.1f}",
            ]
        )
    return _table(("shape", "weights", "µs to read them", "and 500 positions, µs more"), rows)


def profile() -> Iterable[str]:
    rows = []
    for shape in ("135M", "1B"):
        for r in results(f"profile-{shape}-{H100}")["rows"]:
            times = (f"{r[key]:.2f}" for key in ("us", "alone_us", "floor_us"))
            rows.append([shape, f"`{r['name']}`", str(r["launches"]), *times])
    head = ("shape", "kernel", "launches", "µs it adds", "alone", "its bytes alone")
    return _table(head, rows)


def profile_batches() -> Iterable[str]:
    whats = {
        "norms, once for all": ("norm_rows",),
        "QKV": ("rounded_qkv_rope",),
        "attention": ("attention",),
        "output": ("rounded_output",),
        "gate and up": ("rounded_gate_up",),
        "down": ("rounded_down",),
        "head": ("rounded_head",),
        "embed, sample": ("embed", "sample", "advance"),  # "advance": a kernel in older files
    }
    titles = ("8", "32", "64")
    found = [results(f"profile-1B-batch-{n}-nvidia-h200.json") for n in titles]

    def cell(result: Any, names: Sequence[str]) -> str:
        rows = [r for r in result["rows"] if r["name"] in names]
        return f"{sum(r['total_us'] for r in rows):,.0f} ({_bytes_us(rows):,.0f})"

    return _table(
        ("µs of a step of so many rows", *titles),
        [
            *([what, *(cell(result, names) for result in found)] for what, names in whats.items()),
            ["the step", *(f"{r['summary']['step_us']:,.0f}" for r in found)],
            ["its floor", *(f"{r['ceiling']['floor_us']:,.0f}" for r in found)],
        ],
    )


def _bytes_us(rows: Sequence[dict[str, Any]]) -> float:
    return sum(r["floor_us"] * r["launches"] for r in rows)


def prompts() -> Iterable[str]:
    cells = [(shape, n) for shape in ("1B", "8B") for n in (512, 4096, 16384)]
    ours, theirs = (
        [
            row(
                results(f"decode-{shape}-prompt-nvidia-h200.json")["rows"],
                {"kind": "prompt", "way": way, "prompt": n},
            )
            for shape, n in cells
        ]
        for way in ("capture", "transformers")
    )
    return _columns(
        ("a prompt of", *(f"{shape}, {_count(n)}" for shape, n in cells)),
        ("tokens a second", ours, _speed),
        ("transformers", theirs, _speed),
        ("ms to the first token", ours, lambda r: f"{r['first_token_us'] / 1e3:,.1f}"),
    )


def prompt_attention() -> Iterable[str]:
    rows = results("prompt_attention-nvidia-h200.json")["rows"]
    cells = [(shape, n) for shape in ("1B", "8B") for n in (1024, 4096, 16384)]
    ways = {
        "ours": "ours, TFLOPS",
        "without warpgroups": "ours without warpgroups",
        "FLASH_ATTENTION": "torch, flash attention",
        "CUDNN_ATTENTION": "torch, cuDNN",
    }
    lines = [
        (title, [row(rows, {"shape": s, "tokens": n, "way": way}) for s, n in cells])
        for way, title in ways.items()
    ]
    return _columns(
        ("", *(f"{shape}, {_count(n)}" for shape, n in cells)),
        *((title, found, lambda r: f"{r['teraflops']:.0f}") for title, found in lines),
    )


def attention() -> Iterable[str]:
    rows = results(f"kernels-{H100}")["rows"]
    cells = [("135M", 20), ("135M", 500), ("360M", 20), ("360M", 500)]
    whats = {"attention as three launches": "three launches, µs a step", "rule": "one launch"}
    lines = [
        (title, [row(rows, {"shape": s, "position": p, "what": what}) for s, p in cells])
        for what, title in whats.items()
    ]
    return _columns(
        ("", *(f"{shape} at {position}" for shape, position in cells)),
        *((title, found, lambda r: f"{r['us']:.0f}") for title, found in lines),
        ("of the floor", lines[1][1], _share),
    )


def startup() -> Iterable[str]:
    rows = results(f"startup-{H100}")["rows"]
    names = {"plan": "buffers", "process start to first token": "together"}
    return _table(
        ("phase", "ms"),
        ((names.get(r["phase"], r["phase"]), f"{r['median_ms']:,.0f}") for r in rows),
    )


def load() -> Iterable[str]:
    rows = results(f"load-{H100}")["rows"]
    ways = {
        "the bytes alone": "the bytes alone, copied",
        "device": "**converted by the device**",
        "host, 4 threads": "by the host, 4 threads",
        "host, 16 threads": "by the host, 16 threads",
        "gguf and torch": "`gguf`, then torch",
    }
    types = ("Q4_0", "Q8_0")
    sizes = {t: row(rows, {"type": t, "way": "device"})["gigabytes"] for t in types}
    return _columns(
        ("ms", *(f"{t}, {sizes[t]:.2f} GB" for t in types)),
        *(
            (title, [row(rows, {"type": t, "way": way}) for t in types],
             lambda r: f"{r['median_ms']:,.0f}")
            for way, title in ways.items()
        ),
    )  # fmt: skip


def host() -> Iterable[str]:
    rows = results("host-host-x86-64-numpy-2-4-6.json")["rows"]
    types = ("Q4_1", "BF16", "F32")
    lines = (
        ("decode, tok/s", "idle", "tokens_per_second"),
        ("decode, one core busy", "one core busy", "tokens_per_second"),
        ("a prompt of 256, tok/s", "idle", "prompt_tokens_per_second"),
        ("a prompt, one core busy", "one core busy", "prompt_tokens_per_second"),
        ("memory at the most, MB", "idle", "memory_mb"),
    )

    def cell(kind: str, machine: str, field: str) -> str:
        ours, theirs = (
            row(rows, {"type": kind, "machine": machine, "way": way})[field]
            for way in ("ostinato", "llama.cpp")
        )
        first, second = f"{ours:.0f}", f"{theirs:.0f}"
        if field == "memory_mb":
            return f"{first} / {second}"
        return f"**{first}** / {second}" if ours > theirs else f"{first} / **{second}**"

    return _table(
        ("ostinato / llama.cpp", *types),
        (
            [title, *(cell(kind, machine, field) for kind in types)]
            for title, machine, field in lines
        ),
    )


def join() -> Iterable[str]:
    rows = results("join-nvidia-h200.json")["rows"]
    small, mixed, large = "1,000", "1,000 to 100,000", "10,000,000 x 1,000,000"
    lines = (
        ("1,000 rows, by eight joiners in turn", small, "inner, not read, 8 joiners", ""),
        ("the same, with an index", small, "indexed, not read, 8 joiners", ""),
        ("1,000 rows, count not read back", small, "inner, not read", ""),
        ("the same, with an index", small, "indexed, not read", ""),
        ("1,000 rows, count read back", small, "inner, read", "pyarrow, read"),
        ("the same, with an index", small, "indexed, read", ""),
        ("1,000 to 100,000 rows, not read back", mixed, "inner, not read", ""),
        ("1,000 to 100,000 rows, read back", mixed, "inner, read", "pyarrow, read"),
        ("10,000,000 × 1,000,000 rows", large, "inner", ""),
        ("the same, with an index", large, "indexed", ""),
    )

    def cells(sizes: str, way: str, peer: str) -> Iterator[str]:
        for by in (f"replay, {way}", f"eager, {way}", peer):
            measured = by and not (sizes == large and by.startswith("eager"))
            found = row(rows, {"rows": sizes, "joined by": by}) if measured else None
            yield _short(found["us"]) if found else ""

    return _table(
        ("joins", "by replay, µs", "eager launches", "pyarrow, CPU"),
        ([title, *cells(*where)] for title, *where in lines),
    )


def torch_graphed() -> Iterable[str]:
    rows = results("torch_graphed-nvidia-h200.json")["rows"]
    ways = ("eager", "by hand", "make_graphed", "graphed", "graphed, static")

    def cells(work: str) -> Iterator[str]:
        own = {r["way"]: r["median_us"] for r in rows if r["work"] == work}
        for way in ways:
            yield f"{own[way]:,.1f}" if way in own else ""

    heads = ("a call's time on the CPU, µs", *ways)
    return _table(heads, ([work, *cells(work)] for work in dict.fromkeys(r["work"] for r in rows)))


def torch_waits() -> Iterable[str]:
    return _waits("torch_waits-nvidia-h200.json")


def cupy_waits() -> Iterable[str]:
    return _waits("cupy_waits-nvidia-h200.json")


def _waits(file: str) -> Iterable[str]:
    rows = results(file)["rows"]
    heads = ("function", "eager, µs", "`graphed`, µs", "replays, eager runs", "answers")
    return _table(
        heads,
        (
            [
                row["work"],
                f"{row['eager_us']:,.0f}",
                f"{row['graphed_us']:,.0f}",
                f"{row['replays']}, {row['eager']}",
                ", ".join(row["answers"]),
            ]
            for row in rows
        ),
    )


def torch_training() -> Iterable[str]:
    heads = (
        *("step", "optimiser", "eager, µs", "`graphed`, µs", "times"),
        *("whole graph by hand, µs", "`make_graphed_callables`, µs"),
        *("first 12 steps, s", "parameters"),
    )
    rows = results("torch_training-nvidia-h200.json")["rows"]
    return _table(heads, ([*_trained(row), row["parameters"]] for row in rows))


def torch_training_compile() -> Iterable[str]:
    heads = (
        *("step", "optimiser", "eager, µs", "`graphed`, µs", "times"),
        *("whole graph by hand, µs", "`make_graphed_callables`, µs"),
        *("first 12 steps, s", "`torch.compile`, µs", "its first 12 steps, s"),
    )
    rows = results("torch_training-compile-nvidia-h200.json")["rows"]
    return _table(heads, ([*_trained(row), *_compiled(row)] for row in rows))


def _trained(row: dict[str, Any]) -> Iterator[str]:
    yield row["work"]
    yield "as people write it" if row["optimizer"] == "plain" else row["optimizer"]
    yield from (f"{row[f'{way}_us']:,.0f}" for way in ("eager", "graphed"))
    yield f"{1 / row['of_eager']:.1f}"
    yield from (_cell(row, f"{way}_us", "{:,.0f}") for way in ("by_hand", "make_graphed"))
    yield f"{row['first_ms'] / 1e3:.1f}"


def _compiled(row: dict[str, Any]) -> Iterator[str]:
    yield _cell(row, "compiled_us", "{:,.0f}")
    yield f"{row['compile_ms'] / 1e3:.1f}" if "compile_ms" in row else ""


def torch_generate() -> Iterable[str]:
    rows = results("torch_generate-nvidia-h200.json")["rows"]
    heads = ("model", "eager", "static cache", "`graph_generate`", "times static", "replayed")
    return _table(
        heads,
        (
            [
                row["model"],
                *(f"{row[f'{way}_tokens_per_s']:,.0f}" for way in ("eager", "static", "graphed")),
                f"{row['times_static']:.1f}",
                f"{row['replayed']:.1%}",
            ]
            for row in rows
        ),
    )


def _cell(row: dict[str, Any], key: str, form: str) -> str:
    return form.format(row[key]) if key in row else ""


def generate() -> Iterable[str]:
    rows = results("generate-1B-nvidia-h200.json")["rows"]
    ways = {
        "eager": "as transformers does it",
        "static": "over a static cache",
        "graphed": "`graph_generate(model)`",
        "accelerated": "`accelerate(model)`",
        "nothing": "the loop alone: a step that does nothing",
    }
    one, eight = ({r["way"]: r for r in rows if r["batch"] == batch} for batch in (1, 8))
    return _table(
        ("µs a step", "batch 1", "batch 8", "first token, ms"),
        (
            [
                words,
                _short(one[way]["token_us"]),
                _short(eight[way]["token_us"]),
                f"{one[way]['first_token_ms']:.1f}",
            ]
            for way, words in ways.items()
        ),
    )


def streams() -> Iterable[str]:
    """The table of the cost of work in streams for the kernels of a graph."""
    rows = results("streams-nvidia-h200.json")["rows"]
    cells = ((r["work"], f"{r['before_us']:.2f}", f"{r['after_us']:.2f}") for r in rows)
    return _table(("work of the process", "µs before", "after"), cells)


def divergences() -> Iterable[str]:
    """The table of planted divergences: by work, how many there are, and how many were named."""
    rows = results("divergences-nvidia-h200.json")["rows"]
    for_each = {
        (row["work"], row["kind"]): [one for one in rows if one["work"] == row["work"]]
        for row in rows
    }

    def cells(work: str, kind: str, own: Sequence[dict[str, Any]]) -> Iterator[str]:
        control, *plants = own
        yield f"{work}, {kind}"
        yield str(len(plants))
        yield str(sum(one["right"] for one in plants))
        yield "none" if control["right"] else "**one**"
        yield f"{max(one.get('seconds', 0) for one in own):.2f}"

    return _table(
        ("graphs of", "planted", "named", "between equal runs", "the slowest, s"),
        ([*cells(work, kind, own)] for (work, kind), own in for_each.items()),
    )


def black_box() -> Iterable[str]:
    """The table of a black box's cost: microseconds of a replay, by itself and watched."""
    rows = results("black_box-nvidia-h200.json")["rows"]
    cells = (
        (
            f"{row['work']}, {row['nodes']} nodes" if row["case"] == "before" else "",
            row["case"],
            f"{row['replay_us']:,.1f}",
            f"{row['times']:.3f}",
            f"{row['launch_us']:,.1f}",
        )
        for row in rows
    )
    return _table(("graph", "box", "µs a replay", "times", "µs of the host"), cells)


def observe() -> Iterable[str]:
    """The table of what an observation costs programs: percent of a step."""
    rows = results("observe-nvidia-h200.json")["rows"]
    cells = (
        (
            row["program"],
            f"{row['step_us']:,.0f}",
            f"{row['slower_percent']:.2f} ({row['least']:.2f} to {row['most']:.2f})",
            f"{row['closed_least']:.2f} to {row['closed_most']:.2f}",
            f"{row['computed_percent']:.2f}",
        )
        for row in rows
    )
    return _table(("program", "µs a step", "slower, %", "closed, %", "by its replays, %"), cells)


def node_times() -> Iterable[str]:
    """The table of times of nodes beside CUPTI's: microseconds, and how many nodes agree."""
    graphs = results("node_times-nvidia-h200.json")["summary"]["graphs"]
    cells = (
        (
            one["graph"],
            f"{one['agree']} of {one['nodes']}",
            *(f"{one[f'{key}_us']:,.1f}" for key in ("ours", "cupti", "replay", "sampled")),
        )
        for one in graphs
    )
    head = ("graph", "nodes that agree", "sum, µs", "by CUPTI", "a replay", "sampled")
    return _table(head, cells)


def lookup() -> Iterable[str]:
    """The table of drafts in texts and at given rates: tokens a second without, and with some."""
    rows = {
        (count, row["what"].partition(", ")[2] or row["what"], row["lookup"]): row
        for count, name in ((1, "lookup-1B"), (8, "lookup-1B-8-sequences"))
        for row in results(f"{name}-nvidia-h200.json")["rows"]
    }
    drafts = sorted({each for _, _, each in rows})

    def cells(count: int, what: str) -> Iterator[str]:
        yield str(count)
        yield what
        for each in drafts:
            row = rows[count, what, each]
            times = f" ({row['times']:.2f} ×)" if each else ""
            yield f"{row['tokens_per_second']:,.0f}{times}"
        text = not what.endswith("a step")
        yield (
            ", ".join(f"{rows[count, what, n]['tokens_per_step']:.1f}" for n in drafts[1:])
            if text
            else ""
        )

    head = [f"{each} drafts, tok/s" if each else "no drafts, tok/s" for each in drafts]
    lines = dict.fromkeys((count, what) for count, what, _ in rows)
    heads = ("sequences", "text, or tokens that are right", *head, "tokens a step")
    return _table(heads, (cells(*line) for line in lines))


def tuning() -> Iterable[str]:
    """The table of default and found launch shapes: microseconds a step, and their ratio."""
    rows = {
        (row["shape"], row["rows"]): row  # a repeated search replaces the first
        for name in ("tuning", "tuning-again")
        for row in results(f"{name}-nvidia-h200.json")["rows"]
    }
    found = sorted(
        rows.values(), key=lambda row: (("135M", "1B", "8B").index(row["shape"]), row["rows"])
    )
    columns = (20, 500)

    def cells(row: dict[str, Any]) -> Iterator[str]:
        yield f"{row['shape']}, {row['rows']}"
        for at in columns:
            yield _count(row[f"default_us_{at}"])
            yield _count(row[f"found_us_{at}"])
            yield f"{row[f'of_found_{at}']:.3f}"
        yield str(row["candidates"])

    head = [title for at in columns for title in (f"rule at {at}", "found", "ratio")]
    return _table(("shape, rows", *head, "tried"), (cells(row) for row in found))


def weights() -> Iterable[str]:
    rows = list(results("weights-1B-nvidia-h200.json")["rows"])
    rows += (r for r in results("weights-nvidia-h200.json")["rows"] if r["shape"] != "1B")
    batches = (1, 8, 32)
    kinds = ("bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl", "q4_k_m")
    names = {kind: kind.upper() for kind in kinds} | {"bf16": "bfloat16"}
    rows.sort(key=lambda r: (r["shape"], kinds.index(r["kind"])))

    def cells(shape: str, kind: str) -> Iterator[str]:
        own = [r for r in rows if (r["shape"], r["kind"]) == (shape, kind)]
        yield _size(own[0]["weight_bytes"])
        for batch in batches:
            found = [r for r in own if r.get("batch") == batch]
            yield _speed(found[0]) if found else ""
        yield _count(next(r["prompt_tokens_per_second"] for r in own if "prompt" in r))

    found = dict.fromkeys((r["shape"], r["kind"]) for r in rows)
    return _table(
        ("tokens a second", "on the device", *(f"batch {n}" for n in batches), "prompt of 512"),
        ([f"{shape}, {names[kind]}", *cells(shape, kind)] for shape, kind in found),
    )


def _columns(
    head: Sequence[str], *lines: tuple[str, Sequence[dict[str, Any]], Callable[[Any], str]]
) -> Iterable[str]:
    return _table(head, ([title, *map(show, found)] for title, found, show in lines))


def _decoded(name: str, way: str, **wanted: int) -> dict[str, Any]:
    return row(results(name)["rows"], {"kind": "decode", "way": way, **wanted})


def _of_peer(name: str, peer: str, batch: int) -> str:
    """Tokens a second of a peer; "not measured" if the run had no time left for it."""
    if f"{peer}, batch {batch}, context 20" in results(name)["skipped"]:
        return "not measured"
    return _speed(_decoded(name, peer, batch=batch))


def _speed(found: dict[str, Any]) -> str:
    return _count(found["tokens_per_second"])


def _share(found: dict[str, Any]) -> str:
    return f"{100 * found['of_floor']:.0f} %"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _short(us: float) -> str:
    """Formats with three significant digits, or all digits before the point if there are more."""
    return f"{us:.2f}" if us < 10 else f"{us:.1f}" if us < 100 else f"{us:,.0f}"


def _size(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


TABLES: dict[str, Callable[[], Iterable[str]]] = {
    table.__name__: table
    for table in (
        front, summary, replay_cost, launch_cost, change_cost, modules, decode, batches,
        lengths_h200, contexts, floor, profile, profile_batches, prompts, prompt_attention,
        attention, startup, load, host, join, torch_graphed, torch_waits,
        cupy_waits, torch_training, torch_training_compile, torch_generate, generate, weights,
        streams, divergences, black_box, observe, node_times, lookup, tuning,
    )
}  # fmt: skip
