"""Replay: steps that turn into graphs, the policy behind them, checks and profiles."""

from ostinato.replay.held import HeldReplay
from ostinato.replay.policy import Action, Decision, Reason, Situation, decide
from ostinato.replay.profile import Percentiles, ReplayEvent, ReplayProfile
from ostinato.replay.slots import Role, Slot, SlotMismatch
from ostinato.replay.statistics import StepStatistics
from ostinato.replay.step import GraphedStep

__all__ = [
    "Action",
    "Decision",
    "GraphedStep",
    "HeldReplay",
    "Percentiles",
    "Reason",
    "ReplayEvent",
    "ReplayProfile",
    "Role",
    "Situation",
    "Slot",
    "SlotMismatch",
    "StepStatistics",
    "decide",
]
