"""The `llm` extra: packages that the decoder needs and the graph layer does not."""

from __future__ import annotations

import functools
import importlib.util

from ostinato.errors import NotAvailableError

_NEEDED = ("gguf", "tokenizers", "jinja2")


@functools.cache
def require_extra(what: str) -> None:
    """Raises NotAvailableError, with the pip command, unless every package of the extra is there;
    the message begins with `what`."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise NotAvailableError(
            f"{what} needs {', '.join(missing)}, not installed here: pip install 'ostinato[llm]'"
        )
