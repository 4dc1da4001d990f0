"""The files of one checkpoint: a bounded walk that follows no symbolic link, and the only way to open one of them.

A name that a checkpoint's own index gives is only ever looked up among what the walk found, never opened.
"""

import os
import stat
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from krea_runner.errors import KreaRunnerError

MOST_FILES = 200_000
MOST_DEPTH = 12
AT_ONCE = 16  # threads: a parallel file system answers stat calls side by side
FEW = 64  # names of a folder for which a pool is not worth its start


class CheckpointError(KreaRunnerError):
    """Something in a checkpoint is not what it should be; the text says what, without the file's name."""


@dataclass(frozen=True, slots=True)
class File:
    size_bytes: int
    mtime: float
    mtime_ns: int
    on_disk_bytes: int


@dataclass(slots=True)
class Tree:
    """`files` by their path below `root`, `/` between; of a checkpoint that is one file the only name is ''."""

    root: Path
    files: dict[str, File] = field(default_factory=dict)
    folders: set[str] = field(default_factory=set)
    links: set[str] = field(default_factory=set)
    """Symbolic links, FIFOs and devices: never followed, never opened."""
    unseen: list[str] = field(default_factory=list)
    """What could not be looked at, and why, one line each."""
    vanished: int = 0
    """Were listed and gone a moment later: somebody is deleting, renaming or writing."""
    truncated: bool = False

    @property
    def is_file(self) -> bool:
        return "" in self.files

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files.values())

    @property
    def written(self) -> tuple[float, float] | None:
        """When the first file was finished, and the last; the file server's clock."""
        times = [file.mtime for file in self.files.values()]
        return (min(times), max(times)) if times else None

    def top(self) -> set[str]:
        return {name.partition("/")[0] for name in self.files} | {name.partition("/")[0] for name in self.folders}

    @contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        """A file of the walk, read only. Raises: CheckpointError where it is gone, may not be read, or is no file any more."""
        try:
            descriptor = _open_below(self.root, name, os.O_RDONLY)
            with os.fdopen(descriptor, "rb", buffering=0) as file:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise CheckpointError("is no regular file any more")
                yield file
        except OSError as error:
            raise CheckpointError(f"could not be read: {error.strerror}") from error

    def read(self, name: str, most_bytes: int) -> bytes:
        """Raises: CheckpointError, also where it is larger."""
        if self.files[name].size_bytes > most_bytes:
            raise CheckpointError(f"has {self.files[name].size_bytes} bytes, more than {most_bytes} are not read")
        with self.open(name) as file:
            return read_at(file, 0, most_bytes)


def read_at(file: BinaryIO, offset: int, count: int) -> bytes:
    """Fewer bytes only at the end of the file."""
    parts, missing = [], count
    while missing > 0 and (part := os.pread(file.fileno(), min(missing, 1 << 24), offset + count - missing)):
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


def walk(root: Path) -> Tree:
    """Of a folder or of one file. What is not there any more gives an empty tree with `vanished`."""
    tree = Tree(root)
    try:
        told = os.stat(root, follow_symlinks=False)
    except FileNotFoundError:
        tree.vanished = 1
        return tree
    except OSError as error:
        tree.unseen.append(f"{error.strerror}")
        return tree
    if stat.S_ISREG(told.st_mode):
        tree.files[""] = _file(told)
    elif not stat.S_ISDIR(told.st_mode):
        tree.links.add("")
    else:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            _walk_folders(tree, pool)
    return tree


def _walk_folders(tree: Tree, pool: ThreadPoolExecutor) -> None:
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        if folder.count("/") + 1 > MOST_DEPTH or len(tree.files) + len(tree.links) >= MOST_FILES:
            tree.truncated = True
            continue
        try:
            descriptor = _open_below(tree.root, folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            tree.vanished += 1
            continue
        except OSError as error:
            tree.unseen.append(f"{folder or '.'}: {error.strerror}")
            continue
        try:
            waiting += _look_at_folder(tree, folder, descriptor, pool)
        except OSError as error:  # in the middle of it: a stale handle, a disk
            tree.unseen.append(f"{folder or '.'}: {error.strerror}")
        finally:
            os.close(descriptor)


def _look_at_folder(tree: Tree, folder: str, descriptor: int, pool: ThreadPoolExecutor) -> list[str]:
    """Its folders, still to be walked."""
    names: list[str] = []
    folders: list[str] = []
    room = MOST_FILES - len(tree.files) - len(tree.links)
    with os.scandir(descriptor) as entries:
        for entry in entries:
            path = f"{folder}/{entry.name}" if folder else entry.name
            if entry.is_dir(follow_symlinks=False):
                folders.append(path)
            elif len(names) < room:
                names.append(entry.name)
            else:
                tree.truncated = True
    tree.folders.update(folders)
    for name, told in zip(names, _stats(descriptor, names, pool), strict=True):
        path = f"{folder}/{name}" if folder else name
        if isinstance(told, FileNotFoundError):
            tree.vanished += 1
        elif isinstance(told, OSError):
            tree.unseen.append(f"{path}: {told.strerror}")
        elif stat.S_ISREG(told.st_mode):
            tree.files[path] = _file(told)
        else:
            tree.links.add(path)
    return folders


def _stats(descriptor: int, names: Sequence[str], pool: ThreadPoolExecutor) -> list[os.stat_result | OSError]:
    def one(name: str) -> os.stat_result | OSError:
        try:
            return os.stat(name, dir_fd=descriptor, follow_symlinks=False)
        except OSError as error:
            return error

    return list(map(one, names) if len(names) < FEW else pool.map(one, names))


def _file(told: os.stat_result) -> File:
    return File(told.st_size, told.st_mtime, told.st_mtime_ns, told.st_blocks * 512)


def _open_below(root: Path, name: str, flags: int) -> int:
    """`name` below `root`, no part of it a symbolic link. O_NONBLOCK: a FIFO put in its place must not block us."""
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    parts = name.split("/") if name else []
    if ".." in parts:
        raise OSError(0, "leads out of the checkpoint", name)
    if not parts:
        return os.open(root, flags)
    here = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for part in parts[:-1]:
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
            os.close(here)
            here = below
        return os.open(parts[-1], flags, dir_fd=here)
    finally:
        os.close(here)
