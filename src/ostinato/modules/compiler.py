"""Compiles CUDA C++ to code for one architecture, with NVRTC.

NVRTC is called directly, not through cuda.core's Program: that takes no headers from memory, and
needs a device for its default architecture.

A compilation has two steps, so that the key is known before the compiler is loaded:

    ask(driver, source, name, options) -> Question             the key for a driver
    plan_compilation(source, options, …) -> Plan               makes the key; reads no file
    try_plan(plan) -> Compiled, with its `inputs`, or CompileFailure
                                                               loads the compiler and runs it

The key covers everything but the header files.  Only the compiler knows which those are, so they
are stored with the code (`headers`), and `is_current` checks that they are unchanged.

A plan is made for the compiler that is expected (`nvrtc`).  When something must be compiled,
`confirmed` loads the compiler, and plans again if it is another one.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from dataclasses import field, replace
from pathlib import Path

from ostinato.driver.api import Driver
from ostinato.errors import CompileError, InputError, NotAvailableError
from ostinato.logs import logger
from ostinato.modules.headers import Inputs, Observation, Toolkit, bundled_headers, observe
from ostinato.modules.nvrtc import Answer, Nvrtc, Toolchain, installed_headers
from ostinato.modules.source import (
    SCHEMA,
    CompileOptions,
    Source,
    digest_of,
    flags_of,
    include_dirs,
    pre_includes,
    reads_files,
)
from ostinato.records import dataclass

# The compiler reads these variables itself, so they belong to every key.
_COMPILER_VARIABLES = ("NVRTC_PREPEND_FLAGS", "NVRTC_APPEND_FLAGS")

_MAX_RUNS = 6

_INSTALL_HEADERS = (
    "\n\nThe headers of CUDA {0}.{1} are not installed, if it is one of those: pip install "
    "'nvidia-cuda-runtime-cu{0}=={0}.{1}.*' for CUDA 12, or a toolkit of the compiler's version"
)

_PLAIN_NAME = r"[A-Za-z_$][\w$]*\Z"
_ERROR_LINE = r"(?m)^(?P<file>[^\n(]+)\((?P<line>\d+)\): (?:catastrophic )?error"


toolchain = Toolchain()
"""The compiler of this process."""


@dataclass(frozen=True, slots=True)
class Plan:
    """All inputs of one compilation except header files, and their key."""

    source: Source
    options: CompileOptions
    capability: tuple[int, int]
    flags: tuple[str, ...]
    """The compiler's flags without the architecture and the toolkit's folders."""
    words: tuple[str, ...]
    """`flags` and those that the environment adds."""
    expressions: tuple[str, ...]
    compiler: str
    """The identity of the compiler that this plan was made for."""
    key: bytes = field(repr=False)
    unknown: str | None = None
    """Why the flags leave it unknown which files the compiler reads; None if they do not."""

    @property
    def storable(self) -> bool:
        """True if the code may be stored on disk; a source that is compiled already need not be."""
        return self.source.kind == "cuda" and self.unknown is None

    @property
    def arch(self) -> str:
        """The target architecture, "" for a source that is compiled already.  May load NVRTC."""
        return target_arch(self.capability, self.options) if self.source.kind == "cuda" else ""


@dataclass(frozen=True, slots=True)
class Compiled:
    """Code for `Image(kind, data)`.

    `log`: the compiler's warnings.  `lowered`: the entry name of each C++ name expression of the
    plan.  `inputs`: the header files that were read.
    """

    kind: str
    data: bytes
    log: str = ""
    lowered: dict[str, str] = field(default_factory=dict)
    inputs: Inputs = field(default_factory=Inputs)


@dataclass(frozen=True, slots=True)
class CompileFailure:
    """A CompileError that can be raised repeatedly: an error object would keep its caller's frames.

    `lasting`: no file was read, so the same compilation would fail again.
    """

    message: str
    log: str
    lasting: bool

    def error(self) -> CompileError:
        return CompileError(self.message, log=self.log)


def target_arch(capability: tuple[int, int], options: CompileOptions) -> str:
    """Returns the target: the device's own architecture, or PTX if the compiler is older.

    Raises InputError if the device is older than any architecture of the compiler; NoCudaError.
    """
    if options.arch is not None:
        return options.arch
    wanted = capability[0] * 10 + capability[1]
    library = toolchain.library()
    known = library.architectures
    if wanted in known:
        return f"sm_{wanted}"
    older = [arch for arch in known if arch < wanted]
    if not older:
        raise InputError(
            f"{library} compiles for {known[0]} and later; this device has compute "
            f"capability {capability[0]}.{capability[1]}: install an older CUDA"
        )
    return f"compute_{older[-1]}"


# -------------------------------------------------------------------------------- the toolkit's own


def _toolkit(library: Nvrtc) -> Toolkit | None:
    """Returns the compiler's own headers, unpacked and whole, or an installed toolkit's."""
    own = bundled_headers(library, unpack=True)
    if own is not None:
        return own
    root = installed_headers()
    if root is None or _toolkit_major(root) not in (None, library.version[0]):
        return None  # another CUDA's headers may not compile at all
    return Toolkit(root)


def _toolkit_major(root: str) -> int | None:
    """Returns 12 for the headers of CUDA 12.9, from their cuda.h; None if it has no version."""
    try:
        text = Path(root, "cuda.h").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"^#define CUDA_VERSION (\d+)", text, re.MULTILINE)
    return None if found is None else int(found[1]) // 1000


# ----------------------------------------------------------------------------------------- planning


def plan_compilation(
    source: Source,
    options: CompileOptions,
    capability: tuple[int, int],
    expressions: Sequence[str] = (),
) -> Plan:
    """Collects all inputs of a compilation except header files.  Reads and compiles nothing.

    `expressions`: C++ names ("scale<float>") whose entry names are needed.  Raises InputError,
    NoCudaError, CompileError (bad PTX).
    """
    if source.kind != "cuda":
        if options != CompileOptions():
            raise InputError(
                f"source {source.name!r} is {source.kind} already: options are for CUDA C++"
            )
        if source.kind == "ptx":
            check_ptx(source.data, source.name)
        key = digest_of([SCHEMA, source.text_digest()])
        return Plan(source, options, capability, (), (), (), "", key)
    flags = flags_of(options)
    from_environment = [os.environ.get(name) for name in _COMPILER_VARIABLES]
    added = [word for text in from_environment if text for word in text.split()]
    compiler = toolchain.file().identity
    parts: list[str | bytes | int | None] = [SCHEMA, compiler, source.text_digest()]
    # The compiler and the device together determine the architecture.
    parts += [options.arch] if options.arch else list(capability)
    for group in (flags, tuple(sorted(expressions))):
        parts += [len(group), *group]
    parts += from_environment
    paths = [*include_dirs(flags), *pre_includes(flags)]
    if not all(map(os.path.isabs, paths)):
        paths.append(os.getcwd())  # noqa: PTH109
        parts.append(paths[-1])
    unknown = None
    if reads_files((*flags, *added)):
        unknown = "its flags make the compiler read other files than headers"
    elif (
        include_dirs(added)
        or pre_includes(added)
        or any(mark in "".join(added) for mark in "\\\"'")
    ):
        unknown = f"{' or '.join(_COMPILER_VARIABLES)} names folders or headers, or has quotes"
    elif any("\n" in path or path.startswith(" ") for path in paths):
        unknown = "a folder's name begins with a space or has a line end in it"
    return Plan(
        source=source,
        options=options,
        capability=capability,
        flags=flags,
        words=(*flags, *added),
        expressions=tuple(sorted(expressions)),
        compiler=compiler,
        key=digest_of(parts),
        unknown=unknown,
    )


@dataclass(frozen=True, slots=True)
class Question:
    """A request to a module cache, with its key.  `plan` is None for host functions."""

    source: Source
    key: bytes
    plan: Plan | None


def ask(driver: Driver, source: Source, name: str, options: CompileOptions) -> Question:
    """Returns the key of a source for a driver, which depends on what the driver can run.

    Raises NotAvailableError for a source without this device's language, and what
    `plan_compilation` raises.
    """
    capabilities = driver.capabilities
    if capabilities.runs_host_functions:
        if not source.host:
            raise NotAvailableError(
                f"{driver.name} runs host functions and {source.name!r} has none: give it "
                f"host kernels (Source(…, host=[{name}])), or open a CUDA device"
            )
        # By identity: the functions live as long as the module, so their ids are not reused.
        functions = sorted(source.host.items())
        parts: list[str | bytes | int | None] = [SCHEMA, "host", source.name]
        for entry, function in functions:
            parts += [entry, id(function)]
        return Question(source, digest_of(parts), None)
    if not source.has_device_code:
        raise NotAvailableError(
            f"{driver.name} runs compiled code and {source.name!r} has host functions alone: "
            "give it CUDA C++ too (Source(cuda=…)), or open the host device"
        )
    if source.kind != "cuda" and source.kind not in capabilities.image_kinds:
        raise NotAvailableError(
            f"{driver.name} does not load {source.kind}; it takes "
            f"{', '.join(sorted(capabilities.image_kinds))}"
        )
    expressions = (name,) if source.kind == "cuda" and is_expression(name) else ()
    plan = plan_compilation(source, options, driver.properties.compute_capability, expressions)
    return Question(source, plan.key, plan)


def is_expression(name: str) -> bool:
    """True if an entry is named in C++ ("scale<float>", "ns::scale") and not by its symbol."""
    return not re.match(_PLAIN_NAME, name)


def check_ptx(data: bytes, name: str) -> None:
    """Raises CompileError with line and column of the first byte that is not ASCII.

    The driver's assembler refuses such bytes even in comments, without giving their place.
    """
    try:
        data.decode("ascii")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        begin = data.rfind(b"\n", 0, error.start) + 1
        end = data.find(b"\n", error.start)
        text = data[begin : end if end >= 0 else len(data)].decode("utf-8", "replace").rstrip()
        message = (
            f"{name}({line}): column {error.start - begin + 1}: byte {data[error.start]:#04x} is "
            f"not ASCII, which PTX must be also in comments:\n  {line} | {text}"
        )
        raise CompileError(f"PTX {message}", log=message) from None


# ---------------------------------------------------------------------------------------- compiling


def confirmed(plan: Plan) -> Plan:
    """Returns the plan if it was made for the compiler that is used, else a new one.

    Loads the compiler.  Raises what `plan_compilation` raises.
    """
    if plan.source.kind != "cuda":
        return plan
    used = toolchain.library().file.identity
    if plan.compiler == used:
        return plan
    logger(__name__).info("the compiler is %s; %s was expected", used, plan.compiler)
    return plan_compilation(plan.source, plan.options, plan.capability, plan.expressions)


def compile_plan(plan: Plan) -> Compiled:
    """Compiles; any thread may call.  Raises CompileError with the compiler's log."""
    made = try_plan(plan)
    if isinstance(made, CompileFailure):
        raise made.error()
    return made


