"""Property tests of every day: fewer examples than hypothesis's 100, where a test does not say how many."""

from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("everyday", max_examples=30)
settings.load_profile("everyday")


@pytest.fixture(scope="module")
def one_torch_thread() -> Iterator[None]:
    """Torch computes in one thread, so that sums are the same to the last bit."""
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
