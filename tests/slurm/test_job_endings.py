"""docs/reference/job-endings.md, row by row: each ending is made to happen on a real Slurm, one tick is taken, and what is on
record is compared with the table."""

import contextlib
import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from krea_runner.clock import SystemClock
from krea_runner.history.store import open_history
from krea_runner.launch.submit import submit
from krea_runner.model import CheckpointSpec, Gang, JobRecord, RunConfig, RunState
from krea_runner.proc import run
from krea_runner.schedulers.slurm_cli import SlurmCli
from krea_runner.supervise.supervisor import Supervisor
from krea_runner.supervise.tick import tick
from tests.conftest import dev_cluster, free_ports, until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "job-endings.md"
HEADINGS = "ending", "what", "state", "code", "node", "by", "incident", "decision", "then"
NODES = 4


@dataclasses.dataclass(frozen=True)
class Row:
    ending: str
    what: str
    state: str
    code: str
    node: str
    by: str
    incident: str
    decision: str
    then: str

    def of(self, column: str, *, accounting: bool) -> str:
        with_accounting, slash, without = getattr(self, column).partition(" / ")
        return without if slash and not accounting else with_accounting


def table() -> list[Row]:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")][1:]
    return [Row(*(cell.strip() for cell in line.strip("|").split(" | "))) for line in lines]


ROWS = {row.ending: row for row in table()}

EXPEDITE = (25, 11)


def slurm_version() -> tuple[int, ...]:
    said = run(
        [shutil.which("slurmctld", path=os.environ["PATH"] + ":/usr/sbin") or "slurmctld", "-V"], timeout_s=60
    ).stdout
    return tuple(int(part) for part in said.split()[-1].split(".")[:2])


# ---------------------------------------------------------------------------------------------------------- the cluster


@dataclasses.dataclass
class Cluster:
    folder: Path
    accounting: bool

    def say(self, *argv: str) -> str:
        done = run(argv, timeout_s=60)
        assert done.returncode == 0, f"{argv}: {done.stderr}"
        return done.stdout.strip()

    def try_to(self, *argv: str) -> None:
        run(argv, timeout_s=60)

    def processes(self, *names: str, node: str = "") -> list[int]:
        """Of this cluster, those whose program or script is called so; step daemons of `node` have its name in their title."""
        called = re.compile(f"(?:.*/)?(?:{'|'.join(map(re.escape, names))})(?:[: ].*)?")
        found = []
        for proc in Path("/proc").glob("[0-9]*"):
            try:
                words = (proc / "cmdline").read_bytes().split(b"\0")
                ours = f"SLURM_CONF={self.folder}/slurm.conf".encode() in (proc / "environ").read_bytes()
                title = b" ".join(words).decode()
                is_called = any(called.fullmatch(word.decode()) for word in words[:2])
                if ours and is_called and (not node or self._is_of(proc, title, node)):
                    found.append(int(proc.name))
            except OSError:
                continue
        return found

    def _is_of(self, proc: Path, title: str, node: str) -> bool:
        if f"-N {node}" in title:
            return True
        return (
            f"SLURMD_NODENAME={node}".encode() in (proc / "environ").read_bytes().split(b"\0") or f"[{node}." in title
        )

    def reconfigure(self, **values: str) -> None:
        path = self.folder / "slurm.conf"
        kept = [line for line in path.read_text().splitlines() if line.partition("=")[0] not in values]
        path.write_text("\n".join([*(f"{name}={value}" for name, value in values.items()), *kept]) + "\n")
        self.say("scontrol", "reconfigure")


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "accounting"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    if os.geteuid() != 0:
        pytest.skip("node failures, other users' cancels and memory limits need root")
    if shutil.which("slurmctld", path=os.environ["PATH"] + ":/usr/sbin") is None:
        pytest.skip("Slurm is not installed; as root type: apt-get install slurmctld slurmd slurm-client munge")
    folder = Path(tempfile.mkdtemp(prefix="krea-ends-"))
    folder.chmod(0o755)
    prolog = folder / "prolog"
    prolog.write_text(f"#!/bin/sh\n[ ! -e {folder}/fail-prolog-$SLURMD_NODENAME ]\n")
    prolog.chmod(0o755)
    confs = [
        "SlurmdTimeout=6", f"Prolog={prolog}", "PrologFlags=Alloc", "PreemptType=preempt/partition_prio",
        "PreemptMode=REQUEUE", "TaskPlugin=task/cgroup", "SelectTypeParameters=CR_Core_Memory", "DefMemPerNode=200",
        "PartitionName=hi Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP",
        "PartitionName=lo Nodes=ALL PriorityTier=1 MaxTime=INFINITE State=UP",
        "PartitionName=loc Nodes=ALL PriorityTier=1 PreemptMode=CANCEL MaxTime=INFINITE State=UP",
    ]  # fmt: skip
    where = ("--dir", str(folder / "c"))
    if slurm_version() >= EXPEDITE:
        confs.append("SlurmctldParameters=enable_expedited_requeue")
    words = [word for conf in confs for word in ("--conf", conf)]
    words += [
        "--cgroup",
        "CgroupPlugin=cgroup/v1",
        "--cgroup",
        "ConstrainRAMSpace=yes",
        "--cgroup",
        "ConstrainSwapSpace=yes",
    ]
    more = ["--accounting"] if request.param else []
    try:
        dev_cluster("up", *where, "--nodes", str(NODES), "--port-base", str(free_ports()), *words, *more)
        os.environ["SLURM_CONF"] = str(folder / "c" / "slurm.conf")
        yield Cluster(folder / "c", request.param)
    finally:
        dev_cluster("down", *where)
        os.environ.pop("SLURM_CONF", None)
        shutil.rmtree(folder, ignore_errors=True)


