"""Replay: steps that turn into graphs, the policy behind them, checks and profiles."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ostinato.explain.times import Percentiles, ReplayEvent, ReplayProfile
from ostinato.step.graphed_step import GraphedStep
from ostinato.step.held import HeldReplay
from ostinato.step.policy import Action, Decision, Reason, Situation, decide
from ostinato.step.sizes import StepKey
from ostinato.step.slots import Role, Slot
from ostinato.step.statistics import StepKeyStatistics, StepStatistics

if TYPE_CHECKING:
    from ostinato.step.check import Cause, CheckReport, Finding

__all__ = [
    "Action",
    "Cause",
    "CheckReport",
    "Decision",
    "Finding",
    "GraphedStep",
    "HeldReplay",
    "Percentiles",
    "Reason",
    "ReplayEvent",
    "ReplayProfile",
    "Role",
    "Situation",
    "Slot",
    "StepKey",
    "StepKeyStatistics",
    "StepStatistics",
    "decide",
]


def __getattr__(name: str) -> object:
    """What only checks need is loaded when it is first used."""
    if name not in ("Cause", "CheckReport", "Finding"):
        raise AttributeError(f"module 'ostinato.step' has no attribute {name!r}")
    from ostinato.step import check

    return getattr(check, name)
