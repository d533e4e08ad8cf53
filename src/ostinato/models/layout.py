"""The weights' matrices on a device: their shapes and the canonical tensors they consist of.  Pure.

Queries, keys and values are one matrix, gate and up another, so that a layer is four products.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ostinato.models.config import LlamaConfig, tensor_shapes

# The canonical tensors whose rows are stacked in one matrix.
_FUSED = {
    "wqkv": ("wq", "wk", "wv"),
    "bqkv": ("bq", "bk", "bv"),
    "w_gate_up": ("w_gate", "w_up"),
}
_PART_OF = {part: (name, parts) for name, parts in _FUSED.items() for part in parts}


def weight_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the tensors in device memory, in the order of use; matrices [out, in].

    The names are `embed`, `layers.{i}.` + `attn_norm wqkv wo mlp_norm w_gate_up w_down`,
    `final_norm`, and `head` where the embeddings are not tied; a layer also has `bqkv`
    (`LlamaConfig.qkv_bias`) and `q_norm k_norm` (`qk_norm`).  `wqkv` has the rows of queries, keys
    and values in this order, `bqkv` their biases, `w_gate_up` the rows of gate and up.
    """
    return device_shapes(tensor_shapes(config))


def device_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Returns what `weight_shapes` does, from the shapes of canonical tensors: a rank's embedding
    has rows for the whole vocabulary, unlike its config."""
    found = {}
    for name, shape in shapes.items():
        layer, _, last = name.rpartition(".")
        fused, parts = _PART_OF.get(last, (last, (last,)))
        if last == parts[0]:
            rows = sum(shapes[f"{layer}.{part}" if layer else part][0] for part in parts)
            found[f"{layer}.{fused}" if layer else fused] = (rows, *shape[1:])
    return found


def part_rows(config: LlamaConfig, name: str, rows: int) -> Iterator[tuple[str, int]]:
    """Yields the canonical tensors that a tensor in device memory consists of, each with its number
    of rows; `rows` is the number of the whole."""
    layer, _, last = name.rpartition(".")
    sizes = {
        **dict.fromkeys(("wq", "bq"), config.query_size),
        **dict.fromkeys(("wk", "wv", "bk", "bv"), config.kv_size),
        "w_gate": config.inner,
        "w_up": config.inner,
    }
    if last not in _FUSED:
        yield name, rows
    for part in _FUSED.get(last, ()):
        yield f"{layer}.{part}", sizes[part]
