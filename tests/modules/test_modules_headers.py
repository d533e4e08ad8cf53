"""Random header trees in odd spellings: after any change, an answer is a fresh cache's answer."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ostinato.errors import CompileError
from ostinato.modules import CompileOptions, DiskStore, ModuleCache, Source
from ostinato.modules.compiler import is_current, plan_compilation, toolchain
from ostinato.modules.source import flags_of
from tests.modules.cubin_loader import CubinLoader, make_cache, needs_nvrtc

pytestmark = needs_nvrtc()

FOLDERS = ("one", "two", "two/deep")
NAMES = ("a.h", "b.h", "deep/a.h", "deep/b.h", "../one/b.h")
PLACES = (
    "one/a.h",
    "one/b.h",
    "one/deep/a.h",
    "two/b.h",
    "two/a.h",
    "two/deep/b.h",
    "two/deep/a.h",
)

# {n} is the header's name, {t} the name in its delimiters, {u} a number of its own.
INCLUDES = (
    "#include {t}",
    "\f#\vinclude{t}",
    "%:include {t}",
    "#/* x */include/**/{t} // y",
    "#incl\\\nude {t}",
    'static_assert(sizeof("/*") == 3);\n/**/ #include {t}',
    "// /*\n/**/ #include {t}\n// */",
    "/* // */ #include {t} /* #include <none.h> */",
    'static_assert(sizeof(R"(/*")") == 4);\n/**/#include {t}',
    "#define N{u} {t}\n#include N{u}",
    '#if 0\n#include "none.h"\n#else\n#include {t}\n#endif',
    "#include_next {t}",
    '#include "ROOT/one/{n}"',
    '#define A{u} "ROOT/two/{n}"\n#include A{u}',
)
PROBES = (
    "__has_include({t})",
    "defined(__has_include) && __has_include( {t} )",
    "0 || (__has_include({t}))",
    '__has_include("ROOT/two/{n}") && __has_include({t})',
    "/**/ 1 && __has_include /**/ ({t})",
    "__has_\\\ninclude({t})",
    "HAS{u}({t})",
    "NAMED{u}",
    "CAT{u}(__has_, include)({t})",
    "EACH{u}(_, _has_, inc, lude)({t})",
)


@dataclass(frozen=True)
class Line:
    """Something that a header does, and whether it asks first."""

    include: int
    name: str
    angle: bool
    probe: int | None

    def text(self, root: Path, unique: str) -> str:
        words = {
            "n": self.name,
            "u": unique,
            "t": f"<{self.name}>" if self.angle else f'"{self.name}"',
        }
        include = INCLUDES[self.include].format(**words)
        if self.probe is not None:
            condition = PROBES[self.probe].format(**words)
            include = (
                f"#define CAT{unique}(x, y) x##y\n"
                f"#define EACH{unique}(a, b, c, d) a##b##c##d\n"
                f"#define HAS{unique}(x) __has_include(x)\n"
                f"#define NAMED{unique} __has_include({words['t']})\n"
                f"#if {condition}\n{include}\nv = v * 31 + 1;\n#else\nv = v * 31 + 2;\n#endif"
            )
        return include.replace("ROOT", str(root))


LINES = st.builds(
    Line,
    include=st.integers(0, len(INCLUDES) - 1),
    name=st.sampled_from(NAMES),
    angle=st.booleans(),
    probe=st.none() | st.integers(0, len(PROBES) - 1),
)


@dataclass(frozen=True)
class Header:
    number: int
    lines: tuple[Line, ...]

    def text(self, root: Path, place: str) -> str:
        unique = "".join(c if c.isalnum() else "_" for c in place)
        lines = [line.text(root, f"{unique}{i}") for i, line in enumerate(self.lines)]
        guarded = [f"#ifndef SEEN_{unique}", f"#define SEEN_{unique}", *lines, "#endif"]
        return "\n".join([f"v = v * 31 + {self.number};", *guarded, ""])


HEADERS = st.builds(Header, st.integers(10, 9999), st.lists(LINES, max_size=1).map(tuple))
TREES = st.fixed_dictionaries({place: HEADERS | HEADERS | HEADERS | st.none() for place in PLACES})


def write(root: Path, place: str, header: Header | None) -> None:
    path = root / place
    if header is None:
        path.unlink(missing_ok=True)
        with suppress(
            OSError
        ):  # a folder goes with its last header, if it is not one of the searched
            if path.parent.relative_to(root).as_posix() not in FOLDERS:
                path.parent.rmdir()
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(header.text(root, place))


def answer(cache: ModuleCache, loader: CubinLoader, source: Source, options: CompileOptions) -> str:
    try:
        kernel = cache.get_or_compile(source, "k", options=options)
    except CompileError:
        return "does not compile"
    return loader.digests[kernel.module._handle]


def compiled_anew(source: Source, options: CompileOptions) -> bytes:
    """Straight from the compiler, past everything that remembers; b"" if it does not compile."""
    flags = [*flags_of(options), "--gpu-architecture=sm_90"]
    return toolchain.library().compile(source.cuda, source.name, source.headers, flags).data


@settings(
    deadline=None,
    max_examples=settings().max_examples // 12,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    tree=TREES,
    lines=st.lists(LINES, min_size=1, max_size=3),
    memory=st.none() | st.tuples(st.sampled_from(NAMES[:2]), st.lists(LINES, max_size=2)),
    folders=st.permutations(FOLDERS),
    last=st.tuples(st.sampled_from(PLACES), st.none() | HEADERS),
)
def test_an_answer_is_that_of_a_fresh_cache(tree, lines, memory, folders, last) -> None:
    root = Path(tempfile.mkdtemp(prefix="ostinato-headers-"))
    try:
        for folder in FOLDERS:
            (root / folder).mkdir(parents=True, exist_ok=True)
        for place, header in tree.items():
            write(root, place, header)
        body = "\n".join(line.text(root, f"main{i}") for i, line in enumerate(lines))
        headers = {}
        if memory is not None:
            name, held = memory
            headers[name] = "\n".join(line.text(root, f"memory{i}") for i, line in enumerate(held))
        source = Source(
            f'extern "C" __global__ void k(unsigned* x) {{\nunsigned v = 1;\n{body}\n*x = v;\n}}\n',
            headers=headers,
        )
        options = CompileOptions(include=[root / folder for folder in folders])
        store = DiskStore(root / "store")
        cache, loader = make_cache(store)
        before = answer(cache, loader, source, options)
        kept = store.load(plan_compilation(source, options, (9, 0)).key)
        if kept is not None:
            assert is_current(kept.inputs)
            # One header after the other comes, goes or becomes another.
            for place in PLACES:
                for header in (None, Header(12345, ())):
                    write(root, place, header)
                    if is_current(kept.inputs):
                        assert compiled_anew(source, options) == kept.data, (place, header)
                write(root, place, tree[place])
            assert is_current(kept.inputs)
            assert answer(*make_cache(store), source, options) == before
        write(root, *last)
        right = answer(*make_cache(), source, options)
        assert answer(*make_cache(store), source, options) == right, "from disk"
        assert answer(cache, loader, source, options) == right, "from memory"
    finally:
        shutil.rmtree(root)
