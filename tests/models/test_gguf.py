"""GGUF files: every supported type, rope's row order, and what opening refuses."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize, quantize

from ostinato.bench.random_weights import random_blocks
from ostinato.driver.signature import to_bfloat16
from ostinato.errors import (
    ClosedError,
    InputError,
    ModelError,
    ModelFormatError,
    UnsupportedModelError,
)
from ostinato.models.config import LlamaConfig, rope_inverse_frequencies
from ostinato.models.files.checkpoint import GgufTokenizerSource
from ostinato.models.files.dequantise import BLOCK_TYPES, SUPPORTED_TYPES, dequantise_rows
from ostinato.models.files.open import open_checkpoint
from ostinato.models.text.tokenizer import load_tokenizer
from tests.models.model_files import CONFIG, FAMILIES, gguf_name, weights, write_gguf

# K-quants need rows of 256.
WIDE = dataclasses.replace(CONFIG, hidden=256, inner=512, head_size=64, layers=1)


def test_config_comes_back(tmp_path: Path) -> None:
    with open_checkpoint(write_gguf(tmp_path / "m.gguf")) as checkpoint:
        # Through float32 in the file.
        assert checkpoint.config == dataclasses.replace(
            CONFIG, norm_epsilon=float(np.float32(CONFIG.norm_epsilon))
        )
        assert isinstance(checkpoint.tokenizer, GgufTokenizerSource)
        assert checkpoint.tokenizer.metadata["tokenizer.ggml.pre"] == "smollm"


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_every_tensor_in_half_split_order(tmp_path: Path, kind: str) -> None:
    values = weights()
    with open_checkpoint(write_gguf(tmp_path / "m.gguf", values, kind=kind)) as checkpoint:
        assert set(checkpoint.tensor_names()) == set(values)
        for name, value in values.items():
            got = checkpoint.tensor(name)
            if value.ndim > 1 and kind != "F32":
                # Rows are quantised one by one, so un-permuting commutes with quantising.
                quantised = gguf.GGMLQuantizationType[kind]
                value = dequantize(quantize(value, quantised), quantised)
                assert checkpoint.raw(name).type == kind
            assert got.dtype == np.float32
            assert got.flags.c_contiguous
            assert np.array_equal(got, value), name


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K", "IQ4_NL"])
def test_types_that_gguf_cannot_quantise_to(tmp_path: Path, kind: str) -> None:
    quantised = gguf.GGMLQuantizationType[kind]
    made = random_blocks(kind, (512, 256), np.random.default_rng(1))
    path = write_gguf(tmp_path / "m.gguf", config=WIDE, raw={"layers.0.w_gate": (made, quantised)})
    with open_checkpoint(path) as checkpoint:
        got = checkpoint.tensor("layers.0.w_gate")
        assert np.array_equal(got, dequantize(made, quantised))
        assert checkpoint.raw("layers.0.w_gate").shape == (512, 256)


@pytest.mark.parametrize("kind", [k for k in SUPPORTED_TYPES if k not in ("F32", "F16", "BF16")])
@pytest.mark.parametrize(("rows", "wide"), [(64, 4), (1, 1)])
def test_any_bits_decode_as_gguf_decodes_them(kind: str, rows: int, wide: int) -> None:
    quantised = gguf.GGMLQuantizationType[kind]
    _, size = gguf.GGML_QUANT_SIZES[quantised]
    blocks = np.random.default_rng(2).integers(0, 256, (rows, size * wide), dtype=np.uint8)
    blocks.flags.writeable = False  # as a mapped file's are
    with np.errstate(all="ignore"):
        expected = dequantize(blocks, quantised)
    out = np.empty_like(expected)
    dequantise_rows(kind, blocks, out)
    assert np.array_equal(out, expected, equal_nan=True)


def test_tensors_larger_than_a_block(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, hidden=1024, inner=2048, heads=16, head_size=64, layers=1)
    values = weights(config)
    with open_checkpoint(write_gguf(tmp_path / "m.gguf", values, config=config)) as checkpoint:
        for name in ("layers.0.wq", "layers.0.w_down", "embed"):
            assert np.array_equal(checkpoint.tensor(name), values[name])


def test_the_table_of_types_is_ggufs() -> None:
    for name, block in BLOCK_TYPES.items():
        kind = gguf.GGMLQuantizationType[name]
        assert (block.number, block.values, block.size) == (kind, *gguf.GGML_QUANT_SIZES[kind])


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q4_1"])
def test_load_in_pieces_is_the_whole(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that no piece and no block divides; heads that must stay whole."""
    path = write_gguf(tmp_path / "m.gguf", kind=kind)
    with open_checkpoint(path) as checkpoint:
        wanted = {name: checkpoint.tensor(name) for name in checkpoint.tensor_names()}
    monkeypatch.setattr("ostinato.models.files.checkpoint._PIECE_VALUES", 64 * 27)
    monkeypatch.setattr("ostinato.models.files.checkpoint._BLOCK_VALUES", 64 * 5)
    with open_checkpoint(path) as checkpoint:
        for dtype in (np.float32, np.uint16):
            found = {name: np.full(v.shape, 7, dtype) for name, v in wanted.items()}
            checkpoint.load(found, threads=3)
            for name, values in wanted.items():
                right = values if dtype is np.float32 else to_bfloat16(values)
                assert np.array_equal(found[name], right), name


