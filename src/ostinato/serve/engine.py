"""The one thread that owns the decoder: it carries out the scheduler's actions and delivers
updates.

    other threads ── submit, cancel ──▶ scheduler (under a lock) ──▶ the thread ──▶ decoder
    other threads ◀── updates, through `post` ── gathered for some ms ◀────┘

Decode steps are launched ahead of the tokens being read, as in `Decoder.run_batch`, until the
scheduler's next action is not a decode of the same batch.  Then no more steps are launched and
those in flight are used, so no computed token is dropped when a request joins or leaves.

Each answer ends exactly once, with one `End`; no update follows it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from operator import attrgetter
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from ostinato.errors import ContextPoisonedError, GroupError, LogitsError, OstinatoError
from ostinato.lowlevel import Closeable
from ostinato.models import (
    AnswerText,
    DecoderStatistics,
    SamplingOptions,
    TextGenerator,
    TokenLogprobs,
    TokenMasks,
)
from ostinato.modules import ModuleCacheStatistics
from ostinato.serve.grammar import Grammar, fill_masks
from ostinato.serve.scheduler import Admit, Decode, Read, Scheduler, SchedulerAction

_log = logging.getLogger(__name__)

_GATHER_SECONDS, _GATHER_EACH = 0.02, 0.001
"""Time for which pieces of text are gathered, except the first and the last of an answer: at a
thousand steps a second, a message for each token costs more than the token.  At least so much for
each answer under way, since sending a piece takes some 0.2 ms, in which steps wait."""
_LOOK_SECONDS = 0.01
"""Interval at which deadlines are checked while tokens are generated."""
_RANKS_STEPS, _RANKS_SECONDS = 8, 0.01
"""The most steps that several ranks run between two exchanges of theirs, which cost as much as the
tokens of a step (`models.leading`), and about how long they may take: a request that comes or ends
waits for the rest of them."""


class End(StrEnum):
    """The way in which an answer ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    FAILED = "failed"


class Rejection(StrEnum):
    """The reason why a job was not accepted."""

    FULL = "full"
    STOPPING = "stopping"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Job:
    """One answer to generate.  `tokens`: the prompt, at least one token, all within the vocabulary.
    The answer ends after `max_tokens` tokens or at the end of the context.  `continues`: the answer
    continues the prompt's text, rather than being a turn of a chat.  `shown`: special tokens whose
    text the answer has.  `logprobs`: the number of likeliest tokens that are wanted with each
    token; None for no log probabilities.  `prompt_logprobs`: they are also wanted of the prompt's
    tokens from the second on, none of which may be an end token; these are computed one by one, in
    the steps of the other answers.  `grammar`: what the answer must match; no other job may have
    it."""

    tokens: tuple[int, ...]
    max_tokens: int
    sampling: SamplingOptions
    stop: tuple[str, ...] = ()
    continues: bool = False
    shown: frozenset[int] = frozenset()
    logprobs: int | None = None
    prompt_logprobs: bool = False
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True)
class Update:
    """The changes of an answer since its last update.

    `tokens`: number of tokens chosen.  `cached`: number of prompt tokens that a slot's KV cache
    already held; valid from the first token on.  `words`: the error text if `end` is FAILED.
    `logprobs`: of the tokens that were asked for, the prompt's first, in order; without the end
    token.
    """

    text: str = ""
    tokens: int = 0
    cached: int = 0
    end: End | None = None
    words: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()

    def __add__(self, other: Update) -> Update:
        return Update.of((self, other))

    @classmethod
    def of(cls, some: Iterable[Update]) -> Update:
        """Returns one update for several that follow each other, of which one can have an end."""
        texts, tokens, cached, ends, words, logprobs = zip(*map(_fields, some), strict=True)
        end, said = (next(filter(None, given), None) for given in (ends, words))
        return cls(
            "".join(texts), sum(tokens), max(cached), end, said or "", tuple(chain(*logprobs))
        )


