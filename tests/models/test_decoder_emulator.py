"""The decoder with its CUDA kernels and no GPU: on the host driver, by the kernels' emulator.

It shows that plan, launches and arguments fit the kernels; the rest is in test_decoder_proof.py.
"""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from ostinato.device import Device
from ostinato.models.cuda import lowering as kc
from ostinato.models.decoder import Decoder
from ostinato.models.sampling import GREEDY
from tests.models import reference_llama
from tests.models.emulated import emulate_decoders
from tests.models.proof import RELATIVE, WAYS, furthest
from tests.models.random_models import RandomModel, llama

MODEL = RandomModel(llama(3, 1, 64, inner=136, vocabulary=257, layers=2, tied_embeddings=True))
CONTEXT = 40
SMALL = {
    "biases": llama(3, 1, 32, inner=72, vocabulary=67, layers=2, qkv_bias=True),
    "norms of heads": llama(2, 1, 64, hidden=96, inner=72, vocabulary=67, layers=2, qk_norm=True),
    "windows": llama(2, 1, 32, inner=72, vocabulary=67, layers=2, windows=(5, 0)),
    "all of it": llama(
        2, 1, 32, hidden=80, inner=72, vocabulary=67, layers=2, windows=(0, 6), qkv_bias=True,
        qk_norm=True, rope_magnitude=1.3,
    ),
}  # fmt: skip
"""The additions of other families to Llama's layers."""
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator needs g++")


@pytest.mark.parametrize("clusters", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_decoder_agrees_with_numpy_on_the_emulator(
    host_device: Device, monkeypatch: pytest.MonkeyPatch, clusters: bool
) -> None:
    prompt = MODEL.tokens(3)
    options: dict[str, Any] = {"max_context": CONTEXT, "stop_tokens": (), "max_rows": 2}
    with Decoder(host_device, MODEL.checkpoint(), **options) as numpy:
        emulate_decoders(monkeypatch, clusters=clusters)
        with Decoder(host_device, MODEL.checkpoint(), **options) as decoder:
            token = decoder.prefill(prompt)  # two rows, then one that samples
            for _ in range(2):  # captured, replayed
                numpy.reset()
                numpy.prefill([*prompt, *decoder.tokens()[len(prompt) : -1]])
                assert furthest(decoder.logits(), numpy.logits()) < RELATIVE["cuda"]
                assert token == int(decoder.logits().argmax())
                token = decoder.decode()
            # Loops: as far as wanted, and to the limit in the middle of one.
            decoder.set_sampling(GREEDY, limit=10)
            decoder.reset()
            tokens = [decoder.prefill(prompt)]
            while not decoder.stopped():
                tokens.append(decoder.decode())
            decoder.reset()
            again = [decoder.prefill(prompt), *decoder.run(count=3, tokens_per_launch=3)]
            assert again + list(decoder.run(tokens_per_launch=3)) == tokens
            assert len(tokens) == 8
            assert decoder.plan.buffers["counter"].to_numpy(decoder.stream).tolist() == [2]
            assert not decoder.statistics().quarantined
            assert not decoder.statistics().one_by_one
            assert not decoder.plan.buffers["workspace"].array[: kc.COUNTER_BYTES // 4].any()


@pytest.mark.parametrize("clusters", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=() if f == "all of it" else pytest.mark.slow) for f in SMALL],
)
def test_families_agree_with_float32_in_every_way_of_running(
    host_device: Device, monkeypatch: pytest.MonkeyPatch, family: str, clusters: bool
) -> None:
    """Pieces of two rows and single tokens, past the window's end; the same bits in every way."""
    model, bits = RandomModel(SMALL[family]), {}
    emulate_decoders(monkeypatch, clusters=clusters)
    for name, way in WAYS.items():
        options = {"max_context": CONTEXT, "stop_tokens": (), "max_rows": 2, **way.options}
        with Decoder(host_device, model.checkpoint(), **options) as decoder:
            decoder.prefill(model.tokens(3))
            found = [decoder.logits()]
            for _ in range(2):
                way.decode(decoder, 4)
                found.append(decoder.logits())
            tokens = decoder.tokens()
            wanted = reference_llama.logits(
                model.config, model.values(), tokens[:11], after=[2, 6, 10]
            )
            for ours, theirs in zip(found, wanted, strict=True):
                assert furthest(ours, theirs) < RELATIVE["cuda"]
            assert not decoder.statistics().quarantined
            bits[name] = tokens, *(logits.tobytes() for logits in found)
    assert not [name for name, made in bits.items() if made != bits["eager"]]
