"""Running the command: in this process, which is quick, and as a process of its own."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import typer

from ostinato.cli.main import run

ROOT = Path(__file__).resolve().parents[2]
COMMAND = (sys.executable, "-m", "ostinato")
get_command = functools.cache(typer.main.get_command)
"""All commands, made once: each time takes longer than most of what is tested with them."""


@dataclass(frozen=True)
class Answer:
    status: int
    out: str
    err: str


def environment(**changes: str) -> dict[str, str]:
    return os.environ | {"OSTINATO_DEVICE": "host", "COLUMNS": "100"} | changes


def here(*arguments: str, input: bytes = b"", **environ: str) -> Answer:
    """The command in this process, as far as its exit status.  `input`: its standard input."""
    out, err = io.StringIO(), io.StringIO()
    stdin = io.TextIOWrapper(io.BytesIO(input))
    with (
        mock.patch.dict(os.environ, environment(**environ)),
        mock.patch.object(sys, "stdin", stdin),
        mock.patch.object(typer.main, "get_command", get_command),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        status = run(arguments)
    return Answer(status, out.getvalue(), err.getvalue())


def refused(answer: Answer, words: str) -> None:
    """It is a bad option: nothing was done."""
    assert answer.status == 2, answer
    assert words in answer.err and "Traceback" not in answer.err
    assert answer.out == ""


def start(*arguments: str | bytes, **environ: str) -> subprocess.Popen[bytes]:
    """The command as a process of its own; both streams are pipes."""
    return subprocess.Popen(
        [*COMMAND, *arguments],
        env=environment(**environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def process(*arguments: str, **environ: str) -> Answer:
    """The command as a process of its own, from beginning to end."""
    started = start(*arguments, **environ)
    out, err = started.communicate()
    return Answer(started.returncode, out.decode(), err.decode())


def shell(script: str, **environ: str) -> Answer:
    """A line of shell, in which $O is the command."""
    command = " ".join(COMMAND)
    answer = subprocess.run(
        ["bash", "-c", script],
        env=environment(O=command, **environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    return Answer(
        answer.returncode,
        answer.stdout.decode("utf-8", "backslashreplace"),
        answer.stderr.decode("utf-8", "backslashreplace"),
    )
