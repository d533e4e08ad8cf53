"""Text to token ids and back, for every source that a checkpoint has.

Encoding is done by the `tokenizers` package.  Decoding is done here, on bytes: a token is a run of
bytes and not of characters, so a stream must hold back the first half of a character until the
other half comes.  One path serves both: `decode` is the stream, pushed and finished.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import tokenizers

from ostinato.errors import InputError, ModelError, ModelFormatError, UnsupportedModelError
from ostinato.models.arguments import whole
from ostinato.models.checkpoint import GgufTokenizerSource, TokenizerSource

__all__ = ["IncrementalDecoder", "Tokenizer", "TokenizerParts", "guarded", "load_tokenizer"]

T = TypeVar("T")

_MAX_TOKENIZER_JSON = 128 << 20
# What models call the end of an answer, besides the one id that their file names.
_END_TOKENS = frozenset(
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
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_table() -> dict[str, int]:
    """GPT-2's one-character names of the 256 bytes (`bytes_to_unicode` of openai/gpt-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    table.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return table


_BYTE_LEVEL = _byte_level_table()


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """What a source gives: the encoder, and what decoding and generation need to know.

    `byte_level`: tokens are spelled in GPT-2's byte alphabet; otherwise in SentencePiece's, with
    U+2581 for a space and `<0xE2>` for a byte.  `strip_space`: one space before all text is the
    tokenizer's own and goes.  `literal_ids`: tokens to be taken as they are written.
    `special_ids`: control tokens, left out of text.  `prefix`, `suffix`: ids that `add_special`
    puts around a text; None if the encoder does that by itself.
    """

    encoder: tokenizers.Tokenizer
    byte_level: bool
    strip_space: bool
    literal_ids: frozenset[int]
    special_ids: frozenset[int]
    bos_id: int | None
    eos_ids: tuple[int, ...]
    chat_template: str | None
    prefix: tuple[int, ...] | None = None
    suffix: tuple[int, ...] = ()


class Tokenizer:
    """Text to ids and ids to text.  Made by `load_tokenizer`; safe to use from many threads.

    `vocabulary`: how many ids there are, special ones included.  `bos_id`: begin of sequence, or
    None.  `eos_ids`: every id that ends an answer, the file's own first.  `special_ids`: control
    tokens.  `chat_template`: jinja source (see `models.chat`), or None.
    """

    def __init__(self, parts: TokenizerParts) -> None:
        self._parts = parts
        self._encoder = parts.encoder
        self._pieces: dict[int, bytes] = {}
        self.vocabulary: int = parts.encoder.get_vocab_size(with_added_tokens=True)
        self.bos_id = parts.bos_id
        self.special_ids = parts.special_ids
        self.chat_template = parts.chat_template
        named = (parts.encoder.token_to_id(text) for text in sorted(_END_TOKENS))
        more = (token for token in named if token is not None and token in parts.special_ids)
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys((*parts.eos_ids, *more)))

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of `text`.  `add_special`: with begin/end of sequence where the model wants it.

        Special tokens written out in `text` (as a chat template does) become their ids; so does
        what a user typed, as everywhere.  Raises InputError if `text` is no valid Unicode.
        """
        try:
            encoding = self._encoder.encode(text, add_special_tokens=add_special)
        except (TypeError, UnicodeError) as error:
            raise InputError(f"the text cannot be encoded: {error}") from None
        ids: list[int] = encoding.ids
        if add_special and self._parts.prefix is not None:
            return [*self._parts.prefix, *ids, *self._parts.suffix]
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD.

        Raises InputError for an id outside the vocabulary.
        """
        stream = self.stream_decoder(skip_special=skip_special)
        return "".join([*map(stream.push, ids), stream.finish()])

    def stream_decoder(self, *, skip_special: bool = True) -> IncrementalDecoder:
        """A decoder for ids that come one by one."""
        return IncrementalDecoder(self, skip_special=skip_special)

    def token_text(self, token: int) -> str | None:
        """The token as the vocabulary spells it (`"Ġsky"`), or None if there is no such id."""
        token = whole(token, "token")
        if not 0 <= token < 1 << 32:
            return None
        text: str | None = self._encoder.id_to_token(token)
        return text

    def token_bytes(self, token: int) -> bytes:
        """The bytes of text that the token stands for.  Raises InputError for an unknown id."""
        token = whole(token, "token")
        piece = self._pieces.get(token)
        if piece is None:
            text = self.token_text(token)
            if text is None:
                raise InputError(f"token id {token} is not in the vocabulary ({self.vocabulary})")
            piece = self._pieces[token] = self._spell(token, text)
        return piece

    @property
    def strip_space(self) -> bool:
        """Whether one space before all text is the tokenizer's own and is left out."""
        return self._parts.strip_space

    def _spell(self, token: int, text: str) -> bytes:
        if token in self._parts.literal_ids:
            return text.encode()
        if self._parts.byte_level:
            try:
                return bytes(_BYTE_LEVEL[character] for character in text)
            except KeyError:
                return text.encode()  # not in the byte alphabet: an added token
        match = _BYTE_TOKEN.fullmatch(text)
        if match:
            return bytes.fromhex(match[1])
        return text.replace("\u2581", " ").encode()


