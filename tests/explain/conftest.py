"""The host driver draws the order of what nothing orders, so that a missing edge shows."""

from __future__ import annotations

import pytest

from tests.conftest import DRIVERS, shuffled_device

device = pytest.fixture(params=DRIVERS)(shuffled_device)
