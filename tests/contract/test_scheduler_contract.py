"""The same cases against every scheduler: what `Scheduler`'s docstrings promise."""

import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from krea_runner.errors import JobNotFound, SchedulerError
from krea_runner.model import JobRecord, JobState
from krea_runner.proc import packed
from krea_runner.schedulers import Scheduler, open_scheduler
from krea_runner.schedulers.local import LocalScheduler
from krea_runner.schedulers.nodelist import expand
from krea_runner.schedulers.slurm_api import SlurmApi
from krea_runner.schedulers.slurm_cli import SlurmCli
from krea_runner.transport import HERE
from krea_runner.transport.ssh import Ssh
from tests.conftest import free_port
from tests.ssh_server import SSHD, Sshd, write_home

pytestmark = pytest.mark.timeout(120)
UNKNOWN = "987654"


@dataclass
class Bench:
    """A scheduler, a folder that its jobs see, and the jobs to clean away."""

    scheduler: Scheduler
    folder: Path
    jobs: list[str] = field(default_factory=list)

    def submit(self, body: str, *, nodes: int = 2, tasks: int = 2, tag: str = "krea/test", more: str = "") -> str:
        script = self.folder / f"script-{len(self.jobs)}"
        script.write_text(
            f"#!/bin/bash\n#SBATCH --job-name=contract\n#SBATCH --nodes={nodes}\n#SBATCH --ntasks-per-node={tasks}\n"
            f"#SBATCH --output={self.folder}/out-%j\n#SBATCH --open-mode=append\n#SBATCH --chdir={self.folder}\n"
            f"{more or '#SBATCH --requeue'}\ncd {self.folder}\n{body}\n"
        )
        job_id = self.scheduler.submit(script, tag=tag)
        self.jobs.append(job_id)
        return job_id

    def record(self, job_id: str) -> JobRecord:
        return self.scheduler.jobs([job_id])[job_id]

    def wait(self, job_id: str, *states: JobState) -> JobRecord:
        wait_until(lambda: self.record(job_id).state in states, f"{states}", lambda: str(self.record(job_id)))
        return self.record(job_id)

    def output(self, job_id: str) -> str:
        path = self.folder / f"out-{job_id}"
        return path.read_text() if path.exists() else ""

    def wait_for_output(self, job_id: str, text: str) -> None:
        wait_until(lambda: text in self.output(job_id), repr(text), lambda: self.output(job_id))

    def start_again(self, job_id: str) -> JobRecord:
        """After a requeue: pending seen, the next whole second where that matters, the start time lifted."""
        pending = self.wait(job_id, JobState.PENDING)
        if self.scheduler.whole_second_starts:
            now = time.time()
            time.sleep(math.floor(now) + 1.15 - now)
        self.scheduler.start_now(job_id)
        return pending


def wait_until(condition: Callable[[], bool], what: str, show: Callable[[], str], patience_s: float = 40) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {patience_s} s for {what}; now: {show()}"
        time.sleep(0.05)


def through_pyslurm() -> Scheduler:
    """Skips, with what doctor would say, where pyslurm is not there or not of the cluster's version."""
    scheduler = open_scheduler("slurm", state_dir=Path("/nowhere"))
    if not isinstance(scheduler, SlurmApi):
        pytest.skip(f"no pyslurm for this Slurm (docs/how-to/pyslurm.md): {scheduler.checks()[-1].detail}")
    return scheduler


