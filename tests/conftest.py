"""Property tests of every day: fewer examples than hypothesis's 100, and a busy machine is no failure."""

import dataclasses
import gc
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("everyday", max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("everyday")


def pytest_collection_finish() -> None:
    """Garbage is looked for among what tests make, not among all that modules hold: a tenth of a second each time."""
    gc.collect()
    gc.freeze()


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


@pytest.fixture(scope="module")
def lasting_fork_servers() -> Iterator[None]:
    """Fork servers go on from test to test: each takes half a second of processor time to start, with torch three.

    Two tests are not alike for a server, because pytest puts the name of each into the environment: not here.
    """
    from penstock.workers._fork_servers import RunningServer, _running_servers, _RunningServers

    lend, kept = _RunningServers.lend, []

    def lend_and_keep(servers: _RunningServers, kind: Any) -> RunningServer:
        variables = tuple(each for each in kind.environment if each[0] != "PYTEST_CURRENT_TEST")
        kind = dataclasses.replace(kind, environment=variables)
        if kind not in servers._servers:
            kept.append(lend(servers, kind))
        return lend(servers, kind)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_RunningServers, "lend", lend_and_keep)
        yield
    for server in kept:
        _running_servers.take_back(server)
