"""Tokenizers: text to ids and back, streamed, from GGUF and from tokenizer.json."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from ostinato.errors import InputError, ModelError, ModelFormatError, UnsupportedModelError
from ostinato.models.files.checkpoint import GgufTokenizerSource, JsonTokenizerSource
from ostinato.models.generation import AnswerText
from ostinato.models.text.chat import ChatTemplate
from ostinato.models.text.tokenizer import Tokenizer, load_tokenizer
from ostinato.models.text.tokenizer_parts import guarded
from tests.models import record_tokenizers
from tests.models.model_files import (
    CONFIG,
    TEMPLATE,
    byte_level_encoder,
    byte_tokens,
    write_tokenizer,
)
from tests.models.record_tokenizers import QWEN2, added, sentencepiece_json

REFERENCE = Path(__file__).parent.parent / "data" / "reference_smollm2.json"
TEXTS = [
    "",
    "the thin path in 1212",
    "  two  spaces, a\ttab\r\nand lines\n\n",
    "Größe 東京 🎉 naïve\u0301 \u200d",
    "<|im_start|>user\nhi<|im_end|>\n",
    "a   5  12",
]


def metadata(**changes: Any) -> dict[str, object]:
    tokens, merges = byte_tokens()
    usual = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "token_type": [3, 3, 3] + [1] * (len(tokens) - 3),
        "merges": merges,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changes,
    }
    entries: dict[str, object] = {
        f"tokenizer.ggml.{key}": value for key, value in usual.items() if value is not None
    }
    return {**entries, "tokenizer.chat_template": TEMPLATE}


def from_gguf(**changes: Any) -> Tokenizer:
    return load_tokenizer(GgufTokenizerSource(Path("m.gguf"), metadata(**changes)))


def from_json(folder: Path, **changes: Any) -> Tokenizer:
    """The tokenizer of a folder whose tokenizer.json has these changes."""
    write_tokenizer(folder)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    model = content["model"] | changes.pop("model", {})
    file.write_text(json.dumps({**content, **changes, "model": model}), encoding="utf-8")
    return load_tokenizer(JsonTokenizerSource(folder))


def sentencepiece(**changes: Any) -> Tokenizer:
    """A small Llama-2-like vocabulary: specials, 256 bytes, pieces with scores."""
    pieces = ["▁", "h", "e", "l", "o", "w", "r", "d", "he", "ll", "hell", "llo", "hello", "▁hello"]
    pieces += ["▁w", "or", "ld", "▁wor", "▁world", "."]
    scores = [-float(index) for index in range(len(pieces))]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    usual: dict[str, Any] = {
        "model": "llama",
        "pre": None,
        "merges": None,
        "tokens": tokens,
        "scores": [0.0] * 259 + scores,
        "token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "unknown_token_id": 0,
    }
    return from_gguf(**(usual | changes))


@pytest.fixture(params=["gguf", "json"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tokenizer]:
    if request.param == "gguf":
        yield from_gguf()
    else:
        yield from_json(tmp_path)


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text


def test_both_sources_agree(tmp_path: Path) -> None:
    left, right = from_gguf(), from_json(tmp_path)
    for text in TEXTS:
        assert left.encode(text) == right.encode(text)
    assert (left.bos_id, left.eos_ids) == (right.bos_id, right.eos_ids)
    assert left.chat_template == right.chat_template == TEMPLATE


@pytest.mark.parametrize("path", ["model.gguf", Path("model.gguf")])
def test_a_path_is_no_source_of_a_tokenizer(path: Any) -> None:
    with pytest.raises(InputError, match=r"open_checkpoint\(path\).tokenizer is needed"):
        load_tokenizer(path)


def test_special_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("<|im_start|>") == [1]
    assert tokenizer.bos_id == 1
    assert tokenizer.eos_ids == (2, 0)  # the file's own, then <|endoftext|> by its name
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.decode([1, 2]) == ""
    assert tokenizer.decode([1, 2], skip_special=False) == "<|im_start|><|im_end|>"


@pytest.mark.parametrize("kind", [1, 4])
def test_an_end_token_that_a_gguf_file_calls_text_ends_an_answer(kind: int) -> None:
    tokens, _ = byte_tokens()
    types = [3, 3, kind] + [1] * (len(tokens) - 3)
    ours = from_gguf(token_type=types, eos_token_id=0)
    assert ours.eos_ids == (0, 2)
    assert ours.special_ids == {0, 1, 2}
    assert ours.encode("a<|im_end|>a") == from_gguf().encode("a<|im_end|>a")
    assert ours.decode(ours.encode("a<|im_end|>")) == "a"


def test_the_begin_of_a_turn_that_a_gguf_file_calls_text_is_a_token() -> None:
    """llama.cpp splits it, so that the model reads no turns."""
    tokens, _ = byte_tokens()
    ours = from_gguf(token_type=[3, 1, 3] + [1] * (len(tokens) - 3))
    assert ours.special_ids == {0, 1, 2}
    assert ours.encode("<|im_start|>a") == from_gguf().encode("<|im_start|>a")


def test_digits_stand_alone_for_smollm() -> None:
    tokens, _ = byte_tokens()
    twelve = tokens.index("12")
    assert twelve not in from_gguf().encode("12")
    assert twelve in from_gguf(pre="gpt-2").encode("12")
    assert twelve in from_gguf(pre="llama-bpe").encode("12")


TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
# One after the other, as llama.cpp has them (src/llama-vocab.cpp).
SPLITS = {
    "gpt-2": (GPT2,),
    "smollm": (r"\p{N}", GPT2),
    "llama-bpe": (QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|"),),
    "smaug-bpe": (QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|"),),
    "qwen2": (QWEN2,),
    "tekken": (TEKKEN,),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
}
WORDS = [
    *TEXTS,
    "12 121 the 'S don'T theIn aabTHE ab/ab//\n\n the\r\n  in  \t",
    "e\u0301 \u1100\u1161\u11a8 \u212b",
    "ＡＢ　ab\u00a0ab",
]


@pytest.mark.parametrize("kind", SPLITS)
def test_byte_level_of_a_family_agrees_with_its_tokenizer_json(tmp_path: Path, kind: str) -> None:
    """The tokenizer.json has the form of these models' own, with a small vocabulary."""
    begins = kind in ("llama-bpe", "tekken")
    steps: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": one}, "behavior": "Isolated", "invert": False}
        for one in SPLITS[kind]
    ]
    steps.append(
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    )
    own = from_json(
        tmp_path,
        normalizer={"type": "NFC"} if kind == "qwen2" else None,
        model={"ignore_merges": begins},
        pre_tokenizer={"type": "Sequence", "pretokenizers": steps},
    )
    ours = from_gguf(pre=kind, add_bos_token=False)
    for text in WORDS:
        assert ours.encode(text) == own.encode(text), text
    assert from_gguf(pre=kind).encode("a") == ([1] if begins else []) + own.encode("a")


