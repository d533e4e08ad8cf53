"""What the tests of the server share: a tiny model whose answers are as varied as a real one's."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ostinato import Device
from ostinato.models import SamplingOptions, TextGenerator
from ostinato.serve.engine import End, Engine, Job, Refused, Update
from tests.models.model_files import write_gguf

SECONDS = 300.0
"""Against hangs alone."""


def tiny(folder: Path) -> Path:
    return write_gguf(folder / "tiny.gguf")


def open_generator(device: Device, model: Path, **options: Any) -> TextGenerator:
    return TextGenerator(device, model, **{"sequences": 4, **options})


@dataclass
class Answer:
    """A listener that keeps everything, and looks for what must not be."""

    updates: list[Update] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    first: threading.Event = field(default_factory=threading.Event)

    def __call__(self, update: Update) -> None:
        assert not self.over.is_set(), "something is said after the end"
        self.updates.append(update)
        if update.tokens:
            self.first.set()
        if update.end is not None:
            self.over.set()

    def wait(self) -> Update:
        assert self.over.wait(SECONDS), "the answer does not end"
        return self.so_far

    @property
    def so_far(self) -> Update:
        return sum(self.updates, Update())

    @property
    def end(self) -> End | None:
        return self.so_far.end


def job(
    generator: TextGenerator, prompt: str, max_tokens: int = 16, *, stop: tuple[str, ...] = (),
    **sampling: Any,
) -> Job:  # fmt: skip
    tokens = tuple(generator.encode(prompt, chat=False))
    return Job(tokens, max_tokens, SamplingOptions(**sampling), stop)


def submit(engine: Engine, one: Job) -> tuple[int, Answer]:
    answer = Answer()
    numbers = engine.submit([one], [answer])
    assert not isinstance(numbers, Refused), numbers
    return numbers[0], answer


def alone(generator: TextGenerator, one: Job) -> tuple[str, int, End]:
    """What `generate` gives: text, how many tokens, how it ends."""
    answer = generator.generate(
        one.tokens, max_tokens=one.max_tokens, sampling=one.sampling, stop=one.stop
    )
    text = "".join(answer)
    reason = answer.finish_reason
    return text, len(answer.token_ids), End.STOP if reason == "stop" else End.LENGTH