# ------------------------------------------------------------------------------------------------------------- one run

RANK = """
import os, signal, sys, time
rank, how = int(os.environ["SLURM_PROCID"]), sys.argv[1]
if os.environ.get("SLURM_RESTART_COUNT", "0") != "0" or os.path.exists("again"): how = "sleep"
if how == "notice":
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))
elif rank == 1:
    time.sleep(0.5)
    if how.isdigit(): sys.exit(int(how))
    if how.startswith("SIG"): os.kill(os.getpid(), getattr(signal, how))
    if how == "hog":
        hoard = [bytearray(b"x" * (1 << 20)) for _ in range(2000)]
time.sleep(600)
"""


class Case:
    """One run of two ranks on two nodes, its supervisor, and what is on record of it."""

    def __init__(self, cluster: Cluster, row: Row, user: Any) -> None:
        self.cluster, self.row, self.user = cluster, row, user
        self.slurm, self.clock = SlurmCli(), SystemClock()
        self.folder = Path(tempfile.mkdtemp(prefix=f"{row.ending}-", dir=cluster.folder))
        self.folder.chmod(0o777)
        (self.folder / "rank.py").write_text(RANK)
        self.history = open_history(self.folder / "state")
        self.supervisor = Supervisor(self.history, lambda _: self.slurm, self.clock, "root", "test:1:1")
        self.job_id, self.run_id, self.expected_node = "", 0, ""

    def submit(self, how: str = "sleep", *, script: str = "", requeue: bool | None = True, **options: Any) -> None:
        """Queue the run as the ordinary user's; `script`: a batch script of the user's own instead of ours."""
        work = self.folder / "work"
        work.mkdir(exist_ok=True)
        config = RunConfig(
            name=self.row.ending, slug=self.row.ending, run_dir=self.folder / "run", workdir=work,
            command=(sys.executable, str(self.folder / "rank.py"), how), gang=Gang(2, 1),
            checkpoint=CheckpointSpec(directory=self.folder / "ckpt"), slurm=MappingProxyType(options),
        )  # fmt: skip
        outer = self

        class AsTheUser(SlurmCli):
            """As root may: for another user."""

            def submit(self, script_file: Path, *, tag: str, excluded: Sequence[str] = ()) -> str:
                text = script_file.read_text()
                if script:
                    head = [line for line in text.splitlines() if line.startswith("#SBATCH")]
                    text = "\n".join(["#!/bin/bash", *head, script]) + "\n"
                if requeue is not True:
                    text = text.replace("#SBATCH --requeue", "#SBATCH --no-requeue" if requeue is False else "#")
                script_file.write_text(text)
                outer.own_everything()
                argv = [
                    "sbatch",
                    "--parsable",
                    f"--uid={outer.user.uid}",
                    f"--gid={outer.user.gid}",
                    f"--comment={tag}",
                    *([f"--exclude={','.join(excluded)}"] if excluded else []),
                ]
                return outer.cluster.say(*argv, str(script_file)).splitlines()[-1]

        taken = submit(config, self._toml(), history=self.history, scheduler=AsTheUser(), user="root", clock=self.clock)
        self.run_id, self.job_id, self.first_tag = taken.run_id, taken.job_id or "", taken.tag

    def _toml(self) -> Path:
        path = self.folder / "run.toml"
        path.write_text("# stands for the user's file\n")
        return path

    def own_everything(self) -> None:
        for path in [self.folder / "run", *(self.folder / "run").rglob("*"), self.folder / "work"]:
            os.chown(path, self.user.uid, self.user.gid)

    # ----------------------------------------------------------------------------------------------------- looking

    def job(self) -> JobRecord | None:
        return self.slurm.jobs([self.job_id]).get(self.job_id)

    def wait(self, *states: str, patience_s: float = 120) -> None:
        until(
            lambda: (job := self.job()) is not None and job.raw_state in states,
            f"{self.row.ending}: {states}",
            patience_s,
        )

    def running(self) -> None:
        """All ranks are there, and a tick has seen them."""
        self.wait("RUNNING")
        logs = self.folder / "run" / "logs"
        until(lambda: len(list(logs.glob(f"{self.job_id}.r0/*"))) >= 2 or self._foreign(), "the ranks", 30)
        self.tick()

    def _foreign(self) -> bool:
        return "KREA_ATTEMPT" not in (self.folder / "run" / "job.sbatch").read_text()

    def tick(self) -> str:
        return "\n".join(f"{line.run.name}: {line.text}" for line in tick(self.supervisor).lines)

    def node_of(self, rank: int) -> str:
        """Ranks are laid out one a node, in the order of the node list."""
        nodelist = self.job().nodelist
        return self.cluster.say("scontrol", "show", "hostnames", nodelist).splitlines()[rank]

    def on_record(self) -> dict[str, str]:
        attempt = self.history.attempts(self.run_id)[0]
        incident = self.history.incidents(run_id=self.run_id)[0]
        return {
            "state": str(attempt.end_state),
            "code": f"{attempt.exit_code or 0}:{attempt.signal or 0}",
            "node": attempt.end_node,
            "by": attempt.ended_by,
            "incident": f"{incident.finding.symptom} {incident.finding.cause}",
            "decision": str(incident.decision.kind),
        }

    def accounting(self) -> str:
        fields = "--format=JobID,State,ExitCode,Submit,Start,End,NodeList"
        return run(["sacct", "-D", "-X", "-P", "-j", self.job_id, fields], timeout_s=60).stdout

    def expected(self) -> dict[str, str]:
        values = {name: self.row.of(name, accounting=self.cluster.accounting) for name in self.on_record()}
        values["node"] = "" if values["node"] == "-" else self.expected_node
        values["by"] = {"-": "", "owner": self.user.name}.get(values["by"], values["by"])
        return values


