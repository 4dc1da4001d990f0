"""What the local scheduler and its shepherds share: a job's file, its lock, and how its processes are found and ended."""

import contextlib
import fcntl
import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from krea_runner.errors import JobNotFound, SchedulerOutputError, SchedulerUnavailable
from krea_runner.model import JobState
from krea_runner.schedulers.nodelist import fold

LOCK_S = 10.0
# Every process of a job carries this in its environment: so it is found whatever session or group it made itself.
MARKER = "KREA_LOCAL_JOB"
POLL_S = 0.02


@dataclass(slots=True)
class LocalJob:
    """jobs/<id>/job.json. Written by whoever holds the job's lock."""

    job_id: str
    root: str
    name: str
    tag: str
    nodes: list[str]
    tasks_per_node: int
    output: str
    append: bool
    requeue: bool
    time_limit_s: float | None
    workdir: str
    environment: dict[str, str]
    submitted_at: float
    eligible_at: float
    state: JobState = JobState.PENDING
    reason: str = "None"
    restart_count: int = 0
    exit_code: int | None = None
    signal: int | None = None
    started_at: float | None = None
    ended_at: float | None = None
    want: str = ""
    """What was asked of the shepherd and not yet done: `requeue` or `cancel`."""
    excluded: list[str] = field(default_factory=list)
    shepherd: list[str] = field(default_factory=list)
    """pid, its start time, boot id; empty until one has taken the job."""

    @property
    def marker(self) -> str:
        return f"{self.root}:{self.job_id}"

    @property
    def nodelist(self) -> str:
        return fold(self.nodes)

    def back_to_queue(self, eligible_at: float) -> None:
        self.state, self.reason, self.want = JobState.PENDING, "BeginTime", ""
        self.exit_code = self.signal = self.started_at = self.ended_at = None
        self.submitted_at, self.eligible_at = time.time(), eligible_at
        self.shepherd = self.shepherd if shepherd_is_alive(self) else []


def load(home: Path) -> LocalJob:
    """Raises: JobNotFound; SchedulerOutputError for a file that is damaged; SchedulerUnavailable."""
    path = home / "job.json"
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise JobNotFound(f"Invalid job id specified: job {home.name} is not in {home.parent}") from None
    except OSError as error:
        raise SchedulerUnavailable(f"reading {path}: {error.strerror}") from error
    try:
        values = json.loads(text)
        return LocalJob(**values | {"state": JobState(values["state"])})
    except (ValueError, TypeError, KeyError) as error:
        raise SchedulerOutputError(f"reading {path}: {error}", line=text[:500]) from None


def save(home: Path, job: LocalJob) -> None:
    """Raises: SchedulerUnavailable when it could not be written whole; the old state stays then."""
    partial = home / f".job.{os.getpid()}"
    try:
        with partial.open("w") as file:
            json.dump(asdict(job), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(home / "job.json")
    except OSError as error:
        raise SchedulerUnavailable(f"writing {home}/job.json: {error.strerror}") from error


@contextlib.contextmanager
def locked(home: Path) -> Iterator[None]:
    """Raises: JobNotFound where there is no such job; SchedulerUnavailable when the lock is not to be had in time."""
    try:
        descriptor = os.open(home / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        raise JobNotFound(f"Invalid job id specified: job {home.name} is not in {home.parent}") from None
    except OSError as error:
        raise SchedulerUnavailable(f"locking {home}: {error.strerror}") from error
    try:
        deadline = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise SchedulerUnavailable(f"{home} is locked by another process for {LOCK_S:.0f} s") from None
                time.sleep(POLL_S)
        yield
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------------------------------------------------- processes


def identity(pid: int) -> list[str]:
    """pid, start time and boot: names one process for ever."""
    return [str(pid), _started(pid), Path("/proc/sys/kernel/random/boot_id").read_text().strip()]


def shepherd_is_alive(job: LocalJob) -> bool:
    if not job.shepherd:
        return time.time() - job.submitted_at < LOCK_S  # it is being started
    return identity(int(job.shepherd[0])) == job.shepherd


def wake(job: LocalJob) -> None:
    if job.shepherd and shepherd_is_alive(job):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(job.shepherd[0]), signal.SIGUSR1)


def kill_marked(marker: str, *, patience_s: float) -> None:
    """End every process that carries `marker`: TERM (and CONT, a stopped one must hear it), after `patience_s` KILL; returns
    when none is left. One that cannot die (in the kernel) is left after ten seconds of trying."""
    now = time.monotonic()
    deadline, give_up = now + patience_s, now + patience_s + 10.0
    first = True
    while (pids := marked(marker)) and time.monotonic() < give_up:
        hard = time.monotonic() >= deadline
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if hard:
                    os.kill(pid, signal.SIGKILL)
                elif first:
                    os.kill(pid, signal.SIGTERM)
                    os.kill(pid, signal.SIGCONT)
        first = False
        time.sleep(POLL_S)


def marked(marker: str) -> list[int]:
    """Living processes of ours with `marker` in their environment; never the caller."""
    entry = f"{MARKER}={marker}".encode()
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                if entry in file.read().split(b"\0") and _started(int(name)):
                    found.append(int(name))
        except OSError:
            continue  # gone meanwhile, or another user's
    return found


def _started(pid: int) -> str:
    """Start time in ticks since boot; empty when there is no such process or only its zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rsplit(")", 1)[1].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
