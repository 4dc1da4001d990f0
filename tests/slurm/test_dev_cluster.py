"""scripts/dev-cluster, as docs/how-to/dev-cluster.md has it."""

import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import DEV_CLUSTER, dev_cluster, free_ports, until

pytestmark = pytest.mark.slurm


def living(*words: str) -> list[str]:
    """Command lines of living processes that have one of the words in their command line or environment."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = Path(f"/proc/{name}/cmdline").read_text().replace("\0", " ")
            state = Path(f"/proc/{name}/stat").read_text().rsplit(")", 1)[1].split()[0]
            seen = command + Path(f"/proc/{name}/environ").read_text(errors="replace")
        except OSError:
            continue
        if state not in "ZX" and any(word in seen for word in words):
            found.append(command)
    return found


def system_files() -> dict[Path, int]:
    """What Slurm, munge and MariaDB have in the system's own folders, and when it was last written."""
    roots = (Path("/etc"), Path("/run"))
    names = ("*slurm*", "*munge*", "*mysql*", "*mariadb*")
    folders = [path for root in roots for name in names for path in root.glob(name)]
    return {path: path.stat().st_mtime_ns for folder in folders for path in (folder, *folder.rglob("*"))}


@pytest.fixture
def folder(slurm_cluster, tmp_path: Path) -> Iterator[Path]:  # slurm_cluster: skips where there is no Slurm
    folder = Path(f"/tmp/krea-dc-{os.getpid()}-{tmp_path.name[-1]}")
    yield folder
    dev_cluster("down", "--dir", str(folder))


def test_up_use_and_down(folder: Path) -> None:
    before = system_files()
    where = ("--dir", str(folder))
    said = dev_cluster("up", *where, "--nodes", "3", "--port-base", str(free_ports()), "--conf", "KillWait=7").stdout
    assert re.search(r"up in \d+\.\d s: 3 nodes", said)
    assert dev_cluster("status", *where).stdout.startswith("up: 1 slurmctld, 3 slurmd")
    names = dev_cluster("shell", *where, "--", "srun", "-N3", "printenv", "SLURMD_NODENAME").stdout.split()
    assert sorted(names) == ["n1", "n2", "n3"]
    settings = dev_cluster("shell", *where, "--", "scontrol", "show", "config").stdout
    assert re.search(r"KillWait += 7 sec", settings)
    assert "requeue_delay" not in settings
    assert "already up" in dev_cluster("up", *where).stdout
    assert dev_cluster("down", *where).stdout.startswith("down")
    assert living(str(folder)) == []
    assert not folder.exists()
    assert dev_cluster("status", *where, check=False).returncode == 3
    assert system_files() == before


def test_down_ends_jobs_and_what_they_started(folder: Path) -> None:
    where = ("--dir", str(folder))
    dev_cluster("up", *where, "--nodes", "1", "--port-base", str(free_ports()))
    hidden = f"sleep {10**6 + os.getpid()}"  # in a session of its own, without Slurm's environment
    dev_cluster("shell", *where, "--", "sbatch", "-o", "/dev/null", "--wrap", f"env -i setsid {hidden} & wait")
    until(lambda: any(command.startswith(hidden) for command in living(hidden)), "the job's child")
    dev_cluster("down", *where)
    assert living(str(folder), hidden) == []


def test_two_side_by_side(folder: Path, slurm_cluster) -> None:
    dev_cluster("up", "--dir", str(folder), "--nodes", "2", "--port-base", str(free_ports()))
    ours = dev_cluster("shell", "--dir", str(folder), "--", "sinfo", "-h", "-o", "%D").stdout.split()
    theirs = dev_cluster("shell", "--dir", str(slurm_cluster.folder), "--", "sinfo", "-h", "-o", "%D").stdout.split()
    assert (ours, theirs) == (["2"], ["4"])


def test_a_taken_port_is_said_before_anything_starts(folder: Path, slurm_cluster) -> None:
    port = re.search(r"SlurmctldPort=(\d+)", slurm_cluster.conf.read_text())
    assert port is not None
    done = dev_cluster("up", "--dir", str(folder), "--port-base", port[1], check=False)
    assert done.returncode == 1
    assert f"port {port[1]} is in use" in done.stderr
    assert not folder.exists()


