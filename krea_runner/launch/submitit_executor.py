"""Python functions as supervised runs: a submitit executor whose batch script, queue and restarts are ours.

The function, its arguments and its result travel as submitit pickles them, in RUN_DIR/submitit/<id>/. Every function is a run
of its own, also within `map_array`: one job, one history, one budget.
"""

import re
import shlex
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from submitit.core import core
from submitit.core.logger import get_logger
from submitit.core.utils import DelayedSubmission, FailedJobError, UncompletedJobError, pickle_load

from krea_runner.config import check_run, read_document, slug_of, to_toml
from krea_runner.config.keys import SBATCH
from krea_runner.config.site import state_dir
from krea_runner.errors import ConfigError, KreaRunnerError
from krea_runner.launch.submitit_entry import EXECUTOR, FUNCTION
from krea_runner.model import JobRecord, JobState, Run, RunConfig, RunState

R = TypeVar("R")
Spec = Mapping[str, Mapping[str, Any]] | str | Path | None
"""The tables of a run.toml without `command`, or the path of a file with them."""

# submitit's word for it -> the table and key of run.toml
_GENERIC = {
    "name": ("run", "name"), "nodes": ("gang", "nodes"), "tasks_per_node": ("gang", "ranks_per_node"),
    "timeout_min": ("slurm", "time"), "mem_gb": ("slurm", "mem"), "cpus_per_task": ("slurm", "cpus_per_task"),
    "gpus_per_node": ("slurm", "gpus_per_node"),
}  # fmt: skip
# A job that has ended, in a run that nobody looks after any more, is over for whoever waits for its result.
NOBODY_S = 120.0
LOG_TAIL = 4000  # characters of a log in an exception


def submit(fn: Callable[..., R], *args: Any, spec: Spec = None, **kwargs: Any) -> "KreaJob[R]":
    """Submit `fn(*args, **kwargs)` as a supervised run; `spec` says with what, as a run.toml does.

    Each rank of the gang calls the function. `job.result()` waits for the run, restarts included.
    Raises: as launch/submit.py.
    """
    job = KreaExecutor("runs", spec=spec).submit(fn, *args, **kwargs)
    assert isinstance(job, KreaJob)  # noqa: S101 - submitit's signature says less
    return job


class KreaExecutor(core.Executor):
    """`folder`: where the run directories are made, on a file system that all nodes share; a `dir` in `spec` wins.
    `python`: the words of the command that starts Python in the job, by default the one that runs now."""

    def __init__(self, folder: str | Path, spec: Spec = None, python: str | None = None) -> None:
        super().__init__(folder)
        self.spec = spec
        self.python = shlex.split(python) if python else [sys.executable]

    @classmethod
    def affinity(cls) -> int:
        return 0  # never chosen by AutoExecutor unless it is asked for: cluster="krea"

    @classmethod
    def _valid_parameters(cls) -> set[str]:
        return {*_GENERIC, *SBATCH}

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        merged = {**self.parameters, **kwargs}
        _checked_run(_tables(self.spec, merged, "function"), self._base(), self.folder)
        self.parameters = merged

    def _internal_process_submissions(self, delayed_submissions: list[DelayedSubmission]) -> list[core.Job[Any]]:
        return [self._submit_one(delayed) for delayed in delayed_submissions]

    def _base(self) -> Path:
        return Path.cwd() if self.spec is None or isinstance(self.spec, Mapping) else Path(self.spec).absolute().parent

    def _submit_one(self, delayed: DelayedSubmission) -> "KreaJob[Any]":
        tables = _tables(self.spec, self.parameters, _name_of(delayed.function))
        config, tables = _checked_run(tables, self._base(), self.folder)
        folder = config.run_dir / "submitit" / uuid.uuid4().hex[:12]
        if re.search("%[jtaA]", str(folder)):
            raise ConfigError(f"submitit would replace the % in {folder}", hint="name another [run] dir")
        command = (*self.python, "-u", "-m", "krea_runner.launch.submitit_entry", str(folder))
        environment = MappingProxyType({**config.env, "SUBMITIT_EXECUTOR": EXECUTOR})
        config = replace(config, command=command, env=environment)
        tables["run"]["command"] = list(command)
        tables["env"] = dict(environment)
        run = _queue(config, to_toml(tables).encode(), delayed, folder)
        return KreaJob(folder, run.job_id or "", tasks=range(config.gang.world_size))


