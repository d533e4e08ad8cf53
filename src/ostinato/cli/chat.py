"""`ostinato chat`: a conversation in the terminal, which keeps its KV cache between turns."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import typer

from ostinato.cli import arguments
from ostinato.cli.endings import FAILED
from ostinato.cli.plain import say
from ostinato.cli.progress import prompt_progress
from ostinato.cli.ranks import following_ranks, rank_devices, rank_threads
from ostinato.cli.speaker import advised_options, show, speaker
from ostinato.errors import InputError, ModelError
from ostinato.models.arguments import counted
from ostinato.models.extra import require_extra

if TYPE_CHECKING:
    from ostinato.models import Conversation, Generation

_HELP = '''\
What you type is said to the model. A line that ends with \\ goes on in the next one; so does all
from """ to """, also what begins with a slash. Ctrl-C stops an answer; what was shown of it stays.
/save FILE   write the conversation as JSON
/load FILE   go on with a saved conversation
/reset       forget all but the system message
/stats       numbers of the conversation and of the last answer
/help        this
/exit        end; so do Ctrl-D, and Ctrl-C twice'''
_QUOTES = '"""'


def chat(
    context: typer.Context,
    model: arguments.ModelName = "smollm2-135m",
    max_tokens: arguments.MaxTokens = 1024,
    temperature: arguments.Temperature = None,
    top_k: arguments.TopK = None,
    top_p: arguments.TopP = None,
    min_p: arguments.MinP = None,
    repetition_penalty: arguments.RepetitionPenalty = None,
    seed: arguments.Seed = None,
    stop: arguments.Stops = None,
    system: arguments.System = None,
    template_args: arguments.TemplateArgs = None,
    device: arguments.DeviceName = None,
    max_context: arguments.MaxContext = None,
    threads: arguments.Threads = None,
    tensor_parallel: arguments.TensorParallel = 1,
    weights: arguments.WeightsOption = arguments.WeightsName.auto,
    no_graphs: arguments.NoGraphs = False,
    tokens_per_launch: arguments.TokensPerLaunch = 1,
    lookup: arguments.Lookup = 0,
) -> None:
    """Talk with a model; each turn processes only the new text.

    By default tokens are drawn as the model's files advise, or at temperature 0.7, min-p 0.05 and
    repetition penalty 1.1 if they advise nothing. --temperature 0 takes the likeliest ones.

    A line that ends with a backslash continues on the next one; so does all text between two triple
    quotes. /help lists the commands: /save FILE, /load FILE, /reset, /stats, /exit. Ctrl-C stops an
    answer; Ctrl-D, or Ctrl-C twice, ends the conversation. Answers go to standard output,
    everything else to the error stream. Messages may be piped in, one per line; the exit status is
    1 if one of those could not be answered.

    With --tensor-parallel this process is rank 0 and starts the others, which wait with it between
    messages. Any rank that fails, dies or is stopped (OSTINATO_GROUP_DEADLINE) ends the
    conversation at the next message, with status 1.
    """
    require_extra("`ostinato chat`")
    variables = arguments.read_template_args(template_args)
    advised = advised_options(
        seed,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
    )
    devices = rank_devices(tensor_parallel, device)
    loading: dict[str, Any] = {
        "threads": rank_threads(devices, threads),
        "weights": weights.value,
        "max_context": max_context,
        "graphs": False if no_graphs else None,
        "lookup": lookup,
    }
    with (
        following_ranks(devices, model, loading) as leading,
        speaker(model, device=devices[0], **loading, **leading) as generator,
        _Interrupts() as interrupts,
    ):
        sampling = advised(generator)
        conversation = generator.chat(
            system=system,
            template_args=variables,
            max_tokens=max_tokens,
            sampling=sampling,
            stop=stop or (),
            tokens_per_launch=tokens_per_launch,
        )
        session = _Session(
            conversation,
            interrupts,
            spell=lambda message: arguments.as_typed(message, context.command),
        )
        if session.interactive:
            how = "the likeliest tokens"
            if not sampling.is_greedy:
                how = f"temperature {sampling.temperature:g}, seed {sampling.seed}"
            _note(f"{model} on {generator.device.name}; {how}; /help for help, Ctrl-D to end")
        session.run()
    if session.failed and not session.interactive:
        raise typer.Exit(FAILED)


