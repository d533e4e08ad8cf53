"""Loads graph files in a process of its own, and runs each as it was saved and on new inputs.

python file_runner.py FOLDER DEVICE: FOLDER has N.graph and N.in.npz.  N.stored.npz gets the bytes
of all outputs for the inputs in the file, N.out.npz those for the new inputs; N.error.txt says why
there are none.  Files that have one of these are left out.  What a library brought into the saving
process is not here.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import ostinato as ost
from ostinato.errors import ContextPoisonedError

LIBRARIES = {"torch", "cupy", "triton", "transformers"}


def main(folder: Path, name: str) -> int:
    """How many failed; 100 if the device is lost, and there may be more to run."""
    failed = 0
    with ost.open_device(name) as device:
        stream = device.create_stream()
        held = [device.empty(1 << 16, "bytes")]  # so that addresses are others
        for path in sorted(folder.glob("*.graph")):
            if any(path.with_suffix(end).exists() for end in (".out.npz", ".error.txt")):
                continue
            try:
                run(device, stream, path, held)
            except ost.OstinatoError as error:
                failed += 1
                path.with_suffix(".error.txt").write_text(f"{type(error).__name__}: {error}")
                if isinstance(error, ContextPoisonedError):
                    return 100
    return failed


def run(device: ost.Device, stream: ost.Stream, path: Path, held: list[ost.Buffer]) -> None:
    loaded = ost.graphfile.load(device, path)
    given = np.load(path.with_suffix(".in.npz"))
    with loaded.instantiate() as executable:
        for end in (".stored.npz", ".out.npz"):
            executable.launch(stream)
            outputs = {name: b.to_numpy(stream) for name, b in loaded.outputs.items()}
            np.savez(path.with_suffix(end), **outputs)
            for name, buffer in loaded.inputs.items():
                values = given[name].reshape(-1).view(np.uint8)
                buffer.view(dtype=np.uint8).set(values, stream)
    assert not LIBRARIES & sys.modules.keys()
    held += loaded.scratch


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
