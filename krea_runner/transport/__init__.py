"""One seam to the host on which a scheduler's commands run: this one, or a login node over SSH (transport/ssh.py)."""

import os
import shutil
from collections.abc import Sequence
from typing import Protocol

from krea_runner.proc import Completed, clean_environment, run

__all__ = ["HERE", "Here", "Transport"]


class Transport(Protocol):
    host: str
    """What the user calls the other host; empty for this one."""

    def run(
        self, argv: Sequence[str], *, timeout_s: float, users_environment: bool = False, stdin: str | None = None
    ) -> Completed:
        """Run `argv` to its end, as `proc.run` does, in that host's environment without what would leak (proc.py).

        With `users_environment` nothing else is changed (sbatch: its environment becomes the job's); otherwise messages
        are in English and times are epochs. Never sent a second time: a cut connection means that nobody knows.
        Raises: OSError where the command does not exist or may not be run; SchedulerUnavailable where the host could
        not be reached or the connection was cut before the end.
        """

    def has(self, command: str) -> bool:
        """Whether `command` is on PATH there. Raises: SchedulerUnavailable."""

    def describe(self) -> str:
        """Who is connected where; for `doctor`. Raises: SchedulerUnavailable."""


class Here:
    host = ""

    def run(
        self, argv: Sequence[str], *, timeout_s: float, users_environment: bool = False, stdin: str | None = None
    ) -> Completed:
        env = clean_environment(os.environ) if users_environment else None
        return run(argv, timeout_s=timeout_s, env=env, stdin=stdin)

    def has(self, command: str) -> bool:
        return shutil.which(command) is not None

    def describe(self) -> str:
        return "this host"


HERE = Here()