# ---------------------------------------------------------------------------------------- how each ending is brought about

Provoke = Callable[[Case], None]
ENDINGS: dict[str, Provoke] = {}


def ending(name: str) -> Callable[[Provoke], Provoke]:
    def register(provoke: Provoke) -> Provoke:
        ENDINGS[name] = provoke
        return provoke

    return register


def rank_dies(how: str, **options: Any) -> Provoke:
    def provoke(case: Case) -> None:
        case.submit(how, **options)
        case.wait("FAILED", "REQUEUE_HOLD")
        case.expected_node = case.node_of(1)

    return provoke


ENDINGS["exit"] = rank_dies("7")
ENDINGS["kill-on-bad-exit"] = rank_dies("3")
ENDINGS["rank-killed"] = rank_dies("SIGKILL")
ENDINGS["rank-segfault"] = rank_dies("SIGSEGV")
ENDINGS["out-of-memory"] = rank_dies("hog", mem="100")
ENDINGS["no-requeue"] = rank_dies("7", requeue=False)


@ending("job-requeue-off")
def _(case: Case) -> None:
    case.cluster.reconfigure(JobRequeue="0")
    try:
        rank_dies("7", requeue=None)(case)
    finally:
        case.cluster.reconfigure(JobRequeue="1")


@ending("expedite-hold")
def _(case: Case) -> None:
    if slurm_version() < EXPEDITE:
        pytest.skip(f"sbatch --requeue=expedite is of Slurm 25.11, this is {slurm_version()}")
    case.submit("7", script="", requeue=True, extra=("--requeue=expedite",))
    case.wait("REQUEUE_HOLD")
    case.expected_node = "n2"


@ending("script-killed")
def _(case: Case) -> None:
    case.submit()
    case.running()
    case.expected_node = case.job().batch_node
    for proc in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (proc / "cmdline").read_bytes()
            if b"slurm_script" in words and f"job{int(case.job_id):05d}".encode() in words:
                os.kill(int(proc.name), signal.SIGKILL)
    case.wait("FAILED")


@ending("hidden-failure")
def _(case: Case) -> None:
    case.submit(script=f"srun -K {sys.executable} {case.folder}/rank.py SIGSEGV\nexit 0")
    case.wait("COMPLETED")
    case.expected_node = case.node_of(1)


