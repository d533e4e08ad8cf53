"""The module that `test_child` runs in a child: `answer` does what it is told."""

from __future__ import annotations

import json
import os
import resource
import socket
import sys
import time

from ostinato.errors import InputError, ModelError, ModelFormatError, UnsupportedModelError

_seen: list[str] = []


def answer(request: bytes) -> str:
    what, _, value = request.decode("utf-8", "replace").partition(" ")
    _seen.append(what)
    if what == "echo":
        return value
    if what == "seen":
        return json.dumps(_seen)
    if what == "pid":
        return str(os.getpid())
    if what == "group":
        return str(os.getpgid(0))
    if what == "limits":
        names = ("RLIMIT_AS", "RLIMIT_NOFILE", "RLIMIT_FSIZE", "RLIMIT_CORE", "RLIMIT_CPU")
        return json.dumps([resource.getrlimit(getattr(resource, name))[0] for name in names])
    if what == "environment":
        return json.dumps(sorted(os.environ))
    if what == "descriptors":
        return json.dumps([number for number in range(1000) if _is_open(number)])
    if what == "sleep":
        time.sleep(60)
    if what == "spin":
        while True:
            pass
    if what == "memory":
        return str(len(bytearray(int(value))))
    if what == "long":
        return "x" * int(value)
    if what == "abort":
        os.write(2, b"first line\nlast words\n")
        os.abort()
    if what == "exit":
        os._exit(int(value))
    if what == "bug":
        raise KeyError("a bug")
    if what == "scribble":
        os.write(0, b"\xff" * int(value))
        time.sleep(60)
    if what == "file":
        return _refused(lambda: os.close(os.open(__file__, os.O_RDONLY)))
    if what == "socket":
        return _refused(lambda: socket.socket().close())
    if what == "process":
        return _refused(lambda: os.posix_spawn(sys.executable, [sys.executable], {}))
    if what == "raise":
        kinds = (InputError, ModelError, ModelFormatError, UnsupportedModelError)
        raise {kind.__name__: kind for kind in kinds}[value]("is wrong" + "!" * 5000)
    raise AssertionError(what)


def _refused(do: object) -> str:
    try:
        do()  # type: ignore[operator]
    except OSError as error:
        return f"refused: {error}"
    return "allowed"


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
