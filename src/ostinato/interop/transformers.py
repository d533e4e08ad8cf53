"""transformers: `model.generate` of a Llama by our own kernels, on the model's own weights.

with accelerate(model) as accelerated:
    model.generate(**inputs, max_new_tokens=128)      # as before, many times faster
    print(accelerated.statistics())
model.generate(**inputs)                              # transformers' own again
"""

from __future__ import annotations

import functools
import inspect
import itertools
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ostinato import Buffer, Closeable, Device, new_lock, open_device
from ostinato.errors import (
    ClosedError,
    InputError,
    NotAvailableError,
    OutOfMemoryError,
    UnsupportedModelError,
)
from ostinato.interop.generate_call import (
    NotCovered,
    Wanted,
    check_arguments,
    check_inputs,
    check_mode,
    prompts,
    wanted,
)
from ostinato.models import (
    Decoder,
    DecoderStatistics,
    LlamaConfig,
    SamplingOptions,
    Weights,
    adopt_weights,
    rope_inverse_frequencies,
    weight_shapes,
)

try:
    import torch
    from transformers import cache_utils
    from transformers.models.llama import modeling_llama as llama
except ImportError as error:
    raise NotAvailableError(
        f"transformers or PyTorch is not installed ({error}); install both"
    ) from error

__all__ = ["Accelerated", "AcceleratedStatistics", "GraphedModel", "accelerate", "graphed"]

# Weights that begin elsewhere are moved: a library's products are fastest with such.
_ALIGNMENT = 256
# By how much our logits may differ from transformers', as a part of their norm.  In bfloat16
# transformers rounds each layer's sums, our kernels do not.
_TOLERANCE = {torch.bfloat16: 0.1, torch.float32: 1e-3}
_CHECKED_TOKENS = 32
_SILU = ("SiLU", "SiLUActivation")
# Hooks that transformers itself leaves behind, and that do nothing unless outputs are asked for.
_HARMLESS_HOOKS = "transformers.utils.output_capturing"


# ----------------------------------------------------------------------------------------- graphed


def graphed(model: Any, *, max_cache_len: int | None = None, **options: Any) -> GraphedModel:
    """From here on the decode steps of `model.generate` are replays of graphs.

    `model`: a causal model of transformers on a CUDA device.  Nothing else of `generate` changes:
    its loop, sampling, processors, criteria and streamers are transformers', and the tokens are
    those of an eager run over the same static cache.  `generate` asks the model for its compiled
    call (`get_compiled_call`), and gets ours: the first step of each shape runs eagerly, the second
    is captured, all others are replays.  A step that cannot be captured runs eagerly, with
    its reason in `explain()`.

    A compiled call needs a static cache, so `generation_config.cache_implementation` becomes
    "static" unless it says something else.  A longer cache is another shape, with a graph of its
    own: `max_cache_len` (as in `generation_config`) makes one that is long enough for all calls.

    `options`: of `interop.torch.graphed` (verify, tolerance, budget, strict, store, …).  With
    `store=folder`, `save()` of what this returns writes the steps' graphs, and the next process
    with this folder restores them: the first step of a shape is a replay then.

    Run by transformers as without us, with the reason in `passed_on`: caches that count positions
    in Python (sliding windows), caches that are moved between devices, modules with
    hooks (a replay runs no Python), and calls that were given a `compile_config`.

    Raises InputError if the model is graphed already, and what `interop.torch.graphed` does.
    """
    return GraphedModel(model, max_cache_len, options)


