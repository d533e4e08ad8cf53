"""SentencePiece BPE by scores, with the results of llama.cpp.

The rule is that of `llm_tokenizer_spm_session` in its src/llama-vocab.cpp: text begins as single
characters; of all adjacent pairs that form a token the one with the best score is joined, of equal
ones the first in the text, until there is none; characters that are no token become bytes.
Scores of pairs, unlike ranks of merges, can be equal, so the `tokenizers` package cannot do this.
"""

from __future__ import annotations

import heapq
import itertools
import re
from collections.abc import Mapping, Sequence

from ostinato.errors import ModelFormatError

_SPACE = "\u2581"
# The most words in the cache of ids, and the most characters of each; some MB.
_MAX_WORDS, _LONG_WORD = 1 << 15, 64


class SentencePieceEncoder:
    """An encoder of text to ids.  Thread-safe.

    `vocabulary`: id by text.  `scores`: score by id.  `special`: ids that are matched wherever
    their text occurs.  `unknown`: the id for bytes without a token, or None.  `prefix_space`: a
    space is put before all text, and before text that follows a special token.  `where`: the
    tokenizer's name in error messages.
    """

    def __init__(
        self,
        vocabulary: Mapping[str, int],
        scores: Sequence[float],
        special: Sequence[int],
        *,
        unknown: int | None,
        prefix_space: bool,
        where: str,
    ) -> None:
        self._vocabulary, self._scores, self._where = vocabulary, scores, where
        self._prefix = _SPACE if prefix_space else ""
        named = {token: text for text, token in vocabulary.items()}
        self._special = {named[token]: token for token in special}
        lengths: dict[str, set[int]] = {}
        for text in self._special:
            lengths.setdefault(text[0], set()).add(len(text))
        self._lengths = lengths
        self._first = re.compile("|".join(map(re.escape, lengths)) or "(?!)")
        self._bytes = [
            vocabulary.get(f"<0x{byte:02X}>", vocabulary.get(chr(byte)) if byte < 128 else None)
            for byte in range(256)
        ]
        self._unknown = unknown
        # Pairs of adjacent characters in tokens; between any other pair the text can be cut.
        self._joined = {pair for text in vocabulary for pair in itertools.pairwise(text)}
        self._words: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text`, without begin and end of sequence.

        Raises ModelFormatError if the vocabulary has no token for it.
        """
        found: list[int] = []
        prefix = self._prefix
        for part in self._parts(text):
            if isinstance(part, int):
                found.append(part)
                prefix = self._prefix
                continue
            for word in self._cut(prefix + part.replace(" ", _SPACE)):
                ids = self._words.get(word)
                if ids is None:
                    ids = self._merged(word)
                    if len(self._words) >= _MAX_WORDS:
                        self._words.clear()
                    if len(word) <= _LONG_WORD:
                        self._words[word] = ids
                found += ids
            prefix = ""
        return found

    def _parts(self, text: str) -> list[str | int]:
        """Returns the ids of special tokens and the texts between them, in order; of overlapping
        tokens the longest wins.  The time does not grow with the number of special tokens."""
        special, lengths = self._special, self._lengths
        found: list[tuple[int, int, int, int]] = []
        for match in self._first.finditer(text):
            start = match.start()
            for length in lengths[match[0]]:
                token = special.get(text[start : start + length])
                if token is not None:
                    end = start + length
                    found.append((-len(text[start:end].encode()), token, start, end))
        found.sort()
        taken = bytearray(len(text))
        chosen: list[tuple[int, int, int]] = []
        for _, token, start, end in found:
            # Earlier matches are not shorter, so one that overlaps covers one of the ends.
            if not (taken[start] or taken[end - 1]):
                taken[start:end] = b"\1" * (end - start)
                chosen.append((start, end, token))
        parts: list[str | int] = []
        begin = 0
        for start, end, token in sorted(chosen):
            parts += [text[begin:start], token] if start > begin else [token]
            begin = end
        return [*parts, text[begin:]] if begin < len(text) else parts

    def _cut(self, text: str) -> list[str]:
        """Cuts text into words such that no token spans two."""
        joined, words, begin = self._joined, [], 0
        for end, pair in enumerate(itertools.pairwise(text), 1):
            if pair not in joined:
                words.append(text[begin:end])
                begin = end
        words.append(text[begin:])
        return words

    def _merged(self, word: str) -> list[int]:
        vocabulary, scores = self._vocabulary, self._scores
        pieces = list(word)
        last = len(pieces)
        before, after = list(range(-1, last - 1)), list(range(1, last + 1))
        # The best score first, then the leftmost; `size` detects entries of pairs that have grown.
        queue: list[tuple[float, int, int, int]] = []

        def add(left: int, right: int) -> None:
            if left >= 0 and right < last:
                together = pieces[left] + pieces[right]
                token = vocabulary.get(together)
                if token is not None:
                    heapq.heappush(queue, (-scores[token], left, right, len(together)))

        for left in range(last - 1):
            add(left, left + 1)
        while queue:
            _, left, right, size = heapq.heappop(queue)
            if not (pieces[left] and pieces[right]):
                continue
            if len(pieces[left]) + len(pieces[right]) != size:
                continue
            pieces[left] += pieces[right]
            pieces[right] = ""
            after[left] = after[right]
            if after[left] < last:
                before[after[left]] = left
            add(before[left], left)
            add(left, after[left])
        found: list[int] = []
        for piece in pieces:
            if piece:
                token = vocabulary.get(piece)
                found += self._spelled(piece) if token is None else [token]
        return found

    def _spelled(self, piece: str) -> list[int]:
        """Returns the tokens of a piece's bytes, or the unknown token if a byte has none."""
        found = [self._bytes[byte] for byte in piece.encode()]
        if None not in found:
            return [token for token in found if token is not None]
        if self._unknown is None:
            raise ModelFormatError(f"{self._where}: no token for {piece!r}, nor for its bytes")
        return [self._unknown]
