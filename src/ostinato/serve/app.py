"""The HTTP layer: routes, limits, and answers that are cancelled when their client disconnects.

    POST /v1/chat/completions    POST /v1/completions    POST /v1/responses
    GET /v1/models    GET /v1/models/{name}    GET /health    GET /ready    GET /metrics    GET /

Every error is an OpenAI-style error object.  All routes but /health, /ready and /, the chat page,
need an API key if the server has any.
"""

from __future__ import annotations

import asyncio
import gc
import hmac
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property, partial
from typing import Any, TypeAlias

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ostinato.errors import InputError, ModelError, NotAvailableError, OstinatoError
from ostinato.models import SamplingOptions, TokenLogprobs
from ostinato.serve.calls import (
    THINK,
    CallReader,
    ToolCall,
    ToolFormat,
    arguments_schema,
    find_format,
)
from ostinato.serve.engine import End, Job, Rejection, ServingEngine, Update
from ostinato.serve.grammar import Grammar, GrammarCompiler
from ostinato.serve.logprobs import CompletionLogprobs, chat_logprobs, joined
from ostinato.serve.metrics import CONTENT_TYPE, Metrics
from ostinato.serve.page import page_response
from ostinato.serve.protocol import (
    ApiError,
    Chat,
    CompletionRequest,
    Kind,
    Prompt,
    WantedGrammar,
    answer_object,
    call_chunks,
    chunk_object,
    event_text,
    fault,
    model_object,
    parse_json,
    read_request,
    usage_object,
)
from ostinato.serve.responses import ResponseWriter

Handler: TypeAlias = Callable[[Request], Awaitable[Response]]
RequestLog: TypeAlias = Callable[[Mapping[str, object]], object]
_News: TypeAlias = dict[int, tuple[list[str | ToolCall], End | None]]
"""News of answers, by their indices: texts and calls, and how the answer ended."""

_BEGAN = "ostinato.began"
"""The key in a request's scope for the time of its beginning, by `time.monotonic`."""

