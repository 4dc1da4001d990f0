"""A training script as a process of its own, which sees only a copy of heartbeat.py: what a container has."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from krea_runner import heartbeat
from krea_runner.model import RankBeat
from krea_runner.observe.heartbeats import read_heartbeats

SOURCE = Path(heartbeat.__file__)
ATTEMPT = "41.r2"
VERSIONS = ["3.9", "3.10", "3.11", "3.12", "3.13", "3.14", "3.14t"]  # t: free-threaded
BEGIN = "import os, sys, time\nfrom heartbeat import Heartbeat\nhb = Heartbeat()\n"
# By hand, all of tests/unit/test_heartbeat*.py on another Python: KREA_TEST_HEARTBEAT_PYTHON=python3.9 pytest …
PYTHON = os.environ.get("KREA_TEST_HEARTBEAT_PYTHON", sys.executable)
MADE = Path(os.environ.get("KREA_DEV_CLUSTER_CACHE") or "/var/cache/krea-dev-cluster")  # by scripts/newest-python


class Rank:
    """Rank 5, local rank 1 on node n1, unless its environment says otherwise."""

    def __init__(self, tmp_path: Path) -> None:
        self.place = tmp_path / "container"
        self.place.mkdir()
        shutil.copy(SOURCE, self.place)
        self.directory = tmp_path / "heartbeats" / ATTEMPT

    def env(self, **changes: str) -> dict[str, str]:
        """What the batch script and the launcher set; an empty value takes a variable away."""
        base = {
            "PATH": os.environ["PATH"],
            "KREA_HEARTBEAT_DIR": str(self.directory),
            "KREA_ATTEMPT": ATTEMPT,
            "SLURMD_NODENAME": "n1",
            "RANK": "5",
            "LOCAL_RANK": "1",
        }
        return {key: value for key, value in {**base, **changes}.items() if value}

    def popen(self, script: str, python: str = PYTHON, *, begin: str = BEGIN, **env: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [python, "-c", begin + script],
            cwd=self.place,
            env=self.env(**env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, script: str, python: str = PYTHON, **env: str) -> "subprocess.CompletedProcess[str]":
        process = self.popen(script, python, **env)
        out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    @staticmethod
    def read(directory: Path) -> RankBeat:
        (only,) = read_heartbeats(directory, ATTEMPT).ranks
        return only

    def beats(self) -> tuple[RankBeat, ...]:
        reading = read_heartbeats(self.directory, ATTEMPT)
        assert reading.problems == ()
        return reading.ranks

    def beat(self) -> RankBeat:
        (only,) = self.beats()
        return only

    def wait_for(self, condition, process: "subprocess.Popen[str]", patience_s: float = 60) -> RankBeat:
        """The first record of the running process that satisfies `condition`."""
        deadline = time.monotonic() + patience_s
        while True:
            found = read_heartbeats(self.directory, ATTEMPT).ranks
            if found and condition(found[0]):
                return found[0]
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, f"waited {patience_s} s; seen: {found}"
            time.sleep(0.02)


def warnings(done: "subprocess.CompletedProcess[str]") -> list[str]:
    return [line for line in done.stderr.splitlines() if line]


def python_of(version: str) -> str | None:
    """A working interpreter of that version on PATH, among pyenv's, or made by scripts/newest-python."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = [
        shutil.which(f"python{version}"),
        *sorted(map(str, root.glob(f"versions/{version.removesuffix('t')}.*/bin/python{version}"))),
        *map(str, MADE.glob(f"python{version}/python{version}")),
    ]
    check = f"import sys; sys.exit('%d.%d' % sys.version_info[:2] != '{version.removesuffix('t')}')"
    for python in filter(None, found):
        # A shim of pyenv is on PATH also for versions that are not chosen there.
        if subprocess.run([python, "-c", check], capture_output=True, check=False).returncode == 0:
            return python
    return None
