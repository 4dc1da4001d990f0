"""Log files as blocks of whole lines, in bounded memory: compressed or not, growing, a pipe, with lines of any length."""

import gzip
import lzma
import os
import stat
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import BinaryIO, cast

from krea_runner.errors import KreaRunnerError, NotFound

BLOCK_BYTES = 256 << 10  # larger ones cost a page fault a page; measured in docs/benchmarks.md
LINE_BYTES = 64 << 10  # what is kept of a longer line: its head, where the message is
ZSTD_STEP_BYTES = 512  # four bytes may unpack to 128 kB: of this, 16 MB at the most
LOG_SUFFIXES = (".log", ".out", ".err", ".txt", ".gz", ".zst", ".xz")


class LogUnreadable(KreaRunnerError):
    """A log that is there and cannot be read."""


@dataclass(frozen=True, slots=True)
class Block:
    """Whole lines, except that a line of more than LINE_BYTES lost its tail. `first_line` is 1-based."""

    data: bytes
    first_line: int


@dataclass(frozen=True, slots=True)
class Part:
    """Of a regular file the bytes from `begin` to `end` (None: its present size)."""

    name: str
    begin: int = 0
    end: int | None = None
    first_line: int | None = 1
    """Number of the line at `begin`. None: in the middle of a line nobody has counted; lines are numbered from the next one."""


def expand(paths: list[str]) -> list[str]:
    """Directories replaced by the logs in them, sorted. Raises NotFound for what is not there, or for an empty directory."""
    found: list[str] = []
    for name in paths:
        if name == "-":
            found.append(name)
            continue
        try:
            mode = os.stat(name).st_mode
        except (FileNotFoundError, NotADirectoryError) as error:
            raise NotFound(
                f"there is no log {name}", hint="krea-runner status  shows where a run's logs are"
            ) from error
        except (
            OSError,
            ValueError,
        ) as error:  # no permission for a folder above it, a loop of links, a NUL in the name
            raise LogUnreadable(f"cannot read {name}: {error}", hint="check the permissions") from error
        found += _logs_in(name) if stat.S_ISDIR(mode) else [name]
    return found


def _logs_in(folder: str) -> list[str]:
    problems: list[OSError] = []
    names = sorted(
        os.path.join(here, name)
        for here, _, names in os.walk(folder, onerror=problems.append)
        for name in names
        if name.endswith(LOG_SUFFIXES)
    )
    inside = [name for name in names if os.path.isfile(name)]
    if problems and not inside:
        raise LogUnreadable(f"cannot read {folder}: {problems[0]}", hint="check the permissions") from problems[0]
    if not inside:
        raise NotFound(f"{folder} holds no log", hint=f"logs end in {', '.join(LOG_SUFFIXES)}; or name the files")
    return inside


def blocks(source: str | Part) -> Iterator[Block]:
    """Of a regular file no more than it held when it was opened. Raises LogUnreadable; a compressed file that ends in the
    middle gives what could be unpacked, then raises."""
    part = source if isinstance(source, Part) else Part(source)
    name = part.name
    try:
        with closing(_open(name)) as stream:
            limit, until = _start_at(stream, part), _UntilBroken(stream)
            yield from _lines_of(until, limit, part.first_line)
            if until.error is not None:
                raise until.error
    except _broken() as error:
        raise LogUnreadable(
            f"cannot read {name}: {error}", hint="check the permissions, or whether it is cut off"
        ) from error


def _start_at(stream: BinaryIO, part: Part) -> int | None:
    """How many bytes there are to read, from where the stream is put."""
    size = _size_limit(stream)
    if size is None:
        return None
    if part.begin:
        stream.seek(part.begin)
    end = size if part.end is None else min(part.end, size)
    return max(0, end - part.begin)


