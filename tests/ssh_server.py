"""A real sshd on loopback: its own configuration, port and keys, an ordinary process that the tests may stop and kill."""

import os
import pwd
import re
import signal
import socket
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

SSHD = "/usr/sbin/sshd"
SFTP = "/usr/lib/openssh/sftp-server"


def keygen(path: Path) -> None:
    argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)]
    subprocess.run(argv, check=True, stdin=subprocess.DEVNULL)


@dataclass
class Sshd:
    """`environment`: what its commands see beside sshd's own (SetEnv), as a site's profile would give it. `more`: further
    lines of its configuration, before ours: the first one of a kind holds."""

    folder: Path
    port: int
    environment: dict[str, str] = field(default_factory=dict)
    more: list[str] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        self.folder.mkdir(mode=0o700, exist_ok=True)
        keygen(self.folder / "user_key")
        (self.folder / "authorized_keys").write_text((self.folder / "user_key.pub").read_text())
        self.new_host_key()

    def new_host_key(self) -> None:
        for name in ("host_key", "host_key.pub"):
            (self.folder / name).unlink(missing_ok=True)
        keygen(self.folder / "host_key")

    @property
    def known_hosts_line(self) -> str:
        return f"[127.0.0.1]:{self.port} {(self.folder / 'host_key.pub').read_text().rsplit(' ', 1)[0]}\n"

    @property
    def user(self) -> str:
        return pwd.getpwuid(os.geteuid()).pw_name

    def start(self) -> None:
        lines = [
            *self.more, f"Port {self.port}", "ListenAddress 127.0.0.1", f"HostKey {self.folder}/host_key",
            f"AuthorizedKeysFile {self.folder}/authorized_keys", f"PidFile {self.folder}/pid", "StrictModes no",
            "UsePAM no", "PasswordAuthentication no", "KbdInteractiveAuthentication no", "PermitRootLogin yes",
        ]  # fmt: skip
        if not any(line.startswith("Subsystem") for line in self.more):
            # Its own log says which file it opened and how many bytes of it were read.
            lines.append(f"Subsystem sftp {SFTP} -e -l INFO 2>>{self.folder}/sftp.log")
        if self.environment:
            lines.append("SetEnv " + " ".join(f'"{name}={value}"' for name, value in self.environment.items()))
        (self.folder / "sshd_config").write_text("\n".join(lines) + "\n")
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)  # where it shuts its unprivileged half in
        argv = [SSHD, "-D", "-e", "-f", str(self.folder / "sshd_config")]
        log = (self.folder / "log").open("ab")
        self.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + 20
        while not self._listens():
            assert self.process.poll() is None, (self.folder / "log").read_text()
            assert time.monotonic() < deadline, (self.folder / "log").read_text()
            time.sleep(0.02)

    @property
    def connections(self) -> int:
        """How many were let in so far."""
        return (self.folder / "log").read_text().count("Accepted publickey")

    def bytes_read(self) -> dict[str, int]:
        """Of each file, over SFTP, so far; as the server counts them when a file is closed."""
        found: dict[str, int] = {}
        log = self.folder / "sftp.log"
        for name, count in re.findall(r'close "(.*)" bytes read (\d+)', log.read_text() if log.exists() else ""):
            found[name] = found.get(name, 0) + int(count)
        return found

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def sessions(self) -> list[int]:
        """The processes below the one that listens, and theirs, as far as they are sshd's."""
        assert self.process is not None
        found: list[int] = []
        parents = [self.process.pid]
        while parents:
            parent = parents.pop(0)
            for pid in _read(f"/proc/{parent}/task/{parent}/children").split():
                if _read(f"/proc/{pid}/comm").strip() == "sshd":
                    found.append(int(pid))
                    parents.append(int(pid))
        return found

    def cut(self) -> None:
        """Kill the sessions; what they started goes on."""
        for pid in self.sessions():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def signal_all(self, number: signal.Signals) -> None:
        assert self.process is not None
        for pid in (self.process.pid, *self.sessions()):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def stop(self) -> None:
        if self.process is not None:
            self.signal_all(signal.SIGCONT)
            self.cut()
            self.process.kill()
            self.process.wait()
            self.process = None


def _read(path: str) -> str:
    """Empty where the process has ended meanwhile."""
    try:
        return Path(path).read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def write_home(
    home: Path, sshd: Sshd, *, known: str | None = None, key: Path | None = None, user: str = "", more: str = ""
) -> None:
    """A home directory that knows the server as `login`."""
    folder = home / ".ssh"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "known").write_text(sshd.known_hosts_line if known is None else known)
    (folder / "config").write_text(
        f"Host login\n  HostName 127.0.0.1\n  Port {sshd.port}\n  User {user or sshd.user}\n"
        f"  IdentityFile {key or sshd.folder / 'user_key'}\n  IdentitiesOnly yes\n{more}"
        f"Host *\n  UserKnownHostsFile {folder}/known\n"
    )
