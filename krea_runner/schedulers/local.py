"""Slurm's semantics on one machine: the embedded default. It runs the very batch script that Slurm would run.

A job lives in ROOT/jobs/<id>/ and has a shepherd process (local_job.py) that outlives whoever submitted it. Several
"nodes" are names that ranks are told; all jobs run at once, nothing limits what they use.

A running job whose shepherd is gone (killed, machine rebooted) reads NODE_FAIL, and what is left of it is killed; one that
waits gets another.
"""

import contextlib
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from krea_runner.errors import JobNotFound, RequeueDisabled, SchedulerError, SchedulerUnavailable
from krea_runner.model import JobRecord, JobState
from krea_runner.proc import Completed, run
from krea_runner.schedulers import Check, NodeRecord, Placement, environment_for
from krea_runner.schedulers.local_nodes import PARTITION, LocalNodes
from krea_runner.schedulers.local_state import LocalJob, kill_marked, load, locked, save, shepherd_is_alive, wake
from krea_runner.schedulers.nodelist import expand

# As Slurm: credential lifetime + 1 (22.05.8). A test of a requeue that does not lift it would not see it otherwise.
REQUEUE_DELAY_S = 121.0


class LocalScheduler:
    name = "local"
    whole_second_starts = False

    def __init__(self, root: Path) -> None:
        self.root = root
        self._nodes = LocalNodes(root)

    # ------------------------------------------------------------------------------------------------------- reads

    def jobs(self, job_ids: Sequence[str]) -> dict[str, JobRecord]:
        found: dict[str, JobRecord] = {}
        for job_id in job_ids:
            with contextlib.suppress(JobNotFound):
                found[job_id] = self._record(job_id)
        return found

    def my_jobs(self, known: Sequence[str]) -> dict[str, JobRecord]:
        try:
            names = [name for name in os.listdir(self.root / "jobs") if name.isdigit()]
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise SchedulerUnavailable(f"listing {self.root}/jobs: {error.strerror}") from error
        return self.jobs(sorted({*names, *known}, key=lambda name: int(name) if name.isdigit() else 0))

    def find_by_tag(self, tag: str) -> list[JobRecord]:
        return [job for job in reversed(self.my_jobs([]).values()) if job.comment == tag]

    def starts(self, job_ids: Sequence[str]) -> dict[str, list[JobRecord]]:
        return {}

    def _record(self, job_id: str) -> JobRecord:
        home = self._home(job_id)
        job = load(home)
        if job.state.is_queued and not shepherd_is_alive(job):  # whoever queued it was killed before it could start one
            self._start_shepherd(job_id)
        elif not job.state.is_ended and not shepherd_is_alive(job):
            job = self._bury(home)
        return JobRecord(
            job_id=job_id,
            state=job.state,
            raw_state=str(job.state),
            reason=job.reason,
            restart_count=job.restart_count,
            exit_code=job.exit_code,
            signal=job.signal,
            submitted_at=job.submitted_at,
            started_at=job.eligible_at if job.state.is_queued else job.started_at,
            ended_at=job.ended_at,
            limit_at=_limit_at(job),
            nodelist=job.nodelist if not job.state.is_queued else "",
            batch_node=job.nodes[0],
            requeue_allowed=job.requeue,
            name=job.name,
            comment=job.tag,
        )

    def _bury(self, home: Path) -> LocalJob:
        """A job without its shepherd: nobody watches its ranks any more."""
        with locked(home):
            job = load(home)
            if job.state.is_ended or shepherd_is_alive(job):
                return job
            kill_marked(job.marker, patience_s=0.0)
            job.state, job.reason, job.ended_at = JobState.NODE_FAIL, "NodeDown", time.time()
            save(home, job)
            return job

    # ------------------------------------------------------------------------------------------------------ writes

    def submit(self, script: Path, *, tag: str, excluded: Sequence[str] = ()) -> str:
        try:
            text = script.read_text()
        except OSError as error:
            raise SchedulerError(f"reading the batch script {script}: {error.strerror}") from error
        options = _sbatch_options(text)
        try:
            job_id = self._next_id()
            home = self._home(job_id)
            home.mkdir(parents=True)
            (home / "script").write_text(text)
            self._install_tools()
        except OSError as error:
            raise SchedulerError(
                f"submitting to {self.root}: {error.strerror}",
                hint="name another place: export KREA_RUNNER_STATE_DIR=...",
            ) from error
        now = time.time()
        count = int(options.get("nodes", "1").split("-")[-1])
        job = LocalJob(
            job_id=job_id,
            root=str(self.root),
            name=options.get("job-name", script.name),
            tag=tag,
            nodes=[],
            excluded=list(excluded) or expand(options.get("exclude", "")),
            tasks_per_node=int(options.get("ntasks-per-node", "1")),
            output=options.get("output", "slurm-%j.out"),
            append=options.get("open-mode", "truncate") == "append",
            requeue="no-requeue" not in options,
            time_limit_s=_time_limit(options.get("time", "")),
            workdir=options.get("chdir", os.getcwd()),
            environment=environment_for(script),
            submitted_at=now,
            eligible_at=now,
        )
        job.nodes = self._nodes.pick(count, job.excluded)
        save(home, job)
        self._start_shepherd(job_id)
        return job_id

    def requeue(self, job_id: str) -> None:
        home = self._home(job_id)
        with locked(home):
            job = load(home)
            if job.state.is_queued or job.want == "requeue":
                raise SchedulerError(f"scontrol requeue: Job is pending execution for job {job_id}")
            if not job.requeue:
                raise RequeueDisabled(f"scontrol requeue: Requested operation is presently disabled for job {job_id}")
            job.restart_count += 1
            running = not job.state.is_ended and shepherd_is_alive(job)
            if running:
                job.state, job.want = JobState.COMPLETING, "requeue"
            else:
                kill_marked(job.marker, patience_s=0.0)
                job.back_to_queue(time.time() + REQUEUE_DELAY_S)
                self._place(job, job.excluded)
            save(home, job)
            if running:
                wake(job)
        if not running:
            self._start_shepherd(job_id)

    def release(self, job_id: str) -> None:
        self._home(job_id)  # nothing is ever held here

    def start_now(self, job_id: str, excluded: Sequence[str] | None = None) -> None:
        home = self._home(job_id)
        with locked(home):
            job = load(home)
            if job.state.is_queued:
                self._place(job, job.excluded if excluded is None else excluded)
                job.eligible_at = time.time()
                save(home, job)
                wake(job)

    def nodes(self, names: Sequence[str] | None = None) -> dict[str, NodeRecord]:
        return self._nodes.records(names)

    def placements(self, job_ids: Sequence[str]) -> dict[str, Placement]:
        jobs = [load(home) for job_id in job_ids if (home := self._home(job_id)).is_dir()]
        return {job.job_id: Placement((PARTITION,), excluded=tuple(job.excluded)) for job in jobs}

    def exclude(self, job_id: str, names: Sequence[str]) -> None:
        home = self._home(job_id)
        with locked(home):
            job = load(home)
            if not (job.state.is_queued or job.state is JobState.COMPLETING):
                raise SchedulerError(f"scontrol update: Job is no longer pending execution for job {job_id}")
            self._place(job, list(dict.fromkeys((*job.excluded, *names))))
            save(home, job)

    def drain(self, names: Sequence[str], reason: str) -> None:
        self._nodes.drain(names, reason)

    def undrain(self, names: Sequence[str]) -> None:
        self._nodes.undrain(names)

    def run_beside(
        self, job_id: str, nodes: Sequence[str], argv: Sequence[str], *, timeout_s: float, user: str = ""
    ) -> Completed:
        """Once: all its nodes are this machine."""
        self._home(job_id)
        return run(argv, timeout_s=timeout_s)

    def end_beside(self, job_id: str) -> None:
        """Nothing to do: `run` has killed it with all it started."""

    def _place(self, job: LocalJob, excluded: Sequence[str]) -> None:
        nodes = self._nodes.pick(len(job.nodes), excluded)
        job.excluded, job.nodes = list(excluded), nodes if job.state.is_queued else job.nodes

    def cancel(self, job_id: str) -> None:
        with contextlib.suppress(JobNotFound):
            home = self._home(job_id)
            with locked(home):
                job = load(home)
                if not job.state.is_ended:
                    job.want = "cancel"
                    save(home, job)
                    wake(job)

    # ------------------------------------------------------------------------------------------------------ doctor

    def checks(self) -> list[Check]:
        hint = "name another place: export KREA_RUNNER_STATE_DIR=/path/you/may/write"
        if not self.root.exists():
            return [Check("local scheduler", True, f"{self.root}, not used yet")]
        try:
            with locked(self.root):
                count = len(os.listdir(self.root / "jobs")) if (self.root / "jobs").exists() else 0
        except (OSError, SchedulerError) as error:
            return [Check("local scheduler", False, f"{self.root}: {error}", hint)]
        return [Check("local scheduler", True, f"{self.root}, {count} jobs")]

    # ------------------------------------------------------------------------------------------------------ inside

    def _home(self, job_id: str) -> Path:
        if not job_id.isdigit():
            raise JobNotFound(f"Invalid job id specified: {job_id!r}")
        return self.root / "jobs" / job_id

    def _next_id(self) -> str:
        self.root.mkdir(parents=True, exist_ok=True)
        with locked(self.root):
            counter = self.root / "next_id"
            job_id = int(counter.read_text()) if counter.exists() else 1
            partial = counter.with_name(".next_id")
            partial.write_text(str(job_id + 1))
            partial.replace(counter)
        return str(job_id)

    def _install_tools(self) -> None:
        """`srun` for the batch script, found first on its PATH."""
        tool = self.root / "bin" / "srun"
        text = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m krea_runner.schedulers.local_srun "$@"\n'
        if not tool.exists() or tool.read_text() != text:
            tool.parent.mkdir(exist_ok=True)
            partial = tool.with_name(f".srun.{os.getpid()}")
            partial.write_text(text)
            partial.chmod(0o755)
            partial.replace(tool)

    def _start_shepherd(self, job_id: str) -> None:
        argv = [sys.executable, "-m", "krea_runner.schedulers.local_job", str(self.root), job_id]
        done = subprocess.run(  # returns as soon as it has put itself into the background
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False, timeout=60
        )
        if done.returncode != 0:
            raise SchedulerError(f"starting job {job_id}: {done.stderr.decode(errors='replace').strip()[-300:]}")


