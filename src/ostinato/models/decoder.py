"""A Llama-family decoder on captured graphs: tokens in, tokens out.

    with ost.open_device() as device, Decoder(device, "model.gguf") as decoder:
        token = decoder.prefill([4898, 314, 260])     # the first token after the prompt
        while not decoder.stopped():
            token = decoder.decode()                  # one graph launch, no host write
        for token in decoder.run(count=100):          # the same, but launched ahead of the reads
            ...

Two graphed steps share one program and one buffer plan: "prefill" (pieces of a prompt, no output
head) and "decode" (steps that sample: the last piece of a prompt, and every token after it).  Their
only size is the number of rows; everything else is read on the device.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from ostinato import Device, DeviceArray, Graph, GraphCache, Operation, Stream
from ostinato.driver.closeable import Closeable
from ostinato.driver.stream import require_stream
from ostinato.errors import (
    ClosedError,
    DriverError,
    InputError,
    NotAvailableError,
    OstinatoError,
)
from ostinato.lowlevel import uninterrupted
from ostinato.models.arguments import quoted, require_function, token_ids, whole
from ostinato.models.backend import Backend, DeviceModel, LibraryRows, WeightsKind
from ostinato.models.calls import Calls, alone
from ostinato.models.config import LlamaConfig
from ostinato.models.cuda.bricks import Formats
from ostinato.models.decoder_statistics import DecoderStatistics, OperationTimes, Phases
from ostinato.models.files.checkpoint import Checkpoint
from ostinato.models.files.open import open_checkpoint
from ostinato.models.plan import BufferPlan, PlanSizes
from ostinato.models.program import (
    BIAS,
    MOST_BIASES,
    MOST_LOGPROBS,
    OPTIONS,
    SAMPLED_ROWS,
    STOP_TOKENS,
    KernelCall,
)
from ostinato.models.run import BatchRun, Run, RunOptions, TokenRun
from ostinato.models.sampling import GREEDY, SamplingOptions, require_options
from ostinato.models.sequences import Sequence, Sequences
from ostinato.models.sharding import Sharding, shard_buffers, shard_checkpoint
from ostinato.models.step_graphs import StepGraphs
from ostinato.models.stepper import Stepper, TokenLogprobs, TokenMasks, TokenRing
from ostinato.models.weights import Weights, load_weights
from ostinato.settings import graphs_enabled
from ostinato.step import Decision

if TYPE_CHECKING:  # these are imported where ranks are made: nobody else needs them
    from ostinato.distributed import Group
    from ostinato.models.ranks import Ranks

AnyRun = TypeVar("AnyRun", bound=Run[Any])

_NO_DRAFTS = (
    "no drafts: no sequence is plainly greedy (of a group's decoder: not all are), or there are "
    "too many for one step"
)

DEFAULT_CONTEXT = 2048
"""The positions of a sequence if `max_context` is None; fewer if the model was trained for fewer.
"""


class Decoder(Closeable):
    """A model in device memory with its KV cache, whose steps are replayed from graphs.

    `model`: a path for `open_checkpoint`; an open checkpoint (the caller closes it; it is not
    needed after construction); or `Weights` in device memory (`adopt_weights`; the caller closes
    them after the decoder).  `max_context`: positions of each sequence; if None 2,048, or the
    model's own maximum if that is less.  `sequences`: their number.  `max_rows`: rows of the
    largest step, so the size of a prompt's pieces; at least `sequences`; if None a number that
    suits the device and the context (2,048 at most; fewer take less memory, `plan.nbytes`).
    `library_rows`: steps of at least this many rows multiply with cuBLASLt where it is installed
    (`statistics().library` names it, or the reason why not); "auto" depends on the model's size (33
    for 8B, 65 for 1B and 135M), None means never.  Without the library `max_rows` is 64 at most.

    `weights`: "packed" keeps a file's quantised matrices packed and unpacks them in the kernels;
    "bf16" converts all of them to bfloat16 in a GPU's memory; "auto" is the faster of the two
    (`statistics().weights` says which).  On a CPU weights stay packed if the compiled kernels are
    there, and are float32 otherwise.

    `graphs`: False runs everything eagerly; None follows OSTINATO_NO_GRAPHS.  `build`: "capture",
    or "record" to build graphs node by node from the first run's launches.  `warmups`: eager runs
    of each bucket before its capture.
    `verify`: see `GraphedStep`.  `device_state`: if False (it can be changed between steps), the
    host sets token and position before each step, instead of the device advancing them.
    `stop_tokens`: tokens that end a sequence, 16 at most; the model's own if None.  `graph_budget`:
    device bytes that all graphs together may take.  `threads`: on a CPU, the number of worker
    threads; if None OSTINATO_THREADS, else one for each processor of this process, 16 at most.
    They sleep between steps, and fewer work for a while if other processes load the processors.  On
    a GPU, the threads that convert weights where the host does it.

    `group`: this decoder is one rank of several, each with a share of the model on a device of its
    own; `model` is the whole model on all of them, a path or a checkpoint.  All ranks must make the
    same calls in the same order, and get the same tokens.  Calls wait for the other ranks and raise
    GroupError if one fails.  The caller closes the group, after the decoder.  `leads`: this decoder
    is rank 0's, and each of its calls is repeated by the other ranks, which call `follow`; their
    programs need not know what rank 0 will do, or when.  `collectives`: the ranks' means of
    exchange, "auto", "exchange" or "library" (`open_collectives`); if None OSTINATO_COLLECTIVES
    decides.

    `lookup`: a step of a run gives each sequence up to so many tokens more: it drafts what followed
    earlier in the prompt or the answer after the same last tokens (one to three), and keeps the
    drafts that the model chooses too.  For sequences that are greedy, without penalties, biases,
    log probabilities and masks; others in the run get one token a step, and a run in which no
    sequence drafts goes as without (`one_by_one` in the statistics).  Decoders of a group draft
    only while all their sequences may, and in runs without masks.  0 is off, 63 the most, or 3
    without the CPU's compiled kernels.  All sequences of a step share 64 rows (`max_rows`, or 4
    without the compiled kernels, if that is less), so with many each drafts fewer tokens, and none
    where two rows each are too many.
    A step has as many rows whether it drafts or not, `lookup` + 1 or more for each sequence that
    may, so that no token depends on the drafts: a run gives the tokens that `decode_batch` gives
    for the same sequences.  These are the tokens without lookup on a CPU; on a GPU steps of other
    numbers of rows round differently, so that two tokens of almost the same logit may change
    places.

    `stream`: the stream of all work, which the caller closes after the decoder; if None the decoder
    makes one.  Calls of decoders that share a stream must not overlap.

    Raises ModelError (UnsupportedModelError before anything is loaded), CompileError,
    OutOfMemoryError, NotAvailableError, InputError.  Calls of one decoder must not overlap: the
    later one raises InputError.
    After an exception in a step the sequences can be reset and used again, unless the exception was
    a ContextPoisonedError.
    """

    def __init__(
        self,
        device: Device,
        model: str | Path | Checkpoint | Weights,
        *,
        max_context: int | None = None,
        max_rows: int | None = None,
        library_rows: LibraryRows = "auto",
        weights: WeightsKind = "auto",
        sequences: int = 1,
        graphs: bool | None = None,
        build: Literal["capture", "record"] = "capture",
        warmups: int = 1,
        verify: Literal["off", "first"] | int = "off",
        device_state: bool = True,
        stop_tokens: Iterable[int] | None = None,
        graph_budget: int | str | None = None,
        threads: int | None = None,
        group: Group | None = None,
        leads: bool = False,
        collectives: str | None = None,
        stream: Stream | None = None,
        lookup: int = 0,
    ) -> None:
        self.device = device
        self.group = group
        """The ranks that share the model; None for one device."""
        if stream is not None:
            _require_usable(stream, device)
        self.device_state = device_state
        if library_rows is not None and library_rows != "auto":
            library_rows = whole(library_rows, "library_rows", 1)
        sequences = whole(sequences, "sequences", 1)
        warmups = whole(warmups, "warmups", 0)
        lookup = whole(lookup, "lookup", 0)
        if verify not in ("off", "first"):
            verify = whole(verify, "verify", 1)
        if threads is not None:
            threads = whole(threads, "threads", 1)
        if weights not in get_args(WeightsKind):
            kinds = ", ".join(map(repr, get_args(WeightsKind)))
            raise InputError(f"weights is {quoted(weights)}; there are {kinds}")
        given = model if isinstance(model, Weights) else None
        if given is not None and weights != "auto":
            raise InputError(f"weights={weights!r}: the weights given are on the device already")
        if given is not None and group is not None and group.size > 1:
            raise InputError(
                "weights in device memory are not split over ranks; give the group's decoders a "
                "path or a checkpoint"
            )
        if leads and (group is None or group.rank != 0):
            raise InputError("leads=True is for rank 0 of a group; the other ranks call follow()")
        self._owns_stream = stream is None
        self.stream = device.create_stream() if stream is None else stream
        self.backend: Backend = backend_for(
            device,
            library_rows=library_rows,
            threads=threads,
            packed=given.packed if given is not None else True if weights == "packed" else None,
            stream=self.stream,
        )
        self._calls = Calls()
        self.changes = 0
        """The number of calls that ran a step, or changed a sequence or a setting; the steps of a
        run do not count."""
        self._phases = Phases()
        self._closed = False
        self._owns_weights = given is None
        checkpoint = model if isinstance(model, Checkpoint | Weights) else open_checkpoint(model)
        sharding: Sharding | None = None
        try:
            self.config: LlamaConfig = checkpoint.config
            part = self.config
            """The model that this decoder's kernels compute: a rank's part, or the whole."""
            if group is not None and group.size > 1:
                sharding = Sharding(self.config, group.rank, group.size)
                part = sharding.part
            context = _context(self.config, max_context)
            sequences = whole(sequences, "sequences")
            if max_rows is None:
                bucket = max(SAMPLED_ROWS, 1 << (context - 1).bit_length())  # for a full context
                max_rows = max(sequences, min(self.backend.piece_rows(part), bucket))
            alike = self.backend.alike_rows - 1
            if lookup > alike:
                raise InputError(
                    f"lookup is {lookup}, must be 0 to {alike} with these kernels "
                    f"({self.backend.name}): in larger steps a row's bits depend on other rows"
                )
            rows = whole(max_rows, "max_rows", 1)
            sizes = PlanSizes(rows, sequences, context, lookup=lookup, alike_rows=alike + 1)
            stops = _stop_tokens(
                self.config.eos_token_ids if stop_tokens is None else stop_tokens, self.config
            )
            sampled = min(sizes.rows, sizes.sampled_rows)
            self.backend.require_supported(part, sizes.rows, sampled)
            self.weights: Weights
            if isinstance(checkpoint, Weights):
                self.weights = _fitting(checkpoint, device, self.backend)
            else:
                read = checkpoint if sharding is None else shard_checkpoint(checkpoint, sharding)
                formats = formats_for(self.backend, read, weights, sequences)
                with self._phases.measure("load"):
                    self.weights = load_weights(
                        device,
                        read,
                        self.backend.dtype,
                        packed=self.backend.packed,
                        formats=formats,
                        threads=threads,
                        convert=self.backend.convert,
                    )
        finally:
            if checkpoint is not model:
                checkpoint.close()
        with ExitStack() as made:  # any exception before `pop_all` closes these, last first
            made.callback(self._close_weights)
            with self._phases.measure("plan"):
                here = DeviceModel(part, context, self.weights.formats)
                workspace = self.backend.workspace_bytes(here, sizes.buckets)
                more = self.backend.buffers(here, sizes.rows)
                self._ranks: Ranks | None = None
                if group is not None and sharding is not None:
                    from ostinato.models.ranks import Ranks

                    shared = self.backend.shared_buffers(here, sizes.rows, sharding.size)
                    self._ranks = Ranks(group, sharding, device, collectives, shared)
                    made.callback(self._ranks.close)
                    # Larger steps have their partial sums in the shared memory.
                    summed = sampled if self._ranks.shared else sizes.rows
                    more |= shard_buffers(
                        sharding, sizes.rows, summed, sizes.sequences, sizes.draft_rows
                    )
                self.plan = BufferPlan.allocate(
                    device,
                    self.weights,
                    sizes,
                    workspace=workspace,
                    more=more,
                    given=self._ranks.shared if self._ranks is not None else {},
                )
            made.callback(self.plan.close)
            self._gather: tuple[Operation, ...] = ()
            """The operations that collect all ranks' logits on this rank."""
            if self._ranks is not None:
                on = graphs_enabled(graphs)
                steps = f"steps: graphs {on}, build {build!r}, warmups {warmups}, verify {verify!r}"
                self._ranks.agree_model(self.config, self.backend, self.plan, steps)
                self._gather = self._ranks.gather_logits(self.plan)
                if (sums := self._ranks.collectives.sums(self.config.hidden)) is not None:
                    self.plan.buffers["sums"] = sums
                if (windows := self._ranks.collectives.windows) is not None:
                    self.plan.buffers["windows"] = windows
            self._steps = StepGraphs(
                device,
                self.backend,
                self.plan,
                self.stream,
                graphs=graphs,
                build=build,
                warmups=warmups,
                verify=verify,
                graph_budget=graph_budget,
                ranks=self._ranks,
            )
            made.pop_all()
        self.graph_cache: GraphCache = self._steps.graph_cache
        self._run: Run[Any] | None = None
        self._sequences = Sequences(
            sizes.sequences, context=sizes.context, vocabulary=self.config.vocabulary
        )
        self._options = np.zeros(sizes.sequences, OPTIONS)
        self._biases: dict[int, tuple[tuple[int, float], ...]] = {}
        """The biases on the device, by sequence."""
        self.stop_tokens: tuple[int, ...] = ()
        try:
            ring = TokenRing(self.plan.ring, self.stream, spins=self.backend.spins)
            self._stepper = Stepper(self.plan, self._steps, ring, self._phases, self._ranks)
            self.set_stop_tokens(stops)
            for sequence in self._sequences:
                self.set_sampling(GREEDY, sequence.index)
        except BaseException:
            self.close()
            raise
        if leads and self._ranks is not None:
            from ostinato.models.leading import Lead

            self._calls.lead = Lead(self._ranks)

    def __repr__(self) -> str:
        c, sizes = self.config, self.plan.sizes
        return (
            f"<Decoder of {c.layers} layers, hidden {c.hidden}, on {self.device.name}: "
            f"{sizes.sequences} sequences of {sizes.context} positions"
            f"{', closed' * self._closed}>"
        )

    # --- settings
    @property
    def spins(self) -> bool:
        """True if the host polls for a token for up to 2 ms before it waits: some µs faster, but
        the loop holds the interpreter's lock.  The default is the backend's; a program with other
        busy threads should set it to False, between steps."""
        return self._stepper.ring.spins

    @spins.setter
    def spins(self, wanted: bool) -> None:
        self._stepper.ring.spins = bool(wanted)

    @alone
    def set_sampling(
        self,
        options: SamplingOptions,
        sequence: int = 0,
        *,
        limit: int | None = None,
        answer: int = 0,
        logprobs: int | None = None,
    ) -> None:
        """Sets how the sequence's next tokens are chosen; graphs read the options from device
        memory, so no new capture is needed.

        `limit`: the sequence stops at the token that takes this position (counted from 0) or a
        later one; the end of the context if None.  `answer`: the length of the prompt, behind which
        frequency and presence penalties count tokens.  `logprobs`: the number of likeliest tokens,
        0 to 20, that `Decoder.logprobs` returns with each next token; None for none.  Raises
        InputError.
        """
        self._require_open()
        one = self._sequences[sequence]
        require_options(options, "options")
        context = self.plan.sizes.context
        last = context if limit is None else min(whole(limit, "limit", 0), context)
        answer = whole(answer, "answer", 0)
        top = None if logprobs is None else whole(logprobs, "logprobs", 0, MOST_LOGPROBS)
        biases = options.logit_bias
        if biases and biases[-1][0] >= self.config.vocabulary:
            raise InputError(
                f"logit_bias of token {biases[-1][0]}: there are token ids 0 to "
                f"{self.config.vocabulary - 1}"
            )
        self._begin("set_sampling")
        wanted = self._options.copy()
        wanted[one.index] = (
            options.temperature,
            options.top_p,
            options.seed,
            min(options.top_k, self.config.vocabulary),
            last,
            options.min_p,
            options.repetition_penalty,
            options.frequency_penalty,
            options.presence_penalty,
            min(answer, context),
            len(biases),
            0 if top is None else 1 + min(top, self.config.vocabulary),
        )
        self._note(f"set_sampling of sequence {one.index}: {wanted[one.index]} {biases}")
        before = self._biases.get(one.index, ())
        try:
            if biases and biases != before:
                self._set_biases(one.index, biases)
            self._set(self.plan.options, wanted, self._options)
        except BaseException:
            with suppress(OstinatoError):
                self._set_biases(one.index, before)
            raise
        self._options, one.limit, one.plain = wanted, last, _plain(wanted[one.index])
        one.logprobs_from = len(one.tokens)
        # Rows that are plain need only the best logit of each rank.
        self._steps.whole_logits = not _plain(wanted)
        self._look_whether_stopped(one)

    def _set_biases(self, sequence: int, biases: tuple[tuple[int, float], ...]) -> None:
        pairs = np.zeros(MOST_BIASES, BIAS)
        pairs[: len(biases)] = np.array([*biases], BIAS)
        words = pairs.view(np.int32).reshape(MOST_BIASES, -1)
        self.plan.buffers["biases"][sequence].set(words, self.stream)
        self._biases[sequence] = biases

    @alone
    def set_stop_tokens(self, tokens: Iterable[int]) -> None:
        """Sets the tokens that end a sequence.

        Raises InputError for more than 16 tokens, or for a token outside the vocabulary.
        """
        self._require_open()
        wanted = _stop_tokens(tokens, self.config)
        self._begin("set_stop_tokens")
        self._note(f"set_stop_tokens: {wanted}")
        self._set(self.plan.stops, _stops(wanted), _stops(self.stop_tokens))
        self.stop_tokens = wanted
        for sequence in self._sequences:
            self._look_whether_stopped(sequence)

    def _set(self, settings: DeviceArray, wanted: Any, old: Any) -> None:
        """Sets device state; after an exception it restores the old values if the device allows."""
        try:
            settings.set(wanted, self.stream)
        except BaseException:  # the copy may be submitted already
            with suppress(OstinatoError):
                settings.set(old, self.stream)
            raise

    def _look_whether_stopped(self, sequence: Sequence) -> None:
        """Clears `stopped` after a change of settings if neither token nor limit stops it now."""
        sequence.on_device = False
        if sequence.stopped:
            last, limit = sequence.tokens[-1], min(sequence.limit, self.plan.sizes.context)
            sequence.stopped = last in self.stop_tokens or sequence.length >= limit

    # --- sequences
    def tokens(self, sequence: int = 0) -> tuple[int, ...]:
        """Returns the sequence's tokens: those prefilled, and those chosen after them."""
        return tuple(self._sequences[sequence].tokens)

    def stopped(self, sequence: int = 0) -> bool:
        """True if the last token is an end token, or the limit or the context's end is reached."""
        return self._sequences[sequence].stopped

    @alone
    def reset(self, sequence: int | None = None) -> None:
        """Drops the tokens of a sequence, or of all if None.  Nothing is written to the device."""
        forgotten = [*self._sequences] if sequence is None else [self._sequences[sequence]]
        self._begin("reset")
        self._note(f"reset of {sequence}")
        for one in forgotten:
            one.truncate(0)

    @alone
    def truncate(self, count: int, sequence: int = 0) -> None:
        """Keeps the first `count` tokens of a sequence; the last of them is decoded next.

        A `prefill` drops this last token, as it drops a token that was chosen and not decoded: pass
        the token again with those that follow, or use `keep_common`, which keeps every token that
        the cache holds.  Raises InputError if the sequence has fewer tokens.
        """
        one = self._sequences[sequence]
        count = one.kept(count)
        self._begin("truncate")
        self._note(f"truncate of sequence {one.index} to {count}")
        one.truncate(count)

    @alone
    def keep_common(self, tokens: Iterable[int], sequence: int = 0) -> int:
        """Keeps the common prefix of a sequence's cache and `tokens`, and returns its length.  The
        caller passes the rest of `tokens`, always one or more, to `prefill`.

        Raises InputError for ids outside the vocabulary.
        """
        one = self._sequences[sequence]
        found = token_ids(tokens, self.config.vocabulary, "tokens")
        self._begin("keep_common")
        self._note(f"keep_common of sequence {one.index}: {_digest(found)}")
        return one.keep_common(found)

    @alone
    def copy_prefix(self, count: int, source: int, target: int) -> None:
        """Replaces the tokens and the cache of sequence `target` by the first `count` tokens of the
        cache of sequence `source`; the caller passes the tokens that follow to `prefill`.

        The copy runs on the device in stream order.  Raises InputError if the source's cache holds
        fewer tokens, or if source and target are the same.
        """
        self._require_open()
        one, other = self._sequences[source], self._sequences[target]
        count = whole(count, "count", 0)
        if one is other:
            raise InputError(f"sequence {source} cannot be copied to itself; truncate it")
        if count > one.length:
            raise InputError(
                f"the cache holds {one.length} tokens of sequence {source}; {count} cannot be "
                "copied"
            )
        self._begin("copy_prefix")
        self._note(f"copy_prefix of {count} from {one.index} to {other.index}")
        other.truncate(0)  # first, so that a failed copy leaves the target empty
        self.plan.copy_sequence(self.stream, one.index, other.index)
        with uninterrupted:
            other.tokens[:] = one.tokens[:count]
            other.length = count

    # --- steps
    @alone
    def prefill(
        self,
        tokens: Iterable[int],
        sequence: int = 0,
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> int:
        """Appends tokens to the sequence's cache and returns the first token chosen after them.

        A token that was chosen before and never decoded is dropped: pass it at the start of
        `tokens` to keep it.  `progress` is called after each piece of the prompt is launched, the
        last one included, with the number of tokens done and their total.

        Raises InputError for ids outside the vocabulary, no tokens, or more than the context has
        room for; LogitsError.
        """
        require_function(progress, "progress")
        (one,), (found,) = self._checked("prefill", [(sequence, tokens)])
        return self._stepper.prompt(one, found, progress)

    @alone
    def prefill_batch(
        self, prompts: Mapping[int, Iterable[int]], *, masks: TokenMasks | None = None
    ) -> dict[int, int]:
        """Prefills several sequences; returns the first token chosen after each, by sequence.

        Consecutive prompts that together fit into one step of 64 rows are read in one step.
        `masks`: the tokens that may be chosen; `fill` is called once for each step that chooses.
        Raises the errors of `prefill`: InputError before anything is done; LogitsError after all
        prompts were read, with the tokens of the sequences that have one.  If a later step raises
        another error, the prompts of earlier steps were read.
        """
        if not isinstance(prompts, Mapping) or not prompts:
            raise InputError(
                f"prompts is {quoted(prompts)}, must be a mapping from sequences to their tokens, "
                "one at least"
            )
        ready, found = self._checked("prefill", prompts.items(), masks)
        chosen = self._stepper.prompts(ready, found, masks)
        return {one.index: token for one, token in zip(ready, chosen, strict=True)}

    @alone
    def extend(self, tokens: Iterable[int], sequence: int = 0) -> None:
        """Appends tokens to the sequence's cache and chooses none: more of the prompt follows.

        Launches the steps and does not wait for them.  Raises InputError as `prefill` does.
        """
        (one,), (found,) = self._checked("extend", [(sequence, tokens)])
        self._stepper.prompt(one, found, choose=False)

    def _checked(
        self,
        what: str,
        prompts: Iterable[tuple[int, Iterable[int]]],
        masks: TokenMasks | None = None,
    ) -> tuple[list[Sequence], list[list[int]]]:
        """Returns the sequences, ready for a prefill, and their tokens; checks everything before it
        changes anything."""
        self._require_open()
        ready, found = [], []
        for sequence, tokens in prompts:
            ready.append(self._sequences[sequence])
            found.append(self._sequences.prompt(tokens, ready[-1]))
        self._begin(what)
        for one, given in zip(ready, found, strict=True):
            told = f"{what} of sequence {one.index} at {one.length}: {_digest(given)}"
            self._agree(told + _of_masks(masks))
        for one in ready:
            del one.tokens[one.length :]
            one.on_device = one.stopped = one.has_logits = False
        return ready, found

    def decode(self, sequence: int = 0) -> int:
        """Runs one step and returns the next token of a sequence.

        Raises InputError if the sequence is empty or has stopped, LogitsError.
        """
        return self.decode_batch((sequence,))[0]

    def decode_batch(
        self, sequences: Iterable[int], *, masks: TokenMasks | None = None
    ) -> list[int]:
        """Runs one step and returns the next token of each of several sequences, in their order.

        `masks`: the tokens that may be chosen in this step.  Raises the errors of `decode`, and
        what `masks.fill` raises, when no token was chosen; a LogitsError for one sequence holds the
        tokens of the others, whose state includes them.
        """
        calls, name = self._calls, "Decoder.decode_batch"  # `alone`, written out
        if calls.lock.locked():
            raise calls.overlap(name)
        with calls.lock:
            calls.name = name
            if calls.lead is not None:
                return calls.lead.call(name, self._decoded, (sequences,), {"masks": masks})
            return self._decoded(sequences, masks)

    def _decoded(self, sequences: Iterable[int], masks: TokenMasks | None = None) -> list[int]:
        self._require_open()
        ready = self._sequences.ready(sequences)
        self._begin("decode")
        if self._ranks is not None:
            told = f"decode of {[one.index for one in ready]}"
            self._agree(told + _of_masks(masks), again=False)
        return self._stepper.together(ready, device_state=self.device_state, masks=masks)

    @alone
    def run(
        self,
        sequence: int = 0,
        *,
        count: int | None = None,
        tokens_per_launch: int = 1,
        ahead: int | None = None,
    ) -> TokenRun:
        """Returns an iterator over a sequence's next tokens that keeps the device busy.

        It ends where the sequence stops, or after `count` tokens.  `tokens_per_launch`: tokens from
        one graph launch, by a loop on the device that ends where the sequence stops; if the loop
        cannot be built, each launch gives one, with the reason in the statistics.  (With `lookup`
        it counts steps, each of one token or more.)  `ahead`:
        launches under way besides the one whose token the host waits for (`models.run`);
        tokens_per_launch * (ahead + 1) is at most 256.  If None it is 2, or fewer to keep within
        this limit.  The tokens are those of `decode`, bit by bit.

        A decoder has one run at a time: any other call that changes the decoder or runs a step
        (prefill, decode, run, reset, truncate, set_…, profile) ends it, as `close()` does, and
        continues after the last token that the iterator returned.  While `device_state` is False,
        or a step has no graph, the run waits for each step, which is then launched eagerly if it
        has no graph.  Raises the errors of `decode`, and InputError for invalid options.
        """
        options = RunOptions(count, tokens_per_launch, ahead)
        return self._begun(TokenRun, "run", (sequence,), options)

    @alone
    def run_batch(
        self,
        sequences: Iterable[int],
        *,
        count: int | None = None,
        tokens_per_launch: int = 1,
        ahead: int | None = None,
        masks: TokenMasks | None = None,
    ) -> BatchRun:
        """Returns an iterator like that of `run` for several sequences in step.  Each item is
        {sequence: token} for the sequences that had not stopped before; ends where all have.  With
        `lookup` a step gives some sequences more than one token: items with the other tokens of
        these sequences alone follow (`within_step` is then True), before those of the next step.  A
        sequence with `count` tokens is left out while others have fewer.

        `masks`: the tokens that may be chosen.  `fill` is called in each `next`, for the step whose
        tokens it returns; of the step after it only the layers are launched ahead, whatever `ahead`
        is.  Raises InputError with `tokens_per_launch` above 1.
        """
        options = RunOptions(count, tokens_per_launch, ahead)
        return self._begun(BatchRun, "run_batch", sequences, options, masks)

    def _begun(
        self,
        kind: type[AnyRun],
        what: str,
        sequences: Iterable[int],
        options: RunOptions,
        masks: TokenMasks | None = None,
    ) -> AnyRun:
        self._require_open()
        options = options.checked(self.plan.sizes.ring)
        if masks is not None and options.tokens_per_launch > 1:
            raise InputError(
                f"tokens_per_launch is {options.tokens_per_launch}: masks are made on the host for "
                "each token, so a launch gives one"
            )
        ready = self._sequences.ready(sequences)
        self._begin(what)
        state = self.device_state
        told = f"{what} of {[one.index for one in ready]}: {options}, device_state {state}"
        self._agree(told + _of_masks(masks), steps=False)
        drafts = max(self._stepper.room(ready, masks)) > 1
        if self._ranks is not None and (masks is not None or self._steps.whole_logits):
            drafts = False  # other rows than plain ones need all ranks' logits, which are not there
        if self.plan.sizes.lookup and not drafts:
            self._phases.one_by_one[_NO_DRAFTS] += 1
        run = kind(
            self._stepper,
            ready,
            options,
            self._calls,
            device_state=state,
            drafts=drafts,
            masks=masks,
        )
        self._run = run
        return run

    @alone
    def logits(self, sequence: int = 0) -> npt.NDArray[np.float32]:
        """Returns a copy of the logits that the sequence's last token was chosen from: float32,
        (vocabulary,).  Waits for the step.

        All ranks of a group must call it together.  Raises InputError if a run computed further
        than the tokens it returned, because the logits are then of a later token; and if the last
        token was not chosen by a step (after `extend` or `truncate`, for example), or by one that
        drafts (`lookup`), which keeps no logits.
        """
        self._require_open()
        one = self._sequences[sequence]
        if one.ahead or (self._run is not None and self._run.is_ahead(one)):
            raise InputError(
                f"the device is further in sequence {sequence} than the {len(one.tokens)} tokens "
                "handed out, and so are its logits; truncate by one token and decode it again, or "
                "run with ahead=0"
            )
        if self._ranks is not None:
            self._ranks.group.check()  # a failed group explains missing logits better
        if not one.has_logits:
            raise InputError(
                f"sequence {sequence} has no logits: no token was chosen as the last of the "
                f"{len(one.tokens)} that it has, or by a run with drafts (lookup); prefill or "
                "decode one"
            )
        logits = self.plan.buffers["logits"][one.index]
        if self._ranks is None:
            return logits.to_numpy(self.stream)
        self._agree("logits", steps=False)
        for operation in self._gather:
            self.stream.submit(operation)
        with self._ranks.group.watching("all ranks' logits"):
            return logits.to_numpy(self.stream)

    def logprobs(self, sequence: int = 0) -> TokenLogprobs:
        """Returns the log probabilities of the sequence's last token, and of the likeliest ones
        there, as many as `set_sampling` was asked for.

        Does not wait, and does not end a run: call it before the run's next token.  Raises
        InputError if the last token was chosen without them, or by no step.
        """
        self._require_open()
        one = self._sequences[sequence]
        count = int(self._options[one.index]["logprobs"])
        if not count or not one.has_logits or len(one.tokens) <= one.logprobs_from:
            raise InputError(
                f"sequence {one.index} has no log probabilities of its last token: "
                "set_sampling(…, logprobs=0), or more, gives them for the tokens chosen after it"
            )
        return self._stepper.logprobs(one, count - 1)

    def _begin(self, what: str) -> None:
        """Ends a run under way; called before every step and every change of state."""
        self.changes += 1
        self._end_run(what)

    def _note(self, call: str) -> None:
        """Notes a call that changes state, for the comparison of ranks before the next step."""
        if self._ranks is not None:
            self._ranks.note(call, again=True)

    def _agree(self, call: str, *, again: bool = True, steps: bool = True) -> None:
        """Notes a call, and compares the calls of all ranks: while the step of a call that `steps`
        is under way on a GPU."""
        if self._ranks is not None:
            self._ranks.note(call, again=again)
            self._ranks.agree_calls()
            # On the host, a step would first tell what follows from other calls: other collectives.
            if not steps or self.device.capabilities.runs_host_functions:
                self._ranks.agreed()

    def _end_run(self, by: str) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.end(f"{by}()")

    def follow(self) -> None:
        """Repeats the calls of rank 0, whose decoder leads, until rank 0 closes its decoder.

        Waits for the next call without a deadline; heartbeats tell a rank that died or was stopped
        from one that has nothing to do.  Raises GroupError if any rank fails, InputError if this
        decoder is rank 0's or has no group.
        """
        self._require_open()
        if self._ranks is None or self._ranks.group.rank == 0:
            raise InputError("follow() is for the ranks of a group other than rank 0, which leads")
        from ostinato.models.leading import follow

        follow(self, self._ranks)

    # --- what a step runs
    def program(self, *, sampled: bool = True) -> tuple[KernelCall, ...]:
        """Returns the calls of a step, in order.  A backend may merge several into one launch, or
        split one (where a library multiplies); `graph` has the launches."""
        return self._steps.programs["decode" if sampled else "prefill"]

    @alone
    def graph(self, rows: int = 1, *, sampled: bool = True) -> Graph:
        """Captures a step of `rows` rows, rounded up to their bucket, as a graph to inspect; the
        caller closes it."""
        self._require_open()
        return self._steps.graph(whole(rows, "rows", 1), sampled=sampled)

    def step_rows(self, sequences: Iterable[int]) -> list[int]:
        """Returns the rows that each of these sequences has in a step of them all: one, or with
        `lookup` also one for each token that it may draft."""
        return self._stepper.room([self._sequences[sequence] for sequence in sequences])

    @property
    def ranks(self) -> int:
        """The number of devices that share the model, this decoder's included."""
        return 1 if self._ranks is None else self._ranks.group.size

    @property
    def collectives(self) -> str:
        """The name of the ranks' means of exchange; empty without a group."""
        return "" if self._ranks is None else self._ranks.collectives.name

    @property
    def last_decision(self) -> Decision | None:
        """The action of the last step and its reason; None before the first step."""
        return self._steps.last_decision

    @contextmanager
    def profile(self) -> Iterator[OperationTimes]:
        """Times every operation by itself: `with decoder.profile() as times`.

        Steps inside the block run eagerly, with profiling as the reason.  Raises InputError if
        other ranks follow this one: their steps would not be eager.
        """
        if self._calls.lead is not None:
            raise InputError("a rank that leads cannot profile its steps; run ranks without leads")
        self._end_run("profile")
        with self._steps.profile() as times:
            try:
                yield times
            finally:
                self._end_run("the end of profile")

    # --- numbers
    def statistics(self) -> DecoderStatistics:
        """Returns the counts of launches, the reasons for eager steps, and the phases' times."""
        steps, phases = self._steps.statistics(), self._phases
        reasons: Counter[str] = Counter()
        quarantined: dict[str, str] = {}
        for step in steps.values():
            reasons.update(step.eager_reasons)
            quarantined.update(step.quarantined)
        return DecoderStatistics(
            launches_eager=sum(step.launches_eager for step in steps.values()),
            launches_replayed=sum(step.replays for step in steps.values()),
            launches_per_token=self._steps.launches,
            graphs_captured=sum(step.captures for step in steps.values()),
            eager_reasons=dict(reasons),
            one_by_one=dict(phases.one_by_one),
            quarantined=quarantined,
            prefill_tokens=phases.tokens["prefill"],
            decoded_tokens=phases.tokens["decode"],
            lookup_tokens=phases.lookup_tokens,
            lookup_steps=phases.lookup_steps,
            load_seconds=phases.seconds["load"],
            plan_seconds=phases.seconds["plan"],
            kernel_seconds=self._steps.kernel_seconds,
            prefill_seconds=phases.seconds["prefill"],
            decode_seconds=phases.seconds["decode"],
            host_writes=phases.host_writes,
            weights=self.weights.description(),
            weight_bytes=self.weights.nbytes,
            unpacked_bytes=self.weights.unpacked_bytes,
            plan_bytes=self.plan.nbytes,
            library=self.backend.library,
            steps=steps,
            graph_cache=self.graph_cache.statistics(),
        )

    # --- lifetime
    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("the decoder is closed; make another")

    @alone
    def close(self) -> None:
        """Waits for the decoder's work; frees graphs, buffers and its own weights.  Idempotent."""
        if self._closed:
            return
        self._end_run("close")
        self._closed = True
        if self._calls.lead is not None:
            self._calls.lead.end()
        if not self.device.context.closed:
            try:
                # Work of a stream that its owner has closed may still be under way.
                (self.device if self.stream.closed else self.stream).synchronize()
            except DriverError:
                if self._ranks is None or self._ranks.group.failure is None:
                    raise
        self._steps.close()
        if self._ranks is not None:
            self._gather = ()
            self._ranks.close()
        self.plan.close()
        self._close_weights()
        if self._owns_stream:
            self.stream.close()

    def _close_weights(self) -> None:
        if self._owns_weights:
            self.weights.close()


def backend_for(
    device: Device,
    *,
    library_rows: LibraryRows = "auto",
    threads: int | None = None,
    packed: bool | None = None,
    stream: Stream | None = None,
) -> Backend:
    """Returns the backend for a device, chosen by the device's capabilities.

    `library_rows`: see `LibraryRows`.  `threads`: worker threads of the CPU's kernels, see
    `packed_kernels`.  `packed`: True for the CPU's kernels for packed weights, False for those for
    float32, None for the faster.  `stream`: the stream for trials of a library's products; a new
    one if None.
    Raises NotAvailableError if there are no kernels for the device, InputError, SettingsError.
    """
    can = device.capabilities
    if can.runs_host_functions:
        from ostinato.models.host.backend import HostBackend

        return HostBackend(device, threads=threads, packed=packed)
    if can.compiles_cuda:
        from ostinato.models.cuda.backend import CudaBackend

        return CudaBackend(device, library_rows=library_rows, stream=stream)
    raise NotAvailableError(
        f"the decoder has no kernels in {can.source_language!r} yet, which {device.name} needs; "
        'open_device("host") runs it on the CPU'
    )


def _require_usable(stream: Stream, device: Device) -> None:
    """Raises InputError for a stream that a decoder cannot use."""
    require_stream(stream, "stream")
    if stream.context is not device.context or stream.closed:
        why = "is closed" if stream.closed else "is of another device"
        raise InputError(f"stream: {stream!r} {why}; give one of {device.name}, or None")
    if not stream.handle:
        raise InputError(
            "stream: the legacy default stream cannot be captured, so nothing on it becomes a "
            "graph; give another stream, or None"
        )


def _fitting(weights: Weights, device: Device, backend: Backend) -> Weights:
    """Returns the weights.  Raises InputError if the backend cannot use them, ClosedError."""
    first = weights.buffer("embed")
    if first.context is not device.context:
        raise InputError(f"the weights are not on {device.name}, where the decoder is to be")
    if weights.packed != backend.packed or weights.dtype != backend.dtype:
        raise InputError(
            f"the weights' matrices are {'packed' if weights.packed else weights.dtype}; the "
            f"kernels of {device.name} read {'packed ones' if backend.packed else backend.dtype} "
            "(uint16 is bfloat16)"
        )
    return weights


_PACKED_ROWS = 32
"""The most rows of a batch for which packed weights are faster (H100); 64 rows of 1B are slower."""


def formats_for(
    backend: Backend, checkpoint: Checkpoint, wanted: WeightsKind, sequences: int
) -> Formats:
    """Returns the formats of matrices to pack in the device's own order; none for "auto" with large
    batches.  Raises InputError."""
    if wanted == "auto" and sequences > _PACKED_ROWS:
        return {}
    return backend.formats(checkpoint, wanted)


def _plain(options: npt.NDArray[Any]) -> bool:
    """True if all these OPTIONS are plain (`sampled.cuh`): the likeliest token of the model's own
    logits is taken, and nothing else is asked for."""
    plain = {"temperature": 0, "repetition_penalty": 1, "frequency_penalty": 0}
    plain |= {"presence_penalty": 0, "biased": 0, "logprobs": 0}
    return all(bool(np.all(options[name] == value)) for name, value in plain.items())


def _of_masks(masks: TokenMasks | None) -> str:
    return "" if masks is None else f", masks of {[*masks.sequences]}"


def _digest(tokens: list[int]) -> str:
    """Returns the number of tokens and their digest, as text."""
    digest = hashlib.blake2b(np.asarray(tokens, np.int64).tobytes(), digest_size=8).hexdigest()
    return f"{len(tokens)} tokens ({digest})"


def _stop_tokens(tokens: Iterable[int], config: LlamaConfig) -> tuple[int, ...]:
    found = tuple(dict.fromkeys(token_ids(tokens, config.vocabulary, "stop_tokens")))
    if len(found) > STOP_TOKENS:
        raise InputError(f"{len(found)} stop tokens; {STOP_TOKENS} at most")
    return found


def _stops(tokens: tuple[int, ...]) -> npt.NDArray[np.int32]:
    """Returns the stop tokens as the device stores them: int32, (STOP_TOKENS,), filled with -1."""
    stops = np.full(STOP_TOKENS, -1, np.int32)
    stops[: len(tokens)] = tokens
    return stops


def _context(config: LlamaConfig, wanted: int | None) -> int:
    if wanted is None:
        return min(DEFAULT_CONTEXT, config.context_length)
    wanted = whole(wanted, "max_context")
    if not 1 <= wanted <= config.context_length:
        raise InputError(
            f"max_context is {wanted}; the model was trained for 1 to {config.context_length}"
        )
    return wanted