@pytest.mark.parametrize(
    ("name", "same"),
    [
        *((name, "llama-bpe") for name in ("falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2")),
        *((name, "qwen2") for name in ("megrez", "kormo")),
        *((name, "gpt-2") for name in ("a.x-4.0", "trillion")),
    ],
)
def test_pre_tokenizers_that_are_the_same(name: str, same: str) -> None:
    """llama.cpp has the same pairs; only Qwen's own text is composed to NFC."""
    ours, known = from_gguf(pre=name), from_gguf(pre=same)
    for text in WORDS:
        if "\u0301" not in text:
            assert ours.encode(text) == known.encode(text), text


@pytest.mark.parametrize("version", ["v0.1", "v0.3"])
def test_mistrals_tokenizer_json(tmp_path: Path, version: str) -> None:
    """SentencePiece as its two versions have it: a normalizer or Metaspace; both strip one space of
    the text that comes back, and agree with the same vocabulary out of a GGUF file."""
    ours = sentencepiece(add_bos_token=True)
    texts = [ours.token_text(i) for i in range(ours.vocabulary)]
    merges = ["h e", "l l", "he ll", "ll o", "he llo", "hell o", "▁ hello", "▁ w", "o r", "l d"]
    merges += ["▁w or", "▁wor ld"]
    made = sentencepiece_json("prepended")
    made["model"]["vocab"] = {text: i for i, text in enumerate(texts)}
    made["model"]["merges"] = merges
    if version == "v0.3":
        made["normalizer"] = None
        made["pre_tokenizer"] = {
            "type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False,
        }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(made), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True})
    )
    own = load_tokenizer(JsonTokenizerSource(tmp_path))
    assert (own.bos_id, own.eos_ids) == (ours.bos_id, (2,))
    # Metaspace puts no further space before text that begins with one, or follows a special token.
    more = ("  held", "w<s>w") if version == "v0.1" else ()
    for text in ("hello world.", "hello", "wörld é東", *more):
        assert own.encode(text) == ours.encode(text), text
        assert own.encode(text)[0] == 1
        assert own.decode(own.encode(text)) == ours.decode(ours.encode(text))
    assert own.decode(own.encode("hello world.")) == "hello world."


