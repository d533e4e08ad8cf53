"""Writes log probabilities in OpenAI's forms: that of chats, and that of completions.

They are those of the model's own distribution (`TokenLogprobs`).  Probability 0, whose logarithm is
no JSON number, is -9999, as in OpenAI's API.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ostinato.models import Tokenizer, TokenLogprobs

_LEAST = -9999.0


def chat_logprobs(tokenizer: Tokenizer, found: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """Returns the `logprobs` of a chat's choice, or of the delta of a chunk."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        spelt = tokenizer.token_bytes(token)
        text = spelt.decode("utf-8", "replace")
        return {"token": text, "logprob": max(logprob, _LEAST), "bytes": [*spelt]}

    content = [
        {**one(each.token, each.logprob), "top_logprobs": [one(*pair) for pair in each.top]}
        for each in found
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """The `logprobs` of a completion's choice, token by token.  `continues`: the choice's text
    continues another, rather than beginning with the prompt."""

    def __init__(self, tokenizer: Tokenizer, *, continues: bool) -> None:
        self._tokenizer = tokenizer
        self._out = tokenizer.stream_decoder(continues=continues)
        self._offset = 0  # characters of the choice's text before the next token

    def begin(self, token: int) -> dict[str, Any]:
        """Returns the object of a prompt's first token, which has no probability."""
        return self._object([token], [None], [None])

    def more(self, found: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Returns the object of the next tokens.  Each token's likeliest ones include it."""
        tops = []
        for one in found:
            top: dict[str, float] = {}
            for token, logprob in (*one.top, (one.token, one.logprob)):
                top.setdefault(self._spelt(token), max(logprob, _LEAST))
            tops.append(top)
        logprobs = [max(one.logprob, _LEAST) for one in found]
        return self._object([one.token for one in found], logprobs, tops)

    def _object(self, tokens: list[int], logprobs: list[Any], tops: list[Any]) -> dict[str, Any]:
        offsets = []
        for token in tokens:
            said, spelt = self._out.push(token), self._spelt(token)
            # Bytes before it that are no character become text only now.
            late = len(said) - len(spelt) if said.endswith(spelt) else 0
            offsets.append(self._offset + late)
            self._offset += len(said)
        return {
            "tokens": [self._spelt(token) for token in tokens],
            "token_logprobs": logprobs,
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _spelt(self, token: int) -> str:
        """Returns a token's text, or "bytes:" and its bytes if it is a part of a character."""
        spelt = self._tokenizer.token_bytes(token)
        try:
            return spelt.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelt)


def joined(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Returns the object of the tokens of two objects of a completion."""
    return {name: [*one[name], *other[name]] for name in one}
