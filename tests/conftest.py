"""Property tests of every day: fewer examples than hypothesis's 100, and a busy machine is no failure."""

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("everyday", max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("everyday")


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks of a preparation are done in this process: to the same bytes, and no worker has to start."""
    from penstock.preparation import _engines

    monkeypatch.setattr(_engines.Workforce, "_choose_engine", lambda *_: _engines.InlineTaskEngine())


@pytest.fixture(scope="module")
def one_torch_thread() -> Iterator[None]:
    """Torch computes in one thread, so that sums are the same to the last bit."""
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
