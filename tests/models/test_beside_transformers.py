"""Tokenizers and chat templates of folders beside transformers itself: 500 texts and all features
of templates for each kind of tokenizer, and folders whose files are drawn.  In `make torch`."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from ostinato.errors import ModelError
from ostinato.models.files.checkpoint import JsonTokenizerSource
from ostinato.models.text.chat import ChatTemplate
from ostinato.models.text.tokenizer import Tokenizer, load_tokenizer
from tests.models import record_tokenizers
from tests.models.record_tokenizers import (
    SPACES,
    added,
    byte_level_json,
    qwen_json,
    sentencepiece_json,
)

VERSIONS = json.loads(record_tokenizers.RECORD.read_text(encoding="utf-8"))["versions"]
# Before 5.24, byte-level files of LlamaTokenizerFast lost their spaces.
transformers = pytest.importorskip("transformers", minversion=VERSIONS["transformers"])

LLAMA3 = record_tokenizers.QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)
KINDS = (
    "prepended, ",
    "prepended, legacy True",
    "metaspace, legacy False",
    "metaspace, another class",
    "code llama, {}",
    "mistral",
    "all names",
    "GPT2Tokenizer",
    "qwen2, Qwen2Tokenizer",
    "qwen3, PreTrainedTokenizerFast",
    "byte-level, LlamaTokenizerFast",
)
"""Of the folders of `record_tokenizers`, one for each kind of tokenizer."""


def both(folder: Path, files: dict[str, Any]) -> tuple[Tokenizer, Any]:
    """The tokenizer of a folder with these files, ours and that of transformers."""
    record_tokenizers.write(folder, files)
    ours = load_tokenizer(JsonTokenizerSource(folder), vocabulary=400)
    return ours, transformers.AutoTokenizer.from_pretrained(folder)


def agree(ours: Tokenizer, theirs: Any, texts: list[str]) -> None:
    """Names of special tokens, ids of texts and the texts that come back are the same."""
    assert ours.special_tokens == theirs.special_tokens_map
    assert ours.bos_id == theirs.bos_token_id
    for text in texts:
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special=special) == ids, text
            for skip in (True, False):
                said = theirs.decode(ids, skip_special_tokens=skip)
                assert ours.decode(ids, skip_special=skip) == said, ids


def drawn_texts(chance: random.Random, count: int) -> list[str]:
    words = record_tokenizers._WORDS
    drawn = (chance.choices(words, k=chance.randrange(1, 12)) for _ in range(count))
    return ["", " hi", "<s>hi", *(chance.choice(("", " ")).join(words) for words in drawn)]


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_of_tokenizer(tmp_path: Path, name: str) -> None:
    ours, theirs = both(tmp_path, record_tokenizers.folders()[name])
    agree(ours, theirs, drawn_texts(random.Random(f"beside {name}"), 500))
    for source in record_tokenizers.FEATURES:
        expected = record_tokenizers.rendering(theirs, source, add_generation_prompt=True)
        template = ChatTemplate(source, tokens=ours.special_tokens)
        if expected is None:
            with pytest.raises(ModelError):
                template.render(record_tokenizers.MESSAGES)
        else:
            assert template.render(record_tokenizers.MESSAGES) == expected, source


@pytest.mark.parametrize("seed", range(100))
def test_drawn_folders(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    ours, theirs = both(tmp_path, drawn_folder(chance))
    agree(ours, theirs, drawn_texts(chance, 40))


def drawn_folder(chance: random.Random) -> dict[str, Any]:
    """Files that contradict each other about special tokens, of a kind and a class that are used
    together.  Every token that a table of tokenizer_config.json leaves out is one that
    tokenizer.json has too."""

    def maybe(share: float) -> bool:
        return chance.random() < share

    kind = chance.choice(("sentencepiece", "sentencepiece", "gpt2", "llama3", "qwen"))
    classes = [None, "LlamaTokenizerFast", "PreTrainedTokenizerFast", "TokenizersBackend"]
    if kind == "sentencepiece":
        spaces = chance.choice(list(SPACES))
        made = sentencepiece_json(spaces)
        if spaces == "metaspace":
            scheme = made["pre_tokenizer"]["prepend_scheme"] = chance.choice(("always", "first"))
            classes += ["LlamaTokenizer"] * (scheme == "first")
        made["model"]["ignore_merges"] = maybe(0.3)
        made["model"]["byte_fallback"] = maybe(0.8)
        if maybe(0.3):
            made["model"]["merges"] = [merge.split(" ") for merge in made["model"]["merges"]]
    else:
        made = qwen_json() if kind == "qwen" else byte_level_json()
        classes += {"qwen": ["Qwen2Tokenizer"], "gpt2": ["GPT2Tokenizer"], "llama3": []}[kind]
        if kind == "llama3":
            made["pre_tokenizer"] = qwen_json()["pre_tokenizer"]
            made["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = LLAMA3
            made["model"]["ignore_merges"] = True
    if maybe(0.2):
        made["post_processor"] = None
    if maybe(0.1):
        made["truncation"] = {
            "direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0,
        }  # fmt: skip
    flags = ["lstrip", "rstrip", "single_word", "normalized"]
    if made["normalizer"] and kind == "sentencepiece":
        del flags[-1]  # `tokenizers` never skips special tokens that the normalizer changes
    following = max(made["model"]["vocab"].values()) + 1
    more = chance.sample(("<|tool|>", "<image>", "<pad>"), chance.choice((0, 0, 1, 2)))
    made["added_tokens"] += [
        {"id": following + index, **added(text, special=maybe(0.7))}
        for index, text in enumerate(more)
    ]
    for token in made["added_tokens"]:
        for flag in flags:
            token[flag] ^= maybe(0.1)
        token["special"] ^= maybe(0.05)

    names = [token["content"] for token in made["added_tokens"]]
    tokens = [*names, *names, "<unused1>", "<more>", "<x y>"]
    config: dict[str, Any] = {"tokenizer_class": chance.choice(classes)}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "image_token"):
        if maybe(0.5):
            text = chance.choice(tokens)
            flagged = {"__type": "AddedToken", **added(text, **{chance.choice(flags): True})}
            config[name] = flagged if maybe(0.3) else text
    if maybe(0.3):
        listed = chance.choice(("additional_special_tokens", "extra_special_tokens"))
        config[listed] = chance.sample(tokens, 2)
    for name, values in {
        "add_bos_token": (True, False),
        "add_eos_token": (True, False),
        "legacy": (True, False, None),
        "split_special_tokens": (True, False, False, False),
        "add_prefix_space": (True, False),
    }.items():
        if name == "add_prefix_space" and kind != "sentencepiece":
            continue
        if maybe(0.3):
            config[name] = chance.choice(values)
    files = {"tokenizer": made, "tokenizer_config": config}
    if maybe(0.5):
        config["added_tokens_decoder"] = {
            str(token["id"]): {name: value for name, value in token.items() if name != "id"}
            for token in made["added_tokens"]
        }
    elif maybe(0.3):
        files["added_tokens"] = {token["content"]: token["id"] for token in made["added_tokens"]}
    if maybe(0.3):
        bare = {name: value for name, value in added("").items() if name != "special"}
        files["special_tokens_map"] = {
            name: text if maybe(0.5) else {**bare, "content": text}
            for name in ("bos_token", "eos_token", "pad_token")
            if maybe(0.6) and (text := chance.choice(names))
        }
    models = ("llama", "mistral", *(["qwen2"] if kind == "qwen" else []))
    files["config"] = {"model_type": chance.choice(models)}
    return files
