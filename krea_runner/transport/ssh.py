"""A login node over SSH (paramiko): one connection, kept, and made anew after a drop.

Who and where is read from ~/.ssh/config as OpenSSH does: HostName, User, Port, IdentityFile, IdentitiesOnly, ProxyJump,
ProxyCommand, UserKnownHostsFile, Include. Host keys are enforced whatever StrictHostKeyChecking says: nobody is there
to answer a question. A command is sent once. What is done again is connecting, and only before anything was sent.
"""

import errno
import glob
import logging
import os
import shlex
import threading
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from krea_runner.errors import ConfigError, FilesUnavailable, SchedulerUnavailable
from krea_runner.proc import KEPT, SCRUBBED_PREFIXES, Completed

if TYPE_CHECKING:
    import paramiko

CONNECT_S = 15.0
# A NAT or a firewall forgets a silent connection, often after five minutes.
KEEPALIVE_S = 30
# How much longer than the command's own limit an answer is waited for: a host that hangs says nothing at all.
GRACE_S = 3.0
MAX_JUMPS = 8
POLL_S = 0.005
MAX_OUTPUT_BYTES = 64 << 20
_NOT_FOUND = 127  # POSIX: the shell's exit code for a command that does not exist; 126: it may not be run
_NOT_RUNNABLE = 126
_KILLED = 137  # coreutils timeout -s KILL

# sshd takes no variables from us (AcceptEnv), and gives its commands a bare environment: what would leak is unset over
# there, and the site's profile is read only where the command is not on PATH without it. `exec`: no shell stays behind.
_SCRIPT = """\
for name in $(env | sed -nE 's/^(({prefixes})[A-Za-z0-9_]*)=.*/\\1/p'); do
case $name in {kept}) ;; *) unset "$name" ;; esac; done
command -v "$2" >/dev/null 2>&1 || . /etc/profile >/dev/null 2>&1 </dev/null
command -v "$2" >/dev/null 2>&1 || exit 127
{settings}limit=$1; shift
command -v timeout >/dev/null 2>&1 && exec timeout -s KILL "$limit" "$@"
exec "$@"
""".replace("{prefixes}", "|".join(SCRUBBED_PREFIXES)).replace("{kept}", "|".join(sorted(KEPT)))
_SETTINGS = "export LC_ALL=C SLURM_TIME_FORMAT=%s\n"


def remote_line(argv: Sequence[str], *, timeout_s: float, users_environment: bool) -> str:
    """One line for whatever shell the user has over there: every word of `argv` arrives as it is."""
    script = _SCRIPT.replace("{settings}", "" if users_environment else _SETTINGS)
    return "exec " + shlex.join(["/bin/sh", "-c", script, "krea_runner", f"{timeout_s:g}", *argv])


@cache
def open_ssh(host: str) -> "Ssh":
    """The one connection of this process to `host`, as the user calls it (a Host of ~/.ssh/config, or a name)."""
    return Ssh(host)


