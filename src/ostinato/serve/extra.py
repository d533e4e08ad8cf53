"""The `serve` extra: the packages that the server needs besides those of the decoder."""

from __future__ import annotations

import importlib.util

from ostinato.errors import NotAvailableError

_NEEDED = {
    "starlette": "starlette",
    "uvicorn": "uvicorn",
    "h11": "h11",
    "prometheus_client": "prometheus-client",
    # The decoder's packages: the error names one command that installs everything.
    "gguf": "gguf",
    "tokenizers": "tokenizers",
    "jinja2": "jinja2",
}


def require_extra() -> None:
    """Raises NotAvailableError, with the command to install, unless all packages of the extra are
    here."""
    missing = [name for module, name in _NEEDED.items() if not importlib.util.find_spec(module)]
    if missing:
        raise NotAvailableError(
            f"the server needs {', '.join(missing)}, not installed here: "
            "pip install 'ostinato[llm,serve]'"
        )
