"""Checks of commands' arguments, made before the work begins, and options that commands share."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

BYTE_ORDER_MARK = "\ufeff"
"""The mark with which some editors begin a text file; it is not a part of the text."""

_MAX_PROMPT = 8 << 20  # bytes; the limit of tokenizers


def expanded(path: Path | None) -> Path | None:
    """Expands `~` in a path option: a shell leaves it alone after a `=`."""
    try:
        return None if path is None else path.expanduser()
    except RuntimeError:
        raise typer.BadParameter(f"{path}: there is no such user's home folder") from None


def text(value: str | None) -> str | None:
    """Checks text for a model: refuses bytes invalid in the locale's encoding, and removes a
    leading byte order mark."""
    try:
        (value or "").encode()
    except UnicodeEncodeError:
        encoding = sys.getfilesystemencoding()
        raise typer.BadParameter(
            f"{value!r} is no text in this locale's encoding, {encoding}"
        ) from None
    return value if value is None else value.removeprefix(BYTE_ORDER_MARK)


def finite(value: float | None) -> float | None:
    """Checks a number option: refuses nan and inf."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value}: a finite number is needed")
    return value


def require_readable(folder: Path) -> None:
    """Raises OSError for an existing folder that cannot be read: the library, whose caches are
    optional, treats such a folder as empty."""
    with contextlib.suppress(FileNotFoundError), os.scandir(folder):
        pass


