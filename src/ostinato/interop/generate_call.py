"""Translates a call of transformers' `generate` for the decoder, or gives the reason why it cannot.

Pure: imports neither torch nor transformers.  Their objects are recognised by the full name of
their exact class, so objects of derived classes are refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ostinato.errors import InputError
from ostinato.models import SamplingOptions

CACHE_NAMES = ("cache", "past_key_values", "cache_params")
"""Names of models' cache argument: the first since transformers 5.24, the others before, the last
one of models without attention (Mamba)."""

_PROCESSORS = "transformers.generation.logits_process"
_CRITERIA = "transformers.generation.stopping_criteria"
_CACHES = ("transformers.cache_utils.DynamicCache", "transformers.cache_utils.StaticCache")
# The steps of the decoder's sampler, in order, each with its option and the attribute that has the
# value.  The first one also applies to greedy decoding.
_STEPS = {
    "RepetitionPenaltyLogitsProcessor": ("repetition_penalty", "penalty"),
    "TemperatureLogitsWarper": ("temperature", "temperature"),
    "TopKLogitsWarper": ("top_k", "top_k"),
    "TopPLogitsWarper": ("top_p", "top_p"),
    "MinPLogitsWarper": ("min_p", "min_p"),
}
_MODES = ("greedy_search", "sample")
# Arguments of `generate` that change what it does, besides those in its configuration.
_ARGUMENTS = (
    "custom_generate",
    "assistant_model",
    "assistant_tokenizer",
    "tokenizer",
    "synced_gpus",
    "inputs_embeds",
    *CACHE_NAMES,
    "position_ids",
)
# Arguments of a model's calls that `generate` itself prepares; they carry no request of the user.
_PREPARED = {"attention_mask", "position_ids", *CACHE_NAMES, "logits_to_keep", "use_cache"}


class NotCovered(Exception):
    """An error: the decoder does not support this call; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The request of a call.

    `sampling`: without a seed.  `max_length`: tokens of prompt and answer together, padding
    counted.  `stop_tokens`: tokens that end a sequence; None if only the length ends it, without
    padding.
    """

    sampling: SamplingOptions
    max_length: int
    stop_tokens: tuple[int, ...] | None


def check_arguments(arguments: Mapping[str, Any], *, processes: int = 1) -> None:
    """Checks the arguments of `generate`.  `processes`: the size of torch's process group.

    Raises NotCovered.
    """
    for name in _ARGUMENTS:
        value = arguments.get(name)
        if value is not None and value is not False:
            raise NotCovered(f"the argument {name}")
    if arguments.get("cache_implementation") == "paged":
        raise NotCovered("continuous batching (cache_implementation='paged')")
    if processes > 1:
        raise NotCovered("a group of processes")


def check_mode(config: Any) -> None:
    """Checks `config`, the call's complete GenerationConfig.  Raises NotCovered."""
    mode = str(getattr(config.get_generation_mode(), "value", "unknown"))
    if mode not in _MODES:
        raise NotCovered(f"the mode {mode}")
    if config.return_dict_in_generate:
        raise NotCovered("return_dict_in_generate")
    if config.is_assistant:
        raise NotCovered("a model that assists another")


def check_inputs(inputs: Mapping[str, Any]) -> None:
    """Checks `inputs`, which `generate` prepared for the calls of the model.  Raises NotCovered."""
    for name, value in inputs.items():
        if name not in _PREPARED and value is not None:
            raise NotCovered(f"the argument {name}")
    for name in CACHE_NAMES:
        cache = inputs.get(name)
        if cache is not None and _name(cache) not in _CACHES:
            raise NotCovered(f"a {type(cache).__name__}")


def wanted(processors: Iterable[Any], criteria: Iterable[Any], *, draws: bool) -> Wanted:
    """Reads the request from the processors and criteria that `generate` has prepared.

    `draws`: `do_sample`.  Raises NotCovered.
    """
    lengths: list[int] = []
    stops: list[int] | None = None
    for one in criteria:
        if _name(one) == f"{_CRITERIA}.MaxLengthCriteria":
            lengths.append(int(one.max_length))
        elif _name(one) == f"{_CRITERIA}.EosTokenCriteria":
            stops = [*(stops or ()), *(int(token) for token in one.eos_token_id.tolist())]
        else:
            raise NotCovered(f"the stopping criterion {type(one).__name__}")
    if not lengths:
        raise NotCovered("no MaxLengthCriteria")
    return Wanted(
        _sampling(processors, draws), min(lengths), None if stops is None else tuple(stops)
    )


def _sampling(processors: Iterable[Any], draws: bool) -> SamplingOptions:
    options: dict[str, Any] = {"temperature": 1.0 if draws else 0.0}
    last, order = -1, [*_STEPS]
    for one in processors:
        kind = type(one).__name__
        known = _name(one) == f"{_PROCESSORS}.{kind}" and kind in order
        if not known or (order.index(kind) > 0 and not draws):
            raise NotCovered(f"the logits processor {kind}")
        if order.index(kind) <= last:
            raise NotCovered("the order of the logits processors")
        last = order.index(kind)
        if getattr(one, "filter_value", -math.inf) != -math.inf:
            raise NotCovered(f"a filter_value of {kind}")
        # A top_k is at least its min_tokens_to_keep.
        if kind != "TopKLogitsWarper" and getattr(one, "min_tokens_to_keep", 1) != 1:
            raise NotCovered(f"min_tokens_to_keep of {kind}")
        ignored: Any = getattr(one, "prompt_ignore_length", None)
        if any(ignored.tolist()) if hasattr(ignored, "tolist") else ignored:  # one a row, or one
            raise NotCovered(f"prompt_ignore_length of {kind}")
        name, attribute = _STEPS[kind]
        options[name] = getattr(one, attribute)
    try:
        return SamplingOptions(**options)
    except InputError as error:
        raise NotCovered(str(error)) from None


def prompts(
    ids: Sequence[Sequence[int]],
    mask: Sequence[Sequence[float]] | None,
    *,
    history: bool,
    windowed: bool = False,
) -> list[list[int]]:
    """Returns the tokens of each row that its mask keeps: those that are not padding.

    transformers counts positions over the tokens that are kept, and no token attends to the others,
    so it computes with these alone.  The last token must be kept, since the first new token is
    computed from it.  `history`: the choice of a token depends on earlier ones, of which
    transformers includes the masked ones.  `windowed`: a token may be too far behind another to be
    attended to, and transformers counts the masked ones between them.  Raises NotCovered.
    """
    if not ids or not ids[0]:
        raise NotCovered("an empty prompt")
    if mask is None:
        return [list(row) for row in ids]
    if len(mask) != len(ids) or any(len(m) != len(row) for m, row in zip(mask, ids, strict=True)):
        raise NotCovered("an attention_mask of another shape than the prompt")
    found = []
    for row, kept in zip(ids, mask, strict=True):
        if any(value not in (0, 1) for value in kept):
            raise NotCovered("an attention_mask with other values than 0 and 1")
        if not kept[-1]:
            raise NotCovered("an attention_mask that leaves out a prompt's last token")
        if history and not all(kept):
            raise NotCovered("a repetition penalty with padding, which transformers penalises too")
        if windowed and not all(kept[list(kept).index(1) :]):
            raise NotCovered("padding between tokens of a model with sliding windows")
        found.append([token for token, value in zip(row, kept, strict=True) if value])
    return found


def _name(thing: object) -> str:
    kind = type(thing)
    return f"{kind.__module__}.{kind.__qualname__}"
