"""Loads graph files in a process of its own, and runs each on the inputs that it is given.

python disk_runner.py FOLDER DEVICE: FOLDER has N.graph and N.in.npz; N.out.npz is written, with the
bytes of all outputs.  What a library brought into the saving process is not here.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import ostinato as ost


def main(folder: Path, name: str) -> None:
    with ost.open_device(name) as device:
        stream = device.create_stream()
        held = [device.empty(1 << 16)]  # so that addresses are others
        for path in sorted(folder.glob("*.graph")):
            loaded = ost.load_graph(device, path)
            given = np.load(path.with_suffix(".in.npz"))
            for name, buffer in loaded.inputs.items():
                buffer.view(dtype=np.uint8).copy_from(
                    given[name].reshape(-1).view(np.uint8), stream
                )
            loaded.instantiate().launch(stream)
            outputs = {name: b.to_numpy(stream) for name, b in loaded.outputs.items()}
            assert not {"torch", "cupy", "triton"} & sys.modules.keys()
            np.savez(path.with_suffix(".out.npz"), **outputs)
            held += loaded.scratch


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
