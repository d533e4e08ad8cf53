"""The engine: every answer is what `generate` gives alone, whatever comes, goes and fails."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ostinato import Device
from ostinato.errors import ContextPoisonedError, ModelError
from ostinato.models import SamplingOptions, TextGenerator
from ostinato.serve import engine as engine_module
from ostinato.serve.engine import End, Job, Rejection, ServingEngine, Timing, Update
from tests.serve.serving import SECONDS, Answer, alone, job, open_generator, submit, until

HOT = {"temperature": 3.0}


@pytest.fixture(params=[0])
def generator(
    request: pytest.FixtureRequest, host_device: Device, tiny_model: Path
) -> Iterator[TextGenerator]:
    with open_generator(host_device, tiny_model, lookup=request.param) as opened:
        yield opened


with_drafts = pytest.mark.parametrize("generator", [0, 1, 3], indirect=True)
"""The most drafts of a step."""


def with_drafts_and(name: str, *cases: Any) -> pytest.MarkDecorator:
    """All numbers of drafts with all cases; quick are pairs with each number and each case once."""
    pairs = [
        pytest.param(most, case, marks=[pytest.mark.slow] * ((a - b) % 3 > 0))
        for a, most in enumerate((0, 1, 3))
        for b, case in enumerate(cases)
    ]
    return pytest.mark.parametrize(("generator", name), pairs, indirect=["generator"])


def jobs_of(generator: TextGenerator, count: int) -> list[Job]:
    """Some begin alike, some are long, some end at a text, some at an end token."""
    made = []
    for seed in range(count):
        prompt = ("the same beginning of a few " if seed % 3 else "") + "ab in 12 " * (seed % 5 + 1)
        stop = ("th", "er") if seed % 4 == 0 else ()
        options = {"temperature": 0.0} if seed % 7 < 3 else {**HOT, "seed": seed}
        if seed % 6 == 1:
            options["repetition_penalty"] = 1.3
        made.append(job(generator, prompt + str(seed), 1 + seed * 7 % 40, stop=stop, **options))
    return made


def check(answer: Answer, wanted: tuple[str, int, End]) -> None:
    update = answer.wait()
    assert (update.text, update.tokens, update.end) == wanted


@with_drafts_and("options", {}, {"piece": 5}, {"reuse": False})
def test_many_at_once_answer_as_each_alone(
    generator: TextGenerator, options: dict[str, Any]
) -> None:
    jobs = jobs_of(generator, 30)
    wanted = [alone(generator, one) for one in jobs]
    assert len({end for _, _, end in wanted}) == 2 and len({text for text, _, _ in wanted}) > 20
    timings: list[Timing] = []
    with ServingEngine(generator, over=timings.append, **options).start() as engine:
        until(lambda: engine.ready)
        before = engine.statistics().result(SECONDS).decoder
        answers = [submit(engine, one)[1] for one in jobs]
        for answer, one in zip(answers, wanted, strict=True):
            check(answer, one)
        numbers = engine.statistics().result(SECONDS)
    assert numbers.submitted == 30 == sum(numbers.ended.values()) == len(timings)
    assert numbers.under_way == numbers.waiting == 0
    assert numbers.answer_tokens == sum(count for _, count, _ in wanted)
    prompts = sum(len(one.tokens) for one in jobs)
    assert numbers.prompt_tokens + numbers.cached_tokens == prompts
    assert (numbers.cached_tokens > 0) == options.get("reuse", True)
    assert numbers.steps < numbers.step_rows <= 4 * numbers.steps, "they step together"
    assert numbers.decoder.launches_replayed > 0 and not numbers.decoder.quarantined
    lookup = generator.decoder.plan.sizes.lookup
    drafted = numbers.decoder.lookup_tokens - before.lookup_tokens
    steps = numbers.decoder.lookup_steps - before.lookup_steps
    assert steps < drafted <= (lookup + 1) * steps if lookup else steps == 0
    decoded = numbers.decoder.decoded_tokens - before.decoded_tokens
    assert decoded == numbers.step_rows + drafted - steps, "a step's first tokens, and its drafts"
    for timing in timings:
        assert timing.placed is not None and timing.first is not None
        assert 0 <= timing.placed <= timing.first <= timing.over


@with_drafts
@pytest.mark.parametrize("piece", [256, 5])
def test_every_step_is_captured_before_it_is_ready(generator: TextGenerator, piece: int) -> None:
    with ServingEngine(generator, piece=piece).start() as engine:
        until(lambda: engine.ready)
        before = engine.statistics().result(SECONDS).decoder
        answers = [submit(engine, one)[1] for one in jobs_of(generator, 9)]
        for answer in answers:
            answer.wait()
        after = engine.statistics().result(SECONDS).decoder
    assert after.launches_replayed > before.launches_replayed
    assert after.graphs_captured == before.graphs_captured
    assert after.launches_eager == before.launches_eager


def test_a_piece_can_fill_the_context(host_device: Device, tiny_model: Path) -> None:
    with (
        open_generator(host_device, tiny_model, max_context=16) as generator,
        ServingEngine(generator).start() as engine,
    ):
        until(lambda: engine.ready or engine.failure is not None)
        assert engine.failure is None


def test_short_prompts_that_wait_are_read_in_one_step(
    generator: TextGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, read = generator.decoder, []
    together = decoder.prefill_batch

    def seen(prompts: Any, **given: Any) -> dict[int, int]:
        if engine.ready:
            read.append([len(tokens) for tokens in prompts.values()])
        return together(prompts, **given)

    jobs = [
        job(generator, text, 6, seed=n, **HOT)
        for n, text in enumerate(["ab", "12", "er", "in the"])
    ]
    wanted = [alone(generator, one) for one in jobs]
    decoder.reset()
    monkeypatch.setattr(decoder, "prefill_batch", seen)
    engine = ServingEngine(generator, reuse=False)
    answers = [Answer() for _ in jobs]
    engine.submit(jobs, answers)
    with engine.start():
        for answer, one in zip(answers, wanted, strict=True):
            check(answer, one)
        numbers = engine.statistics().result(SECONDS)
    assert read == [[len(one.tokens) for one in jobs]]
    assert numbers.reads == len(jobs)


def test_a_request_joins_those_that_are_decoded(
    generator: TextGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes while another one is in the middle of its answer, and is over long before that."""
    monkeypatch.setattr(engine_module, "_GATHER_SECONDS", 0.0)  # an update for each step
    generator.decoder.set_stop_tokens(())
    long, short = (job(generator, "ab", count, seed=1, **HOT) for count in (100, 5))
    wanted = [alone(generator, one) for one in (long, short)]
    second, order = Answer(), []

    class First(Answer):
        def __call__(self, update: Update) -> None:
            if len(self.updates) == 10:  # on the engine's thread, between two steps
                engine.submit([short], [second])
            super().__call__(update)

    first = First()
    engine = ServingEngine(generator, over=lambda timing: order.append(timing.tokens))
    engine.submit([long], [first])
    with engine.start():
        check(first, wanted[0])
        check(second, wanted[1])
        numbers = engine.statistics().result(SECONDS)
    assert order == [5, 100]
    assert numbers.steps == 99, "the steps were shared"


