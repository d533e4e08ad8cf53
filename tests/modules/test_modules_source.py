"""Sources, options, keys, and which headers a source depends on."""

from __future__ import annotations

import math
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.driver.host.kernel import HostKernel, host_kernel
from ostinato.errors import InputError
from ostinato.modules import CompileOptions, Source
from ostinato.modules.source import (
    as_options,
    as_source,
    digest_of,
    flags_of,
    include_dirs,
    kernel,
    only_kernel_of,
    pre_includes,
    reads_files,
)

PARTS = st.lists(st.one_of(st.none(), st.integers(), st.text(), st.binary()), max_size=6)


@host_kernel("x: *f32, n: u32")
def scale(launch, x, n):
    x[:n] *= 2


# ------------------------------------------------------------------------------------------ sources


def test_a_source_takes_signatures_from_its_host_kernels() -> None:
    source = Source("text", host=[scale], signatures={"other": "y: *f32"})
    assert source.signature("scale") is scale.signature
    assert source.signature("other").parameters[0].name == "y"
    assert source.signature("third") is None


def test_a_given_signature_wins() -> None:
    source = Source("text", host={"scale": scale}, signatures={"scale": "z: *f32"})
    assert source.signature("scale").parameters[0].name == "z"


def test_equal_content_is_an_equal_source() -> None:
    one, two = Source("text", headers={"a.h": "1"}), Source("text", headers={"a.h": "1"})
    assert one == two and hash(one) == hash(two)
    assert one != Source("text", headers={"a.h": "2"})
    assert one != Source("other", headers={"a.h": "1"})
    assert Source("text", host=[scale]) != Source("text")


