"""Conversion of text to token ids and back, for every source of a tokenizer.

Encoding is done in this process for a tokenizer built from GGUF lists, and in a child process
(`child`) for a `tokenizer.json`, which is not trusted: its patterns and normalizers can take any
time and memory.  Decoding is done here, on bytes: a token is a sequence of bytes, not of
characters, so a stream must hold back the first bytes of a character until the others come.
`decode` uses the same path as a stream.
"""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from ostinato.errors import InputError, ModelError, ModelFormatError
from ostinato.models.arguments import quoted, whole
from ostinato.models.files.checkpoint import GgufTokenizerSource, TokenizerSource
from ostinato.models.files.reading import read_file
from ostinato.models.text.tokenizer_folder import json_of, parts_from_folder
from ostinato.models.text.tokenizer_parts import END_TOKENS, MAX_IDS, TokenizerParts

# Bytes of text, more than a million tokens.  Each token can take 150 bytes of memory and 1 us.
_MAX_TEXT = 8 << 20
_MAX_TEMPLATE = 1 << 20
_TEMPLATE_FILES = {
    "default": "chat_template.jinja",
    "tool_use": "additional_chat_templates/tool_use.jinja",
}
"""Files of chat templates in a folder, by name.  They replace those of tokenizer_config.json."""
_NONE: Mapping[str, str] = MappingProxyType({})
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_table() -> dict[str, int]:
    """Returns the bytes of GPT-2's alphabet by character (`bytes_to_unicode` of openai/gpt-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    table.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return table


_BYTE_LEVEL = _byte_level_table()


class Tokenizer:
    """A tokenizer, made by `load_tokenizer`.  Thread-safe.

    `vocabulary`: number of ids, special ones included.  `bos_id`: begin of sequence, or None.
    `eos_ids`: every id that ends an answer, those named by the file first.  `special_ids`: control
    tokens.  `special_tokens`: text by name (`pad_token`), for chat templates.  `chat_template`:
    jinja source (see `models.text.chat`), or None; `tool_template`: another one, for conversations
    with tools, or None.  `where`: the path of the tokenizer's file.
    `rows`, an argument: rows of the model's embedding if there are more than ids; a model can
    choose ids from `vocabulary` on, which have no text.
    """

    def __init__(
        self, parts: TokenizerParts, templates: Mapping[str, str] = _NONE, *, rows: int = 0
    ) -> None:
        self._parts = parts
        self._rows = max(rows, len(parts.texts))
        self._pieces: dict[int, bytes] = {}
        self.where = parts.where
        self.vocabulary = len(parts.texts)
        self.bos_id = parts.bos_id
        self.special_ids = parts.special_ids
        self.special_tokens: Mapping[str, str] = parts.named
        self.chat_template = templates.get("default")
        self.tool_template = templates.get("tool_use")
        named = {text: i for i in parts.special_ids if (text := parts.texts[i]) in END_TOKENS}
        more = (named[text] for text in sorted(named))
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys((*parts.eos_ids, *more)))

    def __repr__(self) -> str:
        template = "no chat template" if self.chat_template is None else "a chat template"
        return f"<Tokenizer of {self.vocabulary} tokens with {template}, from {self.where}>"

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Returns the token ids of `text`.  `add_special`: with begin and end of sequence if the
        tokenizer defines them.

        The text of a special token becomes its id, whether a chat template or a user wrote it.
        Raises InputError if `text` is no valid Unicode or has more than 8 MiB in UTF-8, ModelError
        if the model's tokenizer fails on it.
        """
        if not isinstance(text, str):
            raise InputError(f"{quoted(text)} cannot be encoded: it must be text")
        try:
            size = len(text.encode())
        except UnicodeEncodeError as error:
            raise InputError(
                f"the text cannot be encoded: character {error.start} is a lone surrogate"
            ) from None
        if size > _MAX_TEXT:
            raise InputError(f"{size} bytes of text cannot be encoded; {_MAX_TEXT} at most")
        return self._parts.encode(text, add_special)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Returns the text of `ids`; bytes that are no UTF-8 become U+FFFD.

        Raises InputError for an id outside the vocabulary.
        """
        stream = self.stream_decoder(skip_special=skip_special)
        return "".join([*map(stream.push, ids), stream.finish()])

    def stream_decoder(
        self,
        *,
        skip_special: bool = True,
        continues: bool = False,
        shown: frozenset[int] = frozenset(),
    ) -> IncrementalDecoder:
        """Returns a decoder for ids that come one by one.  `continues`: the ids continue a text, so
        a leading space is kept.  `shown`: special tokens that are not skipped."""
        skipped = self.special_ids - shown if skip_special else frozenset[int]()
        return IncrementalDecoder(self, skipped, continues=continues)

    def token_text(self, token: int) -> str | None:
        """Returns the token's spelling in the vocabulary (`"Ġsky"`), or None for an unknown id.

        Raises InputError if `token` is no whole number.
        """
        token = whole(token, "token")
        return self._parts.texts[token] if 0 <= token < self.vocabulary else None

    def token_bytes(self, token: int) -> bytes:
        """Returns the token's bytes of text; none for an id that only the embedding has.

        Raises InputError for an unknown id.
        """
        if type(token) is not int:
            token = whole(token, "token")
        piece = self._pieces.get(token)
        if piece is None:
            if not 0 <= token < self._rows:
                raise InputError(
                    f"token id {quoted(token)} is not in the vocabulary ({self._rows})"
                )
            text = self.token_text(token)
            piece = self._pieces[token] = b"" if text is None else self._spell(token, text)
        return piece

    @property
    def strip_space(self) -> bool:
        """True if the tokenizer adds a space before all text, which decoding drops."""
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
    """A decoder that takes ids one by one and returns text as early as it is final.

    The results of all `push` calls and `finish`, joined, are `Tokenizer.decode` of the same ids;
    with `continues`, they keep the leading space that `decode` drops.
    No piece has part of a character.  `skipped`: ids without text.
    """

    def __init__(
        self, tokenizer: Tokenizer, skipped: frozenset[int], *, continues: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = tokenizer.strip_space and not continues

    def push(self, *tokens: int) -> str:
        """Adds tokens and returns the text that is final with them, often the last one's, or "".

        Raises InputError for an id outside the vocabulary.
        """
        pieces = [(token, self._tokenizer.token_bytes(token)) for token in tokens]
        shown = [piece for token, piece in pieces if token not in self._skipped]
        return self._emit(self._utf8.decode(b"".join(shown)))

    def finish(self) -> str:
        """Returns the text held back, after the last token: U+FFFD for half a character, or ""."""
        return self._emit(self._utf8.decode(b"", final=True))

    def _emit(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


def load_tokenizer(source: TokenizerSource, *, vocabulary: int | None = None) -> Tokenizer:
    """Loads the tokenizer of a checkpoint (`checkpoint.tokenizer`).

    `vocabulary`: rows of the embedding; a tokenizer with larger ids is refused.
    Raises ModelFormatError if the tokenizer is damaged, UnsupportedModelError for a kind that is
    not supported exactly, ModelError if there is none or if it takes too much time or memory,
    InputError if `source` is a path.
    """
    if isinstance(source, str | os.PathLike):
        raise InputError(f"load_tokenizer({source!r}): open_checkpoint(path).tokenizer is needed")
    rows = MAX_IDS if vocabulary is None else whole(vocabulary, "vocabulary", 1)
    try:
        if isinstance(source, GgufTokenizerSource):
            from ostinato.models.text.tokenizer_gguf import parts_from_gguf

            parts = parts_from_gguf(source, rows)
        else:
            parts = parts_from_folder(source.path, rows)
        templates = read_chat_templates(source)
    except OSError as error:
        raise ModelError(f"{source.path}: cannot be read: {error}") from error
    return Tokenizer(parts, templates, rows=0 if vocabulary is None else rows)


def read_chat_templates(source: TokenizerSource) -> dict[str, str]:
    """Returns the sources of chat templates by name: "default", "tool_use" for conversations with
    tools, and others; {} if the model has none.

    Raises ModelFormatError if a file is damaged or no template is the default, OSError.
    """
    if isinstance(source, GgufTokenizerSource):
        key = "tokenizer.chat_template"
        made = {
            "default": source.metadata.get(key),
            "tool_use": source.metadata.get(f"{key}.tool_use"),
        }
        file = source.path
    elif found := {n: f for n, at in _TEMPLATE_FILES.items() if (f := source.path / at).exists()}:
        made = {name: _template(file) for name, file in found.items()}
        file = source.path
    else:
        file = source.path / "tokenizer_config.json"
        template = json_of(file).get("chat_template")
        made = {"default": template}
        if isinstance(template, list):  # [{"name": "default", "template": "…"}, …]
            for entry in template:
                if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
                    raise ModelFormatError(f"{file}: chat_template {quoted(entry)} has no name")
            made = {entry["name"]: entry.get("template") for entry in template}
    templates = {name: text for name, text in made.items() if isinstance(text, str)}
    if templates and "default" not in templates:
        raise ModelFormatError(
            f"{file}: of the chat templates {quoted(sorted(templates))} none is the default; name "
            "one of them default"
        )
    return templates


def _template(file: Path) -> str:
    try:
        return read_file(file, _MAX_TEMPLATE).decode()
    except UnicodeDecodeError as error:
        raise ModelFormatError(f"{file}: not UTF-8: {error.reason}") from None
