"""With which keys to log in, in OpenSSH's order: the configured ones, from the agent before the file, then the agent's others."""

import base64
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import paramiko

DEFAULTS = ("~/.ssh/id_rsa", "~/.ssh/id_ecdsa", "~/.ssh/id_ed25519")
_MAGIC = b"openssh-key-v1\0"


@dataclass(slots=True)
class Identities:
    """`unusable`: of what was passed over while the keys were gone through, why."""

    known: Mapping[str, Any]
    unusable: list[str] = field(default_factory=list)
    locked: Path | None = None
    """A key with a passphrase that no agent holds."""

    def in_order(self) -> Iterator["paramiko.PKey"]:
        import paramiko

        paths = [Path(os.path.expanduser(name)) for name in self.known.get("identityfile", DEFAULTS)]
        held = (
            {} if self.known.get("identityagent") == "none" else {k.asbytes(): k for k in paramiko.Agent().get_keys()}
        )
        for path in paths:
            public = _public_part(path)
            if public is not None and public in held:
                yield held.pop(public)
            elif path.is_file():
                yield from self._of_file(path)
        if self.known.get("identitiesonly", "no").lower() != "yes":
            yield from held.values()

    def _of_file(self, path: Path) -> Iterator["paramiko.PKey"]:
        import paramiko

        try:
            if _is_encrypted(path.read_bytes()):
                self.locked = self.locked or path
                self.unusable.append(f"{path} has a passphrase, and no agent holds it")
                return
            yield paramiko.PKey.from_path(path)
        except (paramiko.SSHException, paramiko.pkey.UnknownKeyType, OSError, ValueError, TypeError) as error:
            self.unusable.append(f"{path} cannot be used: {getattr(error, 'strerror', None) or error}")


def _public_part(path: Path) -> bytes | None:
    """Of the file beside it, else of the key itself: in OpenSSH's own format that part is never encrypted (PROTOCOL.key)."""
    try:
        return base64.b64decode(Path(f"{path}.pub").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        pass
    try:
        private = _private_part(path.read_bytes())
        return None if private is None else _words(private, 5)[-1]
    except (OSError, ValueError, struct.error):
        return None


def _is_encrypted(data: bytes) -> bool:
    private = _private_part(data)
    return b"ENCRYPTED" in data if private is None else not private.startswith(b"\0\0\0\x04none")


def _private_part(data: bytes) -> bytes | None:
    """What follows the magic: cipher, KDF, its options, how many keys, the public key, ... None: of another format."""
    lines = data.split(b"-----")
    if len(lines) < 3 or b"OPENSSH PRIVATE KEY" not in lines[1]:
        return None
    body = base64.b64decode(lines[2])
    return body[len(_MAGIC) :] if body.startswith(_MAGIC) else None


def _words(data: bytes, count: int) -> list[bytes]:
    """Strings with their length before them; the fourth is the number of keys, which has none."""
    words, at = [], 0
    for number in range(count):
        (length,) = (4,) if number == 3 else struct.unpack_from(">I", data, at)
        at += 0 if number == 3 else 4
        words.append(data[at : at + length])
        at += length
    return words
