"""Damaged and hostile files: our error, within a second, within 1 GiB; never a crash or a hang."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ostinato.errors import ModelError, ModelFormatError, UnsupportedModelError
from ostinato.models.files.checkpoint import GgufTokenizerSource, JsonTokenizerSource
from ostinato.models.files.open import open_checkpoint
from ostinato.models.text import chat, tokenizer_folder, tokenizer_gguf
from ostinato.models.text.chat import ChatTemplate
from ostinato.models.text.child import Child
from ostinato.models.text.tokenizer import Tokenizer, load_tokenizer
from tests.models.model_files import byte_tokens, write_folder, write_gguf

GIB = 1 << 30
STRING, ARRAY, U32, F32_ARRAY = 8, 9, 4, 6

fuzzing = settings(
    deadline=None,  # time is bounded by `bounded`, which says what it measured
    max_examples=settings().max_examples,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@contextlib.contextmanager
def bounded(seconds: float = 60.0) -> Iterator[None]:
    """Fails if the block takes more processor time, which no sound file needs on any machine, or
    more than 1 GiB of addresses (Linux)."""
    limits = contextlib.nullcontext()
    if sys.platform == "linux":
        limits = address_space(GIB)
    started = time.process_time()
    with limits:
        yield
    took = time.process_time() - started
    assert took < seconds, f"took {took:.2f} s"


@contextlib.contextmanager
def address_space(more: int) -> Iterator[None]:
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def use_weights(path: Path) -> None:
    with open_checkpoint(path) as checkpoint:
        for name in checkpoint.tensor_names():
            assert checkpoint.tensor(name).shape == checkpoint.raw(name).shape


def use(path: Path) -> None:
    """Everything that is done with a model file before it runs."""
    use_weights(path)
    with open_checkpoint(path) as checkpoint:
        tokenizer = load_tokenizer(checkpoint.tokenizer, vocabulary=checkpoint.config.vocabulary)
        ids = tokenizer.encode("the 12 é")
        tokenizer.decode(ids)
        if tokenizer.chat_template is not None:
            ChatTemplate(tokenizer.chat_template).render([{"role": "user", "content": "x"}])


def survives(path: Path, use: Callable[[Path], None] = use) -> None:
    """The file is either fine or refused with our error, which is short, in time."""
    with bounded():
        try:
            use(path)
        except ModelError as error:
            assert len(str(error)) < 1000 + len(str(path))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = write_gguf(tmp_path_factory.mktemp("sound") / "m.gguf", kind="Q8_0")
    use(path)
    return path.read_bytes()


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scratch") / "m.gguf"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_folder(tmp_path_factory.mktemp("sound") / "hf")
    use(path)
    return path


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """A copy of `folder` for one test."""
    shutil.copytree(folder, tmp_path / "copy")
    return tmp_path / "copy"


# Heads made by hand.


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key.encode()) + struct.pack("<I", kind) + value


def tensor(
    name: bytes = b"token_embd.weight",
    shape: tuple[int, ...] = (32,),
    kind: int = 0,
    offset: int = 0,
) -> bytes:
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dimensions + struct.pack("<IQ", kind, offset)


def head(
    *parts: bytes,
    tensors: int = 0,
    entries: int = 0,
    magic: bytes = b"GGUF",
    version: int = 3,
    data: int = 4096,
) -> bytes:
    counts = struct.pack("<IQQ", version, tensors, entries)
    return magic + counts + b"".join(parts) + bytes(data)


def array(kind: int, count: int, values: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + values


HUGE = (1 << 64) - 1
LLAMA = entry("general.architecture", STRING, text(b"llama"))
HOSTILE = {
    "empty": b"",
    "magic only": b"GGUF",
    "wrong magic": head(magic=b"GGML"),
    "tensor count": head(tensors=HUGE),
    "entry count": head(entries=HUGE),
    "plausible counts": head(tensors=1 << 13, entries=1 << 11, data=1 << 20),
    "key length": head(struct.pack("<Q", HUGE), entries=1),
    "text length": head(entry("k", STRING, struct.pack("<Q", HUGE)), entries=1),
    "not UTF-8": head(entry("k", STRING, text(b"\xff\xfe")), entries=1),
    "value type": head(entry("k", 77, b""), entries=1),
    "key twice": head(LLAMA, LLAMA, entries=2),
    "array count": head(entry("k", ARRAY, array(STRING, HUGE)), entries=1),
    "array of arrays": head(entry("k", ARRAY, array(ARRAY, 1)), entries=1),
    "numbers": head(entry("k", ARRAY, array(F32_ARRAY, HUGE)), entries=1),
    "overflowing numbers": head(entry("k", ARRAY, array(F32_ARRAY, (1 << 62) + 1)), entries=1),
    "two million strings": head(
        entry("k", ARRAY, array(STRING, 1 << 21)), entries=1, data=17 << 20
    ),
    "alignment 0": head(entry("general.alignment", U32, bytes(4)), entries=1),
    "alignment 7": head(entry("general.alignment", U32, struct.pack("<I", 7)), entries=1),
    "no dimensions": head(tensor(shape=()), tensors=1),
    "nine dimensions": head(tensor(shape=(1,) * 9), tensors=1),
    "zero rows": head(tensor(shape=(32, 0)), tensors=1),
    "huge shape": head(tensor(shape=(1 << 40, 1 << 40)), tensors=1),
    "larger than the file": head(tensor(shape=(1 << 20,)), tensors=1),
    "offset": head(tensor(offset=1 << 62), tensors=1),
    "offset unaligned": head(tensor(offset=4), tensors=1),
    "overlap": head(tensor(b"a", (64,)), tensor(b"b", (64,), offset=32), tensors=2),
    "name twice": head(tensor(b"a"), tensor(b"a", offset=128), tensors=2),
    "rows that are no blocks": head(tensor(shape=(33,), kind=8), tensors=1),
    "nothing but the architecture": head(LLAMA, entries=1),
}
UNSUPPORTED = {
    "version 1": head(version=1),
    "version 99": head(version=99),
    "big-endian": head(version=3 << 24),
    "a million strings": head(
        entry("k", ARRAY, array(STRING, 1 << 20)), entries=1, data=9 << 20
    ),  # read, in time; then there is no architecture
    "numbers that fit": head(entry("k", ARRAY, array(F32_ARRAY, 1 << 21)), entries=1, data=9 << 20),
    "quantisation unknown": head(tensor(kind=4242), tensors=1),
    "quantisation unsupported": head(tensor(shape=(256,), kind=16), tensors=1),
    "no architecture": head(),
    "architecture is a list": head(
        entry("general.architecture", ARRAY, array(STRING, 1, text(b"llama"))), entries=1
    ),
}


@pytest.mark.parametrize("name", [*HOSTILE, *UNSUPPORTED])
def test_hostile_heads(scratch: Path, name: str) -> None:
    error = ModelFormatError if name in HOSTILE else UnsupportedModelError
    scratch.write_bytes((HOSTILE | UNSUPPORTED)[name])
    with bounded(), pytest.raises(error) as caught:
        use(scratch)
    is_short(caught.value, scratch)


def test_sparse_file_of_a_terabyte(scratch: Path) -> None:
    content = head(entry("k", ARRAY, array(STRING, 1 << 40)), entries=1)
    scratch.write_bytes(content)
    with scratch.open("r+b") as file:
        try:
            file.truncate(1 << 40)
        except OSError:
            pytest.skip("the disk has no such files")
    with bounded(), pytest.raises(ModelError):  # it does not read its way through
        use(scratch)
    scratch.unlink()


def test_every_truncation(sound: bytes, scratch: Path) -> None:
    lengths = sorted({*range(200), *random.Random(0).sample(range(len(sound)), 150)})
    for length in lengths:
        scratch.write_bytes(sound[:length])
        with bounded(), pytest.raises(ModelFormatError):
            use(scratch)


def test_trailing_bytes_are_harmless(sound: bytes, scratch: Path) -> None:
    scratch.write_bytes(sound + b"more")
    use(scratch)


@fuzzing
@given(data=st.data())
def test_flipped_bytes(data: st.DataObject, sound: bytes, scratch: Path) -> None:
    damaged = bytearray(sound)
    end = data.draw(st.sampled_from([100, 2000, 12000, len(sound)]))
    for _ in range(data.draw(st.integers(1, 8))):
        damaged[data.draw(st.integers(0, end - 1))] = data.draw(st.integers(0, 255))
    scratch.write_bytes(damaged)
    survives(scratch)


@fuzzing
@given(data=st.data())
def test_overwritten_numbers(data: st.DataObject, sound: bytes, scratch: Path) -> None:
    damaged = bytearray(sound)
    place = data.draw(st.integers(4, 14000))
    number = data.draw(st.sampled_from([0, 1, 255, 1 << 16, 1 << 31, 1 << 32, 1 << 62, HUGE]))
    damaged[place : place + 8] = struct.pack("<Q", number)
    scratch.write_bytes(damaged)
    survives(scratch)


@fuzzing
@given(st.binary(max_size=300))
def test_any_bytes(scratch: Path, content: bytes) -> None:
    for prefix in (b"", b"GGUF\x03\x00\x00\x00"):
        scratch.write_bytes(prefix + content)
        with bounded(), pytest.raises(ModelError):
            use(scratch)


def mutated(content: bytes, draw: Callable[[st.SearchStrategy[int]], int]) -> bytes:
    """Some bytes changed, then perhaps a piece cut out or doubled."""
    changed = bytearray(content)
    for _ in range(draw(st.integers(0, 4))):
        changed[draw(st.integers(0, len(changed) - 1))] = draw(st.integers(32, 126))
    begin = draw(st.integers(0, len(changed) - 1))
    end = min(len(changed), begin + draw(st.integers(0, 40)))
    piece = bytes(changed[begin:end])
    kind = draw(st.integers(0, 2))
    if kind == 1:
        del changed[begin:end]
    elif kind == 2:
        changed[begin:begin] = piece
    return bytes(changed)


def copy_of(folder: Path, name: str) -> Path:
    copy = folder.parent / f"copy-{name}"
    if not copy.exists():
        shutil.copytree(folder, copy)
    return copy


@fuzzing
@given(data=st.data())
def test_mutated_config(data: st.DataObject, folder: Path) -> None:
    copy = copy_of(folder, "config")
    (copy / "config.json").write_bytes(mutated((folder / "config.json").read_bytes(), data.draw))
    survives(copy, use_weights)


# Each of these starts a process.
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@settings(fuzzing, max_examples=settings().max_examples // 6)
@given(data=st.data())
def test_mutated_tokenizer(data: st.DataObject, name: str, folder: Path) -> None:
    copy = copy_of(folder, name)
    (copy / name).write_bytes(mutated((folder / name).read_bytes(), data.draw))
    survives(copy)


TEXTS = ("", "a", "▁", "\u0000", "x" * 5000, "(a+)+$", r"\p{L}+", "[", "🎉")
texts = st.sampled_from(TEXTS)
patterns = st.one_of(
    st.builds(lambda t: {"String": t}, texts), st.builds(lambda t: {"Regex": t}, texts)
)
values = st.one_of(st.none(), st.booleans(), st.integers(-2, 1 << 33), texts, st.just(0.5))
parts = st.one_of(
    values,
    st.fixed_dictionaries({"type": st.just("Replace"), "pattern": patterns, "content": texts}),
    st.fixed_dictionaries({"type": st.just("Prepend"), "prepend": texts}),
    st.fixed_dictionaries({"type": st.just("Precompiled"), "precompiled_charsmap": texts}),
    st.fixed_dictionaries({"type": st.sampled_from(["NFKC", "Lowercase", "ByteLevel", "Fuse"])}),
    st.fixed_dictionaries(
        {
            "type": st.just("Split"),
            "pattern": patterns,
            "behavior": st.sampled_from(["Isolated", "Removed", "MergedWithNext"]),
            "invert": st.booleans(),
        }
    ),
)
programs = st.one_of(
    parts,
    st.builds(
        lambda key, steps: {"type": "Sequence", key: steps},
        st.sampled_from(["normalizers", "pretokenizers", "decoders", "processors"]),
        st.lists(parts, max_size=4),
    ),
)


@settings(fuzzing, max_examples=settings().max_examples // 5)
@given(
    steps=st.dictionaries(
        st.sampled_from(["normalizer", "pre_tokenizer", "post_processor", "decoder"]),
        programs,
        min_size=1,
    ),
    model=st.dictionaries(
        st.sampled_from(["dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix",
                         "byte_fallback", "ignore_merges", "type", "vocab", "merges"]),
        values,
        max_size=2,
    ),
)  # fmt: skip
def test_any_tokenizer_program(
    steps: dict[str, Any], model: dict[str, Any], folder: Path, tight: None
) -> None:
    copy = copy_of(folder, "program")
    content = json.loads((folder / "tokenizer.json").read_bytes())
    content |= steps
    content["model"] |= model
    (copy / "tokenizer.json").write_text(json.dumps(content))
    survives(copy)


@fuzzing
@given(data=st.data())
def test_mutated_safetensors_head(data: st.DataObject, folder: Path) -> None:
    copy = copy_of(folder, "head")
    whole = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(whole[:8], "little")
    changed = mutated(whole[8 : 8 + size], data.draw)
    (copy / "model.safetensors").write_bytes(
        len(changed).to_bytes(8, "little") + changed + whole[8 + size :]
    )
    survives(copy, use_weights)


NASTY_JSON = {
    "deep lists": "[" * 200_000,
    "deep objects": '{"a":' * 200_000,
    "long number": '{"hidden_size": ' + "9" * 100_000 + "}",
    "exponent": '{"model_type": "llama", "hidden_size": 1e999999}',
    "many keys": json.dumps({str(i): i for i in range(100_000)}),
    "too long": " " * (5 << 20),
    "not UTF-8": "\ud800",
    "a list": "[1]",
    "null": "null",
    "nothing": "",
}


@pytest.mark.parametrize("name", NASTY_JSON)
@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "tokenizer.json"])
def test_nasty_json(copy: Path, name: str, file: str) -> None:
    (copy / file).write_bytes(NASTY_JSON[name].encode("utf-8", "surrogatepass"))
    survives(copy)
    if file == "config.json":
        with pytest.raises(ModelError):
            use(copy)


def test_template_in_a_file_that_is_hostile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renderer = Child("ostinato.models.text.chat_child", seconds=0.3, memory=256 << 20)
    monkeypatch.setattr(chat, "_renderer", renderer)
    template = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    path = write_gguf(tmp_path / "m.gguf", metadata={"tokenizer.chat_template": template})
    with bounded(), pytest.raises(ModelError, match="it takes longer than"):
        use(path)
    renderer.close()


@pytest.fixture(scope="module")
def tight() -> Iterator[None]:
    """Less memory for tokenizers, so that tests need less time to use it up."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_folder, "_SECONDS", 10.0)
        patch.setattr(tokenizer_folder, "_MEMORY", 256 << 20)
        yield


