"""What tests of preparation share: only those about worker processes wait for some to start."""

from __future__ import annotations

import pytest

from penstock.preparation import _engines


@pytest.fixture
def worker_processes() -> None:
    """One worker is a process, as it is for users."""


@pytest.fixture(autouse=True)
def one_worker_is_this_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks for one worker are done here, to the same bytes: it would take most of a second to start.

    Fixtures of a module run before this one, so the references that they prepare come from a worker.
    """
    if "worker_processes" in request.fixturenames:
        return
    choose = _engines.Workforce._choose_engine

    def choose_inline(workforce: _engines.Workforce, num_tasks: int, local_only: bool) -> _engines.TaskEngine:
        settings = workforce._settings
        return choose(workforce, num_tasks, local_only or (settings.engine, settings.workers) == ("local", 1))

    monkeypatch.setattr(_engines.Workforce, "_choose_engine", choose_inline)