def test_long_lists_of_strings_are_read_in_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A string may begin anywhere in a window, end in the next, or be longer than one."""
    tokens = [chr(0x4E00 + i) * (i * i % 41) for i in range(280)]
    path = write_gguf(tmp_path / "m.gguf", metadata={"tokenizer.ggml.tokens": tokens})
    for window in (1 << 20, 1, 8, 50, 51, 97):
        monkeypatch.setattr("ostinato.models.files.gguf._WINDOW", window)
        with open_checkpoint(path) as checkpoint:
            assert isinstance(checkpoint.tokenizer, GgufTokenizerSource)
            assert checkpoint.tokenizer.metadata["tokenizer.ggml.tokens"] == tokens


def test_load_fills_what_it_is_given(tmp_path: Path) -> None:
    values = weights()
    with open_checkpoint(write_gguf(tmp_path / "m.gguf", values, kind="Q8_0")) as checkpoint:
        single = {name: np.empty(v.shape, np.float32) for name, v in values.items()}
        halves = {name: np.empty(v.shape, np.uint16) for name, v in values.items()}
        checkpoint.load(single)
        checkpoint.load(halves, threads=1)
        for name in values:
            assert np.array_equal(single[name], checkpoint.tensor(name))
            assert np.array_equal(halves[name], to_bfloat16(single[name]))
            assert np.array_equal(halves[name], checkpoint.bfloat16(name))


def test_out_must_fit(tmp_path: Path) -> None:
    with open_checkpoint(write_gguf(tmp_path / "m.gguf")) as checkpoint:
        out = np.empty((280, 64), np.float32)
        assert checkpoint.tensor("embed", out) is out
        for wrong in (
            np.empty((280, 65), np.float32),
            np.empty((280, 64), np.float64),
            np.empty((64, 280), np.float32).T,
        ):
            with pytest.raises(InputError, match=r"embed.*280, 64"):
                checkpoint.tensor("embed", wrong)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="no tensor 'head'"):
            checkpoint.tensor("head")
        with pytest.raises(InputError, match="threads"):
            checkpoint.load({"embed": out}, threads=0)


def test_bfloat16_rounds_to_nearest_even() -> None:
    # Exactly between two: to the even one; just above: up; NaN with only low bits stays NaN.
    bits = np.array(
        [0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x7F800001, 0xFFFFFFFF, 0x80000000],
        np.uint32,
    )
    got = to_bfloat16(bits.view(np.float32)).tolist()
    assert got == [0x3F80, 0x3F82, 0x3F81, 0x7F80, 0x7FC0, 0xFFFF, 0x8000]


def test_output_weight_unties(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, tied_embeddings=False)
    values = weights(config)
    with open_checkpoint(write_gguf(tmp_path / "m.gguf", values, config=config)) as checkpoint:
        assert not checkpoint.config.tied_embeddings
        assert np.array_equal(checkpoint.tensor("head"), values["head"])


def test_rope_factors_are_read(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    path = write_gguf(tmp_path / "m.gguf", extra={"rope_freqs.weight": factors})
    with open_checkpoint(path) as checkpoint:
        expected = rope_inverse_frequencies(CONFIG) / factors
        np.testing.assert_allclose(rope_inverse_frequencies(checkpoint.config), expected, rtol=1e-6)
        assert "rope_freqs.weight" not in checkpoint.tensor_names()


def test_closed_checkpoint_says_so(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf"))
    kept = checkpoint.tensor("embed")
    checkpoint.close()
    checkpoint.close()
    with pytest.raises(ClosedError, match="closed"):
        checkpoint.tensor("embed")
    assert np.isfinite(kept).all()  # not a view of what is gone
    assert "closed" in repr(checkpoint)


def test_reading_from_many_threads(tmp_path: Path) -> None:
    values = weights()
    with open_checkpoint(write_gguf(tmp_path / "m.gguf", values)) as checkpoint:

        def read(_: int) -> bool:
            return all(np.array_equal(checkpoint.tensor(n), v) for n, v in values.items())

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(read, range(4)))


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no such file.*TextGenerator"):
        open_checkpoint(tmp_path / "absent.gguf")


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"llama.rope.scaling.type": "longrope"}, UnsupportedModelError, "'longrope' is"),
        ({"llama.rope.scaling.attn_factor": 0.0}, ModelFormatError, "magnitude is 0"),
        ({"llama.rope.scaling.factor": -1.0}, ModelFormatError, "factor of the rope's scaling"),
        ({"llama.rope.dimension_count": 8}, UnsupportedModelError, "dimension_count"),
        ({"llama.expert_count": 8}, UnsupportedModelError, "expert_count"),
        ({"llama.vocab_size": 281}, UnsupportedModelError, "vocab_size"),
        ({"llama.embedding_length": 128}, ModelFormatError, "shape"),
        ({"llama.block_count": 3}, ModelFormatError, r"layers\.2.*missing"),
        ({"llama.block_count": 1}, UnsupportedModelError, r"blk\.1\."),
        ({"llama.block_count": 1 << 30}, ModelFormatError, "layers"),
        ({"llama.attention.head_count": [4, 4, 4]}, ModelFormatError, "3 values for 2 layers"),
        ({"llama.attention.head_count": [4.0, 4.0]}, ModelFormatError, "integer"),
        ({"llama.attention.head_count_kv": [2, 4]}, UnsupportedModelError, "all layers have"),
        ({"llama.feed_forward_length": [96, 64]}, UnsupportedModelError, "all layers have"),
        ({"llama.context_length": None, "llama.embedding_length": None}, ModelFormatError, "miss"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, ModelFormatError, "epsilon is missing"),
        ({"tokenizer.ggml.eos_token_id": 5000}, ModelFormatError, "5000"),
        ({"split.count": 3}, ModelFormatError, "m.gguf: it is one of 3 parts.*its own name"),
        ({"split.count": "3"}, ModelFormatError, "one of '3' parts"),
        ({"qwen2.rope.scaling.type": "yarn", "qwen2.rope.scaling.yarn_beta_slow": 0.0},
         ModelFormatError, "beta of the rope's scaling"),
        ({"qwen2.attention.sliding_window_pattern": [True, False]}, UnsupportedModelError,
         r"\.attention\.sliding_window_pattern"),
        ({"qwen2.attention.sliding_window": -1.5}, ModelFormatError, r"\.sliding_window"),
        ({"qwen2.expert_count": 8}, UnsupportedModelError, r"\.expert_count"),
        ({"qwen2.embedding_length": None}, ModelFormatError, r"\.embedding_length"),
        *(
            ({f"llama.{key}": value}, UnsupportedModelError, rf"'llama\.{key}' is")
            for key, value in {  # they change the mathematics, or may do so
                "rope.scaling.yarn_attn_factor": 1.5,
                "rope.scaling.yarn_ext_factor": 1.0,
                "attention.causal": False,
                "attention.scale": 0.5,
                "attention.clamp_kqv": 8.0,
                "logit_scale": 0.25,
                "final_logit_softcapping": 30.0,
                "rope.dimension_sections": [16, 24, 24, 0],
                "something.new": 3,
            }.items()
        ),
    ],
)  # fmt: skip
def test_metadata_that_disagrees_or_is_not_supported_is_refused(
    tmp_path: Path, change: dict[str, object], error: type[ModelError], words: str
) -> None:
    config = FAMILIES["qwen2" if "qwen2." in str(change) else "llama"]
    with pytest.raises(error, match=words):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", config=config, metadata=change))


FACTORS = {"rope_freqs.weight": np.linspace(1, 2, 8, dtype=np.float32)}


def in_parts(folder: Path, split: int, config: LlamaConfig = CONFIG) -> list[Path]:
    folder.mkdir()
    write_gguf(folder / "m.gguf", config=config, split=split, extra=FACTORS)
    return sorted(folder.iterdir())


def test_a_model_in_parts_is_that_of_one_file(tmp_path: Path) -> None:
    """By whichever part it is opened; also when the parts are joined, which leaves their keys."""
    parts = in_parts(tmp_path / "parts", 8)
    assert [part.name for part in parts] == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    joined = {"split.count": 0, "split.no": 0, "split.tensors.count": 21}
    whole = write_gguf(tmp_path / "whole.gguf", extra=FACTORS, metadata=joined)
    with open_checkpoint(whole) as one:
        for part in parts:
            with open_checkpoint(part) as checkpoint:
                assert checkpoint.path == parts[0]
                assert checkpoint.config == one.config
                assert checkpoint.config.rope_factors is not None
                assert checkpoint.tensor_names() == one.tensor_names()
                for name in one.tensor_names():
                    assert np.array_equal(checkpoint.tensor(name), one.tensor(name))
                load_tokenizer(checkpoint.tokenizer)


def test_parts_that_do_not_fit_are_named(tmp_path: Path) -> None:
    def refused(part: int, why: str, error: type[ModelError] = ModelFormatError) -> None:
        """By whichever other part the model is opened; then the parts are whole again."""
        for other in {0, 1, 2} - {part}:
            with pytest.raises(error, match=rf"m-0000{part + 1}-of-00003\.gguf: {why}"):
                open_checkpoint(parts[other])
        parts[part].unlink(missing_ok=True)
        parts[part].write_bytes(whole[part])
        open_checkpoint(parts[0]).close()

    parts = in_parts(tmp_path / "a", 8)
    whole = [part.read_bytes() for part in parts]
    for part in range(3):
        parts[part].unlink()
        refused(part, "it is missing; all 3 parts", ModelError)
        parts[part].write_bytes(whole[part][:-200])
        refused(part, "tensor .* cut short")
        parts[part].write_bytes(b"GGUF")
        refused(part, "damaged GGUF head")
        parts[part].write_bytes(whole[part - 1])
        refused(part, f"'split.no' is {(part - 1) % 3}, must be {part}")
    parts[1].write_bytes(in_parts(tmp_path / "b", 7)[1].read_bytes())
    refused(1, "tensor .* is in m-00001-of-00003.gguf too")
    larger = dataclasses.replace(CONFIG, layers=3)
    parts[1].write_bytes(in_parts(tmp_path / "c", 11, larger)[1].read_bytes())
    refused(1, "'split.tensors.count' is 30, must be 21")
    parts[2].write_bytes(in_parts(tmp_path / "d", 6)[2].read_bytes())
    refused(2, "'split.count' is 4, must be 3")
    parts[2].rename(parts[2].with_name("n-00003-of-00003.gguf"))
    with pytest.raises(ModelError, match=r"n-00001-of-00003\.gguf: it is missing"):
        open_checkpoint(parts[2].with_name("n-00003-of-00003.gguf"))


def test_unsupported_type_names_tensor_and_types(tmp_path: Path) -> None:
    quantised = gguf.GGMLQuantizationType.TQ2_0
    blocks = quantize(weights(WIDE)["layers.0.w_up"], quantised)
    raw = {"layers.0.w_up": (blocks, quantised)}
    path = write_gguf(tmp_path / "m.gguf", config=WIDE, raw=raw)
    with pytest.raises(UnsupportedModelError, match=r"blk\.0\.ffn_up.*TQ2_0.*Q4_K, Q5_K, Q6_K"):
        open_checkpoint(path)


@pytest.mark.slow
def test_smollm2_against_gguf_package(smollm2_path: Path) -> None:
    reader = gguf.GGUFReader(smollm2_path)
    by_name = {tensor.name: tensor for tensor in reader.tensors}
    with open_checkpoint(smollm2_path) as checkpoint:
        assert len(checkpoint.tensor_names()) == 272
        for name in ("embed", "layers.29.w_down", "layers.0.wv", "final_norm"):
            tensor = by_name[gguf_name(name)]
            few = slice(0, None, 100 if name == "embed" else 1)  # of 49,152 rows
            expected = dequantize(tensor.data[few], tensor.tensor_type)
            assert np.array_equal(checkpoint.tensor(name)[few], expected)
