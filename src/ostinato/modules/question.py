"""From a source and a name to a key: what is asked of the module cache."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.driver.api import Driver
from ostinato.errors import NotAvailableError
from ostinato.modules.compiler import Plan, is_expression, plan_compilation
from ostinato.modules.keys import SCHEMA, digest_of
from ostinato.modules.options import CompileOptions
from ostinato.modules.source import Source

__all__ = ["Question", "ask"]


@dataclass(frozen=True, slots=True)
class Question:
    """A question, with its key.  `plan` is None for host functions."""

    source: Source
    key: bytes
    plan: Plan | None


def ask(driver: Driver, source: Source, name: str, options: CompileOptions) -> Question:
    """The question with its key.  Asks the driver what it speaks, and not which one it is.

    Raises NotAvailableError for a source without this device's language, and what
    `plan_compilation` raises.
    """
    capabilities = driver.capabilities
    if capabilities.runs_host_functions:
        if not source.host:
            raise NotAvailableError(
                f"{driver.name} runs host functions and {source.name!r} has none: give it "
                f"host kernels (Source(…, host=[{name}])), or open a CUDA device"
            )
        # By identity: the functions live as long as the module, so an id is not used again.
        functions = sorted(source.host.items())
        parts: list[str | bytes | int | None] = [SCHEMA, "host", source.name]
        for entry, function in functions:
            parts += [entry, id(function)]
        return Question(source, digest_of(parts), None)
    if not source.has_device_code:
        raise NotAvailableError(
            f"{driver.name} runs compiled code and {source.name!r} has host functions alone: "
            "give it CUDA C++ too (Source(cuda=…)), or open the host device"
        )
    if source.kind != "cuda" and source.kind not in capabilities.image_kinds:
        raise NotAvailableError(
            f"{driver.name} does not load {source.kind}; it takes "
            f"{', '.join(sorted(capabilities.image_kinds))}"
        )
    expressions = (name,) if source.kind == "cuda" and is_expression(name) else ()
    plan = plan_compilation(source, options, driver.properties.compute_capability, expressions)
    return Question(source, plan.key, plan)