@with_drafts
def test_one_step_between_two_pieces_of_a_prompt(generator: TextGenerator) -> None:
    generator.decoder.set_stop_tokens(())
    long, late = (job(generator, "ab in " * count, 100, temperature=0.0) for count in (1, 12))
    pieces = -(-len(late.tokens) // 5)
    assert pieces > 6
    steps: list[int] = []

    class Late(Answer):
        def __call__(self, update: Update) -> None:
            steps.append(engine._counts["steps"])  # on the engine's thread
            super().__call__(update)

    answers = Answer(), Late()
    engine = ServingEngine(generator, piece=5)
    engine.submit([long, late], answers)
    with engine.start():
        for answer in answers:
            answer.wait()
    assert steps[0] <= pieces


class Failing:
    """A run of a batch that fails after some steps, now and then."""

    def __init__(self, run: Any, rng: random.Random) -> None:
        self.run, self.rng, self.finish = run, rng, run.finish

    def __enter__(self) -> Failing:
        self.run.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.run.__exit__(*exception)

    @property
    def within_step(self) -> bool:
        return bool(self.run.within_step)

    def __iter__(self) -> Iterator[Any]:
        for item in self.run:
            if self.rng.random() < 0.01:
                raise ModelError("planted")
            yield item


@with_drafts_and("seed", 0, 1, 2)
def test_no_answer_holds_what_another_prompt_left_behind(
    generator: TextGenerator, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Prompts that begin alike or go on where an answer ended, up to the context's end, while
    others are cancelled at any time, and steps fail before, amid and after their work."""
    rng, decoder = random.Random(seed), generator.decoder
    vocabulary, context = decoder.config.vocabulary, decoder.plan.sizes.context

    def tokens(most: int) -> tuple[int, ...]:
        return tuple(rng.randrange(vocabulary) for _ in range(rng.randint(0, most)))

    stems = [tokens(110) for _ in range(4)]
    jobs: list[Job] = []
    wanted: list[tuple[str, int, End]] = []
    said: list[tuple[int, ...]] = []
    for _ in range(70):
        stem = rng.choice(stems)
        prompt = stem[: rng.randint(0, len(stem))] + tokens(9)
        if said and rng.random() < 0.3:
            prompt = rng.choice(said) + tokens(3)  # a conversation goes on
        prompt = (prompt or (5,))[:context]
        sampling = SamplingOptions(rng.choice([0.0, 1.0, 3.0]), seed=rng.getrandbits(40))
        stop = rng.choice([(), ("th", "e")])
        one = Job(prompt, min(rng.randint(1, 30), context + 1 - len(prompt)), sampling, stop)
        answer = generator.generate(prompt, max_tokens=one.max_tokens, sampling=sampling, stop=stop)
        text, end = "".join(answer), End.STOP if answer.finish_reason == "stop" else End.LENGTH
        jobs.append(one)
        wanted.append((text, len(answer.token_ids), end))
        said.append(prompt + answer.token_ids)

    def planted(name: str) -> None:
        original = getattr(decoder, name)

        def call(*arguments: Any, **options: Any) -> Any:
            if not engine.ready:
                return original(*arguments, **options)
            if rng.random() < 0.01:
                raise ModelError("planted")
            result = original(*arguments, **options)
            if name == "run_batch":
                return Failing(result, rng)
            if rng.random() < 0.01:
                raise ModelError("planted")
            return result

        monkeypatch.setattr(decoder, name, call)

    engine = ServingEngine(generator, queue=len(jobs), piece=(3, 7, 256)[seed])
    for name in ("prefill", "extend", "copy_prefix", "keep_common", "run_batch"):
        planted(name)
    chance = random.Random(seed)
    begun = [submit(engine, one) for one in jobs]
    engine.cancel([number for number, _ in begun[::9]])
    with engine.start():
        until(lambda: engine.ready)
        for number, answer in begun:
            if chance.random() < 0.3:
                if chance.random() < 0.5:
                    until(lambda answer=answer: answer.updates)
                engine.cancel([number])
        for (_, answer), (text, count, end) in zip(begun, wanted, strict=True):
            update = answer.wait()
            if update.end in (End.STOP, End.LENGTH):
                assert (update.text, update.tokens, update.end) == (text, count, end)
            else:
                assert text.startswith(update.text)
        numbers = engine.statistics().result(SECONDS)
    assert numbers.submitted == sum(numbers.ended.values()) == len(jobs)
    assert numbers.cached_tokens and numbers.ended["failed"] and numbers.ended["cancelled"]
    assert numbers.ended["stop"] + numbers.ended["length"] > 5


def test_a_full_engine_refuses_all_of_what_does_not_fit(generator: TextGenerator) -> None:
    one = job(generator, "ab", 60, seed=1, **HOT)
    engine = ServingEngine(generator, queue=2)  # not started: nothing moves
    taken = [submit(engine, one)[1] for _ in range(5)]
    two = Answer(), Answer()
    assert engine.submit([one, one], two) is Rejection.FULL
    taken.append(submit(engine, one)[1])
    assert engine.submit([one], [Answer()]) is Rejection.FULL
    numbers = engine.statistics().result(SECONDS)
    assert (numbers.under_way, numbers.waiting, numbers.refused["full"]) == (6, 6, 3)
    with engine.start():
        for answer in taken:
            answer.wait()
        submit(engine, one)[1].wait()
    assert not two[0].updates and not two[1].updates


def test_a_deadline_ends_what_waits_and_what_is_decoded(
    generator: TextGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock:
        now = 100.0

        def monotonic(self) -> float:
            return self.now

    clock = Clock()
    monkeypatch.setattr(engine_module, "time", clock)
    generator.decoder.set_stop_tokens(())
    one = job(generator, "ab", 110, seed=1, **HOT)
    engine = ServingEngine(generator, seconds=30.0)

    class Late(Answer):
        def __call__(self, update: Update) -> None:
            super().__call__(update)
            clock.now = 131.0  # from the first token on, everything is late

    first = Late()
    engine.submit([one], [first])
    others = [submit(engine, one)[1] for _ in range(6)]
    with engine.start():
        for answer in (first, *others):
            assert answer.wait().end is End.DEADLINE
        assert 0 < first.so_far.tokens < 110
        assert submit(engine, job(generator, "ab", 3))[1].wait().end is not End.DEADLINE


def test_what_is_under_way_is_answered_before_the_end(generator: TextGenerator) -> None:
    jobs = jobs_of(generator, 20)
    wanted = [alone(generator, one) for one in jobs]
    engine = ServingEngine(generator)
    engine.start()
    answers = [submit(engine, one)[1] for one in jobs]
    engine.stop()
    assert engine.submit([jobs[0]], [Answer()]) is Rejection.STOPPING
    engine.close()
    engine.close()
    for answer, one in zip(answers, wanted, strict=True):
        assert answer.over.is_set()
        check(answer, one)
    assert not engine.ready


def test_a_device_that_is_lost_ends_everything(
    generator: TextGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*arguments: Any, **options: Any) -> Any:
        raise ContextPoisonedError(700, "launch")

    with ServingEngine(generator).start() as engine:
        until(lambda: engine.ready)
        monkeypatch.setattr(generator.decoder, "run_batch", lost)
        answers = [submit(engine, job(generator, "ab", 9))[1] for _ in range(6)]
        for answer in answers:
            update = answer.wait()
            assert update.end is End.FAILED and "700" in update.words
        until(lambda: engine.failure is not None)
        assert engine.submit([job(generator, "ab")], [Answer()]) is Rejection.FAILED
        assert engine.statistics().result(SECONDS).under_way == 0
        assert not engine.ready


def test_pieces_are_gathered_where_steps_are_fast(
    generator: TextGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first token comes by itself, and the end at once; nothing is lost in between."""
    generator.decoder.set_stop_tokens(())
    one = job(generator, "ab", 60, seed=4, **HOT)
    wanted = alone(generator, one)
    monkeypatch.setattr(engine_module, "_GATHER_EACH", 0.0)
    for seconds, most in ((1e9, 2), (0.0, 60)):
        monkeypatch.setattr(engine_module, "_GATHER_SECONDS", seconds)
        with ServingEngine(generator).start() as engine:
            engine._all_sent = time.monotonic()
            answer = submit(engine, one)[1]
            check(answer, wanted)
            assert answer.updates[0].tokens == 1
            assert len(answer.updates) == most


def test_who_does_not_take_an_update_costs_others_nothing(
    generator: TextGenerator, caplog: pytest.LogCaptureFixture
) -> None:
    jobs = [job(generator, "ab", 12, seed=seed, **HOT) for seed in range(4)]
    wanted = [alone(generator, one) for one in jobs]

    def fails(update: Update) -> None:
        raise RuntimeError("not taken")

    with ServingEngine(generator).start() as engine:
        assert not isinstance(engine.submit(jobs[:1], [fails]), Rejection)
        answers = [submit(engine, one)[1] for one in jobs]
        for answer, one in zip(answers, wanted, strict=True):
            check(answer, one)
    assert engine.failure is None
    assert "not taken" in caplog.text


def test_an_engine_that_is_closed_as_it_starts_does_not_warm_up_to_the_end(
    generator: TextGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, engine = generator.decoder, ServingEngine(generator)
    extend, reads = decoder.extend, []

    def held(tokens: Any, *arguments: Any) -> None:
        reads.append(len(tokens))
        closer.start()
        until(lambda: engine._ending)
        extend(tokens, *arguments)

    closer = threading.Thread(target=engine.close)
    monkeypatch.setattr(decoder, "extend", held)
    monkeypatch.setattr(decoder, "decode_batch", lambda *_: pytest.fail("it goes on"))
    engine.start()
    engine._thread.join(SECONDS)
    closer.join(SECONDS)
    assert len(reads) == 1 and not engine.ready and engine.failure is None
    answer = Answer()
    assert engine.submit([job(generator, "ab")], [answer]) is Rejection.STOPPING


def test_numbers_are_given_while_the_thread_ends(
    generator: TextGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who asks after the thread has looked for the last time is answered all the same."""
    engine, asked = ServingEngine(generator), []
    flush = engine._flush

    def late() -> None:
        if engine._ending and not engine.ready:
            asked.append(engine.statistics())
        flush()

    monkeypatch.setattr(engine, "_flush", late)
    with engine.start():
        until(lambda: engine.ready)
    assert asked and all(one.result(SECONDS).under_way == 0 for one in asked)


def test_a_token_without_text_ends_its_answer_alone(
    generator: TextGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The embedding may have more rows than the tokenizer has words."""
    generator.decoder.set_stop_tokens(())
    good, bad = job(generator, "ab", 20, seed=2, **HOT), job(generator, "xy", 20, seed=3, **HOT)
    wanted = alone(generator, good)
    engine = ServingEngine(generator)
    first, (number, second) = submit(engine, good)[1], submit(engine, bad)
    text = engine._entries[number].text
    push = text.push

    def fails(*tokens: int, last: bool = False) -> tuple[str, bool]:
        if second.so_far.tokens:
            raise ModelError("no such token")
        return push(*tokens, last=last)

    monkeypatch.setattr(text, "push", fails)
    with engine.start():
        assert second.wait().end is End.FAILED and second.so_far.words == "no such token"
        check(first, wanted)
