"""Chat templates: jinja2 programs that come with model files, run as untrusted code.

A template is compiled and rendered in a child process (`child`), by transformers' rules
(`chat_child`).  One child renders all templates of this process.
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

# ChatML, for a model without a template.
DEFAULT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
NO_ARGS: Mapping[str, object] = MappingProxyType({})
"""An empty set of variables for a chat template."""
# A long conversation renders in some 10 ms; compiling a long template takes 100.
_SECONDS = 10.0
_MEMORY = 512 << 20
_MAX_TEXT = 1 << 20  # characters, besides those of the messages
# Ends the message that the answer continues, as in transformers; a template may trim the blank.
_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
# Names of a message's reasoning, by precedence.
_REASONING = ("reasoning_content", "thinking", "reasoning")
_RENDERS = ("messages", "add_generation_prompt")
_renderer = Child(f"{__package__}.chat_child", seconds=_SECONDS, memory=_MEMORY)


def prepare() -> None:
    """Starts the rendering process, so that the first prompt does not wait for the start."""
    _renderer.start()


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A chat template.  `where`: its name in error messages.  `tokens`: text of special tokens by
    the names that the template may use (`bos_token`).  `with_tools`: the source for conversations
    whose variables have `tools`, if it is another one."""

    source: str = DEFAULT_TEMPLATE
    where: str = "the chat template"
    tokens: Mapping[str, str] = field(default_factory=dict)
    with_tools: str | None = None

    def render(
        self,
        messages: Iterable[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_last: bool = False,
        variables: Mapping[str, object] = NO_ARGS,
    ) -> str:
        """Renders the prompt for `messages`: mappings with the strings `role` and `content`; a
        message with `tool_calls` needs no content.  As in transformers, keys whose value is None
        are left out, and reasoning is given as `reasoning_content` and `thinking`, whichever of
        these or `reasoning` a message has.

        `add_generation_prompt`: end with the head of the assistant's turn.  `continue_last`: end in
        the last message instead, an assistant's, which the answer continues.  `variables`: further
        variables of the template: `tools`, `enable_thinking`, ….  They take precedence over
        `tokens`.

        Raises InputError for messages of another form, and for values that JSON cannot hold;
        ModelFormatError if the source is no template, ModelError if the template refuses the
        messages (`raise_exception`), fails, or needs too much time, memory or text;
        NotAvailableError if no process can be started.
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
            listed[index] = _as_templates_read(message)
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
        other = self.with_tools if values["tools"] is not None else None
        source = json.dumps(self.source if other is None else other)
        request = f'{{"source": {source}, "variables": {given}, "longest": {longest}}}'
        text = _renderer.ask(request.encode(), self.where, longest=4 * longest + 1)
        return self._cut(text, last) if continue_last else text

    def _cut(self, text: str, last: str) -> str:
        """Cuts the text at the mark; drops the blanks before it if the template trims messages."""
        found = text.rfind(_MARK.strip())
        if found < 0 or last.strip() not in text:
            raise ModelError(
                f"{self.where} leaves out the last message or a part of it, so no answer can go on "
                "with it"
            )
        kept = text[found : found + len(_MARK)] == _MARK
        return text[:found] if kept else text[:found].rstrip()


def _as_templates_read(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the message as transformers gives it to templates: many write None as a word."""
    found = {name: value for name, value in message.items() if value is not None}
    reasoning = next((found[name] for name in _REASONING if name in found), None)
    if reasoning is None:
        return found
    return {"thinking": reasoning, **found, "reasoning_content": reasoning}


def _last(messages: Sequence[Mapping[str, Any]]) -> str:
    """Returns the text of the last message.  Raises InputError unless it is an assistant's."""
    message = messages[-1] if messages else {}
    text = message.get("content")
    if message.get("role") != "assistant" or not isinstance(text, str):
        raise InputError(
            "continue_last needs an assistant's message with text at the end; the last one is "
            f"{quoted(message or None)}"
        )
    return text


def _plain(value: object) -> object:
    """Returns a dict or a list for a mapping or a sequence of another type, for JSON."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return list(value)
    raise TypeError(f"{quoted(value)} is neither text, number, list nor mapping")
