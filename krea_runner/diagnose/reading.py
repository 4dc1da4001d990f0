"""Log files as blocks of whole lines, in bounded memory: compressed or not, growing, a pipe, with lines of any length."""

import gzip
import lzma
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from krea_runner.errors import KreaRunnerError, NotFound

BLOCK_BYTES = 256 << 10  # larger ones cost a page fault a page; measured in docs/benchmarks.md
LINE_BYTES = 64 << 10  # what is kept of a longer line: its head, where the message is
LOG_SUFFIXES = (".log", ".out", ".err", ".txt", ".gz", ".zst", ".xz")


class LogUnreadable(KreaRunnerError):
    """A log that is there and cannot be read."""


@dataclass(frozen=True, slots=True)
class Block:
    """Whole lines, except that a line of more than LINE_BYTES lost its tail. `first_line` is 1-based."""

    data: bytes
    first_line: int


def expand(paths: list[str]) -> list[str]:
    """Directories replaced by the logs in them, sorted. Raises NotFound for what is not there, or for an empty directory."""
    found: list[str] = []
    for name in paths:
        path = Path(name)
        if name == "-":
            found.append(name)
        elif path.is_dir():
            inside = [
                str(item) for item in sorted(path.rglob("*")) if item.is_file() and item.name.endswith(LOG_SUFFIXES)
            ]
            if not inside:
                raise NotFound(f"{name} holds no log", hint=f"logs end in {', '.join(LOG_SUFFIXES)}; or name the files")
            found += inside
        elif not path.exists():
            raise NotFound(f"there is no log {name}", hint="krea-runner status  shows where a run's logs are")
        else:
            found.append(name)
    return found


def blocks(name: str) -> Iterator[Block]:
    """Of a regular file no more than it held when it was opened. Raises LogUnreadable; a compressed file that ends in the
    middle gives what could be unpacked, then raises."""
    try:
        with closing(_open(name)) as stream:
            yield from _lines_of(stream, _size_limit(stream))
    except (OSError, EOFError, lzma.LZMAError, ValueError, _zstd_error()) as error:
        raise LogUnreadable(
            f"cannot read {name}: {error}", hint="check the permissions, or whether it is cut off"
        ) from error


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
        import zstandard

        return cast(
            BinaryIO, zstandard.ZstdDecompressor().stream_reader(Path(name).open("rb"), read_across_frames=True)
        )
    return cast(BinaryIO, open(name, "rb", buffering=0))


def _zstd_error() -> type[Exception]:
    if "zstandard" not in sys.modules:
        return EOFError
    import zstandard

    return zstandard.ZstdError


def newlines(data: bytes) -> int:
    """CPython 3.11's `bytes.count` of one character looks at every byte in turn; `replace` uses memchr: six times as fast."""
    return len(data) - len(data.replace(b"\n", b""))


def _lines_of(stream: BinaryIO, limit: int | None) -> Iterator[Block]:
    rest, line, left = b"", 1, limit
    skipping = False  # inside a line whose head was already given
    while chunk := stream.read(BLOCK_BYTES if left is None else min(BLOCK_BYTES, left)):
        if left is not None:
            left -= len(chunk)
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
