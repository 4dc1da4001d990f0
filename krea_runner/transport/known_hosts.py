"""Which host keys are known, as OpenSSH reads known_hosts (sshd.8, "SSH_KNOWN_HOSTS FILE FORMAT"; 9.2): patterns, hashed
names, several keys of one host, revoked keys. paramiko knows one key of a type for a host, and neither of the markers.

Lines of a @cert-authority are left out: paramiko takes no host certificates, so such a host is unknown until its own key is
noted.
"""

import base64
import binascii
import hmac
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path


class Trust(StrEnum):
    KNOWN = "is known"
    UNKNOWN = "is not known"
    OTHER_TYPE = "is of another type than the known one"
    CHANGED = "has CHANGED"
    REVOKED = "is REVOKED"


@dataclass(frozen=True, slots=True)
class KnownHost:
    names: str
    key_type: str
    key: bytes
    is_revoked: bool

    def is_of(self, host: str) -> bool:
        """`host` as known_hosts has it: `name`, or `[name]:port` where the port is not 22."""
        if self.names.startswith("|1|"):
            salt, _, digest = self.names[3:].partition("|")
            try:
                asked = hmac.new(base64.b64decode(salt), host.encode(), "sha1").digest()
                return hmac.compare_digest(asked, base64.b64decode(digest))
            except (binascii.Error, ValueError):
                return False
        host, found = host.lower(), False
        for pattern in self.names.lower().split(","):
            # Brackets are no class of characters here.
            if fnmatchcase(host, pattern.removeprefix("!").replace("[", "[[]")):
                if pattern.startswith("!"):
                    return False
                found = True
        return found


def read_known_hosts(files: Iterable[str]) -> list[KnownHost]:
    """A file that is not there has no lines. Raises: OSError."""
    found = []
    for name in files:
        path = Path(os.path.expanduser(name))
        if not path.is_file():
            continue
        for line in path.read_text(errors="replace").splitlines():
            words = line.split()
            marker = words.pop(0) if words and words[0].startswith("@") else ""
            if len(words) < 3 or words[0].startswith("#") or marker not in {"", "@revoked"}:
                continue
            try:
                key = base64.b64decode(words[2], validate=True)
            except (binascii.Error, ValueError):
                continue
            found.append(KnownHost(words[0], words[1], key, marker == "@revoked"))
    return found


def judge(known: Sequence[KnownHost], host: str, key_type: str, key: bytes) -> Trust:
    of_host = [line for line in known if line.is_of(host)]
    if any(line.key == key for line in of_host if line.is_revoked):
        return Trust.REVOKED
    trusted = [line for line in of_host if not line.is_revoked]
    if any(line.key == key for line in trusted):
        return Trust.KNOWN
    if not trusted:
        return Trust.UNKNOWN
    return Trust.CHANGED if any(line.key_type == key_type for line in trusted) else Trust.OTHER_TYPE


def known_first(known: Sequence[KnownHost], host: str, algorithms: Sequence[str]) -> list[str]:
    """`algorithms` with those before for which a key of the host is known: a server with several keys then shows that one."""
    types = {line.key_type for line in known if line.is_of(host) and not line.is_revoked}
    return sorted(algorithms, key=lambda name: ("ssh-rsa" if name.startswith("rsa-sha2-") else name) not in types)
