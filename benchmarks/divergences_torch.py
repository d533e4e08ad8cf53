"""Plants of `benchmarks.divergences` in graphs that torch captured of models of transformers.

The planted node is known from torch: while it captures, the nodes are counted before and after each
operation, and the plant says which operation it is, by the tensor that it uses or the module that
it is in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ostinato as ost
from benchmarks.divergences import Planted

SIZES = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8}
SIZES |= {"intermediate_size": 512}
WORDS, BATCH, LENGTH, CACHE, PLACE = 1000, 2, 16, 64, 20

Wanted = Callable[[Any, Sequence[Any]], bool]
"""True for the planted operation, of the operation and its arguments."""


class Noted(TorchDispatchMode):
    """Notes the nodes of the first operation that is wanted and makes nodes.

    `nodes`: returns those that are there by now.
    """

    def __init__(self, nodes: Callable[[], Sequence[Any]], wanted: Wanted) -> None:
        super().__init__()
        self._nodes, self._wanted = nodes, wanted
        self.found: tuple[Any, ...] = ()
        self.operation = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        wanted = not self.found and self._wanted(func, [*tree_leaves((args, kwargs))])
        before = {*self._nodes()} if wanted else set[Any]()
        result = func(*args, **kwargs)
        if wanted:
            self.found = tuple(node for node in self._nodes() if node not in before)
            self.operation = str(func)
        return result


def reads(tensor: Any) -> Wanted:
    """The first operation that gets this tensor, or a view of it, and writes none of its
    arguments."""
    begin = tensor.data_ptr()
    end = begin + tensor.numel() * tensor.element_size()

    def wanted(func: Any, leaves: Sequence[Any]) -> bool:
        given = (one for one in leaves if isinstance(one, torch.Tensor))
        return not func._schema.is_mutable and any(begin <= t.data_ptr() < end for t in given)

    return wanted


class Inside:
    """The first operation of one of these names that a module calls; `constant`: with this number
    among its arguments."""

    def __init__(self, module: Any, *names: str, constant: float | None = None) -> None:
        self._names, self._constant, self._depth = names, constant, 0
        self._hooks = [
            module.register_forward_pre_hook(lambda *_: self._step(1)),
            module.register_forward_hook(lambda *_: self._step(-1)),
        ]

    def _step(self, by: int) -> None:
        self._depth += by

    def __call__(self, func: Any, leaves: Sequence[Any]) -> bool:
        if not self._depth or func.overloadpacket.__name__ not in self._names:
            return False
        return self._constant is None or self._constant in [
            one for one in leaves if isinstance(one, float)
        ]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


@contextmanager
def exchanged(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Gives an attribute another value in the block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def changed(parameter: Any, at: int, value: float) -> Any:
    """A copy of a parameter, in which one element is `value` more."""
    copy = parameter.detach().clone()
    copy.view(-1)[at] += value
    return torch.nn.Parameter(copy, requires_grad=False)


class Ground:
    """Plants in one model, whose graphs `capture` makes."""

    def __init__(self, device: Any, name: str, where: str = "cuda") -> None:
        self.device, self.where = device, where
        self.stream = device.create_stream()
        torch.manual_seed(0)
        torch.backends.cudnn.deterministic = True
        self.model = self.made(name)
        shape = (BATCH, LENGTH)
        self.given = torch.randint(0, WORDS, shape, device=where)
        if name == "ViT":
            self.given = torch.randn(BATCH, 3, 32, 32, device=where)
        self.kept: list[Any] = []
        """What the graphs point at."""

    def made(self, name: str, **options: Any) -> Any:
        t, words = transformers, {"vocab_size": WORDS}
        if name == "Llama":
            config = t.LlamaConfig(**SIZES, **words, num_key_value_heads=4, use_cache=False)
            model = t.LlamaForCausalLM(config)
        elif name == "GPT-2":
            sizes = {"n_embd": 256, "n_layer": 2, "n_head": 8}
            model = t.GPT2LMHeadModel(t.GPT2Config(**sizes, **words, use_cache=False))
        elif name == "BERT":
            model = t.BertModel(t.BertConfig(**SIZES, **words, **options))
        elif name == "Mamba":
            sizes = {"hidden_size": 128, "num_hidden_layers": 2, "state_size": 8}
            model = t.MambaForCausalLM(t.MambaConfig(**sizes, **words, use_cache=False))
        else:
            model = t.ViTModel(t.ViTConfig(**SIZES, image_size=32, patch_size=8))
        return model.to(self.where).eval().requires_grad_(False)

    def module(self, *names: str) -> Any:
        """The submodule of the first of these names that there is: releases differ."""
        found = dict(self.model.named_modules())
        return next(found[name] for name in names if name in found)

    def run(self) -> Any:
        return self.model(self.given)[0]

    def capture(
        self, wanted: Wanted | None = None, run: Callable[[], Any] | None = None, warmups: int = 3
    ) -> tuple[ost.Graph, tuple[str, ...]]:
        """Captures a run by torch.  Returns the graph, and the paths of the planted operation's
        nodes.  Raises LookupError if no operation was the planted one."""
        from ostinato.interop.torch import adopt_graph

        run = run or self.run
        side = torch.cuda.Stream()
        stream, driver = self.device.adopt_stream(side), self.device.driver
        side.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(side):
            for _ in range(warmups):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        noted = Noted(
            lambda: driver.graph_nodes(stream.capture_info().graph),
            wanted or (lambda func, leaves: False),
        )
        with torch.no_grad(), torch.cuda.graph(graph, stream=side), noted:
            result = run()
        graph.instantiate()
        torch.cuda.synchronize()
        self.kept.append((graph, result))
        adopted = adopt_graph(self.device, graph)
        paths = tuple(str(n.index) for n in adopted.nodes() if n.handle in noted.found)
        if wanted is not None and not paths:
            raise LookupError(f"no node was planted ({noted.operation or 'no such operation'})")
        return adopted, paths

    def against(self, wanted: Wanted, owner: Any, name: str, value: Any) -> Planted:
        """A capture as it is, and one with another value of an attribute."""
        right, _ = self.capture()
        with exchanged(owner, name, value):
            wrong, paths = self.capture(wanted)
        self.kept.append(value)
        return Planted(right, wrong, paths)

    def in_module(self, module: Any, names: Sequence[str], name: str, value: Any) -> Planted:
        """The same, for an attribute that is a constant of one of the module's operations."""
        inside = Inside(module, *names, constant=value if "eps" in name else None)
        try:
            return self.against(inside, module, name, value)
        finally:
            inside.close()

    def parameter(self, module: Any, name: str, at: int, by: float) -> Planted:
        """The same, for a parameter of which one element has `by` more."""
        copy = changed(getattr(module, name), at, by)
        return self.against(reads(copy), module, name, copy)

    def nothing(self) -> Planted:
        return Planted(self.capture()[0], self.capture()[0], ())

    # --- Llama
    def llama_weight(self) -> Planted:
        return self.parameter(self.module("model.layers.1.mlp.down_proj"), "weight", 777, 1.0)

    def llama_epsilon(self) -> Planted:
        norm = self.module("model.layers.1.post_attention_layernorm")
        return self.in_module(norm, ["add", "rms_norm", "_fused_rms_norm"], "variance_epsilon", 0.1)

    def llama_tail(self) -> Planted:
        """In the executable, one kernel has half its blocks."""
        inside = Inside(self.module("model.layers.1.mlp.act_fn"), "silu")
        try:
            graph, paths = self.capture(inside)
        finally:
            inside.close()
        node, run = graph.nodes()[int(paths[-1])], graph.instantiate()
        config = node.kernel.config
        run.set(node, config=replace(config, grid=(config.grid[0] // 2, 1, 1)))
        return Planted(graph, run, paths)

    def llama_cache(self) -> Planted:
        """A step that decodes with a static cache, whose second layer's keys are an older copy."""
        from benchmarks.peers.transformers_loop import DecodeLoop

        self.model.config.use_cache = True
        loop = DecodeLoop(self.model, batch=1, length=CACHE, how="eager")
        loop.place(PLACE)
        right, _ = self.capture(run=loop._advance, warmups=0)
        layer = loop._cache.layers[1]
        stale = layer.keys.clone()
        stale[:, :, 3] = 0
        loop.place(PLACE)
        with exchanged(layer, "keys", stale):
            wrong, paths = self.capture(reads(stale), loop._advance, 0)
        loop.place(PLACE)
        self.kept.append((loop, stale))
        return Planted(right, wrong, paths)

    # --- GPT-2
    def gpt2_bias(self) -> Planted:
        return self.parameter(self.module("transformer.h.1.mlp.c_fc"), "bias", 100, 1.0)

    def gpt2_nan(self) -> Planted:
        return self.parameter(self.module("transformer.h.0.ln_2"), "weight", 7, float("nan"))

    # --- BERT
    def bert_activation(self) -> Planted:
        module = self.module("encoder.layer.1.intermediate")
        inside = Inside(module, "relu")
        try:
            return self.against(inside, module, "intermediate_act_fn", torch.nn.ReLU())
        finally:
            inside.close()

    def bert_epsilon(self) -> Planted:
        norm = self.module("encoder.layer.1.attention.output.LayerNorm")
        return self.in_module(norm, ["native_layer_norm"], "eps", 0.1)

    def bert_dropout(self) -> Planted:
        """While training; both runs draw the same numbers."""
        model = self.made("BERT", attention_probs_dropout_prob=0.0).train()
        with exchanged(self, "model", model):
            module = self.module("encoder.layer.1.output.dropout")
            return self.in_module(module, ["native_dropout", "bernoulli_"], "p", 0.5)

    # --- Mamba
    def mamba_a(self) -> Planted:
        return self.parameter(self.module("backbone.layers.1.mixer"), "A_log", 33, 1.0)

    def mamba_bias(self) -> Planted:
        return self.parameter(self.module("backbone.layers.1.mixer.conv1d"), "bias", 5, 1.0)

    # --- ViT
    def vit_weight(self) -> Planted:
        module = self.module("embeddings.patch_embeddings.projection")
        return self.parameter(module, "weight", 1000, 1.0)

    def vit_token(self) -> Planted:
        return self.parameter(self.module("embeddings"), "cls_token", 9, 1.0)
