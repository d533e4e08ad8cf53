"""The child's side of `tokenizer_folder`: builds a tokenizer.json and encodes with it."""

from __future__ import annotations

import json
from typing import Any

import tokenizers
from tokenizers import models

from ostinato.errors import InputError, ModelFormatError, UnsupportedModelError
from ostinato.models.text.tokenizer_parts import ADDED_FLAGS, SPECIAL_FLAGS, guarded

# The process's one tokenizer, with the number of rows of the embedding; empty before the opening.
_encoders: list[tuple[tokenizers.Tokenizer, int]] = []


def answer(request: bytes) -> str:
    """Answers a request.  The first holds a line of JSON with the arguments of `_opened`, then the
    tokenizer.json; the answer is the result of `_opened`.  Each later one is the JSON [text, True
    to add special tokens]; the answer is a JSON list of ids.

    Raises ModelFormatError if the file is damaged or the tokenizer fails, UnsupportedModelError for
    an unsupported decoder, InputError for a text with a token for which the embedding has no row.
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
    named: list[list[Any]],
    extra: list[list[Any]],
    pad: str | None,
    pads: bool,
    metaspace: str | None,
    listed: bool,
    plain: bool,
    split: bool,
) -> str:
    """Builds the tokenizer.  Returns JSON: "texts" by id, "added" as pairs of an id and True for a
    special token, the spelling ("byte_level", "strip_space"), and the padding token "pad".

    `rows`: rows of the embedding.  `added`: id, text and flags of tokens in other files; `listed`:
    they replace the file's own added tokens.  `named`, `extra`: text and flags of tokens to make
    special: the former even if the tokenizer.json has them as added tokens that are not; `plain`:
    without their other flags.  `pad`: the padding token named by another file; with `pads` the
    tokenizer.json's padding token replaces it.  `metaspace`: the scheme of spaces of a
    SentencePiece tokenizer, which replaces the file's own steps.  `split`: special tokens in text
    are ordinary text.
    """
    encoder = guarded(lambda: tokenizers.Tokenizer.from_buffer(content), "is damaged")
    if pads and encoder.padding:
        pad = encoder.padding["pad_token"]
        named.append([pad, *SPECIAL_FLAGS])
    if metaspace and isinstance(encoder.model, models.BPE):
        changed = _as_llama(json.loads(content), metaspace, listed)
        encoder = guarded(lambda: tokenizers.Tokenizer.from_str(changed), "is damaged")
    special = {entry[0] for entry in (*named, *extra)}
    _add(encoder, [entry for entry in added if entry[0] < rows], special)
    _add_special(encoder, named, extra, rows, plain)
    known = encoder.get_added_tokens_decoder()
    largest = encoder.get_vocab_size(with_added_tokens=True) - 1
    texts = list(map(encoder.id_to_token, range(min(largest + 1, rows))))
    if None in texts:  # ids have gaps, so the largest one is not the number of tokens - 1
        ids = encoder.get_vocab(with_added_tokens=False).values()
        if len(set(ids)) < len(ids):
            raise ModelFormatError("has two tokens with the same id")
        largest = max((*ids, *known))
        texts = list(map(encoder.id_to_token, range(min(largest + 1, rows))))
    # Training often adds a padding token, which is never an input of the model.
    only_padding = largest == rows and pad is not None and encoder.id_to_token(rows) == pad
    if largest >= rows and not only_padding:
        raise ModelFormatError(f"has ids up to {largest}, the embedding only {rows} rows")
    for token, one in known.items():
        if one.special and token < rows:
            texts[token] = one.content  # not as the normalizer changes it: "▁</s>"
    encoder.no_truncation()  # settings for training would cut prompts silently
    encoder.no_padding()
    encoder.encode_special_tokens = split
    byte_level, strip_space = _decoder_kind(encoder)
    _encoders.append((encoder, rows))
    return json.dumps(
        {
            "texts": texts,
            "added": [
                (token, one.special)
                for token, one in known.items()
                if token < rows and texts[token] == one.content
            ],
            "byte_level": byte_level,
            "strip_space": strip_space,
            "pad": pad,
        },
        ensure_ascii=False,
    )


def _as_llama(made: dict[str, Any], scheme: str, listed: bool) -> str:
    """Returns the tokenizer.json that transformers' `LlamaTokenizer` builds: it takes vocabulary,
    merges and postprocessor from the file, and sets the rest itself."""
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
    """Adds tokens that the tokenizer.json lacks, or has with other flags, in the order of their
    ids.  `named`: texts of special tokens, for entries without flags.  Raises ModelFormatError if
    the encoder gives a token another id."""
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


def _add_special(
    encoder: tokenizers.Tokenizer,
    named: list[list[Any]],
    extra: list[list[Any]],
    rows: int,
    plain: bool,
) -> None:
    """Adds special tokens that are not there yet, and makes those with a name special; those in
    the vocabulary keep their ids.  A token for which the embedding has no row is left out: the
    model could not read it."""
    known = encoder.get_added_tokens_decoder()
    flags_of = {one.content: _flags(one) for one in known.values()}
    names = {text for text, *_ in named}
    following = max((encoder.get_vocab_size(with_added_tokens=False), *(i + 1 for i in known)))
    # A text that is given with several flags has the last ones.
    for text, *flags in dict.fromkeys(map(tuple, (*named, *extra))):
        if not text:
            continue
        if text in flags_of:
            flags = [*flags_of[text][:-1], flags_of[text][-1] or text in names]
        elif encoder.token_to_id(text) is None:
            if following >= rows:
                continue
            following += 1
        _put(encoder, text, list(SPECIAL_FLAGS) if plain else flags)


def _put(encoder: tokenizers.Tokenizer, text: str, flags: list[bool]) -> None:
    made = tokenizers.AddedToken(text, **dict(zip(ADDED_FLAGS, flags, strict=True)))
    add = encoder.add_special_tokens if flags[-1] else encoder.add_tokens
    guarded(lambda: add([made]), "is damaged")


def _flags(one: tokenizers.AddedToken) -> list[bool]:
    return [getattr(one, name) for name in ADDED_FLAGS]


# The supported steps of a decoder of SentencePiece's pieces; settings not listed do not matter.
_PIECES: tuple[dict[str, Any], ...] = (
    {"type": "Metaspace", "replacement": "\u2581"},
    {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
)


def _decoder_kind(encoder: tokenizers.Tokenizer) -> tuple[bool, bool]:
    """Returns True if tokens are spelled in the byte alphabet, and True if decoding drops a first
    space.  Raises UnsupportedModelError for another decoder."""
    # The pickled state of a decoder is its JSON; there is no other way to read it.
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
