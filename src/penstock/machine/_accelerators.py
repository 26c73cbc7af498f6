"""Accelerators: how busy, and how full. Through NVML (`nvidia-ml-py`), if it is installed and finds a device.

NVML answers in 10 to 100 µs, and its utilisation is a mean over the last 0.2 to 1 s: read it a few times a second, not
at every step.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple, Self


class AcceleratorUsage(NamedTuple):
    """One device, now."""

    number: int
    name: str
    utilization: float | None
    """Share of the time in which it computed at all, 0 to 1; not how much of the device did."""
    memory_used_bytes: int | None
    memory_bytes: int | None


class Accelerators:
    """The devices of this machine: none, without an error, if the library, a driver or a device is missing."""

    def __init__(self) -> None:
        self._nvml, self._handles = _open_nvml()

    def read(self) -> tuple[AcceleratorUsage, ...]:
        """Each device, now."""
        return tuple(self._read(number, handle) for number, handle in enumerate(self._handles))

    def close(self) -> None:
        """Let go of the driver."""
        if self._nvml is not None:
            _ask(self._nvml.nvmlShutdown)
            self._nvml, self._handles = None, ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _read(self, number: int, handle: Any) -> AcceleratorUsage:
        assert self._nvml is not None
        name = _ask(self._nvml.nvmlDeviceGetName, handle)
        rates = _ask(self._nvml.nvmlDeviceGetUtilizationRates, handle)
        memory = _ask(self._nvml.nvmlDeviceGetMemoryInfo, handle)
        return AcceleratorUsage(
            number=number,
            name=name.decode(errors="replace") if isinstance(name, bytes) else str(name or "accelerator"),
            utilization=None if rates is None else rates.gpu / 100,
            memory_used_bytes=None if memory is None else int(memory.used),
            memory_bytes=None if memory is None else int(memory.total),
        )


def _open_nvml() -> tuple[Any, tuple[Any, ...]]:
    """The library and a handle for each device; (None, ()) if there is nothing to ask."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # noqa: BLE001 - no library, driver or permission: NVML's errors have no common built-in base
        return None, ()
    count = _ask(nvml.nvmlDeviceGetCount) or 0
    handles = (_ask(nvml.nvmlDeviceGetHandleByIndex, index) for index in range(count))
    return nvml, tuple(handle for handle in handles if handle is not None)


def _ask(question: Any, *arguments: Any) -> Any:
    """The library's answer, or None if this device has none."""
    try:
        return question(*arguments)
    except Exception:  # noqa: BLE001 - as above
        return None
