"""Chat templates: jinja2 programs that come inside model files, so they are run as strangers' code.

The environment is the one that transformers gives templates (`trim_blocks`, `lstrip_blocks`, loop
controls, `raise_exception`, `strftime_now`, `tojson`, the `generation` tag), in jinja2's immutable
sandbox, with bounds that `chat_sandbox` explains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from ostinato.errors import InputError, ModelError, ModelFormatError
from ostinato.models.chat_sandbox import Budget, RefusedError, budget_now, make_environment

__all__ = ["DEFAULT_TEMPLATE", "ChatTemplate", "render_chat"]

# ChatML: what is used for a model that names no template but has its tokens.
DEFAULT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_MAX_SOURCE = 1 << 18  # characters, far above any template in use


class ChatTemplate:
    """A compiled chat template.

    `where` is what error messages call it.  Raises ModelFormatError if it is no jinja2 template, or
    uses filters that are left out.
    """

    def __init__(self, source: str, *, where: str = "the model's chat template") -> None:
        self._where = where
        if len(source) > _MAX_SOURCE:
            raise ModelFormatError(f"{where} is {len(source)} long, more than {_MAX_SOURCE}")
        try:
            self._template = make_environment().from_string(source)
        except (jinja2.TemplateError, RecursionError, ValueError, SyntaxError) as error:
            raise ModelFormatError(f"{where} cannot be compiled: {error}") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **variables: object,
    ) -> str:
        """The prompt for `messages`: mappings with the strings `role` and `content`.

        `add_generation_prompt`: end with the head of the assistant's turn.  `variables` are what
        else a template may use: `bos_token`, `eos_token`, `tools`, ….

        Raises InputError for messages of another form, ModelError if the template refuses them
        (`raise_exception`), fails, runs too long or makes too much text.
        """
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise InputError(f"message {index} must be a mapping with a role and a content")
        budget = Budget([list(messages), variables])
        token = budget_now.set(budget)
        try:
            pieces: list[str] = []
            length = 0
            for piece in self._template.generate(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                **{"bos_token": "", "eos_token": "", "tools": None, **variables},
            ):
                pieces.append(piece)
                length += len(piece)
                budget.text(length)
            return "".join(pieces)
        except RefusedError as error:
            raise ModelError(f"{self._where} was stopped: {error}") from None
        except jinja2.TemplateError as error:
            raise ModelError(f"{self._where} refused the messages: {error}") from None
        except Exception as error:  # a template can raise anything: 1/0, a missing key, recursion
            kind = type(error).__name__
            raise ModelError(f"{self._where} failed: {kind}: {str(error)[:300]}") from None
        finally:
            budget_now.reset(token)


def render_chat(
    template: str | None,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    **variables: object,
) -> str:
    """`ChatTemplate(template).render(…)`; ChatML if the model has no template."""
    return ChatTemplate(DEFAULT_TEMPLATE if template is None else template).render(
        messages, add_generation_prompt=add_generation_prompt, **variables
    )
