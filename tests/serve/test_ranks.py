"""`ostinato serve --tensor-parallel`: ranks that are processes, on the host device.

Answers are those of one rank; ranks wait between requests for longer than the group's deadline; and
a rank that dies, stops or fails ends the server with its name, and every open request with an error
that has it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("ostinato.serve.server")

from ostinato import open_device
from ostinato.distributed import Group, local_groups
from ostinato.models import Decoder
from ostinato.serve.engine import ServingEngine
from tests.cli import commands
from tests.cli.test_tensor_parallel import children, until_gone
from tests.models.model_files import CONFIG, SPECIAL, weights, write_gguf
from tests.serve.serving import SECONDS, client, job, open_generator, opened, running, submit, until
from tests.serve.test_load import load, started, stream

SMALL = ("--slots", "2", "--piece", "16")
LONG: dict[str, Any] = {"model": "endless", "prompt": "ab", "max_tokens": 32000, "temperature": 0}


def write_endless(path: Path, **sizes: Any) -> Path:
    """A model whose likeliest token is never one that ends an answer: the logits of those are 0."""
    config = replace(CONFIG, context_length=1 << 15, **sizes)
    values = weights(config)
    values["embed"][: len(SPECIAL)] = 0
    return write_gguf(path, values, config=config)


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_endless(tmp_path_factory.mktemp("model") / "endless.gguf")


@contextmanager
def serving(
    model: Path, *options: str, ranks: int = 2, deadline: str = "60", **environ: str
) -> Iterator[tuple[subprocess.Popen[bytes], str, list[int]]]:
    """The server's process, its address and the other ranks' processes; at the end none is left."""
    environ |= {"OSTINATO_GROUP_DEADLINE": deadline}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environ.items():
            patch.setenv(name, value)
        process, url = started(model, *SMALL, "--tensor-parallel", str(ranks), *options)
    others = children(process.pid)
    try:
        assert len(others) == ranks - 1
        yield process, url, others
        until_gone([process.pid, *others])
    finally:
        process.kill()
        for pid in others:
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGKILL)
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()


def ended(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    _, err = process.communicate(timeout=SECONDS)
    return process.returncode, err.decode()


@pytest.mark.parametrize("lookup", [0, 3])
def test_no_request_waits_for_a_capture(tiny_model: Path, lookup: int) -> None:
    """Rows that are not greedy have steps of their own on ranks.  Ranks are threads here."""

    def rank_thread(group: Group) -> None:
        options: dict[str, Any] = {"sequences": 2, "threads": 1, "group": group, "lookup": lookup}
        with open_device("host") as device:
            if group.rank:
                with Decoder(device, tiny_model, **options) as decoder:
                    decoder.follow()
                return
            with (
                open_generator(device, tiny_model, leads=True, **options) as generator,
                ServingEngine(generator, piece=16).start() as engine,
            ):
                until(lambda: engine.ready)
                captured = generator.decoder.statistics().graphs_captured
                for some in ((0, 0, 0), (1, 1, 1), (0, 1, 0)):
                    jobs = [job(generator, "ab the", 9, temperature=float(one)) for one in some]
                    for _, answer in [submit(engine, one) for one in jobs]:
                        assert answer.wait().tokens
                assert generator.decoder.statistics().graphs_captured == captured > 0

    with local_groups(2, deadline=60) as groups:
        groups.run(rank_thread)


def with_masks(url: str) -> list[Any]:
    """Answers whose tokens masks choose, beside one without: a schema, penalties and biases too,
    and the log probabilities of a prompt."""
    api, schema = client(url), {"type": "array", "items": {"enum": ["a", "bc", 7]}, "maxItems": 9}
    shape = {"name": "some", "schema": schema}
    given: dict[str, Any] = {"model": "tiny", "max_tokens": 40, "seed": 3, "temperature": 1.5}

    def chat(**more: Any) -> str:
        messages = [{"role": "user", "content": "ab"}]
        answer = api.chat.completions.create(messages=messages, **given, **more)  # type: ignore[call-overload]
        return str(answer.choices[0].message.content)

    def echo() -> list[str]:
        answer = api.completions.create(prompt="ab the", echo=True, logprobs=1, **given)
        return [*answer.choices[0].logprobs.tokens]  # type: ignore[union-attr]

    strict = {"response_format": {"type": "json_schema", "json_schema": shape}}
    changed = {"frequency_penalty": 1.5, "presence_penalty": 0.5, "logit_bias": {"40": 9}}
    with ThreadPoolExecutor(4) as pool:
        asked = [partial(chat, **strict), partial(chat, **strict, **changed), chat, echo]
        found = [one.result() for one in [pool.submit(one) for one in asked]]
    assert all(isinstance(json.loads(text), list) for text in found[:2])
    return found


@pytest.mark.parametrize(
    ("ranks", "lookup"), [(2, "3"), pytest.param(4, "0", marks=pytest.mark.slow)]
)
def test_several_clients_at_once_get_the_answers_of_one_rank(
    tiny_model: Path, ranks: int, lookup: str
) -> None:
    """Some of them go away in the middle.  Then SIGTERM ends all ranks, with status 0."""
    asked = load(10, 24, random.Random(7))
    with opened(tiny_model) as reference:
        wanted = [one.alone(reference) for one in asked]
        with running(reference) as server:
            masked = with_masks(server.url)
    with serving(tiny_model, "--slots", "4", "--lookup", lookup, ranks=ranks) as (process, url, _):
        api = client(url)
        with ThreadPoolExecutor(len(asked)) as pool:
            found = list(pool.map(lambda one: stream(api, "tiny", one), asked))
        for one, answer, (text, end) in zip(asked, found, wanted, strict=True):
            assert answer == (None if answer is None else (text, end.value)), one
        assert sum(answer is not None for answer in found) >= len(asked) // 2
        assert with_masks(url) == masked
        process.terminate()
        status, err = ended(process)
    assert status == 0 and "0 refused" in err, err


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM]
)
def test_a_signal_loses_no_answer(endless: Path, number: signal.Signals) -> None:
    """Ctrl-C, and what a supervisor of services sends to all processes of one."""
    with serving(endless, "--max-context", "2048") as (process, url, others):
        answer = client(url).completions.create(**{**LONG, "max_tokens": 300}, stream=True)
        assert next(answer)
        for pid in others if number == signal.SIGTERM else ():
            os.kill(pid, number)
        process.send_signal(number)
        (*_, last) = answer
        assert last.choices[0].finish_reason == "length"
        status, err = ended(process)
    assert status == 0 and "1 answer begun (1 length)" in err


def metrics(url: str) -> str:
    with urllib.request.urlopen(f"{url}/metrics", timeout=SECONDS) as answer:
        return str(answer.read().decode())


def failures(url: str, process: subprocess.Popen[bytes], fault: Any) -> list[dict[str, Any]]:
    """The error objects of two open requests, a stream and a whole answer, after the fault."""

    def streamed() -> dict[str, Any]:
        try:
            with client(url).completions.create(**LONG, stream=True) as answer:
                for _ in answer:
                    pass
        except openai.APIError as error:  # the last event of the stream
            assert not isinstance(error, openai.APIConnectionError), error
            return dict(error.body)  # type: ignore[call-overload]
        raise AssertionError("an answer that was cut off looks like a whole one")

    def whole() -> dict[str, Any]:
        with pytest.raises(openai.InternalServerError) as raised:
            client(url).completions.create(**LONG)
        assert raised.value.status_code == 500
        return dict(raised.value.body)  # type: ignore[call-overload]

    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(streamed), pool.submit(whole)]
        while "ostinato_engine_under_way 2.0" not in metrics(url):
            assert process.poll() is None
            time.sleep(0.01)
        fault()
        return [answer.result(SECONDS) for answer in answers]


def test_a_rank_that_is_killed_ends_the_server_and_all_open_requests(endless: Path) -> None:
    """At once: no deadline passes."""
    with serving(endless, "--max-context", "32768", deadline="600") as (process, url, others):
        found = failures(url, process, lambda: os.kill(others[0], signal.SIGKILL))
        status, err = ended(process)
    for error in found:
        assert (error["type"], error["code"]) == ("server_error", "failed")
        assert error["message"].startswith("the answer failed: rank 1 died"), error
    assert status == 1
    assert "error: rank 1 died" in err and "rank 1 was ended by SIGKILL" in err
    assert "2 failed" in err


def test_a_rank_that_dies_while_nothing_is_asked_ends_the_server(tiny_model: Path) -> None:
    with serving(tiny_model, deadline="600") as (process, _, others):
        os.kill(others[0], signal.SIGKILL)
        status, err = ended(process)
    assert status == 1 and "error: rank 1 died" in err


@pytest.mark.slow
def test_ranks_wait_beyond_the_deadline_and_one_that_is_stopped_is_named(endless: Path) -> None:
    """Heartbeats tell one from the other."""
    deadline = 20
    options = ("--max-context", "32768")
    with serving(endless, *options, deadline=str(deadline)) as (process, url, others):
        time.sleep(1.5 * deadline)
        answer = client(url).completions.create(**{**LONG, "max_tokens": 5})
        assert answer.usage is not None and answer.usage.completion_tokens == 5
        found = failures(url, process, lambda: os.kill(others[0], signal.SIGSTOP))
        status, err = ended(process)
    for error in found:
        assert "rank 1" in error["message"] and error["code"] == "failed", error
    assert status == 1 and "error: rank 1 has not been heard of" in err, err


BROKEN = """
import ostinato.cli.ranks as ranks
from ostinato.__main__ import main
ranks._PROGRAM = '''
import ostinato.cli.rank as rank
from ostinato.models.stepper import Stepper
prompt = Stepper.prompt
def broken(self, sequence, tokens, *more, **options):
    if len(tokens) == 5:
        raise ValueError("broken")
    return prompt(self, sequence, tokens, *more, **options)
Stepper.prompt = broken
rank.main()
'''
main()
"""


def test_an_exception_on_a_rank_ends_the_server_with_its_text(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = commands.COMMAND[0]
    monkeypatch.setattr(commands, "COMMAND", (python, "-c", BROKEN))
    with serving(tiny_model, deadline="600") as (process, url, _):
        with pytest.raises(openai.InternalServerError) as raised:
            client(url).completions.create(model="tiny", prompt=[5, 6, 7, 8, 9], max_tokens=9)
        status, err = ended(process)
    words = "rank 1 raised ValueError: broken"
    assert raised.value.status_code == 500 and words in json.dumps(raised.value.body)
    assert status == 1 and f"error: {words}" in err and "ValueError: broken" in err


def test_a_server_that_cannot_start_leaves_no_rank(tiny_model: Path) -> None:
    """The model has 4 heads; the error is said once."""
    answer = commands.here("serve", "-m", str(tiny_model), "--port", "0", "--tensor-parallel", "3")
    assert answer.status == 1
    assert (
        answer.err.count("error:") == 1 and "heads is 4, which 3 ranks cannot share" in answer.err
    )
    assert not children(os.getpid())
