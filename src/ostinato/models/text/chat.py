"""Chat templates: jinja2 programs that come inside model files, and are run as untrusted code.

A template is compiled and rendered in a process of its own (`child`), by transformers' rules
(`chat_child`).  One such process serves all templates of this one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from ostinato.errors import InputError, ModelError
from ostinato.models.arguments import quoted
from ostinato.models.text.child import Child

# ChatML: what is used for a model that names no template but has its tokens.
DEFAULT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# A long conversation renders in some 10 ms; compiling a long template takes 100.
NO_ARGS: Mapping[str, object] = MappingProxyType({})
"""Variables of a chat template: none."""
_SECONDS = 10.0
_MEMORY = 512 << 20
_MAX_TEXT = 1 << 20  # characters, beside what the messages hold
# Ends the message that is to be gone on with, as in transformers; a template may trim its blank.
_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
_RENDERS = ("messages", "add_generation_prompt")
_renderer = Child(f"{__package__}.chat_child", seconds=_SECONDS, memory=_MEMORY)


def prepare() -> None:
    """Starts the process that renders, so that the first prompt does not wait for it."""
    _renderer.start()


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A chat template.  `where` is what error messages call it.  `tokens`: text of special tokens
    by the names that the template may use (`bos_token`)."""

    source: str = DEFAULT_TEMPLATE
    where: str = "the chat template"
    tokens: Mapping[str, str] = field(default_factory=dict)

    def render(
        self,
        messages: Iterable[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_last: bool = False,
        variables: Mapping[str, object] = NO_ARGS,
    ) -> str:
        """The prompt for `messages`: mappings with the strings `role` and `content`; one that has
        `tool_calls` needs no content.

        `add_generation_prompt`: end with the head of the assistant's turn.  `continue_last`: end
        in the last message instead, an assistant's, which the answer goes on with.  `variables`:
        what else a template may use: `tools`, `enable_thinking`, ….  They go before `tokens`.

        Raises InputError for messages of another form, and for what JSON cannot hold;
        ModelFormatError if this is no template, ModelError if it refuses the messages
        (`raise_exception`), fails, or needs too much time, memory or text; NotAvailableError where
        no process can be started for it.
        """
        if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
            raise InputError(f"messages is {quoted(messages)}, must be a list of mappings")
        listed = list(messages)
        for index, message in enumerate(listed):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise InputError(
                    f"message {index} is {quoted(message)}, must be a mapping with a role and a "
                    "content"
                )
            if message.get("content") is None and not message.get("tool_calls"):
                raise InputError(f"message {index} is {quoted(message)}, which has no content")
        if not isinstance(variables, Mapping) or not all(isinstance(k, str) for k in variables):
            raise InputError(f"the variables are {quoted(variables)}, must be a mapping by name")
        for name in _RENDERS:
            if name in variables:
                raise InputError(f"the variable {name!r} of chat templates cannot be set")
        last = ""
        if continue_last:
            last = _last(listed)
            listed[-1] = {**listed[-1], "content": last + _MARK}
        values = {
            **self.tokens,
            "tools": None,
            "documents": None,
            **variables,
            "messages": listed,
            "add_generation_prompt": add_generation_prompt and not continue_last,
        }
        try:
            given = json.dumps(values, default=_plain)
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(
                f"the messages are not what JSON can hold: {str(error)[:200]}"
            ) from None
        longest = _MAX_TEXT + 4 * len(given)
        source = json.dumps(self.source)
        request = f'{{"source": {source}, "variables": {given}, "longest": {longest}}}'
        text = _renderer.ask(request.encode(), self.where, longest=4 * longest + 1)
        return self._cut(text, last) if continue_last else text

    def _cut(self, text: str, last: str) -> str:
        """Up to the mark; without the blanks before it, if the template trims messages."""
        found = text.rfind(_MARK.strip())
        if found < 0 or last.strip() not in text:
            raise ModelError(
                f"{self.where} leaves out the last message or a part of it, so no answer can go on "
                "with it"
            )
        kept = text[found : found + len(_MARK)] == _MARK
        return text[:found] if kept else text[:found].rstrip()


def _last(messages: Sequence[Mapping[str, Any]]) -> str:
    """The text of the last message."""
    message = messages[-1] if messages else {}
    text = message.get("content")
    if message.get("role") != "assistant" or not isinstance(text, str):
        raise InputError(
            "continue_last needs an assistant's message with text at the end; the last one is "
            f"{quoted(message or None)}"
        )
    return text


def _plain(value: object) -> object:
    """What JSON can hold instead of a mapping or a sequence of another type."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return list(value)
    raise TypeError(f"{quoted(value)} is neither text, number, list nor mapping")
