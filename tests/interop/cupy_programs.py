"""Random functions of CuPy that read arrays in the middle, and write what they use besides their
argument."""

from __future__ import annotations

import random
from typing import Any

_READS = (
    "float({y}.sum())",
    "int({y}.sum())",
    "{y}.max().item()",
    "float({y}.get().sum())",
    "float(sum({y}.tolist()))",
)


def program(seed: int) -> str:
    """Returns the source of a function `f` of an array of 6 elements.  It uses `weights` and writes
    `count` and `trail`, arrays of as many elements."""
    rng = random.Random(seed)
    lines = ["y = x * 2.0"]
    given = ["y"]
    for number in range(rng.randrange(2, 6)):
        kind = rng.randrange(6)
        if kind == 0:
            lines.append(f"count += {rng.randrange(1, 4)}.0")
        elif kind == 1:
            lines.append(f"y = y * {rng.choice(('2.0', '0.5'))} + {rng.randrange(3)}.0")
        elif kind == 2:
            lines.append(f"x += {rng.randrange(1, 3)}.0")
        elif kind == 3:
            lines += [
                f"if {rng.choice(_READS).format(y='y')} > {rng.randrange(6, 40)}:",
                f"    y = y + {rng.randrange(1, 9)}.0",
                *rng.choice(([], ["    count += y.max()"], ["    trail += weights"])),
                "else:",
                "    y = y * 3.0",
            ]
        elif kind == 4:
            lines.append(f"y = y[y > {rng.randrange(1, 6)}.0] + 1.0")
            lines += ["if not y.size:", "    return trail * 2.0, count.max()"]
        else:
            lines.append(f"v{number} = y.get()")
            given.append(f"v{number}")
            lines.append(f"trail += {rng.choice(('weights', '1.0', 'y.sum()'))}")
    body = "\n    ".join(lines)
    return (
        f"def f(x):\n    global count, trail\n    {body}\n    return {', '.join(given)}, y.sum()\n"
    )


def function(cupy: Any, seed: int) -> tuple[Any, dict[str, Any]]:
    """Returns the function of a program, and its globals: new arrays."""
    space: dict[str, Any] = {
        "weights": cupy.asarray([float(n) for n in range(6)]),
        "count": cupy.zeros(6),
        "trail": cupy.zeros(6),
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
    values = [[rng.randrange(5) + 0.0 for _ in range(6)] for _ in range(3)]
    for call in range(calls):
        value = values[0] if call < 9 else rng.choice(values)
        x, y = cupy.asarray(value), cupy.asarray(value)
        found, wanted = step(x), eager(y)
        pairs = [*zip(found, wanted, strict=True), (x, y)]
        pairs += [(space[name], mirror[name]) for name in ("count", "trail", "weights")]
        for one, other in pairs:
            one, other = (e.get() if isinstance(e, cupy.ndarray) else e for e in (one, other))
            assert one.dtype == other.dtype and one.shape == other.shape, (call, program(seed))
            assert one.tobytes() == other.tobytes(), (call, one, other, program(seed))
    return step
