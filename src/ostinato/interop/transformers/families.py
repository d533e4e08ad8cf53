"""A model of transformers for ostinato's decoder: its sizes, and its weights where they are."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from ostinato import Buffer, Device
from ostinato.errors import UnsupportedModelError
from ostinato.models import LlamaConfig, adopt_weights, rope_inverse_frequencies, weight_shapes

# Weights with another alignment are moved: products of matrices are fastest with this one.
_ALIGNMENT = 256
_SILU = ("SiLU", "SiLUActivation")


class OwnWeights:
    """The model's weights as a decoder reads them.

    `adopted`: the weights over the model's memory.  The state of the parameters at the start is
    kept, to notice that one was replaced.
    """

    def __init__(self, model: Any, config: LlamaConfig, device: Device) -> None:
        self._device = device
        self.shared_bytes = self.copied_bytes = self.peak_extra_bytes = 0
        self._vectors: list[tuple[torch.Tensor, Any]] = []  # copies, and parameters
        self._moved: list[tuple[Any, int]] = []  # parameters, and where they were moved to
        self._known: list[tuple[dict[str, Any], str, Any, tuple[Any, ...]]] = []
        """Parameters and buffers, with those that are None: a bias may be set there later."""
        try:
            self._adopt(model, config)
        except BaseException:
            self.give_back()
            raise

    def _adopt(self, model: Any, config: LlamaConfig) -> None:
        parameters, shapes = _parameters_of(model, config), weight_shapes(config)
        tensors: dict[str, object] = {
            name: self._memory(parameters[name]) for name, shape in shapes.items() if shape[1:]
        }
        vectors = [name for name, shape in shapes.items() if not shape[1:]]
        sizes = [sum(part.numel() for part in parameters[name]) for name in vectors]
        step = _ALIGNMENT // 4
        starts = [0, *itertools.accumulate(-(-size // step) * step for size in sizes)]
        copies, memory = self._new((starts[-1],), torch.float32)
        self.copied_bytes = copies.numel() * copies.element_size()
        for name, start, size in zip(vectors, starts, sizes, strict=False):
            tensors[name] = memory[start : start + size]
            for part in parameters[name]:
                self._vectors.append((copies[start : start + part.numel()], part))
                start += part.numel()
        halves = parameters["embed"][0].dtype == torch.bfloat16
        kind = np.uint16 if halves else np.float32
        self.adopted = adopt_weights(self._device, config, tensors, kind)
        self._known += [
            (held, name, tensor, _state_of(tensor, counted=held is module._buffers))
            for module in model.modules()
            for held in (module._parameters, module._buffers)
            for name, tensor in held.items()
        ]

    def changed(self) -> str:
        """Describes how a parameter or a buffer has changed; empty if none has."""
        for held, name, before, state in self._known:
            now = held.get(name)
            if now is not before or state != _state_of(now, counted=len(state) > 2):
                return f"{'buffers' if len(state) > 2 else 'parameters'} were replaced or moved"
        return ""

    def refresh(self) -> None:
        """Copies the norms and biases."""
        with torch.no_grad():
            for copy, parameter in self._vectors:
                copy.copy_(parameter)

    def give_back(self) -> None:
        """Drops the references to the model.  Copies memory of a host device, which is freed with
        the device, to torch's own."""
        if self._device.capabilities.host_memory_is_device_memory:
            with torch.inference_mode(False):
                for parameter, address in self._moved:
                    if parameter.data_ptr() == address:
                        parameter.data = parameter.data.clone()
        self._moved, self._known, self._vectors = [], [], []

    def _new(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, Any]:
        """Allocates memory; returns a tensor of it, and an object that `adopt_weights` takes, whole
        or in part."""
        if self._device.capabilities.host_memory_is_device_memory:
            buffer = self._device.empty(shape, np.float32)
            return torch.from_numpy(np.asarray(_Held(buffer, self._device))), buffer
        where = torch.device(self._device.name)
        tensor = torch.empty(shape, dtype=dtype, device=where)
        return tensor, tensor

    def _memory(self, parts: Sequence[Any]) -> object:
        """Returns one piece of memory with the matrices below each other."""
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


def _state_of(tensor: torch.Tensor | None, *, counted: bool) -> tuple[Any, ...]:
    """Returns address and dtype of a tensor, and, if `counted`, its count of writes: weights are
    read as they are, but buffers were read once."""
    where = () if tensor is None else (tensor.data_ptr(), tensor.dtype)
    if tensor is None or not counted:
        return where
    return *where, None if tensor.is_inference() else tensor._version


class _Held:
    """A buffer's memory for NumPy, which keeps the device that owns the memory."""

    def __init__(self, buffer: Buffer, device: Device) -> None:
        self.__array_interface__ = buffer.array.__array_interface__
        self._kept = buffer, device


def _together(parts: Sequence[Any]) -> torch.Tensor | None:
    """Returns the parts as one matrix if they lie below each other and are aligned; else None."""
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


def _parameters_of(model: Any, config: LlamaConfig) -> dict[str, list[Any]]:
    """Returns the parameters that each tensor of `weight_shapes` consists of, in the order of their
    rows."""
    inner = model.model
    found = {"embed": [inner.embed_tokens], "final_norm": [inner.norm], "head": [model.lm_head]}
    for index, layer in enumerate(inner.layers):
        attention, mlp = layer.self_attn, layer.mlp
        modules = {
            "attn_norm": [layer.input_layernorm],
            "wqkv": _inputs_of(attention),
            "wo": [attention.o_proj],
            "mlp_norm": [layer.post_attention_layernorm],
            "w_gate_up": [mlp.gate_proj, mlp.up_proj],
            "w_down": [mlp.down_proj],
            "bqkv": _inputs_of(attention),
        }
        if config.qk_norm:
            modules |= {"q_norm": [attention.q_norm], "k_norm": [attention.k_norm]}
        found |= {f"layers.{index}.{name}": parts for name, parts in modules.items()}
    return {
        name: [part.bias if name.endswith("bqkv") else part.weight for part in found[name]]
        for name in weight_shapes(config)
    }


