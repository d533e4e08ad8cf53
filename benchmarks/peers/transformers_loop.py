"""transformers' Llama with random weights, decoding greedily over a static cache.

    model = random_llama(config)
    loop = DecodeLoop(model, batch=1, length=192, how="compile")
    loop.place(64)
    tokens = loop.run(100)

Our decoder is measured against this loop, so it does what a careful user of transformers would: a
static key and value cache, scaled dot product attention, the next token chosen on the device and
fed back there, no synchronisation before the last token.  Importing this module imports torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

from ostinato.errors import InputError, NotAvailableError
from ostinato.models import LlamaConfig

try:
    import torch
    import transformers
except ImportError as error:
    raise NotAvailableError(
        f"transformers or PyTorch is not installed ({error}); install both"
    ) from error

__all__ = ["DecodeLoop", "How", "llama_config", "random_llama", "release", "versions"]

How = Literal["eager", "graph", "compile"]
"""The ways to run a step: kernel by kernel, `torch.cuda.graph` over one step, or
`torch.compile(mode="reduce-overhead")`."""

_SEED = 11
_WIDTH = 0.02
_WARMUPS = 4  # torch.compile runs once, records its graph, then replays


def versions() -> dict[str, str]:
    """Returns the versions of torch and transformers."""
    return {"torch": torch.__version__, "transformers": transformers.__version__}


def llama_config(config: LlamaConfig, *, context: int | None = None) -> Any:
    """Makes transformers' `LlamaConfig` from ours; `context`: positions, by default the model's."""
    return transformers.LlamaConfig(
        hidden_size=config.hidden,
        intermediate_size=config.inner,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_size,
        vocab_size=config.vocabulary,
        max_position_embeddings=config.context_length if context is None else context,
        tie_word_embeddings=config.tied_embeddings,
        attn_implementation="sdpa",
    )


def random_llama(
    config: LlamaConfig,
    *,
    context: int | None = None,
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
) -> Any:
    """Makes a `LlamaForCausalLM` on the device, with random weights, none of which is zero.
    `context` as for `llama_config`.

    Raises torch's errors, for example for too little memory.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model: Any = transformers.LlamaForCausalLM(llama_config(config, context=context))
    finally:
        torch.set_default_dtype(before)
    generator = torch.Generator(device).manual_seed(_SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(0.0, _WIDTH, generator=generator)
    return model.eval().requires_grad_(False)


class DecodeLoop:
    """Greedy decoding of `batch` sequences in step, in a static cache of `length` positions.

    `how`: see `How`; "graph" needs a CUDA device.  The constructor runs a few steps, so that
    everything is compiled and captured; "compile" may take a minute.  `whole_graph`: True if torch
    compiled the step as one graph without breaks (always True for the other two).  Raises the
    errors of torch and transformers.
    """

    def __init__(self, model: Any, *, batch: int, length: int, how: How) -> None:
        if how not in get_args(How):
            raise InputError(f"how is {how!r}; there are: {', '.join(get_args(How))}")
        self.how = how
        self.batch = batch
        self.length = length
        self.whole_graph = True
        self._model = model
        self._device = next(model.parameters()).device
        self._cache = _static_cache(model, batch, length)
        # Releases before 5.3 need the position as an argument; later ones keep it in the cache.
        known = inspect.signature(model.forward).parameters
        self._told = "cache_position" in known
        # Releases before 4.50 have another name for it.
        self._kept = "logits_to_keep" if "logits_to_keep" in known else "num_logits_to_keep"
        self._held = "cache" if "cache" in known else "past_key_values"  # releases before 5.24
        ids = torch.randint(0, model.config.vocab_size, (batch, 1), device=self._device)
        self._token = ids
        self._position = torch.zeros((1, 1), dtype=torch.long, device=self._device)
        with torch.no_grad():
            self._step(self._token, self._position)  # allocates the cache
            self._randomise()
            self._once = self._prepared()
        self.place(0)

    def _step(self, token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        told = {"cache_position": position[0]} if self._told else {}
        logits = self._model(
            input_ids=token,
            position_ids=position,
            use_cache=True,
            **{self._held: self._cache},
            **told,
        ).logits
        chosen: torch.Tensor = logits[:, -1].argmax(-1, keepdim=True)
        return chosen

    def _advance(self) -> None:
        self._token.copy_(self._step(self._token, self._position))
        self._position.add_(1)

    def _prepared(self) -> Callable[[], None]:
        """Returns a function that runs one step without waiting."""
        if self.how == "graph":
            return self._captured()
        if self.how == "compile":
            try:
                return self._compiled(whole=True)
            except torch._dynamo.exc.Unsupported:
                self.whole_graph = False
                torch._dynamo.reset()
                return self._compiled(whole=False)
        for _ in range(_WARMUPS):
            self._advance()
        return self._advance

    def _captured(self) -> Callable[[], None]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARMUPS):
                self._advance()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._advance()
        replay: Callable[[], None] = graph.replay
        return replay

    def _compiled(self, *, whole: bool) -> Callable[[], None]:
        compiled = torch.compile(self._step, mode="reduce-overhead", fullgraph=whole, dynamic=False)

        def once() -> None:
            torch.compiler.cudagraph_mark_step_begin()
            self._token.copy_(compiled(self._token, self._position))
            self._position.add_(1)

        for _ in range(_WARMUPS):
            once()
        return once

    def _randomise(self) -> None:
        for keys, values in self._tensors():
            keys.normal_()
            values.normal_()

    def _tensors(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        layers = getattr(self._cache, "layers", None)
        if layers is not None:
            return [(layer.keys, layer.values) for layer in layers]
        return list(zip(self._cache.key_cache, self._cache.value_cache, strict=True))

    def place(self, position: int) -> None:
        """Sets the position of the token that the next step decodes; the cache has that many
        positions before it.

        Raises InputError beyond the cache.
        """
        if not 0 <= position < self.length:
            raise InputError(f"position {position} is outside a cache of {self.length}")
        self._position.fill_(position)
        for layer in getattr(self._cache, "layers", ()):
            filled = getattr(layer, "cumulative_length", None)
            if isinstance(filled, torch.Tensor):
                filled.fill_(position)
            elif filled is not None:
                layer.cumulative_length = position
        self.synchronize()

    def run(self, tokens: int) -> list[int]:
        """Decodes that many tokens of each sequence.  Returns the last of each, once it is on the
        host."""
        with torch.no_grad():
            for _ in range(tokens):
                self._once()
            last: list[int] = self._token.flatten().tolist()
        return last

    def prompt(self, tokens: Sequence[int]) -> int:
        """Reads a prompt from position 0 on in one eager pass, for every `how`, with logits of the
        last position only.  Returns the token chosen after it, once it is on the host.

        `place(0)` must be called before, and `place` before another `run`.  Raises InputError for
        more than one sequence, and for no tokens or more than the cache holds.
        """
        if self.batch != 1 or not 1 <= len(tokens) <= self.length:
            raise InputError(
                f"a prompt of {len(tokens)} tokens: a cache of one sequence is needed that holds "
                f"them, and this one is of {self.batch} with {self.length} positions"
            )
        with torch.no_grad():
            ids = torch.tensor([list(tokens)], dtype=torch.long, device=self._device)
            positions = torch.arange(len(tokens), device=self._device)
            told: dict[str, object] = {"cache_position": positions} if self._told else {}
            logits = self._model(
                input_ids=ids,
                position_ids=positions[None],
                use_cache=True,
                **{self._held: self._cache, self._kept: 1},
                **told,
            ).logits
            return int(logits[0, -1].argmax())

    def synchronize(self) -> None:
        """Waits for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _static_cache(model: Any, batch: int, length: int) -> Any:
    """Makes a static cache; releases before 4.56 need more arguments."""
    known = inspect.signature(transformers.StaticCache.__init__).parameters
    options: dict[str, object] = {"config": model.config, "max_cache_len": length}
    parameter = next(model.parameters())
    older = {"max_batch_size": batch, "device": parameter.device, "dtype": parameter.dtype}
    options.update({name: value for name, value in older.items() if name in known})
    return transformers.StaticCache(**options)


def release() -> None:
    """Drops compiled code, and returns cached memory of torch to the device."""
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