def test_characters_are_never_broken(tokenizer: Tokenizer) -> None:
    text = "a🎉é東"
    stream = tokenizer.stream_decoder()
    pieces = [stream.push(token) for token in tokenizer.encode(text)]
    assert [piece for piece in pieces if piece] == ["a", "🎉", "é", "東"]
    assert stream.finish() == ""


def test_half_a_character_at_the_end_is_not_lost(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("x🎉")[:-1]
    stream = tokenizer.stream_decoder()
    assert [stream.push(token) for token in ids] == ["x", "", "", ""]
    assert stream.finish() == "\ufffd"
    assert tokenizer.decode(ids) == "x\ufffd"


@given(st.lists(st.integers(0, CONFIG.vocabulary - 1), max_size=30), st.booleans())
def test_stream_is_decode_is_what_tokenizers_gives(ids: list[int], skip: bool) -> None:
    tokenizer = BYTE_LEVEL
    stream = tokenizer.stream_decoder(skip_special=skip)
    pieces = [*map(stream.push, ids), stream.finish()]
    assert "".join(pieces) == tokenizer.decode(ids, skip_special=skip)
    expected = THEIRS.decode(ids, skip_special_tokens=skip)
    assert tokenizer.decode(ids, skip_special=skip) == expected


BYTE_LEVEL = from_gguf()
THEIRS = byte_level_encoder()


@pytest.mark.parametrize("token", [-1, CONFIG.vocabulary, 1 << 40])
def test_unknown_ids(tokenizer: Tokenizer, token: int) -> None:
    with pytest.raises(InputError, match=str(token)):
        tokenizer.decode([token])


def test_rows_of_the_embedding_beyond_the_tokens_have_no_text(tmp_path: Path) -> None:
    """Models have more rows than tokens (Qwen: 151,936 and 151,669), and may choose any of them."""
    write_tokenizer(tmp_path)
    source = JsonTokenizerSource(tmp_path)
    tokenizer = load_tokenizer(source, vocabulary=CONFIG.vocabulary + 20)
    assert tokenizer.vocabulary == CONFIG.vocabulary
    ids = tokenizer.encode("ab")
    assert tokenizer.decode([ids[0], CONFIG.vocabulary + 19, *ids[1:]]) == "ab"
    with pytest.raises(InputError, match="300"):
        tokenizer.decode([CONFIG.vocabulary + 20])


@pytest.mark.parametrize("text", ["\ud800", b"bytes", None])
def test_what_is_no_text(tokenizer: Tokenizer, text: Any) -> None:
    with pytest.raises(InputError, match="cannot be encoded"):
        tokenizer.encode(text)


def test_too_much_text(tokenizer: Tokenizer) -> None:
    for text in ("a" * ((8 << 20) + 1), "🎉" * ((2 << 20) + 1)):
        with pytest.raises(InputError, match="bytes of text cannot be encoded; 8388608 at most"):
            tokenizer.encode(text)


def test_every_kind_of_failure_of_the_package_is_our_error() -> None:
    part = {"Sequence": {"id": "B", "type_id": 0}}
    encoder = byte_level_encoder()
    program = json.loads(encoder.to_str())
    program["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [part],
        "pair": [part],
        "special_tokens": {},
    }
    panicking = tokenizers.Tokenizer.from_str(json.dumps(program))
    with pytest.raises(BaseException, match="index out of bounds") as caught:
        panicking.encode("a")
    assert not isinstance(caught.value, Exception), "or nothing is shown here"
    with pytest.raises(ModelFormatError, match="failed: index out of bounds"):
        guarded(lambda: panicking.encode("a"), "failed")
    with pytest.raises(ModelFormatError, match="failed"):
        guarded(lambda: tokenizers.Tokenizer.from_str("{"), "failed")
    with pytest.raises(KeyboardInterrupt):
        guarded(lambda: signal.raise_signal(signal.SIGINT), "failed")


def test_the_process_of_a_tokenizer_ends_with_it(tmp_path: Path) -> None:
    def processes() -> set[str]:
        listed = subprocess.run(
            ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(os.getpid())],
            capture_output=True,
            text=True,
            check=False,
        )
        return {line.split()[0] for line in listed.stdout.splitlines() if "tokenizer_child" in line}

    if shutil.which("ps") is None:
        pytest.skip("no ps here")
    write_tokenizer(tmp_path)
    before = processes()
    made = load_tokenizer(JsonTokenizerSource(tmp_path))
    assert len(processes() - before) == 1
    assert made.encode("a") == from_gguf().encode("a")
    del made
    assert not processes() - before


