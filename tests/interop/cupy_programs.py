"""Random functions of CuPy that wait for the device in the middle, copy from the host, write what
they use besides their argument, return views of it, and raise."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

_READS = (
    "float({y}.sum())",
    "int({y}.sum())",
    "{y}.max().item()",
    "float({y}.get().sum())",
    "float(sum({y}.tolist()))",
)
_LINES = (
    "count += {n}.0",
    "y = y * 2.0 + {n}.0",
    "y = y * 0.5",
    "x += {n}.0",
    "trail += weights",
    "trail += y.sum()",
    "trail[0:{n}] = weights[0:{n}]",
    "x[0:{n}] = trail[6 - {n}:6]",
    "y = y[[0, y.size - 1, 0]]",
    "y = y * weights[[{n}]]",
    "y = y + trail.take([0, {n}]).sum()",
    "y = y + weights[np.array([{n}, 1])].sum()",
    "trail[[5, 0, {n}]] = [1.0, y.size + 2.0, {n}.0]",
    "count[[{n}, 0]] = host[0:2]",
    "trail.set(host)",
    "x.set(np.arange(6, dtype='f4') * {n})",
    "y = y * cupy.asarray(host).max()",
    "y = y * cupy.asarray([1.0, {n}.0]).sum()",
    "cupy.cuda.get_current_stream().synchronize()",
    "cupy.cuda.Device().synchronize()",
    "cupy.cuda.get_current_stream().record().synchronize()",
)
_RESULTS = ("x", "x[0:2]", "trail[1:4]", "weights", "count[0:6]", "y.sum()", "state['calls']")


def program(seed: int) -> str:
    """Returns the source of a function `f` of an array of 6 elements.  It uses `weights`, `host`
    (of NumPy) and `state`, and writes `count` and `trail`, arrays of as many elements."""
    rng = random.Random(seed)
    lines = ["y = x * 2.0"]
    given = ["y"]
    for number in range(rng.randrange(2, 8)):
        kind = rng.randrange(9)
        some = rng.choice(_LINES).format(n=rng.randrange(2, 5))
        read = f"{rng.choice(_READS).format(y='y')} > {rng.randrange(6, 80)}"
        if kind == 0:
            lines += [
                f"if {read}:",
                f"    y = y + {rng.randrange(1, 9)}.0",
                *rng.choice(([], ["    count += y.max()"], ["    trail += weights"])),
                "else:",
                f"    {some}",
            ]
        elif kind == 1:
            lines.append(f"y = y[y > {rng.randrange(1, 6)}.0] + 1.0")
            lines += ["if not y.size:", "    return trail * 2.0, count.max()"]
        elif kind == 2:
            lines.append(f"v{number} = y.get()")
            given.append(f"v{number}")
        elif kind == 3:
            lines += [f"if {read}:", f"    raise LookupError({rng.choice(_READS).format(y='y')})"]
        elif kind == 4:
            lines += ["try:", f"    {some}", f"    if {read}:", "        raise ValueError"]
            lines += ["except ValueError:", "    count += 1.0"]
        else:
            lines.append(some)
    given += rng.sample(_RESULTS, 2)
    body = "\n    ".join(lines)
    return (
        f"def f(x):\n    global count, trail\n    {body}\n    return {', '.join(given)}, y.sum()\n"
    )


def function(cupy: Any, seed: int) -> tuple[Any, dict[str, Any]]:
    """Returns the function of a program, and its globals: new arrays."""
    space: dict[str, Any] = {
        "cupy": cupy,
        "np": np,
        "weights": cupy.asarray(np.arange(6, dtype="f4")),
        "count": cupy.zeros(6, "f4"),
        "trail": cupy.zeros(6, "f4"),
        "host": np.arange(6, dtype="f4") / 2,
        "state": {"calls": 0},
    }
    exec(compile(program(seed), f"<program {seed}>", "exec"), space)
    return space["f"], space


def check(cupy: Any, make: Any, seed: int, calls: int) -> Any:
    """Compares calls of a graphed program with those of the program itself.  Returns the graphed
    function."""
    f, space = function(cupy, seed)
    eager, mirror = function(cupy, seed)
    step = make(f)
    rng = random.Random(seed)
    values = [np.array([rng.randrange(5) for _ in range(6)], "f4") for _ in range(3)]
    for call in range(calls):
        value = values[0] if call < 9 else rng.choice(values)
        if call > 11 and not rng.randrange(4):
            number = rng.randrange(3)
            for each in (space, mirror):
                each["host"][1] = number
                each["state"]["calls"] = number
        x, y = cupy.asarray(value), cupy.asarray(value)
        found, wanted = _tried(step, x), _tried(eager, y)
        pairs = [*zip(found, wanted, strict=True), (x, y)]
        pairs += [(space[name], mirror[name]) for name in ("count", "trail", "weights")]
        for one, other in pairs:
            assert type(one) is type(other), (call, one, other, program(seed))
            assert same(one, other), (call, one, other, program(seed))
    return step


def _tried(function: Any, x: Any) -> tuple[Any, ...]:
    """Returns the result of a call, or its error."""
    try:
        return tuple(function(x))
    except LookupError as error:
        return (str(error),)


def same(one: Any, other: Any) -> bool:
    """True if two results are the same bit by bit."""
    if isinstance(one, dict):
        return same([*one.items()], [*other.items()])
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    one, other = (e.get() if hasattr(e, "get") else np.asarray(e) for e in (one, other))
    return bool(
        (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    )
