"""A Llama-family decoder on captured graphs: tokens in, tokens out.

    with ost.open_device() as device, Decoder(device, "model.gguf") as decoder:
        token = decoder.prefill([4898, 314, 260])     # the first token after the prompt
        while not decoder.stopped():
            token = decoder.decode()                  # one graph launch, no host write
        for token in decoder.run(count=100):          # the same, the device never waiting
            ...

Two graphed steps share one program and one buffer plan: "prefill" (pieces of a prompt, no output
head) and "decode" (whatever samples: the last piece of a prompt, and every token after it).  Their
only size is the number of rows; everything else is read on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from ostinato import Device, Graph, GraphCache, Stream
from ostinato.driver.closeable import Closeable
from ostinato.errors import ClosedError, InputError, NotAvailableError
from ostinato.models.arguments import quoted, token_ids, whole
from ostinato.models.backend import Backend, LibraryRows
from ostinato.models.config import LlamaConfig
from ostinato.models.decoder_statistics import DecoderStatistics, OperationTimes, Phases
from ostinato.models.files.checkpoint import Checkpoint
from ostinato.models.files.open import open_checkpoint
from ostinato.models.plan import BufferPlan, PlanSizes
from ostinato.models.program import OPTIONS, SAMPLED_ROWS, STOP_TOKENS, KernelCall
from ostinato.models.run import BatchRun, Run, RunOptions, TokenRun
from ostinato.models.sampling import GREEDY, SamplingOptions
from ostinato.models.sequences import Slots
from ostinato.models.step_graphs import StepGraphs
from ostinato.models.stepper import Stepper, TokenRing
from ostinato.models.weights import Weights, load_weights
from ostinato.replay import Decision

__all__ = ["DEFAULT_CONTEXT", "Decoder", "backend_for"]

DEFAULT_CONTEXT = 2048
"""Positions a slot has if nobody says otherwise, and the model was trained for as many."""


class Decoder(Closeable):
    """A model in device memory with its KV cache, stepping through graphs.

    `model`: a path for `open_checkpoint`, or an open checkpoint (then the caller closes it; it is
    not needed after construction).  `max_context`: positions of each sequence; `DEFAULT_CONTEXT` or
    the model's own if that is less.  `slots`: sequences at once.  `max_rows`: rows of the largest
    step, so the size of a prompt's pieces; what suits the device and the context if None.
    `library_rows`: steps of so many rows and more multiply with cuBLASLt where it is installed
    (`statistics().library` says so, or why not); "auto" goes by the model's size (8 for 1B, 64 for
    135M), None is never.  Without it `max_rows` goes to 64.

    `graphs` off runs everything eagerly.  `build`: "capture", or "record" to build graphs by hand
    from the first run's launches.  `warmups`: eager runs of each bucket before its capture.
    `verify` as for GraphedStep.  `device_state` off (it can be changed between steps): the host
    sets token and position before each step, instead of the device advancing them.
    `stop_tokens`: tokens that end a sequence, 16 at most; the model's own if None.  `graph_budget`:
    device bytes that all graphs together may take.  `threads`: on a CPU, how many work; as many as
    this process has processors, or OSTINATO_THREADS, if None.  They sleep between steps, and are
    fewer for a while where other processes want the processors.  On a GPU, of the weights'
    conversion where the host does it.

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
        max_rows: int | None = None,
        library_rows: LibraryRows = "auto",
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
        if library_rows is not None and library_rows != "auto":
            library_rows = whole(library_rows, "library_rows", 1)
        warmups = whole(warmups, "warmups", 0)
        if verify not in ("off", "first"):
            verify = whole(verify, "verify", 1)
        if threads is not None:
            threads = whole(threads, "threads", 1)
        self.backend: Backend = backend_for(device, library_rows=library_rows, threads=threads)
        self._phases = Phases()
        self._closed = False
        checkpoint = model if isinstance(model, Checkpoint) else open_checkpoint(model)
        try:
            self.config: LlamaConfig = checkpoint.config
            context = _context(self.config, max_context)
            if max_rows is None:
                bucket = max(SAMPLED_ROWS, 1 << (context - 1).bit_length())  # of a whole context
                max_rows = min(self.backend.piece_rows(self.config), bucket)
            sizes = PlanSizes(whole(max_rows, "max_rows", 1), whole(slots, "slots", 1), context)
            stops = _stop_tokens(
                self.config.eos_token_ids if stop_tokens is None else stop_tokens, self.config
            )
            sampled = min(sizes.rows, sizes.sampled_rows)
            self.backend.require_supported(self.config, sizes.rows, sampled)
            with self._phases.measure("load"):
                self.weights: Weights = load_weights(
                    device,
                    checkpoint,
                    self.backend.dtype,
                    packed=self.backend.packed,
                    threads=threads,
                    convert=self.backend.convert,
                )
        finally:
            if checkpoint is not model:
                checkpoint.close()
        try:
            with self._phases.measure("plan"):
                workspace = self.backend.workspace_bytes(self.config, sizes.buckets, sizes.context)
                more = self.backend.buffers(self.config, sizes.rows)
                self.plan = BufferPlan.allocate(
                    device, self.weights, sizes, workspace=workspace, more=more
                )
        except BaseException:
            self.weights.close()
            raise
        try:
            self._steps = StepGraphs(
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
        self.stream: Stream = self._steps.stream
        self.cache: GraphCache = self._steps.cache
        ring = TokenRing(self.plan.ring, self.stream, spins=self.backend.spins)
        self._stepper = Stepper(self.plan, self._steps, ring, self._phases)
        self._run: Run[int] | Run[dict[int, int]] | None = None
        self._slots = Slots(sizes.slots, context=sizes.context, vocabulary=self.config.vocabulary)
        self._options = np.zeros(sizes.slots, OPTIONS)
        self.set_stop_tokens(stops)
        for sequence in self._slots:
            self.set_sampling(GREEDY, sequence.slot)

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
        sequence = self._slots[slot]
        if not isinstance(options, SamplingOptions):
            raise InputError(f"options is {quoted(options)}, must be SamplingOptions")
        context = self.plan.sizes.context
        last = context if limit is None else min(whole(limit, "limit", 0), context)
        self._begin("set_sampling")
        sequence.limit = last
        self._options[sequence.slot] = (
            options.temperature,
            options.top_p,
            options.seed,
            min(options.top_k, self.config.vocabulary),
            sequence.limit,
            options.min_p,
            options.repetition_penalty,
        )
        self.plan.options.set(self._options, self.stream)
        sequence.on_device = sequence.stopped = False

    def set_stop_tokens(self, tokens: Iterable[int]) -> None:
        """Which tokens end a sequence.

        Raises InputError for more than 16, and for what is no token of the vocabulary.
        """
        wanted = _stop_tokens(tokens, self.config)
        self._begin("set_stop_tokens")
        stops = np.full(STOP_TOKENS, -1, np.int32)
        stops[: len(wanted)] = wanted
        self.plan.stops.set(stops, self.stream)
        self.stop_tokens = wanted
        for sequence in self._slots:
            sequence.on_device = sequence.stopped = False

    # --- sequences
    def tokens(self, slot: int = 0) -> tuple[int, ...]:
        """The slot's tokens: what was prefilled, and what was chosen after it."""
        return tuple(self._slots[slot].tokens)

    def stopped(self, slot: int = 0) -> bool:
        """Whether the slot's last token was an end token, or its limit or context is reached."""
        return self._slots[slot].stopped

    def reset(self, slot: int | None = None) -> None:
        """Forgets a slot's tokens, or all slots'.  Nothing is written to the device."""
        sequences = [*self._slots] if slot is None else [self._slots[slot]]
        self._end_run("reset")
        for sequence in sequences:
            sequence.truncate(0)

    def truncate(self, count: int, slot: int = 0) -> None:
        """Keeps the first `count` tokens of a slot; the last of them is decoded next.

        Raises InputError if there are not so many.
        """
        sequence = self._slots[slot]
        self._end_run("truncate")
        sequence.truncate(count)

    def keep_common(self, tokens: Iterable[int], slot: int = 0) -> int:
        """Keeps of a slot's cache what `tokens` begin with, and returns how many tokens that are;
        the rest of them, one at the least, is then for `prefill`.

        Raises InputError for ids outside the vocabulary.
        """
        sequence = self._slots[slot]
        found = token_ids(tokens, self.config.vocabulary, "tokens")
        self._end_run("keep_common")
        return sequence.keep_common(found)

    # --- steps
    def prefill(
        self,
        tokens: Iterable[int],
        slot: int = 0,
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> int:
        """Puts tokens behind what the slot's cache holds; the first token chosen after them.

        A token that was chosen before and never decoded is dropped: give it with `tokens` where it
        belongs there.  `progress` is called after each piece of the prompt that was launched, and
        at the end, with how many of the tokens are done and how many there are.

        Raises InputError for ids outside the vocabulary, no tokens, or more than the context has
        room for; ModelError if the logits hold NaN.
        """
        sequence = self._slots[slot]
        found = self._slots.prompt(tokens, sequence)
        self._begin("prefill")
        del sequence.tokens[sequence.length :]
        sequence.on_device = sequence.stopped = False
        return self._stepper.prompt(sequence, found, progress)

    def decode(self, slot: int = 0) -> int:
        """One more token of a slot.

        Raises InputError if it is empty or has stopped, ModelError if the logits hold NaN.
        """
        return self.decode_batch((slot,))[0]

    def decode_batch(self, slots: Iterable[int]) -> list[int]:
        """One more token of each of several slots, in one step.  Raises as `decode`."""
        sequences = self._slots.ready(slots)
        self._begin("decode")
        return self._stepper.together(sequences, device_state=self.device_state)

    def run(
        self,
        slot: int = 0,
        *,
        count: int | None = None,
        tokens_per_launch: int = 1,
        ahead: int | None = None,
    ) -> TokenRun:
        """An iterator over a slot's next tokens, with the device kept busy.

        Ends where the slot stops, or after `count` tokens.  `tokens_per_launch`: so many tokens
        from one graph launch, by a loop on the device that ends where the slot stops; if it cannot
        be made, one each, with the reason in the statistics.  `ahead`: launches under way besides
        the one whose token is waited for (`models.run`); 2 if None, and tokens_per_launch *
        (ahead + 1) at most 256.  The tokens are those of `decode`, bit by bit.

        One run at a time: any other call that changes the decoder or runs a step (prefill, decode,
        run, reset, truncate, set_…, profile) ends it, as `close()` does, and takes up after the
        last token that was handed out.  Steps wait for each other while `device_state` is off, and
        where a step has no graph: then it is launched operation by operation, one a token.
        Raises as `decode`, InputError for options that make no sense.
        """
        options = RunOptions(count, tokens_per_launch, ahead).checked(self._stepper.ring.size)
        sequences = self._slots.ready((slot,))
        self._begin("run")
        run = TokenRun(self._stepper, sequences, options, device_state=self.device_state)
        self._run = run
        return run

    def run_batch(
        self,
        slots: Iterable[int],
        *,
        count: int | None = None,
        tokens_per_launch: int = 1,
        ahead: int | None = None,
    ) -> BatchRun:
        """As `run` for several slots in step: each item is {slot: token} of those that had not
        stopped before, so the last ones have fewer slots.  Ends where all have stopped."""
        options = RunOptions(count, tokens_per_launch, ahead).checked(self._stepper.ring.size)
        sequences = self._slots.ready(slots)
        self._begin("run_batch")
        run = BatchRun(self._stepper, sequences, options, device_state=self.device_state)
        self._run = run
        return run

    def logits(self, slot: int = 0) -> npt.NDArray[np.float32]:
        """A copy of the slot's latest logits: float32, (vocabulary,).  Waits for the step.

        Raises InputError if a run computed further than the tokens it handed out: the logits there
        are of a later token.
        """
        sequence = self._slots[slot]
        if sequence.ahead or (self._run is not None and self._run.is_ahead(sequence)):
            raise InputError(
                f"the device is further in slot {slot} than the {len(sequence.tokens)} tokens "
                "handed out, and so are its logits; truncate by one token and decode it again, or "
                "run with ahead=0"
            )
        return self.plan.buffers["logits"][sequence.slot].to_numpy(self.stream)

    def _begin(self, what: str) -> None:
        """Before every step and setting: a run under way ends."""
        self._require_open()
        self._end_run(what)

    def _end_run(self, by: str) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.end(f"{by}()")

    # --- what a step runs
    def program(self, *, sampled: bool = True) -> tuple[KernelCall, ...]:
        """The calls of a step, in order.  A backend may do several in one launch, or one in several
        (where a library multiplies); `graph` has the launches."""
        return self._steps.programs[sampled]

    def graph(self, rows: int = 1, *, sampled: bool = True) -> Graph:
        """The graph of a step of so many rows (or of their bucket), captured for reading."""
        self._require_open()
        return self._steps.graph(whole(rows, "rows", 1), sampled=sampled)

    @property
    def last_decision(self) -> Decision | None:
        """How the last step was run, and why; None before the first."""
        return self._steps.last_decision

    @contextmanager
    def profile(self) -> Iterator[OperationTimes]:
        """`with decoder.profile() as times`: every operation is timed by itself.

        Steps inside the block run eagerly for it, with that reason.
        """
        self._end_run("profile")
        with self._steps.profile() as times:
            try:
                yield times
            finally:
                self._end_run("the end of profile")

    # --- numbers
    def statistics(self) -> DecoderStatistics:
        """What was launched, how, why eagerly, and how long the phases took."""
        return DecoderStatistics.of(
            self._steps.statistics(),
            self.cache.statistics(),
            self._phases,
            launches_per_token=self._steps.launches,
            weight_bytes=self.weights.nbytes,
            plan_bytes=self.plan.nbytes,
            kernel_seconds=self._steps.kernel_seconds,
            library=self.backend.library,
        )

    # --- lifetime
    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("the decoder is closed; make another")

    def close(self) -> None:
        """Waits for its work and gives everything back: graphs, buffers, weights.  Idempotent."""
        if self._closed:
            return
        self._end_run("close")
        self._closed = True
        if not self.device.context.closed:
            self.stream.synchronize()
        self._steps.close()
        self.plan.close()
        self.weights.close()


def backend_for(
    device: Device, *, library_rows: LibraryRows = "auto", threads: int | None = None
) -> Backend:
    """The backend for a device, by the kernels that it can run.

    `library_rows`: see `LibraryRows`.  `threads`: of kernels that run on the CPU; see
    `packed_kernels`.
    Raises NotAvailableError where there are no kernels for it, InputError, SettingsError.
    """
    can = device.capabilities
    if can.runs_host_functions:
        from ostinato.models.host.backend import HostBackend

        return HostBackend(device, threads=threads)
    if can.compiles_cuda:
        from ostinato.models.cuda.backend import CudaBackend

        return CudaBackend(device, library_rows=library_rows)
    raise NotAvailableError(
        f"the decoder has no kernels in {can.source_language!r} yet, which {device.name} needs; "
        'open_device("host") runs it on the CPU'
    )


def _stop_tokens(tokens: Iterable[int], config: LlamaConfig) -> tuple[int, ...]:
    found = tuple(dict.fromkeys(token_ids(tokens, config.vocabulary, "stop_tokens")))
    if len(found) > STOP_TOKENS:
        raise InputError(f"{len(found)} stop tokens; {STOP_TOKENS} at most")
    return found


def _context(config: LlamaConfig, wanted: int | None) -> int:
    if wanted is None:
        return min(DEFAULT_CONTEXT, config.context_length)
    wanted = whole(wanted, "max_context")
    if not 1 <= wanted <= config.context_length:
        raise InputError(
            f"max_context is {wanted}; the model was trained for 1 to {config.context_length}"
        )
    return wanted