class IncrementalDecoder:
    """Ids in, text out, as early as it is certain.

    What all `push` calls and `finish` gave is, put together, `Tokenizer.decode` of the same ids.
    No piece holds part of a character.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset[int]()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = tokenizer.strip_space

    def push(self, token: int) -> str:
        """The text that became certain with this token; often all of its own, sometimes "".

        Raises InputError for an id outside the vocabulary.
        """
        piece = self._tokenizer.token_bytes(token)
        return "" if token in self._skipped else self._emit(self._utf8.decode(piece))

    def finish(self) -> str:
        """What was held back, now that nothing follows: U+FFFD for half a character, or ""."""
        return self._emit(self._utf8.decode(b"", final=True))

    def _emit(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


def load_tokenizer(source: TokenizerSource, *, vocabulary: int | None = None) -> Tokenizer:
    """The tokenizer of a checkpoint (`checkpoint.tokenizer`).

    `vocabulary`: rows of the embedding; a tokenizer with larger ids is refused.  Raises
    ModelFormatError if it is damaged, UnsupportedModelError for a kind that cannot be done right,
    ModelError if there is none.
    """
    if isinstance(source, GgufTokenizerSource):
        from ostinato.models.tokenizer_gguf import parts_from_gguf

        tokenizer = Tokenizer(parts_from_gguf(source))
    else:
        tokenizer = Tokenizer(_parts_from_folder(source.path))
    largest = max(tokenizer.eos_ids, default=0)
    if vocabulary is not None and max(tokenizer.vocabulary - 1, largest) >= vocabulary:
        raise ModelFormatError(
            f"{source.path}: the tokenizer has ids up to {max(tokenizer.vocabulary - 1, largest)}, "
            f"the embedding only {vocabulary} rows"
        )
    return tokenizer


def guarded(make: Callable[[], T], where: str) -> T:
    """Call into `tokenizers`, whose errors are bare Exceptions and, from Rust, PanicExceptions."""
    try:
        return make()
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a pyo3 PanicException is no Exception
        raise ModelFormatError(f"{where}: the tokenizer is damaged: {error}") from None


def _parts_from_folder(path: Path) -> TokenizerParts:
    from ostinato.models.safetensors_reader import read_json

    file = path / "tokenizer.json"
    try:
        size = file.stat().st_size
    except OSError:
        raise ModelError(
            f"{path}: no tokenizer.json; other kinds (tokenizer.model, vocab.json) are not read"
        ) from None
    if size > _MAX_TOKENIZER_JSON:
        raise ModelFormatError(f"{file}: {size} bytes, more than {_MAX_TOKENIZER_JSON}")
    encoder = guarded(lambda: tokenizers.Tokenizer.from_file(str(file)), str(file))
    encoder.no_truncation()  # what was set for training would cut prompts silently
    encoder.no_padding()
    byte_level, strip_space = _decoder_kind(encoder, file)
    added = encoder.get_added_tokens_decoder()
    config_file = path / "tokenizer_config.json"
    config = read_json(config_file) if config_file.is_file() else {}
    model_file = path / "config.json"
    model = read_json(model_file) if model_file.is_file() else {}
    generation_file = path / "generation_config.json"
    generation = read_json(generation_file) if generation_file.is_file() else {}
    eos: list[object] = [_token_id(encoder, config.get("eos_token"))]
    for value in (model.get("eos_token_id"), generation.get("eos_token_id")):
        eos += value if isinstance(value, list) else [value]
    bos = _token_id(encoder, config.get("bos_token"))
    return TokenizerParts(
        encoder=encoder,
        byte_level=byte_level,
        strip_space=strip_space,
        literal_ids=frozenset(added),
        special_ids=frozenset(token for token, entry in added.items() if entry.special),
        bos_id=bos if bos is not None else _known_id(encoder, model.get("bos_token_id")),
        eos_ids=tuple(t for entry in eos if (t := _known_id(encoder, entry)) is not None),
        chat_template=_template(path, config),
    )


def _decoder_kind(encoder: tokenizers.Tokenizer, file: Path) -> tuple[bool, bool]:
    """Whether tokens are spelled in the byte alphabet, and whether a first space goes."""
    # The pickled state of a decoder is its JSON; there is no other way to ask.
    state = json.loads(encoder.decoder.__getstate__()) if encoder.decoder else {}
    steps = state.get("decoders", [state]) if state.get("type") == "Sequence" else [state]
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:
        return True, False
    if "Metaspace" in kinds:
        return False, any(step.get("prepend_scheme", "always") != "never" for step in steps)
    if "ByteFallback" in kinds:
        return False, "Strip" in kinds
    raise UnsupportedModelError(
        f"{file}: its decoder {sorted(map(str, kinds))} is not supported; supported: ByteLevel, "
        "Metaspace, ByteFallback"
    )


def _token_id(encoder: tokenizers.Tokenizer, token: object) -> int | None:
    """The id of a token that tokenizer_config.json gives as text or as an object with `content`."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return encoder.token_to_id(text) if isinstance(text, str) else None


def _known_id(encoder: tokenizers.Tokenizer, token: object) -> int | None:
    if type(token) is not int or not 0 <= token < 1 << 32 or encoder.id_to_token(token) is None:
        return None
    return token


def _template(path: Path, config: Mapping[str, object]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        with file.open("rb") as stream:
            return stream.read(1 << 20).decode("utf-8", "replace")
    template = config.get("chat_template")
    if isinstance(template, list):  # several named ones: [{"name": "default", "template": "…"}]
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, Mapping)}
        template = named.get("default")
    return template if isinstance(template, str) else None
