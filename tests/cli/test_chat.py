"""`ostinato chat`: on a terminal as people use it, through a pipe as programs do."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli.commands import Answer, here, shell
from tests.cli.terminal import Terminal, on_a_terminal
from tests.models.model_files import CONFIG, SPECIAL, byte_tokens, write_folder, write_gguf

# No end token but one, so that an answer is as long as it may be; what it says is any text.
ENDLESS = {
    "tokenizer.ggml.eos_token_id": 0,
    "tokenizer.ggml.tokens": ["<|0|>", "<|1|>", "<|2|>", *byte_tokens()[0][len(SPECIAL) :]],
    "tokenizer.ggml.token_type": [1] * CONFIG.vocabulary,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return write_gguf(path, config=replace(CONFIG, context_length=1 << 16), metadata=ENDLESS)


def piped(script: str | bytes, *options: str) -> Answer:
    """A chat whose messages come through a pipe, in this process."""
    return here("chat", *options, input=script if isinstance(script, bytes) else script.encode())


def saved(path: Path) -> list[tuple[str, str]]:
    return [(m["role"], m["content"]) for m in json.loads(path.read_text())["messages"]]


def asked(path: Path) -> list[str]:
    return [content for role, content in saved(path) if role == "user"]


@pytest.fixture
def options(tiny: Path) -> tuple[str, ...]:
    return ("-m", str(tiny), "-n", "6", "-t", "1", "-s", "7")


# ----------------------------------------------------------------------------------- through a pipe


def test_answers_alone_are_on_standard_output(options: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    answer = piped(f"one\n\ntwo\r\n/stats\n/save {file}\n/exit\nnever\n", *options)
    assert answer.status == 0, answer.err
    turns = saved(file)
    assert [role for role, _ in turns] == ["user", "assistant"] * 2
    assert asked(file) == ["one", "two"]
    assert answer.out == f"{turns[1][1]}\n{turns[3][1]}\n"
    assert "2 turns, " in answer.err and "in the cache before" in answer.err
    assert f"(4 messages saved to {file})" in answer.err
    # The same again from the file: the third answer is that of a conversation without a stop.
    more = piped(f"/load {file}\nthree\n", *options)
    straight = piped("one\ntwo\nthree\n", *options)
    assert straight.out == answer.out + more.out


def test_messages_of_several_lines(options: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    script = (
        'one\\\ntwo\\\nthree\n"""four\n\n/five"""\n"""/six"""\nse"""ven\n'
        f'/save {file}\n"""eight\nnine'
    )
    answer = piped(script + f'\n"""\n/save {file}\n', *options)
    assert answer.status == 0, answer.err
    wanted = ["one\ntwo\nthree", "four\n\n/five", "/six", 'se"""ven', "eight\nnine\n"]
    assert asked(file) == wanted
    # The end of the input ends a message, too.
    half = piped('"""one\ntwo', *options)
    assert half.out == piped('"""one\ntwo"""\n', *options).out != ""


def test_without_options_the_models_files_decide_how_tokens_are_chosen(tmp_path: Path) -> None:
    """Greedy answers of a small model are one line again and again."""
    advised = {**ENDLESS, "general.sampling.temp": 1.7, "general.sampling.top_k": 9}
    for name, metadata, plainly in (
        ("advised", advised, ("-t", "1.7", "--top-k", "9")),
        ("not", ENDLESS, ("-t", "0.7", "--min-p", "0.05", "--repetition-penalty", "1.1")),
    ):
        model = write_gguf(tmp_path / f"{name}.gguf", metadata=metadata)
        options = ("-m", str(model), "-n", "20", "-s", "8")
        default = piped("one\n", *options)
        assert default.out == piped("one\n", *options, *plainly).out
        assert default.out != piped("one\n", *options, "-t", "0").out
        # One that is given leaves the others as they are.
        hot = piped("one\n", *options, "-t", "50")
        assert hot.out == piped("one\n", *options, *plainly, "-t", "50").out != default.out
    folder = write_folder(tmp_path / "folder")
    (folder / "generation_config.json").write_text('{"temperature": "hot"}')
    answer = here("chat", "-m", str(folder))
    assert answer.status == 1 and "generation_config.json: the sampling options: temp" in answer.err