def try_plan(plan: Plan) -> Compiled | CompileFailure:
    """Compiles, and finds out which files were read.  Any thread may call.

    The toolkit's headers are searched after all others.  They are unpacked only if that can matter:
    if a header is missing, or if the source uses __has_include.

    If a header changed shortly before or during the run, the compiler may have read another
    content.  Then it runs again, until two runs have read the same.
    """
    source = plan.source
    if source.kind != "cuda":
        return Compiled(source.kind, source.data)
    plan = confirmed(plan)
    library = toolchain.library()
    toolkit = bundled_headers(library)
    before: Inputs | None = None
    for _ in range(_MAX_RUNS):
        answer, seen = _run(library, plan, toolkit)
        lacks_header = bool(answer.status) and " open " in answer.log
        if toolkit is not None and (seen.damaged or (lacks_header and toolkit.damaged())):
            logger(__name__).warning(
                "the headers in %s are damaged and unpacked again", toolkit.root
            )
            toolkit = _toolkit(library)
            continue
        if toolkit is None and (lacks_header or seen.probed):
            toolkit = _toolkit(library)
            if toolkit is not None:
                continue
        if answer.status:
            lasting = plan.unknown is None and seen.inputs.fixed and not lacks_header
            hint = _INSTALL_HEADERS if lacks_header and toolkit is None else ""
            return _failure(library, plan, answer, hint, lasting=lasting)
        if seen.settled or (before is not None and seen.inputs.same_content(before)):
            inputs = seen.inputs
            break
        before = seen.inputs
    else:
        if seen.damaged:
            message = f"{plan.source.name}: the compiler's own headers change all the time"
            return CompileFailure(message, "", lasting=False)
        inputs = replace(seen.inputs, unknown="its header files change all the time")
    if toolkit is None and seen.probed:
        inputs = replace(inputs, unknown="it asks __has_include, and there is no toolkit")
    kind = "ptx" if plan.arch.startswith("compute_") else "cubin"
    inputs = replace(inputs, unknown=plan.unknown or inputs.unknown)
    return Compiled(kind, answer.data, answer.log, answer.lowered, inputs)


