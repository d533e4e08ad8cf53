"""Loads graph files in a process of its own, and runs each on the inputs that it is given.

python disk_runner.py FOLDER: FOLDER has N.graph, N.in.npz; N.out.npz is written.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import ostinato as ost


def main(folder: Path) -> None:
    with ost.open_device("host") as device:
        stream = device.create_stream()
        held = [device.empty(1 << 16)]  # so that addresses are others
        for path in sorted(folder.glob("*.graph")):
            loaded = ost.load_graph(device, path)
            given = np.load(path.with_suffix(".in.npz"))
            for name, buffer in loaded.inputs.items():
                buffer.copy_from(given[name], stream)
            loaded.instantiate().launch(stream)
            outputs = {name: b.to_numpy(stream) for name, b in loaded.outputs.items()}
            np.savez(path.with_suffix(".out.npz"), **outputs)
            held += loaded.scratch


if __name__ == "__main__":
    main(Path(sys.argv[1]))