@pytest.mark.parametrize(
    "name",
    ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
     "generation_config.json", "chat_template.jinja", "model.safetensors.index.json"],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "link to a pipe"])
def test_only_regular_files_are_opened(copy: Path, name: str, kind: str) -> None:
    """To open a pipe that nobody writes to waits for ever; to open a device may have effects."""
    (copy / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(copy / name)
    elif kind == "folder":
        (copy / name).mkdir()
    elif kind == "device":
        (copy / name).symlink_to("/dev/zero")
    else:
        os.mkfifo(copy / "elsewhere")
        (copy / name).symlink_to("elsewhere")
    with bounded(), pytest.raises(ModelError):
        use(copy)


def test_a_pipe_that_comes_in_between(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`stat` saw a regular file."""
    os.mkfifo(tmp_path / "pipe")
    looked_at = (folder / "config.json").stat()
    monkeypatch.setattr(type(tmp_path), "stat", lambda self: looked_at)
    from ostinato.models.files.reading import read_file

    with pytest.raises(ModelFormatError, match="no regular file"):
        read_file(tmp_path / "pipe", 100)


def test_files_that_may_not_be_read(folder: Path, tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        copy = tmp_path / name
        shutil.copytree(folder, copy)
        (copy / name).chmod(0)
        with pytest.raises(ModelError, match="cannot be read"):
            use(copy)


def test_bytes_behind_the_last_tensor(copy: Path) -> None:
    with (copy / "model.safetensors").open("ab") as file:
        file.write(b"more")
    with pytest.raises(ModelFormatError, match=r"model\.safetensors: .*file not fully covered"):
        use(copy)


LONG_TEXT = "n\u202e\u0001" * 100_000


def is_short(error: BaseException, path: Path) -> None:
    """Asserts that an error's text names the file, is short and can be printed."""
    assert str(path) in str(error)
    assert len(str(error)) < 1000 + len(str(path))
    assert str(error).isprintable()


@pytest.mark.parametrize("key", ["general.architecture", "tokenizer.ggml.model",
                                 "tokenizer.ggml.pre", "llama.rope.scaling.type"])  # fmt: skip
def test_long_texts_of_a_gguf_file_are_cut_in_messages(tmp_path: Path, key: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", metadata={key: LONG_TEXT})
    with pytest.raises(UnsupportedModelError) as caught:
        use(path)
    is_short(caught.value, path)


LONG = [LONG_TEXT, [LONG_TEXT], {LONG_TEXT: LONG_TEXT}, 10**4000, [[["x" * 999] * 9] * 9] * 9]


@pytest.mark.parametrize("value", LONG, ids=["text", "list", "object", "number", "nested"])
@pytest.mark.parametrize(
    "key",
    ["model_type", "hidden_size", "rms_norm_eps", "hidden_act", "rope_scaling", "eos_token_id",
     "tie_word_embeddings"],
)  # fmt: skip
def test_long_values_of_a_config_are_cut_in_messages(
    folder: Path, tmp_path: Path, key: str, value: object
) -> None:
    config = json.loads((folder / "config.json").read_bytes()) | {key: value}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config, ensure_ascii=False))
    with bounded():
        try:
            open_checkpoint(tmp_path).close()
        except ModelError as error:
            is_short(error, tmp_path)


@pytest.mark.parametrize("change", ["name", "dtype", "shape", "data_offsets", "shard"])
def test_long_texts_of_a_safetensors_head_are_cut_in_messages(copy: Path, change: str) -> None:
    if change == "shard":
        index = {"weight_map": {"a": LONG_TEXT}}
        (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
        name = LONG_TEXT if change == "name" else "lm_head.weight"
        if change != "name":
            entry[change] = LONG_TEXT if change == "dtype" else [LONG_TEXT]
        head = json.dumps({name: entry}).encode()
        content = len(head).to_bytes(8, "little") + head + bytes(4)
        (copy / "model.safetensors").write_bytes(content)
    with bounded(), pytest.raises(ModelError) as caught:
        use(copy)
    is_short(caught.value, copy)


# Tokenizers in GGUF metadata.  `rows`: of the embedding.

MANY = 1 << 20


def load_gguf(rows: int | None = None, **entries: Any) -> Tokenizer:
    metadata = {f"tokenizer.ggml.{key}": value for key, value in entries.items()}
    return load_tokenizer(GgufTokenizerSource(Path("m.gguf"), metadata), vocabulary=rows)


def test_more_tokens_than_rows_are_refused_before_they_are_built() -> None:
    tokens = [f"<|{index}|>" for index in range(MANY)]
    with bounded(5.0), pytest.raises(ModelFormatError, match="only 280 rows"):
        load_gguf(280, model="llama", tokens=tokens, token_type=[3] * MANY, scores=[0.0] * MANY)


def test_tokens_that_are_there_twice_are_refused_before_they_are_built() -> None:
    with bounded(5.0), pytest.raises(ModelFormatError, match=r"token 0 is there twice: '▁aaaaaa'"):
        load_gguf(model="llama", tokens=["▁aaaaaa"] * MANY, scores=[0.0] * MANY)


def test_too_many_special_tokens_are_refused_before_they_are_built() -> None:
    count = (1 << 16) + 1
    tokens = [f"<|{index}|>" for index in range(count)]
    for kind in (2, 3, 4):
        with bounded(5.0), pytest.raises(ModelFormatError, match="65537 control and user-defined"):
            load_gguf(model="gpt2", tokens=tokens, token_type=[kind] * count, merges=[])


def test_many_special_tokens_are_looked_for_at_once() -> None:
    count = 1 << 16
    tokens = [*(f"<|{index}|>" for index in range(count - 1)), "<unk>", "<", "|"]
    with bounded(10.0):
        tokenizer = load_gguf(
            model="llama",
            tokens=tokens,
            token_type=[3] * count + [1, 1],
            scores=[0.0] * len(tokens),
            unknown_token_id=count - 1,
            add_bos_token=False,
            add_space_prefix=False,
        )
        assert tokenizer.encode("<|" * 50_000 + "<|7|>") == [count, count + 1] * 50_000 + [7]


def test_too_many_merges_are_refused_before_they_are_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tokenizer_gguf, "_MAX_MERGES", 10_000)
    with bounded(5.0), pytest.raises(ModelFormatError, match="more than 10000 merges"):
        load_gguf(model="gpt2", pre="gpt-2", tokens=["a", "b", "ab"], merges=["a b"] * 10_001)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("token_type", [1] * 279),
        ("token_type", [1.0] * 280),
        ("token_type", [True] * 280),
        ("token_type", 1),
        ("scores", [0.0] * 281),
        ("scores", [0] * 280),
        ("scores", [float("nan")] * 280),
        ("scores", "0" * 280),
    ],
)
def test_lists_that_do_not_fit_the_tokens(name: str, value: object) -> None:
    tokens, _ = byte_tokens(280)
    entries: dict[str, Any] = {"model": "llama", "tokens": tokens, "scores": [0.0] * 280}
    with pytest.raises(ModelFormatError, match=rf"tokenizer\.ggml\.{name} "):
        load_gguf(280, **(entries | {name: value}))