class _UntilBroken:
    """A stream that ends where reading it fails: what came before is there to be judged."""

    def __init__(self, stream: BinaryIO) -> None:
        # One read of a decompressor may unpack in several steps, and an error in a later one would take all with it.
        is_packed = isinstance(stream, (gzip.GzipFile, lzma.LZMAFile))
        self._read: Callable[[int], bytes] = stream.read1 if is_packed else stream.read  # type: ignore[attr-defined]
        self.error: Exception | None = None

    def read(self, size: int) -> bytes:
        parts, left = list[bytes](), size
        try:
            while left > 0 and (part := self._read(left)):
                parts.append(part)
                left -= len(part)
        except _broken() as error:
            self.error = error
        return parts[0] if len(parts) == 1 else b"".join(parts)


def _broken() -> tuple[type[Exception], ...]:
    return (OSError, EOFError, lzma.LZMAError, zlib.error, ValueError, _zstd_error())


def _size_limit(stream: BinaryIO) -> int | None:
    if isinstance(stream, (gzip.GzipFile, lzma.LZMAFile)):
        return None
    try:
        status = os.fstat(stream.fileno())
    except (OSError, AttributeError):
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _open(name: str) -> BinaryIO:
    if name == "-":
        return sys.stdin.buffer
    if name.endswith(".gz"):
        return cast(BinaryIO, gzip.open(name, "rb"))
    if name.endswith(".xz"):
        return cast(BinaryIO, lzma.open(name, "rb"))
    if name.endswith(".zst"):
        return cast(BinaryIO, _ZstdFile(name))
    return cast(BinaryIO, open(name, "rb", buffering=0))


class _ZstdFile:
    """zstandard's own reader ends without a word where the file is cut off."""

    def __init__(self, name: str) -> None:
        import zstandard

        self._new_frame = zstandard.ZstdDecompressor().decompressobj
        self._frame: zstandard.ZstdDecompressionObj | None = None
        self._file = open(name, "rb")  # noqa: SIM115 - closed by close()
        self.close = self._file.close

    def read(self, _size: int) -> bytes:
        """Some bytes, possibly more than asked for; empty at the end. Raises EOFError in the middle of a frame."""
        while piece := self._file.read(ZSTD_STEP_BYTES):
            if unpacked := b"".join(self._unpack(piece)):
                return unpacked
        if self._frame is not None:
            raise EOFError("Compressed file ended before the end of its last frame")
        return b""

    def _unpack(self, piece: bytes) -> Iterator[bytes]:
        while piece:
            frame = self._frame = self._frame or self._new_frame()
            yield frame.decompress(piece)
            piece = frame.unused_data
            if frame.eof:
                self._frame = None


def _zstd_error() -> type[Exception]:
    if "zstandard" not in sys.modules:
        return EOFError
    import zstandard

    return zstandard.ZstdError


def newlines(data: bytes) -> int:
    """CPython 3.11's `bytes.count` of one character looks at every byte in turn; `replace` uses memchr: six times as fast."""
    return len(data) - len(data.replace(b"\n", b""))


def _lines_of(stream: _UntilBroken, limit: int | None, first_line: int | None) -> Iterator[Block]:
    rest, line, left = b"", 1 if first_line is None else first_line, limit
    skipping = False  # inside a line whose head was already given
    cut_off = first_line is None  # what comes before the first newline is the end of a line
    if left == 0:
        return
    while chunk := stream.read(BLOCK_BYTES if left is None else min(BLOCK_BYTES, left)):
        if left is not None:
            left -= len(chunk)
        if cut_off:
            cut = chunk.find(b"\n") + 1
            chunk, cut_off = (chunk[cut:], False) if cut else (b"", True)
        if skipping:
            cut = chunk.find(b"\n")
            if cut < 0:
                if left == 0:
                    break
                continue
            chunk, skipping = chunk[cut:], False
        end = chunk.rfind(b"\n") + 1
        if end:
            data, rest = (rest + chunk[:end] if rest else chunk[:end]), chunk[end:]
            yield Block(data, line)
            line += newlines(data)
        else:
            rest += chunk
        if len(rest) > LINE_BYTES:
            rest, skipping = rest[:LINE_BYTES], True
        if left == 0:
            break
    if rest:
        yield Block(rest, line)
