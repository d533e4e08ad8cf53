"""The separate process that checks a file while it is saved."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import ostinato
from ostinato.errors import OstinatoError
from ostinato.files import replace_file
from ostinato.graphfile.checking import CheckCase


def main(paper: str) -> int:
    """Does the pickled job of a file and writes the pickled answer to the file named there."""
    job = pickle.loads(Path(paper).read_bytes())

    def answer(**words: Any) -> None:
        replace_file(job["answer"], pickle.dumps(words), private=True)

    try:
        with ostinato.open_device(job["device"]) as device:
            case = CheckCase.of(
                *(device.context, job["path"], job["constants"], job["code"]),
                *(job["avoid"], job["rooms"]),
            )
            with case as one:
                if job["scratch"] is None:
                    what = one.difference()
                    if one.strays:
                        answer(passed=False, why="strays", what=what, strays=one.strays)
                        return 0
                    if what or not job["loose"]:
                        answer(passed=not what, why="content", what=what)
                        return 0
                    # Each answer is written before its launch, which may end the process.
                    index, what = one.effect(job["loose"], lambda n: answer(why="loose", loose=n))
                    answer(passed=not what, why="loose", loose=index, what=what)
                else:
                    blamed = one.blamed(job["scratch"], lambda block: answer(block=block))
                    answer(block=blamed)
    except OstinatoError as error:
        if job["scratch"] is None and not job["answer"].exists():
            # A launch may fail because it read an address in memory that was not saved.
            answer(passed=False, why="content", what=f"{type(error).__name__}: {error}")
    return 0