def test_tokens_without_text_have_names_of_their_own() -> None:
    tokens, merges = byte_tokens(280)
    tokens[270] = tokens[271] = ""
    made = load_gguf(model="gpt2", pre="gpt-2", tokens=tokens, merges=merges)
    assert made.decode([270, 271]) == "[EMPTY_270][EMPTY_271]"  # as llama.cpp has it


# tokenizer.json: the process that it runs in stops these.

LONGER = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1_000_000}
SPLIT = {"type": "Split", "pattern": {"Regex": r"(\w|\w\w)*\z"}, "behavior": "Isolated",
         "invert": False}  # fmt: skip
A, B = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
NOT_DONE = {"type": "TemplateProcessing", "single": [A] * 3, "pair": [A, B] * 2,
            "special_tokens": {}}  # fmt: skip
MULTIPLYING: dict[str, dict[str, Any]] = {
    "a normalizer that makes a megabyte of a character, twice": {
        "normalizer": {"type": "Sequence", "normalizers": [LONGER] * 2}
    },
    "a pattern that tries everything": {"pre_tokenizer": SPLIT},
    "a panic": {"post_processor": {"type": "Sequence", "processors": [NOT_DONE] * 3}},
    "a model that knows no word": {
        "model": {"type": "WordLevel", "vocab": {"<|im_end|>": 2}, "unk_token": "?"}
    },
}


