"""The configuration of a Llama-family model: sizes, rope, token ids.  Pure: no file is read here.

A config is built from a Hugging Face `config.json` (`LlamaConfig.from_hf`) or from GGUF metadata
(`LlamaConfig.from_gguf`).  Neither is trusted: every size has an upper bound far above any
published model, so a hostile file fails here, before anything is allocated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ostinato.errors import ModelFormatError, UnsupportedModelError
from ostinato.models.arguments import quoted, whole
from ostinato.models.rope import scaled_rope, yarn_kept, yarn_magnitude

SUPPORTED_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
"""Values of `model_type` in config.json.  GGUF files of Mistral models have "llama"."""
_SUPPORTED = f"supported: {', '.join(SUPPORTED_ARCHITECTURES)} (Llama 2 and 3, SmolLM, …)"
_BIASED, _NORMED = ("qwen2",), ("qwen3",)  # with `qkv_bias`; with `qk_norm`

_GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")
# The defaults of transformers' configuration classes for a missing key.  For architectures without
# an entry: as many key/value heads as heads, and a head size of hidden / heads.
_HF_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}
_HF_HEAD_SIZES = {"qwen3": 128}
# Fields of config.json that may change what a model computes, with the values that change nothing
# (a missing field changes nothing either).  Some belong to other architectures, and transformers
# ignores some of them for ours: a file that sets one to anything else describes another model.
_HF_NEUTRAL: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu", "swish"),
    "is_causal": (True,),
    "per_layer_config": (None, {}),
    "quantization_config": (None, {}),
    **dict.fromkeys(("attention_bias", "mlp_bias"), (None, False)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "clip_qkv"), (None, 0)),
    **dict.fromkeys(("logit_scale", "logits_scaling", "embedding_multiplier"), (None, 1)),
    **dict.fromkeys(("residual_multiplier", "attention_multiplier"), (None, 1)),
}
# The same for a YaRN rope: keys of the first implementations, which transformers ignores.
_HF_YARN_NEUTRAL = dict.fromkeys(("attn_factor", "extrapolation_factor"), (None, 1))
# The same for GGUF keys, without the architecture's prefix.  A key that is not here, not read by
# `from_gguf` and not in `_GGUF_NEVER_MATTERS` is refused unless it is 0 or false: llama.cpp has
# keys that scale, cap or mask something for each of its architectures, and adds more of them.
_GGUF_NEUTRAL: dict[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "embedding_scale": (0, 1),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
}
_GGUF_READ = (
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "expert_count",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.attn_factor",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_ext_factor",
    "rope.scaling.yarn_log_multiplier",
    "vocab_size",
)
_GGUF_NEVER_MATTERS = (
    "attention.layer_norm_epsilon",  # for norms that subtract a mean; these architectures have none
    "pooling_type",  # for embedding models
    "rope.scaling.finetuned",
    "tensor_data_layout",  # the row order of queries and keys, always the expected one
)

# Upper bounds, inclusive, in the order of the config's fields.  Llama 3.1 405B has hidden 16384,
# layers 126, heads 128, inner 53248.
_LIMITS: dict[str, int] = {
    "hidden": 1 << 16,
    "layers": 1 << 10,
    "heads": 1 << 10,
    "kv_heads": 1 << 10,
    "head_size": 1 << 10,
    "inner": 1 << 19,
    "vocabulary": 1 << 21,
    "context_length": 1 << 26,
}


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3's rope scaling: long wavelengths are stretched, short ones kept, a ramp between.

    `factor`: the stretch of the longest wavelengths.  `low_freq_factor`, `high_freq_factor`: the
    ramp's ends, as `original_context` divided by a wavelength.  `original_context`: the context
    length, in tokens, of the first training.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int

    def __post_init__(self) -> None:
        numbers = (self.factor, self.low_freq_factor, self.high_freq_factor, self.original_context)
        if not all(math.isfinite(n) and 0 < n <= 1e9 for n in numbers) or self.factor < 1:
            raise ModelFormatError(f"rope scaling {self}: all must be positive and factor >= 1")
        if self.high_freq_factor <= self.low_freq_factor:
            raise ModelFormatError(f"rope scaling {self}: high_freq_factor must exceed the low one")


@dataclass(frozen=True, slots=True)
class _ConfigFields:
    """The fields of `LlamaConfig`."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    inner: int
    vocabulary: int
    context_length: int
    norm_epsilon: float
    rope_theta: float
    tied_embeddings: bool
    rope_scaling: RopeScaling | None
    rope_factors: tuple[float, ...] | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    qkv_bias: bool
    qk_norm: bool
    windows: tuple[int, ...]
    rope_magnitude: float


