"""One raw log line → who wrote it, when, and the message itself. Formats: torch 1.13 to 2.9, torchelastic, NCCL 2.14 to
2.30, Slurm's label mode, kernel log, loguru, Python logging; see docs/reference/signatures.md."""

import re
from dataclasses import dataclass
from datetime import UTC, datetime

TEXT_LIMIT = 4096  # characters of a line that are looked at; time-out and CUDA messages are shorter
_ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_BAR = re.compile(
    r"^.{0,200}?\d{1,3}%\|[^|]{0,300}\|[^\]]{0,200}\]"
)  # a tqdm bar that something else was printed behind
_LABEL = re.compile(r" {0,6}(\d{1,6}): ?")
_RANK = re.compile(r"\[rank(\d+)\]:\s?")
_GLOG = re.compile(
    r"\[?([EWIF])(?:(\d{1,2})(\d\d) (\d\d):(\d\d):(\d\d)(\.\d+)?)? ?(?:\d+ )?(?:[\w/.-]+\.(?:cpp|cc|cu|hpp|h|py):\d+\] )"
)
_PG = re.compile(r"\[(?:(PG [^\]]{1,80}?) )?Rank (\d+)\] {0,3}")
_COPY = re.compile(
    r"(?: {0,4}what\(\): {1,3}|(?:Process group|NCCL) watchdog thread terminated with exception: "
    r"|found async exception when checking for NCCL errors: |WorkNCCL\([^)]*\)(?:[^)]*\))? "
    r"raised the following async exception: )"
)
_NCCL = re.compile(
    r"(?:\[([\d-]{10} [\d:]{8})\] )?([\w.-]+):(\d+):\d+ \[(\d+)\] (?:\S+:\d+ )?(?=NCCL (?:WARN|INFO|ERROR|TRACE))"
)
_PYLOG = re.compile(
    r"\[?(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)[.,]?\d*\]?(?: \[\d+\])? ?"
    r"(?:\| ?(\w+) {0,8}\| ?\S+ ?[-–] |[\w.]+: \[(\w+)\] |- ?(\w+) ?- |: ([EWIF]) \S+\] |\[(\w+)\] )"
)
_LEVEL = re.compile(r"(ERROR|WARNING|CRITICAL|INFO):[\w.]+: ?")
_KERNEL = re.compile(
    r"(?:<\d+>)?(?:\[ *(?:(\d+\.\d+)|(\w{3} \w{3} +\d+ \d\d:\d\d:\d\d \d{4}))\] ?"
    r"|(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)\S* (?:([\w.-]+) kernel: )?"
    r"|(\w{3} +\d+ \d\d:\d\d:\d\d) ([\w.-]+) kernel: (?:\[ *\d+\.\d+\] )?)"
)
_CANCELLED = re.compile(r"CANCELLED AT (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)")
_ANY_TIME = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)|(\w{3} \w{3} +\d+ \d\d:\d\d:\d\d \d{4})")
_WARNINGS = {"WARNING", "WARN", "INFO", "DEBUG", "W", "I"}


@dataclass(slots=True)
class LogLine:
    text: str
    """The line without colours and progress bars."""
    message: str = ""
    label: int | None = None
    rank: int | None = None
    group: str = ""
    group_rank: int | None = None
    node: str = ""
    device: int | None = None
    pid: int | None = None
    mild: bool = False
    """The logger itself called it a warning or less."""
    at: float | None = None
    uptime_s: float | None = None
    """Kernel log in seconds since boot: comparable only within its file."""


def clean(raw: bytes) -> str:
    text = raw[: TEXT_LIMIT * 4].decode("utf-8", "replace").replace("\x00", "")
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    if "\r" in text:
        text = text.rstrip("\r")
        text = text[text.rfind("\r") + 1 :]
    if "%|" in text:
        text = _BAR.sub("", text, count=1)
    return text[:TEXT_LIMIT]


def read_line(raw: bytes, year: int) -> LogLine:
    """`year` completes the formats that print none."""
    line = LogLine(clean(raw))
    rest = line.text
    if found := _LABEL.match(rest):
        line.label, rest = int(found[1]), rest[found.end() :]
        if "%|" in rest:
            rest = _BAR.sub("", rest, count=1)
    if found := _RANK.match(rest):
        line.rank, rest = int(found[1]), rest[found.end() :]
    if found := _KERNEL.match(rest):
        rest = _kernel(line, found, year, rest)
    for _ in range(4):  # copies of copies: what(): [PG 0 Rank 1] Process group watchdog ... : [Rank 1] Watchdog caught
        before = len(rest)
        if found := _GLOG.match(rest):
            line.mild |= found[1] in _WARNINGS
            if found[2]:
                line.at = _moment(year, int(found[2]), int(found[3]), found[4], found[5], found[6], found[7])
            rest = rest[found.end() :]
        if found := _PG.match(rest):
            line.group = found[1] or line.group
            line.group_rank, rest = int(found[2]), rest[found.end() :]
        if found := _COPY.match(rest):
            rest = rest[found.end() :]
        if len(rest) == before:
            break
    rest = _logger(line, rest)
    if line.at is None and (found := _CANCELLED.search(rest)):
        line.at = _iso(found[1])
    line.message = rest.lstrip() if line.mild or rest[:1] != " " else rest.lstrip(" ")
    return line


def _logger(line: LogLine, rest: str) -> str:
    if found := _NCCL.match(rest):
        if found[1]:
            line.at = _iso(found[1])
        line.node, line.pid, line.device = found[2], int(found[3]), int(found[4])
        return rest[found.end() :]
    if found := _PYLOG.match(rest):
        line.at = _iso(found[1])
        line.mild |= (found[2] or found[3] or found[4] or found[5] or found[6] or "").upper() in _WARNINGS
        rest = rest[found.end() :]
    if found := _LEVEL.match(rest):
        line.mild |= found[1] in _WARNINGS
        rest = rest[found.end() :]
    return rest


def _kernel(line: LogLine, found: re.Match[str], year: int, rest: str) -> str:
    if found[1]:
        line.uptime_s = float(found[1])
    elif found[2]:
        line.at = _parsed(found[2], "%a %b %d %H:%M:%S %Y")
    elif found[3]:
        line.at, line.node = _iso(found[3]), found[4] or ""
    else:
        line.at, line.node = _parsed(f"{year} {found[5]}", "%Y %b %d %H:%M:%S"), found[6]
    return rest[found.end() :]


def any_time(text: str) -> float | None:
    """The first full date in a line of any format; None if there is none."""
    found = _ANY_TIME.search(text)
    if not found:
        return None
    return _iso(f"{found[1]} {found[2]}") if found[1] else _parsed(found[3], "%a %b %d %H:%M:%S %Y")


def _moment(year: int, month: int, day: int, hour: str, minute: str, second: str, fraction: str | None) -> float | None:
    try:
        whole = datetime(year, month, day, int(hour), int(minute), int(second), tzinfo=UTC).timestamp()
    except ValueError:
        return None
    return whole + float(fraction or 0)


def _iso(text: str) -> float | None:
    return _parsed(text.replace("T", " "), "%Y-%m-%d %H:%M:%S")


def _parsed(text: str, form: str) -> float | None:
    try:
        return datetime.strptime(text, form).replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None
