"""Writes a table of the parts of libcuda that this library uses, by CUDA version, from cuda.h.

    python -m tools.cuda_versions FOLDER

FOLDER is searched for the cuda.h of all versions: the wheels of nvidia-cuda-runtime-cu12 (12.x) and
nvidia-cuda-runtime (13.x) contain it.  A C compiler is needed to read the headers:

    pip download --no-deps -d wheels nvidia-cuda-runtime-cu12==12.4.127  # and so on
    for w in wheels/*.whl; do unzip -q -d headers/$(basename $w .whl) $w '*.h'; done

The table is tests/data/cuda_versions.json.  Tests compare prototypes, structures and numbers with
it on machines without a header or a compiler.  Run the tool again after a change of `PROTOTYPES`,
`STRUCTURES` or `NUMBERS`, and for a new CUDA version.  Raises SystemExit, and writes no table, if a
header disagrees with a prototype.
"""

from __future__ import annotations

import ctypes
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ostinato.driver.cuda import libcuda as cu

__all__ = ["NUMBERS", "STRUCTURES", "TABLE", "Header", "fields_of"]

TABLE = Path(__file__).parents[1] / "tests" / "data" / "cuda_versions.json"

T = TypeVar("T")

# Our field names to the header's, where the header nests deeper; and fields that only we have.
_RENAMED = {"deviceUpdatable": "deviceUpdatableKernelNode.deviceUpdatable"}
_OURS_ONLY = {"words"}

STRUCTURES: dict[str, type[ctypes.Structure] | type[ctypes.Union]] = {
    "CUgraphEdgeData": cu.EdgeDataStruct,
    "CUlaunchAttributeValue": cu.LaunchAttributeValue,
    "CUlaunchAttribute": cu.LaunchAttribute,
    "CUlaunchConfig": cu.LaunchConfigStruct,
    "CUDA_KERNEL_NODE_PARAMS_v2": cu.KernelParams,
    "CUDA_KERNEL_NODE_PARAMS_v3": cu.KernelParams,
    "CUDA_MEMCPY3D": cu.Memcpy3D,
    "CUDA_MEMCPY_NODE_PARAMS": cu.MemcpyParams,
    "CUDA_MEMSET_NODE_PARAMS_v2": cu.MemsetParams,
    "CUDA_MEMSET_NODE_PARAMS": cu.MemsetParams,
    "CUDA_HOST_NODE_PARAMS": cu.HostParams,
    "CUDA_HOST_NODE_PARAMS_v2": cu.HostParams,
    "CUDA_CHILD_GRAPH_NODE_PARAMS": cu.ChildGraphParams,
    "CUDA_EVENT_RECORD_NODE_PARAMS": cu.EventParams,
    "CUDA_EVENT_WAIT_NODE_PARAMS": cu.EventParams,
    "CUmemLocation": cu.MemLocation,
    "CUmemPoolProps": cu.MemPoolProps,
    "CUDA_MEM_ALLOC_NODE_PARAMS": cu.MemAllocParams,
    "CUDA_MEM_ALLOC_NODE_PARAMS_v2": cu.MemAllocParams,
    "CUDA_MEM_FREE_NODE_PARAMS": cu.MemFreeParams,
    "CUstreamBatchMemOpParams": cu.MemOpStruct,
    "CUDA_BATCH_MEM_OP_NODE_PARAMS": cu.BatchMemOpParams,
    "CUDA_BATCH_MEM_OP_NODE_PARAMS_v2": cu.BatchMemOpParams,
    "CUDA_CONDITIONAL_NODE_PARAMS": cu.ConditionalParams,
    "CUgraphNodeParams": cu.GraphNodeParams,
    "CUDA_GRAPH_INSTANTIATE_PARAMS": cu.InstantiateParams,
    "CUgraphExecUpdateResultInfo": cu.UpdateResultInfo,
}
"""The structures of `libcuda` by the header's names.  A name without a version is what a getter
writes."""

