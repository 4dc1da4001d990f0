"""One hop of an SSH connection: the socket, the host key, who we are. Nothing is sent to a host whose key is not known."""

import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from krea_runner.proc import Talk
from krea_runner.transport.identities import Identities
from krea_runner.transport.known_hosts import Trust, judge, known_first, read_known_hosts
from krea_runner.transport.ssh_config import look_up, split_hop

if TYPE_CHECKING:
    import paramiko

KNOWN_HOSTS = "~/.ssh/known_hosts ~/.ssh/known_hosts2"
SYSTEM_KNOWN_HOSTS = "/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2"


class Refused(Exception):
    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True, slots=True)
class Hop:
    transport: "paramiko.Transport"
    closes: Callable[[], None]

    def close(self) -> None:
        self.transport.close()
        self.closes()


def connect(config: "paramiko.SSHConfig", name: str, before: "paramiko.Transport | None", *, within_s: float) -> Hop:
    """To `name` (`[user@]host[:port]`), through the hop `before`. `within_s` holds for each of its steps.

    Raises: Refused, with nothing left open; ConfigError.
    """
    import paramiko

    user, host, port = split_hop(name)
    known = look_up(config, host)
    port = port or int(known.get("port", 22))
    closes: Callable[[], None] = lambda: None  # noqa: E731
    transport = None
    try:
        sock, closes = _socket(known, (known.get("hostname", host), port), before, within_s)
        sock.settimeout(within_s)
        transport = paramiko.Transport(sock)
        transport.banner_timeout = transport.auth_timeout = transport.channel_timeout = within_s
        _check_host_key(transport, known, host, port, within_s)
        _log_in(transport, known, host, user or known.get("user"))
        return Hop(transport, closes)
    except BaseException as error:
        if transport is not None:
            transport.close()
        closes()
        if isinstance(error, paramiko.SSHException | OSError | EOFError):
            raise Refused(f"{host}: {_in_words(error)}{_through(known, before)}") from error
        raise


def _socket(
    known: "paramiko.SSHConfigDict", address: tuple[str, int], before: "paramiko.Transport | None", within_s: float
) -> tuple[Any, Callable[[], None]]:
    """And what closes what paramiko does not. Raises: OSError; paramiko.SSHException."""
    if before is not None:
        return before.open_channel("direct-tcpip", address, ("127.0.0.1", 0), timeout=within_s), lambda: None
    command = known.get("proxycommand", "none")
    if command == "none":
        return socket.create_connection(address, within_s), lambda: None
    talk = Talk(["/bin/sh", "-c", f"exec {command}"])
    return talk.socket, talk.close


def _through(known: "paramiko.SSHConfigDict", before: "paramiko.Transport | None") -> str:
    command = known.get("proxycommand", "none")
    return f" (ProxyCommand {command})" if command != "none" and before is None else ""


def _check_host_key(
    transport: "paramiko.Transport", known: "paramiko.SSHConfigDict", host: str, port: int, within_s: float
) -> None:
    address = known.get("hostname", host)
    entry = known.get("hostkeyalias") or (address if port == 22 else f"[{address}]:{port}")
    files = known.get("userknownhostsfile", KNOWN_HOSTS).split()
    lines = read_known_hosts([*files, *known.get("globalknownhostsfile", SYSTEM_KNOWN_HOSTS).split()])
    options = transport.get_security_options()
    options.key_types = known_first(lines, entry, options.key_types)
    transport.start_client(timeout=within_s)
    key = transport.get_remote_server_key()
    trust = judge(lines, entry, key.get_name(), key.asbytes())
    if trust is Trust.KNOWN:
        return
    shown = f"{key.get_name()} {key.fingerprint}"
    if trust is Trust.UNKNOWN:
        raise Refused(
            f"the host key of {host} ({shown}) is not in {files[0]}; nothing was sent",
            f"compare it with what your operators publish, and say yes to: ssh {host} true",
        )
    if trust is Trust.REVOKED:
        raise Refused(
            f"the host key of {host} ({shown}) is REVOKED in known_hosts: somebody else may have it; nothing was sent",
            f"ask the operators for the host's new key; the line: grep @revoked {' '.join(files)}",
        )
    raise Refused(
        f"the host key of {host} ({shown}) {trust}: this may be another machine, or somebody in between; nothing was sent",
        f"ask the operators; if it is right: ssh-keygen -R '{entry}' -f {files[0]}, then: ssh {host} true",
    )


def _log_in(transport: "paramiko.Transport", known: "paramiko.SSHConfigDict", host: str, user: str | None) -> None:
    import getpass

    import paramiko

    user = user or getpass.getuser()
    identities, tried = Identities(known), 0
    try:
        for key in identities.in_order():
            tried += 1
            try:
                more = transport.auth_publickey(user, key)
            except paramiko.BadAuthenticationType as error:
                offered = ", ".join(error.allowed_types)
                raise Refused(f"{host} takes no keys, but {offered}; nobody is there to type", _BY_HAND) from error
            except paramiko.AuthenticationException as error:
                if "timeout" in str(error):
                    raise
                continue
            if transport.is_authenticated():
                return
            wanted = ", ".join(more)
            raise Refused(f"{host} wants {wanted} beside the key, and nobody is there to type", _BY_HAND)
    except (paramiko.SSHException, EOFError) as error:
        if transport.is_active():
            raise
        raise Refused(f"{host} closed the connection after {tried} keys: too many", _ONE_KEY) from error
    hint = f"ssh-add {identities.locked}" if identities.locked else "ssh-add -l"
    why = "; ".join([f"{tried} tried as {user}", *identities.unusable])
    raise Refused(f"{host} takes none of your keys ({why})", f"{hint}; and by hand: ssh -v {host} true")


_BY_HAND = "ask the operators for a key that is enough alone, or run krea-runner on the login node itself"
_ONE_KEY = "name the right one in ~/.ssh/config: IdentityFile and IdentitiesOnly yes"


def _in_words(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no answer"
    return getattr(error, "strerror", None) or str(error) or "the connection was closed at once"