def _note(words: str) -> None:
    say(words, stream=sys.stderr)


class _Interrupts:
    """A SIGINT handler that interrupts only blocks which may end anywhere (KeyboardInterrupt).

    Outside such blocks Ctrl-C is deferred to the next one, so that no output is cut or written
    twice.  A second Ctrl-C in the meantime raises at once, since the program may hang.
    """

    def __init__(self) -> None:
        self._open = self._pending = False
        self._before: object = None

    def __enter__(self) -> _Interrupts:
        self._before = signal.getsignal(signal.SIGINT)
        if self._before is not signal.SIG_IGN:  # as under `nohup`
            signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._before is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._before)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        raises = self._open or self._pending
        self._open, self._pending = False, not raises
        if raises:
            raise KeyboardInterrupt

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Marks a block that Ctrl-C may interrupt."""
        try:
            self._open = True
            if self._pending:
                self._pending = False
                raise KeyboardInterrupt
            yield
        finally:
            self._open = False


class _Input:
    """Messages from standard input: typed, with a history, or piped in."""

    def __init__(self) -> None:
        self.interactive = sys.stdin.isatty()
        self._edits = self.interactive and sys.stdout.isatty()
        self._begun = self._editing = False
        if self._edits:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 - makes `input` edit lines and keep a history

    def message(self) -> tuple[str, bool] | None:
        """Returns the next message, and whether it may be a command; None at the end of the input.

        Raises UnicodeDecodeError for a line with invalid bytes.
        """
        line = self._line("> ")
        if line is None:
            return None
        self._begun = True
        found = self._whole(line)
        self._begun = False
        return found

    def _whole(self, line: str) -> tuple[str, bool]:
        """Returns the message that begins with this line, including its continuation lines."""
        if line.startswith(_QUOTES):
            return self._quoted(line.removeprefix(_QUOTES)), False
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            if (more := self._line(". ")) is None:
                break
            lines.append(more)
        return "\n".join(lines), len(lines) == 1

    def _quoted(self, first: str) -> str:
        """Returns the text up to the closing quotes or the end of the input."""
        lines: list[str] = []
        line: str | None = first
        while line is not None:
            if line.rstrip().endswith(_QUOTES):
                lines.append(line.rstrip().removesuffix(_QUOTES))
                break
            lines.append(line)
            line = self._line(". ")
        return "\n".join(lines)

    def _line(self, prompt: str) -> str | None:
        if self._edits:
            self._editing = True
            try:
                typed = input(prompt)
            except EOFError:
                typed = None
            self._editing = False
            return typed
        if self.interactive:
            print(prompt, end="", file=sys.stderr, flush=True)
        read = sys.stdin.buffer.readline()
        if not read:
            return None
        return read.decode().removeprefix(arguments.BYTE_ORDER_MARK).rstrip("\r\n")

    def drop(self) -> bool:
        """Drops what was typed before Ctrl-C; returns whether there was anything."""
        readline = sys.modules.get("readline")
        edited = self._editing and readline is not None and readline.get_line_buffer() != ""
        dropped = self._begun or edited
        self._begun = self._editing = False
        return dropped


class _Session:
    """A loop that answers messages and commands, until the input or the user ends the conversation.

    `spell`: replaces argument names in the library's messages by options.  `failed`: True if a
    message could not be answered, or a command failed.
    """

    def __init__(
        self, conversation: Conversation, interrupts: _Interrupts, spell: Callable[[str], str]
    ) -> None:
        self._conversation = conversation
        self._interrupts = interrupts
        self._spell = spell
        self._input = _Input()
        self._latest: Generation | None = None
        self._leaving = False
        self.interactive = self._input.interactive
        self.failed = False

    def run(self) -> None:
        while True:
            try:
                with self._interrupts.allowed():
                    read = self._input.message()
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                if self._interrupted():
                    return
                continue
            except UnicodeDecodeError as error:
                self._input.drop()
                self._fail(f"that is no {error.encoding} text; nothing was said")
                continue
            self._leaving = False
            if read is None:
                if self.interactive:
                    _note("")
                return
            message, may_be_command = read
            if may_be_command and message.startswith("/"):
                if not self._command(message):
                    return
            elif message.strip():
                self._answer(message)

    def _interrupted(self) -> bool:
        """Handles Ctrl-C during typing: drops the text; returns whether the user leaves."""
        typed = self._input.drop()
        if self._leaving and not typed:
            _note("")
            return True
        self._leaving = not typed
        _note("" if typed else "\n(Ctrl-C once more, or Ctrl-D, ends the conversation)")
        return False

    def _answer(self, message: str) -> None:
        answer, shown, stopped = None, 0, False
        with prompt_progress() as progress:
            try:
                with self._interrupts.allowed():
                    answer = self._conversation.say(message, progress=progress)
                    self._latest = answer
                while True:
                    with self._interrupts.allowed():
                        piece = next(answer, None)
                    if piece is None:
                        break
                    show(piece)
                    shown += len(piece)
            except KeyboardInterrupt:
                stopped = True
            except (InputError, ModelError) as error:
                self._fail(f"error: {self._spell(str(error))}")
        if answer is None:
            if stopped:
                _note("(stopped; the message is not kept)")
            return
        show(answer.text[shown:] + "\n")  # text generated before Ctrl-C and not shown yet
        if stopped:
            kept = "what was shown is kept" if answer.text else "the message is not kept"
            _note(f"(stopped; {kept})")
            if not self.interactive:
                raise KeyboardInterrupt
        elif answer.finish_reason == "length":
            _note(f"(ended after {counted(len(answer.token_ids), 'token')}, see --max-tokens)")
        elif answer.finish_reason == "context":
            _note("(the context is full: /save keeps the conversation, /reset begins a new one, "
                  "--max-context makes room)")  # fmt: skip

    def _command(self, line: str) -> bool:
        """Runs a command line; returns whether the conversation continues."""
        name, _, argument = line.strip().partition(" ")
        argument = argument.strip()
        conversation = self._conversation
        if name in ("/save", "/load"):
            self._file(name, argument)
        elif argument:
            self._fail(f"{name} takes nothing after it")
        elif name == "/exit":
            return False
        elif name == "/reset":
            conversation.reset()
            self._latest = None
            _note("(all forgotten but the system message)")
        elif name == "/stats":
            _note(str(conversation.statistics()))
            if self._latest is not None:
                _note(f"last answer: {self._latest.summary()}")
        elif name == "/help":
            _note(_HELP)
        else:
            self._fail(f"{name}: no such command; /help lists them, and {_QUOTES}{name}{_QUOTES} "
                       "is said to the model")  # fmt: skip
        return True

    def _file(self, name: str, argument: str) -> None:
        if not argument:
            self._fail(f"{name} needs a file: {name} FILE")
            return
        conversation = self._conversation
        try:
            path = Path(argument).expanduser()
            if name == "/save":
                conversation.save(path)
            else:
                conversation.load(path)
                self._latest = None
        except OSError as error:
            self._fail(f"error: {path}: {error.strerror or error}")
        except (ModelError, RuntimeError, ValueError) as error:  # no such home, a null character
            self._fail(f"error: {error}")
        else:
            done = "saved to" if name == "/save" else "loaded from"
            _note(f"({len(conversation.messages)} messages {done} {path})")

    def _fail(self, words: str) -> None:
        self.failed = True
        _note(words)
