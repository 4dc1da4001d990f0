"""Many SFTP requests under way at once: what is asked of a thousand files takes as many round trips as what is asked of one.

A plan is a generator: it yields requests and is sent their answers, an error among them being a value. All plans of a
look go in step, so that each round trip carries a request of each. paramiko's own calls (3.4 to 5.1) wait for one answer at
a time; of it are used here the connection, the packets and `_async_request`, on which its prefetching stands.
"""

import errno
import os
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import paramiko

# Of answers and requests that are under way: the window of the channel has 2 MiB, and must not fill on both sides.
UNDER_WAY_BYTES = 1 << 20
SMALL_BYTES = 512  # a request, with the answer to one that asks for no data
MAX_AHEAD = 32
LISTING_BYTES = 40_000  # NAMES_A_PACKET names of 255 bytes, with what `ls -l` says of them
# An account may often have no more than 1,024 files open, and other sessions have some.
MAX_HANDLES = 256
CHUNK = 32 << 10  # what every server must be able to give at once (draft-ietf-secsh-filexfer-02, 3)
NAMES_A_PACKET = 100  # OpenSSH's
MAX_ENTRIES = 20_000

Request = tuple[Any, ...]
Result = TypeVar("Result")
Plan = Generator[list[Request], list[Any], Result]


@dataclass(frozen=True, slots=True)
class Entry:
    """Of a folder, links not followed. `size_bytes` and `mtime` (whole seconds) are the server's."""

    name: str
    mode: int
    size_bytes: int
    mtime: int


@dataclass(slots=True)
class Pipeline:
    """`rounds`: round trips so far, as long as no more than UNDER_WAY_BYTES go at once."""

    sftp: "paramiko.SFTPClient"
    rounds: int = 0
    requests: int = 0
    handles: int = 0

    def together(self, plans: Sequence[Plan[None]]) -> list[OSError | None]:
        """Carry out all plans; of each the error that ended it. Raises: what the connection raises."""
        ended: list[OSError | None] = [None] * len(plans)
        wanted: dict[int, list[Request]] = {}
        answers: dict[int, list[Any] | None] = dict.fromkeys(range(len(plans)))
        while answers:
            for number, answer in answers.items():
                try:
                    wanted[number] = next(plans[number]) if answer is None else plans[number].send(answer)
                except StopIteration:
                    wanted.pop(number, None)
                except OSError as error:
                    wanted.pop(number, None)
                    ended[number] = error
            flat = iter(self._ask([request for requests in wanted.values() for request in requests]))
            answers = {number: [next(flat) for _ in requests] for number, requests in wanted.items()}
        return ended

    def _ask(self, requests: Sequence[Request]) -> list[Any]:
        self.rounds += bool(requests)
        self.requests += len(requests)
        answers = _Answers()
        numbers: list[int] = []
        for request in requests:
            cost = _cost(request)
            while answers.costs and sum(answers.costs.values()) + cost > UNDER_WAY_BYTES:
                self.sftp._read_response()
            numbers.append(self.sftp._async_request(answers, *request))
            answers.costs[numbers[-1]] = cost
        while len(answers.found) < len(numbers):
            self.sftp._read_response()
        return [_understood(*answers.found[number]) for number in numbers]

    # ---------------------------------------------------------------------------------------------- parts of a plan

    def listing(self, folder: str, expected: int = 0) -> Plan[list[Entry]]:
        """A folder that is not there has no entries. Raises: OSError."""
        from paramiko.sftp import CMD_OPENDIR, CMD_READDIR

        (handle,) = yield [(CMD_OPENDIR, os.fsencode(folder))]
        if isinstance(handle, FileNotFoundError):
            return []
        handle, found, ahead = _good(handle), [], 2 + expected // NAMES_A_PACKET
        while True:
            answers = yield [(CMD_READDIR, handle)] * ahead
            found += [entry for names in answers if not isinstance(names, EOFError) for entry in _good(names)]
            over = any(isinstance(names, EOFError) for names in answers)
            if over or len(found) > MAX_ENTRIES:
                self._close(handle)
            if len(found) > MAX_ENTRIES:
                raise OSError(0, f"more than {MAX_ENTRIES} entries in {folder}")
            if over:
                return found
            ahead = min(2 * ahead, MAX_AHEAD)

    def stats(self, paths: Sequence[str]) -> Plan[list[Entry | None]]:
        """Links are followed; None: not there. Raises: OSError."""
        from paramiko.sftp import CMD_STAT

        answers = yield [(CMD_STAT, os.fsencode(path)) for path in paths]
        gone = (FileNotFoundError, NotADirectoryError)
        return [None if isinstance(answer, gone) else _good(answer) for answer in answers]

    def reading(self, parts: Sequence[tuple[str, int, int]]) -> Plan[list[bytes | None]]:
        """Of each (path, start, length) what is there, less where the file ends before; None: not there (any more).

        Raises: OSError.
        """
        found: list[bytes | None] = []
        while len(found) < len(parts):
            room = max(1, MAX_HANDLES - self.handles)  # one is always had, or nobody would come to an end
            some = parts[len(found) : len(found) + room]
            self.handles += len(some)
            found += yield from self._reading(some)
            self.handles -= len(some)
        return found

    def _reading(self, parts: Sequence[tuple[str, int, int]]) -> Plan[list[bytes | None]]:
        from paramiko import SFTPAttributes
        from paramiko.sftp import CMD_OPEN, CMD_READ, SFTP_FLAG_READ, int64

        opened = yield [(CMD_OPEN, os.fsencode(path), SFTP_FLAG_READ, SFTPAttributes()) for path, _, _ in parts]
        chunks: list[tuple[int, Request]] = []
        for index, (handle, (_, start, length)) in enumerate(zip(opened, parts, strict=True)):
            if not isinstance(handle, FileNotFoundError):
                for at in range(start, start + length, CHUNK):
                    size = min(CHUNK, start + length - at)
                    chunks.append((index, (CMD_READ, _good(handle), int64(at), size)))
        answers = yield [request for _, request in chunks]
        for handle in opened:
            if isinstance(handle, bytes):
                self._close(handle)
        data = [None if isinstance(handle, FileNotFoundError) else bytearray() for handle in opened]
        short: set[int] = set()
        for (index, request), answer in zip(chunks, answers, strict=True):
            part, room = b"" if isinstance(answer, EOFError) else _good(answer), data[index]
            if room is not None and index not in short:
                room += part
            if len(part) < request[3]:  # what comes after a gap belongs elsewhere
                short.add(index)
        return [None if room is None else bytes(room) for room in data]

    def _close(self, handle: bytes) -> None:
        """Nobody waits for the answer: it is dropped when it is met."""
        from paramiko.sftp import CMD_CLOSE

        self.requests += 1
        self.sftp._async_request(type(None), CMD_CLOSE, handle)


