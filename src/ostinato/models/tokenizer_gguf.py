"""Tokenizers out of GGUF metadata: byte-level BPE ("gpt2") and SentencePiece BPE ("llama").

GGUF holds tokens, merges or scores, and the *name* of a pre-tokenizer.  What that name stands for
is written down only in llama.cpp (`src/llama-vocab.cpp`), from where the regexes below are.
"""

from __future__ import annotations

from collections.abc import Callable

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from ostinato.errors import ModelError, ModelFormatError, UnsupportedModelError
from ostinato.models.checkpoint import GgufTokenizerSource
from ostinato.models.tokenizer import TokenizerParts, guarded

__all__ = ["SUPPORTED_PRE_TOKENIZERS", "parts_from_gguf"]

_GPT2 = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # openai/gpt-2
)
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Each regex splits what the one before left; a match is a part of its own.
_REGEXES: dict[str, tuple[str, ...]] = {
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_LLAMA3,),
    "qwen2": (_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"),),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
}
_ALIASES = {
    "phi-2": "gpt-2",
    "starcoder": "smollm",
    "refact": "smollm",
    "command-r": "smollm",
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
}
SUPPORTED_PRE_TOKENIZERS = (*_REGEXES, *_ALIASES)

# Token types of GGUF (`llama_token_type`).
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
# All tokens together, in characters, well above any vocabulary in use.  Merges out of scores take
# time with the square of a token's length, which the second bound is for.
_MAX_CHARACTERS = 8 << 20
_MAX_PIECE = 256


def parts_from_gguf(source: GgufTokenizerSource) -> TokenizerParts:
    """The tokenizer in `source.metadata`.

    Raises ModelError if there is none, ModelFormatError if it is damaged, UnsupportedModelError for
    a model or pre-tokenizer that is not known here (a wrong guess gives wrong ids, silently).
    """
    return _Builder(source).parts()