@ending("script-out-of-memory")
def _(case: Case) -> None:
    case.submit(script=f"SLURM_PROCID=1 exec {sys.executable} {case.folder}/rank.py hog", mem="100")
    case.wait("OUT_OF_MEMORY")
    case.expected_node = case.job().batch_node


@ending("time-limit")
def _(case: Case) -> None:
    case.submit(time="1")
    case.running()
    case.wait("TIMEOUT", patience_s=200)


@ending("time-limit-notice")
def _(case: Case) -> None:
    case.submit("notice", time="1", signal="B:USR1@30")
    case.running()
    case.wait("FAILED", patience_s=200)


@ending("cancel")
def _(case: Case) -> None:
    case.submit()
    case.running()
    case.user.run(["scancel", case.job_id], env={"SLURM_CONF": os.environ["SLURM_CONF"]})
    case.wait("CANCELLED")


@ending("cancel-by-root")
def _(case: Case) -> None:
    case.submit()
    case.running()
    case.cluster.say("scancel", case.job_id)
    case.wait("CANCELLED")


@ending("node-failure")
def _(case: Case) -> None:
    case.submit()
    case.running()
    case.expected_node = node = case.node_of(1)
    for pid in case.cluster.processes("slurmd", "slurmstepd", node=node):
        os.kill(pid, signal.SIGKILL)
    try:
        until(lambda: case.job().restart_count == 1 and case.job().raw_state == "PENDING", "Slurm's requeue", 60)
    finally:
        subprocess.run(["slurmd", "-N", node], check=True, stdin=subprocess.DEVNULL, capture_output=True)


