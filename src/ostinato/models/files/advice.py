"""How a model's makers advise to choose tokens: what its files say of it.

GGUF metadata have it under `general.sampling.`, a Hugging Face folder in generation_config.json.
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
_FOLDER = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class SamplingAdvice:
    """What the files of a model name of `SamplingOptions`, unchecked, and in which file."""

    named: dict[str, Any] = field(default_factory=dict)
    where: Path = Path()

    def options(self) -> SamplingOptions:
        """The options to choose tokens by.

        Where nothing is named, `READABLE`.  Where the files say how to draw, what they leave open
        is off, and the temperature 1.  Where they name only a repetition penalty, it takes the
        place of that in `READABLE`.  Raises ModelFormatError for values that make no sense.
        """
        draws = self.named.keys() - {"repetition_penalty"}
        base = SamplingOptions(temperature=1.0) if draws else READABLE
        try:
            return base.with_named(**self.named)
        except InputError as error:
            raise ModelFormatError(f"{self.where}: the sampling options: {error}") from None


def read_advice(source: TokenizerSource) -> SamplingAdvice:
    """The advice that a model brings beside its tokenizer.  Raises ModelFormatError, OSError."""
    if isinstance(source, GgufTokenizerSource):
        metadata = source.metadata
        named = {name: metadata[key] for name, key in _GGUF.items() if key in metadata}
        # In llama.cpp less than 0 is greedy, or all tokens.
        for name in ("temperature", "top_k"):
            value = named.get(name)
            if isinstance(value, int | float) and value < 0:
                named[name] = 0
        return SamplingAdvice(named, source.path)
    file = source.path / "generation_config.json"
    if not file.exists():
        return SamplingAdvice(where=file)
    given = read_json(file)
    named = {name: given[name] for name in _FOLDER if given.get(name) is not None}
    if given.get("do_sample") is False:  # then transformers heeds the penalty alone
        named = {name: named[name] for name in named.keys() & {"repetition_penalty"}}
        named["temperature"] = 0.0
    return SamplingAdvice(named, file)