class _Builder:
    def __init__(self, source: GgufTokenizerSource) -> None:
        self.where = str(source.path)
        self.metadata = source.metadata
        self.tokens = self._texts("tokenizer.ggml.tokens")
        if sum(map(len, self.tokens)) > _MAX_CHARACTERS:
            raise ModelFormatError(f"{self.where}: the tokens are longer than {_MAX_CHARACTERS}")
        self.vocabulary = {token: index for index, token in enumerate(self.tokens)}
        kinds = self.metadata.get("tokenizer.ggml.token_type", [1] * len(self.tokens))
        if not isinstance(kinds, list) or len(kinds) != len(self.tokens):
            raise ModelFormatError(
                f"{self.where}: tokenizer.ggml.token_type is not one number a token"
            )
        self.kinds = kinds

    def parts(self) -> TokenizerParts:
        kind = self.metadata.get("tokenizer.ggml.model")
        if kind == "gpt2":
            encoder, add_bos, strip = self._byte_level()
        elif kind == "llama":
            encoder, add_bos, strip = self._sentencepiece()
        else:
            raise UnsupportedModelError(
                f"{self.where}: tokenizer.ggml.model {kind!r} is not supported; supported: gpt2, "
                "llama"
            )
        control = [i for i, kind in enumerate(self.kinds) if kind in (_CONTROL, _UNKNOWN)]
        user = [i for i, kind in enumerate(self.kinds) if kind == _USER_DEFINED]
        self._add(encoder, [i for i in control if self.tokens[i]], special=True)
        self._add(encoder, [i for i in user if self.tokens[i]], special=False)
        bos = self._id("bos")
        eos = [self._id(name) for name in ("eos", "eot", "eom")]
        template = self.metadata.get("tokenizer.chat_template")
        prefix = (bos,) if bos is not None and self._flag("add_bos_token", add_bos) else ()
        suffix = (eos[0],) if eos[0] is not None and self._flag("add_eos_token", False) else ()
        return TokenizerParts(
            encoder=encoder,
            byte_level=kind == "gpt2",
            strip_space=strip,
            literal_ids=frozenset((*control, *user)),
            special_ids=frozenset(control),
            bos_id=bos,
            eos_ids=tuple(token for token in eos if token is not None),
            chat_template=template if isinstance(template, str) else None,
            prefix=prefix,
            suffix=suffix,
        )

    def _byte_level(self) -> tuple[tokenizers.Tokenizer, bool, bool]:
        # llama.cpp takes a file that names none for "default", too.
        name = self.metadata.get("tokenizer.ggml.pre", "default")
        regexes = _REGEXES.get(_ALIASES.get(name, name)) if isinstance(name, str) else None
        if regexes is None:
            raise UnsupportedModelError(
                f"{self.where}: pre-tokenizer {name!r} is not supported; supported: "
                f"{', '.join(SUPPORTED_PRE_TOKENIZERS)}"
            )
        merges = []
        for merge in self._texts("tokenizer.ggml.merges"):
            left, _, right = merge.partition(" ")
            if not left or not right:
                raise ModelFormatError(f"{self.where}: merge {merge[:40]!r} is not two tokens")
            merges.append((left, right))
        llama3 = regexes is _REGEXES["llama-bpe"]
        make = _bpe(self.vocabulary, merges, ignore_merges=llama3)
        encoder = tokenizers.Tokenizer(guarded(make, self.where))
        splits = [pre_tokenizers.Split(Regex(regex), "isolated") for regex in regexes]
        encoder.pre_tokenizer = pre_tokenizers.Sequence(
            [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        encoder.decoder = decoders.ByteLevel()
        return encoder, llama3, False

    def _sentencepiece(self) -> tuple[tokenizers.Tokenizer, bool, bool]:
        """Llama 2's: merges follow from the scores, the best-scored piece is merged first."""
        scores = self.metadata.get("tokenizer.ggml.scores")
        if (
            not isinstance(scores, list)
            or len(scores) != len(self.tokens)
            or not all(isinstance(score, float) for score in scores)
        ):
            raise ModelFormatError(f"{self.where}: tokenizer.ggml.scores is not one number a token")
        prefix_space = self._flag("add_space_prefix", True)
        unknown = self._id("unknown")
        make = _bpe(
            self.vocabulary,
            self._merges(scores),
            unk_token=None if unknown is None else self.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
        encoder = tokenizers.Tokenizer(guarded(make, self.where))
        steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", "\u2581")]
        if prefix_space:
            steps.insert(0, normalizers.Prepend("\u2581"))
        encoder.normalizer = normalizers.Sequence(steps)
        return encoder, True, prefix_space

    def _merges(self, scores: list[float]) -> list[tuple[str, str]]:
        known, found = self.vocabulary, []
        for index, token in enumerate(self.tokens):
            if len(token) > _MAX_PIECE:
                raise ModelFormatError(
                    f"{self.where}: token {index} is {len(token)} long, more than {_MAX_PIECE}"
                )
            if self.kinds[index] != 1:  # bytes and specials are never made by merging
                continue
            for cut in range(1, len(token)):
                left, right = token[:cut], token[cut:]
                if left in known and right in known:
                    found.append((-scores[index], known[left], known[right], left, right))
        found.sort()
        return [(left, right) for _, _, _, left, right in found]

    def _add(self, encoder: tokenizers.Tokenizer, ids: list[int], *, special: bool) -> None:
        added = [AddedToken(self.tokens[i], special=special, normalized=False) for i in ids]
        add: Callable[[list[AddedToken]], int] = (
            encoder.add_special_tokens if special else encoder.add_tokens
        )
        guarded(lambda: add(added), self.where)

    def _texts(self, key: str) -> list[str]:
        value = self.metadata.get(key)
        if value is None:
            raise ModelError(f"{self.where}: {key} is missing: the file holds no tokenizer")
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise ModelFormatError(f"{self.where}: {key} is not a list of strings")
        return value

    def _id(self, name: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        value = self.metadata.get(key)
        if value is None:
            return None
        if type(value) is not int or not 0 <= value < len(self.tokens):
            raise ModelFormatError(f"{self.where}: {key} {value!r} is outside the vocabulary")
        return value

    def _flag(self, name: str, default: bool) -> bool:
        value = self.metadata.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, bool):
            raise ModelFormatError(f"{self.where}: tokenizer.ggml.{name} is not true or false")
        return value


def _bpe(
    vocabulary: dict[str, int], merges: list[tuple[str, str]], **options: object
) -> Callable[[], models.BPE]:
    def make() -> models.BPE:
        return models.BPE(vocab=vocabulary, merges=merges, **options)

    return make
