"""Evidence before the kill: one program on every node of a hung step, beside it, for a limited time (at_node.py).

The incident, its decision and the intended action are on record before this begins, and the action is carried out when it is
over, whatever came of it: nothing in here may keep a run from its restart. The nodes are waited for on a thread, so that the
actions of other runs go on meanwhile. What was found becomes lines of the incident. An incident with the line `collected ...`
is not looked at again; one without is a supervisor's that was killed in the middle, and is looked at once more, but not later
than RETRY_S after it was noticed.
"""

import json
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from krea_runner.clock import Clock
from krea_runner.diagnose.stacks import stacks_text
from krea_runner.errors import FilesUnavailable, KreaRunnerError, SchedulerError, fault_line
from krea_runner.history.evidence import add_evidence
from krea_runner.history.store import History
from krea_runner.model import ActionKind, ActionStage, AttemptKey, Incident, JobRecord, JobState, Run, RunConfig
from krea_runner.observe.answered import answered
from krea_runner.proc import Completed
from krea_runner.rundir import RunDir
from krea_runner.schedulers import Scheduler
from krea_runner.schedulers.nodelist import NodelistError, expand
from krea_runner.supervise.act import Work
from krea_runner.supervise.collected import COLLECTED, Collected, evidence_lines, read_collected
from krea_runner.supervise.evidence import write_evidence

RETRY_S = 180.0
# What the nodes get less than we wait for them: starting Python there, and the way back.
WAY_S = 3.0
# A second after srun was killed there is its output.
GRACE_S = 2.0
# After the end of a look that was not followed by a kill: what it left on the nodes is ended.
CLEAN_S = 15.0
JOIN_S = 0.02
RAS_NODES = 2
LAUNCHER = """\
source=$1 order=$2; shift 2; PATH=$PATH:/usr/local/bin:/usr/bin:/bin
for python in python3 /usr/libexec/platform-python "$@"; do
command -v "$python" >/dev/null 2>&1 && exec "$python" -I -S -c "$source" "$order"; done
echo "no python3 on $(hostname)" >&2; exit 127
"""


@dataclass(slots=True)
class Collection:
    """One look at the nodes of one hung attempt, under way on a thread of its own."""

    run: Run
    attempt: AttemptKey
    incident_id: int
    document: dict[str, Any] | None
    """Of evidence.json, where this very process wrote it."""
    asked: tuple[str, ...]
    left_out: tuple[str, ...]
    begun_mono: float
    done: Completed | None = None
    failure: str = ""
    settled: bool = False
    thread: threading.Thread | None = None

    def is_over(self, clock: Clock) -> bool:
        if self.thread is not None and self.done is None and not self.failure:
            self.thread.join(JOIN_S)
        waited = clock.mono() - self.begun_mono
        return bool(self.done) or bool(self.failure) or waited > self.run.config.evidence.timeout_s + GRACE_S


@dataclass(slots=True)
class Collections:
    """Those of one tick and one scheduler."""

    history: History
    clock: Clock
    by_run: dict[int, Collection] = field(default_factory=dict)

    @property
    def longest_s(self) -> float:
        times = [one.run.config.evidence.timeout_s + GRACE_S for one in self.by_run.values()]
        return max(times, default=0.0)

    def is_ready(self, work: Work) -> bool:
        """Whether this action may be carried out now."""
        collection = self.by_run.get(work.run.run_id)
        if collection is None or collection.settled:
            return True
        if not collection.is_over(self.clock):
            return False
        self._settle(collection)
        return True

    def finish(self) -> None:
        """Those that no action waited for."""
        for collection in self.by_run.values():
            while not collection.settled:
                if collection.is_over(self.clock):
                    self._settle(collection)
                else:
                    self.clock.sleep(0.1)
            if collection.thread is not None and collection.done is not None and collection.done.timed_out:
                collection.thread.join(CLEAN_S)

    def _settle(self, collection: Collection) -> None:
        """Raises: HistoryError."""
        collection.settled = True
        try:
            lines = _keep(collection, self.clock.mono() - collection.begun_mono)
        except Exception as error:  # noqa: BLE001
            lines = [f"{COLLECTED}nothing: {fault_line(error)}"]
        add_evidence(self.history, collection.incident_id, lines)


def begin_collections(
    history: History,
    clock: Clock,
    scheduler: Scheduler,
    jobs: Mapping[str, JobRecord],
    hung: Mapping[int, dict[str, Any] | None],
    runs: Sequence[Run],
    work: Sequence[Work],
) -> Collections:
    """Look at each job that still runs, whose incident nobody has looked at. `hung`: the runs with an incident in this tick, and
    for a new one the document written of it."""
    collections = Collections(history, clock)
    waiting = {item.run.run_id for item in work if _is_before_the_kill(item)}
    for run in runs:
        job = jobs.get(run.job_id or "")
        if run.run_id not in waiting | hung.keys() or not run.config.evidence.collect:
            continue
        if job is None or job.state is not JobState.RUNNING:
            continue
        incident = _due(history, clock, run, job, is_new=hung.get(run.run_id) is not None)
        if incident is not None:
            try:
                collection = _begin(clock, scheduler, run, job, incident, hung.get(run.run_id))
            except Exception as error:  # noqa: BLE001 - whatever it is, the run is restarted
                collection = Collection(
                    run, incident.attempt, incident.incident_id, None, (), (), clock.mono(), failure=fault_line(error)
                )
            collections.by_run[run.run_id] = collection
    return collections


