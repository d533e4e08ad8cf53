"""The fixtures that several files of this package use."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.emulator.stub import build


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A libcuda that holds graphs and runs nothing."""
    made = build(tmp_path_factory.mktemp("libcuda"))
    if made is None:
        pytest.skip("needs a C compiler")
    return made