NUMBERS = (
    *("CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW", "CU_LAUNCH_ATTRIBUTE_COOPERATIVE"),
    *("CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION",),
    *("CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE",),
    *("CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION", "CU_LAUNCH_ATTRIBUTE_PRIORITY"),
    *("CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP", "CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN"),
    *("CU_LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER_DIMENSION",),
    *("CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE",),
    *("CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT",),
    *("CU_GRAPH_NODE_TYPE_KERNEL", "CU_GRAPH_NODE_TYPE_MEMCPY", "CU_GRAPH_NODE_TYPE_MEMSET"),
    *("CU_GRAPH_NODE_TYPE_HOST", "CU_GRAPH_NODE_TYPE_GRAPH", "CU_GRAPH_NODE_TYPE_EMPTY"),
    *("CU_GRAPH_NODE_TYPE_WAIT_EVENT", "CU_GRAPH_NODE_TYPE_EVENT_RECORD"),
    *("CU_GRAPH_NODE_TYPE_EXT_SEMAS_SIGNAL", "CU_GRAPH_NODE_TYPE_EXT_SEMAS_WAIT"),
    *("CU_GRAPH_NODE_TYPE_MEM_ALLOC", "CU_GRAPH_NODE_TYPE_MEM_FREE"),
    *("CU_GRAPH_NODE_TYPE_BATCH_MEM_OP", "CU_GRAPH_NODE_TYPE_CONDITIONAL"),
    *("CU_GRAPH_COND_TYPE_IF", "CU_GRAPH_COND_TYPE_WHILE", "CU_GRAPH_COND_TYPE_SWITCH"),
    *("CU_GRAPH_DEPENDENCY_TYPE_DEFAULT", "CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC"),
    *("CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC", "CU_GRAPH_KERNEL_NODE_PORT_LAUNCH_ORDER"),
)
"""Enumerators of the header that later versions added, or whose enumerations may grow."""


def fields_of(kind: Any, prefix: str = "", base: int = 0) -> dict[str, int]:
    """Returns the offset of every field, by the header's name, such as "alloc.poolProps.usage"."""
    found: dict[str, int] = {}
    anonymous = set(getattr(kind, "_anonymous_", ()))
    for name, field_type in kind._fields_:
        if name in _OURS_ONLY:
            continue
        offset = base + getattr(kind, name).offset
        nested = isinstance(field_type, type) and issubclass(
            field_type, ctypes.Structure | ctypes.Union
        )
        if name in anonymous:
            found |= fields_of(field_type, prefix, offset)
            continue
        found[prefix + _RENAMED.get(name, name)] = offset
        if nested:
            found |= fields_of(field_type, f"{prefix}{name}.", offset)
    return found