def test_a_failed_start_is_taken_down_and_explained(folder: Path) -> None:
    words = ("up", "--dir", str(folder), "--port-base", str(free_ports()), "--conf", "SchedulerType=sched/nonsense")
    done = dev_cluster(*words, check=False)
    assert done.returncode == 1
    assert re.search(
        r"slurmctld\.log: .*cannot (find sched plugin|create sched context) for sched/nonsense", done.stderr
    )
    assert living(str(folder)) == []


def test_a_path_that_slurm_cannot_hold_is_refused(tmp_path: Path) -> None:
    done = dev_cluster("up", "--dir", str(tmp_path / "with a space"), check=False)
    assert done.returncode == 1
    assert "with a space" in done.stderr
    assert not (tmp_path / "with a space").exists()


@pytest.mark.parametrize("verb", ["up", "down"])
def test_a_folder_that_it_did_not_make_is_left_alone(tmp_path: Path, verb: str) -> None:
    (tmp_path / "slurm.conf").write_text("ClusterName=production\n")
    try:
        done = dev_cluster(verb, "--dir", str(tmp_path), "--port-base", str(free_ports()), check=False)
        assert done.returncode == 1
        assert str(tmp_path) in done.stderr
        assert (tmp_path / "slurm.conf").read_text() == "ClusterName=production\n"
    finally:
        dev_cluster("down", "--dir", str(tmp_path), check=False)  # ends what must not have been started


def test_an_ordinary_users_job_runs_as_that_user(slurm_cluster, ordinary_user) -> None:
    folder = ordinary_user.make_dir()
    ordinary_user.run(["sbatch", "-o", f"{folder}/out", "--wrap", "id -un"], env=slurm_cluster.env, cwd=folder)
    until(lambda: (folder / "out").exists() and (folder / "out").read_text() != "", "the job's output")
    assert (folder / "out").read_text().strip() == ordinary_user.name


def test_without_root_a_user_has_a_cluster_of_their_own(ordinary_user) -> None:
    home = ordinary_user.make_dir()
    script = shutil.copy(DEV_CLUSTER, home)  # the checkout may lie where this user cannot read

    def theirs(*words: str) -> str:
        return ordinary_user.run([sys.executable, script, *words], timeout=120).stdout

    where = ("--dir", str(home / "cluster"))
    try:
        theirs("up", *where, "--nodes", "2", "--port-base", str(free_ports()))
        assert theirs("shell", *where, "--", "srun", "-N2", "id", "-un").split() == [ordinary_user.name] * 2
    finally:
        theirs("down", *where)
    assert living(str(home / "cluster")) == []


def test_another_users_cluster_can_be_used_but_not_ended(slurm_cluster, ordinary_user) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, who has the cluster, and an ordinary user beside")
    script = shutil.copy(DEV_CLUSTER, ordinary_user.make_dir())
    theirs = [sys.executable, script]
    where = ("--dir", str(slurm_cluster.folder))
    assert "up: of root" in ordinary_user.run([*theirs, "status", *where]).stdout
    assert "train" in ordinary_user.run([*theirs, "shell", *where, "--", "sinfo", "-h"]).stdout
    refused = ordinary_user.run([*theirs, "down", *where], check=False)
    assert refused.returncode == 1
    assert "belongs to root" in refused.stderr
    assert dev_cluster("status", *where).stdout.startswith("up")


def test_with_accounting_sacct_remembers(slurm_accounting_cluster) -> None:
    where = ("shell", "--dir", str(slurm_accounting_cluster.folder), "--")
    job_id = dev_cluster(*where, "sbatch", "--parsable", "-o", "/dev/null", "--wrap", "exit 7").stdout.strip()

    def row() -> str:
        time.sleep(0.2)
        return dev_cluster(*where, "sacct", "-n", "-X", "-P", "-j", job_id, "-o", "State,ExitCode").stdout.strip()

    until(lambda: row() == "FAILED|7:0", "accounting to know the end")
