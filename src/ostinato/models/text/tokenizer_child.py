"""Where a tokenizer.json is built and run: the child's side of `tokenizer`."""

from __future__ import annotations

import json
from typing import Any

import tokenizers

from ostinato.errors import ModelFormatError, UnsupportedModelError
from ostinato.models.text.tokenizer_parts import guarded

_encoders: list[tokenizers.Tokenizer] = []


def answer(request: bytes) -> str:
    """First the file: a line of JSON with the `rows` of the embedding and the tokens `added` beside
    it, then the tokenizer.json; answered by what `_opened` gives.  Then texts: [text, whether with
    special tokens]; answered by a list of ids.

    Raises ModelFormatError if the file is damaged or the tokenizer fails, UnsupportedModelError for
    a decoder that is not known.
    """
    if not _encoders:
        head, _, content = request.partition(b"\n")
        given = json.loads(head)
        return _opened(content, given["rows"], given["added"])
    text, special = json.loads(request)
    encoding = guarded(
        lambda: _encoders[0].encode(text, add_special_tokens=special), "failed on the text"
    )
    return json.dumps(encoding.ids)


def _opened(content: bytes, rows: int, more: list[list[Any]]) -> str:
    """Every token's text by its id, added tokens with whether they are special, and how tokens are
    spelled."""
    encoder = guarded(lambda: tokenizers.Tokenizer.from_buffer(content), "is damaged")
    _add(encoder, [entry for entry in more if entry[0] < rows])
    added = encoder.get_added_tokens_decoder()
    largest = encoder.get_vocab_size(with_added_tokens=True) - 1
    texts = list(map(encoder.id_to_token, range(min(largest + 1, rows))))
    if None in texts:  # so not every id up to the number of tokens is one
        ids = encoder.get_vocab(with_added_tokens=False).values()
        if len(set(ids)) < len(ids):
            raise ModelFormatError("has two tokens with the same id")
        largest = max((*ids, *added))
        texts = list(map(encoder.id_to_token, range(min(largest + 1, rows))))
    if largest >= rows:
        raise ModelFormatError(f"has ids up to {largest}, the embedding only {rows} rows")
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


def _add(encoder: tokenizers.Tokenizer, entries: list[list[Any]]) -> None:
    """Adds tokens that the tokenizer.json does not have, or has with other flags; in the order of
    their ids, which must come out."""
    known = {
        token: [token, one.content, *_flags(one)]
        for token, one in encoder.get_added_tokens_decoder().items()
    }
    for entry in entries:
        token, text, *flags = entry
        if token in known and known[token][: len(entry)] == entry:
            continue
        single_word, lstrip, rstrip, normalized, special = flags or (False,) * 3 + (True, False)
        made = tokenizers.AddedToken(
            text,
            single_word=single_word,
            lstrip=lstrip,
            rstrip=rstrip,
            normalized=normalized,
            special=special,
        )
        add = encoder.add_special_tokens if special else encoder.add_tokens
        guarded(lambda add=add, made=made: add([made]), "is damaged")  # type: ignore[misc]
        if encoder.token_to_id(text) != token:
            raise ModelFormatError(
                f"has {text[:100]!r} at {encoder.token_to_id(text)}, and tokenizer_config.json (or "
                f"added_tokens.json) at {token}"
            )


def _flags(one: tokenizers.AddedToken) -> list[bool]:
    return [one.single_word, one.lstrip, one.rstrip, one.normalized, one.special]


# How a decoder of SentencePiece's pieces may go; settings that are not here change nothing.
_PIECES: tuple[dict[str, Any], ...] = (
    {"type": "Metaspace", "replacement": "\u2581"},
    {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
)


def _decoder_kind(encoder: tokenizers.Tokenizer) -> tuple[bool, bool]:
    """Whether tokens are spelled in the byte alphabet, and whether a first space goes."""
    # The pickled state of a decoder is its JSON; there is no other way to ask.
    state: dict[str, Any] = json.loads(encoder.decoder.__getstate__()) if encoder.decoder else {}
    steps = state.get("decoders", [state]) if state.get("type") == "Sequence" else [state]
    kinds = [str(step.get("type")) for step in steps]
    if "ByteLevel" in kinds and {*kinds} <= {"ByteLevel", "Fuse"}:
        return True, False
    known = all(any(one.items() <= step.items() for one in _PIECES) for step in steps)
    # Pieces that are not joined yet would each lose their space.
    fused = "Strip" not in kinds or "Fuse" in kinds[: kinds.index("Strip")]
    if known and fused and not {"Metaspace", "Replace"}.isdisjoint(kinds):
        spaced = (s for s in steps if s["type"] == "Metaspace")
        first = any(step.get("prepend_scheme", "always") != "never" for step in spaced)
        return False, first or "Strip" in kinds
    raise UnsupportedModelError(
        f"has the decoder {json.dumps(steps)[:500]}, which is not supported; supported: ByteLevel; "
        "Metaspace or Replace of U+2581, with ByteFallback, Fuse, and Strip of one space at the "
        "beginning"
    )
