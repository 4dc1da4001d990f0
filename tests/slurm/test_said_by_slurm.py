"""What Slurm does that one would not expect, and what we make of it: the runs of a supervisor, on a cluster of its own that may
be hurt."""

import math
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from krea_runner.model import ActionKind, ActionStage, Decision, DecisionKind, Finding, Symptom
from krea_runner.proc import run
from krea_runner.schedulers.slurm_cli import SlurmCli
from krea_runner.supervise.act import SLOW, Work, carry_out
from tests.conftest import dev_cluster, free_ports, until
from tests.slurm.test_job_endings import Case, Cluster, Row

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    if os.geteuid() != 0:
        pytest.skip("other users' jobs and stopped daemons need root")
    folder = Path(tempfile.mkdtemp(prefix="krea-says-"))
    folder.chmod(0o755)
    where = ("--dir", str(folder / "c"))
    try:
        dev_cluster("up", *where, "--nodes", "4", "--port-base", str(free_ports()), "--accounting")
        os.environ["SLURM_CONF"] = str(folder / "c" / "slurm.conf")
        yield Cluster(folder / "c", accounting=True)
    finally:
        dev_cluster("down", *where)
        os.environ.pop("SLURM_CONF", None)


@pytest.fixture
def case(cluster: Cluster, ordinary_user: Any, request: pytest.FixtureRequest) -> Iterator[Case]:
    name = request.node.name.removeprefix("test_").partition("[")[0][:30].rstrip("_")
    case = Case(cluster, Row(name, *[""] * 8), ordinary_user)
    yield case
    cluster.try_to("scancel", "-u", ordinary_user.name)
    until(lambda: not cluster.say("squeue", "-h"), "an empty queue", 120)
    out = cluster.say("sinfo", "-h", "-N", "-t", "drain,down", "-o", "%N").split()
    if out:  # a launch that failed drains the node
        cluster.try_to("scontrol", "update", f"nodename={','.join(out)}", "state=resume")


def settle(case: Case, *, incidents: int = 1) -> str:
    """Tick until that many incidents are on record and nothing is under way; what was said."""
    said: list[str] = []

    def settled() -> bool:
        said.append(case.tick())
        known = case.history.incidents(run_id=case.run_id)
        return len(known) >= incidents and case.history.open_action(case.run_id) is None

    until(settled, f"{case.row.ending}: {said}", 90)
    return "\n".join(said)


def ends(case: Case) -> list[tuple[str, int, str]]:
    """Of each attempt of the run, oldest first: its end, its exit code, what was decided."""
    decided = {incident.attempt: str(incident.decision.kind) for incident in case.history.incidents(run_id=case.run_id)}
    attempts = sorted(case.history.attempts(case.run_id), key=lambda attempt: attempt.attempt_id)
    return [(str(one.end_state), one.exit_code or 0, decided.get(one.key, "")) for one in attempts]


def controller(case: Case) -> int:
    return int((case.cluster.folder / "run" / "slurmctld.pid").read_text())


# -------------------------------------------------------------------------------------------- starts and answers that are lost


class TooSoon(SlurmCli):
    """Lifts the start time within the second of the kill, as clocks that are apart would."""

    whole_second_starts = False

    def requeue(self, job_id: str) -> None:
        time.sleep(math.floor(time.time()) + 1.02 - time.time())
        super().requeue(job_id)


def requeue_now(case: Case, scheduler: SlurmCli) -> Work:
    """The requeue of a running job that a finding of ours leads to, carried out; without a look at the job."""
    history, now = case.history, case.clock.wall()
    finding = Finding(Symptom.HANG, "unknown", "hang: said by the test")
    decision = Decision(DecisionKind.REQUEUE, "as the test wants it")
    lease = history.take_leases([case.run_id], "test:1:1", now=now, until=now + 100)[case.run_id]
    attempt = history.latest_attempt(case.run_id)
    action = (ActionKind.REQUEUE, attempt.key.restart_count)
    history.record_incident(lease, attempt, finding, decision, checkpoint_step=None, now=now, action=action)
    work = Work(history.run(case.run_id), scheduler, lease, history.open_action(case.run_id))
    carry_out([work], history, case.clock, deadline=case.clock.mono() + 60)
    history.drop_leases([lease])
    return work


