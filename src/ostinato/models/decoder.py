"""A Llama-family decoder on captured graphs: tokens in, tokens out.

    with ost.open_device() as device, Decoder(device, "model.gguf") as decoder:
        token = decoder.prefill([4898, 314, 260])     # the first token after the prompt
        while not decoder.stopped():
            token = decoder.decode()                  # one graph launch, no host write

Two graphed steps share one program and one buffer plan: "prefill" (pieces of a prompt, no output
head) and "decode" (whatever samples: the last piece of a prompt, and every token after it).  Their
only size is the number of rows; everything else is read on the device.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from collections.abc import Sequence as Items
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from ostinato import Device, Graph, GraphCache, Stream
from ostinato.errors import ClosedError, InputError, ModelError
from ostinato.models.backend import Backend, backend_for
from ostinato.models.checkpoint import Checkpoint, open_checkpoint
from ostinato.models.config import LlamaConfig
from ostinato.models.decoder_statistics import DecoderStatistics, OperationTimes, Phases
from ostinato.models.plan import BufferPlan, PlanSizes
from ostinato.models.program import OPTIONS, ROW, STOP_TOKENS, KernelCall
from ostinato.models.sampling import GREEDY, SamplingOptions
from ostinato.models.sequences import Sequence, decode_rows, prompt_rows
from ostinato.models.steps import DecoderSteps
from ostinato.models.weights import Weights, load_weights
from ostinato.replay import Decision

__all__ = ["DEFAULT_CONTEXT", "Decoder"]

DEFAULT_CONTEXT = 2048
"""Positions a slot has if nobody says otherwise, and the model was trained for as many."""

# How long the host looks for a token before it waits for the stream.
_SPIN_SECONDS = 0.002


class Decoder:
    """A model in device memory with its KV cache, stepping through graphs.

    `model`: a path for `open_checkpoint`, or an open checkpoint (then the caller closes it; it is
    not needed after construction).  `max_context`: positions of each sequence; `DEFAULT_CONTEXT` or
    the model's own if that is less.  `slots`: sequences at once.  `max_rows`: rows of the largest
    step, so the size of a prompt's pieces.

    `graphs` off runs everything eagerly.  `build`: "capture", or "record" to build graphs by hand
    from the first run's launches.  `warmups`: eager runs of each bucket before its capture.
    `verify` as for GraphedStep.  `device_state` off (it can be changed between steps): the host
    sets token and position before each step, instead of the device advancing them.
    `stop_tokens`: tokens that end a sequence, 16 at most; the model's own if None.  `graph_budget`:
    device bytes that all graphs together may take.  `threads`: of the weights' conversion.

    Raises ModelError (UnsupportedModelError before anything is loaded), CompileError,
    OutOfMemoryError, NotAvailableError, InputError.  Calls of one decoder are not to overlap.
    After an exception in a step its slots can be reset and used again, unless it was a
    ContextPoisonedError.
    """

    def __init__(
        self,
        device: Device,
        model: str | Path | Checkpoint,
        *,
        max_context: int | None = None,
        max_rows: int = 64,
        slots: int = 1,
        graphs: bool = True,
        build: Literal["capture", "record"] = "capture",
        warmups: int = 1,
        verify: Literal["off", "first"] | int = "off",
        device_state: bool = True,
        stop_tokens: Iterable[int] | None = None,
        graph_budget: int | str | None = None,
        threads: int | None = None,
    ) -> None:
        self.device = device
        self.device_state = device_state
        self.backend: Backend = backend_for(device)
        self._phases = Phases()
        self._closed = False
        checkpoint = model if isinstance(model, Checkpoint) else open_checkpoint(model)
        try:
            self.config: LlamaConfig = checkpoint.config
            sizes = PlanSizes(max_rows, slots, _context(self.config, max_context))
            self.backend.require_supported(self.config, sizes.rows)
            with self._phases.measure("load"):
                self.weights: Weights = load_weights(
                    device, checkpoint, self.backend.dtype, threads=threads
                )
        finally:
            if checkpoint is not model:
                checkpoint.close()
        try:
            with self._phases.measure("plan"):
                workspace = self.backend.workspace_bytes(self.config, sizes.buckets, sizes.context)
                self.plan = BufferPlan.allocate(device, self.weights, sizes, workspace=workspace)
        except BaseException:
            self.weights.close()
            raise
        try:
            self._steps = DecoderSteps(
                device,
                self.backend,
                self.plan,
                graphs=graphs,
                build=build,
                warmups=warmups,
                verify=verify,
                graph_budget=graph_budget,
            )
        except BaseException:
            self.plan.close()
            self.weights.close()
            raise
        self._sequences = [Sequence(slot) for slot in range(slots)]
        self._rows = np.zeros(max_rows, ROW)
        self._rows_on_device = b""
        self._options = np.zeros(slots, OPTIONS)
        self._settled = True
        self.stream: Stream = self._steps.stream
        self.cache: GraphCache = self._steps.cache
        self.set_stop_tokens(self.config.eos_token_ids if stop_tokens is None else stop_tokens)
        for slot in range(slots):
            self.set_sampling(GREEDY, slot)

    def __repr__(self) -> str:
        c, sizes = self.config, self.plan.sizes
        return (
            f"<Decoder of {c.layers} layers, hidden {c.hidden}, on {self.device.name}: "
            f"{sizes.slots} slots of {sizes.context} positions>"
        )

    # --- settings
    def set_sampling(
        self, options: SamplingOptions, slot: int = 0, *, limit: int | None = None
    ) -> None:
        """How the slot's next tokens are chosen; replays see it without a new capture.

        `limit`: the slot stops at the token that takes this position (counted from 0) or a later
        one; the end of the context if None.  Raises InputError.
        """
        sequence = self._sequence(slot)
        if limit is not None and limit < 0:
            raise InputError(f"limit is {limit}, must be a position, 0 or more")
        context = self.plan.sizes.context
        self._options[slot] = (
            options.temperature,
            options.top_p,
            options.seed,
            min(options.top_k, self.config.vocabulary),
            context if limit is None else min(limit, context),
        )
        self.plan.options.set(self._options, self.stream)
        sequence.on_device = sequence.stopped = False

    def set_stop_tokens(self, tokens: Iterable[int]) -> None:
        """Which tokens end a sequence.  Raises InputError for more than 16."""
        wanted = list(dict.fromkeys(tokens))
        if len(wanted) > STOP_TOKENS or any(t < 0 for t in wanted):
            raise InputError(f"{len(wanted)} stop tokens; at most {STOP_TOKENS}, none negative")
        stops = np.full(STOP_TOKENS, -1, np.int32)
        stops[: len(wanted)] = wanted
        self.plan.stops.set(stops, self.stream)
        self.stop_tokens = tuple(wanted)
        for sequence in self._sequences:
            sequence.on_device = sequence.stopped = False

    # --- sequences
    def tokens(self, slot: int = 0) -> tuple[int, ...]:
        """The slot's tokens: what was prefilled, and what was chosen after it."""
        return tuple(self._sequence(slot).tokens)

    def stopped(self, slot: int = 0) -> bool:
        """Whether the slot's last token was an end token, or its limit or context is reached."""
        return self._sequence(slot).stopped

    def reset(self, slot: int | None = None) -> None:
        """Forgets a slot's tokens, or all slots'.  Nothing is written to the device."""
        for sequence in self._sequences if slot is None else [self._sequence(slot)]:
            sequence.truncate(0)

    def truncate(self, count: int, slot: int = 0) -> None:
        """Keeps the first `count` tokens of a slot; the last of them is decoded next.

        Raises InputError if there are not so many.
        """
        self._sequence(slot).truncate(count)

    # --- steps
    def prefill(self, tokens: Items[int], slot: int = 0) -> int:
        """Puts tokens behind what the slot's cache holds; the first token chosen after them.

        A token that was chosen before and never decoded is dropped: give it with `tokens` where it
        belongs there.  Raises InputError for ids outside the vocabulary, no tokens, or more than
        the context has room for; ModelError if the logits hold NaN.
        """
        sequence = self._sequence(slot)
        self._check_tokens(tokens, sequence)
        with self._phases.measure("prefill", len(tokens)):
            del sequence.tokens[sequence.length :]
            sequence.on_device = sequence.stopped = False
            largest = self.plan.sizes.rows
            for start in range(0, len(tokens), largest):
                piece = tokens[start : start + largest]
                last = start + largest >= len(tokens)
                self._set_rows(prompt_rows(self._rows, slot, piece, sequence.length, sample=last))
                if last:
                    chosen = self._sampled([sequence], piece)[0]
                else:
                    self._steps(len(piece), sampled=False)
                    sequence.tokens.extend(piece)
                    sequence.length += len(piece)
        return chosen

    def decode(self, slot: int = 0) -> int:
        """One more token of a slot.

        Raises InputError if it is empty or has stopped, ModelError if the logits hold NaN.
        """
        return self.decode_batch((slot,))[0]

    def decode_batch(self, slots: Items[int]) -> list[int]:
        """One more token of each of several slots, in one step.  Raises as `decode`."""
        sequences = [self._sequence(slot) for slot in slots]
        if not sequences or len(set(slots)) != len(sequences):
            raise InputError(f"slots {list(slots)}: one or more are needed, each once")
        for sequence in sequences:
            if sequence.stopped:
                raise InputError(f"slot {sequence.slot} has stopped; reset or truncate it")
            if sequence.length >= self.plan.sizes.context:
                raise InputError(f"slot {sequence.slot} is at the end of its context")
        with self._phases.measure("decode", len(sequences)):
            self._set_rows(decode_rows(self._rows, sequences, device_state=self.device_state))
            return self._sampled(sequences)

    def logits(self, slot: int = 0) -> npt.NDArray[np.float32]:
        """A copy of the slot's latest logits: float32, (vocabulary,).  Waits for the step."""
        self._sequence(slot)
        return self.plan.buffers["logits"][slot].to_numpy(self.stream)

    def _sampled(self, sequences: list[Sequence], piece: Items[int] = ()) -> list[int]:
        """Runs a step that samples once for each sequence; what was chosen.

        `piece`: the step is the end of this one sequence's prompt, else one token of each.
        """
        self._require_open()
        count = len(piece) or 1
        if not self._settled:  # an interrupted step must not write where this one is waited for
            self.stream.synchronize()
        ring, size = self.plan.ring.array, self.plan.sizes.ring
        entries = []
        for sequence in sequences:
            sequence.on_device = False  # until the step is known to have ended well
            at = (sequence.length + count) % size
            entries.append(ring[sequence.slot, at : at + 1])
            entries[-1]["tag"] = -1
        self._settled = False
        self._steps(len(piece) or len(sequences), sampled=True)
        self._wait_for(entries)
        self._settled = True
        chosen = []
        for sequence, entry in zip(sequences, entries, strict=True):
            token, tag = entry[0].item()
            assert tag >> 1 == sequence.length + count, "the step skipped a row that was active"
            if token < 0:
                raise ModelError(
                    f"slot {sequence.slot}, position {tag >> 1}: the logits hold NaN, so no token "
                    "can be chosen; the weights may be damaged"
                )
            sequence.tokens += [*piece, token]
            sequence.length += count
            sequence.stopped, sequence.on_device = bool(tag & 1), True
            chosen.append(token)
        return chosen

    def _wait_for(self, entries: list[npt.NDArray[Any]]) -> None:
        """Returns once all entries are there; what was written before them is in stream order.

        A look at pinned memory is some microseconds faster than waiting for the stream, which comes
        after `_SPIN_SECONDS` without an answer, and which raises if the step failed.
        """
        if self.backend.whole_entries:
            words = [entry.view(np.int64) for entry in entries]  # token and tag in one load
            give_up = time.perf_counter() + _SPIN_SECONDS
            while time.perf_counter() < give_up:
                # The tag is the upper half, so a word is negative as long as its tag is.
                if all(word.item() >= 0 for word in words):
                    return
        self.stream.synchronize()

    def _set_rows(self, rows: npt.NDArray[Any]) -> None:
        """Sets all rows in one staged copy, unless they are there already."""
        data = rows.tobytes()
        if data != self._rows_on_device:
            self._rows_on_device = b""
            self.plan.rows.set(rows, self.stream)
            self._rows_on_device = data
            self._phases.host_writes += 1

    # --- what a step runs
    def program(self, *, sampled: bool = True) -> tuple[KernelCall, ...]:
        """The launches of a step, in order."""
        return self._steps.programs[sampled]

    def graph(self, rows: int = 1, *, sampled: bool = True) -> Graph:
        """The graph of a step of so many rows (or of their bucket), captured for reading."""
        self._require_open()
        return self._steps.graph(rows, sampled=sampled)

    @property
    def last_decision(self) -> Decision | None:
        """How the last step was run, and why; None before the first."""
        return self._steps.last_decision

    def profile(self) -> AbstractContextManager[OperationTimes]:
        """`with decoder.profile() as times`: every operation is timed by itself.

        Steps inside the block run eagerly for it, with that reason.
        """
        return self._steps.profile()

    # --- numbers
    def statistics(self) -> DecoderStatistics:
        """What was launched, how, why eagerly, and how long the phases took."""
        return DecoderStatistics.of(
            self._steps.statistics(),
            self.cache.statistics(),
            self._phases,
            launches_per_token=len(self.program()),
            weight_bytes=self.weights.nbytes,
            plan_bytes=self.plan.nbytes,
            kernel_seconds=self._steps.kernel_seconds,
        )

    # --- checks and lifetime
    def _sequence(self, slot: int) -> Sequence:
        if not 0 <= slot < len(self._sequences):
            raise InputError(f"slot {slot} of {len(self._sequences)}: there is no such slot")
        return self._sequences[slot]

    def _check_tokens(self, tokens: Items[int], sequence: Sequence) -> None:
        if not tokens:
            raise InputError("no tokens: a prompt has one at least")
        wrong = [t for t in tokens if not 0 <= t < self.config.vocabulary]
        if wrong:
            raise InputError(
                f"token {wrong[0]} is outside the vocabulary of {self.config.vocabulary}"
            )
        room = self.plan.sizes.context - sequence.length
        if len(tokens) > room:
            raise InputError(
                f"{len(tokens)} tokens do not fit: the context of slot {sequence.slot} has room "
                f"for {room} more of {self.plan.sizes.context} (max_context)"
            )

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("the decoder is closed; make another")

    def close(self) -> None:
        """Waits for its work and gives everything back: graphs, buffers, weights.  Idempotent."""
        if self._closed:
            return
        self._closed = True
        if not self.device.context.closed:
            self.stream.synchronize()
        self._steps.close()
        self.plan.close()
        self.weights.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()


def _context(config: LlamaConfig, wanted: int | None) -> int:
    if wanted is None:
        return min(DEFAULT_CONTEXT, config.context_length)
    if not 1 <= wanted <= config.context_length:
        raise InputError(
            f"max_context is {wanted}; the model was trained for 1 to {config.context_length}"
        )
    return wanted
