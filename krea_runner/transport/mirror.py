"""The parts of a run directory that a look needs, copied over SFTP where the directory is not mounted here.

Heartbeat files are rewritten in place, so their size says nothing, and SFTP tells times in whole seconds: a file is read
until it was twice seen with the same time. Of a log the new bytes are read, at first and after a jump the last 64 KiB;
the copy has the size of the original, with a hole where nothing was read. What comes from over there names files below
the mirror and nowhere else.
"""

import hashlib
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from krea_runner.config.site import state_dir
from krea_runner.errors import FilesUnavailable
from krea_runner.model import AttemptKey, RunConfig
from krea_runner.rundir import RunDir
from krea_runner.transport.ssh import Ssh, open_ssh

if TYPE_CHECKING:
    import paramiko

TAIL_BYTES = 64 << 10
HEARTBEAT_BYTES = 1 << 20
MAX_ENTRIES = 20_000
MAX_SIZE_BYTES = 1 << 43  # ext4 has no larger files
KEPT_BYTES = 8 << 20  # of one log, before its copy is begun afresh


def mirrored(config: RunConfig, attempt: AttemptKey | None) -> RunConfig:
    """`config` with its directories where they can be read: refreshed copies, or as they are where they are mounted.

    Raises: FilesUnavailable; what an earlier call copied is not to be judged then, it would look frozen.
    """
    if config.files != "sftp":
        return config
    return _mirror(config.ssh_host, config.run_dir).refreshed(config, attempt)


def put_files(config: RunConfig, folders: list[Path], files: dict[Path, bytes]) -> None:
    """Make `folders` and write `files` over there, each whole or not at all. Raises: FilesUnavailable."""
    with _Session(open_ssh(config.ssh_host)) as sftp:
        for folder in folders:
            for part in (*reversed(folder.parents), folder):
                try:
                    sftp.stat(str(part))
                except FileNotFoundError:
                    sftp.mkdir(str(part))
        for path, data in files.items():
            partial = str(path.with_name(f".{path.name}.{os.getpid()}"))
            with sftp.open(partial, "wb") as file:
                file.write(data)
            sftp.posix_rename(partial, str(path))


@dataclass(slots=True)
class _Session:
    ssh: Ssh

    def __enter__(self) -> "paramiko.SFTPClient":
        return self.ssh.sftp()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        import paramiko

        if isinstance(error, OSError | EOFError | paramiko.SSHException):
            self.ssh.close_sftp()
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise FilesUnavailable(
                f"reading files on {self.ssh.host}: {why}", hint=f"try it: sftp {self.ssh.host}"
            ) from error


@cache
def _mirror(host: str, run_dir: Path) -> "_Mirror":
    digest = hashlib.sha256(f"{host}:{run_dir}".encode()).hexdigest()[:16]
    return _Mirror(open_ssh(host), state_dir() / "mirror" / digest)