def _queue(config: RunConfig, source: bytes, delayed: DelayedSubmission, folder: Path) -> Run:
    from krea_runner.clock import SystemClock
    from krea_runner.history.store import open_history
    from krea_runner.launch.submit import submit as submit_run
    from krea_runner.schedulers import open_scheduler

    try:
        folder.mkdir(parents=True)
        delayed.dump(folder / FUNCTION)  # before the job exists: it may start at once, and we may die
    except OSError as error:
        raise KreaRunnerError(f"writing the function to {folder}: {error.strerror}") from error
    return submit_run(
        config,
        source,
        history=open_history(state_dir()),
        scheduler=open_scheduler(config.endpoint, state_dir=state_dir()),
        user=_user(),
        clock=SystemClock(),
    )


def _tables(spec: Spec, parameters: Mapping[str, Any], name: str) -> dict[str, dict[str, Any]]:
    """The tables of run.toml that `spec` and submitit's parameters make together; parameters win."""
    document = spec if isinstance(spec, Mapping) else {} if spec is None else read_document(Path(spec))
    tables = {table: dict(values) if isinstance(values, Mapping) else values for table, values in document.items()}
    for key, value in parameters.items():
        table, word = _GENERIC.get(key, ("slurm", key))
        given = f"{int(float(value) * 1024)}M" if key == "mem_gb" else value
        tables.setdefault(table, {})[word] = given
    run = tables.setdefault("run", {})
    if "command" in run:
        raise ConfigError("[run] command: the function is what runs", hint="take `command` out of the spec")
    run.setdefault("name", name)
    return tables


def _checked_run(
    tables: dict[str, dict[str, Any]], base: Path, folder: Path
) -> tuple[RunConfig, dict[str, dict[str, Any]]]:
    """The configuration, with a stand-in for the command, and its tables with all paths absolute."""
    run = dict(tables["run"], command=["true"])
    run.setdefault("dir", str(folder / f"{slug_of(str(run['name']))}-{uuid.uuid4().hex[:8]}"))
    config = check_run({**tables, "run": run}, base, what="spec")
    run |= {"dir": str(config.run_dir), "workdir": str(config.workdir), "scheduler": config.scheduler}
    return config, {**tables, "run": run}


