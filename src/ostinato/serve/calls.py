"""Finds calls of tools in the text of answers, in the format that the model's chat template writes,
and makes grammars of answers that must be calls.

Known formats:

    <tool_call>{"name": …, "arguments": {…}}</tool_call>    Qwen2.5, Qwen3, Hermes
    [TOOL_CALLS][{"name": …, "arguments": {…}}, …]          Mistral 7B v0.3, Nemo
    [TOOL_CALLS]name[CALL_ID]…[ARGS]{…}                     Mistral Small 3.2, Devstral, Ministral 3
    {"name": …, "parameters": {…}}                          Llama 3.1 to 3.3, as the whole answer

A call is given once it is complete, since later text can show that it is none.  Text that is no
well-formed call of a tool of the request stays text.  The time grows with the text's length only.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from ostinato.errors import InputError, ModelError
from ostinato.serve.grammar import json_rule

T = TypeVar("T")
_Steps: TypeAlias = Generator[None, None, T]
"""A reader that stops at each `yield` until there is more text."""

THINK = "<think>"
"""The word that begins a model's reasoning."""
_ID_CHARACTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9
"""Mistral's templates refuse ids of another length or with other characters."""
_LONGEST_HEAD = 256
"""Characters between `[TOOL_CALLS]` and `[ARGS]`: a name, of 64 at most, and an id."""
_SPACE = re.compile(r"[ \t\n\r]*")
_IN_STRING = re.compile(r'"|\\.', re.DOTALL)
_OUTSIDE = re.compile(r"[^ \t\n\r\d+\-.,:Eaeflnrstu]")
"""A character that is neither white space nor part of a number, of true, false or null.  Each word
that begins a call has one, so calls that begin in each other are searched twice at most."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool.  `arguments`: JSON of an object, as the model wrote it."""

    id: str
    name: str
    arguments: str


def new_call_id() -> str:
    """Returns an id that the templates of all models take."""
    return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_LENGTH))