_BODY_SECONDS = 60.0
"""Time within which the body of a request must arrive."""
_SMALL_BODY = 64 << 10
"""Largest body, in bytes, that is parsed on the event loop's thread: a millisecond's work.  Larger
ones are parsed on another thread, one at a time, so streams and small requests do not wait for
them."""
_MOST_BRACKETS = 1 << 17
"""Opening brackets that a body of 4 MiB may have, in text too; larger bodies in proportion.  A
million arrays would keep Python's parser, and all threads, busy for some tenths of a second."""
_REST = 4.0
"""Time between the parsing of two large bodies, in units of the first one's: Python's parser keeps
all other threads waiting."""
_SMALL_BYTES = 16 << 20
"""Bytes that all small bodies may take together; a request beyond it is refused."""
_LARGE_BYTES = 64 << 20
"""Bytes that all large bodies may take together; a request beyond it waits."""
_COMMENT_SECONDS = 5.0
"""Interval of the comments in a stream that has no event: proxies cut silent connections."""
_STATISTICS_SECONDS = 2.0
_EVENT_STREAM = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-store",
    "x-accel-buffering": "no",
}
_KEY_HEADERS = ("x-api-key", "api-key")
"""Headers in which clients of other services send a key, besides Authorization."""
_CHARACTERS_PER_TOKEN = 64
"""Characters per token beyond which a prompt is refused before it is tokenized: it cannot fit the
context, and tokenizing it would block other requests for seconds.  A token of text has 3 to 5."""
_TOKENS_OF_THINK = 16
"""Tokens at the end of a prompt that hold the word which begins the reasoning, and white space."""
_PROMPT_FIELDS: dict[Kind, str] = {"chat": "messages", "completion": "prompt", "response": "input"}
_ID_PREFIXES: dict[Kind, str] = {"chat": "chatcmpl-", "completion": "cmpl-", "response": "resp_"}
_REFUSALS = {
    Rejection.FULL: (429, "the server is full: try again", "rate_limit_error", "queue_full"),
    Rejection.STOPPING: (503, "the server is stopping", "server_error", "stopping"),
    Rejection.FAILED: (503, "the server has failed and ends", "server_error", "failed"),
}
_ENDS = {
    End.DEADLINE: (504, "the answer was not complete in time", "timeout_error", "deadline"),
    End.FAILED: (500, "the answer failed", "server_error", "failed"),
    End.CANCELLED: (503, "the server is stopping", "server_error", "stopping"),
}


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits of one request.  `body_bytes`: largest body.  `max_tokens`: largest answer, in tokens;
    None for the rest of the context.  `choices`: most answers that one request may ask for."""

    body_bytes: int = 4 << 20
    max_tokens: int | None = None
    choices: int = 16


@dataclass(eq=False)
class Service:
    """State that the routes share.  `model`: the name by which clients request the model.
    `sampling`: defaults for fields that a request leaves out.  `keys`: accepted API keys; empty for
    no check.  `hosts`: accepted names in the Host header; empty for any.  `log`: is given the facts
    of each request once it was answered; it must not block."""

    engine: ServingEngine
    metrics: Metrics
    model: str
    sampling: SamplingOptions
    keys: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    limits: HttpLimits = field(default_factory=HttpLimits)
    log: RequestLog | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    _being_made: int = 0
    """Jobs of requests whose prompts are being tokenized; used on the event loop's thread only."""
    _small: int = 0
    """Bytes of small bodies that are held now."""
    _arriving: set[asyncio.Timeout] = field(default_factory=set)
    """Timeouts of the bodies that are still arriving."""

    def __post_init__(self) -> None:
        self._large = _Room(max(_LARGE_BYTES, self.limits.body_bytes), self.engine.most)
        self._one_large = asyncio.Lock()
        # One thread, as each one keeps the memory of its largest body.
        self._large_reader = ThreadPoolExecutor(1, "large bodies")

    # --- routes that generate
    async def answer(self, kind: Kind, request: Request) -> Response:
        given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if given != "application/json":
            # A web page may send other content types to any address without a CORS preflight
            # request.
            raise ApiError(415, "the content type must be application/json")
        coding = request.headers.get("content-encoding", "identity").strip().lower()
        if coding != "identity":
            raise ApiError(
                415, f"the content encoding {coding[:50]!r} is not read: send plain JSON"
            )
        refused = self.engine.refuses(1, self._being_made)  # before any work is done for it
        if refused is not None:
            raise _refusal(refused)
        async with AsyncExitStack() as held:
            body = await self._body(request, held)
            if len(body) > _SMALL_BODY:
                await self._one_large.acquire()
                loop, began = asyncio.get_running_loop(), time.monotonic()
                try:
                    wanted = await loop.run_in_executor(
                        self._large_reader, self._read_large, body, kind
                    )
                finally:
                    rest = _REST * (time.monotonic() - began)
                    held.callback(loop.call_later, rest, self._one_large.release)
            else:
                wanted = read_request(parse_json(body), kind, self.sampling)
            if wanted.model != self.model:
                raise _no_model(wanted.model)
            most = min(self.limits.choices, self.engine.most)  # the engine never has room for more
            if len(wanted.prompts) * wanted.n > most:
                raise ApiError(400, f"{most} answers at most in one request", param="n")
            jobs = await self._made(wanted)
        inbox = _Inbox()
        listeners = [partial(inbox.put, index) for index in range(len(jobs))]
        try:
            numbers = self.engine.submit(jobs, listeners)
        except InputError as error:
            raise ApiError(400, str(error), param="stop") from None
        if isinstance(numbers, Rejection):
            raise _refusal(numbers)
        answering = _Responding if kind == "response" else _Answering
        return answering(self, wanted, jobs, numbers, inbox)

    def _read_large(self, body: bytes, kind: Kind) -> CompletionRequest:
        """Reads a request without the garbage collector, which would visit all its values again and
        again, and is ten times as slow as the parser."""
        most = max(_MOST_BRACKETS, len(body) // 32)
        if body.count(b"[") + body.count(b"{") > most:
            raise ApiError(400, f"the body has more than {most} opening brackets")
        collects = gc.isenabled()
        gc.disable()
        try:
            return read_request(parse_json(body), kind, self.sampling)
        finally:
            if collects:
                gc.enable()

    async def _made(self, wanted: CompletionRequest) -> list[Job]:
        """Returns the jobs of a request, tokenized on another thread.  Raises ApiError before that
        work if the engine has no room.  Jobs that are being tokenized count towards the room."""
        count = len(wanted.prompts) * wanted.n
        refused = self.engine.refuses(count, self._being_made)
        if refused is not None:
            raise _refusal(refused)
        self._being_made += count
        try:
            return await asyncio.to_thread(self._jobs, wanted)
        finally:
            self._being_made -= count

    async def _body(self, request: Request, held: AsyncExitStack) -> bytes:
        """Returns the body of a request; its bytes count towards the limits until `held` exits.
        Raises ApiError if it is too large or too slow, or if small bodies hold too many bytes
        together."""
        limit = self.limits.body_bytes
        too_large = ApiError(413, f"the body is too large: {limit} bytes at most")
        announced = request.headers.get("content-length", "")
        size = int(announced) if announced.isdecimal() else 0
        if size > limit:
            raise too_large
        body = bytearray()
        counted = 0

        def uncount() -> None:
            self._small -= counted

        held.callback(uncount)
        try:
            async with asyncio.timeout(_BODY_SECONDS) as patience, AsyncExitStack() as arriving:
                self._arriving.add(patience)
                arriving.callback(self._arriving.discard, patience)
                small = size <= _SMALL_BODY
                if not small:
                    await self._large.take(size, held)
                async for piece in request.stream():
                    if len(body) + len(piece) > limit:
                        raise too_large
                    if small and len(body) + len(piece) > _SMALL_BODY:
                        small = False
                        await self._large.take(limit, held)
                    if small:
                        if self._small + len(piece) > _SMALL_BYTES:
                            raise _refusal(Rejection.FULL)
                        self._small += len(piece)
                        counted += len(piece)
                    body += piece
        except TimeoutError:
            if self.engine.stopping:
                raise _refusal(Rejection.STOPPING) from None
            raise ApiError(408, "the body did not arrive in time") from None
        return bytes(body)

    def take_no_more_bodies(self) -> None:
        """Ends the wait for bodies that are still arriving; those requests get 503."""
        for patience in self._arriving:
            if not patience.expired():
                patience.reschedule(0.0)

    def _jobs(self, wanted: CompletionRequest) -> list[Job]:
        """Returns one job for each answer.  Slow: runs the chat template and the tokenizer."""
        decoder = self.engine.generator.decoder
        context, vocabulary = decoder.plan.sizes.context, decoder.config.vocabulary
        what = _PROMPT_FIELDS[wanted.kind]
        jobs: list[Job] = []
        kept = self._with_calls(wanted)
        for token, _ in wanted.sampling.logit_bias:
            if token >= vocabulary:
                words = f"logit_bias: there are token ids 0 to {vocabulary - 1} only"
                raise ApiError(400, words, param="logit_bias")
        for prompt in wanted.prompts:
            if _size(prompt) > context * _CHARACTERS_PER_TOKEN:
                raise ApiError(
                    400,
                    f"the {what} is longer than {context * _CHARACTERS_PER_TOKEN} characters, too "
                    f"much for the context of {context} tokens",
                    param=what,
                    code="context_length_exceeded",
                )
            shown = self._shown(prompt) if isinstance(prompt, Chat) else frozenset[int]()
            try:
                tokens = self._tokens(prompt)
            except (InputError, ModelError) as error:  # such as a template that refuses
                raise ApiError(400, str(error), param=what) from None
            if not all(0 <= token < vocabulary for token in tokens):
                raise ApiError(400, f"there are token ids 0 to {vocabulary - 1} only", param=what)
            if not tokens:
                raise ApiError(400, "the prompt is empty: it has no tokens", param=what)
            if len(tokens) > context:
                raise ApiError(
                    400,
                    f"the prompt has {len(tokens)} tokens, more than the context of {context}",
                    param=what,
                    code="context_length_exceeded",
                )
            if wanted.echo_logprobs:
                ends = {*tokens[1:]} & {*decoder.stop_tokens}
                if ends:
                    raise ApiError(
                        400,
                        f"the prompt has the end token {min(ends)}, at which its log probabilities "
                        "would end; leave it out, or ask for no logprobs of it (echo)",
                        param="echo",
                    )
            most = self._max_tokens(wanted, context + 1 - len(tokens))
            for _ in range(wanted.n):
                sampling = wanted.sampling_of(len(jobs), partial(secrets.randbits, 63))
                continues = not isinstance(prompt, Chat) or prompt.continue_last
                grammar = self._grammar(kept)
                jobs.append(
                    Job(
                        tokens,
                        most,
                        sampling,
                        wanted.stop,
                        # A grammar's text is kept to the byte.
                        continues or wanted.grammar is not None,
                        shown,
                        wanted.logprobs,
                        wanted.echo_logprobs,
                        grammar,
                    )
                )
        return jobs

    def _with_calls(self, wanted: CompletionRequest) -> WantedGrammar | None:
        """Returns the grammar of an answer: that of the request, and that of calls where their
        arguments must match a schema, or where the answer may be a call in place of what the
        request's grammar says."""
        chat, given = wanted.prompts[0], wanted.grammar
        if not isinstance(chat, Chat) or not chat.tools:
            return given
        if not (given or chat.forced or chat.strict):
            return None
        param = "tool_choice" if chat.forced else given.param if given else "tools"
        answer = None
        if given and given.kind == "json_schema":
            with suppress(ValueError, RecursionError):
                answer = json.loads(given.text)
        if given and not isinstance(answer, dict):
            raise fault(given.param, "must be a JSON schema, an object, where there are tools")
        shown = self._shown(chat)
        assert self.tool_format is not None, "or there were no words to show"
        tokenizer = self.engine.generator.tokenizer
        functions = {one["function"]["name"]: one["function"] for one in chat.tools}
        bound = chat.forced or chat.strict
        try:
            schemas = {
                name: arguments_schema(one) if name in bound else {"type": "object"}
                for name, one in functions.items()
                if name in (chat.forced or functions)
            }
        except InputError as error:
            raise ApiError(400, str(error), param="tools") from None
        text = self.tool_format.grammar(
            schemas,
            {str(tokenizer.token_text(token)): token for token in shown},
            one=chat.one_call,
            free=not chat.forced,
            answer=answer,
        )
        return WantedGrammar(param, "lark", text)

    def _grammar(self, wanted: WantedGrammar | None) -> Grammar | None:
        if wanted is None:
            return None
        try:
            return self._grammars.compile(wanted.kind, wanted.text)
        except (InputError, NotAvailableError) as error:
            raise ApiError(400, f"{wanted.param}: {error}", param=wanted.param) from None

    @cached_property
    def _grammars(self) -> GrammarCompiler:
        generator = self.engine.generator
        decoder = generator.decoder
        return GrammarCompiler(generator.tokenizer, decoder.config.vocabulary, decoder.stop_tokens)

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        """The format of calls of tools; None if the model's chat template has none that is known.
        Slow at first: renders the template."""
        generator = self.engine.generator
        ends = map(generator.tokenizer.token_text, generator.tokenizer.eos_ids)
        return find_format(generator.chat_template.render, [text for text in ends if text])

    def _shown(self, chat: Chat) -> frozenset[int]:
        """Returns the special tokens that mark calls of tools.  Raises ApiError if the chat has
        tools, but not the model."""
        if not chat.uses_tools:
            return frozenset()
        if self.tool_format is None:
            raise fault(
                "tools",
                "cannot be used: the chat template of this model has none, or writes calls in a "
                "format that this server does not know",
                "unsupported_parameter",
            )
        tokenizer, words = self.engine.generator.tokenizer, self.tool_format.words
        return frozenset(one for one in tokenizer.special_ids if tokenizer.token_text(one) in words)

    def _tokens(self, prompt: Prompt) -> tuple[int, ...]:
        generator = self.engine.generator
        if isinstance(prompt, Chat):
            tools = {"tools": prompt.tools} if prompt.tools else {}
            return tuple(
                generator.encode(
                    prompt.messages,
                    template_args={**prompt.template_args, **tools},
                    continue_last=prompt.continue_last,
                )
            )
        return tuple(generator.encode(prompt, chat=False)) if isinstance(prompt, str) else prompt

    def _max_tokens(self, wanted: CompletionRequest, room: int) -> int:
        limit = self.limits.max_tokens
        if wanted.max_tokens is None:
            return room if limit is None else min(limit, room)
        if limit is not None and wanted.max_tokens > limit:
            name = "max_output_tokens" if wanted.kind == "response" else "max_tokens"
            raise ApiError(400, f"{name}: this server gives {limit} at most", param=name)
        return min(wanted.max_tokens, room)

    # --- routes that inform
    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [model_object(self.model, self.created)]})

    async def one_model(self, request: Request) -> Response:
        if request.path_params["name"] != self.model:
            raise _no_model(request.path_params["name"])
        return JSONResponse(model_object(self.model, self.created))

    async def chat_page(self, request: Request) -> Response:
        return page_response()

    async def health(self, request: Request) -> Response:
        """Liveness: 503 after the engine failed, so that a supervisor restarts the process."""
        failure = self.engine.failure
        if failure is None:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "failed", "reason": str(failure)}, 503)

    async def ready(self, request: Request) -> Response:
        """Readiness: 503 unless requests can be answered now."""
        engine = self.engine
        if engine.failure is not None or engine.stopping:
            return JSONResponse({"status": "failed" if engine.failure else "stopping"}, 503)
        if not engine.ready:
            return JSONResponse({"status": "starting"}, 503)
        return JSONResponse({"status": "ready"})

    async def show_metrics(self, request: Request) -> Response:
        with suppress(TimeoutError, OstinatoError):  # the engine may be busy with its warm-up
            async with asyncio.timeout(_STATISTICS_SECONDS):
                self.metrics.layers = await asyncio.wrap_future(self.engine.statistics())
        text = await asyncio.to_thread(self.metrics.text)
        return Response(text, media_type=CONTENT_TYPE)

    def note(self, scope: Scope, path: str, status: int, **more: object) -> None:
        """Counts an answered request, and logs it.  `path`: the pattern of its route; empty if it
        has none."""
        self.metrics.request(path, status)
        if self.log is not None:
            client, now = scope["client"], time.monotonic()
            facts = {
                "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "client": client[0] if client else "",
                "method": scope["method"],
                "path": scope["path"][:200],
                "status": status,
                "seconds": round(now - scope.get(_BEGAN, now), 3),
            }
            self.log(facts | more)

    # --- checks around each request
    def guarded(self, handler: Handler, path: str, *, open_to_all: bool) -> Handler:
        """Wraps a handler with the checks of host and API key, and counts the response."""

        async def handle(request: Request) -> Response:
            request.scope[_BEGAN] = time.monotonic()
            try:
                self._require_host(request)
                if not open_to_all:
                    self._require_key(request)
                response = await handler(request)
            except ApiError as error:
                response = _error_response(error)
            except ClientDisconnect:
                response = Response(status_code=499)  # the client has disconnected
            if not isinstance(response, _Answering):
                self.note(request.scope, path, response.status_code)
            return response

        return handle

    def _require_host(self, request: Request) -> None:
        """Raises ApiError unless the Host header names this server: a web page can make its own
        name resolve to this machine (DNS rebinding), and its requests then carry that name."""
        name = request.headers.get("host", "")
        name = name if name.endswith("]") else name.rpartition(":")[0] or name
        if self.hosts and name.lower() not in self.hosts:
            raise ApiError(
                403,
                f"this server answers at {self.hosts[0]} alone, and not as {name[:200]!r}; with a "
                "key (--api-key) it answers by any name",
                code="wrong_host",
            )

    def _require_key(self, request: Request) -> None:
        if not self.keys:
            return
        headers = request.headers
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = [bearer] if scheme.lower() == "bearer" else []
        given += [headers[name] for name in _KEY_HEADERS if name in headers]
        found = [one.strip().encode("latin-1") for one in given]  # the bytes as they were sent
        right = [hmac.compare_digest(one, key.encode()) for one in found for key in self.keys]
        if not any(right):
            raise ApiError(
                401,
                "a key is needed: Authorization: Bearer …, or x-api-key: …",
                kind="authentication_error",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )


