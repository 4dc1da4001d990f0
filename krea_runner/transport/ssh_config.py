"""What ~/.ssh/config and /etc/ssh/ssh_config say of a host, read with paramiko where that is right, and where it is not as
OpenSSH does (ssh_config.5, 9.2)."""

import glob
import os
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from krea_runner.errors import ConfigError

if TYPE_CHECKING:
    import paramiko

MAX_JUMPS = 8
MAX_DEPTH = 16  # OpenSSH's own, of Include
SYSTEM = Path("/etc/ssh/ssh_config")

_INCLUDE = re.compile(r"\s*include(?:\s*=\s*|\s+)(.*)", re.IGNORECASE)
_BLOCK = re.compile(r"\s*(host|match)[\s=]", re.IGNORECASE)


def read_config(path: Path, system: Path | None = None) -> "paramiko.SSHConfig":
    """Of what both say the first counts. Raises: ConfigError. A file that is not there is an empty one."""
    try:
        import paramiko
    except ImportError as error:
        raise ConfigError('transport = "ssh" needs paramiko', hint="pip install 'krea-runner[ssh]'") from error
    try:
        lines = _included(path, Path.home() / ".ssh", "Host *", 0)
        if system is not None:
            lines += ["Host *", *_included(system, system.parent, "Host *", 0)]
        return paramiko.SSHConfig.from_text("\n".join(lines))
    except (paramiko.SSHException, OSError, ValueError) as error:
        raise ConfigError(f"reading {path}: {error}", hint="ssh -G HOST says what OpenSSH makes of it") from error


def look_up(config: "paramiko.SSHConfig", host: str) -> "paramiko.SSHConfigDict":
    """Raises: ConfigError."""
    try:
        return config.lookup(host)
    except Exception as error:  # `Match exec` runs a command, through a library that is an extra of paramiko's
        why = " ".join(str(error).split())[:200]
        raise ConfigError(f"~/.ssh/config, for {host}: {why}", hint=f"ssh -G {host}") from error


def _included(path: Path, base: Path, block: str, depth: int) -> list[str]:
    """The lines, with those of the files that Include names in its place (paramiko 5.1 knows no Include). `block` is the Host
    or Match in which they stand; after an Include it goes on."""
    if depth > MAX_DEPTH or not path.is_file():
        return []
    lines: list[str] = []
    for line in path.read_text(errors="replace").splitlines():
        if _BLOCK.match(line):
            block = line
        include = _INCLUDE.match(line)
        if include is None:
            lines.append(line)
            continue
        for word in shlex.split(include[1], comments=True):
            for found in sorted(glob.glob(str(base / os.path.expanduser(word)))):
                lines += [*_included(Path(found), base, block, depth + 1), block]
    return lines


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
        jumps = look_up(config, split_hop(hops[0])[1]).get("proxyjump", "none")
        if jumps == "none":
            return hops
        hops = [*(jump.strip() for jump in jumps.split(",")), *hops]
        if len(hops) > MAX_JUMPS:
            raise ConfigError(f"{host}: more than {MAX_JUMPS} ProxyJump hosts", hint=f"ssh -G {host} | grep -i jump")