@dataclass(frozen=True, slots=True)
class _Found:
    """Calls that were read, as pairs of name and arguments; `end`: where the text goes on."""

    calls: Sequence[tuple[str, str]]
    end: int


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A way to write calls.  `words`: those that it marks them with, in the text or as special
    tokens; the first one begins a call.  Without any, calls are the whole answer.  `read`: reads
    what follows that word, and returns None if it is no call.

    The rest is in Lark's notation, with the rule `mark` for the word that begins a call.  `call`: a
    call, with %s for its name and for the rule of its arguments.  `between`: what stands between
    two.  `around`: the calls of an answer, with %s for all of them."""

    words: tuple[str, ...]
    read: Callable[[CallReader, int], _Steps[_Found | None]]
    call: str
    between: str
    around: str = "%s"

    def grammar(
        self,
        schemas: Mapping[str, Mapping[str, object]],
        tokens: Mapping[str, int],
        *,
        one: bool,
        free: bool,
        answer: Mapping[str, object] | None,
    ) -> str:
        """Returns a grammar of calls of these functions in Lark's notation; a single call with
        `one`.

        `schemas`: those of their arguments, by name.  `tokens`: the special tokens among `words`.
        `free`: an answer may have other text too, or be one without calls that matches the schema
        `answer`, if there is one.
        """

        def marked(text: str) -> str:
            for word, token in tokens.items():
                text = text.replace(f'"{word}"', f"<[{token}]>")
            return text

        calls = self.around % ("call" if one else f"call ({self.between} call)*")
        start, text, lazy = "calls", "", ""
        rules = [f"calls: {calls}"]
        if free and answer is not None:
            start = "calls | answer"
            rules.append(f"answer: {json_rule(answer)}")
        elif free and self.words:
            start, text = "calls* TEXT", "TEXT "
            lazy = "" if self.words[0] in tokens else "[lazy]"
            rules.append(r"TEXT: /(.|\n)*/")
        elif free:
            start = "calls | TEXT"
            rules.append(r"TEXT: /(\s*[^\s{\[](.|\n)*)?/")
        if self.words:
            rules.append(marked(f'mark{lazy}: {text}"{self.words[0]}"'))
        for index, (name, schema) in enumerate(schemas.items()):
            rules.append(f"call_{index}: {marked(self.call) % (name, f'arguments_{index}')}")
            rules.append(f"arguments_{index}: {json_rule(schema)}")
        names = " | ".join(f"call_{index}" for index in range(len(schemas)))
        return "\n".join((f"start: {start}", f"call: {names}", *rules))


def arguments_schema(function: Mapping[str, Any]) -> dict[str, object]:
    """Returns the schema of a function's arguments, which are an object whatever it says.  Raises
    InputError if they cannot be one."""
    # OpenAI: a function that names no parameters has none.
    schema: dict[str, object] = function.get("parameters", {"additionalProperties": False})
    kind = schema.get("type", "object")
    if "object" not in (kind if isinstance(kind, list) else [kind]):
        raise InputError(f"the parameters of {function['name']} must have the type object")
    return {**schema, "type": "object"}


class CallReader:
    """A reader of one answer, which takes its text in pieces.

    `names`: those of the tools that can be called.  `one`: the answer ends with its first call;
    `over` is then True, and further text is dropped.  `thinks`: the prompt has begun the reasoning.
    White space beside a call is dropped.
    """

    def __init__(
        self,
        form: ToolFormat,
        names: Collection[str],
        *,
        one: bool = False,
        thinks: bool = False,
    ) -> None:
        self._form, self._names, self._one, self._thinks = form, names, one, thinks
        self.text, self.last = "", False
        """The text that is not given yet, and True if no more follows."""
        self._given: list[str | ToolCall] = []
        self._work = self._run()
        self.over = False

    def push(self, text: str, *, last: bool = False) -> list[str | ToolCall]:
        """Adds text of the answer; returns the texts and calls that are final now, in order.
        `last`: no text follows."""
        self.text += text
        self.last = last
        next(self._work, None)
        given, self._given = self._given, []
        return given

    def _run(self) -> _Steps[None]:
        if not self._form.words:
            yield from self._whole_answer()
            return
        yield from self._reasoning()
        while not self.over and (yield from self._up_to_call()):
            pass

    def _reasoning(self) -> _Steps[None]:
        """Passes on the reasoning with which an answer may begin: calls in it are not meant."""
        word, end = "</think>", (0 if self._thinks else (yield from self.word(0, THINK)))
        while end is not None and (at := self.text.find(word)) < 0:
            self._say(len(self.text) - (0 if self.last else _held(self.text, word)))
            if self.last:
                return
            yield
        if end is not None:
            self._say(at + len(word))

    def _up_to_call(self) -> _Steps[bool]:
        """Passes on text and the call after it.  False at the end of the answer."""
        marker = self._form.words[0]
        while (at := self.text.find(marker)) < 0:
            if self.last:
                self._say(len(self.text))
                return False
            self._say(len(self.text[: len(self.text) - _held(self.text, marker)].rstrip()))
            yield
        self._say(len(self.text[:at].rstrip()))
        at = self.text.index(marker) + len(marker)  # behind white space, which goes with the call
        found = yield from self._form.read(self, at)
        if found is None or not self._known(found.calls):
            self._say(at)
            return True
        self.text = self.text[found.end :]
        self._call(found.calls)
        end = yield from self.space(0)
        self.text = self.text[end:]
        return True

    def _whole_answer(self) -> _Steps[None]:
        calls: list[tuple[str, str]] = []
        end: int | None = 0
        while end is not None:
            found = yield from self._form.read(self, end)
            if found is None or not self._known(found.calls):
                break
            calls += found.calls
            end = yield from self.space(found.end)
            if end == len(self.text):
                self._call(calls)
                return
            end = yield from self.word(end, ";")
        while not self.last:
            self._say(len(self.text))
            yield
        self._say(len(self.text))

    def _known(self, calls: Iterable[tuple[str, str]]) -> bool:
        return all(name in self._names for name, _ in calls)

    def _say(self, end: int) -> None:
        if end:
            self._given.append(self.text[:end])
            self.text = self.text[end:]

    def _call(self, calls: Sequence[tuple[str, str]]) -> None:
        self.over = self._one
        for name, arguments in calls[: 1 if self._one else None]:
            self._given.append(ToolCall(new_call_id(), name, arguments))

    # --- for formats: each waits for text as far as it needs any
    def space(self, at: int) -> _Steps[int]:
        """Returns the end of the white space at `at`."""
        while True:
            match = _SPACE.match(self.text, at)
            assert match is not None
            at = match.end()
            if at < len(self.text) or self.last:
                return at
            yield

    def word(self, at: int, word: str) -> _Steps[int | None]:
        """Returns the end of `word`, after white space; None if it is not there."""
        at = yield from self.space(at)
        while not self.text.startswith(word, at):
            if self.last or not word.startswith(self.text[at : at + len(word)]):
                return None
            yield
        return at + len(word)

    def json(self, at: int) -> _Steps[int | None]:
        """Returns the end of the JSON object or array that begins at `at`; None if none does, or if
        its brackets are not closed.  What is between them can still be wrong."""
        if self.text[at : at + 1] not in ("{", "["):
            return None
        depth, quoted = 0, False
        while True:
            match = (_IN_STRING if quoted else _OUTSIDE).search(self.text, at)
            if match is None:
                if self.last:
                    return None
                # A backslash at the end of a string goes with what comes.
                at = len(self.text) - (quoted and self.text.endswith("\\", at))
                yield
                continue
            at = match.end()
            match match[0]:
                case '"':
                    quoted = not quoted
                case "{" | "[":
                    depth += 1
                case "}" | "]":
                    depth -= 1
                    if not depth:
                        return at
                case _ if not quoted:
                    return None


def _held(text: str, word: str) -> int:
    """Returns how many of the last characters may be the beginning of `word`."""
    return next(size for size in reversed(range(len(word))) if text.endswith(word[:size]))


# --- JSON of calls, and the text of their arguments


def no_number(text: str) -> object:
    """Refuses NaN and infinities, which Python's parser would take."""
    raise ValueError(f"{text} is no JSON number")


