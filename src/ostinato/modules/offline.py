"""`compile`: CUDA C++ to a cubin without a device, for tests and continuous integration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ostinato.errors import InputError
from ostinato.modules.compiler import compile_plan, is_expression, plan_compilation
from ostinato.modules.cubin import KernelResources, kernel_resources
from ostinato.modules.kernel import check_signature, entry_of
from ostinato.modules.source import CompileOptions, Source, as_options, as_source

if TYPE_CHECKING:
    from ostinato.driver.host.kernel import HostKernel


@dataclass(frozen=True, slots=True)
class CompiledSource:
    """The result of `compile`: a cubin for one architecture, and the resources of its kernels.

    `symbols`: the kernel's symbol for each requested name.  `log`: the compiler's warnings.
    """

    arch: str
    data: bytes = field(repr=False)
    kernels: tuple[KernelResources, ...]
    symbols: dict[str, str]
    log: str

    def __getitem__(self, name: str) -> KernelResources:
        """Returns a kernel by symbol or plain C++ name; a template instance by the name in the
        request.

        Raises InputError that lists the existing names.
        """
        entries = [kernel.name for kernel in self.kernels]
        symbol = self.symbols.get(name) or entry_of(name, entries, "the compiled source")
        return self.kernels[entries.index(symbol)]


def compile(
    source: Source | str | HostKernel,
    *names: str,
    arch: str = "sm_90",
    options: CompileOptions | Sequence[str] = (),
) -> CompiledSource:
    """Compiles CUDA C++ for an architecture, and checks its kernels.  Needs no GPU and no driver.

        made = ost.compile(SOURCE, "scale", arch="sm_80")
        assert made["scale"].frame == 0          # no register spills

    `names`: required kernels, also template instances ("scale<float>"); kernels for which the
    source has host kernels or signatures are required too.  Parameter sizes must match the
    signatures.  `arch` applies unless `options` has one.  Nothing is written to disk.

    Raises CompileError with the compiler's log and the lines, InputError for a missing kernel, for
    a signature of other sizes, and for a source without CUDA C++; NoCudaError without a compiler
    (`pip install "ostinato[cuda13]"` installs one).
    """
    known = as_source(source)
    if known.cuda is None:
        raise InputError(
            f"source {known.name!r} has no CUDA C++ to compile"
            + (f": it is {known.kind}, which the driver loads as it is" if known.data else "")
        )
    chosen = as_options(options)
    if chosen.arch is None:
        chosen = replace(chosen, arch=arch)
    if chosen.arch is None or not chosen.arch.startswith("sm_"):
        raise InputError(
            f"arch={chosen.arch!r}: like 'sm_90': a cubin is made for one architecture"
        )
    wanted = dict.fromkeys([*names, *known.host, *known.signatures])
    expressions = [name for name in wanted if is_expression(name)]
    plan = plan_compilation(known, chosen, (0, 0), expressions)
    made = compile_plan(plan)
    kernels = kernel_resources(made.data)
    entries = [kernel.name for kernel in kernels]
    symbols = {}
    for name in wanted:
        symbol = symbols[name] = made.lowered.get(name) or entry_of(name, entries, known.name)
        signature = known.signature(name)
        if signature is not None:
            slots = kernels[entries.index(symbol)].parameters
            check_signature(known.name, name, signature, slots)
    return CompiledSource(chosen.arch, made.data, kernels, symbols, made.log)
