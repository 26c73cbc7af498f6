"""What tests of preparation share."""

from __future__ import annotations

import pytest

from penstock.preparation import _engines


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks in this process: what they make is the same, and no worker has to start."""
    monkeypatch.setattr(_engines.Workforce, "_choose_engine", lambda *_: _engines.InlineTaskEngine())
