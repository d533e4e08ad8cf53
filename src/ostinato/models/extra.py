"""Extras: packages that the decoder and the server need and the graph layer does not."""

from __future__ import annotations

import functools
import importlib.util

from ostinato.errors import NotAvailableError

_LLM = ("gguf", "safetensors", "tokenizers", "jinja2")
_NEEDED = {
    "llm": _LLM,
    # The error names one command that installs everything.
    "llm,serve": ("starlette", "uvicorn", "h11", "prometheus-client", *_LLM),
}


@functools.cache
def require_extra(what: str, extra: str = "llm") -> None:
    """Raises NotAvailableError, with the pip command, unless every package of the extra is there;
    the message begins with `what`."""
    missing = [n for n in _NEEDED[extra] if importlib.util.find_spec(n.replace("-", "_")) is None]
    if missing:
        words = f"{what} needs {', '.join(missing)}, not installed here"
        raise NotAvailableError(f"{words}: pip install 'ostinato[{extra}]'")