def test_begin_and_end_of_sequence() -> None:
    tokenizer = from_gguf(add_bos_token=True, add_eos_token=True)
    assert tokenizer.encode("a")[0] == 1
    assert tokenizer.encode("a")[-1] == 2
    assert tokenizer.encode("a", add_special=False) == from_gguf().encode("a")


def test_sentencepiece() -> None:
    tokenizer = sentencepiece()
    ids = tokenizer.encode("hello world.")
    assert [tokenizer.token_text(token) for token in ids] == ["<s>", "▁hello", "▁world", "."]
    assert tokenizer.decode(ids) == "hello world."
    assert tokenizer.decode(tokenizer.encode("  hello")) == "  hello"


LLAMA_CPP = json.loads(
    (Path(__file__).parent.parent / "data" / "reference_sentencepiece.json").read_text()
)["cases"]


@pytest.mark.parametrize(
    "case", LLAMA_CPP, ids=lambda case: f"{case['scores of']}, {case['add_space_prefix']}"
)
def test_sentencepiece_of_gguf_as_llama_cpp_encodes_it(case: dict[str, Any]) -> None:
    """Equal scores, tokens of characters that are none, special tokens that overlap."""
    begin = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = sentencepiece(
        tokens=[*begin, *case["tokens"]],
        scores=[0.0] * 259 + case["scores"],
        token_type=[2, 3, 3] + [6] * 256 + case["types"],
        add_space_prefix=case["add_space_prefix"],
    )
    for text, ids in zip(case["texts"], case["ids"], strict=True):
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.encode(text) == ids, text  # from the words that are kept


def test_sentencepiece_without_a_token_for_a_byte() -> None:
    letters = ["<unk>", "a", "b"]
    changes = {"tokens": letters, "scores": [0.0] * 3, "token_type": [2, 1, 1]}
    ids = {"bos_token_id": None, "eos_token_id": None, "add_space_prefix": False}
    assert sentencepiece(**changes, **ids).encode("aéb", add_special=False) == [1, 0, 2]
    with pytest.raises(ModelFormatError, match="no token for 'é'"):
        sentencepiece(**changes, **ids, unknown_token_id=None).encode("aéb")


def test_sentencepiece_without_names_of_special_tokens() -> None:
    """llama.cpp takes 1 and 2 then, as in Llama's own vocabulary."""
    ours = sentencepiece(bos_token_id=None, eos_token_id=None)
    assert (ours.bos_id, ours.eos_ids) == (1, (2,))
    assert ours.encode("hello") == sentencepiece().encode("hello")
    assert from_gguf(bos_token_id=None, eos_token_id=None, pre="gpt-2").bos_id is None


def test_sentencepiece_falls_back_to_bytes() -> None:
    tokenizer = sentencepiece()
    ids = tokenizer.encode("hé🎉")
    assert "<0xC3>" in [tokenizer.token_text(token) for token in ids]
    assert tokenizer.decode(ids) == "hé🎉"
    stream = tokenizer.stream_decoder()
    assert [piece for piece in map(stream.push, ids) if piece] == ["h", "é", "🎉"]


def test_sentencepiece_without_a_first_space() -> None:
    tokenizer = sentencepiece(add_space_prefix=False)
    assert tokenizer.decode(tokenizer.encode(" hello")) == " hello"
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"


def test_what_continues_a_text_keeps_its_space() -> None:
    tokenizer = sentencepiece()
    ids = tokenizer.encode("hello world.")
    whole = tokenizer.decode(ids)
    for cut in range(2, len(ids)):  # after the BOS token and some text
        stream = tokenizer.stream_decoder(continues=True)
        rest = "".join([*map(stream.push, ids[cut:]), stream.finish()])
        assert tokenizer.decode(ids[:cut]) + rest == whole
    assert AnswerText(tokenizer, continues=True).push(ids[2])[0].startswith(" ")
    assert not AnswerText(tokenizer).push(ids[2])[0].startswith(" ")


