"""The policy: a pure function whose every doubt ends in an eager run with a reason."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.step import Action, Reason, Refusal, Situation, decide

situations = st.builds(
    Situation,
    graphs=st.booleans(),
    profiling=st.booleans(),
    inside_capture=st.booleans(),
    quarantine=st.none()
    | st.tuples(
        st.sampled_from([Reason.BUILD_FAILED, Reason.HOST_STATE, Reason.STATE_LOST]),
        st.just("why"),
    ),
    unmet=st.sampled_from([(), ("workspace",)]),
    unfit=st.none() | st.just((Reason.OVER_BUCKETS, "70 is over 64")),
    has_graph=st.booleans(),
    runs=st.integers(0, 3),
    warmups=st.integers(0, 2),
    capped=st.none() | st.just((Reason.RECAPTURED, "4 times")),
    strict=st.booleans(),
    records=st.booleans(),
)


@given(situations)
def test_a_graph_is_used_only_when_nothing_speaks_against_it(s: Situation) -> None:
    decision = decide(s)
    free = (
        s.graphs
        and not s.profiling
        and not s.inside_capture
        and s.quarantine is None
        and not s.unmet
        and s.unfit is None
    )
    if decision.action is Action.REPLAY:
        assert free
        assert s.has_graph
    if decision.action is Action.BUILD:
        assert free
        assert not s.has_graph and s.capped is None
        assert s.records or s.runs >= s.warmups
    if not free:
        refused = decision.reason in (Reason.HOST_STATE, Reason.STATE_LOST) or (
            s.strict and decision.reason.silent
        )
        assert decision.action is (Action.REFUSE if refused else Action.EAGER)
        assert decision.reason not in (Reason.REPLAYED, Reason.FIRST_USE, Reason.WARMING_UP)


@given(situations)
def test_a_strict_step_never_runs_eagerly_in_silence(s: Situation) -> None:
    lax, strict = decide(replace(s, strict=False)), decide(replace(s, strict=True))
    assert strict.reason is lax.reason, "why is the same; what is done may not be"
    assert (strict.action is Action.EAGER) <= (not strict.reason.silent)
    if lax.action is not Action.EAGER or not lax.reason.silent:
        assert strict == lax
    if s.capped is not None and not s.has_graph:
        assert lax.action is not Action.BUILD


@pytest.mark.parametrize(
    ("situation", "action", "reason"),
    [
        (Situation(), Action.EAGER, Reason.WARMING_UP),
        (Situation(runs=1), Action.BUILD, Reason.FIRST_USE),
        (Situation(records=True), Action.BUILD, Reason.FIRST_USE),
        (Situation(has_graph=True), Action.REPLAY, Reason.REPLAYED),
        (Situation(has_graph=True, graphs=False), Action.EAGER, Reason.GRAPHS_OFF),
        (Situation(has_graph=True, profiling=True), Action.EAGER, Reason.PROFILING),
        (Situation(has_graph=True, unmet=("head",)), Action.EAGER, Reason.PRECONDITION),
        (Situation(inside_capture=True), Action.EAGER, Reason.INSIDE_CAPTURE),
        (Situation(strict=True), Action.EAGER, Reason.WARMING_UP),
        (Situation(strict=True, graphs=False), Action.EAGER, Reason.GRAPHS_OFF),
        (Situation(strict=True, unmet=("head",)), Action.REFUSE, Reason.PRECONDITION),
        (
            Situation(strict=True, unfit=(Reason.OVER_BUCKETS, "9")),
            Action.REFUSE,
            Reason.OVER_BUCKETS,
        ),
        (
            Situation(runs=1, capped=(Reason.RECAPTURED, "4 times")),
            Action.EAGER,
            Reason.RECAPTURED,
        ),
        (
            Situation(runs=1, capped=(Reason.CAPTURE_TIME, "2 s"), strict=True),
            Action.REFUSE,
            Reason.CAPTURE_TIME,
        ),
        (
            Situation(has_graph=True, capped=(Reason.CAPTURE_TIME, "2 s")),
            Action.REPLAY,
            Reason.REPLAYED,
        ),
        (
            Situation(quarantine=(Reason.MISMATCH, "slot x")),
            Action.EAGER,
            Reason.MISMATCH,
        ),
        (
            Situation(quarantine=(Reason.HOST_STATE, "argument 0")),
            Action.REFUSE,
            Reason.HOST_STATE,
        ),
        (
            Situation(quarantine=(Reason.HOST_STATE, "argument 0"), graphs=False),
            Action.EAGER,
            Reason.GRAPHS_OFF,
        ),
        (  # an eager run would read it too
            Situation(quarantine=(Reason.STATE_LOST, "slot x"), graphs=False),
            Action.REFUSE,
            Reason.STATE_LOST,
        ),
    ],
)
def test_table(situation: Situation, action: Action, reason: Reason) -> None:
    decision = decide(situation)
    assert (decision.action, decision.reason) == (action, reason)
    assert reason.value in str(decision)


def test_each_refusal_of_a_cache_is_a_reason() -> None:
    for refusal in Refusal:
        assert Reason(refusal.value).silent
