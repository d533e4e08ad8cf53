"""How a model is split over ranks: sizes, tensors, programs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import ostinato as ost
from ostinato.errors import InputError, UnsupportedModelError
from ostinato.models.config import LlamaConfig, tensor_shapes
from ostinato.models.files.checkpoint import Checkpoint
from ostinato.models.files.open import open_checkpoint
from ostinato.models.packed import PackedMatrix, PackedPart
from ostinato.models.program import decode_program
from ostinato.models.sharding import (
    COLLECTIVES,
    ShardedCheckpoint,
    Sharding,
    shard_checkpoint,
    shard_program,
)
from ostinato.models.weights import load_weights
from tests.models.model_files import packed_matrix, write_folder, write_gguf
from tests.models.random_models import RandomModel, llama

MODEL = llama(8, 4, 16, hidden=128, inner=256, vocabulary=512, layers=2)
WIDE = llama(8, 4, 32, hidden=256, inner=512, vocabulary=264, layers=2, context_length=64)

FAMILIES = {"qkv_bias": True, "qk_norm": True}
"""What other families add to Llama's layers."""


# ----------------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("heads", "kv_heads", "inner", "vocabulary", "size", "number"),
    [
        (9, 3, 96, 96, 2, "heads is 9"),
        (8, 4, 100, 96, 8, "inner is 100"),
        (8, 4, 96, 301, 4, "vocabulary is 301"),
        (12, 6, 96, 96, 4, "kv_heads is 6"),
    ],
)
def test_what_cannot_be_shared_is_named(
    heads: int, kv_heads: int, inner: int, vocabulary: int, size: int, number: str
) -> None:
    config = llama(heads, kv_heads, 16, inner=inner, vocabulary=vocabulary)
    with pytest.raises(UnsupportedModelError, match=f"{number}, which {size} ranks"):
        Sharding(config, 0, size)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_is_none(rank: int) -> None:
    with pytest.raises(InputError, match="rank is"):
        Sharding(MODEL, rank, 2)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_every_query_head_has_the_key_head_that_it_has_in_the_whole(
    size: int, kv_heads: int
) -> None:
    config = llama(8, kv_heads, 16, inner=96, vocabulary=96)
    group = config.heads // kv_heads
    for rank in range(size):
        one = Sharding(config, rank, size)
        per_key = one.part.heads // one.part.kv_heads
        for head in range(one.part.heads):
            whole_head = rank * one.part.heads + head
            assert one.first_kv_head + head // per_key == whole_head // group


def test_parts_of_all_ranks_are_the_whole_tensor() -> None:
    model = replace(MODEL, **FAMILIES)
    for name, shape in tensor_shapes(model).items():
        values = np.arange(np.prod(shape)).reshape(shape)
        cuts = [Sharding(model, rank, 4).cut(name) for rank in range(4)]
        parts = [cut.of(values) for cut in cuts]
        for cut, part in zip(cuts, parts, strict=True):
            assert cut.shape(shape) == part.shape
        if cuts[0].axis is None:
            assert all(part.shape == shape for part in parts)
        else:
            np.testing.assert_array_equal(np.concatenate(parts, axis=cuts[0].axis), values)


# --------------------------------------------------------------------------------------- weights


def parts_of(name: str) -> list[str]:
    """The canonical tensors below each other in one in device memory."""
    layer, _, last = name.rpartition(".")
    parts = {
        "wqkv": ("wq", "wk", "wv"),
        "bqkv": ("bq", "bk", "bv"),
        "w_gate_up": ("w_gate", "w_up"),
    }.get(last, (last,))
    return [f"{layer}.{part}" if layer else part for part in parts]


def fused(checkpoint: Checkpoint, name: str) -> np.ndarray:
    return np.concatenate([checkpoint.tensor(n) for n in parts_of(name)])


