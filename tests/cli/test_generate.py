"""`ostinato generate` as programs and shells use it: where the prompt is from, what goes where."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import here, refused, shell
from tests.cli.terminal import Terminal
from tests.models.model_files import CONFIG, THINKING, write_gguf


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return write_gguf(path, config=replace(CONFIG, context_length=4096))


def test_the_answer_alone_is_on_standard_output(tiny: Path) -> None:
    options = ("ab", "-m", str(tiny), "-n", "12", "-t", "1", "-s", "5")
    plain, quiet = here("generate", *options), here("generate", "-q", *options)
    summary = json.loads(here("generate", "--json", *options).out)
    assert plain.out == quiet.out == summary["text"] + "\n"
    assert quiet.err == ""
    assert plain.err.startswith(f"{len(summary['token_ids'])} tokens (")
    assert "seed 5: the same seed gives the same answer" in plain.err
    assert summary["sampling"]["seed"] == 5


def test_pieces_as_json_lines(tiny: Path) -> None:
    options = ("ab", "-m", str(tiny), "-n", "12", "-t", "1", "-s", "5")
    answer = here("generate", "--stream-json", *options)
    *pieces, last = map(json.loads, answer.out.splitlines())
    assert answer.err == "" and len(pieces) > 2
    assert "".join(piece["text"] for piece in pieces) == last["summary"]["text"]
    refused(here("generate", "--stream-json", "--json", *options), "not both")


def test_a_fresh_seed_is_told_and_gives_the_same_answer(tiny: Path) -> None:
    options = ("ab", "-m", str(tiny), "-n", "20", "-t", "3", "--json")
    one, two = (json.loads(here("generate", *options).out) for _ in range(2))
    assert one["sampling"]["seed"] != two["sampling"]["seed"]
    again = json.loads(here("generate", *options, "-s", str(one["sampling"]["seed"])).out)
    assert again["token_ids"] == one["token_ids"]


def test_drafts_give_the_same_answer_in_fewer_steps(tiny: Path) -> None:
    def summary(*more: str) -> dict[str, Any]:
        options = ("abab", "-m", str(tiny), "-n", "40", "--json", *more)
        return json.loads(here("generate", *options).out)

    plain = summary()
    for more in ((), ("--tokens-per-launch", "4")):
        drafted = summary("--lookup", "3", *more)
        assert drafted["token_ids"] == plain["token_ids"]
        assert 1 < drafted["tokens_per_step"] <= 4
    assert plain["tokens_per_step"] == 0
    told = here("generate", "abab", "-m", str(tiny), "-n", "40", "--lookup", "3")
    assert f"drafts: {drafted['tokens_per_step']:.2f} tokens a step" in told.err
    sampled = summary("--lookup", "3", "-t", "1", "-s", "5")
    assert sampled["token_ids"] == summary("-t", "1", "-s", "5")["token_ids"]
    assert sampled["tokens_per_step"] == 0
    assert any("no drafts" in reason for reason in sampled["one_by_one"])


def test_sampling_options_reach_the_device(tiny: Path) -> None:
    def ids(*more: str) -> list[int]:
        options = ("ab", "-m", str(tiny), "-n", "30", "--json", *more)
        return json.loads(here("generate", *options).out)["token_ids"]

    greedy = ids()
    assert ids("-t", "4", "--min-p", "1") == greedy
    penalised = ids("--repetition-penalty", "50")
    assert penalised != greedy
    assert len(set(penalised)) == len(penalised), "nothing comes twice"
    assert ids("--threads", "1") == greedy


def test_variables_of_the_template(tmp_path: Path) -> None:
    metadata = {"tokenizer.chat_template": THINKING}
    model = str(write_gguf(tmp_path / "m.gguf", metadata=metadata))

    def read(*more: str) -> int:
        answer = here("generate", "ab", "-m", model, "-n", "1", "--json", *more)
        return int(json.loads(answer.out)["prompt_tokens"])

    thought = len("<z></z>")
    assert read("--template-arg", "think=false") == read() + thought
    assert read("--template-arg", "think=no") == read(), "text is not false"
    more = ("--template-arg", "think=false", "--template-arg", "more=x=y z")
    assert read(*more) == read() + thought + len("x=y z")
    options = ("ab", "-m", model, "--template-arg")
    refused(here("generate", *options, "think"), "'think' is no NAME=VALUE")
    raw = here("generate", *options, "think=false", "--raw")
    assert raw.status == 2 and "--template-arg and continue_last need a chat" in raw.err


def test_stop_strings(tiny: Path) -> None:
    options = ("ab", "-m", str(tiny), "-n", "30", "-t", "1", "-s", "5", "--json")
    whole = json.loads(here("generate", *options).out)["text"]
    stop = whole[5:8]
    found = json.loads(here("generate", *options, "--stop", "no such", "--stop", stop).out)
    assert found["text"] == whole[: whole.index(stop)]
    assert found["finish_reason"] == "stop"


# ------------------------------------------------------------------------------------ the prompt


def test_a_prompt_from_anywhere_is_the_same(tiny: Path, tmp_path: Path) -> None:
    options = ("--json", "-n", "3", "-m", str(tiny))
    file = tmp_path / "prompt"
    file.write_bytes("é ab\n".encode())
    marked = tmp_path / "marked"
    marked.write_text("é ab\n", encoding="utf-8-sig")
    wanted = json.loads(here("generate", "é ab", *options).out)
    for answer in (
        here("generate", *options, input="é ab\n".encode()),
        here("generate", "-", *options, input="é ab\r\n".encode()),
        here("generate", "-f", "-", *options, input="é ab".encode()),
        here("generate", "é", "ab", *options),
        here("generate", "é", *options[:3], "ab", *options[3:]),
        here("generate", "\ufeffé ab", *options),
        here("generate", *options, input="\ufeffé ab".encode()),
        here("generate", "-f", str(marked), *options),
        here("generate", "-f", str(file), *options),
        shell(f"$O generate -f <(echo é ab) {' '.join(options)}"),
        shell(f"echo é ab | $O generate {' '.join(options)}", PYTHONIOENCODING="ascii"),
    ):
        assert answer.status == 0, answer.err
        found = json.loads(answer.out)
        assert (found["text"], found["prompt_tokens"]) == (wanted["text"], wanted["prompt_tokens"])
    # Only the line's own end is left out.
    more = json.loads(here("generate", *options, input="é ab\n\n".encode()).out)
    assert more["prompt_tokens"] == wanted["prompt_tokens"] + 1


def test_what_is_piped_in_follows_the_words(tiny: Path) -> None:
    options = ("--json", "-n", "8", "-m", str(tiny))

    def tokens(*words: str, piped: bytes = b"") -> tuple[int, list[int]]:
        answer = here("generate", *words, *options, input=piped)
        assert answer.status == 0, answer.err
        found = json.loads(answer.out)
        return found["prompt_tokens"], found["token_ids"]

    wanted = tokens("the ab\n\n12\n in 34")
    assert wanted != tokens("the ab")
    assert tokens("the", "ab", piped=b"12\n in 34\n") == wanted
    assert tokens("the ab", piped=b"\xef\xbb\xbf12\n in 34\r\n") == wanted
    assert tokens("the ab", piped=b"") == tokens("the ab", piped=b"\n") == tokens("the ab")
    assert tokens("", piped=b"the ab") == tokens("the ab")
    refused(here("generate", "the", *options, input=b"caf\xe9"), "standard input: no UTF-8 text")
    script = f"echo 12 | $O generate the ab {' '.join(options)}"
    assert json.loads(shell(script).out)["token_ids"] == tokens("the ab\n\n12")[1]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"caf\xe9", "no UTF-8 text: byte 3 is 0xe9"),
        (b"", "is empty"),
        (b"\n", "is empty"),
        (b"\xef\xbb\xbf\n", "is empty"),
        (b"x" * (8 << 20) + b"yz", "more than 8388608 bytes"),
    ],
)
def test_what_is_no_prompt(tiny: Path, tmp_path: Path, content: bytes, words: str) -> None:
    refused(here("generate", "-m", str(tiny), input=content), words)
    file = tmp_path / "prompt"
    file.write_bytes(content)
    refused(here("generate", "-m", str(tiny), "-f", str(file)), words)


def test_one_prompt(tiny: Path, tmp_path: Path) -> None:
    refused(here("generate", "x", "-f", str(tmp_path / "y"), "-m", str(tiny)), "not both")
    with Terminal("generate", "-m", str(tiny)) as terminal:
        assert terminal.end() == 2
        assert "pipe one in" in terminal.said
    with Terminal("generate", "-", "-n", "3", "-q", "-m", str(tiny)) as terminal:
        terminal.send("ab\n\x04")
        assert terminal.end() == 0, terminal.said
        assert "loading" not in terminal.said and "tokens" not in terminal.said


def test_answers_survive_an_output_of_few_letters(tiny: Path) -> None:
    options = f"-m {tiny} -n 40 -t 2 -s 1"
    plain = here("generate", "ab", *options.split())
    answer = shell(f"$O generate ab {options}", PYTHONIOENCODING="ascii")
    assert not plain.out.isascii(), "the case says nothing"
    assert answer.status == 0 and (answer.out + answer.err).isascii()
    assert answer.out == plain.out.encode("ascii", "backslashreplace").decode()


@pytest.mark.parametrize("more", ["", "--json"])
def test_the_reader_of_an_answer_may_leave(tiny: Path, more: str) -> None:
    script = f"$O generate ab -m {tiny} -n 3000 -t 1 {more} | (exec <&-); echo ${{PIPESTATUS[0]}}"
    answer = shell(script)
    assert answer.out == "141\n" and answer.err == ""


# ---------------------------------------------------------------------------------- on a terminal


def test_a_bar_while_a_model_loads_and_none_that_stays(tiny: Path) -> None:
    options = ("-n", "3", "-m", str(tiny))
    with Terminal("generate", "ab", *options) as terminal:
        terminal.until(f"loading {tiny}"[:20])
        assert terminal.end() == 0, terminal.said
        terminal.until("3 tokens (")


def test_a_bar_while_a_long_prompt_is_read(tiny: Path, tmp_path: Path) -> None:
    """However fast the machine is: the patience is what is changed."""
    slow = tmp_path / "sitecustomize.py"
    slow.write_text(
        "import ostinato.cli.progress as p\np._PATIENCE_SECONDS = 0.0\n"
        "import ostinato.models.stepper as s\nimport time\n"
        "plain = s.Stepper._set_rows\n"
        "s.Stepper._set_rows = lambda *given: (time.sleep(0.02), plain(*given))[1]\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    options = ("--raw", "-n", "3", "-m", str(tiny))
    with Terminal("generate", "ab " * 300, *options, PYTHONPATH=path) as terminal:
        terminal.until("reading the prompt")
        assert terminal.end() == 0, terminal.said
    with Terminal("generate", "ab", *options, PYTHONPATH=path) as terminal:
        assert terminal.end() == 0
        assert "reading" not in terminal.said


@pytest.mark.parametrize("sign", ["loading", '{"text": "'])
def test_control_c_at_any_moment(tiny: Path, sign: str) -> None:
    # The likeliest tokens go on until the context is full; drawn ones may be over after a few.
    options = ("-n", "4000", "--stream-json", "-m", str(tiny))
    with Terminal("generate", "ab", *options) as terminal:
        terminal.until(sign)
        terminal.send("\x03")
        assert terminal.end() == 130, terminal.said
    assert "Traceback" not in terminal.said
    if sign != "loading":
        # The terminal's own ^C may stand before it, and what a bar leaves behind.
        line = terminal.said[terminal.said.rindex('{"summary"') :].splitlines()[0]
        summary = json.loads(line)["summary"]
        assert summary["finish_reason"] == "interrupted"
        assert 0 < len(summary["token_ids"]) < 4000
