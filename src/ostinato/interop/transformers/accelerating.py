"""`accelerate`: `generate` of a model of transformers by ostinato's decoder, on its weights."""

from __future__ import annotations

import inspect
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ostinato import Device, open_device
from ostinato.errors import ClosedError, InputError, OutOfMemoryError, UnsupportedModelError
from ostinato.interop.generate_call import (
    NotCovered,
    Wanted,
    check_arguments,
    check_inputs,
    check_mode,
    prompts,
    wanted,
)
from ostinato.interop.transformers.families import OwnWeights, config_of, drops_out
from ostinato.interop.transformers.methods import Method, hooked
from ostinato.lowlevel import Closeable, new_lock
from ostinato.models import Decoder, DecoderStatistics, Weights

# The largest difference of the decoder's logits from transformers', as a part of their norm.  In
# bfloat16 transformers rounds each layer's sums; the decoder's kernels do not.
_TOLERANCE = {torch.bfloat16: 0.1, torch.float32: 1e-3}
_CHECKED_TOKENS = 32


@dataclass(frozen=True, slots=True)
class AcceleratedStatistics:
    """Counts of the calls of `generate`, and sizes of memory.

    `calls`: all; `accelerated`: those that the decoder ran; `passed_on`: the others, which
    transformers ran, by reason.  `tokens`: chosen by the decoder.  `decoders`: the number of
    decoders made; more sequences or positions need another one.  `weight_bytes`: all weights that
    the decoder reads.  `shared_bytes`: of these, the fused ones, of which parameters of the model
    are views.  `copied_bytes`: those that exist twice (norms and biases, which the kernels read as
    float32).  `peak_extra_bytes`: the most that existed twice while weights were fused.
    `plan_bytes`: KV cache and working memory.  `decoder`: None when closed.
    """

    calls: int
    accelerated: int
    passed_on: dict[str, int]
    tokens: int
    decoders: int
    weight_bytes: int
    shared_bytes: int
    copied_bytes: int
    peak_extra_bytes: int
    plan_bytes: int
    decoder: DecoderStatistics | None

    def __str__(self) -> str:
        mib = 1 << 20
        lines = [
            f"{self.accelerated} of {self.calls} calls by our decoder, {self.tokens} tokens",
            *(f"{count} by transformers: {reason}" for reason, count in self.passed_on.items()),
            f"{self.weight_bytes / mib:.1f} MiB of weights, {self.copied_bytes / mib:.1f} of them "
            f"twice ({self.peak_extra_bytes / mib:.1f} more while they were fused); "
            f"{self.plan_bytes / mib:.1f} MiB of cache and working memory",
        ]
        return "\n".join(lines)


def accelerate(
    model: Any,
    *,
    device: Device | None = None,
    sequences: int = 1,
    max_context: int | None = None,
    tokens_per_launch: int = 1,
) -> Accelerated:
    """Makes ostinato's decoder run `model.generate`, on the model's own weights, until the result
    is closed.

    `model`: a `LlamaForCausalLM`, `MistralForCausalLM`, `Qwen2ForCausalLM` or `Qwen3ForCausalLM`
    in bfloat16, whole on one CUDA device (or in float32 on the CPU, where NumPy decodes it: to try
    things, not for speed).  Its config means what a config.json of these values means to the
    decoder.  Its parameters stay the same objects; the data of those that the kernels read fused
    (queries, keys and values; gate and up) is moved, one layer after the other, and they become
    views of it.  Norms and biases are copied at each call.

    `device`: an ostinato device; one is opened if None.  `sequences`, `max_context`: the room of
    the first decoder; a call that needs more gets a larger decoder, up to the positions that the
    model was made for.  `tokens_per_launch`: as for `Decoder.run`.

    Covered: greedy decoding and sampling with temperature, top_k, top_p, min_p and
    repetition_penalty, up to 16 end tokens, max_length and max_new_tokens, batches padded on the
    left, num_return_sequences, streamers.  Everything else goes to transformers, and the reason is
    counted.  The request is read from what `generate` itself has prepared, so defaults of
    `generation_config` count.  Greedy tokens are those of the decoder's logits, which are not
    rounded to bfloat16 as transformers' are.  Drawn tokens have transformers' distribution, but are
    other tokens for the same seed: each call takes one seed a sequence from torch's CPU generator,
    so `torch.manual_seed` makes calls repeatable.

    Weights that are changed in place count from the next call on.  If parameters, buffers or
    modules are replaced, buffers, classes or numbers of modules or values of the config changed, or
    hooks or biases added, transformers runs the calls: close and accelerate again.  Calls wait for
    each other, and for the present work of the caller's current stream.

    Raises UnsupportedModelError for another model, and if the logits after a prompt that is tried
    here are not transformers' (within what bfloat16 explains); InputError if the model is
    accelerated already; and the errors of `Decoder`.
    """
    return Accelerated(model, device, sequences, max_context, tokens_per_launch)