# --------------------------------------------------------------------------------------------------- #SBATCH options

_SHORT = {"J": "job-name", "N": "nodes", "n": "ntasks", "o": "output", "e": "error", "t": "time", "D": "chdir", "p": "partition",
          "A": "account", "q": "qos", "w": "nodelist", "x": "exclude", "c": "cpus-per-task", "C": "constraint"}  # fmt: skip
_FLAGS = frozenset({"requeue", "no-requeue", "exclusive", "overcommit", "contiguous", "hold", "reboot", "spread-job"})
_USED = frozenset(
    {"job-name", "nodes", "ntasks-per-node", "output", "open-mode", "requeue", "no-requeue", "time", "chdir", "exclude"}
)
# What means nothing on one machine without limits.
_IGNORED = frozenset(
    "account comment constraint contiguous cpus-per-task cpus-per-gpu error exclusive export gpus gpus-per-node gpus-per-task "
    "gres hint hold licenses mail-type mail-user mem mem-per-cpu mem-per-gpu nice nodelist ntasks overcommit partition qos "
    "reboot reservation signal spread-job switches tmp wckey threads-per-core kill-on-invalid-dep distribution".split()
)


def _sbatch_options(script: str) -> dict[str, str]:
    """The `#SBATCH` lines up to the first command, by long name; later ones win, as sbatch does.

    Raises: SchedulerError for an option that it does not know.
    """
    options: dict[str, str] = {}
    for line in _directives(script):
        words = shlex.split(line, comments=True)
        while words:
            word = words.pop(0)
            match = re.fullmatch(r"--([a-z][a-z-]*)(?:=(.*))?|-([A-Za-z])(.*)", word, re.DOTALL)
            name = (match[1] or _SHORT.get(match[3], "")) if match else ""
            if match is None or name not in _USED | _IGNORED:
                raise SchedulerError(
                    f"sbatch: unrecognized option {word!r}", hint="the local scheduler does not know it"
                )
            value = match[2] if match[1] else (match[4] or None)
            if value is None and name not in _FLAGS:
                value = words.pop(0) if words else ""
            options[name] = value or ""
    for name in ("nodes", "ntasks-per-node"):
        if not re.fullmatch(r"[1-9]\d{0,3}(-[1-9]\d{0,3})?", options.get(name, "1")):
            raise SchedulerError(f"sbatch: error: Invalid {name} specification: {options[name]!r}")
    return options


def _directives(script: str) -> Iterator[str]:
    for line in script.splitlines():
        if line.startswith("#SBATCH"):
            yield line.removeprefix("#SBATCH")
        elif line.strip() and not line.startswith("#"):
            return


def _limit_at(job: LocalJob) -> float | None:
    is_running = job.state is JobState.RUNNING and job.started_at is not None
    return job.started_at + job.time_limit_s if is_running and job.started_at and job.time_limit_s else None


def _time_limit(text: str) -> float | None:
    """Seconds; None without a limit. A bare number is minutes, as Slurm has it."""
    if not text or text.upper() in {"UNLIMITED", "INFINITE"}:
        return None
    days, _, clock = text.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if days:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, (minutes, seconds) = 0, (*parts, 0)[:2]
    return float(int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds)
