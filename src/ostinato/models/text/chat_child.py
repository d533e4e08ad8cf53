"""The child's side of `chat`: renders chat templates in jinja2's sandbox.

The environment is that of transformers, so that a template gives the same text here and there
(`_compile_jinja_template` in transformers/utils/chat_template_utils.py).
"""

from __future__ import annotations

import datetime
import functools
import json

# No file can be opened once a template runs, so modules that jinja2 and Python import lazily are
# imported now.
import pprint  # noqa: F401
import unicodedata  # noqa: F401
from typing import Any

import jinja2
import jinja2.constants
import jinja2.debug
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ostinato.errors import ModelError, ModelFormatError


class _Generation(jinja2.ext.Extension):
    """The tag `{% generation %}`, which marks an assistant's text for training; here it renders its
    body only."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 reads this attribute

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replaces jinja2's filter, which would escape characters for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


@functools.lru_cache(maxsize=8)
def _compiled(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


def answer(request: bytes) -> str:
    """Renders a template and returns the text.

    `request`: JSON with the template's `source`, its `variables`, and `longest`, the most
    characters of the text.  Raises ModelFormatError for a source that is no template, ModelError
    for a template that refuses its input, fails or makes too much text.
    """
    wanted: dict[str, Any] = json.loads(request)
    try:
        template = _compiled(wanted["source"])
    except MemoryError:
        raise
    except Exception as error:  # jinja2's errors, or those of Python's compiler for jinja2's code
        raise ModelFormatError(f"cannot be compiled: {error}") from None
    pieces: list[str] = []
    left: int = wanted["longest"]
    try:
        for piece in template.generate(wanted["variables"]):
            left -= len(piece)
            if left < 0:
                raise ModelError(f"was stopped: it makes more than {wanted['longest']} characters")
            pieces.append(piece)
        text = "".join(pieces)
        text.encode()  # text with lone surrogates cannot be tokenized either
        return text
    except (MemoryError, ModelError):
        raise
    except jinja2.TemplateError as error:
        raise ModelError(f"refused the messages: {error}") from None
    except Exception as error:  # a template can raise anything: 1/0, a missing key, recursion
        raise ModelError(f"failed: {type(error).__name__}: {error}") from None


# This imports more modules (codecs, above all) and builds the lexer that all templates share.
_compiled("{% for m in messages %}{{ '\\n' + m.x | tojson }}{% endfor %}").render(
    messages=[{"x": 1}]
)
