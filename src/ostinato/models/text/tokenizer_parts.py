"""What every kind of tokenizer is made into before it is a `Tokenizer`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ostinato.errors import ModelFormatError
from ostinato.models.arguments import shown

T = TypeVar("T")

MAX_IDS = 1 << 21
"""Tokens of a vocabulary, at most; as `config` has it."""
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
"""What models call the end of an answer, besides the one id that their file names."""


ADDED_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
"""Of an added token, in the order in which they are passed on."""
SPECIAL_FLAGS = (False, False, False, False, True)
"""Those of a special token that is named by its text alone."""


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """What a source gives: the encoder, and what decoding and generation need to know.

    `where`: what error messages call it.  `encode`: ids of a text, with begin and end of sequence
    or without.  `texts`: each token as the vocabulary spells it, by id; None where there is none.
    `byte_level`: tokens are spelled in GPT-2's byte alphabet; otherwise in SentencePiece's, with
    U+2581 for a space and `<0xE2>` for a byte.  `strip_space`: one space before all text is the
    tokenizer's own and goes.  `literal_ids`: tokens to be taken as they are written.
    `special_ids`: control tokens, left out of text.  `named`: what chat templates can name of them,
    by the name (`bos_token`): text.
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
    """Call into `tokenizers`, whose errors are bare Exceptions and, from Rust, PanicExceptions."""
    try:
        return make()
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a pyo3 PanicException is no Exception
        raise ModelFormatError(f"{what}: {shown(str(error), 300)}") from None
