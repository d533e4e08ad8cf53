"""A misspelt name of the face, and calls that no overload takes: `make check` fails if the type
checker accepts them.

mypy reports an `ignore` that nothing needs.  No test runs this file.
"""

import ostinato as ost

ost.capure  # type: ignore[attr-defined]  # noqa: B018
ost.capture  # noqa: B018


def changes(run: ost.GraphExec, x: ost.Buffer, config: ost.LaunchConfig) -> None:
    run.set(0, "n", 1)
    run.set(0, "n", 1, enabled=True)  # type: ignore[call-overload]
    run.set(0, "n")  # type: ignore[call-overload]
    run.set(0, config=config)
    run.set(0, config=config, enabled=True)  # type: ignore[call-overload]
    run.set(0, dst=x, src=x)
    run.set(0, dst=x, value=0)
    run.set(0, dst=x)  # type: ignore[call-overload]
    run.set(0, enabled=False)
