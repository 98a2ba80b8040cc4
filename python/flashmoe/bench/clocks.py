"""The clocks of a GPU while it works, read by NVML, which comes with the driver.

The clocks of a GPU change as soon as it has finished its work. So a thread reads them while calls are timed.
"""

from __future__ import annotations

import ctypes
import statistics
import threading
from types import TracebackType
from typing import Any

_SECONDS = 0.02
_PATIENCE = 10.0
_SM, _MEMORY = 1, 2  # nvmlClockType_t


class Clocks:
    """A context manager. Afterwards `seen` has the median, least and most of SM clock and memory clock (MHz) and power
    (W)."""

    def __init__(self, uuid: str) -> None:
        """`uuid`: ``GPU-...``, the GPU's name in PyTorch and nvidia-smi. A GPU's number would not do, because PyTorch
        and NVML number the GPUs differently if CUDA_VISIBLE_DEVICES hides some."""
        self._uuid = uuid
        self._samples: dict[str, list[float]] = {"sm_mhz": [], "memory_mhz": [], "watts": []}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def seen(self) -> dict[str, Any]:
        return {
            name: {"median": statistics.median(each), "min": min(each), "max": max(each), "samples": len(each)}
            for name, each in self._samples.items()
            if each
        }

    def __enter__(self) -> Clocks:
        try:
            nvml = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return self  # no driver: there is nothing to read
        device = ctypes.c_void_p()
        if nvml.nvmlInit_v2() == 0 and not nvml.nvmlDeviceGetHandleByUUID(self._uuid.encode(), ctypes.byref(device)):
            self._thread = threading.Thread(target=self._watch, args=(nvml, device), daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_PATIENCE)  # a driver that does not answer costs only the samples

    def _watch(self, nvml: ctypes.CDLL, device: ctypes.c_void_p) -> None:
        number = ctypes.c_uint()
        while not self._stop.wait(_SECONDS):
            for name, clock in (("sm_mhz", _SM), ("memory_mhz", _MEMORY)):
                if nvml.nvmlDeviceGetClockInfo(device, clock, ctypes.byref(number)) == 0:
                    self._samples[name].append(number.value)
            if nvml.nvmlDeviceGetPowerUsage(device, ctypes.byref(number)) == 0:
                self._samples["watts"].append(number.value / 1e3)
