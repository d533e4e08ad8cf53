"""`graph_generate`: the decode steps of transformers' `generate` as replays of graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from transformers import cache_utils

from ostinato.errors import InputError, NotAvailableError
from ostinato.interop.generate_call import CACHE_NAMES
from ostinato.interop.transformers.methods import Method, hooked
from ostinato.lowlevel import Closeable


def graph_generate(model: Any, *, max_cache_len: int | None = None, **options: Any) -> GraphedModel:
    """Makes the decode steps of `model.generate` replays of graphs, until the result is closed.

    `model`: a causal model of transformers on a CUDA device.  Nothing else of `generate` changes:
    its loop, sampling, processors, criteria and streamers are transformers', and the tokens are
    those of an eager run over the same static cache.  `generate` gets its compiled call
    (`get_compiled_call`) from the model, and this replaces that call: the first step of each shape
    runs eagerly, the second is captured, all others are replays.  A step that cannot be captured
    runs eagerly, with its reason in `explain()`.

    A compiled call needs a static cache, so `generation_config.cache_implementation` becomes
    "static" if it is None.  A longer cache is another shape, with a graph of its own:
    `max_cache_len` (as in `generation_config`) makes one that is long enough for all calls.  A call
    with a cache among its arguments uses that cache, a prompt lookup uses a dynamic one.

    `options`: those of `interop.torch.graphed` (verify, tolerance, budget, strict, store, …).  With
    `store=folder`, `save()` of the result writes the steps' graphs, and the next process with this
    folder restores them: the first step of a shape is a replay then.

    transformers runs some calls as without this, and `passed_on` counts them by reason: caches that
    are moved between devices or whose layers are of unknown classes, models that read the position
    of a sliding window, which is a number of Python's, modules with hooks (a replay runs no
    Python), calls with a `compile_config`, and calls with `use_cache=False` (the default of some
    models' configurations), whose every step is of another length.

    Where torch has no CUDA device, `generate` stays as it is, and `explain()` says so.

    Raises InputError if the model is graphed already or is a wrapper of one (PEFT's),
    NotAvailableError with `strict` and without a CUDA device, and the errors of
    `interop.torch.graphed`.
    """
    return GraphedModel(model, max_cache_len, options)


class GraphedModel(Closeable):
    """A model whose decode steps are replayed, see `graph_generate`.  `close()` undoes that.

    `step`: the graphed function of the steps, for `statistics`, `inspect` and `forget`.
    """

    def __init__(self, model: Any, max_cache_len: int | None, options: dict[str, Any]) -> None:
        from ostinato.interop.torch import graphed as graphed_function

        if not hasattr(type(model), "get_compiled_call"):
            raise InputError(
                f"a {type(model).__name__} has no method get_compiled_call: if it wraps a model of "
                "transformers, pass that one (of PEFT's: model.get_base_model())"
            )
        Method.require_free(model, "get_compiled_call", "graphed")
        self._model = model
        self._closed = False
        self._passed_on: Counter[str] = Counter()
        read = self._read = set[str]()
        """Methods of sliding windows that steps have called to read the position."""

        # `named`: the name of the model's argument for its cache.  `full`: whether its sliding
        # windows are full, which is all that a step of one token asks of their positions; it is a
        # part of the key.
        def decode_step(cached: Any, named: str, full: Sequence[bool], **inputs: Any) -> Any:
            with _noting_reads(_windows(cached), read):
                outputs = model(**{named: cached}, **inputs)
            # Without the cache, which is a new object in the next call of `generate`.
            kept = {name: v for name, v in outputs.items() if v is not cached}
            return type(outputs), kept, len(kept) < len(outputs)

        self.step = graphed_function(decode_step, static=("cached",), **options)
        self._settings: dict[str, Any] = {}
        self._config = model.generation_config
        self._methods: list[Method] = []
        if self.step.unavailable:
            if options.get("strict"):
                self.step.close()
                raise NotAvailableError(f"generate would run eagerly: {self.step.unavailable}")
            return
        if self._config.cache_implementation is None:
            self._set("cache_implementation", "static")
        if max_cache_len is not None:
            self._set("max_cache_len", max_cache_len)
        self._methods.append(Method(model, "get_compiled_call", self._compiled_call))
        # Private to transformers, so it may be missing.  A model's own method makes other caches.
        known = hasattr(type(model), _PREPARE) and Method.free(model, _PREPARE)
        if known and "cache_implementation" in self._settings:
            self._methods.append(Method(model, _PREPARE, self._prepare_cache))

    def __repr__(self) -> str:
        return f"<GraphedModel {type(self._model).__name__}{', closed' * self._closed}>"

    def _set(self, name: str, value: object) -> None:
        self._settings[name] = (getattr(self._config, name, None), value)
        setattr(self._config, name, value)

    def _compiled_call(self, model: Any, compile_config: Any) -> Callable[..., Any]:
        """Returns the function that runs the steps of `generate`, which calls this once for each
        call."""
        if self._closed or compile_config is not None:
            if not self._closed:
                self._passed_on["a compile_config was given"] += 1
            own: Callable[..., Any] = type(model).get_compiled_call(model, compile_config)
            return own
        reason = hooked(model.modules())
        if reason:
            self._passed_on[reason] += 1
            eager: Callable[..., Any] = model.__call__
            return eager
        checked: Any = None
        windows: list[Any] = []

        # A new function for each call: two threads may generate at once.
        def step(**inputs: Any) -> Any:
            nonlocal checked, reason, windows
            named = next((name for name in CACHE_NAMES if name in inputs), CACHE_NAMES[0])
            cached = inputs.pop(named, None)
            if cached is not checked:
                reason, windows = _not_static(cached), _windows(cached)
                checked = cached
            why = "closed" if self._closed else reason or (windows and self._positions(inputs))
            if why:
                self._passed_on[why] += 1
                return model(**{named: cached}, **inputs)
            counts = [window.cumulative_length_int for window in windows]
            full = tuple(
                [count >= w.max_cache_len for count, w in zip(counts, windows, strict=True)]
            )
            kind, kept, returned = self.step(cached, named, full, **inputs)
            for window, count in zip(windows, counts, strict=True):  # a replay runs no Python
                window.cumulative_length_int = count + 1
            return kind(**kept, **{named: cached}) if returned else kind(**kept)

        return step

    def _positions(self, inputs: dict[str, Any]) -> str:
        """Describes why a step over sliding windows cannot be replayed; empty if it can."""
        if self._read:
            return f"the model reads the position of a sliding window ({min(self._read)})"
        given = [inputs[name] for name in ("input_ids", "inputs_embeds") if name in inputs]
        one = [tokens.shape[1] == 1 for tokens in given if tokens is not None]
        return "" if one == [True] else "several tokens at once, over sliding windows"

    def _prepare_cache(
        self, model: Any, generation_config: Any, model_kwargs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Replaces the method of the model's class, which gets the call's own configuration:
        removes the setting "static" from it if the method, or the call, would raise with it."""
        config, inputs = generation_config, model_kwargs
        given = [inputs[name] for name in CACHE_NAMES if inputs.get(name) is not None]
        reason = ""
        if config.use_cache is False:
            reason = "no cache (use_cache=False): each step computes all tokens again"
        elif given:
            reason = _not_static(given[0])
        elif config.prompt_lookup_num_tokens is not None:
            # Candidates of the lookup may reach beyond the end, where a static cache has no room.
            reason = "a prompt lookup"
        if config.cache_implementation == "static" and (given or reason):
            config.cache_implementation = None
            if reason:
                self._passed_on[reason] += 1
        return getattr(type(model), _PREPARE)(model, config, inputs, *args, **kwargs)

    @property
    def passed_on(self) -> dict[str, int]:
        """The numbers of steps, and of whole calls, that were left to transformers, by reason."""
        return dict(self._passed_on)

    def explain(self) -> str:
        """Returns a table of the graphs and of what ran eagerly, and why."""
        lines = [f"{count} passed on: {reason}" for reason, count in self._passed_on.items()]
        return "\n".join([str(self.step.explain()), *lines])

    def save(self, *, check: bool = True) -> dict[str, str]:
        """Writes the steps' graphs to the store; returns why some were not written, by key.

        Like `save` of a function that `interop.torch.graphed` returns.  The process must collect
        machine code (`graphfile.collect_modules`) since before torch loaded a kernel, and no
        `generate` may run meanwhile.  Raises InputError without a store."""
        refused: dict[str, str] = self.step.save(check=check)
        return refused

    def close(self) -> None:
        """Frees the graphs; the model generates as before.  Idempotent."""
        if self._closed:
            return
        self._closed = True
        for method in self._methods:
            method.remove()
        for name, (before, ours) in self._settings.items():
            if getattr(self._config, name, None) == ours:
                setattr(self._config, name, before)
        self.step.close()


_PREPARE = "_prepare_cache_for_generation"
# Older versions of transformers lack some, or count otherwise.
_SLIDING = getattr(cache_utils, "StaticSlidingWindowLayer", None)
_LINEAR = getattr(cache_utils, "LinearAttentionLayer", None)


def _not_static(cache: Any) -> str:
    """Describes why a cache's steps cannot be replayed; empty if they can."""
    if type(cache) is not cache_utils.StaticCache:
        return f"a {type(cache).__name__}, which is not static"
    if getattr(cache, "offloading", False):
        return "a cache that is moved between devices"
    for layer in cache.layers:
        kind, held = type(layer), vars(layer)
        if kind is cache_utils.StaticLayer:
            continue
        if kind is _SLIDING and "cumulative_length_int" in held:
            continue
        if kind is _LINEAR and held.get("record_past") is False:  # Mamba's, written in place
            if all(layer.has_previous_state.values()):
                continue
            return f"a {kind.__name__} without a state yet"
        return f"a {kind.__name__}, which may count positions in Python"
    return ""


def _windows(cache: Any) -> list[Any]:
    """Returns the layers of a cache that are sliding windows."""
    layers = getattr(cache, "layers", ())
    return [each for each in layers if type(each) is _SLIDING]


@contextmanager
def _noting_reads(windows: Sequence[Any], found: set[str]) -> Iterator[None]:
    """Adds to `found` the methods that are called in the block to read the position of a window,
    which a graph would hold.  They return it, so this run is right."""

    def noted(name: str, read: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            found.add(name)
            return read(*args, **kwargs)

        return call

    for window in windows:
        for name in _READING:
            setattr(window, name, noted(name, getattr(window, name)))
    try:
        yield
    finally:
        for window in windows:
            for name in _READING:
                delattr(window, name)


_READING = ("get_seq_length", "get_mask_sizes")
