"""Answers that must match a JSON schema, a regular expression or a grammar: which tokens may come
next, by llguidance.

A `GrammarCompiler` belongs to a server's tokenizer, a `Grammar` to one answer.  llguidance is
imported when the first request needs it.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ostinato.errors import InputError, NotAvailableError
from ostinato.models import Tokenizer

GrammarKind = Literal["json_schema", "regex", "choice", "grammar", "lark"]

_LONGEST = 128 << 10
"""Characters of a schema or a grammar, some more than OpenAI's API takes."""
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
"""The space between two tokens of JSON: without a limit, small models write spaces for ever."""

_MARK = "\x02"
"""A character that no token has in it but its own."""


class Grammar:
    """The grammar of one answer, and the place in it.  Not thread-safe."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    @property
    def error(self) -> str:
        """The reason why the answer cannot go on, such as a limit of the parser; or empty."""
        return str(self._matcher.get_error())

    def take(self, token: int) -> bool:
        """Goes on by a token; returns True if the answer is complete and nothing may follow.  Look
        at `error` afterwards."""
        self._matcher.consume_token(token)
        return bool(self._matcher.is_stopped())


def fill_masks(grammars: Mapping[int, Grammar], words: npt.NDArray[np.uint32]) -> None:
    """Sets the bits of the tokens that may come next, on several threads if there are several
    grammars.  `grammars`: by their rows in `words`, which is contiguous and of the shape that
    `TokenMasks.fill` gets.  The row of a grammar with an error allows all tokens."""
    rows = [(one._matcher, row) for row, one in grammars.items()]
    if len(rows) == 1:
        ((matcher, row),) = rows
        matcher.unsafe_compute_mask_ptr(words[row].ctypes.data, words[row].nbytes)
    elif rows:
        _executor().unsafe_compute_mask_ptr(rows, words.ctypes.data, words[0].nbytes, len(words))
    for row, one in grammars.items():
        if one.error:
            words[row] = 0xFFFFFFFF


@functools.cache
def _executor() -> Any:
    from llguidance import LLExecutor

    return LLExecutor()


def json_rule(schema: Mapping[str, object]) -> str:
    """Returns what matches a JSON schema, for a rule in Lark's notation."""
    return f"%json {json.dumps({**schema, 'x-guidance': {'whitespace_pattern': _WHITESPACE}})}"


class GrammarCompiler:
    """Makes grammars for the tokens of one model.  Thread-safe.

    `vocabulary`: number of tokens that the model chooses from.  `ends`: the tokens that end an
    answer; a grammar allows them where it is complete.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, ends: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._ends = [*ends]
        self._lock = threading.Lock()
        self._made: Any = None

    def compile(self, kind: GrammarKind, text: str) -> Grammar:
        """Returns a grammar at its beginning.

        `text`: a JSON schema; a regular expression of the whole answer; a JSON list of texts, one
        of which is the answer; a grammar in Lark's notation; or one in that or llama.cpp's (GBNF).
        Raises InputError for a text that is no such thing, is not supported, or is too large;
        NotAvailableError if llguidance is not installed, or does not take the model's tokenizer.
        """
        if len(text) > _LONGEST:
            raise InputError(f"has {len(text)} characters, more than {_LONGEST}")
        tokens = self._tokens()
        from llguidance import LLMatcher, LLParserLimits, grammar_from

        try:
            if kind == "json_schema":
                made = LLMatcher.grammar_from_json_schema(
                    text, defaults={"whitespace_pattern": _WHITESPACE}
                )
            else:
                made = grammar_from(kind, text)
        except ValueError as error:
            raise InputError(f"cannot be used: {str(error)[:500]}") from None
        limits = LLParserLimits(verbose_errors=False)
        found = Grammar(LLMatcher(tokens, made, log_level=0, limits=limits))
        if not found.error:  # some are too complex from the beginning
            fill_masks({0: found}, np.empty((1, -(-self._vocabulary // 32)), np.uint32))
        if found.error:
            raise InputError(f"cannot be used: {found.error[:500]}")
        return found

    def _tokens(self) -> Any:
        """Returns llguidance's form of the tokenizer, made once: half a second."""
        with self._lock:
            if self._made is None:
                try:
                    from llguidance import LLTokenizer, TokenizerWrapper
                except ImportError:
                    raise NotAvailableError(
                        "grammars need llguidance, which this server does not have: "
                        "pip install 'ostinato[serve]'"
                    ) from None
                if not self._ends:
                    raise NotAvailableError(
                        f"a grammar needs the model's end token, and {self._tokenizer.where} has "
                        "no end token"
                    )
                try:
                    given = TokenizerWrapper(_Tokens(self._tokenizer, self._vocabulary, self._ends))
                    self._made = LLTokenizer(given, eos_token=self._ends)
                except Exception as error:  # whatever the library raises for an odd vocabulary
                    raise NotAvailableError(
                        f"llguidance does not take the tokenizer of this model: {error}"
                    ) from error
            return self._made


class _Tokens:
    """A tokenizer in the form that llguidance reads."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, ends: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id, *_ = ends
        self.bos_token_id = tokenizer.bos_id
        self.special_token_ids = sorted({*tokenizer.special_ids, *ends})
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocabulary)]
        self._mark = self.tokens.index(_MARK.encode()) if tokenizer.strip_space else -1

    def __call__(self, text: bytes | str) -> list[int]:
        """Returns the tokens of a text that continues another."""
        plain = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        if not self._tokenizer.strip_space:
            return self._tokenizer.encode(plain, add_special=False)
        # Such a tokenizer adds a space before all text: here that is before the mark.
        found = self._tokenizer.encode(_MARK + plain, add_special=False)
        return found[found.index(self._mark) + 1 :]
