"""What runs inside the job of a submitit function: `python -u -m krea_runner.launch.submitit_entry FOLDER`.

submitit loads the pickle, calls the function and pickles the result. What is ours is what happens around that, because here
the supervisor alone owns restarts (submitit 1.5.4 otherwise calls `scontrol requeue` from its signal handler, and dies of
what a killed attempt left behind):

* USR2 and TERM take the checkpoint and requeue nothing;
* a checkpoint replaces the pickle in one step: submitit removes it first, and a kill in between would leave none;
* the pickle of the run serves every job id of the run, also of a job that was submitted again;
* an exception ends the attempt, not the run: `_result.pkl` is kept for success.
"""

import contextlib
import itertools
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from submitit.core.logger import get_logger
from submitit.core.utils import DelayedSubmission, JobPaths
from submitit.slurm.slurm import SlurmJobEnvironment

FUNCTION = "function.pkl"
"""The function as it was submitted; what a checkpoint saved later is in JOBID_submitted.pkl."""
EXECUTOR = "krea"
# From USR2 (sent some 90 s before a time limit or by whoever preempts, up to 60 s early) to the end that Slurm brings. Ending
# sooner by ourselves would read as a crash. Then exit all the same: nobody may have meant to end us.
WAIT_FOR_END_S = 180.0


class KreaJobEnvironment(SlurmJobEnvironment):
    """What `submitit.JobEnvironment()` is inside such a job; the `local` scheduler sets Slurm's variables too."""

    def _requeue(self, countdown: int) -> None:
        get_logger().info("not requeued from inside the job: the supervisor does that")

    def _handle_signals(self, paths: JobPaths, submission: DelayedSubmission) -> None:
        handler = _Ending(self, paths, submission)
        signal.signal(signal.SIGTERM, handler)
        signal.signal(self._usr_sig(), handler)


class _Ending:
    """The handler of the signals that announce the end: rank 0 saves a checkpointable callable's state, once."""

    def __init__(self, env: KreaJobEnvironment, paths: JobPaths, submission: DelayedSubmission) -> None:
        self.env, self.paths, self.submission = env, paths, submission
        self.begun = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        final = number == signal.SIGTERM
        first = self.env.global_rank == 0 and _is_checkpointable(self.submission)
        if self.begun or not (final or first):
            return
        self.begun = True
        get_logger().warning(f"caught {signal.Signals(number).name}")
        if first:
            self._save()
        if not final:
            time.sleep(WAIT_FOR_END_S)
        sys.exit(128 + number)

    def _save(self) -> None:
        try:
            saved = self.submission._checkpoint_function()
            if saved is None:
                get_logger().warning("checkpoint() returned None: the state saved before stays")
            else:
                _replace(self.paths.submitted_pickle, saved)
                get_logger().info(f"saved {self.paths.submitted_pickle}")
        except Exception:  # noqa: BLE001 - whatever it raises, the end is near and an older state is on disk
            get_logger().exception("checkpoint() failed: the state saved before stays")


def _is_checkpointable(submission: DelayedSubmission) -> bool:
    return any(hasattr(submission.function, name) for name in ("__submitit_checkpoint__", "checkpoint"))


def save_checkpoint(function: Any, *args: Any, **kwargs: Any) -> None:
    """From inside a running function: let the next attempt begin with `function(*args, **kwargs)`.

    For what no signal handler sees: SIGKILL, a lost node, a rank stuck in a collective. Only rank 0 writes; outside of a
    job of ours it does nothing, so that the function can be called directly.
    Raises: OSError when the state could not be written; what was saved before is kept.
    """
    if os.environ.get("SUBMITIT_EXECUTOR") != EXECUTOR or "SUBMITIT_FOLDER" not in os.environ:
        return
    env = KreaJobEnvironment()
    if env.global_rank == 0:
        _replace(env.paths.submitted_pickle, DelayedSubmission(function, *args, **kwargs))


_numbers = itertools.count()


def _replace(target: Path, submission: DelayedSubmission) -> None:
    """Whole or not at all; a signal handler may come in between two calls."""
    partial = target.with_name(f".{target.name}.{os.getpid()}.{next(_numbers)}")
    try:
        submission.dump(partial)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------------------- one attempt


def failed_pickle(paths: JobPaths) -> Path:
    """The last exception of a task, as submitit pickles it: `("error", traceback)`."""
    return paths.folder / f"{paths.job_id}_{paths.task_id}_failed.pkl"


def prepare(paths: JobPaths) -> None:
    """Clear away what an earlier attempt of this task left; rank 0 finds the pickle to start from: this job's own, else
    the newest of the run's earlier jobs, else the function as it was submitted. The other ranks wait for it."""
    result = paths.result_pickle
    for stale in (result, result.with_name(f"{result.name}.save_tmp")):
        stale.unlink(missing_ok=True)
    target = paths.submitted_pickle
    if paths.task_id != 0 or target.exists():
        return
    saved = sorted(paths.folder.glob("*_submitted.pkl"), key=lambda path: path.stat().st_mtime_ns)
    source = saved[-1] if saved else paths.folder / FUNCTION
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.copyfile(source, partial)
    partial.replace(target)


def main() -> None:
    folder = Path(sys.argv[1])
    os.environ["SUBMITIT_FOLDER"] = str(folder)
    env = KreaJobEnvironment()
    prepare(env.paths)
    from submitit.core.submission import process_job

    try:
        process_job(folder)
    except Exception:
        with contextlib.suppress(FileNotFoundError):  # the traceback itself could not be pickled
            env.paths.result_pickle.replace(failed_pickle(env.paths))
        raise


if __name__ == "__main__":
    main()
