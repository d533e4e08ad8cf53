"""CUDA's rules for updates, on the host driver: what may change in an executable."""

from __future__ import annotations

from collections.abc import Callable

from ostinato.driver.api import (
    ConditionalNodeParams,
    MemcpyNodeParams,
    MemsetNodeParams,
    NodeParams,
    UpdateOutcome,
    UpdateVerdict,
)
from ostinato.driver.host.definition import MEMORY_KINDS, GraphDefinition, Node, copy_dimensions

__all__ = ["SUCCESS", "compare_graphs", "may_become"]

SUCCESS = UpdateOutcome(UpdateVerdict.SUCCESS)


def may_become(old: NodeParams, new: NodeParams, is_pinned: Callable[[int], bool]) -> str:
    """Why a node's parameters cannot be replaced by others of the same kind; empty if they can."""
    if isinstance(old, MemcpyNodeParams) and isinstance(new, MemcpyNodeParams):
        if copy_dimensions(old) != copy_dimensions(new):
            return f"a {copy_dimensions(old)}-D copy cannot become {copy_dimensions(new)}-D"
        if is_pinned(old.dst) != is_pinned(new.dst) or is_pinned(old.src) != is_pinned(new.src):
            return "a copy cannot change between device and pinned memory"
    if (
        isinstance(old, MemsetNodeParams)
        and isinstance(new, MemsetNodeParams)
        and copy_dimensions(old) != copy_dimensions(new)
    ):
        return f"a {copy_dimensions(old)}-D fill cannot become {copy_dimensions(new)}-D"
    return ""


def compare_graphs(
    old: GraphDefinition, new: GraphDefinition, is_pinned: Callable[[int], bool]
) -> UpdateOutcome:
    """Whether the executable's snapshot `old` may become `new`.

    Nodes pair by order of creation.  CUDA pairs them along the edges, so it also takes an equal
    graph whose nodes were created in another order (measured); its documentation asks for the same
    order all the same.
    """
    before, after = list(old.nodes.values()), list(new.nodes.values())
    if len(before) != len(after):
        return UpdateOutcome(UpdateVerdict.TOPOLOGY_CHANGED)
    old_index = {node: i for i, node in enumerate(before)}
    new_index = {node: i for i, node in enumerate(after)}
    for was, is_ in zip(before, after, strict=True):
        if was.kind != is_.kind:
            return UpdateOutcome(UpdateVerdict.NODE_TYPE_CHANGED, is_.handle)
        if len(was.incoming) != len(is_.incoming):
            return UpdateOutcome(UpdateVerdict.TOPOLOGY_CHANGED, is_.handle)
        edges = [(old_index[source], data) for source, data in was.incoming]
        for source, data in is_.incoming:
            if (new_index[source], data) not in edges:
                return UpdateOutcome(UpdateVerdict.TOPOLOGY_CHANGED, is_.handle, source.handle)
        if was.params == is_.params and not was.inner:
            continue
        outcome = _compare_nodes(was, is_, is_pinned)
        if outcome is not SUCCESS:
            return outcome
    return SUCCESS


def _compare_nodes(was: Node, is_: Node, is_pinned: Callable[[int], bool]) -> UpdateOutcome:
    changed = UpdateOutcome(UpdateVerdict.PARAMETERS_CHANGED, is_.handle)
    if was.kind in MEMORY_KINDS and was.params != is_.params:
        return changed
    if may_become(was.params, is_.params, is_pinned):
        return changed
    if isinstance(was.params, ConditionalNodeParams):
        assert isinstance(is_.params, ConditionalNodeParams)
        if was.params.kind != is_.params.kind or was.params.size != is_.params.size:
            return changed
        one, other = was.condition, is_.condition
        if (one.default, one.reset_at_launch) != (other.default, other.reset_at_launch):
            return changed
    for inner, new_inner in zip(was.inner, is_.inner, strict=True):
        outcome = compare_graphs(inner, new_inner, is_pinned)
        if outcome is not SUCCESS:
            # CUDA names no node of an inner graph that lacks or has too many.
            return UpdateOutcome(outcome.verdict, is_.handle) if outcome.node is None else outcome
    return SUCCESS
