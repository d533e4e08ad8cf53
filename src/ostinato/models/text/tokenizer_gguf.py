"""Tokenizers built from GGUF metadata: byte-level BPE ("gpt2") and SentencePiece BPE ("llama").

GGUF holds tokens, merges or scores, and the *name* of a pre-tokenizer.  Only llama.cpp's source
defines these names (`src/llama-vocab.cpp`); the regexes below are copied from there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from ostinato.errors import ModelError, ModelFormatError, UnsupportedModelError
from ostinato.models.arguments import quoted
from ostinato.models.files.checkpoint import GgufTokenizerSource
from ostinato.models.text.sentencepiece import SentencePieceEncoder
from ostinato.models.text.tokenizer_parts import END_TOKENS, TokenizerParts, guarded

T = TypeVar("T", int, float)

_GPT2 = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # openai/gpt-2
)
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The regex of Mistral's models since Nemo: openai/o200k without contractions, with single digits.
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Each regex splits the parts that the previous one left; each match is a part of its own.
_REGEXES: dict[str, tuple[str, ...]] = {
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_LLAMA3,),
    "smaug-bpe": (_LLAMA3,),
    "qwen2": (_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"),),
    "tekken": (_TEKKEN,),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
}
_ALIASES = {
    **dict.fromkeys(("phi-2", "a.x-4.0", "trillion"), "gpt-2"),
    "starcoder": "smollm",
    "refact": "smollm",
    "command-r": "smollm",
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    **dict.fromkeys(("falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), "llama-bpe"),
    **dict.fromkeys(("deepseek-r1-qwen", "megrez", "kormo"), "qwen2"),
}
# Pre-tokenizers whose words become one token if the vocabulary has it, whatever the merges are, and
# whose texts begin with the BOS token unless the file has add_bos_token.
_WHOLE_WORDS = ("llama-bpe", "tekken")
# Pre-tokenizers of models whose original tokenizers first apply NFC (llama.cpp does not, so its ids
# differ for a letter that is followed by its accent).
_COMPOSED = ("qwen2",)
# Texts of tokens between which templates write the role of a message.
_TURN_TOKENS = ("<|im_start|>", "<|start_header_id|>", "<|end_header_id|>", "<start_of_turn>")
SUPPORTED_PRE_TOKENIZERS = (*_REGEXES, *_ALIASES)

# Token types of GGUF (`llama_token_type`).
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
# Ids of special tokens that a file of the kind "llama" need not name, in llama.cpp.
_SENTENCEPIECE_IDS = {"bos": 1, "eos": 2}
# Limits well above any vocabulary in use: Gemma's has 262,000 tokens of 2 million characters, 6,400
# of them special; byte-level vocabularies have up to 580,000 merges.  Together they keep the build
# under 10 s and 1 GiB.
_MAX_CHARACTERS = 8 << 20
_MAX_MERGES = 1 << 20
_MAX_ADDED = 1 << 16
# The time to join pieces of text grows with a token's length.
_MAX_PIECE = 256


def parts_from_gguf(source: GgufTokenizerSource, rows: int) -> TokenizerParts:
    """Builds the tokenizer in `source.metadata`, for an embedding of `rows` rows.

    Raises ModelError if there is none, ModelFormatError if the metadata is damaged,
    UnsupportedModelError for an unknown model or pre-tokenizer (a guess could give wrong ids
    silently).
    """
    return _Builder(source, rows).parts()


class _Builder:
    """A builder of tokenizers that checks all counts before it builds anything."""

    def __init__(self, source: GgufTokenizerSource, rows: int) -> None:
        self.where = str(source.path)
        self.metadata = source.metadata
        self.kind = source.metadata.get("tokenizer.ggml.model")
        texts = self._texts("tokenizer.ggml.tokens")
        if len(texts) > rows:
            raise ModelFormatError(
                f"{self.where}: the tokenizer has ids up to {len(texts) - 1}, the embedding only "
                f"{rows} rows"
            )
        if sum(map(len, texts)) > _MAX_CHARACTERS:
            raise ModelFormatError(f"{self.where}: the tokens are longer than {_MAX_CHARACTERS}")
        # llama.cpp gives tokens without text these names, and aborts if two texts are equal.
        self.tokens = [text or f"[EMPTY_{index}]" for index, text in enumerate(texts)]
        self.vocabulary = {token: index for index, token in enumerate(self.tokens)}
        if len(self.vocabulary) < len(self.tokens):
            again = next(i for i, t in enumerate(self.tokens) if self.vocabulary[t] != i)
            raise ModelFormatError(
                f"{self.where}: token {again} is there twice: {quoted(self.tokens[again])}"
            )
        given = self._numbers("token_type", int, [1] * len(self.tokens))
        # Some files mark these tokens as plain text; llama.cpp recognises the ends by text, too.
        self.kinds = [
            _CONTROL if text in END_TOKENS or text in _TURN_TOKENS else kind
            for text, kind in zip(self.tokens, given, strict=True)
        ]
        kinds: dict[int, list[int]] = {_UNKNOWN: [], _CONTROL: [], _USER_DEFINED: []}
        for index, kind in enumerate(self.kinds):
            if kind in kinds:
                kinds[kind].append(index)
        self.control = sorted(kinds[_CONTROL] + kinds[_UNKNOWN])
        self.user = kinds[_USER_DEFINED]
        added = len(self.control) + len(self.user)
        if added > _MAX_ADDED:
            raise ModelFormatError(
                f"{self.where}: {added} control and user-defined tokens, more than {_MAX_ADDED}"
            )

    def parts(self) -> TokenizerParts:
        kind = self.kind
        if kind == "gpt2":
            encode_text, add_bos, strip = self._byte_level()
        elif kind == "llama":
            encode_text, add_bos, strip = self._sentencepiece()
        else:
            raise UnsupportedModelError(
                f"{self.where}: tokenizer.ggml.model {quoted(kind)} is not supported; supported: "
                "gpt2, llama"
            )
        bos = self._id("bos")
        eos = [self._id(name) for name in ("eos", "eot", "eom")]
        prefix = (bos,) if bos is not None and self._flag("add_bos_token", add_bos) else ()
        suffix = (eos[0],) if eos[0] is not None and self._flag("add_eos_token", False) else ()

        def encode(text: str, add_special: bool) -> list[int]:
            ids = encode_text(text)
            return [*prefix, *ids, *suffix] if add_special else ids

        return TokenizerParts(
            where=self.where,
            encode=encode,
            texts=self.tokens,
            byte_level=kind == "gpt2",
            strip_space=strip,
            literal_ids=frozenset((*self.control, *self.user)),
            special_ids=frozenset(self.control),
            bos_id=bos,
            eos_ids=tuple(token for token in eos if token is not None),
            # llama.cpp passes these two to templates, empty if there is none.
            named={
                name: "" if token is None else self.tokens[token]
                for name, token in (("bos_token", bos), ("eos_token", eos[0]))
            },
        )

    def _byte_level(self) -> tuple[Callable[[str], list[int]], bool, bool]:
        name = self.metadata.get("tokenizer.ggml.pre")
        if name is None:
            raise UnsupportedModelError(
                f"{self.where}: tokenizer.ggml.pre is missing, as in files made before May 2024: "
                "without the name of the pre-tokenizer text can get other tokens than those the "
                "model was trained on; take a newer file, or convert the model again"
            )
        kind = _ALIASES.get(name, name) if isinstance(name, str) else ""
        regexes = _REGEXES.get(kind)
        if regexes is None:
            raise UnsupportedModelError(
                f"{self.where}: pre-tokenizer {quoted(name)} is not supported; supported: "
                f"{', '.join(SUPPORTED_PRE_TOKENIZERS)}"
            )
        merges = []
        listed = self._texts("tokenizer.ggml.merges")
        if len(listed) > _MAX_MERGES:
            raise ModelFormatError(f"{self.where}: more than {_MAX_MERGES} merges")
        for merge in listed:
            left, _, right = merge.partition(" ")
            if not left or not right:
                raise ModelFormatError(f"{self.where}: merge {quoted(merge)} is not two tokens")
            merges.append((left, right))
        whole_words = kind in _WHOLE_WORDS
        model = guarded(
            lambda: models.BPE(self.vocabulary, merges, ignore_merges=whole_words),
            f"{self.where}: the tokenizer is damaged",
        )
        encoder = tokenizers.Tokenizer(model)
        if name in _COMPOSED:
            encoder.normalizer = normalizers.NFC()
        splits = [pre_tokenizers.Split(Regex(regex), "isolated") for regex in regexes]
        encoder.pre_tokenizer = pre_tokenizers.Sequence(
            [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        self._add(encoder, self.control, special=True)
        self._add(encoder, self.user, special=False)
        what = f"{self.where}: the tokenizer failed on the text"

        def encode(text: str) -> list[int]:
            encoding = guarded(lambda: encoder.encode(text, add_special_tokens=False), what)
            ids: list[int] = encoding.ids
            return ids

        return encode, whole_words, False

    def _sentencepiece(self) -> tuple[Callable[[str], list[int]], bool, bool]:
        scores = self._numbers("scores", float, None)
        if any(map(math.isnan, scores)):
            raise ModelFormatError(f"{self.where}: tokenizer.ggml.scores holds NaN")
        for index, token in enumerate(self.tokens):
            if len(token) > _MAX_PIECE:
                raise ModelFormatError(
                    f"{self.where}: token {index} is {len(token)} long, more than {_MAX_PIECE}"
                )
        prefix_space = self._flag("add_space_prefix", True)
        encoder = SentencePieceEncoder(
            self.vocabulary,
            scores,
            [*self.control, *self.user],
            unknown=self._id("unknown"),
            prefix_space=prefix_space,
            where=self.where,
        )
        return encoder.encode, True, prefix_space

    def _add(self, encoder: tokenizers.Tokenizer, ids: list[int], *, special: bool) -> None:
        added = [AddedToken(self.tokens[i], special=special, normalized=False) for i in ids]
        add: Callable[[list[AddedToken]], int] = (
            encoder.add_special_tokens if special else encoder.add_tokens
        )
        guarded(lambda: add(added), f"{self.where}: the tokenizer is damaged")

    def _texts(self, key: str) -> list[str]:
        value = self.metadata.get(key)
        if value is None:
            raise ModelError(f"{self.where}: {key} is missing: the file holds no tokenizer")
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise ModelFormatError(f"{self.where}: {key} is not a list of strings")
        return value

    def _numbers(self, name: str, kind: type[T], default: list[T] | None) -> list[T]:
        """Reads a list with one number of type `kind` for each token."""
        value = self.metadata.get(f"tokenizer.ggml.{name}", default)
        if (
            not isinstance(value, list)
            or len(value) != len(self.tokens)
            or not all(type(number) is kind for number in value)
        ):
            raise ModelFormatError(f"{self.where}: tokenizer.ggml.{name} is not one number a token")
        return value

    def _id(self, name: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        value = self.metadata.get(key)
        if value is None:
            known = _SENTENCEPIECE_IDS if self.kind == "llama" else {}
            return known.get(name) if len(self.tokens) > 2 else None
        if type(value) is not int or not 0 <= value < len(self.tokens):
            raise ModelFormatError(f"{self.where}: {key} {quoted(value)} is outside the vocabulary")
        return value

    def _flag(self, name: str, default: bool) -> bool:
        value = self.metadata.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, bool):
            raise ModelFormatError(f"{self.where}: tokenizer.ggml.{name} is not true or false")
        return value