class GraphedModel(Closeable):
    """A model whose decode steps are replayed, see `graphed`.  `close()` undoes that.

    `step`: the graphed function below, for `statistics`, `inspect` and `invalidate`.
    """

    def __init__(self, model: Any, max_cache_len: int | None, options: dict[str, Any]) -> None:
        from ostinato.interop.torch import graphed as graphed_function

        _Method.require_free(model, "get_compiled_call", "graphed")
        self._model = model
        self._closed = False
        self._passed_on: Counter[str] = Counter()

        def decode_step(past_key_values: Any, **inputs: Any) -> Any:
            outputs = model(past_key_values=past_key_values, **inputs)
            # Without the cache, which is another object in the next call of `generate`.
            kept = {name: v for name, v in outputs.items() if v is not past_key_values}
            return type(outputs), kept, len(kept) < len(outputs)

        self.step = graphed_function(decode_step, static=("past_key_values",), **options)
        self._settings: dict[str, Any] = {}
        self._config = model.generation_config
        if self._config.cache_implementation is None:
            self._set("cache_implementation", "static")
        if max_cache_len is not None:
            self._set("max_cache_len", max_cache_len)
        self._method = _Method(model, "get_compiled_call", self._compiled_call)

    def __repr__(self) -> str:
        return f"<GraphedModel {type(self._model).__name__}{', closed' * self._closed}>"

    def _set(self, name: str, value: object) -> None:
        self._settings[name] = (getattr(self._config, name, None), value)
        setattr(self._config, name, value)

    def _compiled_call(self, model: Any, compile_config: Any) -> Callable[..., Any]:
        """What `generate` runs its steps with; it asks once a call."""
        if self._closed or compile_config is not None:
            if not self._closed:
                self._passed_on["a compile_config was given"] += 1
            own: Callable[..., Any] = type(model).get_compiled_call(model, compile_config)
            return own
        reason = _hooks(model.modules())
        if reason:
            self._passed_on[reason] += 1
            eager: Callable[..., Any] = model.__call__
            return eager
        checked: Any = None

        # Of this call alone: two threads may generate at once.
        def step(*, past_key_values: Any = None, **inputs: Any) -> Any:
            nonlocal checked, reason
            if past_key_values is not checked:
                reason = _not_static(past_key_values)
                checked = past_key_values
            if reason or self._closed:
                self._passed_on[reason or "closed"] += 1
                return model(past_key_values=past_key_values, **inputs)
            kind, kept, cached = self.step(past_key_values, **inputs)
            return kind(**kept, past_key_values=past_key_values) if cached else kind(**kept)

        return step

    @property
    def passed_on(self) -> dict[str, int]:
        """Steps, and whole calls, that were left to transformers, by reason."""
        return dict(self._passed_on)

    def explain(self) -> str:
        """A table of the graphs and of what ran eagerly, and why."""
        lines = [f"{count} passed on: {reason}" for reason, count in self._passed_on.items()]
        return "\n".join([str(self.step.explain()), *lines])

    def save(self, *, check: bool = True) -> dict[str, str]:
        """Writes the steps' graphs to the store; why some were not written, by key.

        As `save` of what `interop.torch.graphed` gives.  The process must collect machine code
        (`ostinato.collect_modules`) since before torch loaded a kernel, and nobody may generate
        meanwhile.  Raises InputError without a store."""
        refused: dict[str, str] = self.step.save(check=check)
        return refused

    def close(self) -> None:
        """Gives the graphs back; the model generates as before.  Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._method.remove()
        for name, (before, ours) in self._settings.items():
            if getattr(self._config, name, None) == ours:
                setattr(self._config, name, before)
        self.step.close()


def _not_static(cache: Any) -> str:
    """Why a cache's steps cannot be replayed; empty if they can."""
    if type(cache) is not cache_utils.StaticCache:
        return f"a {type(cache).__name__}, which is not static"
    if getattr(cache, "offloading", False):
        return "a cache that is moved between devices"
    for layer in cache.layers:
        if type(layer) is not cache_utils.StaticLayer:
            return f"a {type(layer).__name__}, which may count positions in Python"
    return ""


# -------------------------------------------------------------------------------------- accelerate


