"""A Llama decoder, and what other families add to it, written out plainly as transformers computes
it: the oracle.

Independent of the library's kernels on purpose: no cache, no fused matrices, heads repeated.  In
float64 unless asked otherwise; float32 is for models with the widths of real ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ostinato.models.config import LlamaConfig, rope_inverse_frequencies

Dtype = npt.DTypeLike


def rms_norm(
    x: np.ndarray, weight: np.ndarray, epsilon: float, dtype: Dtype = np.float64
) -> np.ndarray:
    x = x.astype(dtype, copy=False)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + x.dtype.type(epsilon)) * weight


def rotate(
    x: np.ndarray, positions: np.ndarray, inverse: np.ndarray, dtype: Dtype = np.float64
) -> np.ndarray:
    """Rope of x [rows, heads, size]: x * cos + rotate_half(x) * sin."""
    angles = positions.astype(np.float64)[:, None] * inverse.astype(np.float64)[None, :]
    cosine = np.cos(np.concatenate([angles, angles], -1))[:, None].astype(dtype)
    sine = np.sin(np.concatenate([angles, angles], -1))[:, None].astype(dtype)
    left, right = np.split(x, 2, axis=-1)
    return x * cosine + np.concatenate([-right, left], -1) * sine


def attend(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    first: int = 0,
    dtype: Dtype = np.float64,
    *,
    window: int = 0,
) -> np.ndarray:
    """q [rows, heads, size] at positions from `first`; k, v [length, kv_heads, size].

    Each row sees the `window` positions up to its own; all of them if that is 0."""
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = (q.swapaxes(0, 1) @ k.transpose(1, 2, 0)).astype(dtype, copy=False)
    scores /= np.sqrt(q.shape[-1]).astype(dtype)
    distance = first + np.arange(len(q))[:, None] - np.arange(len(k))[None, :]
    visible = (distance >= 0) & ((distance < window) | (window == 0))
    scores = np.where(visible[None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return (weights @ v.swapaxes(0, 1)).swapaxes(0, 1)


def silu(x: np.ndarray, dtype: Dtype = np.float64) -> np.ndarray:
    x = x.astype(dtype, copy=False)
    return x * np.where(x >= 0, 1 / (1 + np.exp(-np.abs(x))), 1 - 1 / (1 + np.exp(-np.abs(x))))


def logits(
    config: LlamaConfig,
    weights: Mapping[str, np.ndarray],
    tokens: Sequence[int],
    *,
    after: Sequence[int] | None = None,
    dtype: Dtype = np.float64,
) -> np.ndarray:
    """Logits after each of the tokens, or after those at the positions `after` alone:
    [positions, vocabulary] of `dtype`."""
    w = {name: value.astype(dtype, copy=False) for name, value in weights.items()}
    positions, inverse = np.arange(len(tokens)), rope_inverse_frequencies(config)
    x = w["embed"][list(tokens)]
    for layer in range(config.layers):
        at = {k.rpartition(".")[2]: v for k, v in w.items() if k.startswith(f"layers.{layer}.")}
        h = rms_norm(x, at["attn_norm"], config.norm_epsilon, dtype)
        q, k, v = (h @ at[f"w{name}"].T for name in "qkv")
        if config.qkv_bias:
            q, k, v = q + at["bq"], k + at["bk"], v + at["bv"]
        q, k, v = (some.reshape(len(x), -1, config.head_size) for some in (q, k, v))
        if config.qk_norm:
            q = rms_norm(q, at["q_norm"], config.norm_epsilon, dtype)
            k = rms_norm(k, at["k_norm"], config.norm_epsilon, dtype)
        q, k = rotate(q, positions, inverse, dtype), rotate(k, positions, inverse, dtype)
        q, k = q * dtype(config.rope_magnitude), k * dtype(config.rope_magnitude)
        window = config.windows[layer] if config.windows else 0
        mixed = attend(q, k, v, dtype=dtype, window=window)
        x = x + mixed.reshape(len(x), -1) @ at["wo"].T
        h = rms_norm(x, at["mlp_norm"], config.norm_epsilon, dtype)
        x = x + (silu(h @ at["w_gate"].T, dtype) * (h @ at["w_up"].T)) @ at["w_down"].T
    head = w["embed"] if config.tied_embeddings else w["head"]
    wanted = x if after is None else x[list(after)]
    return rms_norm(wanted, w["final_norm"], config.norm_epsilon, dtype) @ head.T