def _is_before_the_kill(work: Work) -> bool:
    kinds = {ActionKind.REQUEUE, ActionKind.RESUBMIT}
    return (
        work.action.stage is ActionStage.INTENDED and work.action.kind in kinds and work.action.incident_id is not None
    )


def _due(history: History, clock: Clock, run: Run, job: JobRecord, *, is_new: bool) -> Incident | None:
    key = AttemptKey(job.job_id, job.restart_count)
    incident = next((one for one in history.incidents(run_id=run.run_id) if one.attempt == key), None)
    if incident is None or any(line.startswith(COLLECTED) for line in incident.finding.evidence):
        return None
    return incident if is_new or abs(clock.wall() - incident.noticed_at) < RETRY_S else None


def _begin(
    clock: Clock, scheduler: Scheduler, run: Run, job: JobRecord, incident: Incident, document: dict[str, Any] | None
) -> Collection:
    asked, left_out = _nodes(scheduler, run.config, job)
    collection = Collection(run, incident.attempt, incident.incident_id, document, asked, left_out, clock.mono())
    argv = _argv(run.config, incident.attempt, scheduler.name == "local")
    owner = job.user or run.user
    thread = threading.Thread(target=_gather, args=(collection, scheduler, argv, owner), daemon=True)
    collection.thread = thread
    thread.start()
    return collection


def _nodes(scheduler: Scheduler, config: RunConfig, job: JobRecord) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Where to look, and the nodes that Slurm itself gets no answer from: with one of those srun starts nothing to its end."""
    try:
        names = expand(job.nodelist)
    except NodelistError:
        return (), ()
    if config.scheduler == "local":
        return (), ()
    try:
        records = scheduler.nodes(names)
    except SchedulerError:
        records = {}
    out = tuple(name for name in names if name in records and _is_unreachable(records[name].raw_state))
    return tuple(name for name in names if name not in out), out


def _is_unreachable(raw_state: str) -> bool:
    """Not: drained. That node still runs what it runs."""
    words = raw_state.split("+")
    return words[0].endswith("*") or not {"NOT_RESPONDING", "DOWN", "FAIL", "POWERED_DOWN"}.isdisjoint(words)


def _argv(config: RunConfig, attempt: AttemptKey, is_local: bool) -> list[str]:
    run_dir, here = RunDir(config.run_dir), config.transport == "local"
    order = {
        "seconds": config.evidence.timeout_s - WAY_S,
        "attempt": str(attempt),
        "run_dir": str(config.run_dir),
        "folder": str(run_dir.incident(attempt)),
        "heartbeats": str(run_dir.heartbeats(attempt)),
        "py_spy": config.evidence.py_spy,
        "py_spy_maybe": [str(Path(sys.executable).with_name("py-spy"))] if here else [],
        "local": is_local,
        "ras_nodes": RAS_NODES,
    }
    source = Path(__file__).with_name("at_node.py").read_text()
    return ["sh", "-c", LAUNCHER, "krea-evidence", source, json.dumps(order), *([sys.executable] if here else [])]


def _gather(collection: Collection, scheduler: Scheduler, argv: list[str], owner: str) -> None:
    """On the thread. What it sets, it sets once."""
    timeout_s, job_id = collection.run.config.evidence.timeout_s, collection.attempt.job_id
    try:
        collection.done = scheduler.run_beside(job_id, collection.asked, argv, timeout_s=timeout_s, user=owner)
    except OSError as error:
        collection.failure = f"{error.filename or 'srun'}: {error.strerror}"
    except KreaRunnerError as error:
        collection.failure = str(error)
    except Exception as error:  # noqa: BLE001 - said by whoever waits for it
        collection.failure = fault_line(error)
    if collection.done is None or collection.done.timed_out:
        scheduler.end_beside(job_id)


def _keep(collection: Collection, took_s: float) -> list[str]:
    """The lines for the incident, after they and the page of stacks were written beside it."""
    config, done = collection.run.config, collection.done
    found = read_collected(done.stdout) if done is not None else Collected()
    total = max(config.gang.world_size if config.job_log is None else 0, len(found.states))
    lines = evidence_lines(
        found,
        asked=collection.asked,
        left_out=collection.left_out,
        world_size=total,
        took_s=took_s,
        failure=_why(collection),
    )
    document = collection.document or _read_back(config, collection.attempt)
    if document is not None:
        document = document | {"collected": {"lines": lines, "nodes": found.nodes}}
    pages = {"stacks.txt": stacks_text(found.states, total)} if found.states else {}
    if write_evidence(config, collection.attempt, document, pages) is None:
        lines.append("evidence.json could not be written")
    return lines


def _why(collection: Collection) -> str:
    done = collection.done
    if done is None:
        return collection.failure or f"no answer in {collection.run.config.evidence.timeout_s:g} s"
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    told = next((line for line in said if line.startswith("srun: ")), said[-1] if said else "")  # or a traceback's end
    if done.timed_out:
        return f"not over after {collection.run.config.evidence.timeout_s:g} s" + (f": {told}" if told else "")
    return (told or f"exit code {done.returncode}") if done.returncode != 0 else ""


def _read_back(config: RunConfig, key: AttemptKey) -> dict[str, Any] | None:
    """evidence.json as an earlier supervisor wrote it; None where it is on another host, or not to be read."""
    if config.files == "sftp":
        return None
    path = RunDir(config.run_dir).incident(key) / "evidence.json"
    try:
        document = json.loads(answered(config, config.run_dir, path.read_bytes))
    except (OSError, ValueError, FilesUnavailable):
        return None
    return document if isinstance(document, dict) else None