class Ssh:
    def __init__(self, host: str) -> None:
        self.host = host
        logging.getLogger("paramiko").addHandler(logging.NullHandler())  # its tracebacks go nowhere: our errors say it
        self._clients: list[paramiko.SSHClient] = []  # the jump hosts, then the host itself
        self._sftp: paramiko.SFTPClient | None = None
        self._lock = threading.RLock()

    def run(
        self, argv: Sequence[str], *, timeout_s: float, users_environment: bool = False, stdin: str | None = None
    ) -> Completed:
        import paramiko

        line = remote_line(argv, timeout_s=timeout_s, users_environment=users_environment)
        channel = self.open_channel()
        started = time.monotonic()
        try:
            channel.settimeout(timeout_s + GRACE_S)
            channel.exec_command(line)
            if stdin is not None:
                channel.sendall(stdin.encode())
            channel.shutdown_write()
            out, err = _read_both(channel, started + timeout_s + GRACE_S)
            if out is None:
                self.close()  # nothing more is to be had of a host that hangs
                return Completed(tuple(argv), -9, "", "", timed_out=True)
            returncode = channel.recv_exit_status() if channel.exit_status_ready() else -1
        except (paramiko.SSHException, OSError, EOFError) as error:
            self.close()
            raise self._unknown(argv, str(error) or type(error).__name__) from error
        finally:
            channel.close()
        if time.monotonic() - started >= timeout_s and returncode in {_KILLED, -1}:
            return Completed(tuple(argv), -9, out, err, timed_out=True)
        if returncode == -1:
            raise self._unknown(argv, "no exit status")
        if returncode in {_NOT_FOUND, _NOT_RUNNABLE}:
            code = errno.ENOENT if returncode == _NOT_FOUND else errno.EACCES
            raise OSError(code, f"{os.strerror(code)} on {self.host}", argv[0])
        return Completed(tuple(argv), returncode, out, err)

    def has(self, command: str) -> bool:
        try:
            return (
                self.run(
                    ["sh", "-c", 'command -v "$1" || { . /etc/profile; command -v "$1"; }', "sh", command],
                    timeout_s=CONNECT_S,
                ).returncode
                == 0
            )
        except FileNotFoundError:
            return False

    def describe(self) -> str:
        """Whom this is connected to, as whom, by which key. Raises: SchedulerUnavailable; ConfigError."""
        with self._lock:
            transport = self._connected()
            address = transport.getpeername()
            at = f"{address[0]} port {address[1]}" if isinstance(address, tuple) else "a jump host"
            key = transport.get_remote_server_key()
            return f"{self.host} ({at}) as {transport.get_username()}, host key {key.get_name()} is known"

    def open_channel(self) -> "paramiko.Channel":
        """A new session; nothing was sent when this raises. Raises: SchedulerUnavailable; ConfigError."""
        import paramiko

        with self._lock:
            for last in (False, True):
                transport = self._connected()
                try:
                    return transport.open_session(timeout=CONNECT_S)
                except (paramiko.SSHException, OSError, EOFError) as error:
                    self.close()  # it was cut while nobody used it
                    if last:
                        raise self._away(f"no session: {error}") from error
        raise AssertionError("not reached")

    def sftp(self) -> "paramiko.SFTPClient":
        """The one SFTP session of this connection; nobody else may use it meanwhile. Raises: FilesUnavailable."""
        import paramiko

        if self._sftp is None:
            try:
                channel = self.open_channel()
                channel.settimeout(CONNECT_S)
                channel.invoke_subsystem("sftp")
                self._sftp = paramiko.SFTPClient(channel)
            except SchedulerUnavailable as error:
                raise FilesUnavailable(f"opening SFTP on {self.host}: {error}", hint=error.hint) from error
            except lost() as error:
                raise FilesUnavailable(
                    f"opening SFTP on {self.host}: {_no_sftp(error)}",
                    hint=f'try it: sftp {self.host}; without SFTP mount the run directory here, with files = "mounted"',
                ) from error
        return self._sftp

    def close_sftp(self) -> None:
        """After an error: what it would answer next belongs to nobody."""
        if self._sftp is not None:
            self._sftp.close()
            self._sftp = None

    def close(self) -> None:
        with self._lock:
            self._sftp = None
            for client in reversed(self._clients):
                client.close()
            self._clients = []

    def _unknown(self, argv: Sequence[str], why: str) -> SchedulerUnavailable:
        return SchedulerUnavailable(
            f"{argv[0]} was sent to {self.host}, and the connection was cut before its answer ({why})",
            argv=argv,
            hint=f"it may have been carried out; is {self.host} there? ssh {self.host} true",
        )

    def _away(self, why: str, hint: str = "") -> SchedulerUnavailable:
        return SchedulerUnavailable(f"connecting to {self.host}: {why}", hint=hint or f"try it: ssh {self.host} true")

    # ------------------------------------------------------------------------------------------------------ connecting

    def _connected(self) -> "paramiko.Transport":
        transport = self._clients[-1].get_transport() if self._clients else None
        if transport is None or not transport.is_active():
            self.close()
            config = read_config(Path.home() / ".ssh" / "config")
            try:
                for name in route(config, self.host):
                    self._hop(config, name)
            except BaseException:
                self.close()
                raise
            transport = _transport_of(self._clients[-1])
        return transport

    def _hop(self, config: "paramiko.SSHConfig", name: str) -> None:
        """One host further. Raises: SchedulerUnavailable; nothing was sent."""
        import paramiko

        user, name, port = split_hop(name)
        known = config.lookup(name)
        address, port = known.get("hostname", name), port or int(known.get("port", 22))
        client = paramiko.SSHClient()
        files = known.get("userknownhostsfile", "~/.ssh/known_hosts ~/.ssh/known_hosts2").split()
        for path in [*files, "/etc/ssh/ssh_known_hosts"]:
            if os.path.exists(os.path.expanduser(path)):
                client.load_system_host_keys(os.path.expanduser(path))
        client.set_missing_host_key_policy(_Refuse(name, files[0]))
        identities = [os.path.expanduser(path) for path in known.get("identityfile", [])]
        try:
            through = self._socket(known, address, port)
            self._clients.append(client)
            client.connect(
                address,
                port,
                username=user or known.get("user"),
                key_filename=[path for path in identities if os.path.exists(path)] or None,
                allow_agent=known.get("identitiesonly", "no") != "yes",
                look_for_keys=not identities,
                sock=through,
                timeout=CONNECT_S,
                banner_timeout=CONNECT_S,
                auth_timeout=CONNECT_S,
                channel_timeout=CONNECT_S,
            )
        except paramiko.BadHostKeyException as error:
            entry = address if port == 22 else f"[{address}]:{port}"
            raise self._away(
                f"the host key of {name} has CHANGED: this may be another machine, or somebody in between; nothing sent",
                f"ask the operators; if it is right: ssh-keygen -R '{entry}' -f {files[0]}, then: ssh {name} true",
            ) from error
        except paramiko.AuthenticationException as error:
            raise self._away(
                f"{name} takes none of your keys ({error})", f"ssh-add -l; and by hand: ssh -v {name} true"
            ) from error
        except (paramiko.SSHException, OSError, EOFError) as error:
            raise self._away(f"{name}: {_in_words(error)}") from error
        _transport_of(client).set_keepalive(KEEPALIVE_S)

    def _socket(self, known: "paramiko.SSHConfigDict", address: str, port: int) -> Any:
        import paramiko

        if self._clients:  # through the jump host before it
            jump = _transport_of(self._clients[-1])
            return jump.open_channel("direct-tcpip", (address, port), ("127.0.0.1", 0), timeout=CONNECT_S)
        command = known.get("proxycommand", "none")
        return None if command == "none" else paramiko.ProxyCommand(command)


