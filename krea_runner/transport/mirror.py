"""The parts of a run directory that a look needs, copied over SFTP where the directory is not mounted here.

Heartbeat files are rewritten in place, so their size says nothing, and SFTP tells times in whole seconds: a file is read
until it was twice seen with the same time. Of a log the new bytes are read, at first and after a jump the last 64 KiB;
the copy has the size of the original, with a hole where nothing was read. What comes from over there names files below
the mirror and nowhere else. Several processes may refresh one mirror: each copy is replaced whole, or grows.
"""

import hashlib
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from krea_runner.config.site import state_dir
from krea_runner.errors import FilesUnavailable
from krea_runner.model import AttemptKey, CheckpointSpec, RunConfig
from krea_runner.rundir import RunDir
from krea_runner.transport.sftp import Entry, Pipeline, Plan
from krea_runner.transport.ssh import Ssh, lost, open_ssh

if TYPE_CHECKING:
    import paramiko

TAIL_BYTES = 64 << 10
HEARTBEAT_BYTES = 1 << 20
MAX_SIZE_BYTES = 1 << 43  # ext4 has no larger files
KEPT_BYTES = 8 << 20  # of one log, before its copy is begun afresh
KEPT_ATTEMPTS = 4
DIAGNOSED_BYTES = 64 << 20
AT_ONCE_BYTES = 4 << 20
MARKERS_AT_ONCE = 4

Wanted = tuple[RunConfig, AttemptKey | None]


def mirrored(config: RunConfig, attempt: AttemptKey | None) -> RunConfig:
    """`config` with its directories where they can be read: refreshed copies, or as they are where they are mounted.

    Raises: FilesUnavailable; what an earlier call copied is not to be judged then, it would look frozen.
    """
    if config.files != "sftp":
        return config
    mirror = _mirror(config.ssh_host, config.run_dir)
    if attempt not in mirror.fresh:
        with looked_at_together([(config, attempt)]):
            return mirrored(config, attempt)
    found = mirror.fresh.pop(attempt)
    if isinstance(found, FilesUnavailable):
        raise found
    return found


@contextmanager
def looked_at_together(wanted: Sequence[Wanted]) -> Iterator[None]:
    """Refresh the copies of many runs in the round trips of one; within, the first `mirrored` of each takes what was read
    here. A host that cannot be read is waited for once."""
    far = [(config, attempt) for config, attempt in wanted if config.files == "sftp"]
    mirrors = [_mirror(config.ssh_host, config.run_dir) for config, _ in far]
    try:
        for host in dict.fromkeys(config.ssh_host for config, _ in far):
            _refresh(open_ssh(host), [item for item in far if item[0].ssh_host == host])
        yield
    finally:
        for mirror in mirrors:
            mirror.fresh.clear()


def _refresh(ssh: Ssh, wanted: Sequence[Wanted]) -> None:
    """Leaves in each run's mirror its refreshed configuration, or why there is none. What was cut is read once more, over a
    new connection: reading changes nothing over there."""
    failed: dict[int, FilesUnavailable] = {}
    for last in (False, True):
        try:
            pipeline = Pipeline(ssh.sftp())
            plans = [(number, plan) for number, item in enumerate(wanted) for plan in _plans(pipeline, *item)]
            errors = pipeline.together([plan for _, plan in plans])
        except FilesUnavailable as error:
            failed = dict.fromkeys(range(len(wanted)), error)
        except lost() as error:
            ssh.close_sftp()
            if not last and not isinstance(error, TimeoutError):
                continue
            failed = dict.fromkeys(range(len(wanted)), _unavailable(ssh, error))
        else:
            pairs = zip(plans, errors, strict=True)
            failed = {number: _unavailable(ssh, error) for (number, _), error in pairs if error is not None}
            if failed:
                ssh.close_sftp()  # and with it what was left open over there
        break
    for number, (config, attempt) in enumerate(wanted):
        mirror = _mirror_of(config)
        mirror.fresh[attempt] = failed.get(number) or mirror.config(config)


