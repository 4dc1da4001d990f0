"""One seam to the host on which a scheduler's commands run: this one, or a login node over SSH (transport/ssh.py)."""

import shutil
from collections.abc import Mapping, Sequence
from typing import Protocol

from krea_runner.proc import Completed, run

__all__ = ["HERE", "Here", "Transport"]


class Transport(Protocol):
    host: str
    """What the user calls the other host; empty for this one."""

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        users_env: Mapping[str, str] | None = None,
        stdin: str | None = None,
    ) -> Completed:
        """Run `argv` to its end, as `proc.run` does, in that host's environment without what would leak (proc.py).

        `users_env` is used as it is (sbatch: its environment becomes the job's), on another host that host's own in its
        place; without it messages are in English and times are epochs. Never sent a second time: a cut connection means
        that nobody knows.
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
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        users_env: Mapping[str, str] | None = None,
        stdin: str | None = None,
    ) -> Completed:
        return run(argv, timeout_s=timeout_s, env=users_env, stdin=stdin)

    def has(self, command: str) -> bool:
        return shutil.which(command) is not None

    def describe(self) -> str:
        return "this host"


HERE = Here()
