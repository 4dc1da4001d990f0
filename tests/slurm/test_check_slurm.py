"""What `krea-runner check` warns of, done on a real Slurm: the harm is real, and the fix helps."""

import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import dev_cluster, free_ports, until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(180)]
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "PREEMPTED", "TIMEOUT"}
DONE, NO_LOG = ("COMPLETED", "0:0"), ("FAILED", "0:53")
HEAD = "#!/bin/bash\n#SBATCH --requeue --open-mode=append --output=log\n"


@dataclasses.dataclass
class Desk:
    """One user's folder, in which scripts are checked and submitted."""

    user: Any
    env: dict[str, str]
    folder: Path

    def slurm(self, *argv: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.user.run(list(argv), env=self.env, cwd=self.folder, timeout=90, check=check)

    @property
    def makes_log_folders(self) -> bool:
        """Slurm itself, since 23.02."""
        version = re.search(r"(\d+)\.(\d+)", self.slurm("sbatch", "--version").stdout)
        return version is not None and (int(version[1]), int(version[2])) >= (23, 2)

    def codes(self, script: str, name: str = "job.sbatch") -> dict[str, dict[str, Any]]:
        """What check finds, by code; the script is left in the folder."""
        (self.folder / name).write_text(script)
        argv = [sys.executable, "-m", "krea_runner", "check", "job.sbatch", "--json"]
        done = self.user.run(argv, env=self.env, cwd=self.folder, timeout=60, check=False)
        assert done.returncode in {0, 1}, done.stderr
        document = json.loads(done.stdout)
        assert document["not_judged"] == []
        return {finding["code"]: finding for finding in document["findings"]}

    def submit(self, *options: str) -> str:
        return self.slurm("sbatch", "--parsable", *options, "job.sbatch").stdout.strip()

    def state(self, job_id: str) -> str:
        return self.slurm("squeue", "-h", "-t", "all", "-j", f"{job_id},{job_id}", "-O", "State:20").stdout.strip()

    def wait(self, job_id: str, states: set[str]) -> str:
        until(lambda: self.state(job_id) in states, f"job {job_id} to be {states}")
        return self.state(job_id)

    def end(self, *options: str) -> tuple[str, str]:
        """State and exit code of the job, submitted and ended: `FAILED 0:53`."""
        job_id = self.submit(*options)
        state = self.wait(job_id, ENDED)
        shown = self.slurm("scontrol", "show", "job", job_id).stdout
        match = re.search(r"ExitCode=(\S+)", shown)
        return state, match[1] if match else ""

    def log(self) -> str:
        return (self.folder / "log").read_text()


@pytest.fixture
def desk(slurm_cluster, ordinary_user) -> Desk:
    return Desk(ordinary_user, slurm_cluster.env, ordinary_user.make_dir())


FAILING = "srun -n2 -K bash -c 'exit 3'"


@pytest.mark.parametrize(
    ("code", "bad", "good"),
    [
        ("pipe-hides-exit", f"{FAILING} | cat", f"set -o pipefail\n{FAILING} | cat"),
        ("pipe-hides-exit", f"{FAILING} |& cat", f"{FAILING} |& cat\nexit ${{PIPESTATUS[0]}}"),
        ("end-hides-exit", f"{FAILING}\necho done", f"{FAILING}\nrc=$?\necho done\nexit $rc"),
        ("or-hides-exit", f"{FAILING} || true", f"{FAILING} || exit $?"),
        ("bare-wait", f"{FAILING} &\nwait", f"{FAILING} & pid=$!\nwait $pid || exit $?"),
        ("background-not-awaited", f"{FAILING} &", f"{FAILING} & pid=$!\nwait $pid"),
    ],
)
def test_a_script_that_hides_its_exit_code_completes_and_the_fixed_one_fails(
    desk: Desk, code: str, bad: str, good: str
) -> None:
    assert code in desk.codes(HEAD + bad + "\n")
    assert desk.end() == ("COMPLETED", "0:0")
    assert code not in desk.codes(HEAD + good + "\n")
    state, exit_code = desk.end()
    assert (state, exit_code) not in {("COMPLETED", "0:0")}
    assert state == "FAILED"


def test_a_log_in_a_folder_that_is_not_there_is_FAILED_0_53_until_slurm_makes_it(desk: Desk) -> None:
    script = HEAD.replace("=log", "=logs/%j.log") + "mkdir -p logs\ntrue\n"
    found = desk.codes(script)
    if desk.makes_log_folders:
        assert "missing-log-folder" not in found
    else:
        assert desk.end() == NO_LOG
        desk.slurm(*found["missing-log-folder"]["fix"].split())
        assert "missing-log-folder" not in desk.codes(script)
    assert desk.end() == DONE


@pytest.mark.parametrize(("value", "folder"), [("$HOME/x.log", "$HOME"), ("~/x.log", "~")])
def test_sbatch_expands_nothing_in_its_lines(desk: Desk, value: str, folder: str) -> None:
    assert "sbatch-not-expanded" in desk.codes(HEAD.replace("=log", f"={value}") + "true\n")
    assert desk.end() == (DONE if desk.makes_log_folders else NO_LOG)
    assert (desk.folder / folder / "x.log").exists() == desk.makes_log_folders


def test_a_folder_for_each_job_is_made_by_slurm_or_by_nobody(desk: Desk) -> None:
    found = desk.codes(HEAD.replace("=log", "=%j/log") + "true\n")
    assert ("missing-log-folder" in found) == (not desk.makes_log_folders)
    assert desk.end() == (DONE if desk.makes_log_folders else NO_LOG)


def test_a_missing_workdir_completes_in_tmp(desk: Desk) -> None:
    head = HEAD.replace("=log", f"={desk.folder}/log")
    assert "missing-workdir" in desk.codes(f"{head}#SBATCH --chdir={desk.folder}/gone\npwd\n")
    assert desk.end() == ("COMPLETED", "0:0")
    assert desk.log().splitlines()[-1] == "/tmp"


@pytest.mark.parametrize("append", [False, True])
def test_a_restart_empties_the_log_unless_it_is_appended_to(desk: Desk, append: bool) -> None:
    head = HEAD if append else HEAD.replace(" --open-mode=append", "")
    found = desk.codes(head + 'echo "start ${SLURM_RESTART_COUNT:-0}"\nsleep 60\n')
    assert ("log-truncated" in found) == (not append)
    job_id = desk.submit()
    until(lambda: (desk.folder / "log").exists() and "start 0" in desk.log(), "the first start")
    desk.slurm("scontrol", "requeue", job_id)
    desk.wait(job_id, {"PENDING"})
    time.sleep(2 - time.time() % 1)  # a start in the second of the kill is refused
    desk.slurm("scontrol", "update", f"jobid={job_id}", "StartTime=now")
    until(lambda: "start 1" in desk.log(), "the second start")
    desk.slurm("scancel", job_id)
    assert ("start 0" in desk.log()) == append


def test_a_job_that_forbids_it_is_not_requeued(desk: Desk) -> None:
    assert "no-requeue" in desk.codes(HEAD.replace("--requeue", "--no-requeue") + "sleep 60\n")
    job_id = desk.submit()
    desk.wait(job_id, {"RUNNING"})
    refused = desk.slurm("scontrol", "requeue", job_id, check=False)
    desk.slurm("scancel", job_id)
    assert (refused.returncode, "disabled" in refused.stderr) == (1, True)


def test_the_others_go_on_for_ever_when_one_rank_dies(desk: Desk) -> None:
    ranks = "srun -n2 {} bash -c '[ $SLURM_PROCID = 1 ] || exit 3; sleep 60'\n"
    assert "gang-outlives-rank" in desk.codes(HEAD + "#SBATCH --ntasks=2\n" + ranks.format(""))
    job_id = desk.submit()
    until(lambda: (desk.folder / "log").exists() and "exit code 3" in desk.log(), "the death of rank 0")
    time.sleep(2)
    assert desk.state(job_id) == "RUNNING"
    desk.slurm("scancel", job_id)
    assert "gang-outlives-rank" not in desk.codes(HEAD + "#SBATCH --ntasks=2\n" + ranks.format("--kill-on-bad-exit=1"))
    assert desk.end()[0] == "FAILED"


def test_what_sbatch_refuses_at_once(desk: Desk) -> None:
    for code, script in {
        "no-interpreter": "#SBATCH --output=log\ntrue\n",
        "carriage-return": (HEAD + "true\n").replace("\n", "\r\n"),
        "unknown-partition": HEAD + "#SBATCH --partition=nope\ntrue\n",
    }.items():
        assert code in desk.codes(script)
        assert desk.slurm("sbatch", "job.sbatch", check=False).returncode == 1


def test_a_bad_interpreter_fails_before_the_first_line(desk: Desk) -> None:
    assert "bad-interpreter" in desk.codes(HEAD.replace("/bin/bash", "/opt/none/bash") + "true\n")
    assert desk.end() == ("FAILED", "2:0")


@pytest.mark.parametrize(
    ("code", "line"),
    [("sbatch-after-command", "cd .\n#SBATCH --comment=seen"), ("sbatch-misspelt", "# SBATCH --comment=seen"),
     ("sbatch-misspelt", " #SBATCH --comment=seen"), (None, "#SBATCH --comment=seen")],
)  # fmt: skip
def test_lines_that_sbatch_does_not_read(desk: Desk, code: str | None, line: str) -> None:
    found = desk.codes(f"{HEAD}{line}\nsleep 60\n")
    assert {"sbatch-after-command", "sbatch-misspelt"} & set(found) == ({code} if code else set())
    job_id = desk.submit("--hold")
    comment = desk.slurm("squeue", "-h", "-j", job_id, "-O", "Comment:|").stdout.strip()
    desk.slurm("scancel", job_id)
    assert comment == ("(null)|" if code else "seen|")


def test_export_none_reaches_the_ranks(desk: Desk) -> None:
    # The PATH of a login, on which another Slurm may come first.
    script = HEAD + f"#SBATCH --export=NONE\nexport MINE=1 PATH='{desk.env['PATH']}'\nsrun {{}} /usr/bin/env\n"
    assert "export-none" in desk.codes(script.format("-n1"))
    desk.end()
    assert "MINE=1" not in desk.log()
    assert "export-none" not in desk.codes(script.format("--export=ALL -n1"))
    desk.end()
    assert "MINE=1" in desk.log()


def test_a_job_submitted_from_a_job_inherits_its_array_id(desk: Desk) -> None:
    child = "#!/bin/bash\n#SBATCH --output=child\nenv\n"
    (desk.folder / "child.sbatch").write_text(child)
    assert "submits-with-everything" in desk.codes(HEAD + "sbatch child.sbatch\n")
    desk.end("--array=7")
    until(lambda: (desk.folder / "child").exists() and "PATH" in (desk.folder / "child").read_text(), "the child")
    assert "SLURM_ARRAY_TASK_ID=7" in (desk.folder / "child").read_text()
    found = Desk(desk.user, {**desk.env, "SLURM_ARRAY_TASK_ID": "7"}, desk.folder).codes(child)
    assert "SLURM_ARRAY_TASK_ID" in found["inherited-environment"]["text"]


def test_a_limit_above_the_partitions_waits_for_ever(desk: Desk, slurm_cluster) -> None:
    as_root = {**os.environ, **slurm_cluster.env}
    subprocess.run(["scontrol", "create", "PartitionName=short", "Nodes=ALL", "MaxTime=10"], env=as_root, check=True)
    try:
        found = desk.codes(HEAD + "#SBATCH -p short -t 20\ntrue\n")
        assert found["limit-above-partition"]["fix"] == "--time=00:10:00"
        job_id = desk.submit()
        until(
            lambda: "PartitionTimeLimit" in desk.slurm("squeue", "-h", "-j", job_id, "-O", "Reason:40").stdout,
            "the reason",
        )
        desk.slurm("scancel", job_id)
        assert "limit-above-partition" not in desk.codes(HEAD + "#SBATCH -p short -t 10\ntrue\n")
    finally:
        subprocess.run(["scontrol", "delete", "PartitionName=short"], env=as_root, check=False)


def test_who_is_preempted_by_cancel_is_not_requeued(ordinary_user, tmp_path_factory) -> None:
    """A cluster of its own: PreemptType cannot be changed while it runs."""
    folder = Path("/tmp") / f"krea-test-preempt-{os.getpid()}"
    where = ("--dir", str(folder))
    conf = ("--conf", "PreemptType=preempt/partition_prio", "--conf", "PreemptMode=REQUEUE")
    try:
        dev_cluster("up", *where, "--nodes", "1", "--port-base", str(free_ports()), *conf)
        env = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": os.environ["PATH"] + ":/usr/sbin:/sbin"}
        for name, options in {
            "low": ("PreemptMode=CANCEL", "PriorityTier=1"),
            "kept": ("PriorityTier=1",),
            "high": ("PriorityTier=9",),
        }.items():
            subprocess.run(
                ["scontrol", "create", f"PartitionName={name}", "Nodes=ALL", *options],
                env={**os.environ, **env},
                check=True,
            )
        desk = Desk(ordinary_user, env, ordinary_user.make_dir())
        work = "#SBATCH --exclusive -N1 -p {}\nsleep 120\n"
        ends = {}
        for partition in ("kept", "low"):
            found = desk.codes(HEAD + work.format(partition))
            assert ("preempted-by-cancel" in found) == (partition == "low")
            victim = desk.submit()
            desk.wait(victim, {"RUNNING"})
            (desk.folder / "job.sbatch").write_text(HEAD + work.format("high"))
            urgent = desk.submit()
            ends[partition] = desk.wait(victim, ENDED | {"PENDING"})
            desk.slurm("scancel", victim, urgent)
            desk.wait(urgent, ENDED)
        assert ends == {"kept": "PENDING", "low": "PREEMPTED"}
    finally:
        dev_cluster("down", *where)


def test_submit_prints_warnings_and_refuses_errors(desk: Desk) -> None:
    toml = '[run]\nname = "checked"\ncommand = {}\n[slurm]\npartition = "{}"\n'
    env = {**desk.env, "KREA_RUNNER_STATE_DIR": str(desk.folder / "state")}
    (desk.folder / "run.toml").write_text(toml.format('["true"]', "nope"))
    argv = [sys.executable, "-m", "krea_runner", "submit", "run.toml"]
    done = desk.user.run(argv, env=env, cwd=desk.folder, timeout=60, check=False)
    assert done.returncode == 1
    assert "krea-runner: error: run.toml:5: sbatch refuses a partition that is not there. (there are: " in done.stderr
    (desk.folder / "run.toml").write_text(toml.format('["true"]', "train"))
    done = desk.user.run(argv, env=env, cwd=desk.folder, timeout=60)
    assert "krea-runner: warning: run.toml:" in done.stderr
    assert done.stdout.startswith("submitted 'checked' as job ")
