"""Where a tokenizer.json is built and run: the child's side of `tokenizer`."""

from __future__ import annotations

import json
from typing import Any

import tokenizers
from tokenizers import models

from ostinato.errors import InputError, ModelFormatError, UnsupportedModelError
from ostinato.models.text.tokenizer_parts import ADDED_FLAGS, SPECIAL_FLAGS, guarded

# The one tokenizer, and how many rows the embedding has.
_encoders: list[tuple[tokenizers.Tokenizer, int]] = []


def answer(request: bytes) -> str:
    """First the file: a line of JSON with what `_opened` takes, then the tokenizer.json; answered
    by what `_opened` gives.  Then texts: [text, whether with special tokens]; answered by a list
    of ids.

    Raises ModelFormatError if the file is damaged or the tokenizer fails, UnsupportedModelError for
    a decoder that is not known, InputError for a text with a token that the model cannot read.
    """
    if not _encoders:
        head, _, content = request.partition(b"\n")
        return _opened(content, **json.loads(head))
    text, special = json.loads(request)
    encoder, rows = _encoders[0]
    encoding = guarded(
        lambda: encoder.encode(text, add_special_tokens=special), "failed on the text"
    )
    ids: list[int] = encoding.ids
    if max(ids, default=0) >= rows:
        raise InputError(
            f"finds {encoder.id_to_token(rows)!r} in the text, for which the embedding has no row"
        )
    return json.dumps(ids)


def _opened(
    content: bytes,
    rows: int,
    added: list[list[Any]],
    special: list[list[Any]],
    pad: str | None,
    pads: bool,
    metaspace: str | None,
    listed: bool,
) -> str:
    """Every token's text by its id, added tokens with whether they are special, how tokens are
    spelled, and the token for padding.

    `rows`: of the embedding.  `added`: tokens of other files: id, text, flags; `listed`: they are
    all that there are.  `special`: text and flags of tokens that are special, whether the
    tokenizer.json says so or not.  `pad`: the token for padding, if another file names one; with
    `pads` it is the one that the tokenizer.json pads with.  `metaspace`: the scheme by which a
    SentencePiece tokenizer puts spaces, in place of its own steps.
    """
    encoder = guarded(lambda: tokenizers.Tokenizer.from_buffer(content), "is damaged")
    if pads and encoder.padding:
        pad = encoder.padding["pad_token"]
    if metaspace and not _decoder_kind(encoder)[0] and isinstance(encoder.model, models.BPE):
        changed = _as_llama(json.loads(content), metaspace, listed)
        encoder = guarded(lambda: tokenizers.Tokenizer.from_str(changed), "is damaged")
    named = {entry[0] for entry in special}
    _add(encoder, [entry for entry in added if entry[0] < rows], named)
    _add_special(encoder, [*special, *([[pad, *SPECIAL_FLAGS]] if pad else [])], rows)
    known = encoder.get_added_tokens_decoder()
    largest = encoder.get_vocab_size(with_added_tokens=True) - 1
    texts = list(map(encoder.id_to_token, range(min(largest + 1, rows))))
    if None in texts:  # so not every id up to the number of tokens is one
        ids = encoder.get_vocab(with_added_tokens=False).values()
        if len(set(ids)) < len(ids):
            raise ModelFormatError("has two tokens with the same id")
        largest = max((*ids, *known))
        texts = list(map(encoder.id_to_token, range(min(largest + 1, rows))))
    # Training often adds a token for padding, which a model is never given.
    only_padding = largest == rows and pad is not None and encoder.id_to_token(rows) == pad
    if largest >= rows and not only_padding:
        raise ModelFormatError(f"has ids up to {largest}, the embedding only {rows} rows")
    encoder.no_truncation()  # what was set for training would cut prompts silently
    encoder.no_padding()
    byte_level, strip_space = _decoder_kind(encoder)
    _encoders.append((encoder, rows))
    return json.dumps(
        {
            "texts": texts,
            "added": [(token, entry.special) for token, entry in known.items() if token < rows],
            "byte_level": byte_level,
            "strip_space": strip_space,
            "pad": pad,
        },
        ensure_ascii=False,
    )


def _as_llama(made: dict[str, Any], scheme: str, listed: bool) -> str:
    """A tokenizer.json as transformers' `LlamaTokenizer` builds it anew: vocabulary, merges and
    postprocessor are the file's, the rest is its own."""
    space = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme, "split": False}
    decoders = [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    model = {
        "type": "BPE",
        "fuse_unk": True,
        "byte_fallback": True,
        **{name: made["model"][name] for name in ("vocab", "merges")},
    }
    made |= {
        "normalizer": None,
        "pre_tokenizer": space,
        "decoder": {"type": "Sequence", "decoders": decoders[: 3 if scheme == "never" else 4]},
        "model": model,
    }
    if listed:
        made["added_tokens"] = []
    return json.dumps(made)


def _add(encoder: tokenizers.Tokenizer, entries: list[list[Any]], named: set[str]) -> None:
    """Adds tokens that the tokenizer.json does not have, or has with other flags; in the order of
    their ids, which must come out.  `named`: special tokens, if an entry has no flags."""
    known = {
        token: [token, one.content, *_flags(one)]
        for token, one in encoder.get_added_tokens_decoder().items()
    }
    for entry in entries:
        token, text, *flags = entry
        if token in known and known[token][: len(entry)] == entry:
            continue
        is_special = text in named
        _put(encoder, text, flags or [False, False, False, not is_special, is_special])
        if encoder.token_to_id(text) != token:
            raise ModelFormatError(
                f"has {text[:100]!r} at {encoder.token_to_id(text)}, and tokenizer_config.json (or "
                f"added_tokens.json) at {token}"
            )


def _add_special(encoder: tokenizers.Tokenizer, entries: list[list[Any]], rows: int) -> None:
    """Adds special tokens that are none yet; those of the vocabulary keep their ids.  One for which
    the embedding has no row is left out: the model could not read it."""
    known = encoder.get_added_tokens_decoder()
    texts = {one.content for one in known.values()}
    following = max((encoder.get_vocab_size(with_added_tokens=False), *(i + 1 for i in known)))
    for text, *flags in entries:
        if not text or text in texts:
            continue
        if encoder.token_to_id(text) is None:
            if following >= rows:
                continue
            following += 1
        texts.add(text)
        _put(encoder, text, flags)


def _put(encoder: tokenizers.Tokenizer, text: str, flags: list[bool]) -> None:
    made = tokenizers.AddedToken(text, **dict(zip(ADDED_FLAGS, flags, strict=True)))
    add = encoder.add_special_tokens if flags[-1] else encoder.add_tokens
    guarded(lambda: add([made]), "is damaged")


def _flags(one: tokenizers.AddedToken) -> list[bool]:
    return [getattr(one, name) for name in ADDED_FLAGS]


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
