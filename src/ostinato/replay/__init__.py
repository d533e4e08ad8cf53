"""Replay: steps that turn into graphs, the policy behind them, checks and profiles."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ostinato.cache.profile import Percentiles, ReplayEvent, ReplayProfile
from ostinato.replay.held import HeldReplay
from ostinato.replay.policy import Action, Decision, Reason, Situation, decide
from ostinato.replay.sizes import StepKey
from ostinato.replay.slots import Role, Slot
from ostinato.replay.statistics import StepKeyStatistics, StepStatistics
from ostinato.replay.step import GraphedStep

if TYPE_CHECKING:
    from ostinato.replay.check import Cause, CheckReport, Finding

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
        raise AttributeError(f"module 'ostinato.replay' has no attribute {name!r}")
    from ostinato.replay import check

    return getattr(check, name)