class Header:
    """The cuda.h of one version, read with a C compiler, `compiler`."""

    def __init__(self, path: Path, compiler: str = "cc") -> None:
        self.path, self._compiler = path, compiler
        text = path.read_text(encoding="utf-8", errors="replace")
        self._words = set(re.findall(r"\w+", text))
        found = re.search(r"^#define CUDA_VERSION (\d+)", text, re.MULTILINE)
        if found is None:
            raise SystemExit(f"{path} has no CUDA_VERSION")
        number = int(found[1])
        self.version = (number // 1000, number % 1000 // 10)

    def __str__(self) -> str:
        return ".".join(map(str, self.version))

    def has(self, name: str) -> bool:
        return name in self._words

    def complaints(self, lines: Iterable[str]) -> dict[int, str]:
        """Compiles lines of C after the header.  Returns the errors by the line's index."""
        code = '#include <stddef.h>\n#include <cuda.h>\n#line 1 "checked"\n' + "\n".join(lines)
        flags = ("-fsyntax-only", "-Werror", "-fmax-errors=0", "-x", "c", f"-I{self.path.parent}")
        done = subprocess.run(
            [self._compiler, *flags, "-"], input=code, capture_output=True, text=True
        )
        found: dict[int, str] = {}
        for match in re.finditer(r"^checked:(\d+):\d+: (?:fatal )?error: (.*)", done.stderr, re.M):
            found.setdefault(int(match[1]) - 1, match[2])
        if done.returncode and not found:
            raise SystemExit(f"{self.path} cannot be read: {done.stderr}")
        return found

    def wrong_prototypes(self, prototypes: dict[str, tuple[str, ...]]) -> list[str]:
        """Describes the prototypes that this header declares otherwise."""
        symbols = [symbol for symbol in prototypes if self.has(symbol)]
        lines = [
            f"CUresult (CUDAAPI *check_{symbol})({', '.join(prototypes[symbol]) or 'void'})"
            f" = &{symbol};"
            for symbol in symbols
        ]
        return [f"{symbols[at]}: {words}" for at, words in self.complaints(lines).items()]

    def numbers(self, names: Iterable[str]) -> dict[str, int]:
        """Returns the values of those of the names that this header has."""
        return self._values({name: name for name in names if self.has(name)})

    def layouts(self, structures: Mapping[str, Any]) -> dict[str, dict[str, int]]:
        """Returns the offsets of fields in this version's structures, by structure and field.

        `structures`: ours, by the header's names.  Field "" is the size.  A structure or a field
        that this version does not have is left out.
        """
        asked: dict[tuple[str, str], str] = {}
        for name, kind in structures.items():
            asked[name, ""] = f"sizeof({name})"
            asked |= {(name, field): f"offsetof({name}, {field})" for field in fields_of(kind)}
        found: dict[str, dict[str, int]] = {}
        for (name, field), value in self._values(asked).items():
            found.setdefault(name, {})[field] = value
        return found

    def _values(self, expressions: Mapping[T, str]) -> dict[T, int]:
        """Returns the values of those of the constant expressions that compile, by name."""
        names = list(expressions)
        lines = [f"enum {{ a{i} = (int)({expressions[name]}) }};" for i, name in enumerate(names)]
        for at in self.complaints(lines):
            lines[at] = ""
        kept = [(i, name) for i, name in enumerate(names) if lines[i]]
        shown = "\n".join(f'printf("%d\\n", a{i});' for i, _ in kept)
        code = "#include <stddef.h>\n#include <stdio.h>\n#include <cuda.h>\n"
        code += "\n".join(lines) + f"\nint main(void) {{ {shown} return 0; }}"
        with tempfile.TemporaryDirectory() as folder:
            made = f"{folder}/made"
            command = [self._compiler, "-x", "c", f"-I{self.path.parent}", "-", "-o", made]
            subprocess.run(command, input=code, check=True, text=True)
            done = subprocess.run([made], check=True, capture_output=True, text=True)
        values = map(int, done.stdout.split())
        return {name: value for (_, name), value in zip(kept, values, strict=True)}


def table_of(headers: list[Header]) -> dict[str, Any]:
    """Makes the table; versions are written as "12.4".  Raises SystemExit for a wrong prototype.

    A field's offset stands under the first version that has it at this offset; field "" is the
    structure's size.
    """
    prototypes = cu.parse_prototypes()
    wrong = [
        f"{header}: {words}" for header in headers for words in header.wrong_prototypes(prototypes)
    ]
    if wrong:
        raise SystemExit("\n".join(["these prototypes are not the header's:", *wrong]))
    calls: dict[str, Any] = {}
    for symbol, parameters in prototypes.items():
        having = [str(header) for header in headers if header.has(symbol)]
        if not having or having != [str(header) for header in headers][-len(having) :]:
            raise SystemExit(f"{symbol} is only in the headers {having}")
        calls[symbol] = {"since": having[0], "parameters": ", ".join(parameters)}
    structures: dict[str, dict[str, dict[str, int]]] = {}
    before: dict[str, dict[str, int]] = {}
    for header in headers:
        for name, layout in header.layouts(STRUCTURES).items():
            old = before.get(name, {})
            if old.keys() - layout.keys():
                raise SystemExit(f"{header}: {name} has lost {old.keys() - layout.keys()}")
            changed = {field: at for field, at in layout.items() if old.get(field) != at}
            if changed:
                structures.setdefault(name, {})[str(header)] = changed
            before[name] = layout
    numbers: dict[str, Any] = {}
    for header in headers:
        for name, value in header.numbers(NUMBERS).items():
            known = numbers.setdefault(name, {"since": str(header), "value": value})
            if known["value"] != value:
                raise SystemExit(f"{name} is {value} in {header} and was {known['value']}")
    return {
        "versions": [str(header) for header in headers],
        "calls": calls,
        "structures": structures,
        "numbers": numbers,
    }


def _text(table: dict[str, Any]) -> str:
    """Formats the table as JSON with one line for each entry, for small diffs."""
    groups = []
    for name, entries in table.items():
        if isinstance(entries, dict):
            lines = (f"  {json.dumps(key)}: {json.dumps(entry)}" for key, entry in entries.items())
            groups.append(f" {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n }")
        else:
            groups.append(f" {json.dumps(name)}: {json.dumps(entries)}")
    return "{\n" + ",\n".join(groups) + "\n}\n"


def main(arguments: list[str]) -> None:
    if len(arguments) != 1:
        raise SystemExit(__doc__)
    headers = {}
    for path in sorted(Path(arguments[0]).rglob("cuda.h")):
        header = Header(path)
        headers[header.version] = header
    if not headers:
        raise SystemExit(f"no cuda.h below {arguments[0]}")
    table = table_of([headers[version] for version in sorted(headers)])
    TABLE.write_text(_text(table), encoding="utf-8")
    print(f"{TABLE}: {', '.join(table['versions'])}")


if __name__ == "__main__":
    main(sys.argv[1:])
