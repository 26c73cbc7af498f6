"""A Ray cluster: the one this process already uses, one at an address, or one of its own on this machine."""

import os
from typing import Any, Self

from penstock.errors import MissingExtra


def load_ray(what: str) -> Any:
    """The package `ray`, for the option `what`.

    Raises:
        MissingExtra: it is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise MissingExtra(f"{what} needs Ray ({error}): pip install 'penstock-data[ray]'") from None
    return ray


class Cluster:
    """A context that connects to a cluster, and starts one if there is none.

    Args:
        what: The option that asks for Ray, for the message if Ray is not installed.
        address: The cluster's address; by default `RAY_ADDRESS`, or else a new cluster on this machine.
        num_cpus: Processors of a new cluster; by default all of the machine's.
    """

    def __init__(self, what: str, address: str | None, num_cpus: int | None = None) -> None:
        self.ray = load_ray(what)
        self._address = address or os.environ.get("RAY_ADDRESS")
        self._num_cpus = num_cpus
        self._is_ours = False

    def __enter__(self) -> Self:
        if not self.ray.is_initialized():
            cpus = None if self._address else self._num_cpus
            self.ray.init(address=self._address or "local", num_cpus=cpus, include_dashboard=False, log_to_driver=False)
            self._is_ours = True
        return self

    def __exit__(self, *exception: object) -> None:
        if self._is_ours:
            self.ray.shutdown()

    @property
    def num_cpus(self) -> int:
        """Processors in the cluster."""
        return max(1, int(self.ray.cluster_resources().get("CPU", 1)))