def test_a_source_cannot_be_changed() -> None:
    source = Source("text")
    with pytest.raises(AttributeError, match="cannot assign to field"):
        source.cuda = "other"
    with pytest.raises(TypeError):
        source.headers["a.h"] = "x"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "is empty"),
        ({"cuda": "x", "data": b"y"}, "not a mixture"),
        ({"cuda": "x", "kind": "ptx"}, "not a mixture"),
        ({"data": b"x", "kind": "hip"}, "kind 'hip' is not known"),
        ({"cuda": "a\0b"}, "zero byte"),
        ({"host": {"f": lambda: None}}, "host_kernel"),
        ({"host": [lambda: None]}, "host_kernel"),
        ({"host": [scale, HostKernel("scale", print, scale.signature)]}, "two host .*'scale'"),
        ({"host": scale}, "host is a list .*, not HostKernel"),
        ({"cuda": "x", "headers": {"a.h": "1\0 2"}}, "'a.h'.*zero byte"),
        ({"cuda": "x", "headers": {"a\0.h": "1"}}, "zero byte"),
        ({"cuda": "x", "headers": {"a.h": b"1"}}, "'a.h'.*bytes"),
        ({"cuda": b"x"}, "cuda is text, not bytes; .*from_file"),
        ({"cuda": "// made by\n.version 8.0\n"}, r'is PTX: Source\(kind="ptx"'),
        ({"cuda": "kernels/k.cubin"}, "'kernels/k.cubin' is the name of a file"),
        ({"cuda": Path("k.cu")}, "the name of a file"),
        ({"data": "k.ptx", "kind": "ptx"}, "the name of a file"),
        ({"cuda": "x", "name": "a\0b"}, "zero byte"),
        ({"cuda": "x", "name": 3}, "name is int"),
        ({"data": 5, "kind": "cubin"}, "data is int"),
        ({"data": ["x"], "kind": "ptx"}, "data is list"),
        ({"cuda": "x", "signatures": {"k": 3}}, "'k'.* int"),
        ({"cuda": "x", "signatures": {"k": "nonsense"}}, "cannot read"),
        ({"host": [scale], "signatures": {"scal": "x: *f32"}}, "'scal', .*no entry.*: scale$"),
    ],
)
def test_what_is_no_source_is_refused(arguments: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        Source(**arguments)


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("a.cu", b"\xef\xbb\xbf// text\n__global__ void k() {}", "cuda"),
        ("a.bin", b"\x7fELF\x02 and so on", "cubin"),
        ("a.bin", b"\x50\xed\x55\xba and so on", "fatbin"),
        ("a.txt", b"// made by a compiler\n/* .target */\n.version 8.0\n.target sm_90", "ptx"),
        ("a.ptx", b"$ broken", "ptx"),
    ],
)
def test_a_file_is_read_as_what_it_holds(
    name: str, content: bytes, kind: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    source = Source.from_file(path, signatures={"k": "x: *f32"})
    assert (source.kind, source.name) == (kind, name)
    text = content.removeprefix(b"\xef\xbb\xbf")
    assert (source.cuda, source.data) == ((text.decode(), b"") if kind == "cuda" else (None, text))
    assert source.signature("k") is not None


def test_a_file_that_is_no_source_is_named(tmp_path: Path) -> None:
    (tmp_path / "latin.cu").write_bytes(b"// gr\xfc\xdfe")
    for name, said in (("latin.cu", "UTF-8"), ("missing.cu", "No such file"), ("", "directory")):
        with pytest.raises(InputError, match=rf"from_file\(.*{name}.*{said}"):
            Source.from_file(tmp_path / name)


def test_the_decorator_makes_a_source_in_both_languages() -> None:
    @kernel("x: *f32, n: u32", "extern __global__ …", name="double")
    def twice(launch, x, n):
        x[:n] *= 2

    assert isinstance(twice, Source)
    assert (twice.cuda, twice.name, [*twice.host]) == (
        "extern __global__ …",
        "double.cu",
        ["double"],
    )
    assert only_kernel_of(twice) == "double"
    with pytest.raises(InputError, match=r"'wrong' is called as wrong\(launch, x\)"):

        @kernel("x: *f32", "text")
        def wrong(x): ...


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (Source("text"), "it has 0$"),
        (Source("text", host=[scale], signatures={"a": "x: *f32"}), "it has 2: a, scale"),
    ],
)
def test_a_name_is_left_out_where_there_is_one_kernel_alone(source: Source, said: str) -> None:
    with pytest.raises(InputError, match=f"name the kernel .*{said}"):
        only_kernel_of(source)


def test_text_and_host_kernels_are_sources() -> None:
    assert as_source("text").cuda == "text"
    assert as_source(scale).host == {"scale": scale}
    with pytest.raises(InputError, match="int is no kernel source"):
        as_source(3)
    for name in ("scale.cu", Path("scale.cu")):
        with pytest.raises(InputError, match=r"scale.cu'.* is the name of a file.*from_file"):
            as_source(name)


# ------------------------------------------------------------------------------------------ options


def test_options_are_normalised() -> None:
    one = CompileOptions(defines={"N": 3, "FLAG": None}, include=[Path("/a")])
    assert one == CompileOptions(defines=(("N", "3"), ("FLAG", None)), include=("/a",))
    assert hash(one) == hash(CompileOptions(defines={"N": "3", "FLAG": None}, include=["/a"]))


def test_options_in_the_compilers_words() -> None:
    options = CompileOptions(
        std="c++20",
        defines={"N": "3", "FLAG": None},
        include=["/a"],
        fast_math=True,
        max_registers=64,
        line_info=True,
        extra=["--restrict"],
    )
    assert flags_of(options) == (
        "--std=c++20",
        "--define-macro=N=3",
        "--define-macro=FLAG",
        "--include-path=/a",
        "--use_fast_math",
        "--maxrregcount=64",
        "--generate-line-info",
        "--restrict",
    )