def hand_packed(checkpoint: Checkpoint, name: str) -> np.ndarray:
    raws = [checkpoint.raw(part) for part in parts_of(name)]
    rows = [np.empty((raw.rows, raw.size // raw.rows), np.uint8) for raw in raws]
    for part, out in zip(parts_of(name), rows, strict=True):
        checkpoint.packed(part, out)
    kinds = tuple(PackedPart(raw.type, raw.rows) for raw in raws)
    return packed_matrix(PackedMatrix(raws[0].columns, kinds), rows)


def whole_tensor(checkpoint: Checkpoint, sharding: Sharding, name: str) -> np.ndarray:
    cut = sharding.cut(name)
    return cut.of(checkpoint.tensor(sharding.source(name)))


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_0"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_rank_reads_its_part_of_a_gguf_file(tmp_path: Path, kind: str, tied: bool) -> None:
    """Queries and keys are in another order in the file, head by head."""
    config = replace(WIDE, tied_embeddings=tied)
    with open_checkpoint(write_gguf(tmp_path / "m.gguf", config=config, kind=kind)) as whole:
        for size, rank in ((2, 0), (2, 1), (4, 1), (4, 3)):
            sharding = Sharding(whole.config, rank, size)
            part = ShardedCheckpoint(whole, sharding)
            assert tuple(part.shapes()) == part.tensor_names()
            for name, shape in part.shapes().items():
                wanted = whole_tensor(whole, sharding, name)
                assert wanted.shape == shape
                np.testing.assert_array_equal(part.tensor(name), wanted)
                half = part.bfloat16(name)
                np.testing.assert_array_equal(
                    half, sharding.cut(name).of(whole.bfloat16(sharding.source(name)))
                )
                raw = part.raw(name)
                assert part.stored(name).nbytes == raw.size


@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize("kind", ["F16", "Q8_0", "folder"])
@pytest.mark.parametrize("family", FAMILIES)
def test_biases_and_norms_of_heads_of_a_file(
    tmp_path: Path, family: str, kind: str, size: int
) -> None:
    """Biases are split like the rows that they are added to; with 8 ranks key heads are repeated.
    Every rank has the norms of heads as a whole."""
    config = replace(WIDE, **{family: True})
    if kind == "folder":
        path = write_folder(tmp_path / "m", config=config)
    else:
        path = write_gguf(tmp_path / "m.gguf", config=config, kind=kind)
    with open_checkpoint(path) as whole, ost.open_device("host") as device:
        assert getattr(whole.config, family)
        for rank in range(size):
            sharding = Sharding(whole.config, rank, size)
            part = ShardedCheckpoint(whole, sharding)
            for name, shape in part.shapes().items():
                wanted = whole_tensor(whole, sharding, name)
                assert wanted.shape == shape
                np.testing.assert_array_equal(part.tensor(name), wanted)
                assert part.stored(name).nbytes == part.raw(name).size
            weights = load_weights(device, part, packed=True)
            added = [name for name in weights.tensors if name.endswith(("bqkv", "q_norm"))]
            assert len(added) == config.layers
            for name in added:
                np.testing.assert_array_equal(weights.tensors[name].array, fused(part, name))
            weights.close()


@pytest.mark.parametrize("packed", [False, True])
def test_weights_of_a_rank_on_the_device(tmp_path: Path, packed: bool) -> None:
    path = write_gguf(tmp_path / "m.gguf", config=WIDE, kind="Q8_0")
    with open_checkpoint(path) as whole, ost.open_device("host") as device:
        sharding = Sharding(whole.config, 1, 2)
        part = ShardedCheckpoint(whole, sharding)
        weights = load_weights(device, part, packed=packed)
        assert weights.loaded and weights.config == sharding.part
        names = [n for n in weights.tensors if "norm" not in n]
        assert "head" in names
        for name in names:
            wanted = hand_packed(part, name) if packed else fused(part, name)
            np.testing.assert_array_equal(weights.tensors[name].array, wanted)
        weights.close()


def test_made_weights_are_cut_from_the_whole() -> None:
    model = RandomModel(MODEL)
    values = model.values()
    sharding = Sharding(MODEL, 2, 4)
    part = shard_checkpoint(model.checkpoint(), sharding)
    assert not part.has_file
    into = {name: np.empty(shape, np.float32) for name, shape in part.shapes().items()}
    part.load(into)
    for name, found in into.items():
        wanted = sharding.cut(name).of(values[sharding.source(name)])
        np.testing.assert_array_equal(found, wanted)


def test_blocks_are_not_split(tmp_path: Path) -> None:
    config = replace(WIDE, inner=544)  # 17 blocks of 32
    path = write_gguf(tmp_path / "m.gguf", config=config, kind="Q8_0")
    with (
        open_checkpoint(path) as whole,
        pytest.raises(UnsupportedModelError, match=r"544 columns of Q8_0.*272 columns.*32"),
    ):
        ShardedCheckpoint(whole, Sharding(whole.config, 0, 2))


# -------------------------------------------------------------------------------------- programs


@pytest.mark.parametrize("whole_logits", [False, True])
@pytest.mark.parametrize("last_row", [False, True])
def test_the_program_of_a_rank(whole_logits: bool, last_row: bool) -> None:
    sharding = Sharding(MODEL, 1, 4)
    one = decode_program(sharding.part, last_row=last_row)
    program = shard_program(one, sharding, whole_logits=whole_logits, last_row=last_row)
    kernels = [call.kernel for call in program]
    layer = [
        "norm_qkv_rope", "attention", "output_residual", "accumulate",
        "norm_gate_up", "down_residual", "accumulate",
    ]  # fmt: skip
    ending = ["head", "best_of_part", "all_gather", "best_of_ranks"]
    if whole_logits:
        ending = ["head", "best_of_part", "all_gather", "all_gather", "sample_of_ranks"]
    assert kernels == ["embed", *layer * MODEL.layers, *ending]
    by_name = {call.kernel: dict(call.arguments) for call in program}
    assert by_name["embed"]["vocabulary"] == 512
    assert by_name["head"]["vocabulary"] == 128
    assert by_name["best_of_part"]["first"] == 128
    assert str(by_name["down_residual"]["x"]) == "partial"
    assert str(by_name["accumulate"]["target"]) == "x"
    assert all(c in COLLECTIVES for c in ("accumulate", "all_gather"))


def test_ranks_programs_differ_in_the_tokens_of_their_rows_alone() -> None:
    programs = []
    for rank in range(4):
        sharding = Sharding(MODEL, rank, 4)
        program = shard_program(decode_program(sharding.part), sharding, whole_logits=True)
        programs.append(
            [
                (call.kernel, [pair for pair in call.arguments if pair[0] != "first"])
                for call in program
            ]
        )
    assert all(program == programs[0] for program in programs)


def test_a_tensor_that_is_not_known_is_not_split() -> None:
    with pytest.raises(UnsupportedModelError, match="w_router"):
        Sharding(MODEL, 0, 2).cut("layers.0.w_router")


def test_the_config_of_a_part_is_one_of_its_own() -> None:
    config = LlamaConfig(
        64, 2, 8, 2, 8, 96, 96, 64, bos_token_id=95, eos_token_ids=(94,), tied_embeddings=True
    )
    part = Sharding(config, 3, 4).part
    assert (part.heads, part.kv_heads, part.inner, part.vocabulary) == (2, 1, 24, 24)
    assert (part.hidden, part.layers, part.head_size) == (64, 2, 8)