def ready_folder(folder: Path, option: str) -> None:
    """Creates the folder if needed.  Raises BadParameter if that fails, or if the folder cannot be
    written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(
            f"no such folder can be made: {error}", param_hint=option
        ) from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise typer.BadParameter(f"{folder} cannot be written", param_hint=option)


def ready_file(path: Path, option: str) -> None:
    """Creates the folder of a file.  Raises BadParameter for a path that cannot be a file."""
    try:
        if path.is_dir():
            raise typer.BadParameter(f"{path} is a folder; a file is wanted", param_hint=option)
        if path.exists() and not path.is_file():  # a device, a pipe
            return
    except OSError as error:  # such as a name that is too long, or a folder without permission
        raise typer.BadParameter(f"{path}: {error.strerror}", param_hint=option) from None
    ready_folder(path.parent, option)


def texts(values: list[str] | None) -> list[str] | None:
    """Checks each text of an option that may be given several times; see `text`."""
    for value in values or ():
        text(value)
    return values


def read_template_args(values: list[str] | None) -> dict[str, object]:
    """Returns the variables given by `--template-arg`.  Raises BadParameter unless all are
    NAME=VALUE."""
    found: dict[str, object] = {}
    for entry in values or ():
        name, equals, value = entry.partition("=")
        if not name or not equals:
            raise typer.BadParameter(f"{entry!r} is no NAME=VALUE", param_hint="--template-arg")
        try:
            found[name] = json.loads(value)
        except (ValueError, RecursionError):
            found[name] = value
    return found


def read_prompt(words: list[str] | None, file: Path | None) -> str:
    """Returns the prompt: the words of the command line joined by blanks, or a file's text.  Piped
    input follows the words after a blank line; without words, or for `-`, it is the prompt.

    One newline at the end of a file or of standard input is removed, and so is a byte order mark.
    Raises BadParameter for input that is not UTF-8, too long, empty, or missing.
    """
    given = None if not words else " ".join(words).removeprefix(BYTE_ORDER_MARK)
    if given is not None and file is not None:
        raise typer.BadParameter("a prompt or --file, not both", param_hint="--file")
    if given is not None and given != "-":
        piped = "" if sys.stdin.isatty() else _standard_input()
        return "\n\n".join(part for part in (given, piped) if part)
    if file is None or str(file) == "-":
        if given is None and file is None and sys.stdin.isatty():
            raise typer.BadParameter(
                "there is none: type one, pipe one in, or name a file with --file "
                "(- reads what you type until Ctrl-D)",
                param_hint="prompt",
            )
        found, where, option = _standard_input(), "standard input", "prompt"
    else:
        try:
            with file.open("rb") as opened:
                content = opened.read(_MAX_PROMPT + 1)
        except (OSError, ValueError) as error:  # ValueError: a name with a null character
            reason = getattr(error, "strerror", None) or error
            raise typer.BadParameter(f"{file}: {reason}", param_hint="--file") from None
        found, where, option = _decoded(content, str(file), "--file"), str(file), "--file"
    if not found:
        raise typer.BadParameter(f"{where} is empty", param_hint=option)
    return found


def _standard_input() -> str:
    return _decoded(sys.stdin.buffer.read(_MAX_PROMPT + 1), "standard input", "prompt")


def _decoded(content: bytes, where: str, option: str) -> str:
    if len(content) > _MAX_PROMPT:
        raise typer.BadParameter(f"{where}: more than {_MAX_PROMPT} bytes", param_hint=option)
    try:
        found = content.decode()
    except UnicodeDecodeError as error:
        raise typer.BadParameter(
            f"{where}: no UTF-8 text: byte {error.start} is {content[error.start]:#04x}",
            param_hint=option,
        ) from None
    return found.removeprefix(BYTE_ORDER_MARK).removesuffix("\n").removesuffix("\r")


def as_typed(message: str, command: Any) -> str:
    """Returns a message of the library with argument names replaced by a command's options:
    `max_context` by `--max-context`.

    A name of one word may be an ordinary word, so it is replaced only at the beginning of the
    message: "seed is -1, must be …".
    """
    for parameter in command.params:
        flags = [flag for flag in parameter.opts if flag.startswith("--")]
        if not flags:
            continue
        name = re.escape(parameter.name)
        pattern = rf"\b{name}\b" if "_" in parameter.name else rf"^{name}(?= is |:)"
        message = re.sub(pattern, flags[0], message)
    return message


# ------------------------------------------------------------- options that several commands have

ModelName = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="A GGUF file; a folder with safetensors, config.json and tokenizer.json; "
        "a known name (`ostinato model list`); or a Hugging Face id (with the hub extra), such as "
        "org/name, org/name:Q4_K_M or org/name:file.gguf.",
    ),
]
MaxTokens = Annotated[
    int, typer.Option("--max-tokens", "-n", min=1, help="The most tokens of an answer.")
]
# None: the advice of the model's files (`TextGenerator.default_sampling`).
Temperature = Annotated[
    float | None,
    typer.Option("--temperature", "-t", min=0.0, help="0 takes the likeliest token (greedy)."),
]
TopK = Annotated[
    int | None,
    typer.Option(min=0, help="Choose among this many of the likeliest tokens; 0 for all."),
]
TopP = Annotated[
    float | None,
    typer.Option(help="Choose among the likeliest tokens that together have this probability."),
]
MinP = Annotated[
    float | None,
    typer.Option(
        help="Choose among tokens that are at least this fraction as probable as the likeliest."
    ),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(help="Above 1: tokens that are in the text already get less likely; 1 is off."),
]
Seed = Annotated[
    int | None,
    typer.Option(
        "--seed",
        "-s",
        min=0,
        help="The same seed gives the same answer.  By default each run draws one, and shows it.",
        show_default=False,
    ),
]
Stops = Annotated[
    list[str] | None,
    typer.Option(
        "--stop",
        callback=texts,
        help="End the answer before this text; may be given several times.",
    ),
]
System = Annotated[str | None, typer.Option(callback=text, help="A system message, for chats.")]
TemplateArgs = Annotated[
    list[str] | None,
    typer.Option(
        "--template-arg",
        metavar="NAME=VALUE",
        callback=texts,
        help="A variable of the chat template, such as enable_thinking=false; a value that is JSON "
        "is taken as such, any other as text. May be given several times.",
    ),
]
Rows = Annotated[
    int, typer.Option(min=1, max=64, help="Rows of the step: 1 for single-token decode.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
DeviceName = Annotated[
    str | None,
    typer.Option(help='"host", "cuda:0", ...; by default the GPU where there is one.'),
]
MaxContext = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Positions in the KV cache, for prompt and answer.  By default 2048, or what the "
        "model was trained for if that is less.",
    ),
]
NoGraphs = Annotated[
    bool, typer.Option("--no-graphs", help="Launch each kernel by itself, without graphs.")
]
TokensPerLaunch = Annotated[
    int,
    typer.Option(min=1, max=256, help="Tokens for each graph launch, by a loop on the device."),
]
Lookup = Annotated[
    int,
    typer.Option(
        min=0,
        max=63,
        help="Draft up to so many tokens a step from what followed the last ones earlier, and keep "
        "those that the model chooses.  For greedy answers; 0 for none.",
    ),
]
TensorParallel = Annotated[
    int,
    typer.Option(
        "--tensor-parallel",
        min=1,
        max=64,
        help="Split the model over this many GPUs of this machine, from --device on, with a "
        "process for each.  Without a GPU, over this many processes on the CPU.",
    ),
]


class WeightsName(StrEnum):
    """The form of matrices on a GPU."""

    auto = "auto"
    packed = "packed"
    bf16 = "bf16"


WeightsOption = Annotated[
    WeightsName,
    typer.Option(
        "--weights",
        help="On a GPU: keep a file's quantised matrices packed, or make them bfloat16; auto does "
        "what is faster.",
    ),
]

Threads = Annotated[
    int | None,
    typer.Option(
        min=1, help="CPU threads.  By default OSTINATO_THREADS, else one per processor, 16 at most."
    ),
]