_fields = attrgetter("text", "tokens", "cached", "end", "words", "logprobs")
Listener = Callable[[Update], object]


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of one finished answer, in seconds from its submission; None for what did not happen.

    `placed`: when it got a slot.  `first`: when its first token was chosen.  `over`: when it ended.
    """

    placed: float | None
    first: float | None
    over: float
    tokens: int


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """Numbers of an engine since it was made.

    `under_way`: requests now, of which `waiting` have no slot.  `submitted` and `refused` count
    jobs, `ended` counts answers by `End`; with nothing under way, `submitted` equals the sum of
    `ended`.  Tokens: `prompt_tokens` were computed, `cached_tokens` were found in a slot's KV
    cache, `answer_tokens` were generated.  `steps`: decode steps; `step_rows`: the sum of their
    rows.  `reads`: pieces of prompts.
    """

    slots: int
    under_way: int
    waiting: int
    submitted: int
    refused: Mapping[str, int]
    ended: Mapping[str, int]
    prompt_tokens: int
    cached_tokens: int
    answer_tokens: int
    steps: int
    step_rows: int
    reads: int
    decoder: DecoderStatistics
    modules: ModuleCacheStatistics
    memory_free: int
    memory_total: int


@dataclass(slots=True)
class _Entry:
    """A job that was accepted and is not over.  Times are of the monotonic clock, in seconds."""

    job: Job
    listener: Listener
    text: AnswerText
    began: float
    placed: float | None = None
    first: float | None = None
    cached: int = 0
    tokens: int = 0
    forced: deque[int] = field(default_factory=deque)
    """The rest of the prompt, where its log probabilities are wanted: the next tokens, which are
    chosen by masks that allow nothing else."""

    unsaid: list[int] = field(default_factory=list)
    """Tokens that have no text yet: where nothing depends on the text, it is made once for all that
    are sent together."""

    @property
    def needs_mask(self) -> bool:
        """True if not every token may come next."""
        return bool(self.forced) or self.job.grammar is not None


_COUNTED = (
    *("submitted", "prompt_tokens", "cached_tokens", "answer_tokens"),
    *("steps", "step_rows", "reads"),
)


class ServingEngine(Closeable):
    """An engine that answers many requests at once with one decoder.

    `generator` belongs to the engine from `start` until `close` returns; its owner closes it
    afterwards.  The decoder's sequences are the slots.  `queue`, `piece` and `reuse` as for
    `Scheduler`.  `seconds`: time limit of an answer, from its submission, after which it ends with
    DEADLINE; None for no limit.

    `post` takes a function without arguments and calls it on the thread where listeners run, in the
    order of the calls; by default it calls at once, on the engine's thread.  `over` is called on
    that thread for each finished answer.
    """

    def __init__(
        self,
        generator: TextGenerator,
        *,
        queue: int = 64,
        piece: int = 256,
        reuse: bool = True,
        seconds: float | None = None,
        post: Callable[[Callable[[], None]], object] = lambda call: call(),
        over: Callable[[Timing], object] = lambda timing: None,
    ) -> None:
        self.generator = generator
        self._decoder = generator.decoder
        sizes = self._decoder.plan.sizes
        self._slots = sizes.sequences
        self._buckets = sizes.buckets
        self._context = sizes.context
        self._piece = min(piece, sizes.rows)
        # No step has more rows than those of the warm-up.
        self._step_rows = min(sizes.sampled_rows, self._piece, sizes.context)
        self._steps_a_call = 1
        self._seconds = seconds
        self._post = post
        self._over = over
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._scheduler = Scheduler(self._slots, queue, self._piece, reuse=reuse)
        self._entries: dict[int, _Entry] = {}
        self._together: dict[int, tuple[int, ...]] = {}
        """The last piece of each prompt, by slot, that the scheduler counts as read but the decoder
        has not read yet: the pieces are read together in one step."""
        self._counts = dict.fromkeys(_COUNTED, 0)
        self._refused: Counter[Rejection] = Counter()
        self._ended_by: Counter[End] = Counter()
        self._questions: deque[Future[EngineStatistics]] = deque()
        self._updates: dict[int, tuple[Listener, list[Update]]] = {}
        self._urgent: set[int] = set()
        self._all_sent = 0.0
        self._thread = threading.Thread(target=self._work, name="ostinato engine", daemon=True)
        self._begun = False
        self._ending = False
        self._ended = False
        """True once the thread does nothing more than deliver the remaining updates."""
        self.stopping = False
        """True if no more jobs are accepted; set by `stop` and, without a lock, in signal
        handlers."""
        self.ready = False
        """True once the warm-up is done, so that no request waits for a capture."""
        self.failure: BaseException | None = None
        """The error that ended the engine's thread early, or None."""

    @property
    def most(self) -> int:
        """Most jobs that can be under way; more are never accepted at once."""
        return self._scheduler.most

    # --- called on other threads
    def start(self) -> Self:
        """Starts the thread.  Jobs are accepted at once, and answered when `ready` is True.

        with ServingEngine(generator).start() as engine:
        """
        self._begun = True
        self._thread.start()
        if self._decoder.group is not None:
            self._decoder.group.channel.on_failure(lambda failure: self._wake())
        return self

    def _wake(self) -> None:
        with self._lock:
            self._changed.notify()

    def submit(
        self, jobs: Sequence[Job], listeners: Sequence[Listener]
    ) -> tuple[int, ...] | Rejection:
        """Accepts all of the jobs or none of them; returns their numbers or the reason for refusal.
        Each listener gets the updates of its answer, the last of them with `end`.  Raises
        InputError for invalid stop texts."""
        tokenizer = self.generator.tokenizer
        texts = [
            AnswerText(tokenizer, job.stop, continues=job.continues, shown=job.shown)
            for job in jobs
        ]
        now = time.monotonic()
        deadline = None if self._seconds is None else now + self._seconds
        with self._lock:
            refused = self._refusal(len(jobs))
            if refused is not None:
                self._refused[refused] += len(jobs)
                return refused
            numbers = []
            for job, listener, text in zip(jobs, listeners, texts, strict=True):
                begin = job.tokens[:1] if job.prompt_logprobs else job.tokens
                number = self._scheduler.submit(begin, deadline)
                assert number is not None, "there was room"
                entry = _Entry(job, listener, text, now)
                entry.forced.extend(job.tokens[len(begin) :])
                self._entries[number] = entry
                numbers.append(number)
            self._counts["submitted"] += len(jobs)
            self._changed.notify()
        return tuple(numbers)

    def refuses(self, jobs: int, others: int = 0) -> Rejection | None:
        """Returns why this many jobs cannot be accepted now, given `others` that are still being
        prepared; None if they can.  Counts refused jobs."""
        with self._lock:
            refused = self._refusal(jobs + others)
            if refused is not None:
                self._refused[refused] += jobs
            return refused

    def _refusal(self, jobs: int) -> Rejection | None:
        if self.failure is not None:
            return Rejection.FAILED
        if self.stopping:
            return Rejection.STOPPING
        return Rejection.FULL if self._scheduler.room < jobs else None

    def cancel(self, numbers: Iterable[int]) -> None:
        """Ends these answers as cancelled: from the next step on they are not decoded.  Ignores
        those that are over."""
        with self._lock:
            for number in numbers:
                self._end(number, End.CANCELLED)
            self._changed.notify()

    def statistics(self) -> Future[EngineStatistics]:
        """Requests the statistics, which the engine's thread takes between two steps."""
        asked: Future[EngineStatistics] = Future()
        with self._lock:
            self._questions.append(asked)
            if self._begun and not self._ended:
                self._changed.notify()
            else:
                self._answer_questions()
        return asked

    def stop(self) -> None:
        """Stops accepting jobs.  Those under way are answered; `close` waits for them."""
        with self._lock:
            self.stopping = True
            self._changed.notify()

    def end_all(self) -> None:
        """Ends all answers under way as cancelled."""
        with self._lock:
            for number in [*self._entries]:
                self._end(number, End.CANCELLED)
            self._changed.notify()

    def close(self) -> None:
        """Stops, waits until every answer is over, and ends the thread.  Idempotent."""
        self.stop()
        with self._lock:
            self._ending = True
            self._changed.notify()
        if self._begun:
            self._thread.join()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.end_all()
        super().__exit__(kind, value, tb)

    # --- the engine's thread
    def _work(self) -> None:
        spun, self._decoder.spins = self._decoder.spins, False  # yields the CPU while it waits
        try:
            self._warm_up()
            self.ready = not self._ending
            while self._turn():
                pass
        except BaseException as error:
            self._fail(error)
        finally:
            self.ready = False
            self._decoder.spins = spun
            with self._lock:
                self._ended = True
                self._answer_questions()
            self._flush()

    def _warm_up(self) -> None:
        """Runs every step twice, so that it is captured: each number of rows that batches and
        pieces of prompts can have, and on several ranks again for rows that are not greedy.
        Returns early if the engine is being closed."""
        self._run_steps()
        if self._decoder.ranks > 1:
            self._decoder.set_sampling(SamplingOptions(temperature=1.0))
            self._run_steps()
            self._decoder.set_sampling(SamplingOptions())

    def _run_steps(self) -> None:
        decoder, most = self._decoder, min(self._piece, self._context)
        for rows in self._buckets:
            size = min(rows, most)
            for _ in range(2):
                for read in (decoder.extend, decoder.prefill):
                    if self._ending:
                        return
                    decoder.reset(0)
                    read([0] * size)
            if size == most:
                break
        decoder.reset()  # a piece can have filled the context
        for slot in range(self._slots):
            decoder.prefill([0], slot)
        stops = decoder.stop_tokens
        decoder.set_stop_tokens(())  # an end token would keep a slot from its next step
        try:
            for mix in self._mixes():
                if self._ending:
                    return
                self._run_mix(*mix)
        finally:
            decoder.set_stop_tokens(stops)
        decoder.reset()

    def _run_mix(self, drawing: int, count: int) -> None:
        """Runs the steps of `count` slots, of which `drawing` draw."""
        decoder, slots = self._decoder, range(count)
        for slot in range(drawing):
            decoder.set_sampling(SamplingOptions(temperature=1.0), slot)
        for _ in range(2):
            for slot in slots:
                decoder.truncate(1, slot)
            decoder.decode_batch(slots)
        if max(decoder.step_rows(slots)) > 1 and not decoder.stopped(0):
            list(decoder.run_batch(slots, count=1))
        for slot in range(drawing):
            decoder.set_sampling(SamplingOptions(), slot)

    def _mixes(self) -> list[tuple[int, int]]:
        """Returns numbers of slots that draw, and of all slots, with which steps of every kind and
        number of rows run."""
        sizes = self._decoder.plan.sizes
        found: dict[tuple[bool, int], tuple[int, int]] = {}
        for count in range(1, self._slots + 1):
            for drawing in range(count + 1 if sizes.lookup else 1):
                each = sizes.drafting(count - drawing, drawing)
                rows = self._buckets.bucket(drawing + (count - drawing) * each)
                found.setdefault((each > 1, rows), (drawing, count))
        return [*found.values()]

    def _turn(self) -> bool:
        """Performs one action, or waits until there is one.  False if the thread must end."""
        with self._lock:
            while True:
                if self._decoder.group is not None:
                    self._decoder.group.check()  # a rank may die while nothing is under way
                self._answer_questions()
                self._end_late(time.monotonic())
                action = self._scheduler.next()
                if action is not None or self._together or self._updates:
                    break
                if self._ending:
                    return False
                self._changed.wait()  # nothing is under way, so there is no deadline either
        self._flush()
        if self._together and not self._joins(action):
            self._guarded(tuple(self._together), self._read_together)
            return True
        match action:
            case Admit():
                self._guarded((action.slot,), lambda: self._place(action))
            case Read():
                self._guarded((action.slot,), lambda: self._read(action))
            case Decode():
                self._guarded(action.slots, lambda: self._decode(action))
        return True

    def _guarded(self, slots: Iterable[int], act: Callable[[], None]) -> None:
        """Runs `act`; an error in it ends the answers of `slots` and no others.  Logits that hold
        NaN end the answers of their slots alone; a poisoned context, or a rank that failed, ends
        all answers."""
        try:
            act()
            return
        except (ContextPoisonedError, GroupError):
            raise
        except LogitsError as error:
            with self._lock:
                self._took(error.chosen)
            broken = {slot: str(LogitsError({slot: at}, {})) for slot, at in error.failed.items()}
        except (OstinatoError, MemoryError) as error:
            broken = dict.fromkeys(slots, str(error))
        for slot in broken:
            self._decoder.reset(slot)
        with self._lock:
            for slot, words in broken.items():
                number = self._scheduler.request_in(slot)
                if number is not None:
                    self._end(number, End.FAILED, words)
                self._scheduler.forget(slot)

    def _place(self, action: Admit) -> None:
        with self._lock:
            entry = self._entries.get(action.request)
        if entry is None:
            return  # cancelled meanwhile, also in the scheduler
        job, decoder = entry.job, self._decoder
        try:
            if action.source is None:
                decoder.keep_common(job.tokens[: action.kept + 1], action.slot)
            else:
                decoder.copy_prefix(action.kept, action.source, action.slot)
            # The last token of the answer is at position prompt + max_tokens - 1.
            limit = len(job.tokens) + job.max_tokens - 1
            decoder.set_sampling(
                job.sampling,
                action.slot,
                limit=limit,
                answer=len(job.tokens),
                logprobs=job.logprobs,
            )
        except BaseException as error:
            with self._lock:  # ended here: the caller ends only requests that have a slot
                self._end(action.request, End.FAILED, str(error))
            raise
        with self._lock:
            self._scheduler.placed(action)
            entry.placed = time.monotonic()
            entry.cached = action.kept
            self._counts["cached_tokens"] += action.kept

    def _joins(self, action: SchedulerAction | None) -> bool:
        """True if the action can run before the gathered last pieces of prompts are read."""
        match action:
            case Admit():
                return action.slot not in self._together and action.source not in self._together
            case Read():
                held = sum(map(len, self._together.values()))
                return action.last and held + action.end - action.start <= self._step_rows
        return False

    def _read_together(self) -> None:
        pieces, self._together = self._together, {}
        with self._lock:
            needing = self._needing(pieces)
        chosen = self._decoder.prefill_batch(pieces, masks=self._masks(needing))
        with self._lock:
            self._took(chosen)
        self._flush()

    def _read(self, action: Read) -> None:
        with self._lock:
            entry = self._entries.get(action.request)
        if entry is None:
            return
        piece = entry.job.tokens[action.start : action.end]
        if action.last:
            self._together[action.slot] = piece
        else:
            self._decoder.extend(piece, action.slot)
        with self._lock:
            self._counts["reads"] += 1
            self._counts["prompt_tokens"] += len(piece)
            self._scheduler.was_read(action)
        self._flush()

    def _needing(self, slots: Iterable[int]) -> dict[int, int]:
        """Returns the requests, by slot, whose next token needs a mask.  The caller has
        the lock."""
        found = {}
        for slot in slots:
            number = self._scheduler.request_in(slot)
            entry = None if number is None else self._entries.get(number)
            if number is not None and entry is not None and entry.needs_mask:
                found[slot] = number
        return found

    def _masks(self, needing: Mapping[int, int]) -> TokenMasks | None:
        """Returns the masks of these requests, by slot, None without any.  A request that is over
        may get any token: nobody takes it."""

        def fill(words: npt.NDArray[np.uint32]) -> None:
            grammars: dict[int, Grammar] = {}
            with self._lock:
                entries = {slot: self._entries.get(number) for slot, number in needing.items()}
            for slot, entry in entries.items():
                words[slot] = 0xFFFFFFFF
                if entry is not None and entry.forced:
                    words[slot] = 0
                    words[slot, entry.forced[0] // 32] = 1 << entry.forced[0] % 32
                elif entry is not None and entry.job.grammar is not None:
                    grammars[slot] = entry.job.grammar
            if grammars:
                fill_masks(grammars, words)

        return TokenMasks(tuple(needing), fill) if needing else None

    def _decode(self, action: Decode) -> None:
        with self._lock:
            needing = self._needing(action.slots)
        single, masks = action.single, self._masks(needing)
        # For a single step, nothing is launched ahead of the look at what comes next.
        run = self._decoder.run_batch(
            action.slots,
            count=1 if single and masks else None,
            ahead=0 if single else self._ahead,
            masks=masks,
        )
        size = self._size(action.slots)
        look, within = 0.0, False

        def take(item: Mapping[int, int]) -> None:
            nonlocal look, within
            now = time.monotonic()
            with self._lock:
                if not within:
                    self._counts["steps"] += 1
                    self._counts["step_rows"] += len(item)
                    self._scheduler.stepped()
                within = run.within_step
                self._took(item)
                if now >= look:
                    look = now + _LOOK_SECONDS
                    self._end_late(now)
                self._answer_questions()
            self._flush()

        def finish_unless_alike() -> None:
            with self._lock:
                ahead = self._scheduler.next()
                if not (
                    isinstance(ahead, Decode)
                    and not ahead.single
                    and self._size(ahead.slots) == size
                    and self._needing(ahead.slots) == needing
                ):
                    run.finish()

        with run:
            if single or self._decoder.ranks == 1:
                for item in run:
                    take(item)
                    finish_unless_alike()
                return
            begin = time.monotonic()
            while run.take(self._steps_a_call, take) == self._steps_a_call:
                finish_unless_alike()
                begin, before = time.monotonic(), begin
                fitting = int(_RANKS_SECONDS * self._steps_a_call / (begin - before + 1e-9))
                self._steps_a_call = max(1, min(_RANKS_STEPS, fitting))

    @property
    def _ahead(self) -> int | None:
        """The launches ahead of a run; of ranks, those of the steps that cross together, which are
        under way while the next ones cross."""
        return max(2, self._steps_a_call) if self._decoder.ranks > 1 else None

    def _size(self, slots: Sequence[int]) -> tuple[int, int]:
        """Returns the rows of a step of these slots, and of those of them that draft."""
        rows = self._decoder.step_rows(slots)
        return self._buckets.bucket(sum(rows)), max(rows)

    # --- the caller holds the lock
    def _took(self, chosen: Mapping[int, int]) -> None:
        """Processes the next token of each slot."""
        decoder, scheduler, now = self._decoder, self._scheduler, time.monotonic()
        for slot, token in chosen.items():
            number = scheduler.request_in(slot)
            if number is None:
                continue  # the request ended after this step was launched
            scheduler.chosen(slot, token)
            entry = self._entries[number]
            logprobs = () if entry.job.logprobs is None else (decoder.logprobs(slot),)
            if entry.forced:
                entry.forced.popleft()
                self._counts["prompt_tokens"] += 1
                self._note(number, entry, Update(logprobs=logprobs), urgent=False)
                continue
            entry.tokens += 1
            self._counts["answer_tokens"] += 1
            if entry.first is None:
                entry.first = now
            ended = token in decoder.stop_tokens
            grammar = entry.job.grammar
            complete = grammar is not None and grammar.take(token)
            if grammar is not None and grammar.error:
                self._end(number, End.FAILED, f"its grammar: {grammar.error[:500]}")
                continue
            last = ended or complete or decoder.stopped(slot)
            job = entry.job
            entry.unsaid.append(token)
            if not (last or entry.tokens == 1 or job.stop or job.grammar or logprobs):
                continue  # `_flush` makes the text
            count = len(entry.unsaid)
            try:
                text, stopped = self._text_of(entry, last=last)
            except OstinatoError as error:
                self._end(number, End.FAILED, str(error))
                continue
            end = None
            if stopped or ended or complete:
                end = End.STOP
            elif last:
                end = End.LENGTH
            given = () if ended else logprobs
            update = Update(text, count, entry.cached, logprobs=given)
            self._note(number, entry, update, urgent=entry.tokens == 1)
            if end is not None:
                self._end(number, end)

    def _text_of(self, entry: _Entry, *, last: bool = False) -> tuple[str, bool]:
        """Returns `AnswerText.push` of the entry's tokens that have no text yet."""
        tokens, entry.unsaid = entry.unsaid, []
        return entry.text.push(*tokens, last=last)

    def _say(self) -> None:
        """Makes the texts of all tokens that have none yet."""
        for number, entry in [*self._entries.items()]:
            try:
                self._note_unsaid(number, entry)
            except OstinatoError as error:
                self._end(number, End.FAILED, str(error))

    def _note_unsaid(self, number: int, entry: _Entry) -> None:
        """Notes the text of the entry's tokens that have none yet, if there are any.  Raises
        OstinatoError."""
        if count := len(entry.unsaid):
            text, _ = self._text_of(entry)
            self._note(number, entry, Update(text, count, entry.cached), urgent=False)

    def _note(self, number: int, entry: _Entry, update: Update, *, urgent: bool) -> None:
        self._updates.setdefault(number, (entry.listener, []))[1].append(update)
        if urgent:
            self._urgent.add(number)

    def _end(self, number: int, end: End, words: str = "") -> None:
        """Ends an answer, unless it is over."""
        entry = self._entries.pop(number, None)
        if entry is None:
            return
        self._scheduler.end(number)
        self._ended_by[end] += 1
        with suppress(OstinatoError):
            self._note_unsaid(number, entry)
        began = entry.began
        placed, first = (None if t is None else t - began for t in (entry.placed, entry.first))
        timing = Timing(placed, first, time.monotonic() - began, entry.tokens)
        self._note(number, entry, Update(cached=entry.cached, end=end, words=words), urgent=True)
        listener, updates = self._updates[number]

        def last(update: Update) -> None:
            listener(update)
            self._over(timing)

        self._updates[number] = last, updates

    def _end_late(self, now: float) -> None:
        for number in self._scheduler.expired(now):
            self._end(number, End.DEADLINE)

    def _answer_questions(self) -> None:
        while self._questions:
            asked = self._questions.popleft()
            if not asked.set_running_or_notify_cancel():
                continue
            try:
                asked.set_result(self._statistics())
            except Exception as error:
                asked.set_exception(error)

    def _statistics(self) -> EngineStatistics:
        device = self.generator.device
        free, total = device.memory_info()
        return EngineStatistics(
            slots=self._slots,
            under_way=self._scheduler.under_way,
            waiting=self._scheduler.waiting,
            **self._counts,
            refused={reason.value: self._refused[reason] for reason in Rejection},
            ended={end.value: self._ended_by[end] for end in End},
            decoder=self._decoder.statistics(),
            modules=device.modules.statistics(),
            memory_free=free,
            memory_total=total,
        )

    # --- updates to listeners
    def _flush(self) -> None:
        """Delivers urgent updates, and all updates if the last full delivery is long enough ago."""
        with self._lock:
            now, under_way = time.monotonic(), self._scheduler.under_way
            wanted = max(_GATHER_SECONDS, _GATHER_EACH * under_way)
            if under_way == 0 or now - self._all_sent >= wanted:
                self._say()
                gathered, self._updates = [*self._updates.values()], {}
                self._all_sent = now
            else:
                gathered = [self._updates.pop(number) for number in sorted(self._urgent)]
            self._urgent.clear()

        if not gathered:
            return

        def deliver() -> None:
            for listener, updates in gathered:
                try:
                    listener(Update.of(updates))
                except Exception:  # an error of one listener must not keep updates from the others
                    _log.exception("an update of an answer was not taken")

        self._post(deliver)

    def _fail(self, error: BaseException) -> None:
        """Ends every answer and accepts no more jobs: the thread cannot go on."""
        with self._lock:
            self.failure = error
            for number in [*self._entries]:
                self._end(number, End.FAILED, str(error) or type(error).__name__)
