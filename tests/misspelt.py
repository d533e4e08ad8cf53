"""A misspelt name of the face: `make check` fails if the type checker accepts it.

mypy reports an `ignore` that nothing needs.  No test runs this file.
"""

import ostinato as ost

ost.capure  # type: ignore[attr-defined]  # noqa: B018
ost.capture  # noqa: B018