class Accelerated(Closeable):
    """An accelerated model, see `accelerate`.  `close()` gives `model.generate` back; the
    parameters stay views of the fused memory, and keep working."""

    def __init__(
        self,
        model: Any,
        device: Device | None,
        sequences: int,
        max_context: int | None,
        tokens_per_launch: int,
    ) -> None:
        Method.require_free(model, "generate", "accelerated")
        self.config = config_of(model)
        self._name = type(model).__name__
        # No reference to the model, which refers to this object: a cycle would keep its memory.
        self._plain: Callable[..., Any] = type(model).generate
        self._signature = inspect.signature(self._plain)
        self._modules = tuple(_parts_of(model))
        self._settings = _settings_of(model)
        if reason := self._changed_modules(model):
            raise UnsupportedModelError(f"the model cannot be accelerated: {reason}")
        where = model.model.embed_tokens.weight.device
        self._torch_device = where
        name = f"cuda:{where.index}" if where.type == "cuda" else "host"
        if device is not None and device.name != name:
            raise InputError(f"the model is on {name}, and the device is {device.name}")
        self._owns_device = device is None
        self.device = open_device(name) if device is None else device
        self._lock = new_lock()
        self._closed = self._busy = False
        self._calls = self._accelerated = self._tokens = self._decoders = 0
        self._passed_on: Counter[str] = Counter()
        self._per_launch = tokens_per_launch
        self._decoder: Decoder | None = None
        self._weights: Weights | None = None
        try:
            with torch.inference_mode(False), torch.no_grad():
                self._own_weights = OwnWeights(model, self.config, self.device)
            self._weights = self._own_weights.adopted
            self._weight_bytes = self._weights.nbytes
            self._make(sequences, max_context)
            self._compare(model)
        except BaseException:
            self._give_back()
            raise
        self._method = weakref.ref(Method(model, "generate", self._generate))

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self._accelerated} of {self._calls} calls done"
        return f"<Accelerated {self._name} on {self.device.name}: {state}>"

    @property
    def decoder(self) -> Decoder:
        """The present decoder.  Its own calls must not overlap with those of `generate`.

        Raises ClosedError without one.
        """
        if self._decoder is None:
            raise ClosedError("there is no decoder: closed, or the last one could not be made")
        return self._decoder

    # --- the decoder
    def _make(self, sequences: int, context: int | None) -> Decoder:
        """Makes a decoder with this room, in place of the one before."""
        before, self._decoder = self._decoder, None
        if before is not None:
            before.close()
        assert self._weights is not None

        def make() -> Decoder:
            return Decoder(
                self.device,
                self._weights,  # type: ignore[arg-type]
                sequences=sequences,
                max_context=context,
                stop_tokens=(),
            )

        try:
            decoder = make()
        except OutOfMemoryError:
            if self._torch_device.type != "cuda":
                raise
            torch.cuda.empty_cache()  # frees the memory that torch caches
            decoder = make()
        self._decoder = decoder
        self._decoders += 1
        return decoder

    def _with_room(self, sequences: int, positions: int) -> Decoder:
        """Returns a decoder with at least this room.  Raises NotCovered if that is impossible."""
        most = self.config.context_length
        if positions > most:
            raise NotCovered(f"more positions than the model was made for ({most})")
        decoder = self._decoder
        if decoder is not None:
            sizes = decoder.plan.sizes
            if sizes.sequences >= sequences and sizes.context >= positions:
                return decoder
            sequences = max(sequences, sizes.sequences)
            positions = max(positions, sizes.context)
        try:
            return self._make(_power_above(sequences), min(most, _power_above(positions)))
        except (InputError, UnsupportedModelError, OutOfMemoryError) as error:
            raise NotCovered(f"no decoder of {sequences} sequences: {error}") from error

    def _compare(self, model: Any) -> None:
        """Runs one prompt by both.  Raises UnsupportedModelError if the logits differ."""
        decoder = self._decoder
        assert decoder is not None
        if drops_out(model):
            return
        count = min(_CHECKED_TOKENS, decoder.plan.sizes.context)
        tokens = [(7919 * place + 13) % self.config.vocabulary for place in range(count)]
        ids = torch.tensor([tokens], device=self._torch_device)
        with torch.no_grad(), torch.autocast(self._torch_device.type, enabled=False):
            logits = model(input_ids=ids, use_cache=False).logits[0, -1]
        theirs = logits.float().cpu().numpy().astype(np.float64)
        self._refresh()
        decoder.reset(0)
        decoder.prefill(tokens, 0)
        difference = np.linalg.norm(decoder.logits(0) - theirs) / np.linalg.norm(theirs)
        decoder.reset(0)
        most = _TOLERANCE[model.model.embed_tokens.weight.dtype]
        if not difference <= most:
            raise UnsupportedModelError(
                f"our logits differ from transformers' by {difference:.3g} of their norm ({most:g} "
                "at most): something of this model is computed in another way"
            )

    # --- what may have changed since
    def _changed_modules(self, model: Any) -> str:
        """Describes why the modules do not compute what the decoder does; empty if they do."""
        found = tuple(_parts_of(model))
        if len(found) != len(self._modules) or any(
            now is not before for now, before in zip(found, self._modules, strict=True)
        ):
            return "modules were replaced"
        if reason := hooked([model, *found]):
            return reason
        for module in (model, *found):
            if "forward" in vars(module):
                return f"a {type(module).__name__} with a forward of its own"
        if drops_out(model):
            return "training with dropout"
        if _settings_of(model) != self._settings:
            return "a module has another class or forward, or it or the config another setting"
        return ""

    def _refresh(self) -> None:
        """Copies the weights that exist twice, and waits for torch's work on the weights so far."""
        self._own_weights.refresh()
        if self._torch_device.type == "cuda":
            torch.cuda.current_stream(self._torch_device).synchronize()

    # --- generate
    def _generate(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Replaces the method of the model's class."""
        bound = self._signature.bind(model, *args, **kwargs).arguments
        arguments = {**bound, **bound.get("kwargs", {})}
        for name in ("self", "kwargs"):
            arguments.pop(name, None)
        try:
            return self._by_decoder(model, arguments)
        except NotCovered as reason:
            with self._lock:
                self._calls += 1
                self._passed_on[str(reason)] += 1
        return self._plain(model, *args, **kwargs)

    def _by_decoder(self, model: Any, arguments: dict[str, Any]) -> Any:
        if self._closed:
            raise NotCovered("closed")
        check_arguments(arguments, processes=_processes())
        if reason := self._changed_modules(model) or self._own_weights.changed():
            raise NotCovered(reason)
        streamer = arguments.pop("streamer", None)

        # The parameters have the names that transformers' own decoding methods have.
        def decode(
            _model: Any,
            input_ids: torch.Tensor,
            logits_processor: Any,
            stopping_criteria: Any,
            generation_config: Any,
            **model_kwargs: Any,
        ) -> torch.Tensor:
            check_mode(generation_config)
            check_inputs(model_kwargs)
            draws = bool(generation_config.do_sample)
            asked = wanted(logits_processor, stopping_criteria, draws=draws)
            mask = model_kwargs.get("attention_mask")
            rows = prompts(
                input_ids.tolist(),
                None if mask is None else mask.tolist(),
                history=asked.sampling.repetition_penalty != 1.0,
                windowed=any(0 < window < asked.max_length for window in self.config.windows),
            )
            pad = generation_config._pad_token_tensor
            padding = 0 if asked.stop_tokens is None or pad is None else int(pad)
            with self._lock:
                if self._closed:
                    raise NotCovered("closed")
                if self._busy:
                    raise NotCovered("called from inside a call")
                self._busy = True
                try:
                    answer = self._decode(asked, rows, input_ids, padding, streamer)
                finally:
                    self._busy = False
            new = torch.tensor(answer, dtype=torch.long, device=input_ids.device)
            return torch.cat([input_ids, new.T], dim=-1)

        # transformers would give the streamer the prompt before it calls `decode`.
        arguments = {**arguments, "streamer": None, "custom_generate": decode}
        return self._plain(model, **arguments)

    def _decode(
        self,
        asked: Wanted,
        rows: Sequence[Sequence[int]],
        input_ids: torch.Tensor,
        padding: int,
        streamer: Any,
    ) -> list[list[int]]:
        """Returns the new tokens, step by step: one for each row, `padding` for ended rows."""
        new = asked.max_length - input_ids.shape[1]
        if new < 1:
            raise NotCovered("no new tokens")
        decoder = self._with_room(len(rows), max(len(row) for row in rows) + new)
        stops = [t for t in asked.stop_tokens or () if 0 <= t < self.config.vocabulary]
        try:
            decoder.set_stop_tokens(stops)
        except InputError as error:
            raise NotCovered(str(error)) from error
        self._refresh()
        options = [asked.sampling] * len(rows)
        if not asked.sampling.is_greedy:
            seeds = torch.randint(0, 2**63 - 1, (len(rows),), device="cpu").tolist()
            options = [asked.sampling.with_named(seed=seed) for seed in seeds]
        # From here on the call does not go to transformers.
        self._calls += 1
        self._accelerated += 1
        if streamer is not None:
            streamer.put(input_ids.cpu())
        first = []
        for index, row in enumerate(rows):
            decoder.reset(index)
            decoder.set_sampling(options[index], index, limit=len(row) + new - 1)
        for index, row in enumerate(rows):
            first.append(decoder.prefill(row, index))
        steps: list[list[int]] = []
        for step in itertools.chain([first], self._further(decoder, len(rows), padding)):
            steps.append(step)
            self._tokens += len(step)
            if streamer is not None:
                streamer.put(torch.tensor(step, dtype=torch.long, device="cpu"))
        if streamer is not None:
            streamer.end()
        return steps

    def _further(self, decoder: Decoder, rows: int, padding: int) -> Iterator[list[int]]:
        """Yields the tokens of each step after the first."""
        live = [index for index in range(rows) if not decoder.stopped(index)]
        if not live:
            return
        if rows == 1:
            with decoder.run(0, tokens_per_launch=self._per_launch) as run:
                for token in run:
                    yield [token]
            return
        with decoder.run_batch(live, tokens_per_launch=self._per_launch) as together:
            for chosen in together:
                yield [chosen.get(index, padding) for index in range(rows)]

    # --- numbers
    def statistics(self) -> AcceleratedStatistics:
        """Returns counts of the calls so far."""
        with self._lock:
            own, decoder = self._own_weights, self._decoder
            numbers = None if decoder is None else decoder.statistics()
            return AcceleratedStatistics(
                calls=self._calls,
                accelerated=self._accelerated,
                passed_on=dict(self._passed_on),
                tokens=self._tokens,
                decoders=self._decoders,
                weight_bytes=self._weight_bytes,
                shared_bytes=own.shared_bytes,
                copied_bytes=own.copied_bytes,
                peak_extra_bytes=own.peak_extra_bytes,
                plan_bytes=0 if numbers is None else numbers.plan_bytes,
                decoder=numbers,
            )

    # --- lifetime
    def close(self) -> None:
        """Gives back `model.generate`, and the decoder's memory.  Idempotent."""
        with self._lock:
            if self._closed:
                return
            if (method := self._method()) is not None:
                method.remove()
            self._give_back()

    def _give_back(self) -> None:
        self._closed = True
        decoder, self._decoder = self._decoder, None
        if decoder is not None:
            decoder.close()
        weights, self._weights = self._weights, None
        if weights is not None:
            self._own_weights.give_back()
            weights.close()
            weights.tensors.clear()  # they keep torch's memory alive
        self._modules = ()
        self._settings = []
        if self._owns_device:
            self.device.close()


def _parts_of(model: Any) -> Iterable[Any]:
    """Returns the modules of a model without the model itself."""
    return (module for module in model.modules() if module is not model)


def _settings_of(model: Any) -> list[Any]:
    """Returns the classes of modules, and what they compute with besides tensors: settings of their
    own, and the config, which they also read at each call."""
    modules, config = [*model.modules()], model.config
    # Texts, since a list or mapping may be changed in place.
    values = {name: repr(v) for name, v in vars(config).items() if name not in _WITHOUT_EFFECT}
    shared = [vars(module).get("config", config) is config for module in modules]
    kinds = {type(module): None for module in modules}
    numbers = [
        {
            name: value
            for name, value in vars(module).items()
            if type(value) in (bool, int, float, str)
            and not (name.startswith("_") or name in _WITHOUT_EFFECT)
        }
        for module in modules
    ]
    classes, forwards = [type(module) for module in modules], [kind.forward for kind in kinds]
    return [numbers, values, shared, classes, forwards]


_WITHOUT_EFFECT = (
    *("training", "gradient_checkpointing"),
    "attention_dropout",  # only in training, which `drops_out` covers
    # The config's: values that `generate` has copied into its own config, that only name outputs,
    # and that `save_pretrained` writes.
    *("pad_token_id", "bos_token_id", "eos_token_id", "use_cache", "return_dict"),
    *("output_hidden_states", "_output_attentions"),
    *("architectures", "dtype", "transformers_version", "_name_or_path"),
)


def _processes() -> int:
    together = torch.distributed
    if not (together.is_available() and together.is_initialized()):
        return 1
    return int(together.get_world_size())


def _power_above(count: int) -> int:
    return 1 << (count - 1).bit_length()