def _inputs_of(attention: Any) -> list[Any]:
    return [attention.q_proj, attention.k_proj, attention.v_proj]


def config_of(model: Any) -> LlamaConfig:
    """Returns the sizes of a model that the decoder can compute: those of its config, by the rules
    for a config.json, where its modules compute by them.

    Raises UnsupportedModelError, ModelFormatError.
    """

    def require(fits: object, what: str) -> None:
        if not fits:
            raise UnsupportedModelError(f"{type(model).__name__} cannot be accelerated: {what}")

    require(isinstance(model, PreTrainedModel), "it is no model of transformers")
    config = LlamaConfig.from_hf(model.config.to_dict(), where="the model's config")
    family = model.config.model_type
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")

    def require_own(module: Any, name: str) -> None:
        kind = getattr(modeling, f"{family.capitalize()}{name}")
        found = f"a {type(module).__module__}.{type(module).__qualname__}"
        require(type(module) is kind, f"{found} in place of transformers' {kind.__name__}")

    require_own(model, "ForCausalLM")
    inner, head = model.model, model.lm_head
    # The weights say whether they are tied; the config is only what transformers read it from.
    config = replace(config, tied_embeddings=head.weight is inner.embed_tokens.weight)
    require_own(inner, "Model")
    for module in model.modules():
        own = vars(module).get("config", model.config) is model.config
        require(own, f"a {type(module).__name__} with a config of its own")
    require(type(inner.embed_tokens) is torch.nn.Embedding, "its embeddings are another module")
    require(inner.embed_tokens.max_norm is None, "max_norm of the embeddings")
    require(len(inner.layers) == config.layers, f"it has {len(inner.layers)} layers")
    _check_windows(model, config, require)
    linear, inputs, norms = [head], [], [inner.norm]
    for layer in inner.layers:
        attention, mlp = layer.self_attn, layer.mlp
        require_own(layer, "DecoderLayer")
        require_own(attention, "Attention")
        require_own(mlp, "MLP")
        require(type(mlp.act_fn).__name__ in _SILU, "another activation than SiLU")
        scale = config.head_size**-0.5
        require(abs(attention.scaling - scale) <= 1e-6 * scale, "another scale of the attention")
        inputs += _inputs_of(attention)
        linear += [attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        norms += [layer.input_layernorm, layer.post_attention_layernorm]
        if config.qk_norm:
            norms += [attention.q_norm, attention.k_norm]
    for module in (*linear, *inputs):
        require(type(module) is torch.nn.Linear, f"a {type(module).__name__} in place of a Linear")
    for module in linear if config.qkv_bias else (*linear, *inputs):
        require(module.bias is None, "a bias that its family does not have")
    for module in inputs if config.qkv_bias else ():
        require(module.bias is not None, "queries, keys or values of a layer without a bias")
    for module in norms:
        require_own(module, "RMSNorm")
        require(module.variance_epsilon == config.norm_epsilon, "norms of different epsilons")
    _check_parameters(model, require)
    rope = inner.rotary_emb
    require_own(rope, "RotaryEmbedding")
    own_type = (model.config.rope_parameters or {}).get("rope_type", "default")
    require(
        rope.rope_type == own_type, f"its rope is {rope.rope_type}, and {own_type} in its config"
    )
    scaled = rope.attention_scaling / config.rope_magnitude
    require(abs(scaled - 1) <= 1e-6, "another scale of its rope than its config says")
    turns = rope.inv_freq.detach().double().cpu().numpy()
    ours = rope_inverse_frequencies(config)
    # Rounded, where the whole model was made bfloat16 with `to`.
    fits = turns.shape == ours.shape and np.allclose(turns, ours, rtol=1e-2, atol=0)
    require(fits, "its rope turns otherwise than its config says")
    if np.allclose(turns, ours, rtol=1e-6, atol=0):
        return config
    plain = rope_inverse_frequencies(replace(config, rope_scaling=None, rope_factors=None))
    return replace(config, rope_scaling=None, rope_factors=tuple((plain / turns).tolist()))


def _check_windows(model: Any, config: LlamaConfig, require: Callable[[object, str], None]) -> None:
    """Checks that each layer attends to its window of `config` in transformers too.  `generate`
    makes its cache by keys of the model's config that the family's modules may not read."""
    caches, layers = DynamicCache(config=model.config).layers, model.model.layers
    for index, (layer, cache) in enumerate(zip(layers, caches, strict=True)):
        window = config.window(index)
        own = getattr(layer.self_attn, "sliding_window", window) or 0
        require(own == window, f"a layer with a window of {own}, which is {window} in its config")
        kept = getattr(cache, "sliding_window", 0)
        require(
            type(cache) in (DynamicLayer, DynamicSlidingWindowLayer) and kept == window,
            f"layer {index} has a window of {window} (0: none), and generate gives it a "
            f"{type(cache).__name__} of {kept}: remove sliding_window, layer_types or "
            "attention_chunk_size from the config, whichever is not meant",
        )


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


def drops_out(model: Any) -> bool:
    """True if calls of the model use dropout."""
    return any(
        layer.self_attn.training and layer.self_attn.attention_dropout
        for layer in model.model.layers
    )