@dataclass
class _Answers:
    """Without slots: paramiko keeps weak references to who waits."""

    found: dict[int, tuple[int, Any]] = field(default_factory=dict)
    costs: dict[int, int] = field(default_factory=dict)
    """Of those that have not come, in bytes."""

    def _async_response(self, kind: int, message: Any, number: int) -> None:
        self.found[number] = (kind, message)
        self.costs.pop(number, None)


def _cost(request: Request) -> int:
    """Bytes that it and its answer will take on the way, at most."""
    from paramiko.sftp import CMD_READ, CMD_READDIR

    if request[0] == CMD_READ:
        return SMALL_BYTES + int(request[3])
    return LISTING_BYTES if request[0] == CMD_READDIR else SMALL_BYTES


def _good(answer: Any) -> Any:
    if isinstance(answer, Exception):
        raise answer
    return answer


def _understood(kind: int, message: Any) -> Any:
    """A handle, bytes, entries, an entry; or the error that it is."""
    from paramiko import SFTPAttributes, sftp

    if kind == sftp.CMD_STATUS:
        code, text = message.get_int(), message.get_string().decode(errors="replace")
        if code == sftp.SFTP_EOF:
            return EOFError()
        number = {sftp.SFTP_NO_SUCH_FILE: errno.ENOENT, sftp.SFTP_PERMISSION_DENIED: errno.EACCES}.get(code, 0)
        return OSError(number, os.strerror(number) if number else text or f"status {code}")
    if kind in {sftp.CMD_HANDLE, sftp.CMD_DATA}:
        return message.get_string()
    if kind == sftp.CMD_ATTRS:
        return _entry("", SFTPAttributes._from_msg(message))
    if kind == sftp.CMD_NAME:
        entries = []
        for _ in range(message.get_int()):
            name = os.fsdecode(message.get_string())
            message.get_string()  # as `ls -l` would show it
            entries.append(_entry(name, SFTPAttributes._from_msg(message)))
        return entries
    return OSError(0, f"an answer of kind {kind}")


def _entry(name: str, told: "paramiko.SFTPAttributes") -> Entry:
    return Entry(name, told.st_mode or 0, told.st_size or 0, int(told.st_mtime or 0))
