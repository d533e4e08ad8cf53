"""The `serve` extra: what the server needs besides the decoder's own needs."""

from __future__ import annotations

import importlib.util

from ostinato.errors import NotAvailableError

_NEEDED = {
    "starlette": "starlette",
    "uvicorn": "uvicorn",
    "h11": "h11",
    "prometheus_client": "prometheus-client",
    # Of the decoder: one line installs all.
    "gguf": "gguf",
    "tokenizers": "tokenizers",
    "jinja2": "jinja2",
}


def require_extra() -> None:
    """Raises NotAvailableError with the line to install, unless all of the extra is here."""
    missing = [name for module, name in _NEEDED.items() if not importlib.util.find_spec(module)]
    if missing:
        raise NotAvailableError(
            f"the server needs {', '.join(missing)}, not installed here: "
            "pip install 'ostinato[llm,serve]'"
        )
