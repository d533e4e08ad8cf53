"""`ostinato serve`: a model behind OpenAI's chat, completion and response endpoints."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from ostinato.cli import arguments
from ostinato.cli.plain import plain, say
from ostinato.cli.ranks import following_ranks, rank_devices, rank_threads
from ostinato.cli.speaker import advised_options, speaker
from ostinato.models.extra import require_extra

_MOST_KEYS = 1 << 20  # bytes of a file of keys
_ORIGIN = re.compile(r"\*|https?://[^/\s]+")


class LogForm(StrEnum):
    """The form of the lines about requests."""

    text = "text"
    json = "json"


def serve(
    model: arguments.ModelName = "smollm2-135m",
    host: Annotated[
        str,
        typer.Option(
            callback=arguments.text,
            help="The address to listen at; by default only this machine can reach it.",
        ),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 for any that is free.")] = 8000,
    slots: Annotated[
        int, typer.Option(min=1, help="Answers that are computed at once, in one batch.")
    ] = 8,
    queue: Annotated[
        int, typer.Option(min=0, help="Requests that may wait for a slot; more get status 429.")
    ] = 64,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            "-n",
            min=1,
            help="The most tokens of an answer.  By default what the context has room for.",
            show_default=False,
        ),
    ] = None,
    max_context: arguments.MaxContext = None,
    max_body: Annotated[
        int, typer.Option(min=1, help="Bytes of one request at most; larger ones get status 413.")
    ] = 4 << 20,
    max_choices: Annotated[
        int,
        typer.Option(
            min=1,
            help="Answers that one request may ask for at most (and no more than slots and queue).",
        ),
    ] = 16,
    piece: Annotated[
        int,
        typer.Option(
            min=1, help="Tokens of new prompts that are processed between two steps of the batch."
        ),
    ] = 256,
    timeout: Annotated[
        float,
        typer.Option(
            min=0, help="Seconds for one answer, including its time in the queue; 0 for no limit."
        ),
    ] = 600.0,
    grace: Annotated[
        int, typer.Option(min=0, help="Seconds for the answers under way when the server stops.")
    ] = 600,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            callback=arguments.texts,
            help="Clients must have this key; may be given several times.  Other users of this "
            "machine can see it: rather use a file.",
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(callback=arguments.expanded, help="A file with such keys, one a line."),
    ] = None,
    cors: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            callback=arguments.texts,
            help="Web pages of this origin (https://app.example) may use the server; may be given "
            "several times.  '*' for all pages.",
        ),
    ] = None,
    log: Annotated[
        LogForm | None,
        typer.Option(
            help="Write a line for each request to standard error, as text or as JSON. Lines that "
            "nobody reads are dropped.",
            show_default=False,
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            callback=arguments.text,
            help="What clients call the model.  By default what --model says.",
            show_default=False,
        ),
    ] = None,
    reuse: Annotated[
        bool,
        typer.Option(
            "--reuse/--no-reuse",
            help="Do not process again what a prompt has in common with earlier ones.  With "
            "--no-reuse a prompt gives the same bits whatever came before it.",
        ),
    ] = True,
    temperature: arguments.Temperature = None,
    top_k: arguments.TopK = None,
    top_p: arguments.TopP = None,
    min_p: arguments.MinP = None,
    repetition_penalty: arguments.RepetitionPenalty = None,
    device: arguments.DeviceName = None,
    threads: arguments.Threads = None,
    tensor_parallel: arguments.TensorParallel = 1,
    weights: arguments.WeightsOption = arguments.WeightsName.auto,
    lookup: arguments.Lookup = 0,
    no_graphs: arguments.NoGraphs = False,
) -> None:
    """Serve a model over HTTP, with endpoints of OpenAI's API.

    --temperature, --top-k, --top-p, --min-p and --repetition-penalty are defaults for requests that
    do not set them. Without these options the defaults are those of the model's files, or
    temperature 0.7, min-p 0.05 and repetition penalty 1.1 if the files advise nothing. A request
    with temperature 0 gets the likeliest tokens.

    Requests join and leave one batch between its steps. Under /v1 are chat/completions,
    completions, responses and models; / is a chat page for a browser, /metrics is for Prometheus,
    /health and /ready for a supervisor. SIGTERM and Ctrl-C let the answers under way finish; a
    second Ctrl-C ends the server at once.

    With --tensor-parallel this process is rank 0 and starts the others, which wait with it between
    requests. Any rank that fails, dies or is stopped (OSTINATO_GROUP_DEADLINE) ends the server with
    status 1, and requests under way with status 500. For a model that fits one GPU, one server on
    each, behind a load balancer, serves more users.
    """
    require_extra("the server", "llm,serve")
    keys = (*(api_key or ()), *_keys(api_key_file))
    if not all(key.strip() == key != "" for key in keys):
        raise typer.BadParameter("a key is text without spaces around it", param_hint="--api-key")
    for origin in cors or ():
        if not _ORIGIN.fullmatch(origin):
            raise typer.BadParameter(
                f"{origin!r} is no origin, such as https://app.example or http://localhost:3000",
                param_hint="--cors",
            )
    from ostinato.serve.app import HttpLimits
    from ostinato.serve.log import Log
    from ostinato.serve.server import ServeOptions, Server

    advised = advised_options(
        0,
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
        "sequences": slots,
        "lookup": lookup,
        "graphs": False if no_graphs else None,
    }
    listeners = Server.bind(host, port)  # finds a port in use before a model is loaded
    closing = ExitStack()
    for listener in listeners:
        closing.enter_context(listener)
    with (
        closing,
        following_ranks(devices, model, loading) as leading,
        speaker(model, device=devices[0], **loading, **leading) as generator,
    ):
        handler = Log(sys.stderr.fileno())
        options = ServeOptions(
            model=name or _name(model),
            keys=keys,
            limits=HttpLimits(max_body, max_tokens, min(max_choices, slots + queue)),
            queue=queue,
            piece=piece,
            reuse=reuse,
            seconds=timeout or None,
            grace_seconds=grace,
            sampling=advised(generator),
            origins=tuple(cors or ()),
            log=None if log is None else lambda facts: handler.note(_line(log, facts)),
        )
        server = Server(generator, options, listeners)
        if not keys and not server.local:
            words = "no key is wanted, and other machines can reach this server: see --api-key"
            say(words, stream=sys.stderr)

        logging.getLogger().addHandler(handler)

        def ready() -> None:
            context = generator.decoder.plan.sizes.context
            ranks = f"{len(devices)} ranks, " if len(devices) > 1 else ""
            handler.say(
                plain(
                    f"{options.model} is served at {server.url} by {generator.device.name}: "
                    f"{ranks}{slots} slots of {context} tokens; Ctrl-C ends it",
                    sys.stderr,
                )
            )

        try:
            server.run(ready)
        finally:
            handler.say(plain(server.summary(), sys.stderr))


def _line(form: LogForm, facts: Mapping[str, object]) -> str:
    if form is LogForm.json:
        return json.dumps(facts)
    told = [str(facts[name]) for name in ("time", "client", "method", "path", "status")]
    told.append(f"{facts['seconds']} s")
    if "prompt_tokens" in facts:
        told.append(f"{facts['prompt_tokens']} + {facts['completion_tokens']} tokens")
    return plain(" ".join(told), sys.stderr)


def _keys(file: Path | None) -> list[str]:
    """Returns a file's keys.  Raises BadParameter if it cannot be read, or has none."""
    if file is None:
        return []
    try:
        with file.open(encoding="utf-8-sig") as opened:
            text = opened.read(_MOST_KEYS + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise typer.BadParameter(f"{file}: {reason}", param_hint="--api-key-file") from None
    if len(text) > _MOST_KEYS:
        raise typer.BadParameter(
            f"{file} has more than {_MOST_KEYS} characters", param_hint="--api-key-file"
        )
    keys = [line.strip() for line in text.split("\n") if line.strip()]
    if not keys:
        raise typer.BadParameter(f"{file} has no keys", param_hint="--api-key-file")
    return keys


def _name(model: str) -> str:
    """Returns the name of a file or folder; any other text unchanged."""
    path = Path(model)
    return path.stem if path.is_file() else path.name if path.is_dir() else model