@pytest.mark.parametrize("name", MULTIPLYING)
def test_tokenizers_that_fail_on_a_text(folder: Path, name: str, tight: None) -> None:
    copy = copy_of(folder, "multiplying")
    content = json.loads((folder / "tokenizer.json").read_bytes()) | MULTIPLYING[name]
    (copy / "tokenizer.json").write_text(json.dumps(content))
    made = load_tokenizer(JsonTokenizerSource(copy))
    with bounded(), pytest.raises(ModelError, match=r"json: the tokenizer (was|failed)"):
        made.encode("a" * 300 + "!")
    assert made.decode([2]) == "", "what needs no process works on"


@pytest.mark.parametrize("ids", [{"zzz": 5}, {"zzz": 4_000_000_000}, {"zzz": 280}, {"zzz": -1}])
def test_ids_of_a_vocabulary_that_make_no_sense(folder: Path, ids: dict[str, int]) -> None:
    copy = copy_of(folder, "ids")
    content = json.loads((folder / "tokenizer.json").read_bytes())
    content["model"]["vocab"] |= ids
    (copy / "tokenizer.json").write_text(json.dumps(content))
    with bounded(), pytest.raises(ModelFormatError, match=r"tokenizer\.json"):
        load_tokenizer(JsonTokenizerSource(copy), vocabulary=280)


@pytest.mark.parametrize("content", [b"\xff", b"x" * (1 << 20) + b"x"], ids=["no text", "long"])
def test_template_files_that_make_no_sense(folder: Path, content: bytes) -> None:
    """To cut them, or to replace invalid bytes, would change the template in silence."""
    copy = copy_of(folder, "template")
    (copy / "chat_template.jinja").write_bytes(content)
    with pytest.raises(ModelFormatError, match=r"chat_template\.jinja"):
        use(copy)
