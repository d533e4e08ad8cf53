"""Weights on their way to a device: converted straight into place, or through ordinary memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.errors import ClosedError, InputError
from ostinato.models import Decoder, LlamaConfig
from ostinato.models.config import tensor_shapes
from ostinato.models.files.open import open_checkpoint
from ostinato.models.host.packed_kernels import without_extension
from ostinato.models.weights import adopt_weights, load_weights, weight_shapes
from tests.models.model_files import write_gguf
from tests.models.random_models import RandomModel, llama


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
@pytest.mark.parametrize("staged", [1, 20_000, 64 << 20])
def test_both_ways_give_the_same_weights(
    host_device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: type, staged: int
) -> None:
    """One tensor at a time, some at a time, all at once."""
    with open_checkpoint(write_gguf(tmp_path / "m.gguf", kind="Q4_1")) as checkpoint:
        straight = load_weights(host_device, checkpoint, dtype)
        wanted = {name: b.array.copy() for name, b in straight.tensors.items()}
        straight.close()
        apart = replace(host_device.capabilities, host_memory_is_device_memory=False)
        monkeypatch.setattr(Device, "capabilities", apart)
        monkeypatch.setattr("ostinato.models.weights._STAGED_BYTES", staged)
        uploaded = load_weights(host_device, checkpoint, dtype, threads=2)
        assert uploaded.loaded and list(uploaded.tensors) == list(wanted)
        for name, values in wanted.items():
            found = host_device.to_numpy(uploaded.tensors[name])
            assert found.dtype == values.dtype and np.array_equal(found, values), name
        uploaded.close()


def on_device(device: Device, config: LlamaConfig) -> dict[str, ost.Buffer]:
    """Float32 weights in the shapes of `weight_shapes`, put there part by part."""
    tensors: dict[str, ost.Buffer] = {}
    model, shapes = RandomModel(config), tensor_shapes(config)
    for name, shape in weight_shapes(config).items():
        layer, _, last = name.rpartition(".")
        parts = {"wqkv": ("wq", "wk", "wv"), "w_gate_up": ("w_gate", "w_up")}.get(last, (last,))
        pieces = []
        for part in parts:
            full = f"{layer}.{part}" if layer else part
            pieces.append(np.empty(shapes[full], np.float32))
            model.fill(full, pieces[-1])
        tensors[name] = device.array(np.concatenate(pieces))
        assert tensors[name].shape == shape
    return tensors


@pytest.mark.parametrize("tied", [False, True])
def test_a_decoder_works_on_adopted_weights(host_device: Device, tied: bool) -> None:
    """The same logits as from the same values in a checkpoint; nothing is copied, and a change of
    the memory is seen."""
    config = llama(4, 2, 16, inner=96, vocabulary=131, tied_embeddings=tied)
    tensors = on_device(host_device, config)
    weights = adopt_weights(host_device, config, tensors, np.float32)
    assert weights.loaded and list(weights.tensors) == list(weight_shapes(config))
    for name, buffer in weights.tensors.items():
        assert buffer.address == tensors[name].address, name
    prompt = [5, 99, 130, 0, 7]
    with Decoder(host_device, weights, max_context=32) as decoder:
        chosen = [decoder.prefill(prompt), decoder.decode(), decoder.decode()]
        found = decoder.logits()
        with (
            without_extension(),
            RandomModel(config).checkpoint() as checkpoint,
            Decoder(host_device, checkpoint, max_context=32) as other,
        ):
            assert [other.prefill(prompt), other.decode(), other.decode()] == chosen
            assert np.array_equal(other.logits(), found)
        tensors["final_norm"].array[...] *= 2
        decoder.truncate(len(prompt) + 2)
        decoder.decode()
        assert np.allclose(decoder.logits(), 2 * found, rtol=1e-5)
    assert weights.loaded, "the decoder closed weights that are not its own"
    weights.close()
    with pytest.raises(ClosedError, match="embed"):
        Decoder(host_device, weights)


def test_what_does_not_fit_is_not_adopted(host_device: Device) -> None:
    config = llama(4, 2, 16, layers=1, inner=96, vocabulary=131)
    tensors = on_device(host_device, config)

    def adopted(**changes: object) -> None:
        adopt_weights(host_device, config, {**tensors, **changes}, np.float32)

    with pytest.raises(InputError, match=r"wq.* not known"):
        adopted(wq=tensors["embed"])
    with pytest.raises(InputError, match=r"layers\.0\.wo.* missing"):
        found = {name: b for name, b in tensors.items() if name != "layers.0.wo"}
        adopt_weights(host_device, config, found, np.float32)
    with pytest.raises(InputError, match=r"'head' is .*\[130, 64\]"):
        adopted(head=tensors["head"][1:])
    with pytest.raises(InputError, match=r"'final_norm' is int32"):
        adopted(final_norm=tensors["final_norm"].view(dtype=np.int32))
    with pytest.raises(InputError, match="'embed' is float32"):
        adopt_weights(host_device, config, tensors, np.uint16)
    with pytest.raises(InputError, match="multiple of 16"):
        room = host_device.empty(64 * 4 + 8, "bytes")
        adopted(final_norm=room.view(8, 64, np.float32))
    with ost.open_device("host") as other, pytest.raises(InputError, match="another device"):
        adopted(final_norm=other.zeros(64, np.float32))
    halves = {
        name: host_device.zeros(b.shape, np.uint16) if len(b.shape) == 2 else b
        for name, b in tensors.items()
    }
    weights = adopt_weights(host_device, config, halves)
    with pytest.raises(InputError, match="are uint16; the kernels of host read float32"):
        Decoder(host_device, weights)