def test_sentencepiece_against_tokenizers_own_decoder() -> None:
    tokenizer = sentencepiece()
    d = tokenizers.decoders
    steps = [d.Replace("▁", " "), d.ByteFallback(), d.Fuse(), d.Strip(" ", 1, 0)]
    for text in ["hello world", " hello", "é hello 東京", ""]:
        ids = tokenizer.encode(text)
        spelled = [tokenizer.token_text(token) for token in ids if token not in {0, 1, 2}]
        assert tokenizer.decode(ids) == d.Sequence(steps).decode(spelled) == text


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"tokens": None}, ModelError, "no tokenizer"),
        ({"tokens": [1, 2]}, ModelFormatError, "not a list of strings"),
        ({"tokens": "abc"}, ModelFormatError, "not a list of strings"),
        ({"model": "bert"}, UnsupportedModelError, "'bert'.*gpt2, llama"),
        ({"pre": "gpt-4o"}, UnsupportedModelError, "'gpt-4o'.*smollm"),
        ({"pre": ["smollm"]}, UnsupportedModelError, "pre-tokenizer"),
        ({"pre": None}, UnsupportedModelError, "pre is missing, as in files made before May 2024"),
        ({"merges": ["t h", "th"]}, ModelFormatError, "'th'"),
        ({"merges": ["nope never"]}, ModelFormatError, "damaged"),
        ({"token_type": [1]}, ModelFormatError, "token_type"),
        ({"eos_token_id": 999}, ModelFormatError, "999"),
        ({"bos_token_id": True}, ModelFormatError, "bos_token_id"),
        ({"add_bos_token": 1, "eos_token_id": None}, ModelFormatError, "true or false"),
        ({"model": "llama"}, ModelFormatError, "scores"),
    ],
)
def test_damaged_metadata(changes: dict[str, Any], error: type[ModelError], words: str) -> None:
    with pytest.raises(error, match=words):
        from_gguf(**changes)


