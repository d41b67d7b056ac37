"""Every test that takes a `lag` runs eagerly, and again with resident sequences and the host one step behind."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", params=[None, 1], ids=["eager", "lag1"])
def lag(request) -> int | None:
    return request.param
