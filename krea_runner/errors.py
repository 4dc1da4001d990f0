"""Every error this package raises on purpose.

    KreaRunnerError                     exit 1
    ├─ ConfigError                      exit 78   run.toml / site.toml; carries every problem found, not the first
    ├─ NotFound                         exit 3
    ├─ SchedulerError                   exit 69   the scheduler said no; the same call will be refused again
    │  ├─ SchedulerUnavailable          exit 75   could not ask, or no answer in time: nothing is known
    │  ├─ JobNotFound                   exit 3
    │  └─ SchedulerOutputError          exit 69   an answer we cannot read; keeps the line
    ├─ FilesUnavailable                exit 75   files on another host could not be read: nothing is known of them
    └─ HistoryError                     exit 1
       ├─ HistoryUnavailable            exit 75   locked, read-only, disk full, file system gone
       └─ SchemaTooNew                  exit 78

`str(error)` is one line: what was being done, on what, what happened. `hint` is what to type next.
`transient` tells a tick whether the next tick may succeed without anybody doing anything.
Only `cli/` prints errors and picks exit codes.
"""

import os
import traceback
from collections.abc import Sequence


class KreaRunnerError(Exception):
    exit_code = 1
    transient = False

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class ConfigError(KreaRunnerError):
    """`problems` holds one line a problem, in file order, each naming its key and line number."""

    exit_code = 78

    def __init__(self, message: str, *, problems: Sequence[str] = (), hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.problems = tuple(problems)


class NotFound(KreaRunnerError):
    exit_code = 3


class SchedulerError(KreaRunnerError):
    """`argv`, `returncode` and `stderr` are those of the command that was refused (empty for `local`)."""

    exit_code = 69

    def __init__(
        self,
        message: str,
        *,
        argv: Sequence[str] = (),
        returncode: int | None = None,
        stderr: str = "",
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.argv = tuple(argv)
        self.returncode = returncode
        self.stderr = stderr


class SchedulerUnavailable(SchedulerError):
    exit_code = 75
    transient = True


class JobNotFound(SchedulerError):
    exit_code = 3


class RequeueDisabled(SchedulerError):
    """The job was submitted with --no-requeue, or the cluster has JobRequeue=0: for good, once it has ended."""


class MayNotDrain(SchedulerError):
    """Draining and resuming nodes is for Slurm's operators."""


class SchedulerOutputError(SchedulerError):
    """`line` is the output that could not be read, kept whole."""

    def __init__(self, message: str, *, line: str, argv: Sequence[str] = ()) -> None:
        super().__init__(message, argv=argv)
        self.line = line


class FilesUnavailable(KreaRunnerError):
    exit_code = 75
    transient = True


class HistoryError(KreaRunnerError):
    exit_code = 1


class HistoryUnavailable(HistoryError):
    exit_code = 75
    transient = True


class SchemaTooNew(HistoryError):
    exit_code = 78


def fault_line(error: Exception) -> str:
    """What to say of an error that stops one run and must not stop the others; of one that is not ours, also where it arose."""
    if isinstance(error, KreaRunnerError):
        return str(error)
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"a fault of krea-runner itself: {type(error).__name__}: {error} ({os.path.basename(where.filename)}:{where.lineno})"
