"""Sources, options, keys, and which headers a source depends on."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.driver.host_kernel import host_kernel
from ostinato.errors import InputError
from ostinato.modules import CompileOptions, Source
from ostinato.modules.headers import find_dependencies
from ostinato.modules.keys import digest_of
from ostinato.modules.options import (
    as_options,
    flags_of,
    include_dirs,
    pre_includes,
    reads_files,
)
from ostinato.modules.source import as_source

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
    with pytest.raises(AttributeError, match="cannot be changed"):
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
        ({"cuda": "x", "signatures": {"k": "nonsense"}}, "cannot read"),
    ],
)
def test_what_is_no_source_is_refused(arguments: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        Source(**arguments)


def test_text_and_host_kernels_are_sources() -> None:
    assert as_source("text").cuda == "text"
    assert as_source(scale).host == {"scale": scale}
    with pytest.raises(InputError, match="int is no kernel source"):
        as_source(3)


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


@pytest.mark.parametrize(
    "wrong",
    [
        {"arch": "hopper"},
        {"max_registers": 8},
        {"include": "/a"},
        {"extra": "--flag"},
        {"extra": ["-arch=sm_90"]},
    ],
)
def test_wrong_options_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InputError):
        CompileOptions(**wrong)


def test_plain_flags_are_options() -> None:
    assert as_options(["--restrict"]) == CompileOptions(extra=("--restrict",))
    assert as_options(()) == CompileOptions()
    with pytest.raises(InputError, match="list of flags"):
        as_options("--restrict")


def test_folders_and_files_in_flags_are_found() -> None:
    flags = ("-I/a", "--include-path=/b", "-I", "/c", "--restrict", "--pre-include=d.h")
    assert include_dirs(flags) == ("/a", "/b", "/c")
    assert pre_includes(flags) == ("d.h",)
    assert not reads_files(flags)
    assert reads_files((*flags, "--use-pch=x"))


# --------------------------------------------------------------------------------------------- keys


@given(PARTS, PARTS)
def test_different_parts_give_different_keys(one: list[object], two: list[object]) -> None:
    same = one == two and [type(p) for p in one] == [type(p) for p in two]
    assert (digest_of(one) == digest_of(two)) == same


# ------------------------------------------------------------------------------------------ headers


def write(folder: Path, **files: str) -> None:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.h").write_text(text)


def test_includes_are_followed(tmp_path: Path) -> None:
    write(tmp_path / "inc", a='#include "b.h"\n', b="#include <none.h>\n", other="")
    found = find_dependencies('#include "a.h"\n', {}, [str(tmp_path / "inc")])
    assert [Path(f.path).name for f in found.files] == ["a.h", "b.h"]
    assert found.missing == ("none.h",)
    assert found.exact


def test_every_folder_that_could_answer_counts(tmp_path: Path) -> None:
    write(tmp_path / "one")
    write(tmp_path / "two", a="2")
    folders = [str(tmp_path / "one"), str(tmp_path / "two")]
    before = find_dependencies("#include <a.h>\n", {}, folders)
    assert before.unchanged()
    write(tmp_path / "one", a="1")
    assert not before.unchanged()
    assert len(find_dependencies("#include <a.h>\n", {}, folders).files) == 2


def test_a_changed_header_is_noticed(tmp_path: Path) -> None:
    write(tmp_path, a="1")
    before = find_dependencies("#include <a.h>\n", {}, [str(tmp_path)])
    write(tmp_path, a="22")
    assert not before.unchanged()
    after = find_dependencies("#include <a.h>\n", {}, [str(tmp_path)])
    assert before.files[0].digest != after.files[0].digest


def test_a_header_in_memory_is_not_missing(tmp_path: Path) -> None:
    write(tmp_path, b="1")
    found = find_dependencies('#include "a.h"\n', {"a.h": "#include <b.h>\n"}, [str(tmp_path)])
    assert [Path(f.path).name for f in found.files] == ["b.h"]
    assert found.missing == ()


def test_includes_that_include_each_other_end(tmp_path: Path) -> None:
    write(tmp_path, a='#include "b.h"', b='#include "a.h"')
    assert len(find_dependencies('#include "a.h"', {}, [str(tmp_path)]).files) == 2


@pytest.mark.parametrize(
    "text",
    [
        '#include "a.h"',
        "  #  include <a.h>",
        '#inc\\\nlude "a.h"',
        '/* x */ #include "a.h"',
        '#/* x */include "a.h"',
        '#include /* x */ "a.h"',
        '%:include "a.h"',
        'const char* s = "/*";\n#include "a.h"\nconst char* t = "*/";',
        "// /*\n#include <a.h>\n// */",
        "#if 0\n#include <a.h>\n#endif",
        "#if __has_include(<a.h>)\n#endif",
    ],
)
def test_no_spelling_of_an_include_is_missed(text: str, tmp_path: Path) -> None:
    write(tmp_path, a="1")
    found = find_dependencies(text + "\n", {}, [str(tmp_path)])
    assert len(found.files) == 1, text
    assert found.exact


@pytest.mark.parametrize("text", ["#include NAME", "#include_next <a.h>", '#embed "data"'])
def test_what_cannot_be_followed_is_said(text: str, tmp_path: Path) -> None:
    assert not find_dependencies(text + "\n", {}, [str(tmp_path)]).exact
