"""The demo: a gang that trains, two faults from outside, a supervisor that is told nothing about them, and a twin that
nobody disturbs. It goes the way of a real run: run.toml, submit, supervise."""

import contextlib
import json
import os
import random
import signal
import sys
import threading
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path

from krea_runner.clock import Clock
from krea_runner.config import load_run
from krea_runner.history.store import History, open_history
from krea_runner.launch.submit import submit
from krea_runner.model import (
    AttemptKey,
    DecisionKind,
    HeartbeatReading,
    Incident,
    JobRecord,
    JobState,
    Run,
    RunState,
    Symptom,
)
from krea_runner.observe.checkpoints import read_checkpoints
from krea_runner.observe.heartbeats import read_heartbeats
from krea_runner.rundir import RunDir
from krea_runner.schedulers import Scheduler, open_scheduler
from krea_runner.supervise.lease import own_holder
from krea_runner.supervise.loop import run_loop
from krea_runner.supervise.supervisor import Supervisor, TickReport

STEPS, CHECKPOINT_EVERY, STEP_S = 70, 10, 0.12
NODES, RANKS_PER_NODE = 2, 2
POLL_S = 0.1
GIVE_UP_S = 120.0
END_S = 15.0

RUN_TOML = """\
[run]
name = {name}
dir = {name}
scheduler = "local"
command = [{python}, "-m", "krea_runner.demo.train", "--steps", "{steps}", "--checkpoint-every", "{every}",
           "--step-time", "{step_s}", "--seed", "{seed}"]

[gang]
nodes = {nodes}
ranks_per_node = {ranks_per_node}

[slurm]
time = "5"        # minutes: should the demo itself be killed, its jobs end all the same

[budgets]         # seconds where a real run has minutes
startup = "30s"
step = "4s"
checkpoint = "6s"

[checkpoint]
dir = {checkpoints}

[policy]
max_restarts = 5
"""


@dataclass(frozen=True, slots=True)
class Fault:
    """`at_step`: as soon as the heartbeats of attempt number `restart_count` show that step."""

    signal: signal.Signals
    rank: int
    at_step: int
    restart_count: int


@dataclass(frozen=True, slots=True)
class Event:
    at_s: float
    """Since the demo began."""
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Scene:
    """One run at one moment."""

    name: str
    state: str
    attempt: str
    step: int
    saved: int


@dataclass(slots=True)
class Play:
    """What the audience sees: `scenes` are replaced, `events` only grow."""

    folder: Path
    seed: int
    faults: tuple[Fault, Fault]
    scenes: list[Scene] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    incidents: list[Incident] = field(default_factory=list)
    verdict: "Verdict | None" = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """`problems` is empty when everything held; the digests are those of the final weights."""

    digest: str | None
    undisturbed: str | None
    problems: tuple[str, ...]


def write_play(folder: Path, seed: int) -> Play:
    """Which rank is hit at which step, from the seed alone; leaves room for a checkpoint before each."""
    draw = random.Random(seed)
    ranks = range(NODES * RANKS_PER_NODE)
    freeze = Fault(signal.SIGSTOP, draw.choice(ranks), draw.randrange(CHECKPOINT_EVERY + 2, 24), restart_count=0)
    kill = Fault(signal.SIGKILL, draw.choice(ranks), draw.randrange(34, 46), restart_count=1)
    return Play(folder, seed, (freeze, kill))


def perform(play: Play, *, user: str, clock: Clock) -> Generator[Play, None, None]:
    """Yields `play` each time there may be something to see; ends with its verdict. Closing it early ends all jobs."""
    stage = _Stage(play, user, clock)
    try:
        stage.open()
        while stage.goes_on():
            stage.look()
            yield play
            clock.sleep(POLL_S)
        stage.look()
        play.verdict = _judge(play, stage)
        yield play
    finally:
        # A second Ctrl-C must not leave a gang behind, least of all a frozen one.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        stage.close()
        signal.signal(signal.SIGINT, before)


