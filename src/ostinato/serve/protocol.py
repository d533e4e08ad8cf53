"""Reads the JSON of OpenAI's chat, completion and response endpoints, and writes that of the first
two (responses.py writes the third's).  Pure.

An unknown field is refused, and so is an unsupported one that would change the answer: silently
ignoring it would give a wrong answer.  Fields with a neutral value (`n: 1`, `logprobs: false`) are
accepted, also those of vLLM and llama-server, and so are notes for other services.  docs/serve.md
lists all of them.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, TypeVar

from ostinato.errors import InputError
from ostinato.models import SamplingOptions
from ostinato.serve.calls import ToolCall, no_number
from ostinato.serve.engine import End
from ostinato.serve.grammar import GrammarKind

T = TypeVar("T")
Kind = Literal["chat", "completion", "response"]

_NO_LIMIT = -1
_COMPLETION_TOKENS = 16
"""The default of `max_tokens` at OpenAI's completion endpoint."""
_MOST_STOPS = 16
_LONGEST_STOP = 1024
_MOST_METADATA = 16
_LONGEST_METADATA = 512
_MOST_SEED = 1 << 64
_MOST_TOOLS = 128
_TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MOST_LOGPROBS = 20
_MOST_PROMPTS = 1 << 12
"""A limit for every server: checking millions of prompts takes seconds."""