def test_more_tokens_than_rows() -> None:
    source = GgufTokenizerSource(Path("m.gguf"), metadata())
    with pytest.raises(ModelFormatError, match=r"279.*only 100 rows"):
        load_tokenizer(source, vocabulary=100)
    assert load_tokenizer(source, vocabulary=280).vocabulary == 280


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model": {}}', "[" * 5000, "\x00"])
def test_damaged_json(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ModelFormatError, match="damaged"):
        load_tokenizer(JsonTokenizerSource(tmp_path))


def test_absent_json(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        load_tokenizer(JsonTokenizerSource(tmp_path))


_SPACES = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
_STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


@pytest.mark.parametrize(
    "steps",
    [
        [{"type": "WordPiece", "prefix": "##", "cleanup": True}],
        [{"type": "Metaspace", "replacement": "_", "prepend_scheme": "always", "split": True}],
        [{**_SPACES, "pattern": {"String": "_"}}, {"type": "ByteFallback"}],
        [{**_SPACES, "pattern": {"Regex": "▁+"}}, {"type": "ByteFallback"}],
        [{**_SPACES, "content": ""}, {"type": "ByteFallback"}],
        [_SPACES, {"type": "ByteFallback"}, {"type": "Fuse"}, {**_STRIP, "start": 2}],
        [_SPACES, {"type": "ByteFallback"}, {"type": "Fuse"}, {**_STRIP, "content": "a"}],
        [_SPACES, {"type": "ByteFallback"}, _STRIP],
        [{"type": "ByteFallback"}, {"type": "Fuse"}],
        [{"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
         {"type": "Replace", "pattern": {"String": "a"}, "content": "b"}],
    ],
)  # fmt: skip
def test_unsupported_decoder(tmp_path: Path, steps: list[dict[str, Any]]) -> None:
    """Some are of known kinds, with settings that would give another text."""
    with pytest.raises(UnsupportedModelError, match=f"the decoder.*{steps[-1]['type']}"):
        from_json(tmp_path, decoder={"type": "Sequence", "decoders": steps})


def test_prompts_are_not_cut_by_a_setting_for_training(tmp_path: Path) -> None:
    encoder = byte_level_encoder()
    encoder.enable_truncation(3)
    encoder.save(str(tmp_path / "tokenizer.json"))
    assert len(load_tokenizer(JsonTokenizerSource(tmp_path)).encode("zyxwvu")) == 6


@pytest.mark.parametrize(
    ("file", "content", "text", "ids"),
    [  # as transformers 5.23 encodes them
        ("tokenizer_config.json", {"280": added("<|tool|>")}, "a <|tool|> b", [100, 35, 280]),
        ("tokenizer_config.json", {"279": added("<unused11>")}, "a <unused11> b", [100, 35, 279]),
        ("tokenizer_config.json", {"1": added("<|im_start|>", lstrip=True)}, "a <|im_start|> b",
         [100, 1]),
        ("added_tokens.json", {"<|tool|>": 280}, "a <|tool|> b", [100, 35, 280]),
        ("added_tokens.json", {"<|im_start|>": 1}, "a <|im_start|> b", [100, 35, 1]),
    ],
)  # fmt: skip
def test_tokens_that_another_file_adds_are_tokens(
    tmp_path: Path, file: str, content: dict[str, Any], text: str, ids: list[int]
) -> None:
    write_tokenizer(tmp_path)
    table = {"added_tokens_decoder": content} if file == "tokenizer_config.json" else content
    (tmp_path / file).write_text(json.dumps(table))
    tokenizer = load_tokenizer(JsonTokenizerSource(tmp_path), vocabulary=300)
    assert tokenizer.encode(text) == [*ids, 35, 101]
    back = tokenizer.decode(tokenizer.encode(text), skip_special=False)
    assert back.replace(" ", "") == text.replace(" ", "")
    assert 1 in tokenizer.special_ids


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"281": added("<|tool|>")}, "has '<|tool|>' at 280, and .* at 281"),
        ({"7": added("<|im_start|>")}, "at 1, and .* at 7"),
        ({"280": {"content": "<|tool|>", "special": True}}, "added token 280 lacks some"),
        ({"x": added("<|tool|>")}, "added token 'x'"),
        ({"280": "<|tool|>"}, "added token '280' is"),
        ([], "must be a table"),
    ],
)
def test_added_tokens_that_do_not_fit_are_refused(
    tmp_path: Path, content: object, said: str
) -> None:
    write_tokenizer(tmp_path)
    table = json.dumps({"added_tokens_decoder": content})
    (tmp_path / "tokenizer_config.json").write_text(table)
    with pytest.raises(ModelFormatError, match=said.replace("|", r"\|")):
        load_tokenizer(JsonTokenizerSource(tmp_path), vocabulary=300)
    if "281" in content:  # the embedding has no row for it, so it is never met
        tokenizer = load_tokenizer(JsonTokenizerSource(tmp_path), vocabulary=281)
        assert tokenizer.vocabulary == 280


FOLDERS = record_tokenizers.folders()
RECORD = json.loads(record_tokenizers.RECORD.read_text(encoding="utf-8"))
RECORDED = RECORD["folders"]


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_is_read_as_transformers_reads_it(tmp_path: Path, name: str) -> None:
    """Ids of texts, and what a chat template can name of its special tokens."""
    record_tokenizers.write(tmp_path, FOLDERS[name])
    theirs = RECORDED[name]
    ours = load_tokenizer(JsonTokenizerSource(tmp_path), vocabulary=400)
    assert ours.special_tokens == theirs["special_tokens"]
    assert ours.bos_id == theirs["begin"]
    texts = list(record_tokenizers.texts(name))
    for text, ids in zip(texts, theirs["ids"], strict=False):
        assert ours.encode(text) == ids, text
    for text, check in zip(texts, theirs["checks"], strict=True):
        ids = ours.encode(text)
        said = [ours.decode(ids, skip_special=skip) for skip in (True, False)]
        assert record_tokenizers.check(ids, *said) == check, text
    template = ChatTemplate(record_tokenizers.NAMES, tokens=ours.special_tokens)
    assert template.render(record_tokenizers.MESSAGES) == theirs["names"]