class _Stage:
    """Two jobs, and a supervisor in a thread."""

    def __init__(self, play: Play, user: str, clock: Clock) -> None:
        self.play, self.clock = play, clock
        self._user, self._began = user, clock.mono()
        state_dir = play.folder / "state"
        self.history: History = open_history(state_dir)
        self.scheduler: Scheduler = open_scheduler("local", state_dir=state_dir)
        self._runs: dict[str, int] = {}
        self._told: set[str] = set()
        self.faults_left = list(play.faults)
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._supervisor = Supervisor(
            history=self.history,
            open_scheduler=lambda kind: open_scheduler(kind, state_dir=state_dir),
            clock=clock,
            user=user,
            holder=own_holder(),
        )
        self._thread = threading.Thread(target=self._supervise, name="supervisor", daemon=True)

    def open(self) -> None:
        freeze, kill = self.play.faults
        self._tell(
            "plan",
            f"freeze rank {freeze.rank} after step {freeze.at_step}, kill rank {kill.rank} after step {kill.at_step}",
        )
        for name, step_s in (("demo", STEP_S), ("undisturbed", 0.0)):
            source = self.play.folder / f"{name}.toml"
            source.write_text(_run_toml(name, step_s, self.play))
            run = submit(
                load_run(source),
                source,
                history=self.history,
                scheduler=self.scheduler,
                user=self._user,
                clock=self.clock,
            )
            self._runs[name] = run.run_id
            self._tell("submit", f"{name} is job {run.job_id}: {NODES} nodes x {RANKS_PER_NODE} ranks, {STEPS} steps")
        self._thread.start()

    def goes_on(self) -> bool:
        """Raises: whatever ended the supervisor."""
        if self._error is not None:
            raise self._error
        if self.elapsed_s > GIVE_UP_S:
            return False
        return any(self.run(name).state.is_supervised for name in self._runs)

    def close(self) -> None:
        """No supervisor, then no job: the other way round it would be restarted."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(END_S)
        live = [run for run in self.history.list_runs() if run.state not in {RunState.DONE, RunState.STOPPED}]
        jobs = [job.job_id for run in live for job in self.scheduler.find_by_tag(run.tag)]
        for run in live:
            self.history.stop_run(run, reason="the demo was ended", by=own_holder(), now=self.clock.wall())
        deadline = self.clock.mono() + END_S
        for job_id in jobs:
            self.scheduler.cancel(job_id)
        while self.clock.mono() < deadline and not all(
            job.state.is_ended for job in self.scheduler.jobs(jobs).values()
        ):
            self.clock.sleep(POLL_S)

    @property
    def elapsed_s(self) -> float:
        return self.clock.mono() - self._began

    def run(self, name: str) -> Run:
        return self.history.run(self._runs[name])

    def job(self, name: str) -> JobRecord | None:
        job_id = self.run(name).job_id
        return None if job_id is None else self.scheduler.jobs([job_id]).get(job_id)

    # ------------------------------------------------------------------------------------------------------- acting

    def _supervise(self) -> None:
        try:
            run_loop(self._supervisor, every_s=2.0, for_s=None, emit=self._after_tick)
        except _Over:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again where the audience is
            self._error = error

    def _after_tick(self, _report: TickReport) -> None:
        if self._over.is_set():
            raise _Over

    def _strike(self, attempt: AttemptKey, beats: HeartbeatReading) -> None:
        """The next fault, when it is due. It goes to the pid in the heartbeat, if that is still that rank."""
        if not self.faults_left or self.faults_left[0].restart_count != attempt.restart_count:
            return
        fault = self.faults_left[0]
        step = max((beat.step for beat in beats.ranks), default=-1)
        target = next((beat for beat in beats.ranks if beat.rank == fault.rank), None)
        if target is None or step < fault.at_step or not _is_rank_of(target.pid, attempt):
            return
        os.kill(target.pid, fault.signal)
        self.faults_left.pop(0)
        self._tell(
            "FAULT", f"{fault.signal.name} to rank {fault.rank} on {target.node} (pid {target.pid}), after step {step}"
        )

    # ------------------------------------------------------------------------------------------------------- telling

    def look(self) -> None:
        self.play.scenes = [self._scene(name) for name in self._runs]
        self.play.incidents = self.history.incidents(run_id=self._runs["demo"])
        for incident in self.play.incidents:
            self._tell_incident(incident)
        for action in self.history.actions(self._runs["demo"]):
            if not action.stage.is_open:
                text = f"{action.kind.lower()} of job {action.job_id}: {action.stage.lower()}, {action.detail}"
                self._tell("act", text, about=action.action_id)
        for name in self._runs:
            run = self.run(name)
            if not run.state.is_supervised:
                self._tell("end", f"{name} is {run.state}: {run.state_reason}")

    def _scene(self, name: str) -> Scene:
        run, job = self.run(name), self.job(name)
        newest = read_checkpoints(run.config.checkpoint).newest
        saved = newest.step if newest else 0
        if job is None:
            return Scene(name, run.state, "", saved, saved)
        attempt = AttemptKey(job.job_id, job.restart_count)
        beats = read_heartbeats(RunDir(run.config.run_dir).heartbeats(attempt), str(attempt))
        if job.state is JobState.RUNNING:
            self._tell("run", f"{name} runs as attempt {attempt} on {job.nodelist}")
            if name == "demo":
                self._strike(attempt, beats)
        state = job.raw_state if run.state.is_supervised else run.state.value
        step = max((beat.step for beat in beats.ranks), default=0)
        return Scene(name, state, str(attempt), max(step, saved), saved)  # heartbeats are a second old

    def _tell_incident(self, incident: Incident) -> None:
        number = incident.incident_id
        self._tell("notice", incident.finding.summary, about=number)
        self._tell("decide", f"{incident.decision.kind}: {incident.decision.reason}", about=number)
        if incident.resumed_at is not None:
            text = f"it steps again, seen at step {incident.resumed_step}; {incident.lost_steps} steps were lost"
            self._tell("resume", text, about=number)

    def _tell(self, kind: str, text: str, *, about: object = "") -> None:
        """Each thing once."""
        told = f"{kind} {about} {text}"
        if told not in self._told:
            self._told.add(told)
            self.play.events.append(Event(self.elapsed_s, kind, text))


class _Over(Exception):
    """The demo has ended: so does its supervisor."""


def _run_toml(name: str, step_s: float, play: Play) -> str:
    return RUN_TOML.format(
        name=json.dumps(name),
        python=json.dumps(sys.executable),
        steps=STEPS,
        every=CHECKPOINT_EVERY,
        step_s=step_s,
        seed=play.seed,
        nodes=NODES,
        ranks_per_node=RANKS_PER_NODE,
        checkpoints=json.dumps(str(play.folder / name / "checkpoints")),
    )


def _is_rank_of(pid: int, attempt: AttemptKey) -> bool:
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return f"KREA_ATTEMPT={attempt}".encode() in environ.split(b"\0")


# ----------------------------------------------------------------------------------------------------------- judging


def _judge(play: Play, stage: _Stage) -> Verdict:
    demo, twin, job = stage.run("demo"), stage.run("undisturbed"), stage.job("demo")
    digest, undisturbed = _digest(demo), _digest(twin)
    symptoms = [incident.finding.symptom for incident in play.incidents]
    expected = {
        f"the supervisor did not see both runs to their end within {GIVE_UP_S:.0f} s": demo.state is RunState.DONE
        and twin.state is RunState.DONE,
        "a fault came too late, the run had ended": not stage.faults_left,
        f"a hang and a crash were to be recorded, not {[str(symptom) for symptom in symptoms]}": symptoms
        == [Symptom.HANG, Symptom.CRASH],
        "both were to be requeued": all(incident.decision.kind is DecisionKind.REQUEUE for incident in play.incidents),
        f"job {demo.job_id} was to end at restart count 2": job is not None and job.restart_count == 2,
        "all was to happen under one job id": {incident.attempt.job_id for incident in play.incidents} <= {demo.job_id},
        "the final weights are not those of the undisturbed run": digest is not None and digest == undisturbed,
    }
    return Verdict(digest, undisturbed, tuple(text for text, held in expected.items() if not held))


def _digest(run: Run) -> str | None:
    folder = run.config.checkpoint.directory
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return None if folder is None else str(json.loads((folder / "final.json").read_text())["sha256"])
    return None
