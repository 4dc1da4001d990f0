"""The verbs in other people's environments: a crash and its restart come out as in a clean one, whatever the profile says."""

import contextlib
import json
import os
import pwd
import re
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from krea_runner.proc import SCRUBBED_PREFIXES
from krea_runner.schedulers.nodelist import expand
from krea_runner.schedulers.slurm_cli import SlurmCli
from tests.conftest import SlurmCluster, until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(240)]

# What squeue, sinfo, scontrol, sacct and scancel read (their manual pages, 22.05 to 26.05): each changes or empties an answer.
READING = {
    "SQUEUE_FORMAT": "%i", "SQUEUE_FORMAT2": "JobID:|", "SQUEUE_SORT": "-i", "SQUEUE_ALL": "0", "SQUEUE_STATES": "PENDING",
    "SQUEUE_USERS": "nobody", "SQUEUE_PARTITION": "nowhere", "SQUEUE_NAMES": "nothing", "SQUEUE_LICENSES": "1",
    "SQUEUE_ARRAY": "1", "SQUEUE_ACCOUNT": "none", "SQUEUE_QOS": "none", "SQUEUE_LOCAL": "1", "SQUEUE_FEDERATION": "1",
    "SQUEUE_SIBLING": "1", "SQUEUE_PRIORITY": "1", "SLURM_BITSTR_LEN": "1", "SLURM_JSON": "compact", "SLURM_YAML": "flow",
    "SLURM_CLUSTERS": "moon", "SLURM_TIME_FORMAT": "relative", "SLURM_TOPO_LEN": "1", "SLURM_DEBUG_FLAGS": "all",
    "SCONTROL_ALL": "1", "SCONTROL_FUTURE": "1", "SCONTROL_FEDERATION": "1", "SCONTROL_LOCAL": "1", "SCONTROL_SIBLING": "1",
    "SINFO_FORMAT": "%N", "SINFO_PARTITION": "nowhere", "SINFO_SORT": "-N", "SINFO_ALL": "1", "SACCT_FORMAT": "jobid",
    "SACCT_FEDERATION": "1", "SACCT_LOCAL": "1", "SCANCEL_USER": "nobody", "SCANCEL_STATE": "PENDING",
    "SCANCEL_INTERACTIVE": "1", "SCANCEL_NAME": "nothing", "SCANCEL_VERBOSE": "1",
}  # fmt: skip
SUBMITTING = {
    "SBATCH_PARTITION": "nowhere", "SBATCH_TIMELIMIT": "1", "SBATCH_NO_REQUEUE": "1", "SBATCH_EXPORT": "NONE",
    "SBATCH_WAIT": "1", "SBATCH_DEPENDENCY": "afterok:1", "SBATCH_ARRAY_INX": "1-3", "SBATCH_OUTPUT": "elsewhere",
    "SBATCH_ERROR": "elsewhere", "SBATCH_INPUT": "/nowhere", "SBATCH_JOB_NAME": "other", "SBATCH_OPEN_MODE": "truncate",
    "SBATCH_CLUSTERS": "moon", "SBATCH_ACCOUNT": "none", "SBATCH_QOS": "none", "SBATCH_CONSTRAINT": "gold",
    "SBATCH_EXCLUSIVE": "user", "SBATCH_GRES": "gpu:9", "SBATCH_MEM_PER_NODE": "999999", "SBATCH_SIGNAL": "B:KILL@60",
    "SBATCH_RESERVATION": "none", "SBATCH_DEBUG": "verbose", "SBATCH_GET_USER_ENV": "1", "SBATCH_NO_KILL": "1",
    "SBATCH_OVERCOMMIT": "1", "SBATCH_WCKEY": "none", "SBATCH_IGNORE_PBS": "1", "SBATCH_HINT": "nomultithread",
    "SBATCH_DISTRIBUTION": "cyclic", "SBATCH_THREADS_PER_CORE": "4", "SBATCH_USE_MIN_NODES": "1", "SLURM_UMASK": "0777",
    "SLURM_EXIT_ERROR": "0", "SLURM_HOSTFILE": "/nowhere",
}  # fmt: skip
STEPS = {  # what srun reads in the batch script, had it come that far
    "SLURM_NTASKS": "1", "SLURM_NPROCS": "1", "SLURM_NNODES": "1", "SLURM_TIMELIMIT": "1", "SLURM_JOB_ID": "1",
    "SLURM_CPU_BIND": "map_cpu:0", "SLURM_EXPORT_ENV": "NONE", "SLURM_TEST_EXEC": "1", "SLURM_WAIT": "1", "SLURM_LABELIO": "0",
    "SLURM_OVERCOMMIT": "1", "SLURM_STDOUTMODE": "none", "SLURM_STDERRMODE": "none", "SLURM_TASK_PROLOG": "/nowhere",
    "SLURM_WORKING_DIR": "/", "SLURM_REMOTE_CWD": "/", "SLURM_DISTRIBUTION": "cyclic", "SLURM_PROCID": "5",
    "SLURM_RESTART_COUNT": "9", "SLURM_NO_KILL": "1", "SLURM_EXCLUSIVE": "1", "SLURM_THREADS": "64", "SLURM_OPEN_MODE": "t",
    "SRUN_CPUS_PER_TASK": "64", "SRUN_EXPORT_ENV": "NONE", "SRUN_CONTAINER": "/nowhere", "PMI_RANK": "3", "PMI_SIZE": "9",
    "PMIX_RANK": "3", "SALLOC_PARTITION": "nowhere", "SLURMD_NODENAME": "moon", "KREA_ATTEMPT": "1.r9", "KREA_RUN_DIR": "/",
    "_SLURM_SPANK_OPTION_pyxis_container_image": "/nowhere",
}  # fmt: skip
HOSTILE = {**READING, **SUBMITTING, **STEPS}
# An engineer who travels.
ELSEWHERE = {"TZ": "Asia/Kolkata", "LC_ALL": "POSIX", "LANG": "tr_TR.ISO-8859-9", "PYTHONIOENCODING": "ascii"}
# Of 22.05's sbatch: what a file of defaults may say where the cluster has CliFilterPlugins=cli_filter/user_defaults.
DEFAULTS = """
sbatch:*:no-requeue=yes
sbatch:*:open-mode=truncate
sbatch:*:ntasks=1
sbatch:*:nodes=1
sbatch:*:error=lost.err
sbatch:*:output=lost.out
sbatch:*:chdir=/
sbatch:*:job-name=other
sbatch:*:comment=other
*:*:export=NONE
srun:*:multi-prog=yes
srun:*:ntasks=1
"""
NAME = "größe | 7B"
RANK = (
    'env >"rank.${SLURM_RESTART_COUNT:-0}.$SLURM_PROCID"; [ "${SLURM_RESTART_COUNT:-0}" = 1 ] || exit 7; exec sleep 300'
)
RUN_TOML = f"""
[run]
name = {json.dumps(NAME)}
command = {json.dumps(["bash", "-c", RANK])}
dir = "run"
[gang]
nodes = 2
ranks_per_node = 2
"""
THEIRS = (
    '#!/bin/bash\n#SBATCH -J theirs -o theirs-%j.txt -N2 --ntasks-per-node=1\nsrun bash -c "touch began; sleep 300"\n'
)