@pytest.mark.parametrize("kind", ["GPT2Tokenizer", "Qwen2Tokenizer"])
def test_the_files_own_pre_tokenizer_is_kept(tmp_path: Path, kind: str) -> None:
    """transformers 5 gives SmolLM2, Granite and Dolma that of the class: other tokens than those
    the models were trained on."""
    made = record_tokenizers.byte_level_json()
    own = {"type": "Digits", "individual_digits": True}
    made["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [own, made["pre_tokenizer"]]}
    record_tokenizers.write(
        tmp_path, {"tokenizer": made, "tokenizer_config": {"tokenizer_class": kind}}
    )
    ours = load_tokenizer(JsonTokenizerSource(tmp_path))
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in ("12 the 121", "in 2023"):
        assert ours.encode(text) == theirs.encode(text).ids


def test_an_answer_ends_with_a_token_of_any_file(tmp_path: Path) -> None:
    """Fine-tuned models name one in tokenizer_config.json and others in generation_config.json."""
    record_tokenizers.write(
        tmp_path,
        {
            "tokenizer": record_tokenizers.byte_level_json(),
            "tokenizer_config": {"eos_token": "<|im_start|>"},
            "config": {"eos_token_id": 7},
            "generation_config": {"eos_token_id": [9, 7]},
        },
    )
    ours = load_tokenizer(JsonTokenizerSource(tmp_path))
    assert ours.eos_ids == (1, 7, 9, 0, 2)  # then those that are known by their texts


@pytest.mark.parametrize("name", record_tokenizers.TEMPLATES)
def test_templates_are_found_as_in_transformers(tmp_path: Path, name: str) -> None:
    """One of several, by whether the conversation has tools."""
    record_tokenizers.write_templates(tmp_path, record_tokenizers.TEMPLATES[name])
    ours = load_tokenizer(JsonTokenizerSource(tmp_path))
    assert ours.chat_template is not None
    template = ChatTemplate(ours.chat_template, with_tools=ours.tool_template)
    rendered = [
        template.render(record_tokenizers.MESSAGES, variables={"tools": tools})
        for tools in (None, record_tokenizers.TOOLS)
    ]
    assert rendered == RECORD["templates"][name]


def test_templates_of_gguf_for_tools() -> None:
    more = {"tokenizer.chat_template.tool_use": "T", "tokenizer.chat_templates": ["tool_use"]}
    ours = load_tokenizer(GgufTokenizerSource(Path("m.gguf"), {**metadata(), **more}))
    assert (ours.chat_template, ours.tool_template) == (TEMPLATE, "T")


def test_templates_without_a_default_are_refused(tmp_path: Path) -> None:
    """transformers raises an error for the first conversation."""
    write_tokenizer(tmp_path)
    named = {"chat_template": [{"name": "rag", "template": "R"}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    with pytest.raises(ModelFormatError, match=r"templates \['rag'\] none is the default"):
        load_tokenizer(JsonTokenizerSource(tmp_path))


def test_special_tokens_that_the_normalizer_changes(tmp_path: Path) -> None:
    """As in Llama 1's files.  `tokenizers` calls the token "▁</s>" then, and never skips it."""
    made = sentencepiece_json("prepended")
    made["added_tokens"][2]["normalized"] = True
    record_tokenizers.write(
        tmp_path, {"tokenizer": made, "tokenizer_config": {"eos_token": "</s>"}}
    )
    ours = load_tokenizer(JsonTokenizerSource(tmp_path))
    assert (ours.eos_ids, ours.token_text(2)) == ((2,), "</s>")
    ids = ours.encode("hello </s>")
    assert ids[-1] == 2 and ours.decode(ids) == "hello"


@pytest.mark.parametrize("by", ["tokenizer_config", "padding", "no name"])
def test_a_token_for_padding_may_be_one_past_the_embedding(tmp_path: Path, by: str) -> None:
    """Fine-tuned models have 32,000 rows and [PAD] at 32,000."""
    rows = CONFIG.vocabulary
    encoder = byte_level_encoder()
    encoder.add_special_tokens([tokenizers.AddedToken("[PAD]")])
    if by == "padding":
        encoder.enable_padding(pad_id=rows, pad_token="[PAD]")
    encoder.save(str(tmp_path / "tokenizer.json"))
    named = {"pad_token": "[PAD]"} if by == "tokenizer_config" else {}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    source = JsonTokenizerSource(tmp_path)
    refused = pytest.raises(ModelFormatError, match=f"ids up to {rows}, the embedding only")
    with refused:
        load_tokenizer(source, vocabulary=rows - 1)
    if by == "no name":
        with refused:
            load_tokenizer(source, vocabulary=rows)
        return
    tokenizer = load_tokenizer(source, vocabulary=rows)
    assert (tokenizer.vocabulary, tokenizer.special_tokens) == (rows, {"pad_token": "[PAD]"})
    assert tokenizer.encode("a b") == BYTE_LEVEL.encode("a b")
    with pytest.raises(InputError, match=r"'\[PAD\]' in the text, for which the embedding has no"):
        tokenizer.encode("a[PAD]")
    assert tokenizer.encode("a b") == BYTE_LEVEL.encode("a b")
    with pytest.raises(InputError, match=str(rows)):
        tokenizer.decode([rows])


@pytest.mark.parametrize("name", record_tokenizers.FOLDERS_OF_FEATURES)
def test_templates_render_as_in_transformers(tmp_path: Path, name: str) -> None:
    record_tokenizers.write(tmp_path, FOLDERS[name])
    tokens = load_tokenizer(JsonTokenizerSource(tmp_path)).special_tokens
    for source, theirs in zip(record_tokenizers.FEATURES, RECORDED[name]["rendered"], strict=True):
        template = ChatTemplate(source, tokens=tokens)
        if theirs is None:
            with pytest.raises(ModelError):
                template.render(record_tokenizers.MESSAGES)
        else:
            assert template.render(record_tokenizers.MESSAGES) == theirs, source


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("tokenizer_config", {"bos_token": 1}, "bos_token is 1, must be text"),
        ("tokenizer_config", {"pad_token": {"lstrip": True}}, "pad_token is .*, must be text"),
        ("tokenizer_config", {"eos_token": "\ud800"}, "eos_token .*ud800.* is no Unicode text"),
        ("tokenizer_config", {"bos_token": {"content": "\ud800"}}, "bos_token .* is no Unicode"),
        ("tokenizer_config", {"extra_special_tokens": "<x>"}, "must be a list or a table"),
        ("tokenizer_config", {"extra_special_tokens": [3]}, "a special token is 3"),
        ("special_tokens_map", {"cls_token": ["<x>"]}, "cls_token"),
        ("special_tokens_map", [], "must be an object"),
        ("tokenizer_config", {"chat_template": [{"name": ["x"], "template": "T"}]}, "has no name"),
        ("tokenizer_config", {"chat_template": [{"name": None}]}, "has no name"),
        ("tokenizer_config", {"chat_template": ["n\u202e\u0001" * 100_000]}, "has no name"),
    ],
)
def test_tokenizer_configs_of_another_form_are_refused(
    tmp_path: Path, file: str, content: object, said: str
) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / f"{file}.json").write_text(json.dumps(content))
    with pytest.raises(ModelFormatError, match=rf"{file}\.json.*{said}") as caught:
        load_tokenizer(JsonTokenizerSource(tmp_path))
    assert len(str(caught.value)) < 1000 + len(str(tmp_path))


