"""The one module that knows what time it is; everything else is handed a Clock."""

import functools
import socket
import time
from pathlib import Path
from typing import Protocol


class Clock(Protocol):
    """`wall` is for records that people read; `mono` is for judging how long something has not moved."""

    def wall(self) -> float:
        """Seconds since the epoch, UTC."""

    def mono(self) -> float:
        """Seconds on a clock that is never set; comparable only between readings with the same `epoch_id`."""

    def epoch_id(self) -> str:
        """Names host and boot: readings of `mono` taken under another id must be forgotten, not compared."""

    def sleep(self, seconds: float) -> None: ...


class SystemClock:
    def wall(self) -> float:
        return time.time()

    def mono(self) -> float:
        # CLOCK_MONOTONIC is shared by all processes of a boot on Linux, so one tick can compare with the last.
        return time.monotonic()

    def epoch_id(self) -> str:
        return _host_and_boot()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


@functools.cache
def _host_and_boot() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = "unknown-boot"
    return f"{socket.gethostname()}/{boot}"