def make_app(
    service: Service,
    lifespan: Callable[[Starlette], AbstractAsyncContextManager[None]],
    origins: Sequence[str] = (),
) -> Starlette:
    """Returns the ASGI application.  `lifespan`: makes a context manager around it.  `origins`:
    those whose web pages may use it, "*" for all."""

    def route(path: str, handler: Handler, method: str, *, open_to_all: bool = False) -> Route:
        guarded = service.guarded(handler, path, open_to_all=open_to_all)
        return Route(path, guarded, methods=[method])

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path[:200]}: {error.detail}"
        service.note(request.scope, "", error.status_code)
        return _error_response(ApiError(error.status_code, message, headers=error.headers))

    async def failed(request: Request, error: Exception) -> Response:
        service.note(request.scope, "", 500)
        return _error_response(
            ApiError(500, "an error of the server; its log says more", kind="server_error")
        )

    app = Starlette(
        routes=[
            route("/v1/chat/completions", partial(service.answer, "chat"), "POST"),
            route("/v1/completions", partial(service.answer, "completion"), "POST"),
            route("/v1/responses", partial(service.answer, "response"), "POST"),
            route("/v1/models", service.models, "GET"),
            route("/v1/models/{name:path}", service.one_model, "GET"),
            route("/metrics", service.show_metrics, "GET"),
            route("/", service.chat_page, "GET", open_to_all=True),
            route("/health", service.health, "GET", open_to_all=True),
            route("/ready", service.ready, "GET", open_to_all=True),
        ],
        exception_handlers={HTTPException: refused, Exception: failed},
        lifespan=lifespan,
    )
    if origins:
        headers = ["authorization", "content-type", *_KEY_HEADERS]
        options: dict[str, Any] = {"allow_methods": ["GET", "POST"], "allow_headers": headers}
        app.add_middleware(CORSMiddleware, allow_origins=origins, **options)
    # A path with a trailing slash is another path.  Starlette would redirect it to the host that
    # the request names, before the host and the key are checked.
    app.router.redirect_slashes = False
    return app