def test_a_start_that_slurm_refused_for_its_old_credential_is_no_crash(case: Case) -> None:
    case.submit()
    for count in range(6):
        requeued = count + 1
        case.wait("RUNNING")
        case.tick()
        work = requeue_now(case, TooSoon())
        if work.action.detail.startswith(SLOW):
            break
    else:
        pytest.skip(f"this Slurm took every start: {work.action.detail}")
    job = case.job()
    assert (work.action.stage, job.raw_state, job.restart_count) == (ActionStage.DONE, "PENDING", requeued + 1)
    assert job.started_at > time.time() + 60  # Slurm's own delay this time
    case.tick()
    assert ends(case)[-2:] == [("LAUNCH_FAILED", 0, ""), ("None", 0, "")]
    assert len(case.history.incidents(run_id=case.run_id)) == requeued


class Stopping(SlurmCli):
    """The controller stands still from just before a call until it has failed; it is carried out afterwards all the same."""

    def __init__(self, pid: int, call: str) -> None:
        super().__init__()
        self.pid, self.call = pid, call

    def _ask(self, argv: Sequence[str], **more: Any) -> Any:
        if self.call not in argv and not any(self.call in word for word in argv):
            return super()._ask(argv, **more)
        self.call = "never again"
        os.kill(self.pid, signal.SIGSTOP)
        try:
            return super()._ask(argv, **more)
        finally:
            os.kill(self.pid, signal.SIGCONT)


@pytest.mark.parametrize("call", ["requeue", "StartTime=now"])
def test_a_call_that_timed_out_and_was_carried_out_later_is_not_made_twice(case: Case, call: str) -> None:
    case.submit("7")
    case.wait("FAILED")
    case.slurm = Stopping(controller(case), call)
    assert "could not see" in case.tick()
    case.slurm = SlurmCli()
    until(lambda: case.job().restart_count == 1, "the requeue that was timed out")
    settle(case)
    case.wait("RUNNING")
    case.tick()
    assert (case.job().restart_count, ends(case)) == (1, [("FAILED", 7, "REQUEUE"), ("None", 0, "")])


def test_a_controller_killed_just_after_a_start_costs_no_second_life(case: Case) -> None:
    """It wakes up with the job in the queue (22.05.8: state is saved every five seconds), while its ranks run."""
    saved = case.cluster.folder / "state" / "job_state"
    before = saved.stat().st_mtime_ns if saved.exists() else 0
    pid = controller(case)
    case.submit(begin="now+7")
    until(lambda: saved.exists() and saved.stat().st_mtime_ns != before, "the queue on disk")
    case.wait("RUNNING")
    os.kill(pid, signal.SIGKILL)
    until(lambda: not case.cluster.processes("slurmctld"), "the controller's end")
    # -i: one that was killed before it ever saved its accounts' usage would not start again (26.05.5).
    subprocess.run(["slurmctld", "-i"], check=True, stdin=subprocess.DEVNULL, capture_output=True)
    until(lambda: run(["scontrol", "ping"], timeout_s=60).returncode == 0, "the controller", 60)
    until(lambda: (case.tick(), case.job().raw_state == "RUNNING")[1], "the job's start")
    until(lambda: len(case.cluster.processes(f"{case.folder}/rank.py")) == 2, "two ranks, no more", 30)
    case.tick()
    # The nodes still had the first start: Slurm could not launch the second, and held it.
    assert ends(case) in ([("None", 0, "")], [("LAUNCH_FAILED", 0, "REQUEUE"), ("None", 0, "")])
