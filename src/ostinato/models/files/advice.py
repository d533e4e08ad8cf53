"""Sampling options that a model's files recommend.

GGUF metadata hold them under `general.sampling.`, Hugging Face folders in generation_config.json.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ostinato.errors import InputError, ModelFormatError
from ostinato.models.files.checkpoint import GgufTokenizerSource, TokenizerSource
from ostinato.models.files.reading import read_json
from ostinato.models.sampling import READABLE, SamplingOptions

_GGUF = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}


@dataclass(frozen=True, slots=True)
class SamplingAdvice:
    """The `SamplingOptions` that a model's file names, by name and unchecked, and the file."""

    named: dict[str, Any] = field(default_factory=dict)
    where: Path = Path()

    def options(self) -> SamplingOptions:
        """Returns complete options.

        If nothing is named, they are `READABLE`; if only a repetition penalty is named, `READABLE`
        with this penalty.  If any other option is named, those not named are off and the
        temperature is 1.  Raises ModelFormatError for invalid values.
        """
        draws = self.named.keys() - {"repetition_penalty"}
        base = SamplingOptions(temperature=1.0) if draws else READABLE
        try:
            return base.with_named(**self.named)
        except InputError as error:
            raise ModelFormatError(f"{self.where}: the sampling options: {error}") from None


def read_advice(source: TokenizerSource) -> SamplingAdvice:
    """Reads the advice in the files of a model's tokenizer.  Raises ModelFormatError, OSError."""
    if isinstance(source, GgufTokenizerSource):
        metadata = source.metadata
        named = {name: metadata[key] for name, key in _GGUF.items() if key in metadata}
        # In llama.cpp a negative temperature means greedy, a negative top_k all tokens.
        for name in ("temperature", "top_k"):
            value = named.get(name)
            if isinstance(value, int | float) and value < 0:
                named[name] = 0
        return SamplingAdvice(named, source.path)
    file = source.path / "generation_config.json"
    if not file.exists():
        return SamplingAdvice(where=file)
    given = read_json(file)
    named = {name: given[name] for name in _GGUF if given.get(name) is not None}
    if given.get("do_sample") is False:  # then transformers uses only the penalty
        named = {name: named[name] for name in named.keys() & {"repetition_penalty"}}
        named["temperature"] = 0.0
    return SamplingAdvice(named, file)