class LlamaConfig(_ConfigFields):
    """The sizes and constants of one Llama-family decoder.

    `hidden`: the residual's width.  `heads`, `kv_heads`: numbers of query and key/value heads
    (`heads` is a multiple of `kv_heads`).  `head_size`: width of one head, even.  `inner`: the
    MLP's width.  `vocabulary`: rows of the embedding.  `context_length`: positions that the model
    was trained for.
    `tied_embeddings`: the output head is the embedding, and there is no `head` tensor.
    `rope_scaling`: Llama 3's scaling in config.json; `rope_factors`: any other, one divisor of the
    frequency per rotated pair (head_size / 2); at most one of the two is set.  `rope_magnitude`:
    rotated queries and keys are multiplied by it, so scores by its square (YaRN); 1 for none.
    `eos_token_ids`: the end tokens named by the model file; the tokenizer may have more.
    `qkv_bias`: vectors are added to queries, keys and values (Qwen2).  `qk_norm`: each head of
    queries and keys is RMS-normed before its rope (Qwen3).  `windows`: for each layer, the number
    of positions that a token attends to, its own included, or 0 for all up to it (Mistral); empty
    if every layer attends to all.

    Raises InputError for a value that is no whole number, ModelFormatError for sizes out of bounds
    or in conflict; the message begins with `where`.
    """

    __slots__ = ()

    def __init__(
        self,
        hidden: int,
        layers: int,
        heads: int,
        kv_heads: int,
        head_size: int,
        inner: int,
        vocabulary: int,
        context_length: int,
        norm_epsilon: float = 1e-5,
        rope_theta: float = 10000.0,
        tied_embeddings: bool = False,
        rope_scaling: RopeScaling | None = None,
        rope_factors: tuple[float, ...] | None = None,
        bos_token_id: int | None = None,
        eos_token_ids: tuple[int, ...] = (),
        qkv_bias: bool = False,
        qk_norm: bool = False,
        windows: tuple[int, ...] = (),
        rope_magnitude: float = 1.0,
        where: str = "config",
    ) -> None:
        sizes = (hidden, layers, heads, kv_heads, head_size, inner, vocabulary, context_length)
        checked: dict[str, Any] = {}  # plain ints: products of NumPy's would wrap around
        for given, (name, limit) in zip(sizes, _LIMITS.items(), strict=True):
            value = whole(given, f"{where}: {name}")
            if not 1 <= value <= limit:
                raise ModelFormatError(f"{where}: {name} is {value}, must be 1 to {limit}")
            checked[name] = value
        super().__init__(
            **checked,
            norm_epsilon=norm_epsilon,
            rope_theta=rope_theta,
            tied_embeddings=tied_embeddings,
            rope_scaling=rope_scaling,
            rope_factors=rope_factors,
            bos_token_id=bos_token_id,
            eos_token_ids=eos_token_ids,
            qkv_bias=qkv_bias,
            qk_norm=qk_norm,
            windows=tuple(windows) if any(windows) else (),
            rope_magnitude=rope_magnitude,
        )
        if self.heads % self.kv_heads:
            raise ModelFormatError(
                f"{where}: heads is {self.heads}, must be a multiple of kv_heads ({self.kv_heads})"
            )
        if self.head_size % 2:
            raise ModelFormatError(f"{where}: head_size is {self.head_size}, must be even for rope")
        if self.heads * self.head_size > _LIMITS["hidden"]:
            raise ModelFormatError(
                f"{where}: {self.heads} heads of {self.head_size} are wider than "
                f"{_LIMITS['hidden']}"
            )
        # "not (in range)" and no comparison the other way round: NaN fails it too.
        if not 0 < self.norm_epsilon < 1:
            raise ModelFormatError(f"{where}: norm_epsilon is {self.norm_epsilon}, must be 0 to 1")
        if not 1 <= self.rope_theta <= 1e12:
            raise ModelFormatError(f"{where}: rope_theta is {self.rope_theta}, must be 1 to 1e12")
        if not 0 < self.rope_magnitude <= 1e6:
            raise ModelFormatError(
                f"{where}: the rope's magnitude is {self.rope_magnitude}, must be 0 to 1e6"
            )
        ids = (*self.eos_token_ids, *(() if self.bos_token_id is None else (self.bos_token_id,)))
        for token in ids:
            if not 0 <= token < self.vocabulary:
                raise ModelFormatError(
                    f"{where}: special token {token} is outside the vocabulary of {self.vocabulary}"
                )
        self._check_factors(where)
        if self.windows and len(self.windows) != self.layers:
            raise ModelFormatError(
                f"{where}: windows of {len(self.windows)} layers, must be of all {self.layers}"
            )
        for window in self.windows:
            if not 0 <= whole(window, f"{where}: a sliding window") <= _LIMITS["context_length"]:
                raise ModelFormatError(
                    f"{where}: a sliding window is {window}, must be 0 to "
                    f"{_LIMITS['context_length']}"
                )

    def _check_factors(self, where: str) -> None:
        factors = self.rope_factors
        if factors is None:
            return
        if self.rope_scaling is not None:
            raise ModelFormatError(f"{where}: rope scaling is given both as numbers and as factors")
        if len(factors) != self.head_size // 2:
            raise ModelFormatError(
                f"{where}: {len(factors)} rope factors, must be head_size / 2 = "
                f"{self.head_size // 2}"
            )
        if not all(math.isfinite(f) and 0 < f <= 1e9 for f in factors):
            raise ModelFormatError(f"{where}: rope factors must be positive and finite")

    @property
    def query_size(self) -> int:
        """The width of all query heads together."""
        return self.heads * self.head_size

    @property
    def kv_size(self) -> int:
        """The width of all key (or value) heads together."""
        return self.kv_heads * self.head_size

    def window(self, layer: int) -> int:
        """Returns the number of positions that a token of this layer attends to, its own included;
        0 for all up to it."""
        return self.windows[layer] if self.windows else 0

    @classmethod
    def from_hf(cls, config: Mapping[str, object], *, where: str = "config.json") -> LlamaConfig:
        """Builds a config from the parsed `config.json` of a Hugging Face folder.

        Raises UnsupportedModelError for another architecture or a feature that this decoder lacks,
        ModelFormatError for values that are missing, of the wrong type or out of bounds.
        """
        architecture = config.get("model_type")
        if architecture not in SUPPORTED_ARCHITECTURES:
            raise UnsupportedModelError(
                f"{where}: model_type {quoted(architecture)} is not supported; {_SUPPORTED}"
            )
        assert isinstance(architecture, str)
        for key, neutral in _HF_NEUTRAL.items():
            if key in config and config[key] not in neutral:
                raise UnsupportedModelError(
                    f"{where}: {key} {quoted(config[key])} is not supported; supported: "
                    f"{', '.join(str(one) for one in neutral if one is not None)}"
                )
        reader = _Reader(config, where)
        heads = reader.integer("num_attention_heads")
        hidden = reader.integer("hidden_size")
        layers = reader.integer("num_hidden_layers")
        head_size = reader.integer(
            "head_dim",
            _HF_HEAD_SIZES.get(architecture, hidden // heads if heads > 0 else 0),
        )
        eos = config.get("eos_token_id")
        return cls(
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=reader.integer(
                "num_key_value_heads",
                # null means all heads, for every architecture.
                heads
                if "num_key_value_heads" in reader.values
                else _HF_KV_HEADS.get(architecture, heads),
            ),
            head_size=head_size,
            inner=reader.integer("intermediate_size"),
            vocabulary=reader.integer("vocab_size"),
            norm_epsilon=reader.number("rms_norm_eps", 1e-6),
            tied_embeddings=reader.boolean("tie_word_embeddings"),
            bos_token_id=_optional_token(config.get("bos_token_id"), where),
            eos_token_ids=tuple(
                token
                for entry in (eos if isinstance(eos, list) else [eos])[:64]
                if (token := _optional_token(entry, where)) is not None
            ),
            qkv_bias=architecture in _BIASED,
            qk_norm=architecture in _NORMED,
            windows=_hf_windows(architecture, reader, layers),
            where=where,
            **_hf_rope(reader, _pairs(head_size)),
        )

    @classmethod
    def from_gguf(
        cls,
        metadata: Mapping[str, object],
        *,
        vocabulary: int,
        tied_embeddings: bool,
        rope_factors: tuple[float, ...] | None = None,
        where: str = "GGUF",
    ) -> LlamaConfig:
        """Builds a config from GGUF metadata and the facts that only the file's tensors hold.

        `vocabulary`: rows of `token_embd.weight`.  `tied_embeddings`: there is no `output.weight`.
        `rope_factors`: the values of `rope_freqs.weight`, if there is one.  Raises the errors of
        `from_hf`.
        """
        architecture = metadata.get("general.architecture")
        if architecture not in _GGUF_ARCHITECTURES:
            raise UnsupportedModelError(
                f"{where}: general.architecture {quoted(architecture)} is not supported; "
                f"supported: {', '.join(_GGUF_ARCHITECTURES)} (Llama 2 and 3, SmolLM, Mistral, …)"
            )
        assert isinstance(architecture, str)
        _require_known(metadata, architecture, where)
        reader = _Reader(metadata, where)
        hidden = reader.integer(f"{architecture}.embedding_length")
        layers = reader.integer(f"{architecture}.block_count")
        attention = f"{architecture}.attention"
        heads = reader.of_layers(f"{attention}.head_count", layers)
        size = hidden // heads if heads > 0 else 0
        head_size = reader.integer(f"{attention}.key_length", size)
        for key, expected in (
            (f"{attention}.value_length", head_size),
            (f"{architecture}.rope.dimension_count", head_size),
            (f"{architecture}.vocab_size", vocabulary),
            (f"{architecture}.expert_count", 0),
        ):
            if reader.integer(key, expected) != expected:
                raise UnsupportedModelError(
                    f"{where}: {key} is {quoted(metadata[key])}; only {expected} is supported here"
                )
        pattern = f"{architecture}.attention.sliding_window_pattern"
        if metadata.get(pattern) is not None:
            raise UnsupportedModelError(
                f"{where}: {pattern} is {quoted(metadata[pattern])}, which is not supported; all "
                "layers have the same window here"
            )
        window = reader.integer(f"{architecture}.attention.sliding_window", 0)
        eos = (
            _optional_token(metadata.get(f"tokenizer.ggml.{name}_token_id"), where)
            for name in ("eos", "eot", "eom")
        )
        return cls(
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=reader.of_layers(f"{architecture}.attention.head_count_kv", layers, heads),
            head_size=head_size,
            inner=reader.of_layers(f"{architecture}.feed_forward_length", layers),
            vocabulary=vocabulary,
            norm_epsilon=reader.number(f"{architecture}.attention.layer_norm_rms_epsilon"),
            tied_embeddings=tied_embeddings,
            bos_token_id=_optional_token(metadata.get("tokenizer.ggml.bos_token_id"), where),
            eos_token_ids=tuple(dict.fromkeys(token for token in eos if token is not None)),
            qkv_bias=architecture in _BIASED,
            qk_norm=architecture in _NORMED,
            windows=(window,) * layers if 0 < layers <= _LIMITS["layers"] else (),
            where=where,
            **_gguf_rope(reader, architecture, _pairs(head_size), rope_factors),
        )


def rope_inverse_frequencies(config: LlamaConfig) -> npt.NDArray[np.float32]:
    """Returns the radians per position of each rotated pair: float32, shape (head_size / 2,).

    Pair i is dimensions i and i + head_size / 2 (the half-split order of Hugging Face).  Llama 3's
    scaling is applied as in transformers (`_compute_llama3_parameters`); in GGUF it is among the
    factors, as `rope_freqs.weight`, which llama.cpp's converter computes by the same rule.
    """
    exponents = np.arange(0, config.head_size, 2, dtype=np.float64) / config.head_size
    inverse = 1.0 / config.rope_theta**exponents
    if config.rope_factors is not None:
        inverse = inverse / np.asarray(config.rope_factors, dtype=np.float64)
    scaling = config.rope_scaling
    if scaling is not None:
        # 0: longer than the ramp, stretched in full; 1: shorter than the ramp, kept.
        turns = scaling.original_context * inverse / (2 * math.pi)
        span = scaling.high_freq_factor - scaling.low_freq_factor
        kept = np.clip((turns - scaling.low_freq_factor) / span, 0.0, 1.0)
        inverse = inverse * ((1.0 - kept) / scaling.factor + kept)
    return inverse.astype(np.float32)


def tensor_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every tensor by canonical name, in the order of use; matrices [out, in].

    The names are `embed`, `layers.{i}.` + `attn_norm wq wk wv wo mlp_norm w_gate w_up w_down`,
    `final_norm`, and `head` where the embeddings are not tied; a layer also has `bq bk bv`
    (`qkv_bias`) and `q_norm k_norm` (`qk_norm`).
    """
    hidden, inner = config.hidden, config.inner
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,),
        "wq": (config.query_size, hidden),
        "wk": (config.kv_size, hidden),
        "wv": (config.kv_size, hidden),
        **({"bq": (config.query_size,)} if config.qkv_bias else {}),
        **(dict.fromkeys(("bk", "bv"), (config.kv_size,)) if config.qkv_bias else {}),
        **(dict.fromkeys(("q_norm", "k_norm"), (config.head_size,)) if config.qk_norm else {}),
        "wo": (hidden, config.query_size),
        "mlp_norm": (hidden,),
        "w_gate": (inner, hidden),
        "w_up": (inner, hidden),
        "w_down": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {"embed": (config.vocabulary, hidden)}
    for index in range(config.layers):
        shapes.update({f"layers.{index}.{name}": shape for name, shape in layer.items()})
    shapes["final_norm"] = (hidden,)
    if not config.tied_embeddings:
        shapes["head"] = (config.vocabulary, hidden)
    return shapes


@dataclass(frozen=True, slots=True)
class _Reader:
    """Typed look-ups in a mapping from an untrusted file."""

    values: Mapping[str, object]
    where: str

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelFormatError(f"{self.where}: {key} is {quoted(value)}, must be an integer")
        if abs(value) >= 1 << 63:  # also keeps messages short: JSON may hold thousands of digits
            raise ModelFormatError(f"{self.where}: {key} does not fit in 64 bits")
        return value

    def of_layers(self, key: str, layers: int, default: int | None = None) -> int:
        """Returns an integer that GGUF may store once for each layer; all must be equal."""
        value = self.values.get(key)
        if isinstance(value, list):
            if len(value) != layers:
                raise ModelFormatError(
                    f"{self.where}: {key} has {len(value)} values for {layers} layers"
                )
            if len(set(value)) != 1:
                raise UnsupportedModelError(
                    f"{self.where}: {key} is {quoted(value)}; all layers have the same one here"
                )
            return _Reader({key: value[0]}, self.where).integer(key)
        return self.integer(key, default)

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelFormatError(f"{self.where}: {key} is {quoted(value)}, must be a number")
        try:
            return float(value)
        except OverflowError:
            raise ModelFormatError(f"{self.where}: {key} is too large") from None

    def boolean(self, key: str) -> bool:
        """Returns a boolean, False if the key is missing."""
        value = self._get(key, False)
        if not isinstance(value, bool):
            raise ModelFormatError(f"{self.where}: {key} is {quoted(value)}, must be true or false")
        return value

    def mapping(self, key: str) -> Mapping[str, object]:
        value = self._get(key, {})
        if not isinstance(value, Mapping):
            raise ModelFormatError(f"{self.where}: {key} is {quoted(value)}, must be an object")
        return value

    def _get(self, key: str, default: object) -> object:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise ModelFormatError(f"{self.where}: {key} is missing")
        return value


def _hf_rope(reader: _Reader, pairs: int) -> dict[str, Any]:
    """Returns the config's fields of the rope and `context_length`.  transformers 5 moved
    `rope_scaling` and `rope_theta` into `rope_parameters`; readers differ in which they use in a
    file with both."""
    given = {name: reader.mapping(name) for name in ("rope_parameters", "rope_scaling")}
    found = {}
    for name, rope in given.items():
        theta_from = _Reader(rope, reader.where) if "rope_theta" in rope else reader
        theta = theta_from.number("rope_theta", 10000.0)
        scaled = _hf_rope_scaling(rope, reader, theta, pairs)
        found[name] = {"rope_theta": theta, **scaled}
    if all(given.values()) and found["rope_parameters"] != found["rope_scaling"]:
        raise UnsupportedModelError(
            f"{reader.where}: rope_scaling and rope_parameters are both there and disagree; leave "
            "the one that is meant, with rope_theta in it"
        )
    return found["rope_parameters" if given["rope_parameters"] else "rope_scaling"]


def _hf_rope_scaling(
    rope: Mapping[str, object], outside: _Reader, theta: float, pairs: int
) -> dict[str, Any]:
    """The fields of a rope as transformers computes it (ROPE_INIT_FUNCTIONS)."""
    config, where = outside.values, outside.where
    context = outside.integer("max_position_embeddings", 2048)
    for name, value in rope.items():
        if isinstance(value, Mapping):
            raise UnsupportedModelError(
                f"{where}: a rope of its own for {quoted(name)}; all layers have the same one here"
            )
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor")) not in (None, 1):
        raise UnsupportedModelError(
            f"{where}: partial_rotary_factor is set, which is not supported: heads are rotated "
            "whole here"
        )
    if kind == "default":
        return {"context_length": context}
    if kind not in ("linear", "llama3", "yarn"):
        # Up to there transformers' dynamic rope is the default one.
        advice = "; up to max_position_embeddings a copy with the type 'default' is the same model"
        raise UnsupportedModelError(
            f"{where}: rope scaling {quoted(kind)} is not supported; supported: default, linear, "
            f"llama3, yarn{advice if kind == 'dynamic' else ''}"
        )
    reader = _Reader(rope, where)
    if kind == "linear":
        return scaled_rope(where, pairs, reader.number("factor"), context, context)
    key = "original_max_position_embeddings"
    default = config.get(key, context) if kind == "yarn" else None
    original = _Reader({key: rope.get(key, default)}, where).integer(key)
    if config.get(key, original) != original:  # transformers prefers the one outside the rope
        raise UnsupportedModelError(
            f"{where}: {key} is {quoted(config[key])}, and {original} in the rope's parameters; "
            "they must be the same"
        )
    if kind == "yarn":
        for name, neutral in _HF_YARN_NEUTRAL.items():
            if rope.get(name) not in neutral:
                raise UnsupportedModelError(
                    f"{where}: {name} of a yarn rope is not supported: transformers ignores it, "
                    "others do not; leave it out if transformers is right"
                )
        # null is allowed, a missing factor is not.
        factor = reader.number("factor", context / (original or 1) if "factor" in rope else None)
        shares = [reader.number(name, 0.0) for name in ("mscale", "mscale_all_dim")]
        if not all(shares):
            shares = [1.0, 0.0]
        magnitude = yarn_magnitude(where, factor, *shares)
        kept = yarn_kept(
            where,
            theta,
            pairs,
            original,
            [reader.number("beta_fast", 0.0) or 32.0, reader.number("beta_slow", 0.0) or 1.0],
            truncate="truncate" not in rope or reader.boolean("truncate"),
        )
        magnitude = reader.number("attention_factor", magnitude)
        return scaled_rope(where, pairs, factor, context, original, magnitude, kept)
    factor, low, high = (
        reader.number(name, math.nan) for name in ("factor", "low_freq_factor", "high_freq_factor")
    )
    try:
        scaling = RopeScaling(factor, low, high, original)
    except ModelFormatError as error:
        raise ModelFormatError(f"{where}: {error}") from None
    return {"context_length": context, "rope_scaling": scaling}


def _hf_windows(architecture: str, reader: _Reader, layers: int) -> tuple[int, ...]:
    """Returns the windows by transformers' rules: every layer of Mistral has one, of Qwen the
    layers that config.json lists or those from `max_window_layers` on, of Llama none."""
    values, where = reader.values, reader.where
    if architecture == "llama" or not 0 < layers <= _LIMITS["layers"]:
        return ()
    # A missing key means transformers' default; null means no window.
    sliding = "sliding_window" not in values or values["sliding_window"] is not None
    listed = values.get("layer_types")
    if architecture == "mistral":
        kinds: object = ["sliding_attention"] * layers
        if (listed or kinds) != kinds:
            raise UnsupportedModelError(f"{where}: layer_types of a Mistral are not supported")
    else:
        sliding &= reader.boolean("use_sliding_window")
        kinds = listed
        if kinds is None:
            first = reader.integer("max_window_layers", 28)
            kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
        known = ("sliding_attention", "full_attention")
        if (
            not isinstance(kinds, list)
            or len(kinds) != layers
            or not all(kind in known for kind in kinds)
        ):
            raise UnsupportedModelError(
                f"{where}: layer_types is {quoted(kinds)}, must name one of {', '.join(known)} for "
                f"each of the {layers} layers"
            )
        if not sliding and "sliding_attention" in kinds and listed is not None:
            raise UnsupportedModelError(
                f"{where}: layer_types name sliding layers, and use_sliding_window is not set"
            )
    if not sliding:
        return ()
    window = reader.integer("sliding_window", 4096)
    if window < 1:
        raise ModelFormatError(f"{where}: sliding_window is {window}, must be 1 or more")
    assert isinstance(kinds, list)
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _gguf_rope(
    reader: _Reader, architecture: str, pairs: int, given: tuple[float, ...] | None
) -> dict[str, Any]:
    """Returns the config's fields of the rope and `context_length`, by llama.cpp's rules: the type
    defaults to linear; a missing factor or 0 is 1; the type "none" ignores the factor.

    llama.cpp divides the magnitude of YaRN by 1 + 0.1 ln(factor), by which its rope multiplies it
    again; so neither is here.  `given`: the divisors in `rope_freqs.weight`.
    """
    scaling, where = f"{architecture}.rope.scaling", reader.where
    kind = reader.values.get(f"{scaling}.type", "linear")
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModelError(
            f"{where}: rope scaling {quoted(kind)} is not supported; supported: none, linear, "
            "yarn, and Llama 3's (tensor rope_freqs.weight)"
        )
    older = reader.number(f"{architecture}.rope.scale_linear", 0.0)
    factor = 1.0 if kind == "none" else reader.number(f"{scaling}.factor", older) or 1.0
    context = reader.integer(f"{architecture}.context_length", 2048)
    magnitude = reader.number(f"{scaling}.attn_factor", 1.0)
    theta = reader.number(f"{architecture}.rope.freq_base", 10000.0)
    original: int = context
    kept: npt.NDArray[np.float64] | float = 0.0
    if kind == "yarn":
        original = reader.integer(f"{scaling}.original_context_length", 0) or context
        share = reader.number(f"{scaling}.yarn_log_multiplier", 0.0)
        magnitude *= yarn_magnitude(where, factor, 1.0, share)
        betas = [
            reader.number(f"{scaling}.yarn_beta_{name}", default)
            for name, default in (("fast", 32.0), ("slow", 1.0))
        ]
        kept = yarn_kept(where, theta, pairs, original, betas)
    # llama.cpp does not read these two for these architectures.
    extrapolated = reader.number(f"{scaling}.yarn_ext_factor", -1.0)
    corrected = reader.number(f"{scaling}.yarn_attn_factor", 1.0)
    said = corrected == 1 or math.isclose(corrected, magnitude, rel_tol=1e-4)
    for name, value, fits in (
        ("yarn_ext_factor", extrapolated, extrapolated < 0 or extrapolated == (kind == "yarn")),
        ("yarn_attn_factor", corrected, said),
    ):
        if not fits:
            raise UnsupportedModelError(
                f"{where}: '{scaling}.{name}' is {value:g}, which is not supported: readers differ "
                "in what it means"
            )
    fields = scaled_rope(where, pairs, factor, context, original, magnitude, kept, given)
    return {"rope_theta": theta, **fields}


def _pairs(head_size: int) -> int:
    """The number of rotated pairs; a possible one for a size that the config refuses later."""
    return min(max(head_size, 2), _LIMITS["head_size"]) // 2


def _require_known(metadata: Mapping[str, object], architecture: str, where: str) -> None:
    """Raises UnsupportedModelError for a key of the architecture that may change what the model
    computes and that `from_gguf` does not read."""
    for key, value in metadata.items():
        name = key.removeprefix(f"{architecture}.")
        if name == key or name in _GGUF_READ or name in _GGUF_NEVER_MATTERS:
            continue
        if value not in _GGUF_NEUTRAL.get(name, (0,)):
            raise UnsupportedModelError(
                f"{where}: {quoted(key)} is {quoted(value)}, which is not supported; if it does "
                "not change what the model computes, make a copy of the file without it "
                "(gguf-new-metadata --remove-metadata)"
            )


def _optional_token(value: object, where: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise ModelFormatError(f"{where}: token id {quoted(value)} must be an integer")
    if abs(value) >= 1 << 63:
        raise ModelFormatError(f"{where}: a token id does not fit in 64 bits")
    return value