def _plans(pipeline: Pipeline, config: RunConfig, attempt: AttemptKey | None) -> Iterator[Plan[None]]:
    return _mirror_of(config).plans(pipeline, config, attempt)


def put_files(config: RunConfig, folders: list[Path], files: dict[Path, bytes]) -> None:
    """Make `folders` and write `files` over there, each whole or not at all. Raises: FilesUnavailable."""
    with _Session(open_ssh(config.ssh_host), "writing") as sftp:
        for folder in folders:
            for part in (*reversed(folder.parents), folder):
                try:
                    sftp.stat(str(part))
                except FileNotFoundError:
                    sftp.mkdir(str(part))
        for path, data in files.items():
            partial_path = str(path.with_name(f".{path.name}.{os.getpid()}"))
            with sftp.open(partial_path, "wb") as file:
                file.set_pipelined(True)  # not a round trip for each 32 KiB
                file.write(data)
            sftp.posix_rename(partial_path, str(path))


def copy_logs(
    config: RunConfig,
    attempt: AttemptKey,
    into: Path,
    *,
    all_bytes: int | None = None,
    is_late: Callable[[], bool] = lambda: False,
) -> list[tuple[str, int]]:
    """The attempt's logs and its job's, to their places below `into`; of each the last DIAGNOSED_BYTES, or its share of
    `all_bytes`; no more of them once `is_late` says so. Returns those that were cut or left out, with their whole size.

    Raises: FilesUnavailable.
    """
    cut: list[tuple[str, int]] = []
    with _Session(open_ssh(config.ssh_host)) as sftp:
        pipeline = Pipeline(sftp)
        plan = _copy_logs(pipeline, RunDir(config.run_dir), RunDir(into), attempt, all_bytes, is_late, cut)
        (error,) = pipeline.together([plan])
        if error is not None:
            raise error
    return cut


def _copy_logs(
    pipeline: Pipeline,
    far: RunDir,
    near: RunDir,
    attempt: AttemptKey,
    all_bytes: int | None,
    is_late: Callable[[], bool],
    cut: list[tuple[str, int]],
) -> Plan[None]:
    batch, folder = far.batch_log(attempt.job_id), far.attempt_logs(attempt)
    (told,) = yield from pipeline.stats([str(batch)])
    found = [(near.batch_log(attempt.job_id), batch, told)] if told is not None and stat.S_ISREG(told.mode) else []
    entries = yield from pipeline.listing(str(folder))
    found += [(near.attempt_logs(attempt) / e.name, folder / e.name, e) for e in entries if _is_plain_file(e)]
    most = DIAGNOSED_BYTES if all_bytes is None else min(DIAGNOSED_BYTES, all_bytes // max(1, len(found)))
    for here, there, entry in found:
        begin = max(0, entry.size_bytes - most)
        if begin or is_late():
            cut.append((str(there), entry.size_bytes))
        if is_late():
            continue
        here.parent.mkdir(parents=True, exist_ok=True)
        with here.open("wb") as file:
            for at in range(begin, entry.size_bytes, AT_ONCE_BYTES):
                (data,) = yield from pipeline.reading([(str(there), at, min(AT_ONCE_BYTES, entry.size_bytes - at))])
                file.write(data or b"")


def exists_there(config: RunConfig, path: str) -> bool:
    """True also where that cannot be seen. `path` is the cluster's."""
    try:
        with _Session(open_ssh(config.ssh_host)) as sftp:
            try:
                sftp.stat(path)
            except FileNotFoundError:
                return False
    except FilesUnavailable:
        pass  # whoever goes on to need it says so
    return True


def local_copy(config: RunConfig) -> RunDir:
    """Where this host keeps what it read of the run directory."""
    return RunDir(_mirror_of(config).root / "run")


@dataclass(slots=True)
class _Session:
    ssh: Ssh
    doing: str = "reading"

    def __enter__(self) -> "paramiko.SFTPClient":
        return self.ssh.sftp()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, lost()):
            self.ssh.close_sftp()
            raise _unavailable(self.ssh, error, self.doing) from error


