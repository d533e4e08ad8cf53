"""Tokenizers of Hugging Face folders: `tokenizer.json` and the files beside it.

The precedence of these files is that of transformers 5.17 (`_from_pretrained` in
tokenization_utils_base.py and `TokenizersBackend` in tokenization_utils_tokenizers.py), as far as
it affects ids of text and variables of chat templates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ostinato.errors import ModelError, ModelFormatError
from ostinato.models.arguments import quoted
from ostinato.models.files.reading import read_file, read_json
from ostinato.models.text.child import Child
from ostinato.models.text.tokenizer_parts import ADDED_FLAGS, SPECIAL_FLAGS, TokenizerParts

# The largest tokenizer.json in use has 33 MB; building it takes 0.9 s and 350 MB.
_MAX_TOKENIZER_JSON = 64 << 20
_SECONDS = 60.0
_MEMORY = 2 << 30
_NAMED = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
"""Names of the special tokens that every tokenizer can have, in transformers' order."""
_LLAMA = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_INFILLING = {
    f"{part}_token": f"\u2581<{part[:3].upper()}>" for part in ("prefix", "middle", "suffix", "eot")
}
_DEFAULTS: dict[str, Mapping[str, object]] = {
    "LlamaTokenizer": _LLAMA,
    "CodeLlamaTokenizer": {**_LLAMA, **_INFILLING, "fill_token": "<FILL_ME>"},
    "Qwen2Tokenizer": dict.fromkeys(("eos_token", "unk_token", "pad_token"), "<|endoftext|>"),
    "GPT2Tokenizer": dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>"),
}
"""Special tokens by tokenizer class, for names that no file sets."""


def parts_from_folder(path: Path, rows: int) -> TokenizerParts:
    """Loads the tokenizer in a folder, for an embedding of `rows` rows.

    Raises ModelError if there is none, ModelFormatError if a file is damaged, UnsupportedModelError
    for an unsupported decoder, OSError.
    """
    file = path / "tokenizer.json"
    if not file.exists():
        raise ModelError(
            f"{path}: no tokenizer.json; other kinds (tokenizer.model, vocab.json) are not read"
        )
    config, model = json_of(path / "tokenizer_config.json"), json_of(path / "config.json")
    content = read_file(file, _MAX_TOKENIZER_JSON)
    kind = _class_of(config, model)
    if kind == "LlamaTokenizer" and b'"ByteLevel"' in content:
        kind = "TokenizersBackend"  # Llama 3's and its distillates' files, named by the older class
    special = _special_tokens(path, config, _DEFAULTS.get(kind, {}))
    head = {
        "rows": rows,
        "added": _added_tokens(path, config),
        # In the order in which transformers adds them.
        "named": [[t.text, *t.flags] for t in special.named.values()],
        "extra": [[t.text, *t.flags] for t in special.extra],
        "pad": pad.text if (pad := special.named.get("pad_token")) else None,
        "pads": "pad_token" not in special.given,
        "metaspace": _prepend_scheme(config, kind),
        "listed": "added_tokens_decoder" in config,
        "plain": kind == "Qwen2Tokenizer",
        "split": bool(config.get("split_special_tokens")),
    }
    opening = json.dumps(head).encode() + b"\n" + content
    where = f"{file}: the tokenizer"
    child = Child(
        f"{__package__}.tokenizer_child", seconds=_SECONDS, memory=_MEMORY, opening=opening
    )
    found = json.loads(child.ask(None, where))
    texts: list[str | None] = found["texts"]
    added: list[list[int]] = found["added"]
    ids = {text: token for token, text in enumerate(texts) if text is not None}
    named = {name: token.text for name, token in special.named.items()}
    if found["pad"] is not None:
        named["pad_token"] = found["pad"]
    eos: list[object] = [ids.get(named.get("eos_token", ""))]
    for value in (model, json_of(path / "generation_config.json")):
        given = value.get("eos_token_id")
        eos += given if isinstance(given, list) else [given]

    def encode(text: str, add_special: bool) -> list[int]:
        request = json.dumps([text, add_special]).encode()
        made: list[int] = json.loads(child.ask(request, where))
        return made

    return TokenizerParts(
        where=str(file),
        encode=encode,
        texts=texts,
        byte_level=found["byte_level"],
        strip_space=found["strip_space"],
        literal_ids=frozenset(token for token, _ in added),
        special_ids=frozenset(token for token, special in added if special),
        bos_id=ids.get(named.get("bos_token", "")),
        eos_ids=tuple(t for entry in eos if (t := _known_id(texts, entry)) is not None),
        named=named,
    )


def json_of(file: Path) -> Mapping[str, object]:
    """Reads a JSON object; {} if there is no such file.  Raises ModelFormatError, OSError."""
    return read_json(file) if file.exists() else {}


def _class_of(config: Mapping[str, object], model: Mapping[str, object]) -> str:
    """Returns the name of the class that transformers' `AutoTokenizer.from_pretrained` selects,
    without "Fast"."""
    given = config.get("tokenizer_class") or model.get("tokenizer_class")
    kind = model.get("model_type")
    if kind == "mistral":
        return "TokenizersBackend"
    if kind == "qwen2" or (kind == "qwen3" and not given):
        return "Qwen2Tokenizer"
    return given.removesuffix("Fast") if isinstance(given, str) else "TokenizersBackend"


