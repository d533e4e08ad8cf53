"""Damaged and hostile files: our error, within a second, within 1 GiB; never a crash or a hang."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ostinato.errors import ModelError, ModelFormatError, UnsupportedModelError
from ostinato.models.chat import render_chat
from ostinato.models.checkpoint import open_checkpoint
from ostinato.models.tokenizer import load_tokenizer
from tests.models.model_files import write_folder, write_gguf

GIB = 1 << 30
STRING, ARRAY, U32, F32_ARRAY = 8, 9, 4, 6

fuzzing = settings(
    deadline=None,  # time is bounded by `bounded`, which says what it measured
    max_examples=150,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@contextlib.contextmanager
def bounded(seconds: float = 60.0) -> Iterator[None]:
    """Fails if the block runs away: so long, which no sound file comes near on any machine, or more
    than 1 GiB of addresses (Linux)."""
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


def use(path: Path) -> None:
    """Everything that is done with a model file before it runs."""
    with open_checkpoint(path) as checkpoint:
        for name in checkpoint.tensor_names():
            assert checkpoint.tensor(name).shape == checkpoint.raw(name).shape
        tokenizer = load_tokenizer(checkpoint.tokenizer, vocabulary=checkpoint.config.vocabulary)
        ids = tokenizer.encode("the 12 é")
        tokenizer.decode(ids)
        if tokenizer.chat_template is not None:
            render_chat(tokenizer.chat_template, [{"role": "user", "content": "x"}])


def survives(path: Path) -> None:
    """The file is either fine or refused with our error, in time."""
    with bounded(), contextlib.suppress(ModelError):
        use(path)


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
HOSTILE: dict[str, tuple[bytes, type[ModelError]]] = {
    "empty": (b"", ModelFormatError),
    "magic only": (b"GGUF", ModelFormatError),
    "wrong magic": (head(magic=b"GGML"), ModelFormatError),
    "version 1": (head(version=1), UnsupportedModelError),
    "version 99": (head(version=99), UnsupportedModelError),
    "big-endian": (head(version=3 << 24), UnsupportedModelError),
    "tensor count": (head(tensors=HUGE), ModelFormatError),
    "entry count": (head(entries=HUGE), ModelFormatError),
    "plausible counts": (head(tensors=1 << 13, entries=1 << 11, data=1 << 20), ModelFormatError),
    "key length": (head(struct.pack("<Q", HUGE), entries=1), ModelFormatError),
    "text length": (head(entry("k", STRING, struct.pack("<Q", HUGE)), entries=1), ModelFormatError),
    "not UTF-8": (head(entry("k", STRING, text(b"\xff\xfe")), entries=1), ModelFormatError),
    "value type": (head(entry("k", 77, b""), entries=1), ModelFormatError),
    "key twice": (head(LLAMA, LLAMA, entries=2), ModelFormatError),
    "array count": (head(entry("k", ARRAY, array(STRING, HUGE)), entries=1), ModelFormatError),
    "array of arrays": (head(entry("k", ARRAY, array(ARRAY, 1)), entries=1), ModelFormatError),
    "numbers": (head(entry("k", ARRAY, array(F32_ARRAY, HUGE)), entries=1), ModelFormatError),
    "overflowing numbers": (
        head(entry("k", ARRAY, array(F32_ARRAY, (1 << 62) + 1)), entries=1),
        ModelFormatError,
    ),
    "a million strings": (
        head(entry("k", ARRAY, array(STRING, 1 << 20)), entries=1, data=9 << 20),
        UnsupportedModelError,  # read, in time; then there is no architecture
    ),
    "two million strings": (
        head(entry("k", ARRAY, array(STRING, 1 << 21)), entries=1, data=17 << 20),
        ModelFormatError,
    ),
    "numbers that fit": (
        head(entry("k", ARRAY, array(F32_ARRAY, 1 << 21)), entries=1, data=9 << 20),
        UnsupportedModelError,
    ),
    "alignment 0": (
        head(entry("general.alignment", U32, bytes(4)), entries=1),
        ModelFormatError,
    ),
    "alignment 7": (
        head(entry("general.alignment", U32, struct.pack("<I", 7)), entries=1),
        ModelFormatError,
    ),
    "no dimensions": (head(tensor(shape=()), tensors=1), ModelFormatError),
    "nine dimensions": (head(tensor(shape=(1,) * 9), tensors=1), ModelFormatError),
    "zero rows": (head(tensor(shape=(32, 0)), tensors=1), ModelFormatError),
    "huge shape": (head(tensor(shape=(1 << 40, 1 << 40)), tensors=1), ModelFormatError),
    "larger than the file": (head(tensor(shape=(1 << 20,)), tensors=1), ModelFormatError),
    "offset": (head(tensor(offset=1 << 62), tensors=1), ModelFormatError),
    "offset unaligned": (head(tensor(offset=4), tensors=1), ModelFormatError),
    "overlap": (
        head(tensor(b"a", (64,)), tensor(b"b", (64,), offset=32), tensors=2),
        ModelFormatError,
    ),
    "name twice": (
        head(tensor(b"a"), tensor(b"a", offset=128), tensors=2),
        ModelFormatError,
    ),
    "quantisation unknown": (head(tensor(kind=4242), tensors=1), UnsupportedModelError),
    "quantisation unsupported": (
        head(tensor(shape=(256,), kind=16), tensors=1),
        UnsupportedModelError,
    ),
    "rows that are no blocks": (head(tensor(shape=(33,), kind=8), tensors=1), ModelFormatError),
    "no architecture": (head(), UnsupportedModelError),
    "architecture is a list": (
        head(entry("general.architecture", ARRAY, array(STRING, 1, text(b"llama"))), entries=1),
        UnsupportedModelError,
    ),
    "nothing but the architecture": (head(LLAMA, entries=1), ModelFormatError),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_heads(scratch: Path, name: str) -> None:
    content, error = HOSTILE[name]
    scratch.write_bytes(content)
    with bounded(), pytest.raises(error) as caught:
        use(scratch)
    assert str(scratch) in str(caught.value)  # says which file
    assert len(str(caught.value)) < 1000


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


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
@fuzzing
@given(data=st.data())
def test_mutated_json(
    data: st.DataObject, name: str, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    copy = folder.parent / f"copy-{name}"
    if not copy.exists():
        shutil.copytree(folder, copy)
    (copy / name).write_bytes(mutated((folder / name).read_bytes(), data.draw))
    survives(copy)


@fuzzing
@given(data=st.data())
def test_mutated_safetensors_head(data: st.DataObject, folder: Path) -> None:
    copy = folder.parent / "copy-head"
    if not copy.exists():
        shutil.copytree(folder, copy)
    whole = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(whole[:8], "little")
    changed = mutated(whole[8 : 8 + size], data.draw)
    (copy / "model.safetensors").write_bytes(
        len(changed).to_bytes(8, "little") + changed + whole[8 + size :]
    )
    survives(copy)


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
def test_nasty_json(folder: Path, tmp_path: Path, name: str, file: str) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    content = NASTY_JSON[name].encode("utf-8", "surrogatepass")
    (copy / file).write_bytes(content)
    survives(copy)
    if file == "config.json":
        with pytest.raises(ModelError):
            use(copy)


def test_template_in_a_file_that_is_hostile(tmp_path: Path) -> None:
    template = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    path = write_gguf(tmp_path / "m.gguf", metadata={"tokenizer.chat_template": template})
    with bounded(), pytest.raises(ModelError, match="runs too long"):
        use(path)
