"""A Llama of transformers for ostinato's decoder: its sizes, and its weights where they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers.models.llama import modeling_llama as llama

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
        self._norms: list[Any] = []
        self._moved: list[tuple[Any, int]] = []  # parameters, and where they were moved to
        self._known: list[tuple[dict[str, Any], str, Any, tuple[Any, ...]]] = []
        """Parameters and buffers, with those that are None: a bias may be set there later."""
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
        """Copies the norms."""
        with torch.no_grad():
            for copy, norm in zip(self._copies, self._norms, strict=True):
                copy.copy_(norm)

    def give_back(self) -> None:
        """Drops the references to the model.  Copies memory of a host device, which is freed with
        the device, to torch's own."""
        if self._device.capabilities.host_memory_is_device_memory:
            with torch.inference_mode(False):
                for parameter, address in self._moved:
                    if parameter.data_ptr() == address:
                        parameter.data = parameter.data.clone()
        self._moved, self._known, self._norms = [], [], []

    def _new(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, Any]:
        """Allocates memory; returns a tensor of it, and an object whose rows `adopt_weights`
        takes."""
        if self._device.capabilities.host_memory_is_device_memory:
            buffer = self._device.empty(shape, np.float32)
            return torch.from_numpy(np.asarray(_Held(buffer, self._device))), buffer
        where = torch.device(self._device.name)
        tensor = torch.empty(shape, dtype=dtype, device=where)
        return tensor, tensor

    def _memory(self, modules: Sequence[Any]) -> object:
        """Returns one piece of memory with the modules' weights below each other."""
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


def config_of(model: Any) -> LlamaConfig:
    """Returns the sizes of a model that the decoder can compute.

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


def drops_out(model: Any) -> bool:
    """True if calls of the model use dropout."""
    return any(
        layer.self_attn.training and layer.self_attn.attention_dropout
        for layer in model.model.layers
    )