@dataclass
class Desk:
    """Somebody's shell on a login node. `hostile` is its environment, or with `bare` all that there is of it."""

    user: Any
    cluster: SlurmCluster
    folder: Path
    hostile: dict[str, str] = field(default_factory=dict)
    bare: bool = False
    clean_conf: Path | None = None

    def krea(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        env = {**self.hostile, **self.cluster.env, "KREA_RUNNER_STATE_DIR": str(self.folder / "state")}
        only = ["env", "-i", *(f"{name}={value}" for name, value in env.items())] if self.bare else []
        argv = [*only, sys.executable, "-m", "krea_runner", *words]
        return self.user.run(argv, env=env, cwd=self.folder, timeout=90, check=check)

    def said(self, *words: str) -> Any:
        return json.loads(self.krea(*words, "--json").stdout)

    def slurm(self, *argv: str) -> str:
        """In a clean environment."""
        conf = {"SLURM_CONF": str(self.clean_conf)} if self.clean_conf else {}
        return self.user.run(list(argv), env=self.cluster.env | conf, cwd=self.folder, timeout=60).stdout.strip()

    def job(self, job_id: str) -> list[str]:
        fields = "State:|,RestartCnt:|,Partition:|,NumNodes:|,NumTasks:|,Requeue:|,Name:"
        return self.slurm("squeue", "-a", "-h", "-t", "all", "-j", job_id, "-O", fields).split("|")

    def leave(self) -> None:
        self.slurm("scancel", "--me")
        until(lambda: not self.slurm("squeue", "-a", "-h", "--me"), "an empty queue")


def one_crash(desk: Desk, more: str = "") -> dict[str, Any]:
    """Submit, crash, supervise, look; and adopt a job of somebody else's script. What came of it, without ids and times."""
    (desk.folder / "run.toml").write_text(RUN_TOML + more)
    (desk.folder / "their.sh").write_text(THEIRS)
    began = time.time()
    job_id = desk.said("submit", "run.toml")["job_id"]
    asked = desk.job(job_id)[2:]
    until(lambda: desk.job(job_id)[0] not in {"PENDING", "RUNNING", "COMPLETING"}, "the crash")
    crashed = desk.job(job_id)[0]
    desk.krea("supervise", "--once")
    until(lambda: len(list(desk.folder.glob("rank.1.*"))) == 4, "the restarted ranks")
    theirs = desk.slurm("sbatch", "--parsable", "-p", "train", "their.sh")
    until((desk.folder / "began").exists, "their job")
    adopted = desk.said("adopt", theirs, "--checkpoint-dir", "")
    tick = desk.krea("supervise", "--once", "--verbose")
    (run, other) = sorted(desk.said("status")["runs"], key=lambda run: run["name"])
    job = run["job"]
    times = [datetime.fromisoformat(job[key]).timestamp() for key in ("submitted_at", "started_at")]
    ranks = {path.name: _environment(path) for path in sorted(desk.folder.glob("rank.*"))}
    return {
        "asked": asked, "crashed": crashed, "now": desk.job(job_id)[:2],
        "incident": {key: run["last_incident"][key] for key in ("symptom", "cause", "decision")},
        "run": {key: run[key] for key in ("name", "state", "could_not_see", "is_failing", "restarts_used", "attempt_number")},
        "job": {key: job[key] for key in ("state", "restart_count", "requeue_allowed", "user")},
        "attempt": run["attempt"] == f"{job_id}.r1",
        "nodes": [len(expand(job["nodelist"])), job["batch_node"] in expand(job["nodelist"])],
        "times": [began - 1 <= at <= time.time() + 1 for at in times],
        "ranks": {name: (env["SLURM_NTASKS"], env["SLURM_NNODES"], "PATH" in env) for name, env in ranks.items()},
        "leaked": {name for env in ranks.values() for name in env if "SLURM" in name or name in HOSTILE},
        "tick": (tick.returncode, tick.stdout.count("\n")),
        "adopted": [*(adopted[key] for key in ("run", "nodes", "ranks")), Path(adopted["log"]).name == f"theirs-{theirs}.txt",
                    adopted["workdir"] == str(desk.folder), other["name"], other["state"], other["job"]["state"]],
        "node states": sorted({re.split(r"[*~#+]", node["raw_state"])[0] for node in desk.said("nodes")["nodes"]} - {"MIXED"}),
        "files": sorted({re.sub(r"\d+", "N", str(path.relative_to(desk.folder))) for path in desk.folder.rglob("*")
                         if "state" not in path.parts}),
        "srun's words": (desk.folder / "run" / "logs" / f"batch-{job_id}.log").read_text().count("Exited with exit code 7"),
    }  # fmt: skip


def _environment(path: Path) -> dict[str, str]:
    return dict(line.split("=", 1) for line in path.read_text().splitlines() if "=" in line)


@pytest.fixture
def desk(slurm_cluster, ordinary_user) -> Iterator[Desk]:
    desk = Desk(ordinary_user, slurm_cluster, Path(ordinary_user.make_dir()))
    yield desk
    desk.leave()


@pytest.fixture(scope="module")
def clean(slurm_cluster, ordinary_user) -> dict[str, Any]:
    """What a crash and its restart come to where nobody has a profile."""
    desk = Desk(ordinary_user, slurm_cluster, Path(ordinary_user.make_dir()))
    try:
        return one_crash(desk)
    finally:
        desk.leave()


def test_in_a_clean_environment_a_crash_is_followed_by_a_restart(clean: dict[str, Any]) -> None:
    assert (clean["crashed"], clean["now"], clean["job"]["requeue_allowed"]) == ("FAILED", ["RUNNING", "1"], True)
    assert clean["incident"] == {"symptom": "crash", "cause": "rank_failed", "decision": "REQUEUE"}
    assert clean["run"] | {"state": "ACTIVE", "could_not_see": [], "is_failing": False} == clean["run"]
    assert set(clean["ranks"].values()) == {("4", "2", True)}
    assert (len(clean["ranks"]), clean["times"], clean["attempt"]) == (8, [True, True], True)


# -------------------------------------------------------------------------------------------------------- environments


def inside_a_step(desk: Desk) -> dict[str, str]:
    """What a task of an array has in its environment: as in a tmux that was started there."""
    script = desk.folder / "array.sh"
    script.write_text(f"#!/bin/bash\nsrun -n1 --cpu-bind=none env -0 >{desk.folder}/seen\n")
    desk.slurm("sbatch", "-W", "-o", "/dev/null", "--array=7", "--no-requeue", "--mem=100", "-c2", str(script))
    seen = (desk.folder / "seen").read_text().split("\0")
    (desk.folder / "seen").unlink()
    script.unlink()
    return dict(entry.split("=", 1) for entry in seen if entry.startswith(SCRUBBED_PREFIXES))


ENVIRONMENTS: dict[str, Callable[[Desk], dict[str, str]]] = {
    "every variable that Slurm reads": lambda desk: HOSTILE,
    "inside a task of an array": inside_a_step,
    "another time zone and language": lambda desk: ELSEWHERE,
}


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_a_crash_and_its_restart_are_the_same_in_any_environment(name: str, desk: Desk, clean: dict[str, Any]) -> None:
    desk.hostile = dict(ENVIRONMENTS[name](desk))
    assert one_crash(desk) == clean


def test_a_crash_and_its_restart_are_the_same_from_an_empty_environment(desk: Desk, clean: dict[str, Any]) -> None:
    desk.bare = True
    assert one_crash(desk) == clean


def test_a_job_submitted_again_from_cron_has_the_environment_of_the_first_submission(desk: Desk) -> None:
    rank = 'env >"rank.$SLURM_JOB_ID"; while [ ! -e crash ]; do sleep 0.1; done; rm crash; exit 7'
    (desk.folder / "run.toml").write_text(
        f'[run]\nname = "again"\ncommand = {json.dumps(["bash", "-c", rank])}\ndir = "run"\n'
    )
    desk.hostile = {"MY_ENV": "größe", "EMPTY": "", "SLURM_CPU_BIND": "map_cpu:0"}
    job_id = desk.said("submit", "run.toml")["job_id"]
    until((desk.folder / f"rank.{job_id}").exists, "the rank")
    desk.slurm("scontrol", "update", f"jobid={job_id}", "requeue=0")
    (desk.folder / "crash").touch()
    until(lambda: desk.job(job_id)[0] == "FAILED", "the crash")
    desk.bare, desk.hostile = True, {"PATH": os.environ["PATH"], "CRONS_OWN": "1"}
    desk.krea("supervise", "--once")
    again = desk.said("status")["runs"][0]["job"]["job_id"]
    assert again != job_id
    until((desk.folder / f"rank.{again}").exists, "the rank of the new job")
    before, after = (_environment(desk.folder / f"rank.{one}") for one in (job_id, again))
    numbers = {
        name for name in before if "SLURM" in name or name.startswith(("KREA_", "MASTER_", "TORCH_", "NCCL_", "_"))
    }
    assert {**after, **{name: before[name] for name in numbers}} == before
    assert (before["MY_ENV"], before["EMPTY"], after["KREA_ATTEMPT"]) == ("größe", "", f"{again}.r0")
    assert stat.S_IMODE((desk.folder / "run" / "submit.env").stat().st_mode) == 0o600


@contextlib.contextmanager
def defaults_file(desk: Desk, text: str) -> Iterator[None]:
    """~/.slurm/defaults, which Slurm reads where the cluster has the plugin for it. The home is passwd's, not $HOME's."""
    home, conf = Path(pwd.getpwuid(desk.user.uid).pw_dir), desk.cluster.conf
    if os.geteuid() != 0 or home.exists():
        pytest.skip("needs an account without a home, to give it one")
    before = conf.read_text()
    desk.clean_conf = conf.with_name("clean.conf")
    desk.clean_conf.write_text(before)
    try:
        (home / ".slurm").mkdir(parents=True)
        (home / ".slurm" / "defaults").write_text(text)
        conf.write_text(f"{before}CliFilterPlugins=cli_filter/user_defaults\n")
        yield
    finally:
        conf.write_text(before)
        subprocess.run(["rm", "-r", str(home)], check=True)


def test_a_crash_and_its_restart_are_the_same_with_a_file_of_defaults(desk: Desk, clean: dict[str, Any]) -> None:
    with defaults_file(desk, DEFAULTS):
        assert one_crash(desk) == clean


def test_a_default_that_no_script_takes_back_is_not_submitted_with(desk: Desk) -> None:
    (desk.folder / "run.toml").write_text(RUN_TOML)
    with defaults_file(desk, "sbatch:*:array=1-3\n"):
        subprocess.run(["scontrol", "reconfigure"], env={**os.environ, **desk.cluster.env}, check=True)
        refused = desk.krea("submit", "run.toml", check=False)
    subprocess.run(["scontrol", "reconfigure"], env={**os.environ, **desk.cluster.env}, check=True)
    assert (refused.returncode, "~/.slurm/defaults, and" in refused.stderr and "line 1, array" in refused.stderr) == (
        1,
        True,
    )
    assert desk.slurm("squeue", "-a", "-h", "--me") == ""


# ---------------------------------------------------------------------------------------------------------- partitions


@pytest.fixture
def hidden_partition(desk: Desk) -> Iterator[Callable[..., str]]:
    """The cluster's one partition is neither shown nor the default any more; gives root's scontrol."""
    if os.geteuid() != 0:
        pytest.skip("needs root, whom the cluster takes for its operator")

    def scontrol(*words: str) -> str:
        env = {**os.environ, **desk.cluster.env}
        return subprocess.run(["scontrol", *words], env=env, capture_output=True, text=True, check=True).stdout

    scontrol("update", "partitionname=train", "default=no", "hidden=yes")
    yield scontrol
    desk.leave()
    scontrol("update", "partitionname=train", "default=yes", "hidden=no")


def test_a_run_in_a_hidden_partition_beside_another_default_is_like_any_other(
    desk: Desk, clean: dict[str, Any], hidden_partition: Callable[..., str]
) -> None:
    hidden_partition("create", "partitionname=a|b", "nodes=n4", "maxtime=1", "default=yes")
    try:
        assert one_crash(desk, '[slurm]\npartition = "train"') == clean
    finally:
        hidden_partition("delete", "partitionname=a|b")


def test_where_no_partition_is_the_default_the_refusal_says_what_to_write(
    desk: Desk, hidden_partition: Callable[..., str]
) -> None:
    (desk.folder / "run.toml").write_text(RUN_TOML)
    refused = desk.krea("submit", "run.toml", check=False)
    assert (refused.returncode, 'partition = "NAME"' in refused.stderr) == (69, True)
    assert desk.slurm("squeue", "-a", "-h", "--me") == ""


# --------------------------------------------------------------------------------------------------------------- times


def test_an_hour_that_a_clock_shows_twice_is_read_as_the_one_it_was(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zic = shutil.which("zic", path=f"{os.environ['PATH']}:/usr/sbin")
    if zic is None:
        pytest.skip("no zic, which makes time zones")
    year = datetime.now(UTC).year + 1
    rules = (
        f"Zone Back 6:00 - +06 {year} Mar 1 0:00\n 5:00 - +05\n"  # as Almaty did in 2024: no summer time, an hour back
    )
    (tmp_path / "rules").write_text(rules)
    subprocess.run([zic, "-d", str(tmp_path), str(tmp_path / "rules")], check=True)
    shown_twice = [datetime(year, 2, 28, hour, 30, tzinfo=UTC) for hour in (17, 18)]
    begins = [["sbatch", "--parsable", "-o", "/dev/null", f"--begin={at:%Y-%m-%dT%H:%M:%S}"] for at in shown_twice]
    jobs = [desk.slurm("env", "TZ=UTC0", *begin, "--wrap", "true") for begin in begins]
    for name, value in {**desk.cluster.env, "TZ": f":{tmp_path}/Back"}.items():
        monkeypatch.setenv(name, value)
    found = SlurmCli().jobs(jobs)
    assert [found[job].started_at for job in jobs] == [at.timestamp() for at in shown_twice]