@pytest.fixture(
    params=["local", *(pytest.param(kind, marks=pytest.mark.slurm) for kind in ("slurm", "slurm over ssh", "pyslurm"))]
)
def bench(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    sshd = None
    if request.param != "local":
        for name, value in request.getfixturevalue("slurm_cluster").env.items():
            monkeypatch.setenv(name, value)
        if request.param == "slurm over ssh":
            sshd = login_node(tmp_path, monkeypatch)
        transport = HERE if sshd is None else Ssh("login")
        bench = Bench(through_pyslurm() if request.param == "pyslurm" else SlurmCli(transport=transport), tmp_path)
    else:
        bench = Bench(LocalScheduler(tmp_path / "local"), tmp_path)
    yield bench
    for job_id in bench.jobs:
        bench.scheduler.cancel(job_id)
    for job_id in bench.jobs:
        wait_until(lambda job_id=job_id: bench.record(job_id).state.is_ended, "the end", lambda: "")
    if sshd is not None:
        sshd.stop()


def login_node(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Sshd:
    """A real sshd whose commands see the cluster; the home directory of this process is changed to one that knows it."""
    pytest.importorskip("paramiko", reason="paramiko is not installed: pip install 'krea-runner[ssh]'")
    if not Path(SSHD).exists():
        pytest.skip("sshd is not installed: apt-get install openssh-server")
    sshd = Sshd(folder / "sshd", free_port(), {name: os.environ[name] for name in ("PATH", "SLURM_CONF")})
    write_home(folder / "home", sshd)
    monkeypatch.setenv("HOME", str(folder / "home"))
    sshd.start()
    return sshd


def test_a_job_runs_on_all_its_nodes_with_slurms_environment(bench: Bench) -> None:
    job_id = bench.submit(
        'echo "batch $SLURM_JOB_ID $SLURM_JOB_NUM_NODES ${SLURM_RESTART_COUNT-unset} $SLURM_JOB_NODELIST"\n'
        "srun bash -c 'echo \"rank $SLURM_PROCID of $SLURM_NTASKS local $SLURM_LOCALID node $SLURM_NODEID $SLURMD_NODENAME\"'"
    )
    record = bench.wait(job_id, JobState.COMPLETED)
    assert (record.exit_code, record.signal, record.restart_count) == (0, 0, 0)
    assert record.ended_at is not None
    assert record.nodelist
    bench.wait_for_output(job_id, "rank 3 of 4 local 1 node 1")
    output = bench.output(job_id)
    assert re.search(rf"^batch {job_id} 2 unset \w+\[1-2\]$", output, re.MULTILINE)
    ranks = re.findall(r"rank (\d) of 4 local (\d) node (\d) (\w+)", output)
    assert sorted(row[:3] for row in ranks) == [("0", "0", "0"), ("1", "1", "0"), ("2", "0", "1"), ("3", "1", "1")]
    assert len({row[3] for row in ranks}) == 2


@pytest.mark.parametrize(
    ("body", "exit_code", "number"), [("exit 7", 7, 0), ("exit 137", 137, 0), ("kill -9 $$; sleep 9", 0, 9)]
)
def test_a_failed_script_keeps_its_exit_code_or_signal(bench: Bench, body: str, exit_code: int, number: int) -> None:
    record = bench.wait(bench.submit(body, nodes=1, tasks=1), JobState.FAILED)
    assert (record.exit_code, record.signal) == (exit_code, number)


def test_kill_on_bad_exit_ends_the_gang_and_names_the_rank(bench: Bench) -> None:
    job_id = bench.submit(
        "srun --kill-on-bad-exit=1 bash -c 'if [ $SLURM_PROCID = 2 ]; then sleep 1; exit 5; fi; sleep 600'"
    )
    record = bench.wait(job_id, JobState.FAILED)
    assert record.exit_code is not None
    assert record.exit_code > 0
    assert re.search(r"^srun: error: \w+2: task 2: Exited with exit code 5$", bench.output(job_id), re.MULTILINE)


def test_srun_writes_a_labelled_file_a_node(bench: Bench) -> None:
    out = bench.folder / "node-%n.log"
    job_id = bench.submit(f"srun --label --open-mode=append --output={out} bash -c 'echo hello'")
    bench.wait(job_id, JobState.COMPLETED)
    assert sorted((bench.folder / "node-1.log").read_text().split("\n")) == ["", "2: hello", "3: hello"]


def test_a_requeue_keeps_the_id_and_starts_once_its_start_time_is_lifted(bench: Bench) -> None:
    job_id = bench.submit('echo "start ${SLURM_RESTART_COUNT-unset}"\nsrun sleep 600')
    bench.wait_for_output(job_id, "start unset")
    bench.scheduler.requeue(job_id)
    pending = bench.start_again(job_id)
    assert pending.restart_count == 1
    assert pending.started_at is not None
    assert pending.started_at > time.time() + 60
    assert bench.wait(job_id, JobState.RUNNING).restart_count == 1
    bench.wait_for_output(job_id, "start 1")
    assert "start unset" in bench.output(job_id)  # appended, not truncated


def test_a_start_that_comes_too_early_is_harmless(bench: Bench) -> None:
    if isinstance(bench.scheduler, SlurmCli) and bench.scheduler.transport.host:
        pytest.skip("over SSH it comes late enough, and then too early for the whole second of the kill")
    job_id = bench.submit("srun sleep 600")
    bench.wait(job_id, JobState.RUNNING)
    time.sleep(1)
    bench.scheduler.requeue(job_id)
    bench.scheduler.start_now(job_id)
    after = bench.wait(job_id, JobState.PENDING, JobState.RUNNING)
    if (after.started_at or 0.0) > time.time() + 5:
        bench.start_again(job_id)
    assert bench.wait(job_id, JobState.RUNNING).restart_count == 1


def test_stopped_ranks_die_in_a_requeue(bench: Bench) -> None:
    job_id = bench.submit("srun bash -c 'echo pid $$; sleep 600'")
    wait_until(lambda: bench.output(job_id).count("pid") == 4, "four ranks", lambda: bench.output(job_id))
    pids = [int(pid) for pid in re.findall(r"pid (\d+)", bench.output(job_id))]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    bench.scheduler.requeue(job_id)
    bench.wait(job_id, JobState.PENDING)
    assert [pid for pid in pids if is_alive(pid)] == []


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize("end", [JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED])
def test_an_ended_job_can_be_requeued_so_callers_must_know_better(bench: Bench, end: JobState) -> None:
    body = {JobState.COMPLETED: "exit 0", JobState.FAILED: "exit 1", JobState.CANCELLED: "sleep 600"}[end]
    job_id = bench.submit(f'if [ -z "${{SLURM_RESTART_COUNT-}}" ]; then {body}; fi; sleep 600', nodes=1, tasks=1)
    if end is JobState.CANCELLED:
        bench.wait(job_id, JobState.RUNNING)
        time.sleep(1)
        bench.scheduler.cancel(job_id)
    bench.wait(job_id, end)
    bench.scheduler.requeue(job_id)
    bench.start_again(job_id)
    assert bench.wait(job_id, JobState.RUNNING).restart_count == 1


def test_a_job_gets_the_environment_that_is_kept_beside_its_script(
    bench: Bench, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "ssh" in request.node.callspec.id:
        pytest.skip("over SSH it is the login node's own")
    (bench.folder / "submit.env").write_bytes(packed({**os.environ, "MINE": "a\nb", "SLURM_NTASKS": "9"}))
    monkeypatch.setenv("MINE", "of another shell")
    monkeypatch.setenv("CRONS_OWN", "1")
    job_id = bench.submit('echo "<$MINE|${CRONS_OWN-none}>"', nodes=1, tasks=1)
    bench.wait_for_output(job_id, "<a\nb|none>")


def test_a_pending_job_is_not_requeued(bench: Bench) -> None:
    job_id = bench.submit("srun sleep 600")
    bench.wait(job_id, JobState.RUNNING)
    time.sleep(1)
    bench.scheduler.requeue(job_id)
    bench.wait(job_id, JobState.PENDING)
    with pytest.raises(SchedulerError, match="pending execution") as caught:
        bench.scheduler.requeue(job_id)
    assert not caught.value.transient
    assert bench.record(job_id).restart_count == 1


def test_no_requeue_is_refused(bench: Bench) -> None:
    job_id = bench.submit("sleep 600", nodes=1, tasks=1, more="#SBATCH --no-requeue")
    record = bench.wait(job_id, JobState.RUNNING)
    assert record.requeue_allowed is False
    with pytest.raises(SchedulerError, match="presently disabled"):
        bench.scheduler.requeue(job_id)


def test_an_unknown_job_is_absent_refused_and_nothing_to_cancel(bench: Bench) -> None:
    known = bench.submit("sleep 600", nodes=1, tasks=1)
    assert bench.scheduler.jobs([UNKNOWN]) == {}
    assert bench.scheduler.jobs([]) == {}
    assert list(bench.scheduler.jobs([UNKNOWN, known])) == [known]
    with pytest.raises(JobNotFound):
        bench.scheduler.requeue(UNKNOWN)
    bench.scheduler.cancel(UNKNOWN)


def test_a_job_is_found_by_its_tag_alone(bench: Bench) -> None:
    odd = f"krea/a|b 'c' \"d\" $(e) ü=%j {bench.folder.name}"
    first, second = bench.submit("sleep 600", nodes=1, tasks=1, tag=odd), bench.submit("sleep 600", nodes=1, tasks=1)
    assert [job.job_id for job in bench.scheduler.find_by_tag(odd)] == [first]
    assert second in [job.job_id for job in bench.scheduler.find_by_tag("krea/test")]
    assert bench.scheduler.find_by_tag("krea/nothing") == []


def test_cancel_ends_running_and_pending_jobs(bench: Bench) -> None:
    running = bench.submit("srun sleep 600")
    bench.wait(running, JobState.RUNNING)
    bench.scheduler.cancel(running)
    bench.wait(running, JobState.CANCELLED)
    pending = bench.submit("srun sleep 600")
    bench.wait(pending, JobState.RUNNING)
    time.sleep(1)
    bench.scheduler.requeue(pending)
    bench.wait(pending, JobState.PENDING)
    bench.scheduler.cancel(pending)
    bench.wait(pending, JobState.CANCELLED)


def test_a_script_that_cannot_be_queued_is_refused(bench: Bench) -> None:
    with pytest.raises(SchedulerError) as caught:
        bench.submit("true", more="#SBATCH --no-such-option=1")
    assert not caught.value.transient


def test_a_job_outlives_the_process_that_submitted_it(bench: Bench) -> None:
    script = bench.folder / "script"
    script.write_text(f"#!/bin/bash\n#SBATCH --output={bench.folder}/out-%j\nsleep 2; echo survived\n")
    kind, root = bench.scheduler.name, bench.folder / "local"
    code = (
        "import sys; from pathlib import Path\n"
        "from krea_runner.schedulers.local import LocalScheduler; from krea_runner.schedulers.slurm_cli import SlurmCli\n"
        f"s = LocalScheduler(Path({str(root)!r})) if {kind!r} == 'local' else SlurmCli()\n"
        f"print(s.submit(Path({str(script)!r}), tag='t'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, start_new_session=True
    )
    job_id = done.stdout.strip()
    bench.jobs.append(job_id)
    bench.wait(job_id, JobState.COMPLETED)
    assert "survived" in bench.output(job_id)


def test_checks_for_doctor_are_all_ok(bench: Bench) -> None:
    checks = bench.scheduler.checks()
    assert checks
    assert [check for check in checks if not check.ok] == []


# -------------------------------------------------------------------------------------------------------------- nodes


def test_nodes_have_a_state_and_a_partition(bench: Bench) -> None:
    nodes = bench.scheduler.nodes()
    assert len(nodes) >= 4
    assert all(node.raw_state and node.partitions and not node.is_out for node in nodes.values())
    first = next(iter(nodes))
    assert list(bench.scheduler.nodes([first, "no-such-node"])) == [first]


def test_an_excluded_node_is_not_used_after_a_requeue_and_the_users_own_exclusion_stays(bench: Bench) -> None:
    own, *_ = bench.scheduler.nodes()
    more = f"#SBATCH --requeue\n#SBATCH --exclude={own}"
    job_id = bench.submit('echo "on $SLURM_JOB_NODELIST"\nsrun sleep 600', nodes=1, tasks=1, more=more)
    bench.wait_for_output(job_id, "on ")
    bad = expand(bench.record(job_id).nodelist)
    assert own not in bad
    with pytest.raises(SchedulerError, match="no longer pending"):
        bench.scheduler.exclude(job_id, bad)
    bench.scheduler.requeue(job_id)
    bench.wait(job_id, JobState.PENDING)
    with pytest.raises(SchedulerError, match="Invalid node name"):
        bench.scheduler.exclude(job_id, ["no-such-node"])
    bench.scheduler.exclude(job_id, bad)
    assert set(bench.scheduler.placements([job_id])[job_id].excluded) == {own, *bad}
    bench.start_again(job_id)
    assert not {own, *bad} & set(expand(bench.wait(job_id, JobState.RUNNING).nodelist))
    wait_until(lambda: bench.output(job_id).count("on ") == 2, "the second start", lambda: bench.output(job_id))


def test_a_start_with_exclusions_replaces_them_in_one_call(bench: Bench) -> None:
    one, two, *_ = bench.scheduler.nodes()
    job_id = bench.submit("srun sleep 600", nodes=1, tasks=1)
    bench.wait(job_id, JobState.RUNNING)
    bench.scheduler.requeue(job_id)
    bench.wait(job_id, JobState.PENDING)
    bench.scheduler.exclude(job_id, [two])
    now = time.time()
    time.sleep(math.floor(now) + 1.15 - now)
    bench.scheduler.start_now(job_id, [one])
    assert expand(bench.wait(job_id, JobState.RUNNING).nodelist) == [two]
    assert bench.scheduler.placements([job_id])[job_id].excluded == (one,)


def test_a_new_job_with_exclusions_has_them_in_place_of_its_scripts_own(bench: Bench) -> None:
    own, bad, *_ = bench.scheduler.nodes()
    bench.submit("sleep 600", nodes=1, tasks=1, more=f"#SBATCH --exclude={own}")
    job_id = bench.scheduler.submit(bench.folder / "script-0", tag="krea/test", excluded=[own, bad])
    bench.jobs.append(job_id)
    assert set(bench.scheduler.placements([job_id])[job_id].excluded) == {own, bad}
    assert not {own, bad} & set(expand(bench.wait(job_id, JobState.RUNNING).nodelist))
    with pytest.raises(SchedulerError) as refused:
        bench.scheduler.submit(bench.folder / "script-0", tag="krea/test", excluded=["no-such-node"])
    assert not refused.value.transient


def test_a_drain_carries_our_prefix_and_only_such_a_one_is_lifted(bench: Bench) -> None:
    if bench.scheduler.name == "slurm" and os.geteuid() != 0:
        pytest.skip("needs root, whom the cluster takes for its operator")
    *_, last = bench.scheduler.nodes()
    bench.scheduler.drain([last], "bad memory: 'x' | \"y\"\nüse another")
    try:
        node = bench.scheduler.nodes([last])[last]
        assert node.reason == "krea: bad memory: 'x' | \"y\"\nüse another"
        assert "DRAIN" in node.raw_state
        assert (node.is_out, node.is_ours) == (True, True)
        assert node.reason_by
    finally:
        bench.scheduler.undrain([last])
    lifted = bench.scheduler.nodes([last])[last]
    assert "DRAIN" not in lifted.raw_state
    wait_until(lambda: not bench.scheduler.nodes([last])[last].is_out, "the node", lambda: lifted.raw_state)
    with pytest.raises(SchedulerError, match="not drained by krea-runner"):
        bench.scheduler.undrain([last])
    with pytest.raises(SchedulerError, match="there is no node"):
        bench.scheduler.drain(["no-such-node"], "x")
