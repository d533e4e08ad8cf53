"""Where a tokenizer.json is built and run: the child's side of `tokenizer`."""

from __future__ import annotations

import json
from typing import Any

import tokenizers

from ostinato.errors import ModelFormatError, UnsupportedModelError
from ostinato.models.tokenizer_parts import guarded

__all__ = ["answer"]

_encoders: list[tokenizers.Tokenizer] = []


def answer(request: bytes) -> str:
    """First the file: a line of JSON with the `rows` of the embedding, then the tokenizer.json;
    answered by what `_opened` gives.  Then texts: [text, whether with special tokens]; answered by
    a list of ids.

    Raises ModelFormatError if the file is damaged or the tokenizer fails, UnsupportedModelError for
    a decoder that is not known.
    """
    if not _encoders:
        head, _, content = request.partition(b"\n")
        return _opened(content, json.loads(head)["rows"])
    text, special = json.loads(request)
    encoding = guarded(
        lambda: _encoders[0].encode(text, add_special_tokens=special), "failed on the text"
    )
    return json.dumps(encoding.ids)


def _opened(content: bytes, rows: int) -> str:
    """Every token's text by its id, added tokens with whether they are special, and how tokens are
    spelled."""
    encoder = guarded(lambda: tokenizers.Tokenizer.from_str(content.decode()), "is damaged")
    vocabulary = encoder.get_vocab(with_added_tokens=False)
    added = encoder.get_added_tokens_decoder()
    largest = max((*vocabulary.values(), *added), default=-1)
    if largest >= rows:
        raise ModelFormatError(f"has ids up to {largest}, the embedding only {rows} rows")
    texts: list[str | None] = [None] * (largest + 1)
    for text, token in vocabulary.items():
        if texts[token] is not None:
            raise ModelFormatError(f"has two tokens with the id {token}")
        texts[token] = text
    for token, entry in added.items():  # the package prefers them, too
        texts[token] = entry.content
    encoder.no_truncation()  # what was set for training would cut prompts silently
    encoder.no_padding()
    byte_level, strip_space = _decoder_kind(encoder)
    _encoders.append(encoder)
    return json.dumps(
        {
            "texts": texts,
            "added": [(token, entry.special) for token, entry in added.items()],
            "byte_level": byte_level,
            "strip_space": strip_space,
        },
        ensure_ascii=False,
    )


def _decoder_kind(encoder: tokenizers.Tokenizer) -> tuple[bool, bool]:
    """Whether tokens are spelled in the byte alphabet, and whether a first space goes."""
    # The pickled state of a decoder is its JSON; there is no other way to ask.
    state: dict[str, Any] = json.loads(encoder.decoder.__getstate__()) if encoder.decoder else {}
    steps = state.get("decoders", [state]) if state.get("type") == "Sequence" else [state]
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:
        return True, False
    if "Metaspace" in kinds:
        return False, any(step.get("prepend_scheme", "always") != "never" for step in steps)
    if "ByteFallback" in kinds:
        return False, "Strip" in kinds
    raise UnsupportedModelError(
        f"has the decoder {sorted(map(str, kinds))}, which is not supported; supported: ByteLevel, "
        "Metaspace, ByteFallback"
    )
