"""Replay: steps that turn into graphs, the policy behind them, checks and profiles."""

from ostinato.replay.check import Cause, CheckReport, Finding
from ostinato.replay.held import HeldReplay
from ostinato.replay.policy import Action, Decision, Reason, Situation, decide
from ostinato.replay.profile import Percentiles, ReplayEvent, ReplayProfile
from ostinato.replay.sizes import StepKey
from ostinato.replay.slots import Role, Slot
from ostinato.replay.statistics import StepKeyStatistics, StepStatistics
from ostinato.replay.step import GraphedStep

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