def _prepend_scheme(config: Mapping[str, object], kind: str) -> str | None:
    """Returns the prepend scheme that the class uses, whatever tokenizer.json has; None if it uses
    the file's own steps."""
    if kind not in ("LlamaTokenizer", "CodeLlamaTokenizer"):
        return None
    prefix = config.get("add_prefix_space")
    if prefix is not None and not prefix:
        return "never"
    return "always" if config.get("legacy") and kind == "LlamaTokenizer" else "first"


@dataclass(frozen=True, slots=True)
class _Token:
    """A token's text and its `ADDED_FLAGS`."""

    text: str
    flags: tuple[bool, ...] = SPECIAL_FLAGS


@dataclass(frozen=True, slots=True)
class _SpecialTokens:
    """The special tokens of a folder.  `named`: by name, for chat templates.  `extra`: those
    without a name.  `given`: the names that the files or the defaults set, also those set to null.
    """

    named: Mapping[str, _Token]
    extra: Sequence[_Token]
    given: frozenset[str]


def _special_tokens(
    path: Path, config: Mapping[str, object], defaults: Mapping[str, object]
) -> _SpecialTokens:
    """Returns the special tokens of tokenizer_config.json; if it has no `added_tokens_decoder`,
    those of special_tokens_map.json take precedence.

    Raises ModelFormatError, OSError.
    """
    newer, older = path / "tokenizer_config.json", path / "special_tokens_map.json"
    own = {
        name: value
        for name, value in config.items()
        if (_names_token(name, value) or name in defaults)
        # Under a name that is not in _NAMED, an object without "__type" is no token.
        and (name in _NAMED or not isinstance(value, Mapping) or "__type" in value)
    }
    extra = config.get("extra_special_tokens", config.get("additional_special_tokens"))
    if isinstance(extra, Mapping):
        own |= extra
        extra = None
    found = {name: (value, newer) for name, value in own.items()}
    listed = [(token, newer) for token in _listed(extra, newer)]
    table = json_of(older) if "added_tokens_decoder" not in config else {}
    # The older file takes precedence for the names in _NAMED, tokenizer_config.json for others.
    for name, value in table.items():
        if _names_token(name, value) and (name in _NAMED or name not in found):
            found[name] = (value, older)
    more = table.get("extra_special_tokens")
    if isinstance(more, Mapping):
        found |= {name: (value, older) for name, value in more.items()}
    elif more is not None:
        listed += [(token, older) for token in _listed(more, older)]
    elif "additional_special_tokens" in table and "extra_special_tokens" not in config:
        listed = [(token, older) for token in _listed(table["additional_special_tokens"], older)]
    found = {**{name: (value, newer) for name, value in defaults.items()}, **found}
    named = {
        name: _token(found[name][0], f"{found[name][1]}: {name}")
        for name in dict.fromkeys((*_NAMED, *found))
        if name in found and found[name][0] is not None
    }
    others = [_token(token, f"{file}: a special token") for token, file in listed]
    return _SpecialTokens(named, others, frozenset(found))


def _names_token(name: str, value: object) -> bool:
    """True if the name of a file's entry makes it a special token, such as `image_token`."""
    return name in _NAMED or (name.endswith("_token") and isinstance(value, str | Mapping))


def _listed(value: object, file: Path) -> list[object]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise ModelFormatError(f"{file}: special tokens {quoted(value)} must be a list or a table")
    return value


def _token(value: object, what: str) -> _Token:
    """Reads a token that is text or an object with `content`.  Raises ModelFormatError, whose
    message begins with `what`."""
    text = value.get("content") if isinstance(value, Mapping) else value
    if not isinstance(text, str):
        raise ModelFormatError(f"{what} is {quoted(value)}, must be text")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ModelFormatError(f"{what} {quoted(text)} is no Unicode text") from None
    if not isinstance(value, Mapping):
        return _Token(text)
    return _Token(text, (*(value.get(name) is True for name in ADDED_FLAGS[:-1]), True))


def _added_tokens(path: Path, config: Mapping[str, object]) -> list[list[object]]:
    """Returns the tokens that tokenizer_config.json adds, or else added_tokens.json: id, text, and
    `ADDED_FLAGS`, which only the former has; in the order of ids.  tokenizer.json mostly has them
    too; if it lacks one, transformers takes it from these files.

    Raises ModelFormatError, OSError.
    """
    file = path / "tokenizer_config.json"
    listed = config.get("added_tokens_decoder")
    if listed is None:
        file = path / "added_tokens.json"
        listed = {str(token): {"content": text} for text, token in json_of(file).items()}
    if not isinstance(listed, Mapping):
        raise ModelFormatError(f"{file}: added_tokens_decoder is {quoted(listed)}, must be a table")
    found: list[tuple[int, list[object]]] = []
    for number, entry in listed.items():
        text = entry.get("content") if isinstance(entry, Mapping) else None
        if not number.isdecimal() or len(number) > 9 or not isinstance(text, str) or not text:
            raise ModelFormatError(f"{file}: added token {quoted(number)} is {quoted(entry)}")
        flags = [entry[name] is True for name in ADDED_FLAGS if name in entry]
        if 0 < len(flags) < len(ADDED_FLAGS):
            raise ModelFormatError(f"{file}: added token {number} lacks some of its flags")
        found.append((int(number), [int(number), text, *flags]))
    return [entry for _, entry in sorted(found, key=lambda pair: pair[0])]


def _known_id(texts: Sequence[str | None], token: object) -> int | None:
    if type(token) is not int or not 0 <= token < len(texts) or texts[token] is None:
        return None
    return token
