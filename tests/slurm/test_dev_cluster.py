"""scripts/dev-cluster, as docs/how-to/dev-cluster.md has it."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import DEV_CLUSTER, free_ports, until

pytestmark = pytest.mark.slurm


def dev_cluster(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, str(DEV_CLUSTER), *words], capture_output=True, text=True, check=False, timeout=120
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def living(folder: Path) -> list[str]:
    """Command lines of living processes that were given this cluster's slurm.conf."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            environment = Path(f"/proc/{name}/environ").read_bytes()
            state = Path(f"/proc/{name}/stat").read_text().rsplit(")", 1)[1].split()[0]
            if f"SLURM_CONF={folder}/slurm.conf".encode() in environment and state not in "ZX":
                found.append(Path(f"/proc/{name}/cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


@pytest.fixture
def folder(slurm_cluster, tmp_path: Path) -> Iterator[Path]:  # slurm_cluster: skips where there is no Slurm
    folder = Path(f"/tmp/krea-dc-{os.getpid()}-{tmp_path.name[-1]}")
    yield folder
    dev_cluster("down", "--dir", str(folder))


def test_up_use_and_down(folder: Path) -> None:
    etc = {path: path.stat().st_mtime_ns for path in Path("/etc").rglob("*slurm*")}
    where = ("--dir", str(folder))
    said = dev_cluster("up", *where, "--nodes", "3", "--port-base", str(free_ports())).stdout
    assert re.search(r"up in \d+\.\d s: 3 nodes", said)
    assert dev_cluster("status", *where).stdout.startswith("up: 1 slurmctld, 3 slurmd")
    names = dev_cluster("shell", *where, "--", "srun", "-N3", "printenv", "SLURMD_NODENAME").stdout.split()
    assert sorted(names) == ["n1", "n2", "n3"]
    assert "already up" in dev_cluster("up", *where).stdout
    dev_cluster("shell", *where, "--", "sbatch", "-o", "/dev/null", "--wrap", "sleep 600")
    until(lambda: "R" in dev_cluster("shell", *where, "--", "squeue", "-h", "-o", "%t").stdout, "the job to run")
    assert dev_cluster("down", *where).stdout.startswith("down")
    assert living(folder) == []
    assert not folder.exists()
    assert dev_cluster("status", *where, check=False).returncode == 3
    assert {path: path.stat().st_mtime_ns for path in Path("/etc").rglob("*slurm*")} == etc


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
    done = dev_cluster(
        "up",
        "--dir",
        str(folder),
        "--port-base",
        str(free_ports()),
        "--conf",
        "SelectType=select/nonsense",
        check=False,
    )
    assert done.returncode == 1
    assert "slurmctld" in done.stderr
    assert living(folder) == []


def test_a_path_that_slurm_cannot_hold_is_refused() -> None:
    done = dev_cluster("up", "--dir", "/tmp/with a space", check=False)
    assert done.returncode == 1
    assert "/tmp/with a space" in done.stderr


def test_an_ordinary_users_job_runs_as_that_user(slurm_cluster, ordinary_user) -> None:
    folder = ordinary_user.make_dir()
    ordinary_user.run(["sbatch", "-o", f"{folder}/out", "--wrap", "id -un"], env=slurm_cluster.env, cwd=folder)
    until(lambda: (folder / "out").exists() and (folder / "out").read_text() != "", "the job's output")
    assert (folder / "out").read_text().strip() == ordinary_user.name


def test_with_accounting_sacct_remembers(slurm_accounting_cluster) -> None:
    where = ("shell", "--dir", str(slurm_accounting_cluster.folder), "--")
    job_id = dev_cluster(*where, "sbatch", "--parsable", "-o", "/dev/null", "--wrap", "exit 7").stdout.strip()

    def row() -> str:
        time.sleep(0.2)
        return dev_cluster(*where, "sacct", "-n", "-X", "-P", "-j", job_id, "-o", "State,ExitCode").stdout.strip()

    until(lambda: row() == "FAILED|7:0", "accounting to know the end")