def _size(prompt: Prompt) -> int:
    """Returns the characters of a prompt; each message counts as at least one token's worth."""
    if isinstance(prompt, Chat):
        # Names count too: some templates write them.
        sizes = (
            sum(_length(value) for name, value in one.items() if name != "role")
            for one in prompt.messages
        )
        given = sum(_length(one) for one in (prompt.template_args, prompt.tools) if one)
        return given + sum(max(size, _CHARACTERS_PER_TOKEN) for size in sizes)
    return len(prompt) if isinstance(prompt, str) else 0


def _length(value: object) -> int:
    return len(value if isinstance(value, str) else json.dumps(value))


def _error_response(error: ApiError) -> Response:
    # In ASCII: a name sent by a client may hold a lone surrogate, which UTF-8 cannot encode.
    body = json.dumps(error.body())
    return Response(body, error.status, error.headers, "application/json")


def _no_model(name: str) -> ApiError:
    words = f"there is no model {name[:200]!r} here; GET /v1/models lists what there is"
    return ApiError(404, words, param="model", code="model_not_found")


def _refusal(refused: Rejection) -> ApiError:
    status, words, kind, code = _REFUSALS[refused]
    headers = {"retry-after": "1"} if refused is Rejection.FULL else {"connection": "close"}
    return ApiError(status, words, kind=kind, code=code, headers=headers)


