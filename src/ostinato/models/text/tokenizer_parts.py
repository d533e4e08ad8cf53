"""The common form of all kinds of tokenizers, from which a `Tokenizer` is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ostinato.errors import ModelFormatError
from ostinato.models.arguments import shown

T = TypeVar("T")

MAX_IDS = 1 << 21
"""The most tokens of a vocabulary, equal to the limit in `config`."""
END_TOKENS = frozenset(
    {
        "<|im_end|>",
        "<|endoftext|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<|end|>",
        "<end_of_turn>",
        "</s>",
    }
)
"""Texts of tokens that end an answer, besides the ids that a model's file names."""


ADDED_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
"""Names of the flags of an added token, in the order of lists of flags."""
SPECIAL_FLAGS = (False, False, False, False, True)
"""The flags of a special token for which a file has only its text."""


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """An encoder, and the data for decoding and generation.

    `where`: the tokenizer's name in error messages.  `encode`: function of a text, and of True to
    add begin and end of sequence, that returns ids.  `texts`: each token's spelling in the
    vocabulary, by id; None for an unused id.  `byte_level`: tokens are spelled in GPT-2's byte
    alphabet; otherwise in SentencePiece's, with U+2581 for a space and `<0xE2>` for a byte.
    `strip_space`: encoding adds a space before all text, which decoding drops.  `literal_ids`:
    tokens whose spelling is their text.  `special_ids`: control tokens, left out of text.
    `named`: text of special tokens by their names in chat templates (`bos_token`).
    """

    where: str
    encode: Callable[[str, bool], list[int]]
    texts: Sequence[str | None]
    byte_level: bool
    strip_space: bool
    literal_ids: frozenset[int]
    special_ids: frozenset[int]
    bos_id: int | None
    eos_ids: tuple[int, ...]
    named: Mapping[str, str]


def guarded(make: Callable[[], T], what: str) -> T:
    """Calls into `tokenizers`, and raises ModelFormatError for its errors, which are bare
    Exceptions and, from Rust, PanicExceptions.  The message begins with `what`."""
    try:
        return make()
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a pyo3 PanicException is no Exception
        raise ModelFormatError(f"{what}: {shown(str(error), 300)}") from None
