"""Graphs of other libraries in files, run without these libraries."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu import saved_graphs
from tests.gpu.foreign import library

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Files of other libraries' graphs, saved in one process and run in another."""
    library("torch")
    folder = tmp_path_factory.mktemp("foreign")
    outcomes = saved_graphs.save_elsewhere(folder, ())
    said = saved_graphs.run_elsewhere(folder)
    print(said)
    return folder, outcomes


@pytest.mark.alone
@pytest.mark.parametrize("name", saved_graphs.NAMES)
def test_other_libraries_graphs_without_the_libraries(
    foreign: tuple[Path, dict[str, str]], name: str
) -> None:
    found = saved_graphs.verdict(foreign[0], name, foreign[1])
    if found.kind == "missing":
        pytest.skip(found.what)
    assert found.kind in ("equal", "refused"), found.what
