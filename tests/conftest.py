"""What tests of a real Slurm stand on: clusters of this machine, and an ordinary user."""

import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import settings

# How long an example takes says how busy the machine is.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

DEV_CLUSTER = Path(__file__).parents[1] / "scripts" / "dev-cluster"
SLURM_RELEASE = DEV_CLUSTER.with_name("slurm-release")
INSTALL = "apt-get install slurmctld slurmd slurm-client munge"
TEST_USER = "krea-test"
NODES = 4


def pytest_configure() -> None:
    """Which Slurm: the one of a Debian release, or under a prefix, goes first on PATH; every test finds it there."""
    release, prefix = os.environ.get("KREA_TEST_SLURM_RELEASE"), os.environ.get("KREA_TEST_SLURM_PREFIX")
    if release:
        made = subprocess.run(
            [sys.executable, str(SLURM_RELEASE), release], stdout=subprocess.PIPE, text=True, check=False
        )
        prefix = made.stdout.strip()
    if release or prefix:
        if not Path(prefix, "sbin", "slurmctld").exists():
            raise pytest.UsageError(
                f"no Slurm of {release} (see above)" if release else f"no sbin/slurmctld in {prefix}"
            )
        os.environ["PATH"] = f"{prefix}/bin:{prefix}/sbin:{os.environ['PATH']}"