NO_MACROS = [True, False, np.True_, b"1", [1], math.inf, np.float32("nan"), Fraction(10**400)]
WRONG: list[tuple[dict[str, Any], str]] = [
    *(({"defines": {"FLAG": value}}, "'FLAG'.*text or a number") for value in NO_MACROS),
    *(({"fast_math": value}, "fast_math=.*True or False") for value in ("no", 0, 1, None)),
    ({"line_info": 1}, "line_info=.*True or False"),
    ({"arch": "hopper"}, "."),
    ({"max_registers": 8}, "."),
    ({"include": "/a"}, "."),
    ({"extra": "--flag"}, "."),
    ({"extra": ["-arch=sm_90"]}, "."),
    ({"arch": 90}, "."),
    ({"max_registers": "32"}, "."),
    ({"max_registers": 32.0}, "."),
    ({"std": None}, "."),
    ({"std": "c++17\0"}, "."),
    ({"include": ["/a\0b"]}, "."),
    ({"extra": ["-DN=1\0 2"]}, "."),
    ({"extra": [3]}, "."),
    ({"defines": {"N": "1\0 2"}}, "."),
    ({"defines": ["N"]}, "."),
]


@pytest.mark.parametrize(("wrong", "said"), WRONG, ids=lambda one: repr(one)[:20])
def test_wrong_options_are_refused(wrong: dict[str, Any], said: str) -> None:
    """`#if FLAG` is false where FLAG is the word True, as Python writes it."""
    with pytest.raises(InputError, match=said):
        CompileOptions(**wrong)


def test_macros_have_the_value_of_the_number() -> None:
    """In C++ 1/3 is 0, and Number.THREE is a syntax error."""

    class Number(int, Enum):
        THREE = 3

    class Word(str, Enum):  # noqa: UP042 - str() of a StrEnum is its value already
        THREE = "3"

    assert CompileOptions(defines={"N": np.int32(3)}).defines == (("N", "3"),)
    given = {"A": Number.THREE, "B": Word.THREE, "C": Fraction(1, 4), "D": 0.5, "E": 2**64}
    values = dict(CompileOptions(defines=given).defines)
    assert values == {"A": "3", "B": "3", "C": "0.25", "D": "0.5", "E": str(2**64)}
    assert type(values["B"]) is str


def test_plain_flags_are_options() -> None:
    assert as_options(["--restrict"]) == CompileOptions(extra=("--restrict",))
    assert as_options(()) == CompileOptions()
    with pytest.raises(InputError, match="list of flags"):
        as_options("--restrict")


def test_folders_and_files_in_flags_are_found() -> None:
    flags = ("-I/a", "--include-path=/b", "-I", "/c", "--restrict", "--pre-include=d.h", "-I /e")
    assert include_dirs(flags) == ("/a", "/b", "/c", "/e")
    assert include_dirs(["-I=/f", "-I=", "--include-path=", "-I/g"]) == ("/f", "", "", "/g")
    assert pre_includes(flags) == ("d.h",)
    assert not reads_files((*flags, "--ptxas-options=-v", "-Xptxas", "-O1"))


@pytest.mark.parametrize(
    "flag",
    [
        *("--use-pch=x", "--create_pch", "-pch", "--pch-dir=/x", "-Xcudafe", "@file"),
        "--use-bundled-headers=/x",
        *("--options-file=x", "-optf", "--ptxas-options=--options-file=x", "-Xptxas=@x"),
        *("-Xptxas=-optf=x", "--ptxas-options=-O1 -optf=x"),
        *("-Xptxas=--apply-controls=x", "-Xnvvm=-apply-controls=x", "-apply-controls=x"),
    ],
)
def test_flags_that_make_the_compiler_read_files_are_known(flag: str) -> None:
    assert reads_files(("--restrict", flag))


# --------------------------------------------------------------------------------------------- keys


@given(PARTS, PARTS)
def test_different_parts_give_different_keys(one: list[object], two: list[object]) -> None:
    same = one == two and [type(p) for p in one] == [type(p) for p in two]
    assert (digest_of(one) == digest_of(two)) == same