def _unavailable(ssh: Ssh, error: BaseException, doing: str = "reading") -> FilesUnavailable:
    why = getattr(error, "strerror", None) or str(error) or ("no answer" if isinstance(error, TimeoutError) else "cut")
    unavailable = FilesUnavailable(f"{doing} files on {ssh.host}: {why}", hint=f"try it: sftp {ssh.host}")
    unavailable.__cause__ = error
    return unavailable


@cache
def _mirror(host: str, run_dir: Path) -> "_Mirror":
    digest = hashlib.sha256(f"{host}:{run_dir}".encode()).hexdigest()[:16]
    return _Mirror(state_dir() / "mirror" / digest)


def _mirror_of(config: RunConfig) -> "_Mirror":
    return _mirror(config.ssh_host, config.run_dir)


@dataclass(slots=True)
class _Mirror:
    root: Path
    seen: dict[Path, tuple[tuple[int, int], bool]] = field(default_factory=dict)
    """Of each copied file: size and time over there when it was last read, and whether that was seen twice."""
    fresh: dict[AttemptKey | None, RunConfig | FilesUnavailable] = field(default_factory=dict)
    """Just read, and not looked at yet."""

    def config(self, config: RunConfig) -> RunConfig:
        spec = config.checkpoint
        if spec.directory is not None:
            spec = replace(spec, directory=self.root / "checkpoints")
        return replace(config, run_dir=self.root / "run", checkpoint=spec)

    def plans(self, pipeline: Pipeline, config: RunConfig, attempt: AttemptKey | None) -> Iterator[Plan[None]]:
        far, near = RunDir(config.run_dir), RunDir(self.root / "run")
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if config.checkpoint.directory is not None:
            (self.root / "checkpoints").mkdir(exist_ok=True)
            yield _checkpoints(pipeline, config.checkpoint.directory, self.root / "checkpoints", config.checkpoint)
        if attempt is not None:
            for folder in (near.heartbeats(attempt), near.attempt_logs(attempt)):
                self._forget(folder)
            yield self._heartbeats(pipeline, far.heartbeats(attempt), near.heartbeats(attempt))
            yield _logs(pipeline, far.attempt_logs(attempt), near.attempt_logs(attempt))
            pairs = [(there.script_events(attempt), there.batch_log(attempt.job_id)) for there in (far, near)]
            yield _singles(pipeline, list(zip(*pairs, strict=True)))

    def _heartbeats(self, pipeline: Pipeline, far: Path, near: Path) -> Plan[None]:
        here = {*near.glob("*.hb"), *near.glob("*.beat")}
        entries = [entry for entry in (yield from pipeline.listing(str(far), len(here))) if _is_plain_file(entry)]
        due = []
        for entry in entries:
            now = (entry.size_bytes, entry.mtime)
            before, settled = self.seen.get(near / entry.name, (None, False))
            if before != now or not settled or near / entry.name not in here:
                due.append((entry, (now, before == now)))
        parts = [(str(far / entry.name), 0, min(entry.size_bytes, HEARTBEAT_BYTES)) for entry, _ in due]
        for (entry, seen), data in zip(due, (yield from pipeline.reading(parts)), strict=True):
            if data is not None:
                _write(near / entry.name, data, entry.mtime)
                self.seen[near / entry.name] = seen
        for gone in here - {near / entry.name for entry in entries}:
            gone.unlink(missing_ok=True)

    def _forget(self, folder: Path) -> None:
        """All but the newest attempts, when a new one begins here."""
        if folder.exists() or not folder.parent.is_dir():
            return
        old = sorted((path for path in folder.parent.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
        for path in old[: 1 - KEPT_ATTEMPTS]:
            shutil.rmtree(path, ignore_errors=True)
            self.seen = {known: what for known, what in self.seen.items() if known.parent != path}


def _logs(pipeline: Pipeline, far: Path, near: Path) -> Plan[None]:
    entries = yield from pipeline.listing(str(far))
    plain = [entry for entry in entries if _is_plain_file(entry)]
    yield from _new_bytes(pipeline, [(far / entry.name, near / entry.name, entry) for entry in plain])


def _singles(pipeline: Pipeline, pairs: Sequence[tuple[Path, Path]]) -> Plan[None]:
    found = yield from pipeline.stats([str(far) for far, _ in pairs])
    there = [(far, near, entry) for (far, near), entry in zip(pairs, found, strict=True) if entry is not None]
    yield from _new_bytes(pipeline, [item for item in there if stat.S_ISREG(item[2].mode)])


def _new_bytes(pipeline: Pipeline, logs: Sequence[tuple[Path, Path, Entry]]) -> Plan[None]:
    """Of each (there, here, what it is there)."""
    grown: list[tuple[Path, bool]] = []
    parts: list[tuple[str, int, int]] = []
    for far, near, entry in logs:
        size = entry.size_bytes
        if size > MAX_SIZE_BYTES:
            raise OSError(0, f"{far} says it has {size} bytes")
        copy = near.stat() if near.exists() else None
        if copy is not None and size == copy.st_size:
            continue
        goes_on = copy is not None and copy.st_size < size and copy.st_blocks * 512 <= KEPT_BYTES
        start = max(copy.st_size if copy is not None and goes_on else 0, size - TAIL_BYTES)
        grown.append((near, goes_on))
        parts.append((str(far), start, size - start))
    for (near, goes_on), (_, start, _), data in zip(grown, parts, (yield from pipeline.reading(parts)), strict=True):
        if data is not None:
            _extend(near, start, data, afresh=not goes_on)


def _extend(near: Path, start: int, data: bytes, *, afresh: bool) -> None:
    near.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | (os.O_TRUNC if afresh else 0)
    descriptor = os.open(near, flags, 0o600)
    try:
        os.pwrite(descriptor, data, start)
        os.ftruncate(descriptor, start + len(data))
    finally:
        os.close(descriptor)


def _is_plain_file(entry: Entry) -> bool:
    return stat.S_ISREG(entry.mode) and _is_plain(entry.name)


def _is_plain(name: str) -> bool:
    return name not in {"", ".", ".."} and not re.search(r"[/\x00]", name) and len(os.fsencode(name)) <= 255


def _checkpoints(pipeline: Pipeline, far: Path, near: Path, spec: CheckpointSpec) -> Plan[None]:
    """Names as folders, and the marker of the newest that is whole."""
    before, after = (re.escape(part) for part in spec.pattern.split("{step}"))
    regex = re.compile(f"{before}([0-9]{{1,18}}){after}")
    names = [entry.name for entry in (yield from pipeline.listing(str(far))) if _is_plain(entry.name)]
    steps = {name: int(match[1]) for name in names if (match := regex.fullmatch(name))}
    for path in near.iterdir():
        if path.name not in steps:
            shutil.rmtree(path, ignore_errors=True)
    newest_first = sorted(steps, key=steps.__getitem__, reverse=True)
    for name in newest_first:
        (near / name).mkdir(exist_ok=True)
    for begin in range(0, len(newest_first) if spec.complete else 0, MARKERS_AT_ONCE):
        some = newest_first[begin : begin + MARKERS_AT_ONCE]
        markers = yield from pipeline.stats([str(far / name / spec.complete) for name in some])
        for name, marker in zip(some, markers, strict=True):
            if marker is not None and stat.S_ISREG(marker.mode):
                (near / name / spec.complete).touch()
                return
            (near / name / spec.complete).unlink(missing_ok=True)


def _write(path: Path, data: bytes, mtime: int) -> None:
    """With the time that the file has over there: a new one is a beat of a .beat file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_bytes(data)
    os.utime(partial, (mtime, mtime))
    partial.replace(path)