def test_a_special_token_without_a_row_is_only_a_name(tmp_path: Path) -> None:
    """transformers gives it an id that the model has no embedding for."""
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"pad_token": "<pad>"}))
    inside, outside = (
        load_tokenizer(JsonTokenizerSource(tmp_path), vocabulary=rows)
        for rows in (CONFIG.vocabulary + 1, CONFIG.vocabulary)
    )
    assert inside.special_tokens == outside.special_tokens == {"pad_token": "<pad>"}
    assert inside.encode("<pad>") == [CONFIG.vocabulary]
    assert len(outside.encode("<pad>")) == 5


def test_where_templates_may_stand(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    config.write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}, "chat_template": named}))
    tokenizer = load_tokenizer(JsonTokenizerSource(tmp_path))
    assert (tokenizer.chat_template, tokenizer.eos_ids, tokenizer.bos_id) == ("D", (2, 0), None)
    (tmp_path / "chat_template.jinja").write_text("J")
    assert load_tokenizer(JsonTokenizerSource(tmp_path)).chat_template == "J"


def test_smollm2_as_transformers_has_it(smollm2_path: Path) -> None:
    from ostinato.models.files.open import open_checkpoint

    reference = json.loads(REFERENCE.read_text())
    with open_checkpoint(smollm2_path) as checkpoint:
        tokenizer = load_tokenizer(checkpoint.tokenizer, vocabulary=checkpoint.config.vocabulary)
    assert (tokenizer.vocabulary, tokenizer.eos_ids) == (49152, (2, 0))
    for prompt in reference["prompts"]:
        assert tokenizer.encode(prompt["text"]) == prompt["prompt_ids"]
        assert tokenizer.decode(prompt["tokens"], skip_special=False) == prompt["answer"]