@dataclass(frozen=True, slots=True)
class AcceleratedStatistics:
    """What became of the calls of `generate`.

    `calls`: all; `accelerated`: those that our decoder did; `passed_on`: the others, by reason:
    transformers did them as ever.  `tokens`: that our decoder chose.  `decoders`: how many were
    made; another one for more sequences or positions.
    `weight_bytes`: all that the decoder reads.  `shared_bytes`: of these, what parameters of the
    model are views of since they were fused.  `copied_bytes`: what there is twice (norms, which our
    kernels read as float32).  `peak_extra_bytes`: the most that was there twice while weights were
    fused.  `plan_bytes`: KV cache and working memory.  `decoder`: None when closed.
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
    """From here on `model.generate` is done by our decoder, on the model's own weights.

    `model`: a `LlamaForCausalLM` in bfloat16, whole on one CUDA device (or in float32 on the CPU,
    where NumPy decodes it: to try things, not for speed).  Its parameters stay what they are; the
    data of those that our kernels read fused (queries, keys and values; gate and up) is moved, one
    layer after the other, and they become views of it.  Norms are copied at each call.

    `device`: of ours; one is opened if None.  `sequences`, `max_context`: what room is made for at
    first; a call that needs more gets a larger decoder, up to the positions that the model was made
    for.  `tokens_per_launch`: as for `Decoder.run`.

    Covered: greedy decoding and sampling with temperature, top_k, top_p, min_p and
    repetition_penalty, up to 16 end tokens, max_length and max_new_tokens, batches padded on the
    left, num_return_sequences, streamers.  Everything else goes to transformers, and the reason is
    counted.  What is asked for is read from what `generate` itself prepared, so defaults of
    `generation_config` count.  Greedy tokens are those of our logits, which are not rounded
    to bfloat16 as transformers' are.  What is drawn is distributed as transformers' is, and other
    tokens come from the same seed: each call takes one seed a sequence from torch's CPU generator,
    so `torch.manual_seed` makes calls repeatable.

    Weights that are changed in place count from the next call on.  If parameters or modules are
    replaced, or hooks added, transformers takes the calls: close and accelerate again.
    Calls wait for each other, and for what the caller's current stream has to do before.

    Raises UnsupportedModelError for another model, and if logits are not transformers' (within what
    bfloat16 explains) after a prompt that is tried here; InputError if the model is accelerated
    already; and what `Decoder` raises.
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
        _Method.require_free(model, "generate", "accelerated")
        self.config = _config_of(model)
        # The model itself is not kept: it has us, and ends with its last user.
        self._plain: Callable[..., Any] = type(model).generate
        self._signature = inspect.signature(self._plain)
        self._modules = tuple(_parts_of(model))
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
                self._own_weights = _OwnWeights(model, self.config, self.device)
            self._weights = self._own_weights.adopted
            self._weight_bytes = self._weights.nbytes
            self._make(sequences, max_context)
            self._compare(model)
        except BaseException:
            self._give_back()
            raise
        self._method = weakref.ref(_Method(model, "generate", self._generate))

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self._accelerated} of {self._calls} calls done"
        return f"<Accelerated LlamaForCausalLM on {self.device.name}: {state}>"

    @property
    def decoder(self) -> Decoder:
        """What decodes now.  Its own calls must not overlap with those of `generate`.

        Raises ClosedError without one.
        """
        if self._decoder is None:
            raise ClosedError("there is no decoder: closed, or the last one could not be made")
        return self._decoder

    # --- the decoder
    def _make(self, sequences: int, context: int | None) -> Decoder:
        """A decoder with room for that, in place of the one before."""
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
            torch.cuda.empty_cache()  # what torch keeps for itself
            decoder = make()
        self._decoder = decoder
        self._decoders += 1
        return decoder

    def _with_room(self, sequences: int, positions: int) -> Decoder:
        """Raises NotCovered if there is no room for that."""
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
        """One prompt by both.  Raises UnsupportedModelError if the logits are not the same."""
        decoder = self._decoder
        assert decoder is not None
        if _drops_out(model):
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
        """Why the model's modules do not compute what the decoder does; empty if they do."""
        found = tuple(_parts_of(model))
        if len(found) != len(self._modules) or any(
            now is not before for now, before in zip(found, self._modules, strict=True)
        ):
            return "modules were replaced"
        if reason := _hooks([model, *found]):
            return reason
        for module in (model, *found):
            if "forward" in vars(module):
                return f"a {type(module).__name__} with a forward of its own"
        if _drops_out(model):
            return "training with dropout"
        return ""

    def _refresh(self) -> None:
        """Copies what there is twice, and waits for torch's work on the weights so far."""
        self._own_weights.refresh()
        if self._torch_device.type == "cuda":
            torch.cuda.current_stream(self._torch_device).synchronize()

    # --- generate
    def _generate(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """As the model's class has it."""
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

        # Named as the parameters of transformers' own decoding methods, which it looks for.
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

        # transformers would give the streamer the prompt before it asks us.
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
        """The new tokens, step by step: one of each row, `padding` for those that have ended."""
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
            options = [_seeded(asked.sampling, seed) for seed in seeds]
        # From here on the call is ours.
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
        """The tokens of each step after the first."""
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
        """What became of the calls so far."""
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
        """Gives `model.generate` and the decoder's memory back.  Idempotent."""
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
            weights.tensors.clear()  # which keep torch's memory
        self._modules = ()
        if self._owns_device:
            self.device.close()


class _Method:
    """A method of ours in place of one of a model's, until `remove`; `ours` gets the model first.

    A copy of the model gets one that is the class's again.  The model is known by a weak reference:
    a cycle would keep its memory until the collector runs.
    """

    def __init__(self, model: Any, name: str, ours: Callable[..., Any] | None = None) -> None:
        self._model, self._name, self._ours = weakref.ref(model), name, ours
        functools.update_wrapper(self, getattr(type(model), name))
        self.__signature__ = inspect.signature(types.MethodType(getattr(type(model), name), model))
        if ours is not None:
            setattr(model, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model()
        if model is None:
            raise ClosedError(f"the model of this {self._name} is gone")
        return (self._ours or getattr(type(model), self._name))(model, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Method, (self._model(), self._name)

    @staticmethod
    def require_free(model: Any, name: str, what: str) -> None:
        """Raises InputError if the model has such a method of its own."""
        found = vars(model).get(name)
        if found is not None and not (type(found) is _Method and found._ours is None):
            raise InputError(f"the model has a {name} of its own: is it {what} already?")

    def remove(self) -> None:
        """The model has its own method again, unless another one was put in place of ours."""
        self._ours = None
        model = self._model()
        if model is not None and vars(model).get(self._name) is self:
            delattr(model, self._name)


class _OwnWeights:
    """The model's weights as a decoder reads them.

    `adopted`: over the model's memory.  What the parameters were when it was made is kept, to see
    that one was replaced.
    """

    def __init__(self, model: Any, config: LlamaConfig, device: Device) -> None:
        self._device = device
        self.shared_bytes = self.copied_bytes = self.peak_extra_bytes = 0
        self._norms: list[Any] = []
        self._moved: list[tuple[Any, int]] = []  # parameters, and where they were moved to
        self._known: list[tuple[dict[str, Any], str, Any, int, torch.dtype]] = []
        try:
            self._adopt(model, config)
        except BaseException:
            self.give_back()
            raise

    def _adopt(self, model: Any, config: LlamaConfig) -> None:
        inner = model.model
        tensors: dict[str, object] = {}
        norms: list[Any] = []
        tensors["embed"] = self._memory([inner.embed_tokens])
        for index, layer in enumerate(inner.layers):
            attention, mlp = layer.self_attn, layer.mlp
            matrices = {
                "wqkv": [attention.q_proj, attention.k_proj, attention.v_proj],
                "wo": [attention.o_proj],
                "w_gate_up": [mlp.gate_proj, mlp.up_proj],
                "w_down": [mlp.down_proj],
            }
            for name, parts in matrices.items():
                tensors[f"layers.{index}.{name}"] = self._memory(parts)
            norms += [layer.input_layernorm, layer.post_attention_layernorm]
        norms.append(inner.norm)
        if not config.tied_embeddings:
            tensors["head"] = self._memory([model.lm_head])
        self._norms += [norm.weight for norm in norms]
        self._copies, memory = self._new((len(norms), config.hidden), torch.float32)
        self.copied_bytes = self._copies.numel() * self._copies.element_size()
        names = [name for name, shape in weight_shapes(config).items() if len(shape) == 1]
        tensors.update({name: memory[place] for place, name in enumerate(names)})
        halves = inner.embed_tokens.weight.dtype == torch.bfloat16
        kind = np.uint16 if halves else np.float32
        self.adopted = adopt_weights(self._device, config, tensors, kind)
        modules = [m for m in model.modules() if m._parameters]
        self._known += [
            (module._parameters, name, parameter, parameter.data_ptr(), parameter.dtype)
            for module in modules
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]

    def changed(self) -> str:
        """Which parameter is not what it was; empty if all are."""
        for parameters, name, before, address, dtype in self._known:
            now = parameters.get(name)
            if now is not before or now.data_ptr() != address or now.dtype != dtype:
                return "parameters were replaced or moved"
        return ""

    def refresh(self) -> None:
        """Copies the norms."""
        with torch.no_grad():
            for copy, norm in zip(self._copies, self._norms, strict=True):
                copy.copy_(norm)

    def give_back(self) -> None:
        """Lets go of the model.  Memory of a host device, which ends with it, is copied to
        torch's own."""
        if self._device.capabilities.host_memory_is_device_memory:
            with torch.inference_mode(False):
                for parameter, address in self._moved:
                    if parameter.data_ptr() == address:
                        parameter.data = parameter.data.clone()
        self._moved, self._known, self._norms = [], [], []

    def _new(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, Any]:
        """New memory as a tensor, and as something that `adopt_weights` takes rows of."""
        if self._device.capabilities.host_memory_is_device_memory:
            buffer = self._device.empty(shape, np.float32)
            return torch.from_numpy(np.asarray(_Held(buffer, self._device))), buffer
        where = torch.device(self._device.name)
        tensor = torch.empty(shape, dtype=dtype, device=where)
        return tensor, tensor

    def _memory(self, modules: Sequence[Any]) -> object:
        """One piece of memory with the modules' weights below each other."""
        parts = [module.weight for module in modules]
        whole = None
        if not self._device.capabilities.host_memory_is_device_memory:
            whole = _together(parts)
        if whole is not None:
            if len(parts) > 1:
                self.shared_bytes += whole.numel() * whole.element_size()
            return whole
        rows = sum(part.shape[0] for part in parts)
        whole, memory = self._new((rows, *parts[0].shape[1:]), parts[0].dtype)
        nbytes = whole.numel() * whole.element_size()
        self.shared_bytes += nbytes
        self.peak_extra_bytes = max(self.peak_extra_bytes, nbytes)
        start = 0
        for part in parts:
            piece = whole[start : start + part.shape[0]]
            piece.copy_(part.data)
            part.data = piece  # the memory before is free now
            self._moved.append((part, piece.data_ptr()))
            start += part.shape[0]
        return memory


class _Held:
    """A buffer's memory for NumPy, with the device that it ends with."""

    def __init__(self, buffer: Buffer, device: Device) -> None:
        self.__array_interface__ = buffer.array.__array_interface__
        self._kept = buffer, device


def _together(parts: Sequence[Any]) -> torch.Tensor | None:
    """The parts as one matrix, if they lie below each other and begin where kernels like it."""
    first = parts[0].data
    expected, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    if expected % _ALIGNMENT:
        return None
    for part in parts:
        data = part.data
        if not data.is_contiguous() or data.data_ptr() != expected:
            return None
        if data.untyped_storage().data_ptr() != storage:
            return None
        expected += data.numel() * data.element_size()
    rows, columns = sum(part.shape[0] for part in parts), first.shape[1]
    return first.as_strided((rows, columns), (columns, 1))


def _config_of(model: Any) -> LlamaConfig:
    """The sizes of a model that the decoder computes.

    Raises UnsupportedModelError, ModelFormatError.
    """

    def require(fits: object, what: str) -> None:
        if not fits:
            raise UnsupportedModelError(f"{type(model).__name__} cannot be accelerated: {what}")

    require(type(model) is llama.LlamaForCausalLM, "only transformers' LlamaForCausalLM can")
    inner, head = model.model, model.lm_head
    tied = head.weight is inner.embed_tokens.weight
    values = {**model.config.to_dict(), "tie_word_embeddings": tied}
    config = LlamaConfig.from_hf(values, where="the model's config")
    require(type(inner) is llama.LlamaModel, "its model is no LlamaModel")
    require(type(inner.embed_tokens) is torch.nn.Embedding, "its embeddings are another module")
    require(inner.embed_tokens.max_norm is None, "max_norm of the embeddings")
    require(len(inner.layers) == config.layers, f"it has {len(inner.layers)} layers")
    linear, norms = [head], [inner.norm]
    for layer in inner.layers:
        attention, mlp = layer.self_attn, layer.mlp
        require(type(layer) is llama.LlamaDecoderLayer, "a layer is another module")
        require(type(attention) is llama.LlamaAttention, "an attention is another module")
        require(type(mlp) is llama.LlamaMLP, "an MLP is another module")
        require(type(mlp.act_fn).__name__ in _SILU, "another activation than SiLU")
        scale = config.head_size**-0.5
        require(abs(attention.scaling - scale) <= 1e-6 * scale, "another scale of the attention")
        linear += [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
        linear += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        norms += [layer.input_layernorm, layer.post_attention_layernorm]
    for module in linear:
        require(type(module) is torch.nn.Linear, f"a {type(module).__name__} in place of a Linear")
        require(module.bias is None, "a bias")
    for module in norms:
        require(type(module) is llama.LlamaRMSNorm, "a norm is another module")
        require(module.variance_epsilon == config.norm_epsilon, "norms of different epsilons")
    _check_parameters(model, require)
    rope = inner.rotary_emb
    require(rope.attention_scaling == 1, "scaled attention of its rope")
    turns = rope.inv_freq.detach().double().cpu().numpy()
    ours = rope_inverse_frequencies(config)
    # Rounded, where the whole model was made bfloat16 with `to`.
    fits = turns.shape == ours.shape and np.allclose(turns, ours, rtol=1e-2, atol=0)
    require(fits, "its rope turns otherwise than its config says")
    if np.allclose(turns, ours, rtol=1e-6, atol=0):
        return config
    plain = rope_inverse_frequencies(replace(config, rope_scaling=None, rope_factors=None))
    return replace(config, rope_scaling=None, rope_factors=tuple((plain / turns).tolist()))


def _check_parameters(model: Any, require: Callable[[object, str], None]) -> None:
    parameters = list(model.parameters())  # each once, tied or not
    where = parameters[0].device
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    require(where.type in ("cuda", "cpu"), f"it is on {where}")
    for parameter in parameters:
        plain = type(parameter) is torch.nn.Parameter and type(parameter.data) is torch.Tensor
        require(plain, f"a parameter is a {type(parameter).__name__}")
        require(not parameter.is_inference(), "parameters made in torch.inference_mode()")
        require(parameter.device == where, "its parameters are on several devices")
        require(
            parameter.dtype == dtype,
            f"parameters in {parameter.dtype}; on {where.type} they must be in {dtype}",
        )
    addresses = {parameter.data_ptr() for parameter in parameters}
    require(len(addresses) == len(parameters), "parameters that share their memory")


def _parts_of(model: Any) -> Iterable[Any]:
    """Its modules without itself."""
    return (module for module in model.modules() if module is not model)


def _hooks(modules: Iterable[Any]) -> str:
    """A hook of a user's on one of the modules, in words; empty if there is none."""
    if torch.nn.modules.module._has_any_global_hook():
        return "hooks on all modules"
    for module in modules:
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        if any(getattr(hook, "__module__", "") != _HARMLESS_HOOKS for hook in hooks):
            return f"a hook on a {type(module).__name__}"
    return ""


def _drops_out(model: Any) -> bool:
    """Whether a call of the model draws what it leaves out."""
    return any(
        layer.self_attn.training and layer.self_attn.attention_dropout
        for layer in model.model.layers
    )


def _processes() -> int:
    together = torch.distributed
    if not (together.is_available() and together.is_initialized()):
        return 1
    return int(together.get_world_size())


def _seeded(sampling: SamplingOptions, seed: int) -> SamplingOptions:
    return SamplingOptions(
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        seed,
        sampling.min_p,
        sampling.repetition_penalty,
    )


def _power_above(count: int) -> int:
    return 1 << (count - 1).bit_length()
