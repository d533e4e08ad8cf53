"""`ostinato doctor`: describes what this machine can do, and what is missing."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from ostinato import __version__, settings
from ostinato.cli.arguments import AsJson
from ostinato.cli.plain import say
from ostinato.errors import OstinatoError, SettingsError
from ostinato.models.arguments import counted

LEAST_VERSIONS = {
    "torch": "2.9",
    "triton": "3.5",
    "cupy-cuda13x": "13.6",
    "cupy-cuda12x": "11.6",
    "numba-cuda": "0.0.12",
}
"""The oldest versions of other libraries that work with `ostinato.interop`; docs/limits.md explains
how each was determined."""

_PACKAGES = (
    "numpy",
    "gguf",
    "safetensors",
    "tokenizers",
    "cuda-core",
    "cuda-bindings",
    *LEAST_VERSIONS,
    "nvtx",
    "huggingface-hub",
)


def doctor(
    as_json: AsJson = False,
    faults: Annotated[
        bool,
        typer.Option(
            "--faults", help="Probe the GPU for known faults of drivers instead; takes seconds."
        ),
    ] = False,
) -> None:
    """Say what this machine can do, and what is missing.

    Devices, versions of packages, caches and settings. Needs the base install only.
    """
    if faults:
        _say_faults(as_json)
        return
    found = findings()
    if as_json:
        print(json.dumps(found))
        return
    for section, rows in found.items():
        say(section)
        if isinstance(rows, dict):
            for name, value in rows.items():
                say(f"  {name:<18} {value}")
        else:
            say(f"  {rows}")


def _say_faults(as_json: bool) -> None:
    """Prints which known driver faults this machine has: docs/driver-faults.md."""
    from ostinato.driver.cuda.faults import FAULTS, survey

    found = survey()
    if as_json:
        rows = [
            {"name": name, "verdict": one.verdict.value, "detail": one.detail}
            for name, one in found.results.items()
        ]
        print(json.dumps({"device": found.device, "driver": found.driver, "faults": rows}))
        return
    say(f"device {found.device}, driver {found.driver}")
    for fault in FAULTS:
        one = found.results[fault.name]
        say(f"{one.verdict.value:<15} {fault.name}: {fault.what}")
        say(f"{'':<15} {one.detail}")


def findings() -> dict[str, Any]:
    """Returns the report as plain data.  Does not raise for anything that is missing."""
    from ostinato.driver import launcher
    from ostinato.models.host import packed_kernels
    from ostinato.modules.compiler import toolchain

    return {
        "ostinato": {
            "version": __version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "processors": os.cpu_count(),
            "replay call": launcher.description(),
            "CPU kernels": packed_kernels.description(),
            "CUDA compiler": _loaded(toolchain.library, "not available"),
        },
        "ranks": _ranks(),
        "cuda": _device("cuda:0"),
        "host": _device("host"),
        "packages": {name: _version(name) for name in _PACKAGES},
        "caches": _caches(),
        "settings": {variable.name: _setting(variable) for variable in settings.ALL},
    }


def _device(name: str) -> dict[str, Any] | str:
    from ostinato.device import open_device
    from ostinato.driver.cuda.blas import load_cublaslt

    try:
        with open_device(name) as device:
            properties, can = device.properties, device.capabilities
            free, total = device.memory_info()
            products = "not needed"
            if device.driver.cuda_context is not None:
                products = _loaded(load_cublaslt, "not used")
            return {
                "name": properties.name,
                "driver": properties.driver_version,
                "compute": "{}.{}".format(*properties.compute_capability),
                "multiprocessors": properties.multiprocessors,
                "memory": f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free",
                "conditional nodes": _yes(can.conditional_nodes),
                "branches": _yes(can.conditional_branches),
                "programmatic": _yes(can.programmatic_launch),
                "clusters": _yes(can.clusters),
                "kernels in": can.source_language,
                "cuBLASLt": products,
                "lacks": "; ".join([*can.lacks, *_unfit(properties.driver_version)]) or "nothing",
            }
    except OstinatoError as error:
        return f"not available: {error}"


def _ranks() -> dict[str, str]:
    """Describes the collectives available to several ranks, and the launcher of this process."""
    from ostinato.distributed import exchange, nccl
    from ostinato.driver.cuda.driver import gpu_count

    count = gpu_count()
    windows = "no: there is one GPU" if count == 1 else "no: there is no GPU"
    if count > 1:
        limit = exchange.limit_for(min(count, 8))
        windows = (
            f"sums up to {exchange.LARGEST_SUM} bytes of a rank, other messages up to {limit}, "
            "where GPUs reach each other (tried when used)"
        )
    library = nccl.description()
    try:
        way = settings.collectives_way()
        used = _collectives(way, count, library)
    except SettingsError as error:
        way = used = f"not valid: {error}"
    return {
        "GPUs": str(count),
        "NCCL": library,
        "peer memory": windows,
        "way": way,
        "used": used,
        "launcher": _launcher(),
    }


def _collectives(way: str, gpus: int, library: str) -> str:
    """Describes the choice of `open_collectives` on this machine, as far as it is known without
    ranks."""
    if gpus < 2:
        channel = (
            "their memory, if they are threads" if way == "exchange" else "the group's channel"
        )
        return f"CPU ranks use {channel}; GPU ranks need two GPUs or more"
    if library.startswith("not available"):
        return f"nothing, so that GPUs cannot be ranks: NCCL is {library}"
    if way == "library":
        return "NCCL for all messages"
    small = "the ranks' memory for small messages, NCCL for the others"
    if way == "exchange":
        return f"{small}; an error where GPUs do not reach each other"
    return f"{small}; NCCL for all where GPUs do not reach each other"


def _launcher() -> str:
    from ostinato.distributed import place_of
    from ostinato.errors import InputError

    try:
        if settings.group_of_process():
            return f"{settings.GROUP.name}, see the settings"
        place = place_of()
    except InputError as error:
        return f"not valid: {error}"
    if place is None:
        return "none"
    where = f", rank 0 at {place.host}:{place.port}" if place.host else ""
    return f"{place.launcher}: rank {place.rank} of {place.size}{where}"


def _loaded(load: Callable[[], object], otherwise: str) -> str:
    """Describes a library, or why it is not there, after the words `otherwise`."""
    try:
        return str(load())
    except OstinatoError as error:
        return f"{otherwise}: {error}"


def _unfit(driver_version: str) -> list[str]:
    """Returns what is wrong with the compiler for a driver version ("13.0", or "host")."""
    from ostinato.modules.compiler import toolchain

    if driver_version == "host":
        return []
    driver = int(driver_version.split(".", maxsplit=1)[0])
    try:
        major, minor = toolchain.library().version
    except OstinatoError:
        return []
    if major <= driver:
        return []
    return [
        f"loading what NVRTC {major}.{minor} compiles (from CUDA {major}.0): update the driver, or "
        f'pip install "ostinato[cuda{driver}]"'
    ]


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _version(package: str) -> str:
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
    least = LEAST_VERSIONS.get(package, "0")
    if _numbers(found) < _numbers(least):
        return f"{found}: too old, {least} or later is needed"
    return found


def _numbers(version: str) -> list[int]:
    """Returns the release of a version: 2.9.0rc1+cu130 gives [2, 9, 0]."""
    release = re.match(r"\d+(?:\.\d+)*", version)
    return [] if release is None else [int(number) for number in release[0].split(".")]


def _setting(variable: settings.Variable[object]) -> str:
    text = os.environ.get(variable.name, "not set")
    try:
        variable.read()
    except SettingsError as error:
        text = f"not valid: {error}"
    return f"{text}  ({variable.doc})"


def _caches() -> dict[str, str] | str:
    try:
        root = settings.cache_dir()
    except SettingsError as error:
        return f"not available: {error}"
    return {
        "folder": str(root),
        "models": _size(root / "models"),
        "kernels": _size(root / "kernels"),
    }


def _size(folder: Path) -> str:
    def fail(error: OSError) -> None:
        raise error

    count = size = 0
    try:
        for where, _, names in os.walk(folder, onerror=fail):
            count += len(names)
            size += sum(Path(where, name).lstat().st_size for name in names)
    except FileNotFoundError:
        if not count:
            return "none yet"
    except OSError as error:
        return f"cannot be read: {error}"
    return f"{counted(count, 'file')}, {size / 1e6:.1f} MB"