_DECODER = json.JSONDecoder(parse_constant=no_number)


def _read_calls(text: str, name: str | None = None) -> list[tuple[str, str]] | None:
    """Reads a JSON object, or an array of objects, each with a name and arguments; with `name`, an
    object of arguments.  Returns names and arguments as they are written, since another spelling
    could be another number, or no Unicode; None if it is no call."""
    try:
        if name is not None:
            return [_call_of({"name": (name, ""), "arguments": (_DECODER.decode(text), text)})]
        if text.startswith("{"):
            return [_call_of(_members(text, 0)[0])]
        calls, at = [], _skip(text, 1)
        while text[at] != "]":
            members, at = _members(text, at)
            calls.append(_call_of(members))
            at = _after_comma(text, at, "]")
        return calls or None
    except (ValueError, RecursionError):
        return None


def _call_of(members: Mapping[str, tuple[object, str]]) -> tuple[str, str]:
    name, _ = members.get("name", (None, ""))
    # Llama's word is "parameters", but it has also learned the other one.
    value, text = members.get("arguments") or members.get("parameters") or ({}, "{}")
    if not isinstance(name, str) or not isinstance(value, dict):
        raise ValueError("no call")
    return name, text


def _members(text: str, at: int) -> tuple[dict[str, tuple[object, str]], int]:
    """Returns the members of the JSON object at `at`, with the text of each, and its end."""
    if text[at] != "{":
        raise ValueError("no object")
    found: dict[str, tuple[object, str]] = {}
    at = _skip(text, at + 1)
    while text[at] != "}":
        name, at = _DECODER.raw_decode(text, at)
        at = _skip(text, at)
        if not isinstance(name, str) or name in found or text[at] != ":":
            raise ValueError("no member")
        start = _skip(text, at + 1)
        value, at = _DECODER.raw_decode(text, start)
        found[name] = value, text[start:at]
        at = _after_comma(text, at, "}")
    return found, at + 1


def _after_comma(text: str, at: int, end: str) -> int:
    at = _skip(text, at)
    if text[at] == ",":
        return _skip(text, at + 1)
    if text[at] != end:
        raise ValueError("no comma")
    return at


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()