SLOWEST = ("slurm/test_job_endings.py", "slurm/", "contract/", "chaos/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What waits longest first: with several workers (scripts/test) none is left alone with it at the end."""

    def place(item: pytest.Item) -> int:
        return next((n for n, part in enumerate(SLOWEST) if f"tests/{part}" in str(item.path)), len(SLOWEST))

    items.sort(key=place)


def pytest_report_header() -> str:
    """Which Slurm the tests of a real one run on."""
    found = shutil.which("slurmctld", path=os.environ["PATH"] + ":/usr/sbin")
    if found is None:
        return "Slurm: none; tests of a real one are skipped"
    return (
        f"Slurm: {subprocess.run([found, '-V'], capture_output=True, text=True, check=False).stdout.strip()}, {found}"
    )


@dataclass
class SlurmCluster:
    folder: Path
    node_names: list[str] = field(default_factory=lambda: [f"n{number + 1}" for number in range(NODES)])

    @property
    def conf(self) -> Path:
        return self.folder / "slurm.conf"

    @property
    def env(self) -> dict[str, str]:
        """What a process needs to see this cluster."""
        return {"SLURM_CONF": str(self.conf), "PATH": os.environ["PATH"] + ":/usr/sbin:/sbin"}

    def stop_controller(self) -> None:
        """Kill slurmctld; returns when it is gone."""
        pid = int((self.folder / "run" / "slurmctld.pid").read_text())
        os.kill(pid, 9)
        until(lambda: not _answers(self, "scontrol", "ping"), "the controller's end")

    def start_controller(self) -> None:
        """Returns when it answers and knows its nodes again."""
        environment = {**os.environ, **self.env}
        subprocess.run(["slurmctld"], env=environment, check=True, stdin=subprocess.DEVNULL, capture_output=True)
        until(lambda: re.search("idle|alloc|mix", _out(self, "sinfo", "-h")) is not None, "the controller")


def until(condition, what: str, patience_s: float = 60) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {patience_s} s for {what}"
        time.sleep(0.1)


def _answers(cluster: SlurmCluster, *argv: str) -> bool:
    return subprocess.run(argv, env={**os.environ, **cluster.env}, capture_output=True, check=False).returncode == 0


def _out(cluster: SlurmCluster, *argv: str) -> str:
    environment = {**os.environ, **cluster.env}
    return subprocess.run(argv, env=environment, capture_output=True, text=True, check=False).stdout


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[SlurmCluster]:
    """Four nodes of eight cores, no accounting."""
    yield from _cluster("plain")


@pytest.fixture(scope="session")
def slurm_accounting_cluster() -> Iterator[SlurmCluster]:
    """The same with slurmdbd and MariaDB."""
    for program in ("slurmdbd", "mariadbd"):
        if shutil.which(program, path=os.environ["PATH"] + ":/usr/sbin") is None:
            pytest.skip(f"{program} is not installed; as root type: apt-get install slurmdbd mariadb-server")
    yield from _cluster("acct", "--accounting")


def _cluster(name: str, *more: str) -> Iterator[SlurmCluster]:
    if shutil.which("slurmctld", path=os.environ["PATH"] + ":/usr/sbin") is None:
        pytest.skip(f"Slurm is not installed; as root type: {INSTALL}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # whoever ends the tests ends the cluster too
    folder = Path(tempfile.gettempdir()) / f"krea-test-{name}-{os.getpid()}"
    where = ("--dir", str(folder))
    try:
        base = free_ports()
        # MASTER_PORT follows from the job's id, and all clusters are on this machine.
        first = f"FirstJobId={1 + (base - 10000) // 200 * 2000 % 12000}"
        dev_cluster("up", *where, "--nodes", str(NODES), "--port-base", str(base), "--conf", first, *more)
        yield SlurmCluster(folder)
    finally:
        dev_cluster("down", *where)


def dev_cluster(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, str(DEV_CLUSTER), *words]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120)
    assert not check or done.returncode == 0, f"dev-cluster {' '.join(words)}: {done.stdout}{done.stderr}"
    return done


_claims: list[socket.socket] = []
_single: list[int] = []


def free_port() -> int:
    """One port, in a range of this process's own."""
    if not _single:
        base = free_ports()
        _single.extend(range(base, base + 99))
    return next(port for port in iter(_single.pop, None) if _is_free(port))


def free_ports(count: int = 120) -> int:
    """The base of a range of ports in which nobody listens now, and which is this process's as long as it lives: several
    run tests at once."""
    for base in range(10000, 19900, 200):  # below what MASTER_PORT and Linux's clients may get
        claim = socket.socket()
        try:
            claim.bind(("127.0.0.1", base + 99))
            claim.listen()
        except OSError:
            claim.close()
            continue
        if all(_is_free(base + offset) for offset in (0, 1, 2, *range(101, count))):
            _claims.append(claim)
            return base
        claim.close()
    raise AssertionError("no free range of ports")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


# ------------------------------------------------------------------------------------------------------ ordinary user


@dataclass
class OrdinaryUser:
    """Runs commands as somebody who is not root. `folder` is a place of the user's own that everybody may enter."""

    name: str
    uid: int
    gid: int
    folder: Path

    def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        timeout: float = 60,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        process = self.popen(argv, env=env, cwd=cwd)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        assert not check or process.returncode == 0, f"{argv} as {self.name}: exit {process.returncode}\n{out}{err}"
        return subprocess.CompletedProcess(argv, process.returncode, out, err)

    def popen(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> "subprocess.Popen[str]":
        base = {key: os.environ[key] for key in ("PATH", "LANG") if key in os.environ}
        identity = {"user": self.uid, "group": self.gid, "extra_groups": []} if os.geteuid() == 0 else {}
        return subprocess.Popen(
            list(argv),
            env={**base, "HOME": str(self.folder), "USER": self.name, **(env or {})},
            cwd=cwd or self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **identity,
        )

    def make_dir(self) -> Path:
        folder = Path(tempfile.mkdtemp(prefix="case-", dir=self.folder))
        folder.chmod(0o755)
        os.chown(folder, self.uid, self.gid)
        return folder


@pytest.fixture(scope="session")
def ordinary_user() -> Iterator[OrdinaryUser]:
    """As root an account of its own, made when it is missing; otherwise whoever runs the tests."""
    name = TEST_USER if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name
    if os.geteuid() == 0 and not _exists(name):
        made = subprocess.run(["useradd", "--no-create-home", name], capture_output=True, text=True, check=False)
        if made.returncode != 0 and not _exists(name):  # another worker may have been faster
            pytest.skip(f"cannot make the account {name}: {made.stderr.strip()}")
    entry = pwd.getpwnam(name)
    folder = Path(tempfile.mkdtemp(prefix="krea-user-"))
    folder.chmod(0o755)
    os.chown(folder, entry.pw_uid, entry.pw_gid)
    user = OrdinaryUser(name, entry.pw_uid, entry.pw_gid, folder)
    try:
        seen = user.run([sys.executable, "-c", "import krea_runner.cli.app"], check=False)
        if seen.returncode != 0:
            reason = re.sub(r"\s+", " ", seen.stderr)[-300:]
            pytest.skip(f"{name} cannot use this Python or this package (scripts/test arranges that): {reason}")
        yield user
    except PermissionError as error:
        pytest.skip(f"{name} cannot use {sys.executable} in {folder} (scripts/test arranges that): {error}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _exists(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True
