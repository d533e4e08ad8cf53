"""A conversation: its messages, and the part of them that the KV cache holds already.

    conversation = generator.chat(system="Be brief.")
    for piece in conversation.say("Why is the sky blue?"):
        print(piece, end="", flush=True)
    conversation.save("sky.json")

Each turn renders all messages with the chat template and compares the token ids with those in the
cache: the common prefix stays, and only the rest is prefilled.  So a template may change earlier
messages, an answer may be stopped in the middle, and the decoder may do other work between two
turns: the only cost is more to prefill.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ostinato.errors import InputError, ModelFormatError
from ostinato.models.arguments import counted, quoted
from ostinato.models.files.reading import read_json, write_file
from ostinato.models.generation import Generation, Generator
from ostinato.models.sampling import GREEDY, SamplingOptions
from ostinato.models.stop_strings import checked_stops
from ostinato.models.text.chat import NO_ARGS

MAX_ANSWER = 1024
"""The most tokens of one answer if `max_tokens` is not given."""

_FORMAT, _VERSION = "ostinato conversation", 1


class _Speaker(Generator, Protocol):
    """The part of `TextGenerator` that a conversation uses."""

    def encode(
        self, prompt: Items[Mapping[str, str]], /, *, template_args: Mapping[str, object]
    ) -> list[int]: ...

    def generate(
        self,
        prompt: Items[int],
        /,
        *,
        chat: bool,
        max_tokens: int,
        sampling: SamplingOptions,
        tokens_per_launch: int,
        stop: Iterable[str],
        reuse: bool,
        progress: Callable[[int, int], None] | None,
    ) -> Generation: ...


@dataclass(frozen=True, slots=True)
class ConversationStatistics:
    """Counts of a conversation.

    `turns`: questions with their answers.  `tokens`: the prompt and the answer of the latest turn,
    so all messages; 0 before the first turn and after `reset` or `load`.  `context`: the most
    tokens that fit.  Totals since the conversation was made: `prompt_tokens_read`,
    `prompt_tokens_cached` (those that the KV cache held already) and `answer_tokens`.
    """

    turns: int
    tokens: int
    context: int
    prompt_tokens_read: int
    prompt_tokens_cached: int
    answer_tokens: int

    def __str__(self) -> str:
        return (
            f"{counted(self.turns, 'turn')}, {self.tokens} of {counted(self.context, 'token')} of "
            f"the context in use; of prompts {counted(self.prompt_tokens_read, 'token')} read, "
            f"{self.prompt_tokens_cached} in the cache before; of answers "
            f"{counted(self.answer_tokens, 'token')}"
        )


class Conversation:
    """Turns of a user and a model, made by `TextGenerator.chat`; the options are those of
    `TextGenerator.generate`.

    A turn enters the history with the first piece of its answer, or at the answer's end if the
    answer has no text; a turn that fails or is interrupted before leaves the history unchanged.  If
    an answer is stopped later, the history keeps the pieces that were yielded.

    Not thread-safe.  Several conversations may share a generator, one turn at a time.
    """

    def __init__(
        self,
        generator: _Speaker,
        *,
        system: str | None = None,
        template_args: Mapping[str, object] = NO_ARGS,
        max_tokens: int = MAX_ANSWER,
        sampling: SamplingOptions = GREEDY,
        stop: str | Iterable[str] = (),
        tokens_per_launch: int = 1,
    ) -> None:
        first = [] if system is None else [_message("system", _text(system, "system"))]
        self.template_args = template_args
        self.max_tokens = max_tokens
        self.sampling = sampling
        self.stop = checked_stops(stop)
        self.tokens_per_launch = tokens_per_launch
        self._generator = generator
        self._messages = first
        self._question = ""
        self._answer: Generation | None = None
        self._read = self._cached = self._answered = 0

    def __repr__(self) -> str:
        return f"<Conversation of {len(self._history())} messages>"

    @property
    def messages(self) -> list[dict[str, str]]:
        """All messages so far, oldest first: copies, mappings with `role` and `content`."""
        return [dict(message) for message in self._history()]

    def _history(self) -> list[dict[str, str]]:
        answer = self._answer
        if answer is None or not (answer.text or answer.finish_reason != "interrupted"):
            return self._messages
        turn = (_message("user", self._question), _message("assistant", answer.text))
        return [*self._messages, *turn]

    def say(self, text: str, *, progress: Callable[[int, int], None] | None = None) -> Generation:
        """Returns the answer to a message, an iterator over its pieces; ends an earlier answer.

        `progress`: see `Decoder.prefill`.  Raises InputError for a message that is no text, for a
        conversation that does not fit in the context, and for invalid options; and the errors of
        `ChatTemplate.render`.  The history is then unchanged.
        """
        text = _text(text, "the message")
        history = self._history()
        messages = [*history, _message("user", text)]
        tokens = self._generator.encode(messages, template_args=self.template_args)
        context = self._generator.decoder.plan.sizes.context
        if len(tokens) > context:
            raise InputError(
                f"the context is full: with this message the conversation has {len(tokens)} "
                f"tokens, and max_context is {context}.  The {len(history)} messages before it are "
                "kept: save them, shorten the message, begin anew (reset), or load them into a "
                "generator with a larger max_context"
            )
        answer = self._generator.generate(
            tokens,
            chat=True,
            max_tokens=self.max_tokens,
            sampling=self.sampling,
            tokens_per_launch=self.tokens_per_launch,
            stop=self.stop,
            reuse=True,
            progress=progress,
        )
        self._settle(history)
        self._question, self._answer = text, answer
        return answer

    def _settle(self, history: list[dict[str, str]]) -> None:
        """Ends the answer under way, adds its counts, and sets the messages to `history`."""
        answer, self._answer = self._answer, None
        self._messages = history
        if answer is None:
            return
        if answer.token_ids:  # a first token means that the whole prompt was read
            self._read += answer.prompt_tokens - answer.cached_tokens
            self._cached += answer.cached_tokens
            self._answered += len(answer.token_ids)
        if self._generator.latest is answer:
            self._generator.latest = None

    def reset(self) -> None:
        """Drops all messages but the system message.  Ends an answer under way."""
        self._settle([message for message in self._messages if message["role"] == "system"])

    def save(self, path: str | Path) -> None:
        """Writes the messages as JSON, whole or not at all.  Raises OSError."""
        found = {"format": _FORMAT, "version": _VERSION, "messages": self._history()}
        write_file(Path(path), json.dumps(found, ensure_ascii=False, indent=1) + "\n")

    def load(self, path: str | Path) -> None:
        """Replaces all messages, the system message too, by those of a saved conversation.  Ends an
        answer under way.

        Raises OSError, and ModelFormatError for a file that is no saved conversation; the messages
        are then unchanged.
        """
        self._settle(_read_messages(Path(path)))

    def statistics(self) -> ConversationStatistics:
        """Returns the counts so far, including an answer under way."""
        answer, history = self._answer, self._history()
        begun = answer if answer is not None and answer.token_ids else None
        prompt, cached = (begun.prompt_tokens, begun.cached_tokens) if begun else (0, 0)
        answered = len(begun.token_ids) if begun else 0
        return ConversationStatistics(
            turns=sum(message["role"] == "assistant" for message in history),
            tokens=prompt + answered,
            context=self._generator.decoder.plan.sizes.context,
            prompt_tokens_read=self._read + prompt - cached,
            prompt_tokens_cached=self._cached + cached,
            answer_tokens=self._answered + answered,
        )


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _read_messages(path: Path) -> list[dict[str, str]]:
    """Reads messages from a file: an optional system message, then turns of user and assistant.

    Raises ModelFormatError, OSError.
    """
    found = read_json(path)
    if found.get("format") != _FORMAT:
        raise ModelFormatError(f'{path}: no saved conversation: it has no "format": "{_FORMAT}"')
    version, listed = found.get("version"), found.get("messages")
    if version != _VERSION or isinstance(version, bool):
        raise ModelFormatError(
            f"{path}: a conversation of version {quoted(version)}; this library reads {_VERSION}"
        )
    if not isinstance(listed, list):
        raise ModelFormatError(f"{path}: messages is {quoted(listed)}, must be a list")
    messages = [_checked_message(item, f"{path}: message {i}") for i, item in enumerate(listed)]
    turns = [m["role"] for m in messages]
    if turns[:1] == ["system"]:
        del turns[0]
    if len(turns) % 2 or turns != ["user", "assistant"] * (len(turns) // 2):
        raise ModelFormatError(
            f"{path}: its messages must be a system message or none, then user and assistant in "
            "turns, the assistant's last"
        )
    return messages


def _checked_message(item: object, where: str) -> dict[str, str]:
    if not isinstance(item, dict) or set(item) != {"role", "content"}:
        raise ModelFormatError(f"{where} is {quoted(item)}, must have a role and a content")
    role, content = item["role"], item["content"]
    if role not in ("system", "user", "assistant"):
        raise ModelFormatError(f"{where}: role {quoted(role)} is not system, user or assistant")
    try:
        return _message(role, _text(content, f"{where}: content"))
    except InputError as error:
        raise ModelFormatError(str(error)) from None


def _text(value: object, what: str) -> str:
    """Returns `value`.  Raises InputError, whose message begins with `what`, for a value that is no
    str or that UTF-8 cannot encode."""
    if not isinstance(value, str):
        raise InputError(f"{what} is {quoted(value)}, must be text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{what}: character {error.start} is a lone surrogate") from None
    return value