# The values of each field that change nothing; any other value is refused.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    # OpenAI
    "audio": (),
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": (),
    "suffix": ("",),
    "verbosity": ("medium",),
    "web_search_options": (),
    # vLLM
    "allowed_token_ids": (),
    "bad_words": ([],),
    "documents": ([],),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "min_tokens": (0,),
    "priority": (0,),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_token_ids": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    # llama-server
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "id_slot": (-1,),
    "min_keep": (0,),
    "mirostat": (0,),
    "n_probs": (0,),
    "repeat_last_n": (),
    "return_progress": (False,),
    "samplers": (),
    "timings_per_token": (False,),
    "typical_p": (1,),
    "xtc_probability": (0,),
}
# The same for the response endpoint.
_NEUTRAL_IN_RESPONSES: dict[str, tuple[object, ...]] = {
    "access_programs": (),
    "background": (False,),
    "background_options": (),
    "context_management": ([],),
    "image": (),
    "include": ([], ["reasoning.encrypted_content"]),  # no answer has reasoning items
    "max_tool_calls": (),
    "moderation": (),
    "prompt": (),
    "prompt_cache_options": (),
    "reasoning": ({},),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
_STORED = ("conversation", "previous_response_id")
"""Fields that name messages which the server would have stored."""
# Notes for other services: accepted and ignored.
_IGNORED = (
    "cache_prompt",
    "cache_salt",
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "request_id",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
# Fields of an earlier answer, which clients send back.
_EMPTY_IN_MESSAGES = ("annotations", "audio", "function_call", "refusal")
# Fields of a message that chat templates may use.
_TEXTS_IN_MESSAGES = ("name", "reasoning", "reasoning_content")
_IGNORED_IN_MESSAGES = ("cache_control", "prompt_cache_breakpoint")
# Fields of a message at the response endpoint, besides those of a chat's.
_IGNORED_IN_ITEMS = ("type", "id", "status")


class ApiError(Exception):
    """An error to answer with: the HTTP status, and the fields of OpenAI's error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind = status, message, kind
        self.param, self.code, self.headers = param, code, dict(headers or {})

    def body(self) -> dict[str, Any]:
        """Returns the response body, in OpenAI's format."""
        fields = {"type": self.kind, "param": self.param, "code": self.code}
        return {"error": {"message": self.message, **fields}}


def fault(param: str, words: str, code: str | None = None) -> ApiError:
    """Returns the error of a field of a request: its name, followed by what is wrong with it."""
    return ApiError(400, f"{param} {words}", param=param, code=code)


@dataclass(frozen=True, slots=True)
class Chat:
    """Text messages of the roles system, user, assistant and tool, as chat templates take them.
    `template_args`: variables of the chat template.  `continue_last`: the answer continues the last
    message.  `tools`: the functions that the answer may call, in OpenAI's form; with `one_call` it
    ends with the first call.  `forced`: the names of those of which it must call one; empty if it
    need not.  `strict`: of those whose arguments must match their schema in any case."""

    messages: tuple[dict[str, Any], ...]
    template_args: Mapping[str, object] = field(default_factory=dict)
    continue_last: bool = False
    tools: tuple[dict[str, Any], ...] = ()
    one_call: bool = False
    forced: frozenset[str] = frozenset()
    strict: frozenset[str] = frozenset()

    @property
    def uses_tools(self) -> bool:
        """True if the model must know tools."""
        called = (one["role"] == "tool" or "tool_calls" in one for one in self.messages)
        return bool(self.tools) or any(called)


Prompt: TypeAlias = Chat | str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WantedGrammar:
    """A text for `GrammarCompiler.compile`, and the field of the request that has it."""

    param: str
    kind: GrammarKind
    text: str


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A valid request.

    `prompts`: a chat, texts, or token ids; each gets `n` answers.  `max_tokens`: None if the
    request sets no limit.  `sampling`: its seed is the first answer's if `seeded`; otherwise each
    answer gets a fresh seed.  `repeated`: fields of the request that the answer repeats.
    `logprobs`: the number of likeliest tokens to tell with each token; None for no log
    probabilities.  `echo`: the answer begins with the prompt.  `grammar`: what it must match.
    """

    kind: Kind
    model: str
    prompts: tuple[Prompt, ...]
    n: int
    max_tokens: int | None
    sampling: SamplingOptions
    seeded: bool
    stop: tuple[str, ...]
    stream: bool
    usage: bool
    repeated: Mapping[str, object] = field(default_factory=dict)
    logprobs: int | None = None
    echo: bool = False
    grammar: WantedGrammar | None = None

    @property
    def echo_logprobs(self) -> bool:
        """True if log probabilities of the prompt's tokens are wanted."""
        return self.echo and self.logprobs is not None

    def sampling_of(self, number: int, fresh: Callable[[], int]) -> SamplingOptions:
        """Returns the options of answer `number`; `fresh` makes a seed if the request has none."""
        seed = (self.sampling.seed + number) % _MOST_SEED if self.seeded else fresh()
        return replace(self.sampling, seed=seed)


def parse_json(body: bytes) -> object:
    """Parses a request's body.  Raises ApiError for invalid JSON, and for an object with a repeated
    field, whose value would be ambiguous."""

    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) < len(pairs):
            name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
            raise ValueError(f"the field {name[:80]!r} is there twice")
        return found

    try:
        return json.loads(
            body.decode("utf-8-sig"), parse_constant=no_number, object_pairs_hook=once
        )
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is no UTF-8: byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is no JSON: {str(error)[:200]}") from None


def read_request(given: object, kind: Kind, sampling: SamplingOptions) -> CompletionRequest:
    """Reads a request of the endpoint `kind`; `sampling` has the defaults of its options."""
    if not isinstance(given, dict):
        raise ApiError(400, "the body must be a JSON object")
    fields = _Fields(given)
    model = fields.take("model", _text, None)
    if model is None:
        raise fault("model", "is missing")
    prompts, most, repeated = _TAKE[kind](fields)
    grammar = None if kind == "response" else _take_grammar(fields)
    if kind == "response" and (found := _response_format(repeated["text"]["format"])) is not None:
        grammar = WantedGrammar("text", *found)
    seed = fields.take("seed", _integer, None)
    stream = fields.take("stream", _flag, False)
    options = fields.take("stream_options", _stream_options, None)
    if options is not None and not stream:
        raise fault("stream_options", "needs stream")
    named: dict[str, Any] = {
        "temperature": fields.take("temperature", _number, None),
        "top_p": fields.take("top_p", _number, None),
        "top_k": fields.take("top_k", _top_k, None),
        "min_p": fields.take("min_p", _number, None),
        "repetition_penalty": fields.take(
            "repetition_penalty", _number, fields.take("repeat_penalty", _no_penalty, None)
        ),
        "frequency_penalty": fields.take("frequency_penalty", _number, None),
        "presence_penalty": fields.take("presence_penalty", _number, None),
        "logit_bias": fields.take("logit_bias", _biases, None),
        "seed": 0 if seed is None else seed % _MOST_SEED,
    }
    if named["top_p"] == 0:  # only the likeliest token is left
        named |= {"top_p": None, "temperature": 0.0}
    wanted = CompletionRequest(
        kind,
        model,
        prompts,
        n=1 if kind == "response" else fields.take("n", _count, 1),
        max_tokens=None if most == _NO_LIMIT else most,
        sampling=_sampling(sampling, named),
        seeded=seed is not None,
        stop=fields.take("stop", _stops, ()),
        stream=stream,
        usage=bool(options),
        repeated=repeated,
        logprobs=_take_logprobs(fields, kind),
        echo=_take_echo(fields, kind),
        grammar=grammar,
    )
    fields.end(_NEUTRAL_IN_RESPONSES if kind == "response" else _NEUTRAL)
    return wanted


_Taken: TypeAlias = tuple[tuple[Prompt, ...], int | None, Mapping[str, Any]]
"""Prompts, max_tokens, and the fields that the answer repeats."""


def _take_completion(fields: _Fields) -> _Taken:
    prompts = fields.take("prompt", _prompts, None)
    if prompts is None:
        raise fault("prompt", "is missing")
    return prompts, fields.take("max_tokens", _most, _COMPLETION_TOKENS), {}


def _take_chat(fields: _Fields) -> _Taken:
    messages = fields.take("messages", _messages, None)
    if messages is None:
        raise fault("messages", "is missing")
    continues = fields.take("continue_final_message", _flag, False)
    if continues and messages[-1]["role"] != "assistant":
        raise fault("continue_final_message", "needs a message of the assistant at the end")
    if fields.take("add_generation_prompt", _flag, not continues) is continues:
        words = "must be true, or false with continue_final_message"
        raise fault("add_generation_prompt", words)
    most = fields.take("max_completion_tokens", _most, fields.take("max_tokens", _most, None))
    chat = _take_tools(
        fields, Chat(messages, fields.take("chat_template_kwargs", _template_args, {}), continues)
    )
    if chat.tools and continues:
        raise fault("tools", "cannot be used with continue_final_message")
    return (chat,), most, {}


def _take_response(fields: _Fields) -> _Taken:
    for name in _STORED:
        if fields.take(name, lambda value: True, False):
            raise ApiError(
                400,
                f"{name}: this server stores nothing; send the earlier messages in input",
                param=name,
                code="unsupported_parameter",
            )
    messages = fields.take("input", _items, None)
    if messages is None:
        raise fault("input", "is missing")
    instructions = fields.take("instructions", _said, None)
    if instructions is not None:
        messages = ({"role": "system", "content": instructions}, *messages)
    most = fields.take("max_output_tokens", _count, None)
    nothing: Mapping[str, str] = {}
    repeated: dict[str, object] = {
        "instructions": instructions,
        "max_output_tokens": most,
        "metadata": fields.take("metadata", _metadata, nothing),
        "text": fields.take("text", _text_format, {"format": {"type": "text"}}),
    }
    chat = _take_tools(
        fields, Chat(messages, fields.take("chat_template_kwargs", _template_args, {})), repeated
    )
    return (chat,), most, repeated


def _take_tools(fields: _Fields, chat: Chat, repeated: dict[str, object] | None = None) -> Chat:
    """Returns the chat with the tools of a request.  `repeated`: gets the fields that a response
    repeats, and means that the functions have the form of that endpoint."""
    nothing: tuple[dict[str, Any], ...] = ()
    tools = fields.take("tools", _tools if repeated is None else _flat_tools, nothing)
    auto: str | dict[str, Any] = "auto"
    choice = fields.take("tool_choice", _tool_choice if repeated is None else _flat_choice, auto)
    several = fields.take("parallel_tool_calls", _flag, True)
    functions = {one["function"]["name"]: {**one["function"]} for one in tools}
    strict = frozenset(name for name, one in functions.items() if one.pop("strict", False))
    named = isinstance(choice, dict)
    forced = frozenset(name for name in functions if choice in ("required", {"name": name}))
    if choice not in ("none", "auto") and not forced:
        raise ApiError(400, "tool_choice: there is no such function in tools", param="tool_choice")
    if repeated is not None:
        flat = [{"type": "function", "strict": False, **one["function"]} for one in tools]
        said = {"type": "function", **choice} if isinstance(choice, dict) else choice
        repeated |= {"tools": flat, "tool_choice": said, "parallel_tool_calls": several}
    if choice == "none":
        return chat
    return replace(
        chat,
        tools=tuple({"type": "function", "function": one} for one in functions.values()),
        one_call=named or not several,
        forced=forced,
        strict=strict,
    )


def _take_logprobs(fields: _Fields, kind: Kind) -> int | None:
    if kind == "response":
        return None
    if kind == "completion":
        if fields.take("top_logprobs", _integer, 0):
            raise fault("top_logprobs", "is for chats; logprobs has the number")
        return fields.take("logprobs", _logprobs, None)
    wanted = fields.take("logprobs", _flag, False)
    top = fields.take("top_logprobs", _integer, 0)
    if not 0 <= top <= _MOST_LOGPROBS:
        raise fault("top_logprobs", f"must be 0 to {_MOST_LOGPROBS}")
    if top and not wanted:
        raise fault("top_logprobs", "needs logprobs: true")
    return top if wanted else None


def _take_echo(fields: _Fields, kind: Kind) -> bool:
    echo = kind != "response" and fields.take("echo", _flag, False)
    if echo and kind == "chat":
        raise fault("echo", "is for completions", "unsupported_parameter")
    return echo


def _take_grammar(fields: _Fields) -> WantedGrammar | None:
    """Returns what the answer must match: at most one field may say it."""
    named = {
        "response_format": fields.take("response_format", _response_format, None),
        "structured_outputs": fields.take("structured_outputs", _structured_outputs, None),
        "json_schema": fields.take("json_schema", _schema, None),
        "grammar": fields.take("grammar", _grammar, None),
    }
    given = [WantedGrammar(name, *value) for name, value in named.items() if value is not None]
    if len(given) > 1:
        one, other = (each.param for each in given[:2])
        raise fault(other, f"is one too many beside {one}")
    return given[0] if given else None


_TAKE: dict[Kind, Callable[[_Fields], _Taken]] = {
    "chat": _take_chat,
    "completion": _take_completion,
    "response": _take_response,
}


class _Fields:
    """The fields of an object, each read once; a field that is null counts as missing."""

    def __init__(self, given: Mapping[str, object]) -> None:
        self._left = {name: value for name, value in given.items() if value is not None}

    def take(self, name: str, read: Callable[[object], T], missing: T) -> T:
        """Returns the field as converted by `read`, or `missing`.  Turns a ValueError into an
        ApiError."""
        if name not in self._left:
            return missing
        value = self._left.pop(name)
        try:
            return read(value)
        except ValueError as error:
            raise fault(name, str(error)) from None

    def end(self, neutral: Mapping[str, tuple[object, ...]]) -> None:
        """Raises ApiError if a field that was not read is unknown or would change the answer;
        `neutral` has the values that do not."""
        for name, value in self._left.items():
            if name in _IGNORED:
                continue
            known = neutral.get(name)
            if known is None:
                raise ApiError(
                    400, f"unknown field {name[:80]!r}", param=name[:80], code="unknown_parameter"
                )
            if not any(_same(value, one) for one in known):
                words = "is not supported by this server; leave it out"
                raise fault(name, words, "unsupported_parameter")


def _same(value: object, known: object) -> bool:
    """True if two values are equal in JSON: 0 equals 0.0 but not false."""
    number = isinstance(value, float) and type(known) is int
    return (number or type(value) is type(known)) and value == known


# --- readers of values: each raises ValueError with a message that follows the field's name


def _said(value: object) -> str:
    """Returns text for the model, without the byte order mark that text from files may begin
    with."""
    return _text(value).removeprefix("\ufeff")


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("must be text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"holds half a character at {error.start} (a lone surrogate)") from None
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def _integer(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("must be a whole number")
    return value


def _count(value: object) -> int:
    found = _integer(value)
    if found < 1:
        raise ValueError(f"is {found if found > -1000 else 'negative'}, must be 1 or more")
    return found


def _most(value: object) -> int:
    """Returns a number of tokens, or _NO_LIMIT for -1."""
    return _NO_LIMIT if _same(value, _NO_LIMIT) else _count(value)


def _top_k(value: object) -> int:
    """Returns top_k; -1 and 0 turn it off."""
    return 0 if _same(value, -1) else _integer(value)


def _no_penalty(value: object) -> float:
    """Accepts only 1 (off): llama-server's penalty covers recent tokens only."""
    if not _same(value, 1):
        raise ValueError("must be 1 (off) for this server; it has repetition_penalty")
    return 1.0


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("must be a number")
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    if not math.isfinite(found):
        raise ValueError("must be a finite number")
    return found


def _logprobs(value: object) -> int | None:
    """Returns the number of likeliest tokens; None for false, which vLLM accepts."""
    if value is False:
        return None
    found = _integer(value)
    if not 0 <= found <= _MOST_LOGPROBS:
        raise ValueError(f"must be 0 to {_MOST_LOGPROBS}")
    return found


def _biases(value: object) -> dict[int, float]:
    if value == []:
        return {}
    if not isinstance(value, dict):
        raise ValueError("must be an object: a number for each token id")
    found: dict[int, float] = {}
    for name, bias in value.items():
        if not name.isascii() or not name.isdecimal() or len(name) > 9:
            raise ValueError(f"has the name {name[:80]!r}, which is no token id")
        if int(name) in found:
            raise ValueError(f"has the token {int(name)} twice")
        found[int(name)] = _number(bias)
    return found


def _schema(value: object) -> tuple[GrammarKind, str]:
    if not isinstance(value, dict | bool):
        raise ValueError("must be a JSON schema: an object")
    return "json_schema", json.dumps(value, ensure_ascii=False)


def _response_format(value: object) -> tuple[GrammarKind, str] | None:
    """Returns the grammar of OpenAI's response_format; None for text.  `schema` of a json_object is
    llama-server's."""
    kinds = 'an object with the type "text", "json_object" or "json_schema"'
    if not isinstance(value, dict):
        raise ValueError(f"must be {kinds}")
    match value.get("type"):
        case "text":
            return None
        case "json_object":
            return _schema(value.get("schema") or {"type": "object"})
        case "json_schema":
            given = value.get("json_schema", value)  # a response has its schema beside the type
            if not isinstance(given, dict) or not isinstance(given.get("schema"), dict):
                raise ValueError("needs a schema")
            return _schema(given["schema"])
    raise ValueError(f"must be {kinds}")


def _text_format(value: object) -> dict[str, Any]:
    """Returns the `text` of a response, whose format is one that `_response_format` reads."""
    if not isinstance(value, dict) or set(value) - {"format"}:
        raise ValueError('must be an object with "format" alone')
    found = value.get("format") or {"type": "text"}
    _response_format(found)
    return {"format": found}


def _structured_outputs(value: object) -> tuple[GrammarKind, str]:
    """Returns the grammar of vLLM's structured_outputs."""
    found = value.items() if isinstance(value, dict) else ()
    given = {name: one for name, one in found if one is not None and one is not False}
    if len(given) != 1:
        raise ValueError("must have one of json, json_object, regex, choice and grammar")
    ((name, one),) = given.items()
    match name:
        case "json":
            return ("json_schema", one) if isinstance(one, str) else _schema(one)
        case "json_object":
            return _schema({"type": "object"})
        case "regex":
            return "regex", _text(one)
        case "choice":
            if not isinstance(one, list):
                raise ValueError("needs a list of texts as its choice")
            return "choice", json.dumps([_text(text) for text in one])
        case "grammar":
            return "grammar", _text(one)
    raise ValueError(f"has {name[:80]!r}, which is not supported by this server")


def _grammar(value: object) -> tuple[GrammarKind, str] | None:
    return ("grammar", _text(value)) if value != "" else None


def _stops(value: object) -> tuple[str, ...]:
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or len(found) > _MOST_STOPS:
        raise ValueError(f"must be text, or a list of {_MOST_STOPS} texts at most")
    texts = tuple(_text(one) for one in found)
    if not all(0 < len(text) <= _LONGEST_STOP for text in texts):
        raise ValueError(f"must hold texts of 1 to {_LONGEST_STOP} characters")
    return texts


def _stream_options(value: object) -> bool:
    known = {"include_usage", "include_obfuscation"}
    if not isinstance(value, dict) or set(value) - known:
        raise ValueError('must be an object with "include_usage"')
    if not all(one is None or isinstance(one, bool) for one in value.values()):
        raise ValueError('must be an object with "include_usage", true or false')
    return bool(value.get("include_usage"))


def _prompts(value: object) -> tuple[Prompt, ...]:
    """Returns prompts from a text, a list of texts, token ids, or lists of token ids."""
    if isinstance(value, str):
        return (_said(value),)
    if not isinstance(value, list) or not value or isinstance(value[0], int):
        return (_tokens(value),)
    if len(value) > _MOST_PROMPTS:
        raise ValueError(f"must be {_MOST_PROMPTS} prompts at most")
    return tuple(_said(one) if isinstance(one, str) else _tokens(one) for one in value)


def _tokens(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise ValueError("must be text, token ids, or a list of these")
    return tuple(_integer(one) for one in value)


def _messages(value: object) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, list) or not value:
        raise ValueError("must be a list of messages, one at the least")
    return tuple(_message(one, index, (*_ROLES, "tool")) for index, one in enumerate(value))


def _tools(value: object) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, list) or len(value) > _MOST_TOOLS:
        raise ValueError(f"must be a list of {_MOST_TOOLS} functions at most")
    tools = tuple(_tool(one, index) for index, one in enumerate(value))
    if len({one["function"]["name"] for one in tools}) < len(tools):
        raise ValueError("must have a name of its own for each function")
    return tools


def _flat_tools(value: object) -> tuple[dict[str, Any], ...]:
    """Returns functions from the response endpoint, which has all their fields side by side."""
    if not isinstance(value, list):
        raise ValueError(f"must be a list of {_MOST_TOOLS} functions at most")
    return _tools([_nested(one) for one in value])


def _nested(given: object) -> object:
    if not isinstance(given, dict):
        return given
    function = {name: one for name, one in given.items() if name != "type"}
    return {"type": given.get("type"), "function": function}


def _tool(given: object, index: int) -> dict[str, Any]:
    """Returns a function in OpenAI's form, without fields that are null."""
    function = _function(given, ("type", "function"))
    if function is None:
        raise ValueError(f"[{index}] must have the type function and a function, no more")
    name = function.get("name")
    if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
        raise ValueError(f"[{index}]: name must be 1 to 64 letters, digits, _ or -")
    if not isinstance(function.get("description"), str | None):
        raise ValueError(f"[{index}]: description must be text")
    if not isinstance(function.get("parameters"), dict | None):
        raise ValueError(f"[{index}]: parameters must be an object, a JSON schema")
    if not isinstance(function.get("strict"), bool | None):
        raise ValueError(f"[{index}]: strict must be true or false")
    unknown = {*function} - {"name", "description", "parameters", "strict"}
    if unknown:
        raise ValueError(f"[{index}]: {min(unknown)[:80]} is no field of a function")
    shown = {name: one for name, one in function.items() if one is not None}
    return {"type": "function", "function": shown}


def _tool_choice(value: object) -> str | dict[str, Any]:
    """Returns a word, or a function of which only the name is said."""
    if isinstance(value, str) and value in ("none", "auto", "required"):
        return value
    function = _function(value, ("type", "function"))
    if function is None or {*function} != {"name"}:
        raise ValueError('must be "none", "auto", "required", or a function with its name')
    return function


def _flat_choice(value: object) -> str | dict[str, Any]:
    return _tool_choice(_nested(value))


def _tool_calls(value: object) -> list[dict[str, Any]]:
    """Returns the calls of an earlier answer, with their arguments as an object, as chat templates
    take them."""
    if not isinstance(value, list):
        raise ValueError("must be a list of calls")
    return [_tool_call(one) for one in value]


def _tool_call(given: object) -> dict[str, Any]:
    function = _function(given, ("id", "type", "function", "index"))
    if not isinstance(given, dict) or function is None:
        raise ValueError("must have calls with an id, the type function and a function, no more")
    call_id, name = _text(given.get("id")), _text(function.get("name"))
    written = _text(function.get("arguments"))
    try:
        arguments = parse_json((written or "{}").encode())
    except ApiError:
        arguments = None
    if not isinstance(arguments, dict):
        raise ValueError(f"has arguments of {name[:80]} that are no JSON object")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _function(given: object, known: Collection[str]) -> dict[str, Any] | None:
    """Returns the function in an object of that type; None if it has another form."""
    if not isinstance(given, dict) or {*given} - {*known} or given.get("type") != "function":
        return None
    function = given.get("function")
    return function if isinstance(function, dict) else None


def _template_args(value: object) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise ValueError("must be an object: a value for each variable")
    for name in ("messages", "tools", "add_generation_prompt", "continue_final_message"):
        if name in value:
            raise ValueError(f"cannot set {name}")
    return value


def _items(value: object) -> tuple[dict[str, Any], ...]:
    """Returns messages from the input of the response endpoint: a text, or a list of items."""
    if isinstance(value, str):
        return ({"role": "user", "content": _said(value)},)
    if not isinstance(value, list) or not value:
        raise ValueError("must be text, or a list of messages, one at the least")
    messages: list[dict[str, Any]] = []
    for index, given in enumerate(value):
        if isinstance(given, dict) and given.get("type") == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(_call_item(given, index))
        else:
            messages.append(_item(given, index))
    return tuple(messages)


def _call_item(given: dict[str, Any], index: int) -> dict[str, Any]:
    named = {name for name, one in given.items() if one is not None}
    if named - {*_IGNORED_IN_ITEMS, "call_id", "name", "arguments"}:
        raise ValueError(f"[{index}]: a call has a call_id, a name and arguments, no more")
    function = {"name": given.get("name"), "arguments": given.get("arguments")}
    try:
        return _tool_call({"id": given.get("call_id"), "type": "function", "function": function})
    except ValueError as error:
        raise ValueError(f"[{index}]: {error}") from None


def _item(given: object, index: int) -> dict[str, Any]:
    roles = tuple(_ROLES)
    if isinstance(given, dict):
        kind = given.get("type")
        given = {name: one for name, one in given.items() if name not in _IGNORED_IN_ITEMS}
        if kind == "function_call_output":
            for name in ("call_id", "output"):
                if name not in given:
                    raise ValueError(f"[{index}]: {name} is missing")
            renamed = {"call_id": "tool_call_id", "output": "content"}
            given = {renamed.get(name, name): one for name, one in given.items()}
            given, roles = {**given, "role": "tool"}, ("tool",)
        elif kind not in (None, "message"):
            raise ValueError(
                f"[{index}]: items of the types message, function_call and function_call_output "
                "alone are supported"
            )
    return _message(given, index, roles, ("input_text", "output_text"))


def _metadata(value: object) -> Mapping[str, str]:
    """Returns texts by name, within OpenAI's limits: a stream repeats them in several events."""
    if not isinstance(value, dict) or len(value) > _MOST_METADATA:
        raise ValueError(f"must be an object of {_MOST_METADATA} texts at most")
    found = {_text(name): _text(one) for name, one in value.items()}
    if any(len(text) > _LONGEST_METADATA for pair in found.items() for text in pair):
        raise ValueError(f"must hold texts of {_LONGEST_METADATA} characters at most")
    return found


def _message(
    given: object, index: int, roles: Sequence[str], kinds_of_parts: tuple[str, ...] = ("text",)
) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise ValueError(f"[{index}] must be an object with a role and a content")
    role = given.get("role")
    if not isinstance(role, str) or role not in roles:
        raise ValueError(f"[{index}]: role must be one of {', '.join(roles)}")
    message: dict[str, Any] = {"role": _ROLES.get(role, role)}
    readers: dict[str, Callable[[object], object]] = dict.fromkeys(_TEXTS_IN_MESSAGES, _text)
    if "tool" in roles and role == "assistant":
        readers["tool_calls"] = _tool_calls
    elif role == "tool":
        readers["tool_call_id"] = _text
    for name, value in given.items():
        if value is None or name in ("role", "content", *_IGNORED_IN_MESSAGES):
            continue
        if name in readers:
            try:
                message[name] = readers[name](value)
            except ValueError as error:
                raise ValueError(f"[{index}]: {name} {error}") from None
        elif value not in ([], ""):
            known = name in _EMPTY_IN_MESSAGES
            what = "is not supported by this server" if known else "is no field of a message"
            raise ValueError(f"[{index}]: {name[:80]} {what}")
    content = given.get("content")
    if role == "tool" and "tool_call_id" not in message:
        raise ValueError(f"[{index}]: tool_call_id is missing")
    if not message.get("tool_calls", True):
        del message["tool_calls"]  # templates ask whether it is there
    if "tool_calls" in message and content is None:
        content = ""  # some templates look into it
    try:
        message["content"] = _content(content, kinds_of_parts)
    except ValueError as error:
        raise ValueError(f"[{index}]: content {error}") from None
    return message


def _content(value: object, kinds: tuple[str, ...]) -> str:
    """Returns the text of a message; parts of a list are lines, as for vLLM and llama-server.
    `kinds`: the types of parts."""
    if not isinstance(value, list):
        return _said(value)
    texts = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") not in kinds:
            raise ValueError(f"may have parts of the type {' or '.join(kinds)} alone")
        for name, one in part.items():
            known = ("type", "text", *_IGNORED_IN_MESSAGES)
            if name not in known and one not in (None, [], ""):
                raise ValueError(f"has a part with {name[:80]!r}, which is no field of a text")
        texts.append(_said(part.get("text")))
    return "\n".join(texts)


def _sampling(base: SamplingOptions, named: Mapping[str, Any]) -> SamplingOptions:
    try:
        return base.with_named(**{name: one for name, one in named.items() if one is not None})
    except InputError as error:
        words = str(error)
        name = words.split(" ", 1)[0]
        raise ApiError(400, words, param=name if name in named else None) from None


# --- answers

_OBJECTS = {
    "chat": ("chat.completion", "chat.completion.chunk"),
    "completion": ("text_completion", "text_completion"),
}


def usage_object(prompt: int, cached: int, answer: int) -> dict[str, Any]:
    """Returns OpenAI's usage object: tokens of the prompts, cached ones among them, and of the
    answers."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def answer_object(
    kind: Kind,
    head: Mapping[str, Any],
    choices: Sequence[tuple[str, Sequence[ToolCall], End]],
    usage: Mapping[str, Any],
    logprobs: Sequence[Mapping[str, Any] | None],
) -> dict[str, Any]:
    """Returns a complete answer: each choice's text and calls, how it ended, and its logprobs
    object."""
    listed = []
    for index, (text, calls, end) in enumerate(choices):
        said: dict[str, Any] = {"text": text}
        if kind == "chat":
            message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
            if calls:
                message |= {"content": text or None, "tool_calls": list(map(_call_object, calls))}
            said = {"message": message}
        listed.append(_choice(index, said, end, called=bool(calls), logprobs=logprobs[index]))
    return {**head, "object": _OBJECTS[kind][0], "choices": listed, "usage": dict(usage)}


def chunk_object(
    kind: Kind,
    head: Mapping[str, Any],
    index: int,
    text: str,
    *,
    first: bool = False,
    end: End | None = None,
    called: bool = False,
    logprobs: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns one chunk of a streamed answer.  `called`: the answer has calls of tools."""
    said: dict[str, Any] = {"text": text}
    if kind == "chat":
        delta = {"role": "assistant", "content": text} if first else {"content": text}
        said = {"delta": delta if text or first or logprobs else {}}
    choice = _choice(index, said, end, called=called, logprobs=logprobs)
    return {**head, "object": _OBJECTS[kind][1], "choices": [choice]}


def call_chunks(
    head: Mapping[str, Any], index: int, number: int, call: ToolCall
) -> list[dict[str, Any]]:
    """Returns the chunks of call `number` of a streamed answer: its name first, then its
    arguments."""
    whole = _call_object(call)
    begun = {**whole, "function": {**whole["function"], "arguments": ""}}
    return [
        {
            **head,
            "object": _OBJECTS["chat"][1],
            "choices": [
                _choice(index, {"delta": {"tool_calls": [{"index": number, **one}]}}, None)
            ],
        }
        for one in (begun, {"function": {"arguments": call.arguments}})
    ]


def _call_object(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _choice(
    index: int,
    said: Mapping[str, Any],
    end: End | None,
    *,
    called: bool = False,
    logprobs: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    reason = None if end is None else end.value
    if called and end is End.STOP:
        reason = "tool_calls"
    return {"index": index, **said, "logprobs": logprobs, "finish_reason": reason}


_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\u0085\u2028\u2029"}
"""Unicode line ends, at which some clients split an event's line; JSON escapes the ASCII ones."""


def event_text(found: Mapping[str, Any]) -> str:
    """Returns a server-sent event as text."""
    return f"data: {json.dumps(found, ensure_ascii=False).translate(_LINE_ENDS)}\n\n"


def model_object(name: str, created: int) -> dict[str, Any]:
    """Returns an item of the list of models."""
    return {"id": name, "object": "model", "created": created, "owned_by": "ostinato"}