@dataclass(slots=True)
class _Mirror:
    ssh: Ssh
    root: Path
    seen: dict[Path, tuple[tuple[int, int], bool]] = field(default_factory=dict)
    """Of each copied file: size and time over there when it was last read, and whether that was seen twice."""

    def refreshed(self, config: RunConfig, attempt: AttemptKey | None) -> RunConfig:
        far, near = RunDir(config.run_dir), RunDir(self.root / "run")
        spec = config.checkpoint
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _Session(self.ssh) as sftp:
            if attempt is not None:
                self._heartbeats(sftp, far.heartbeats(attempt), near.heartbeats(attempt))
                logs = near.attempt_logs(attempt)
                for name, status in _files(sftp, far.attempt_logs(attempt)):
                    self._log(sftp, far.attempt_logs(attempt) / name, logs / name, status)
                for one in (RunDir.script_events, RunDir.batch_log):
                    key = attempt.job_id if one is RunDir.batch_log else attempt
                    self._one(sftp, one(far, key), one(near, key))  # type: ignore[arg-type]
            if spec.directory is not None:
                local = self.root / "checkpoints"
                _checkpoints(sftp, spec.directory, local, spec.pattern, spec.complete)
                spec = replace(spec, directory=local)
        return replace(config, run_dir=near.root, checkpoint=spec)

    def _heartbeats(self, sftp: "paramiko.SFTPClient", far: Path, near: Path) -> None:
        there = set()
        for name, status in _files(sftp, far):
            there.add(name)
            path, now = near / name, (status.st_size or 0, int(status.st_mtime or 0))
            before, settled = self.seen.get(path, (None, False))
            if before == now and settled:
                continue
            with sftp.open(str(far / name), "rb") as file:
                _write(path, file.read(HEARTBEAT_BYTES))
            self.seen[path] = (now, before == now)
        for gone in (path for path in near.glob("*.hb") if path.name not in there):
            gone.unlink()

    def _one(self, sftp: "paramiko.SFTPClient", far: Path, near: Path) -> None:
        try:
            status = sftp.stat(str(far))
        except FileNotFoundError:
            return
        if stat.S_ISREG(status.st_mode or 0):
            self._log(sftp, far, near, status)

    def _log(self, sftp: "paramiko.SFTPClient", far: Path, near: Path, status: "paramiko.SFTPAttributes") -> None:
        size = status.st_size or 0
        if size > MAX_SIZE_BYTES:
            raise OSError(0, f"{far} says it has {size} bytes")
        copy = near.stat() if near.exists() else None
        if copy is not None and size == copy.st_size:
            return
        goes_on = copy is not None and copy.st_size < size and copy.st_blocks * 512 <= KEPT_BYTES
        start = max(copy.st_size if copy is not None and goes_on else 0, size - TAIL_BYTES)
        with sftp.open(str(far), "rb") as file:
            file.seek(start)
            data = file.read(size - start)
        near.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | (0 if goes_on else os.O_TRUNC)
        descriptor = os.open(near, flags, 0o600)
        try:
            os.pwrite(descriptor, data, start)
            os.ftruncate(descriptor, start + len(data))
        finally:
            os.close(descriptor)


def _files(sftp: "paramiko.SFTPClient", folder: Path) -> Iterator[tuple[str, "paramiko.SFTPAttributes"]]:
    """Plain files, no links; a folder that is not there has none."""
    for status in _listing(sftp, folder):
        if stat.S_ISREG(status.st_mode or 0):
            yield status.filename, status


def _listing(sftp: "paramiko.SFTPClient", folder: Path) -> "list[paramiko.SFTPAttributes]":
    try:
        found = sftp.listdir_attr(str(folder))
    except FileNotFoundError:
        return []
    if len(found) > MAX_ENTRIES:
        raise OSError(0, f"more than {MAX_ENTRIES} entries in {folder}")
    return [status for status in found if _is_plain(status.filename)]


def _is_plain(name: str) -> bool:
    return name not in {"", ".", ".."} and not re.search(r"[/\x00]", name) and len(os.fsencode(name)) <= 255


def _checkpoints(sftp: "paramiko.SFTPClient", far: Path, near: Path, pattern: str, complete: str) -> None:
    """Names as folders, and the marker of the newest that is whole."""
    before, after = (re.escape(part) for part in pattern.split("{step}"))
    regex = re.compile(f"{before}([0-9]{{1,18}}){after}")
    steps = {s.filename: int(m[1]) for s in _listing(sftp, far) if (m := regex.fullmatch(s.filename))}
    near.mkdir(exist_ok=True)
    for path in near.iterdir():
        if path.name not in steps:
            for marker in path.iterdir():
                marker.unlink()
            path.rmdir()
    whole = False
    for name in sorted(steps, key=steps.__getitem__, reverse=True):
        (near / name).mkdir(exist_ok=True)
        if whole or not complete:
            continue
        try:
            whole = stat.S_ISREG(sftp.stat(str(far / name / complete)).st_mode or 0)
        except FileNotFoundError:
            (near / name / complete).unlink(missing_ok=True)
        if whole:
            (near / name / complete).touch()


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}")
    partial.write_bytes(data)
    partial.replace(path)