def _transport_of(client: "paramiko.SSHClient") -> "paramiko.Transport":
    transport = client.get_transport()
    if transport is None:
        raise OSError(errno.ENOTCONN, "cut at once")
    return transport


def _read_both(channel: "paramiko.Channel", deadline: float) -> tuple[str | None, str]:
    """Both streams until the command has ended or the connection is gone; (None, "") at `deadline` (monotonic)."""
    out, err = bytearray(), bytearray()
    while time.monotonic() < deadline:
        over = channel.closed or (channel.eof_received and channel.exit_status_ready())
        while channel.recv_ready():
            out += channel.recv(1 << 16)
        while channel.recv_stderr_ready():
            err += channel.recv_stderr(1 << 16)
        if len(out) + len(err) > MAX_OUTPUT_BYTES:
            raise OSError(errno.EFBIG, f"more than {MAX_OUTPUT_BYTES} bytes of output")
        if over:
            return out.decode(errors="replace"), err.decode(errors="replace")
        time.sleep(POLL_S)
    return None, ""


def lost() -> tuple[type[Exception], ...]:
    """What paramiko raises when an answer does not come, or is none."""
    import paramiko
    from paramiko.sftp import SFTPError

    return (OSError, EOFError, paramiko.SSHException, SFTPError)


def _no_sftp(error: Exception) -> str:
    from paramiko import SSHException
    from paramiko.sftp import SFTPError

    if isinstance(error, SFTPError):
        return "its answer is no SFTP; a line that ~/.bashrc prints over there is enough for that"
    if isinstance(error, SSHException | EOFError):
        return "that is refused: its sshd offers no SFTP"
    return "no answer" if isinstance(error, TimeoutError) else _in_words(error)


def _in_words(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


class _Refuse:
    def __init__(self, name: str, file: str) -> None:
        self.name, self.file = name, file

    def missing_host_key(self, client: Any, hostname: str, key: Any) -> None:
        raise SchedulerUnavailable(
            f"connecting to {self.name}: its host key ({key.get_name()} {key.fingerprint}) is not in {self.file}; "
            "nothing was sent",
            hint=f"compare it with what your operators publish, and say yes to: ssh {self.name} true",
        )


# ------------------------------------------------------------------------------------------------------- ~/.ssh/config


def read_config(path: Path) -> "paramiko.SSHConfig":
    """Raises: ConfigError. A file that is not there is an empty one."""
    try:
        import paramiko
    except ImportError as error:
        raise ConfigError('transport = "ssh" needs paramiko', hint="pip install 'krea-runner[ssh]'") from error
    try:
        return paramiko.SSHConfig.from_text(_included(path, depth=0))
    except (paramiko.SSHException, OSError, ValueError) as error:
        raise ConfigError(f"reading {path}: {error}", hint="ssh -G HOST says what OpenSSH makes of it") from error


def _included(path: Path, depth: int) -> str:
    """The text with its Include lines replaced by the files they name (paramiko 5.1 knows no Include)."""
    if depth > 16 or not path.is_file():  # OpenSSH's own limit
        return ""
    lines: list[str] = []
    for line in path.read_text(errors="replace").splitlines():
        words = line.split()
        if not words or words[0].lower() != "include":
            lines.append(line)
            continue
        patterns = [str(Path.home() / ".ssh" / os.path.expanduser(word.strip('"'))) for word in words[1:]]
        lines += [_included(Path(found), depth + 1) for pattern in patterns for found in sorted(glob.glob(pattern))]
    return "\n".join(lines)


def split_hop(hop: str) -> tuple[str | None, str, int | None]:
    """`[user@]host[:port]`, or ssh://…, as ProxyJump has it."""
    user, _, rest = hop.removeprefix("ssh://").rpartition("@")
    name, colon, port = rest.rpartition(":")
    if colon and port.isdigit():
        return user or None, name.strip("[]"), int(port)
    return user or None, rest.strip("[]"), None


def route(config: "paramiko.SSHConfig", host: str) -> list[str]:
    """The hosts to go through, in order, `host` last. Raises: ConfigError."""
    hops = [host]
    while True:
        jumps = config.lookup(split_hop(hops[0])[1]).get("proxyjump", "none")
        if jumps == "none":
            return hops
        hops = [*(jump.strip() for jump in jumps.split(",")), *hops]
        if len(hops) > MAX_JUMPS:
            raise ConfigError(f"{host}: more than {MAX_JUMPS} ProxyJump hosts", hint=f"ssh -G {host} | grep -i jump")
