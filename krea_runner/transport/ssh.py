"""A login node over SSH (paramiko): one connection, kept, and made anew after a drop.

Who and where is read from ~/.ssh/config as OpenSSH does: HostName, User, Port, IdentityFile, IdentitiesOnly, ProxyJump,
ProxyCommand, UserKnownHostsFile, Include. Host keys are enforced whatever StrictHostKeyChecking says: nobody is there
to answer a question. A command is sent once. What is done again is connecting, and only before anything was sent.
"""

import errno
import logging
import os
import shlex
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from krea_runner.errors import FilesUnavailable, SchedulerUnavailable
from krea_runner.proc import FOR_READING, KEPT, SCRUBBED_PREFIXES, Completed
from krea_runner.transport.connect import Hop, Refused, connect
from krea_runner.transport.ssh_config import SYSTEM, read_config, route

if TYPE_CHECKING:
    import paramiko

CONNECT_S = 15.0
# A NAT or a firewall forgets a silent connection, often after five minutes.
KEEPALIVE_S = 30
# How much longer than the command's own limit an answer is waited for: a host that hangs says nothing at all.
GRACE_S = 3.0
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
_SETTINGS = f"export {' '.join(f'{name}={value}' for name, value in FOR_READING.items())}\n"


def remote_line(argv: Sequence[str], *, timeout_s: float, users_env: bool) -> str:
    """One line for whatever shell the user has over there: every word of `argv` arrives as it is."""
    script = _SCRIPT.replace("{settings}", "" if users_env else _SETTINGS)
    return "exec " + shlex.join(["/bin/sh", "-c", script, "krea_runner", f"{timeout_s:g}", *argv])


@cache
def open_ssh(host: str) -> "Ssh":
    """The one connection of this process to `host`, as the user calls it (a Host of ~/.ssh/config, or a name)."""
    return Ssh(host)


class Ssh:
    def __init__(self, host: str) -> None:
        self.host = host
        logging.getLogger("paramiko").addHandler(logging.NullHandler())  # its tracebacks go nowhere: our errors say it
        self._hops: list[Hop] = []  # the jump hosts, then the host itself
        self._sftp: paramiko.SFTPClient | None = None
        self._lock = threading.RLock()

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        users_env: Mapping[str, str] | None = None,
        stdin: str | None = None,
    ) -> Completed:
        import paramiko

        line = remote_line(argv, timeout_s=timeout_s, users_env=users_env is not None)
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
                        raise SchedulerUnavailable(
                            f"connecting to {self.host}: no session: {error}", hint=f"try it: ssh {self.host} true"
                        ) from error
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
            for hop in reversed(self._hops):
                hop.close()
            self._hops = []

    def _unknown(self, argv: Sequence[str], why: str) -> SchedulerUnavailable:
        return SchedulerUnavailable(
            f"{argv[0]} was sent to {self.host}, and the connection was cut before its answer ({why})",
            argv=argv,
            hint=f"it may have been carried out; is {self.host} there? ssh {self.host} true",
        )

    def _connected(self) -> "paramiko.Transport":
        """Raises: SchedulerUnavailable; nothing was sent. ConfigError."""
        if not self._hops or not self._hops[-1].transport.is_active():
            self.close()
            config = read_config(Path.home() / ".ssh" / "config", SYSTEM)
            try:
                for name in route(config, self.host):
                    before = self._hops[-1].transport if self._hops else None
                    self._hops.append(connect(config, name, before, within_s=CONNECT_S))
            except BaseException as error:
                self.close()
                if isinstance(error, Refused):
                    raise SchedulerUnavailable(
                        f"connecting to {self.host}: {error}", hint=error.hint or f"try it: ssh {self.host} true"
                    ) from error
                raise
            self._hops[-1].transport.set_keepalive(KEEPALIVE_S)
        return self._hops[-1].transport


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