def test_a_byte_order_mark_is_not_said(options: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    script = f"one\ntwo\n/save {file}\n".encode("utf-8-sig")
    answer = piped(script, *options, "--system", "\ufeffBe.")
    assert answer.status == 0, answer.err
    assert asked(file) == ["one", "two"] and saved(file)[0] == ("system", "Be.")


def test_commands_that_cannot_be_done_change_nothing(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    file, bad = tmp_path / "talk.json", tmp_path / "bad.json"
    bad.write_text("[1, 2")
    script = f"one\n/nope\n/save\n/load {bad}\n/load {tmp_path}/none\n/save {tmp_path}\n"
    script += f"/load ~nosuchuser/x\n/save a\0b\n/exit now\n/reset x\n/save {file}\n"
    answer = piped(script, *options)
    assert answer.status == 1 and "Traceback" not in answer.err
    for words in (
        '/nope: no such command; /help lists them, and """/nope""" is said to the model',
        "/save needs a file: /save FILE",
        f"error: {bad}: not JSON",
        f"error: {tmp_path}/none: No such file or directory",
        f"error: {tmp_path}: Is a directory",
        "/exit takes nothing after it",
    ):
        assert words in answer.err
    assert asked(file) == ["one"]


def test_reset_keeps_the_system_message(options: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    answer = piped(f"one\n/reset\ntwo\n/save {file}\n", *options, "--system", "Be.")
    assert answer.status == 0
    assert saved(file)[:2] == [("system", "Be."), ("user", "two")]
    assert answer.out.endswith(piped("two\n", *options, "--system", "Be.").out)


def test_a_full_context_is_said_and_the_conversation_can_be_saved(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    file = tmp_path / "talk.json"
    script = f"one\ntwo\nthree\n/save {file}\n"
    answer = piped(script, *options, "-n", "1000", "--max-context", "60")
    assert answer.status == 1
    assert "(the context is full: /save keeps the conversation" in answer.err
    assert answer.err.count("and --max-context is 60") == 2, answer.err
    assert asked(file) == ["one"]


def test_what_is_no_text_is_not_said(options: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    answer = piped(b"caf\xe9\n\xc3\xa9\n/save " + str(file).encode() + b"\n", *options)
    assert answer.status == 1 and "that is no utf-8 text; nothing was said" in answer.err
    assert asked(file) == ["é"]


def test_a_reader_may_leave_and_input_may_be_closed(options: tuple[str, ...]) -> None:
    words = " ".join(options)
    left = shell(
        f"yes hello | $O chat {words} 2>/dev/null | head -c 5 >&2; echo ${{PIPESTATUS[1]}}"
    )
    assert left.out == "141\n"
    assert shell(f"$O chat {words} <&-").status == 0


# ------------------------------------------------------------------------------------ on a terminal


def test_control_c_stops_an_answer_and_not_the_program(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    file = tmp_path / "talk.json"
    # The likeliest tokens go round in a circle; drawn ones would come to an end some time.
    endless = ("-n", "60000", "--max-context", "65536", "--temperature", "0")
    with Terminal("chat", *options, *endless) as terminal:
        terminal.until("/help for help")
        terminal.until("> ")
        terminal.send("one\r")
        terminal.until("one\r\n")
        terminal.until("<unused8>")
        terminal.send("\x03")
        terminal.until("(stopped; what was shown is kept)")
        terminal.until("> ")
        terminal.send(f"/save {file}\r")
        terminal.until("(2 messages saved")
        terminal.until("> ")
        terminal.send("\x04")
        assert terminal.end() == 0
    (_, question), (_, answer) = saved(file)
    assert question == "one" and answer
    assert f"> one\r\n{on_a_terminal(answer)}\r\n(stopped" in terminal.said


def test_control_c_twice_at_the_empty_prompt_ends(options: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    with Terminal("chat", *options) as terminal:
        terminal.until("> ")
        terminal.send("\x03")
        terminal.until("(Ctrl-C once more, or Ctrl-D, ends the conversation)")
        terminal.until("> ")
        terminal.send("half")  # drops a message: that was not the second time
        terminal.until("half")
        terminal.settle()
        terminal.send("\x03")
        terminal.until("> ")
        terminal.send("begun\\\r")
        terminal.until(". ")
        terminal.send("\x03")
        terminal.until("> ")
        terminal.send("\x03")
        terminal.until("once more")
        terminal.until("> ")
        terminal.send("whole\r")
        terminal.until("see --max-tokens)")
        terminal.until("> ")
        terminal.send(f"/save {file}\r")
        terminal.until("> ")
        terminal.send("\x03")
        terminal.until("once more")
        terminal.until("> ")
        terminal.send("\x03")
        assert terminal.end() == 0
    assert asked(file) == ["whole"], "what was dropped is not said"
    assert "Traceback" not in terminal.said


def test_lines_are_edited_and_come_back(options: tuple[str, ...], tmp_path: Path) -> None:
    pytest.importorskip("readline")
    file = tmp_path / "talk.json"
    with Terminal("chat", *options) as terminal:
        terminal.until("> ")
        terminal.send("onx\x7fe\r")  # backspace
        terminal.until("see --max-tokens)")
        terminal.until("> ")
        terminal.send("\x1b[A two\r")  # the arrow up brings the last line back
        terminal.until("see --max-tokens)")
        terminal.until("> ")
        terminal.send('"""three\r')
        terminal.until(". ")
        terminal.send('é"""\r')
        terminal.until("see --max-tokens)")
        terminal.until("> ")
        terminal.send("/help\r")
        terminal.until("/load FILE")
        terminal.until("> ")
        terminal.send(f"/save {file}\r/exit\r")
        assert terminal.end() == 0
    assert asked(file) == ["one", "one two", "three\né"]


def test_what_is_pasted_is_one_message(options: tuple[str, ...], tmp_path: Path) -> None:
    readline = pytest.importorskip("readline")
    if "libedit" in (readline.__doc__ or ""):
        pytest.skip("libedit has no bracketed paste")
    file = tmp_path / "talk.json"
    with Terminal("chat", *options) as terminal:
        terminal.until("> ")
        terminal.send("\x1b[200~one\ntwo\x1b[201~\r")
        terminal.until("see --max-tokens)")
        terminal.until("> ")
        terminal.send(f"/save {file}\r/exit\r")
        assert terminal.end() == 0
    assert [text.splitlines() for text in asked(file)] == [["one", "two"]]


def test_control_c_while_the_model_loads_ends(options: tuple[str, ...]) -> None:
    with Terminal("chat", *options) as terminal:
        terminal.until("loading")
        terminal.send("\x03\x04")
        assert terminal.end() in (0, 130)  # 0: it had loaded by then, and was ended by Ctrl-D
    assert "Traceback" not in terminal.said


def test_a_terminal_that_is_closed_ends_it(options: tuple[str, ...]) -> None:
    with Terminal("chat", *options) as terminal:
        terminal.until("> ")
        terminal.process.send_signal(signal.SIGHUP)
        assert terminal.end() == 129
    assert "Traceback" not in terminal.said
