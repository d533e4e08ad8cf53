"""The compiler, without a GPU: keys, logs, names and PTX."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import ostinato as ost
from ostinato.errors import CompileError, InputError
from ostinato.modules import CompileOptions, Source
from ostinato.modules import compiler as compiler_module
from ostinato.modules.compiler import (
    check_ptx,
    compile_plan,
    is_current,
    plan_compilation,
    target_arch,
)
from ostinato.modules.cubin import kernel_names, kernel_resources
from ostinato.modules.nvrtc import CompilerFile, Toolchain
from tests.modules.cubin_loader import kernel_text, needs_nvrtc

pytestmark = needs_nvrtc()

H100 = (9, 0)


@ost.host_kernel("x: *u32")
def one_word(launch: object, x: object) -> None: ...


TEXT = kernel_text(1)


def key(source: Source | str = TEXT, capability=H100, expressions=(), **options: object) -> bytes:
    known = Source(source) if isinstance(source, str) else source
    return plan_compilation(known, CompileOptions(**options), capability, expressions).key


# --------------------------------------------------------------------------------------------- keys


def test_the_key_covers_everything_that_matters(tmp_path: Path, monkeypatch) -> None:
    keys = {
        "plain": key(),
        "text": key(TEXT + " "),
        "name": key(Source(TEXT, name="other.cu")),
        "header": key(Source(TEXT, headers={"a.h": "1"})),
        "header text": key(Source(TEXT, headers={"a.h": "2"})),
        "capability": key(capability=(8, 0)),
        "arch": key(arch="sm_90a"),
        "std": key(std="c++20"),
        "define": key(defines={"A": None}),
        "define value": key(defines={"A": "1"}),
        "fast": key(fast_math=True),
        "registers": key(max_registers=64),
        "lines": key(line_info=True),
        "extra": key(extra=["--restrict"]),
        "folder": key(include=[tmp_path]),
        "relative folder": key(include=["a"]),
        "expression": key(expressions=["k<1>"]),
    }
    monkeypatch.chdir(tmp_path)
    keys["current folder"] = key(include=["a"])
    monkeypatch.setenv("NVRTC_APPEND_FLAGS", "--restrict")
    keys["environment"] = key()
    assert len(set(keys.values())) == len(keys)


def test_the_same_question_has_the_same_key() -> None:
    assert key() == key() == key(Source(TEXT))


def test_the_compilers_version_is_in_the_key(monkeypatch) -> None:
    before = key()
    other = CompilerFile("libnvrtc.so.99", 1, 1)
    monkeypatch.setattr(compiler_module, "toolchain", Toolchain(find=lambda: other))
    assert key() != before


# ---------------------------------------------------------------------------------------- compiling


def compiled(source: Source | str, expressions=(), **options: object):
    known = Source(source) if isinstance(source, str) else source
    return compile_plan(plan_compilation(known, CompileOptions(**options), H100, expressions))


def test_headers_come_from_memory_and_from_folders(tmp_path: Path) -> None:
    (tmp_path / "disk.h").write_text("#define B 2\n")
    source = Source(
        '#include "deep/memory.h"\n#include <disk.h>\n'
        'extern "C" __global__ void k(int* x) { x[0] = A + B; }\n',
        headers={"deep/memory.h": "#define A 1\n"},
    )
    assert kernel_names(compiled(source, include=[tmp_path]).data) == ("k",)


def test_the_toolkits_headers_are_there() -> None:
    text = (
        "#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n"
        'extern "C" __global__ void k(__half* x, __nv_bfloat16* y) { x[0] += __half(1.f); }\n'
    )
    assert kernel_names(compiled(text).data) == ("k",)


def test_the_toolkits_own_headers_find_those_beside_them() -> None:
    names = ["cooperative_groups.h", "cuda_pipeline.h"]
    if compiler_module.toolchain.library().version >= (13, 0):
        names.append("mma.h")  # needs crt/mma.h, which for CUDA 12 only nvcc's package has
    answer = compiled("".join(f"#include <{name}>\n" for name in names) + TEXT)
    assert kernel_names(answer.data) == ("k",) and not answer.log


def test_headers_in_folders_find_those_beside_them(tmp_path: Path) -> None:
    for folder, value in (("one", 1), ("two", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "outer.h").write_text('#include "inner.h"\n')
        (tmp_path / folder / "inner.h").write_text(f"#define IS_{value} 1\n")
    text = '#include "one/outer.h"\n#include "two/outer.h"\nstatic_assert(IS_1 + IS_2 == 2);\n'
    answer = compiled(text + TEXT, include=[tmp_path])
    assert kernel_names(answer.data) == ("k",)
    assert [Path(file.path).relative_to(tmp_path).as_posix() for file in answer.inputs.files] == [
        *("one/inner.h", "one/outer.h", "two/inner.h", "two/outer.h")
    ]
    assert answer.inputs.unchanged() and is_current(answer.inputs) and not answer.inputs.fixed
    (tmp_path / "two" / "inner.h").write_text("#define IS_2 3\n")
    assert not answer.inputs.unchanged() and not is_current(answer.inputs)


@pytest.mark.parametrize(
    ("text", "headers"),
    [
        ('#include "stray.h"\n', {}),
        ('#include "memory.h"\n', {"memory.h": '#include "stray.h"\n'}),
        ('#include "deep/memory.h"\n', {"deep/memory.h": '#include "stray.h"\n'}),
        ('#include "up/memory.h"\n', {"up/memory.h": '#include "../stray.h"\n'}),
    ],
)
def test_the_current_folder_is_not_searched(tmp_path, monkeypatch, text, headers) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "up").mkdir()
    for folder in (tmp_path, tmp_path / "deep"):
        (folder / "stray.h").write_text("#define A 1\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CompileError, match=r"cannot open source file|could not open source file"):
        compiled(Source(text + TEXT, headers=headers))


def test_headers_in_memory_include_each_other() -> None:
    source = Source(
        '#include "deep/one.h"\n#include <two.h>\nstatic_assert(ONE + TWO == 3);\n' + TEXT,
        headers={
            "deep/one.h": '#pragma once\n#include "two.h"\n#define ONE 1\n',
            "two.h": '#pragma once\n#include "deep/one.h"\n#define TWO 2\n',
        },
    )
    assert kernel_names(compiled(source).data) == ("k",)


def test_messages_and_file_names_are_the_sources_own() -> None:
    name = 'odd "name"\\.cu'
    text = "__device__ const char* f() { return __FILE__; } int unused_error\n"
    with pytest.raises(CompileError) as caught:
        compiled(Source(text, name=name))
    assert name in str(caught.value) and "ostinato-memory" not in str(caught.value)
    size = len(name) + 1
    assert compiled(Source(f"static_assert(sizeof(__FILE__) == {size});\n" + TEXT, name=name))


def test_an_error_shows_log_and_source_line() -> None:
    text = "// first\n__global__ void k(float* x) {\n  x[0] = missing;\n}\n"
    with pytest.raises(CompileError) as caught:
        compiled(Source(text, name="bad.cu"))
    assert "bad.cu(3): error" in caught.value.log
    message = str(caught.value)
    assert "bad.cu does not compile for sm_90" in message
    assert ">    3 |   x[0] = missing;" in message
    assert str(compiler_module.toolchain.library()) in message and "NVRTC 1" in message


def test_an_error_in_a_header_shows_the_headers_line() -> None:
    source = Source('#include "a.h"\n', headers={"a.h": "\n\nnonsense here\n"})
    with pytest.raises(CompileError, match=r"a\.h, line 3:\n(.*\n)*>    3 \| nonsense here"):
        compiled(source)


def test_a_flag_that_is_not_known_is_a_compile_error() -> None:
    with pytest.raises(CompileError, match="no-such-flag"):
        compiled(TEXT, extra=["--no-such-flag"])


def test_unicode_in_cuda_text_is_fine() -> None:
    assert kernel_names(compiled("// größer, 大\n" + TEXT).data) == ("k",)


def test_templates_are_named_in_cpp() -> None:
    text = "namespace a { template <class T, int N> __global__ void t(T* x) { x[0] = N; } }\n"
    answer = compiled(text, ["a::t<float, 3>"])
    assert kernel_names(answer.data) == (answer.lowered["a::t<float, 3>"],)


def test_a_template_that_is_not_there_is_a_compile_error() -> None:
    with pytest.raises(CompileError, match="nothere"):
        compiled(TEXT, ["nothere<int>"])


def test_ptx_is_made_for_a_device_newer_than_the_compiler() -> None:
    arch = target_arch((99, 0), CompileOptions())
    assert arch.startswith("compute_")
    plan = plan_compilation(Source(TEXT), CompileOptions(), (99, 0))
    answer = compile_plan(plan)
    assert answer.kind == "ptx" and b".entry k" in answer.data


def test_a_device_older_than_the_compiler_is_refused() -> None:
    with pytest.raises(InputError, match=r"compute capability 3\.5"):
        target_arch((3, 5), CompileOptions())


def test_many_threads_compile_at_once() -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda n: compiled(kernel_text(n)), range(8)))
    counts = [len(kernel_resources(a.data)[0].parameters) for a in answers]
    assert counts == [n + 1 for n in range(8)]


# ----------------------------------------------------------------------------------------- PTX (C5)

PTX = b".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k() { ret; }\n"


def test_sound_ptx_passes_unchanged() -> None:
    source = Source(data=PTX, kind="ptx")
    plan = plan_compilation(source, CompileOptions(), H100)
    assert compile_plan(plan).data == PTX
    assert not plan.storable


def test_ptx_with_bytes_that_are_not_ascii_says_where() -> None:
    text = PTX.decode() + "// naïve\n"
    with pytest.raises(CompileError) as caught:
        plan_compilation(Source(data=text, kind="ptx", name="my.ptx"), CompileOptions(), H100)
    message = str(caught.value)
    assert "my.ptx(5): column 6: byte 0xc3 is not ASCII" in message
    assert "5 | // naïve" in message


def test_positions_count_from_one() -> None:
    with pytest.raises(CompileError, match=r"p\(1\): column 1: byte 0xff"):
        check_ptx(b"\xff", "p")


def test_options_are_not_for_compiled_code() -> None:
    with pytest.raises(InputError, match="options are for CUDA"):
        plan_compilation(Source(data=PTX, kind="ptx"), CompileOptions(fast_math=True), H100)


# --------------------------------------------------------------------------------- without a device

SEVERAL = """
extern "C" __global__ void k(float* x, int n) { if (threadIdx.x < n) x[threadIdx.x] *= 2; }
template <typename T> __global__ void t(T* x, T by) { *x *= by; }
__global__ void plain() {}
"""


def test_kernels_are_compiled_and_reported_without_a_device() -> None:
    source = Source(SEVERAL, signatures={"k": "x: *f32, n: i32", "t<double>": "x: *f64, by: f64"})
    made = ost.compile(source, "plain", "t<float>", arch="sm_80")
    assert made.arch == "sm_80" and made.data.startswith(b"\x7fELF")
    assert [*made.symbols] == ["plain", "t<float>", "k", "t<double>"]
    assert [slot.size for slot in made["t<double>"].parameters] == [8, 8]
    assert made["k"].registers > 0 and made["k"].frame == 0
    assert made["plain"].name == "_Z5plainv" and made["plain"].parameters == ()
    with pytest.raises(InputError, match=r"no kernel 'kk'; there are: .*Did you mean 'k'"):
        made["kk"]


@pytest.mark.parametrize(
    ("source", "names", "options", "said"),
    [
        (Source(SEVERAL), ("t",), {}, "no kernel 't'; there are: _Z5plainv, k"),
        (Source(SEVERAL, signatures={"kk": "x: *f32"}), (), {}, "Did you mean 'k'"),
        (Source(SEVERAL, signatures={"k": "x: *f32"}), (), {}, "takes 2 parameters"),
        (Source(SEVERAL, signatures={"k": "x: *f32, n: i64"}), (), {}, "'n' has 8; mend"),
        (Source(SEVERAL, signatures={"plain": "x: *f32"}), (), {}, "takes 0 parameters"),
        (Source("", signatures={}), ("k",), {}, "there are: no kernels at all"),
        (Source(SEVERAL), (), {"arch": "compute_90"}, "like 'sm_90'"),
        (Source(kind="ptx", data=".version 8.0"), (), {}, "it is ptx, which the driver loads"),
        (Source(host=[one_word]), (), {}, "no CUDA C.. to compile$"),
    ],
)
def test_what_a_gpu_would_refuse_is_refused_without_one(
    source: Source, names: tuple[str, ...], options: dict[str, str], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        ost.compile(source, *names, **options)


def test_code_that_does_not_compile_raises_without_a_device() -> None:
    with pytest.raises(CompileError, match=r"broken.cu\(2\): error(.|\n)*>    2 \| "):
        ost.compile(Source("\nnonsense", name="broken.cu"))
