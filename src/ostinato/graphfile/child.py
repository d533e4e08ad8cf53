"""The separate process that checks a file while it is saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

import ostinato
from ostinato.driver.api import MemoryRange
from ostinato.errors import OstinatoError
from ostinato.files import replace_file
from ostinato.graphfile.checking import CheckCase


def main(paper: str) -> int:
    """Runs the job described in a JSON file and writes the answer to the file named there."""
    job = json.loads(Path(paper).read_text())

    def answer(**words: Any) -> None:
        replace_file(Path(job["answer"]), json.dumps(words).encode(), private=True)

    avoid = [MemoryRange(address, nbytes) for address, nbytes in job["avoid"]]
    try:
        with ostinato.open_device(job["device"]) as device:
            constants = {} if job["constants"] is None else _arrays(job["constants"])
            rooms = {int(block): nbytes for block, nbytes in job["rooms"].items()}
            path = Path(job["path"])
            case = CheckCase.of(device.context, path, constants, job["code"], avoid, rooms)
            with case as one:
                if job["scratch"] is None:
                    what = one.difference()
                    if one.strays:
                        strays = {str(n): [s.before, s.behind] for n, s in one.strays.items()}
                        answer(passed=False, why="strays", what=what, strays=strays)
                        return 0
                    if what or not job["loose"]:
                        answer(passed=not what, why="content", what=what)
                        return 0
                    # Each answer is written before its launch, which may end the process.
                    loose = [(node, at, bytes.fromhex(text)) for node, at, text in job["loose"]]
                    index, what = one.effect(loose, lambda n: answer(why="loose", loose=n))
                    answer(passed=not what, why="loose", loose=index, what=what)
                else:
                    content = {int(n): array for n, array in _arrays(job["scratch"]).items()}
                    blamed = one.blamed(content, lambda block: answer(block=block))
                    answer(block=blamed)
    except OstinatoError as error:
        if job["scratch"] is None and not Path(job["answer"]).exists():
            # A launch may fail because it read an address in memory that was not saved.
            answer(passed=False, why="content", what=f"{type(error).__name__}: {error}")
    return 0


def _arrays(path: str) -> dict[str, Any]:
    with np.load(path, allow_pickle=False) as loaded:
        return {name[1:]: loaded[name] for name in loaded.files}