def _name_of(function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", "") or type(function).__name__
    return name if name.isidentifier() else "function"  # <lambda>


def _user() -> str:
    import os
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container without a passwd entry
        return str(os.getuid())


# ------------------------------------------------------------------------------------------------------------ one job


class KreaJob(core.Job[R]):
    """A function's run. It is done when it has a result or when the run is over: an exception in one attempt is not the
    end of it while the supervisor may still restart it."""

    _results_timeout_s = 5

    @property
    def watcher(self) -> "KreaInfoWatcher":  # type: ignore[override]
        return _watcher(_scheduler_of(self._run_dir))

    @property
    def _key(self) -> str:
        return str(self.paths.folder)

    @property
    def _run_dir(self) -> Path:
        return self.paths.folder.parents[1]

    def _register_in_watcher(self) -> None:
        if not self._tasks[0]:
            self.watcher.register_job(self._key)

    def run(self) -> Run:
        """The run as the history has it now. Raises: KreaRunnerError when it is not there."""
        run = _runs().get(self._key)
        if run is None:
            raise KreaRunnerError(
                f"the history knows no run of {self._key}", hint="see what there is: krea-runner status"
            )
        return run

    @property
    def state(self) -> str:
        """Slurm's word for the job that the run has now."""
        return self.watcher.get_state(self._key)

    def get_info(self, mode: str = "force") -> dict[str, str]:
        return self.watcher.get_info(self._key, mode=mode)

    def done(self, force_check: bool = False) -> bool:
        if self._sub_jobs:
            return all(job.done(force_check) for job in self._sub_jobs)
        if self._newest("result") is not None:
            return True
        return self.watcher.is_done(self._key, mode="force" if force_check else "standard")

    def cancel(self, check: bool = True) -> None:
        """As `krea-runner stop`: for good."""
        from krea_runner.history.store import open_history
        from krea_runner.schedulers import open_scheduler

        run = self.run()
        if run.state in {RunState.DONE, RunState.STOPPED}:
            return
        open_history(state_dir()).stop_run(run, reason="stopped through submitit", by=_user(), now=time.time())
        if run.job_id is not None:
            open_scheduler(run.config.endpoint, state_dir=state_dir()).cancel(run.job_id)

    def submission(self) -> DelayedSubmission:
        """The function and its arguments, as the next attempt would begin."""
        return DelayedSubmission.load(self._newest("submitted") or self.paths.folder / FUNCTION)

    def _newest(self, kind: str) -> Path | None:
        """Of any job of the run: one that cannot be requeued is submitted again under another id."""
        name = f"*_{kind}.pkl" if kind == "submitted" else f"*_{self.paths.task_id}_{kind}.pkl"
        found = sorted(self.paths.folder.glob(name), key=lambda path: path.stat().st_mtime_ns)
        return found[-1] if found else None

    def _get_outcome_and_result(self) -> tuple[str, Any]:
        deadline = (
            time.monotonic() + self._results_timeout_s
        )  # another node's file is seen seconds late on a slow file system
        while (found := self._newest("result")) is None and time.monotonic() < deadline:
            if self._newest("failed") is not None:
                break
            time.sleep(0.5)
        found = found or self._newest("failed")
        if found is not None:
            outcome, value = pickle_load(found)
            return str(outcome), value
        run = self.run()
        why = f"run {run.name!r} is {run.state}: {run.state_reason}; its job {run.job_id} is {self.state}"
        log = (self.stdout() or "")[-LOG_TAIL:]
        raise UncompletedJobError(f"{why}\n{log or f'Nothing was printed. Its logs: {self._run_dir}/logs'}")

    def exception(self) -> UncompletedJobError | FailedJobError | None:
        return super().exception()

    def _get_logs_string(self, name: str) -> str | None:
        """Of the newest attempt; standard error stands in the same log as standard output."""
        attempts = sorted(self._run_dir.glob("logs/*.r*"), key=lambda path: path.stat().st_mtime_ns)
        if name != "stdout" or not attempts:
            return None
        label = re.compile(rf" *{self.paths.task_id}: ")
        lines: list[str] = []
        for log in sorted(attempts[-1].glob("node-*.log")):
            text = log.read_text(errors="replace").splitlines(keepends=True)
            lines += [line[match.end() :] for line in text if (match := label.match(line))]
        return "".join(lines)


def _scheduler_of(run_dir: Path) -> str:
    from krea_runner.rundir import RunDir

    return str(read_document(RunDir(run_dir).config)["run"]["scheduler"])


def _runs() -> dict[str, Run]:
    """The user's runs that are functions, by the folder of their pickles."""
    from krea_runner.history.store import open_history

    runs = open_history(state_dir()).list_runs(user=_user())
    return {run.config.command[-1]: run for run in runs if isinstance(run.config.command, tuple)}


# ------------------------------------------------------------------------------------------------------------ watcher


@dataclass(slots=True)
class _Ended:
    """Since when the present job of a run has read the same ended state, on our own clock."""

    job: JobRecord
    since_mono: float


class KreaInfoWatcher(core.InfoWatcher):
    """One question of our scheduler and one of the history for all functions of this process; no accounting is needed.
    Jobs are known to it by their folder: the job id of a run may change."""

    def __init__(self, scheduler: str) -> None:
        super().__init__(delay_s=30)
        self.scheduler = scheduler
        self._ended: dict[str, _Ended] = {}

    def update(self) -> None:
        from krea_runner.schedulers import open_scheduler

        self._num_calls += 1
        self._last_status_check = time.time()
        try:
            runs = {key: run for key, run in _runs().items() if key in self._registered}
            jobs: dict[tuple[str, str], JobRecord] = {}
            for endpoint in sorted({run.config.endpoint for run in runs.values()}):
                job_ids = [run.job_id for run in runs.values() if run.job_id and run.config.endpoint == endpoint]
                found = open_scheduler(endpoint, state_dir=state_dir()).jobs(job_ids)
                jobs |= {(endpoint, job_id): job for job_id, job in found.items()}
        except KreaRunnerError as error:
            get_logger().warning(f"could not see, what is known stays: {error}")
            return
        for key, run in runs.items():
            job = jobs.get((run.config.endpoint, run.job_id or ""))
            self._note_end(key, job)
            self._info_dict[key] = {
                "JobID": run.job_id or "", "State": str(job.state) if job else "UNKNOWN",
                "NodeList": job.nodelist if job else "", "RunState": str(run.state), "RunReason": run.state_reason,
            }  # fmt: skip

    def _note_end(self, key: str, job: JobRecord | None) -> None:
        if job is None or not job.state.is_ended:
            self._ended.pop(key, None)
        elif key not in self._ended or self._ended[key].job != job:
            self._ended[key] = _Ended(job, time.monotonic())

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        return self.get_info(job_id, mode).get("State", str(JobState.UNKNOWN))

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        over = {RunState.DONE, RunState.STOPPED, RunState.HELD}
        if self.get_info(job_id, mode).get("RunState") in over:
            return True
        ended = self._ended.get(job_id)
        if ended is None or time.monotonic() - ended.since_mono < NOBODY_S:
            return False
        get_logger().warning(
            f"job {ended.job.job_id} has been {ended.job.raw_state} for {NOBODY_S:.0f} s and nobody restarts it; "
            "keep runs going with: krea-runner supervise --every 10s"
        )
        return True


_watchers: dict[str, KreaInfoWatcher] = {}


def _watcher(scheduler: str) -> KreaInfoWatcher:
    return _watchers.setdefault(scheduler, KreaInfoWatcher(scheduler))