def _ended(update: Update) -> ApiError:
    assert update.end is not None
    status, words, kind, code = _ENDS[update.end]
    return ApiError(
        status, f"{words}: {update.words}" if update.words else words, kind=kind, code=code
    )


class _Room:
    """A budget of bytes, given out in order of arrival.  `most`: largest number of waiters."""

    def __init__(self, size: int, most: int) -> None:
        self.size = self.free = size
        self.waiting, self._most = 0, most
        self._turn, self._given = asyncio.Lock(), asyncio.Event()

    async def take(self, size: int, held: AsyncExitStack) -> None:
        """Takes `size` bytes until `held` exits.  Raises ApiError if too many wait already."""
        if self.waiting >= self._most:
            raise _refusal(Rejection.FULL)
        self.waiting += 1
        try:
            async with self._turn:
                while self.free < size:
                    self._given.clear()
                    await self._given.wait()
                self.free -= size
        finally:
            self.waiting -= 1
        held.callback(self._give, size)

    def _give(self, size: int) -> None:
        self.free += size
        self._given.set()


class _ClientGoneError(Exception):
    """The client of this answer has disconnected."""


class _Inbox:
    """The updates of a request's answers, put and taken on the event loop's thread."""

    def __init__(self) -> None:
        self._new: dict[int, Update] = {}
        self._something = asyncio.Event()
        self._gone = False

    def put(self, index: int, update: Update) -> None:
        self._new[index] = self._new.get(index, Update()) + update
        self._something.set()

    def leave(self) -> None:
        """Makes `take` raise: the client has disconnected."""
        self._gone = True
        self._something.set()

    async def take(self, seconds: float | None = None) -> dict[int, Update]:
        """Waits for updates and returns those since the last call, by index of the answer; empty if
        none came within `seconds`.  Raises _ClientGoneError."""
        try:
            async with asyncio.timeout(seconds):
                await self._something.wait()
        except TimeoutError:
            return {}
        if self._gone:
            raise _ClientGoneError
        self._something.clear()
        new, self._new = self._new, {}
        return new