def _run(library: Nvrtc, plan: Plan, toolkit: Toolkit | None) -> tuple[Answer, Observation]:
    source, arch = plan.source, plan.arch
    assert source.cuda is not None
    program = (source.cuda, source.name, source.headers)
    search = () if toolkit is None else toolkit.folders
    flags = (f"--gpu-architecture={arch}", *plan.flags, *(f"--include-path={f}" for f in search))
    begin = time.time_ns()
    answer = library.compile(*program, flags, plan.expressions, ptx=arch.startswith("compute_"))
    return answer, observe(answer.opened, source, plan.words, toolkit, begin)


def _failure(
    library: Nvrtc, plan: Plan, answer: Answer, hint: str, *, lasting: bool
) -> CompileFailure:
    log = answer.log or library.status_text(answer.status)
    message = f"{plan.source.name} does not compile for {plan.arch} ({library}):\n{log}"
    hint = hint.format(*library.version)
    return CompileFailure(message + _excerpt(plan.source, log) + hint, log, lasting)


def is_current(inputs: Inputs) -> bool:
    """True if compiling again would read the same inputs."""
    if inputs.toolkit is not None and inputs.toolkit != installed_headers():
        return False
    return inputs.unchanged()


def _excerpt(source: Source, log: str) -> str:
    """Returns the lines around the first error in the source itself or in one of its headers."""
    for match in re.finditer(_ERROR_LINE, log):
        file, line = match["file"].strip(), int(match["line"])
        text = source.cuda if file == source.name else source.headers.get(file)
        if text is None:
            continue
        lines = text.splitlines()
        shown = [
            f"{'>' if number == line else ' '}{number:5} | {lines[number - 1]}"
            for number in range(max(1, line - 2), min(len(lines), line + 2) + 1)
        ]
        return f"\n\n{file}, line {line}:\n" + "\n".join(shown)
    return ""
