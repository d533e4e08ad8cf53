"""The `llm` extra: what the decoder needs besides the graph layer's own needs."""

from __future__ import annotations

import functools
import importlib.util

from ostinato.errors import NotAvailableError

_NEEDED = ("gguf", "tokenizers", "jinja2")


@functools.cache
def require_extra(what: str) -> None:
    """Raises NotAvailableError with the line to install, unless all of the extra is here."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise NotAvailableError(
            f"{what} needs {', '.join(missing)}, not installed here: pip install 'ostinato[llm]'"
        )