class _Answering(Response):
    """The response that waits for the answers to a request and sends them, whole or as a stream.

    However the response ends, the engine stops work on its answers.
    """

    def __init__(
        self,
        service: Service,
        wanted: CompletionRequest,
        jobs: Sequence[Job],
        numbers: tuple[int, ...],
        inbox: _Inbox,
    ) -> None:
        super().__init__()
        self._service, self._wanted, self._jobs = service, wanted, jobs
        self._numbers, self._inbox = numbers, inbox
        self._answers = [Update() for _ in jobs]
        self._open = len(jobs)
        self._readers: list[CallReader] = []
        self._calls: list[list[ToolCall]] = [[] for _ in jobs]
        chat = wanted.prompts[0]
        if isinstance(chat, Chat) and chat.tools:
            assert service.tool_format is not None, "the jobs were made"
            names = {tool["function"]["name"] for tool in chat.tools}
            # Some templates begin the reasoning; an answer that must be a call has none.
            end = service.engine.generator.tokenizer.decode(
                jobs[0].tokens[-_TOKENS_OF_THINK:], skip_special=False
            )
            thinks = not chat.forced and end.rstrip().endswith(THINK)
            read = partial(CallReader, service.tool_format, names, one=chat.one_call, thinks=thinks)
            self._readers = [read() for _ in jobs]
        self._begun: dict[int, CompletionLogprobs] = {}
        """The answers of which `_more` was asked, by index."""
        self._fresh: dict[int, tuple[TokenLogprobs, ...]] = {}
        """The log probabilities of which `_more` was not asked yet, by index."""
        self._status = 499
        self._head = {
            "id": _ID_PREFIXES[wanted.kind] + secrets.token_hex(12),
            "created": int(time.time()),
            "model": service.model,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(self._watch(receive))
        try:
            await (self._stream(send) if self._wanted.stream else self._whole(send))
        except _ClientGoneError:
            pass
        finally:
            watcher.cancel()
            self._service.engine.cancel(self._numbers)
            usage = self._usage()
            tokens = {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}
            self._service.note(scope, scope["route"].path, self._status, **tokens)

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._inbox.leave()

    async def _take(self, seconds: float | None = None) -> _News:
        """Returns what is new by index of the answer: texts and calls, and its end.  Raises
        ApiError if an answer failed."""
        found: _News = {}
        for index, update in (await self._inbox.take(seconds)).items():
            if self._answers[index].end is not None:
                continue  # its only call ended it
            if update.end in _ENDS:
                raise _ended(update)
            pieces: list[str | ToolCall] = [update.text] if update.text else []
            if self._readers:
                reader = self._readers[index]
                pieces = reader.push(update.text, last=update.end is not None)
                text = "".join(one for one in pieces if isinstance(one, str))
                update = replace(update, text=text, end=End.STOP if reader.over else update.end)
                self._calls[index] += [one for one in pieces if isinstance(one, ToolCall)]
                if reader.over:
                    self._service.engine.cancel(self._numbers[index : index + 1])
            self._fresh[index] = self._fresh.get(index, ()) + update.logprobs
            self._answers[index] = self._answers[index] + update
            self._open -= update.end is not None
            found[index] = pieces, update.end
        return found

    def _usage(self) -> dict[str, Any]:
        prompts = self._jobs[:: self._wanted.n]  # each prompt counts once, as OpenAI's API does
        return usage_object(
            sum(len(job.tokens) for job in prompts),
            sum(update.cached for update in self._answers[:: self._wanted.n]),
            sum(update.tokens for update in self._answers),
        )

    async def _whole(self, send: Send) -> None:
        try:
            while self._open:
                await self._take()
        except ApiError as error:
            await self._json(send, error.status, error.body(), error.headers)
            return
        await self._json(send, 200, self._found(), {})

    def _found(self) -> dict[str, Any]:
        more = [self._more(index) for index in range(len(self._answers))]
        choices = [
            (lead + update.text, calls, update.end or End.STOP)
            for (lead, _), update, calls in zip(more, self._answers, self._calls, strict=True)
        ]
        logprobs = [found for _, found in more]
        return answer_object(self._wanted.kind, self._head, choices, self._usage(), logprobs)

    def _more(self, index: int) -> tuple[str, dict[str, Any] | None]:
        """Returns the text before what is new of an answer, the prompt where that is to be echoed,
        and the logprobs object of its new tokens."""
        wanted, job = self._wanted, self._jobs[index]
        tokenizer = self._service.engine.generator.tokenizer
        lead, found, first = "", self._fresh.pop(index, ()), index not in self._begun
        if first:
            self._begun[index] = CompletionLogprobs(tokenizer, continues=not wanted.echo)
            if wanted.echo:
                prompt = wanted.prompts[index // wanted.n]
                lead = prompt if isinstance(prompt, str) else tokenizer.decode(job.tokens)
        if wanted.logprobs is None or not (found or (first and wanted.echo)):
            return lead, None
        if wanted.kind == "chat":
            return lead, chat_logprobs(tokenizer, found)
        more = self._begun[index].begin(job.tokens[0]) if first and wanted.echo else None
        rest = self._begun[index].more(found)
        return lead, rest if more is None else joined(more, rest)

    async def _stream(self, send: Send) -> None:
        """Streams the answers.  The status is sent first, so later errors are events."""
        await self._start(send, 200, _EVENT_STREAM)
        if first := self._first_events():
            await self._send(send, first.encode(), more=True)
        sent = time.monotonic()
        try:
            while self._open:
                new = await self._take(_COMMENT_SECONDS)
                events = self._new_events(new)  # none for text that may become a call
                if not events and (not new or time.monotonic() - sent >= _COMMENT_SECONDS):
                    events = ": waiting\n\n"
                if events:
                    await self._send(send, events.encode(), more=True)
                    sent = time.monotonic()
            events = self._last_events()
        except ApiError as error:
            self._status = error.status
            events = self._error_events(error)
        await self._send(send, events.encode(), more=False)

    def _first_events(self) -> str:
        return ""

    def _new_events(self, new: _News) -> str:
        kind = self._wanted.kind
        events: list[Mapping[str, Any]] = []
        for index, (pieces, end) in new.items():
            first = kind == "chat" and index not in self._begun
            lead, logprobs = self._more(index)
            if lead:
                pieces = [lead, *pieces]
            if (first or logprobs) and not (pieces and isinstance(pieces[0], str)):
                pieces = ["", *pieces]
            make = partial(chunk_object, kind, self._head, index)
            calls = self._calls[index]
            for piece in pieces:
                if isinstance(piece, str):
                    events.append(make(piece, first=first, logprobs=logprobs))
                    first, logprobs = False, None
                else:
                    events += call_chunks(self._head, index, calls.index(piece), piece)
            if end is not None:
                events.append(make("", end=end, called=bool(calls)))
        if self._wanted.usage:  # then each event has the field, as OpenAI's do
            events = [{"usage": None, **event} for event in events]
        return "".join(map(event_text, events))

    def _last_events(self) -> str:
        done = "data: [DONE]\n\n"
        if not self._wanted.usage:
            return done
        usage = {**chunk_object(self._wanted.kind, self._head, 0, ""), "choices": []}
        return event_text({**usage, "usage": self._usage()}) + done

    def _error_events(self, error: ApiError) -> str:
        return event_text(error.body())

    async def _json(
        self, send: Send, status: int, found: Mapping[str, Any], headers: Mapping[str, str]
    ) -> None:
        body = json.dumps(found, ensure_ascii=False).encode()
        sizes = {"content-type": "application/json", "content-length": str(len(body))}
        await self._start(send, status, {**headers, **sizes})
        await self._send(send, body, more=False)

    async def _start(self, send: Send, status: int, headers: Mapping[str, str]) -> None:
        self._status = status
        listed = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": listed})

    async def _send(self, send: Send, body: bytes, *, more: bool) -> None:
        await send({"type": "http.response.body", "body": body, "more_body": more})


class _Responding(_Answering):
    """The response of the endpoint of that name, which has one answer and events of its own."""

    @cached_property
    def _pieces(self) -> list[str | ToolCall]:
        """Texts and calls that are not written yet."""
        return []

    @cached_property
    def _writer(self) -> ResponseWriter:
        return ResponseWriter(self._wanted, self._head)

    async def _take(self, seconds: float | None = None) -> _News:
        new = await super()._take(seconds)
        self._pieces += [piece for pieces, _ in new.values() for piece in pieces]
        return new

    def _found(self) -> dict[str, Any]:
        return self._writer.answer(self._pieces, self._answers[0].end or End.STOP, self._usage())

    def _first_events(self) -> str:
        return self._writer.begin()

    def _new_events(self, new: _News) -> str:
        events = "".join(map(self._writer.more, self._pieces))
        self._pieces.clear()
        return events

    def _last_events(self) -> str:
        return self._writer.end(self._answers[0].end or End.STOP, self._usage())

    def _error_events(self, error: ApiError) -> str:
        return self._writer.fail(error)