def node_down(**options: Any) -> Provoke:
    def provoke(case: Case) -> None:
        case.submit(**options)
        case.running()
        case.expected_node = node = case.node_of(1)
        case.cluster.say("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
        case.wait("PENDING", "NODE_FAIL")
        case.cluster.try_to("scontrol", "update", f"nodename={node}", "state=resume")

    return provoke


ENDINGS["node-down"] = node_down()
ENDINGS["node-down-no-requeue"] = node_down(requeue=False)


def preempted(partition: str, **options: Any) -> Provoke:
    def provoke(case: Case) -> None:
        case.submit(partition=partition, **options)
        case.running()
        job = case.cluster.say(
            "sbatch", "--parsable", "-o", "/dev/null", "-p", "hi", f"-N{NODES}", "--exclusive", "--wrap=sleep 60"
        )
        try:
            until(lambda: case.job().raw_state in {"PENDING", "PREEMPTED"}, "the preemption", 60)
        finally:
            case.cluster.say("scancel", job)

    return provoke


ENDINGS["preempted"] = preempted("lo")
ENDINGS["preempted-cancel"] = preempted("loc")
ENDINGS["preempted-no-requeue"] = preempted("lo", requeue=False)


@ending("output-unwritable")
def _(case: Case) -> None:
    case.submit(begin="now+2")
    shutil.rmtree(case.folder / "run" / "logs")
    log = case.folder / "run" / "logs"
    until(lambda: case.job().raw_state == "FAILED" or log.exists(), "the job's end, or its folder", 120)
    if log.exists():
        pytest.skip(f"Slurm {slurm_version()} makes the folder of the output itself")
    case.expected_node = case.job().batch_node


@ending("prolog-failure")
def _(case: Case) -> None:
    flag = case.cluster.folder.parent / "fail-prolog-n2"
    flag.touch()
    try:
        case.submit(nodelist="n[1-2]")
        until(lambda: "held" in case.job().reason, "Slurm's hold", 60)
    finally:
        flag.unlink()
        case.cluster.try_to("scontrol", "update", "nodename=n2", "state=resume")


@ending("no-workdir")
def _(case: Case) -> None:
    case.submit(begin="now+2")
    shutil.rmtree(case.folder / "work")
    case.wait("FAILED")
    case.expected_node = case.job().batch_node


@ending("ran-in-tmp")
def _(case: Case) -> None:
    case.submit(script="srun true", begin="now+2")
    shutil.rmtree(case.folder / "work")
    case.wait("COMPLETED")


def requeued(verb: str) -> Provoke:
    def provoke(case: Case) -> None:
        case.submit()
        case.running()
        case.cluster.say("scontrol", verb, case.job_id)
        case.wait("PENDING")

    return provoke


ENDINGS["requeued"] = requeued("requeue")
ENDINGS["requeuehold"] = requeued("requeuehold")


def purged(provoke: Provoke) -> Provoke:
    def and_forgotten(case: Case) -> None:
        case.cluster.reconfigure(MinJobAge="2")
        try:
            provoke(case)
            asked = ["squeue", "-h", "-t", "all", "-j", f"{case.job_id},{case.job_id}", "-o", "%i"]
            until(lambda: not case.cluster.say(*asked), "Slurm to forget the job", 120)
        finally:
            case.cluster.reconfigure(MinJobAge="300")

    return and_forgotten


ENDINGS["purged"] = purged(ENDINGS["exit"])
ENDINGS["purged-cancel"] = purged(ENDINGS["cancel"])


@ending("id-used-again")
def _(case: Case) -> None:
    case.submit()
    case.running()
    # The new controller would have the nodes end what it does not know; whether the script still writes down its end then, is
    # a race. Here nobody is left who could.
    for pid in case.cluster.processes("slurmctld", "slurmstepd", "slurm_script", "rank.py"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    until(lambda: not case.cluster.processes("slurmctld"), "the controller's end")
    shutil.rmtree(case.cluster.folder / "state")
    (case.cluster.folder / "state").mkdir()
    subprocess.run(["slurmctld", "-c"], check=True, stdin=subprocess.DEVNULL, capture_output=True)

    def all_idle() -> bool:
        seen = run(["sinfo", "-h", "-N", "-o", "%N %T"], timeout_s=60).stdout.splitlines()
        out = [line.split()[0] for line in seen if re.search("drain|down", line)]
        for node in out:  # a node whose step daemons were killed may be taken out
            case.cluster.try_to("scontrol", "update", f"nodename={node}", "state=resume")
        return bool(seen) and all(line.endswith(" idle") for line in seen)

    until(all_idle, "idle nodes", 120)
    while True:  # another user's jobs, until one gets our id
        job_id = case.cluster.say("sbatch", "--parsable", "-o", "/dev/null", "-N1", "--wrap=sleep 300")
        if int(job_id) >= int(case.job_id):
            break
        case.cluster.say("scancel", job_id)
    assert job_id == case.job_id


# --------------------------------------------------------------------------------------------------------------- tests


def test_the_table_and_the_ways_to_bring_an_ending_about_are_the_same() -> None:
    assert set(ROWS) == set(ENDINGS)


# A minute and a half each; accounting says nothing more of them than the controller.
ONCE = {"time-limit": True, "time-limit-notice": False}


@pytest.mark.parametrize("name", list(ROWS))
def test_an_ending_is_told_for_what_it_is(cluster: Cluster, ordinary_user: Any, name: str) -> None:
    if ONCE.get(name, cluster.accounting) is not cluster.accounting and "KREA_TEST_ALL" not in os.environ:
        pytest.skip("takes a minute and a half: made on one of the two clusters; on both with KREA_TEST_ALL=1")
    case = Case(cluster, ROWS[name], ordinary_user)
    try:
        ENDINGS[name](case)
        said = settle(case)
        assert case.on_record() == case.expected(), f"{said}\n{case.accounting()}"
        check_what_was_done(case, said)
    finally:
        case.cluster.try_to("scancel", "-u", ordinary_user.name)
        case.cluster.try_to("scancel", "-u", "root")
        until(lambda: not case.cluster.say("squeue", "-h"), "an empty queue", 120)


def settle(case: Case) -> str:
    """Tick until there is an incident and what was decided is carried out."""
    said = []
    deadline = time.monotonic() + 150

    def settled() -> bool:
        said.append(case.tick())
        return bool(case.history.incidents(run_id=case.run_id)) and case.history.open_action(case.run_id) is None

    while not settled():
        assert time.monotonic() < deadline, "\n".join(said)
        time.sleep(0.5)
    return "\n".join(said)


def check_what_was_done(case: Case, said: str) -> None:
    then, old = case.row.then, case.job()
    now = case.history.run(case.run_id)
    if then.startswith(("same job", "released", "Slurm's requeue")):
        assert now.job_id == case.job_id, said
        until(
            lambda: case.job().restart_count == 1 and case.job().raw_state in {"RUNNING", "FAILED"},
            f"the restart: {said}",
            60,
        )
    elif then == "new job":
        assert now.job_id not in {None, case.job_id}, said
        # Never two live jobs of one run.
        assert old is None or old.state.is_ended or old.comment != case.first_tag, said
        assert case.slurm.jobs([now.job_id])[now.job_id].comment == now.tag
    elif then == "left alone for ever":
        assert now.state is RunState.STOPPED
    elif then == "a person looks":
        assert now.state is RunState.HELD
    elif then == "held until released":
        assert case.job().raw_state == "PENDING"
    else:
        assert then == "taken over"
    assert len(case.history.incidents(run_id=case.run_id)) == 1, said