# --- formats


def _read_hermes(reader: CallReader, at: int) -> _Steps[_Found | None]:
    found = yield from _read_json(reader, at)
    if found is None:
        return None
    after = yield from reader.word(found.end, _HERMES_END)
    if after is None and not _HERMES_END.startswith(reader.text[found.end :].strip()):
        return None
    return _Found(found.calls, len(reader.text) if after is None else after)


def _read_named(reader: CallReader, at: int) -> _Steps[_Found | None]:
    start = yield from reader.space(at)
    most = start + _LONGEST_HEAD
    while (end := reader.text.find(_MISTRAL_ARGUMENTS, start, most)) < 0:
        if reader.last or len(reader.text) >= most:
            return None
        yield
    name = reader.text[start:end].partition(_MISTRAL_ID)[0].strip()
    return (yield from _read_json(reader, end + len(_MISTRAL_ARGUMENTS), name))


def _read_json(reader: CallReader, at: int, name: str | None = None) -> _Steps[_Found | None]:
    start = yield from reader.space(at)
    end = yield from reader.json(start)
    calls = None if end is None else _read_calls(reader.text[start:end], name)
    return None if end is None or calls is None else _Found(calls, end)


_HERMES_END = "</tool_call>"
_MISTRAL, _MISTRAL_ID, _MISTRAL_ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
FORMATS = (
    ToolFormat(
        ("<tool_call>", _HERMES_END),
        _read_hermes,
        r'mark "\n{\"name\": \"%s\", \"arguments\": " %s "}\n" "</tool_call>"',
        r'"\n"',
    ),
    ToolFormat(
        (_MISTRAL,),
        _read_json,
        r'"{\"name\": \"%s\", \"arguments\": " %s "}"',
        '", "',
        'mark " "? "[" %s "]"',
    ),
    ToolFormat(
        (_MISTRAL, _MISTRAL_ID, _MISTRAL_ARGUMENTS),
        _read_named,
        'mark "%s" ("[CALL_ID]" /[A-Za-z0-9]{9}/)? "[ARGS]" %s',
        "",
    ),
    ToolFormat(
        (),
        _read_json,
        # In the pieces of JSON, as which an answer of another schema can begin like a call.
        r'"{" "\"name\"" ":" " " "\"%s\"" "," " " "\"parameters\"" ":" " " %s "}"',
        '"; "',
    ),
)


def find_format(render: Callable[..., str], ends: Collection[str]) -> ToolFormat | None:
    """Returns the format in which a chat template writes calls; None if it does not show the model
    tools, calls and their results, or writes calls in no known format.

    `render`: `ChatTemplate.render`.  `ends`: texts of the tokens that end an answer.
    A format is known by its own reader, which must find a call in what the template writes for it.
    """
    name, arguments, result = "probe_tool", {"probe_key": "probe value"}, "probe result"
    schema = {"type": "object", "properties": {"probe_key": {"type": "string"}}}
    function = {"name": name, "description": "A probe.", "parameters": schema}
    call_id = new_call_id()
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    messages: list[dict[str, object]] = [
        {"role": "user", "content": "probe"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": result, "tool_call_id": call_id, "name": name},
    ]

    def text(count: int, prompt: bool = False) -> str:
        tools = [{"type": "function", "function": function}]
        return render(messages[:count], add_generation_prompt=prompt, variables={"tools": tools})

    try:
        asked, prompt, called, answered = text(1), text(1, True), text(2), text(3)
    except ModelError:
        return None
    if name not in asked or result not in answered:
        return None
    for form in FORMATS:
        # A generation prompt can begin the reasoning, which no earlier turn has.
        before = asked if form.words else prompt
        if called.startswith(before):
            answer = called[len(before) :]
            for end in ends:
                answer = answer.partition(end)[0]
            found = CallReader(form, (name,)).push(answer, last=True)
            calls = [one for one in found if isinstance(one, ToolCall)]
            if len(calls) == 1 and json.loads(calls[0].arguments) == arguments:
                return form
    return None
