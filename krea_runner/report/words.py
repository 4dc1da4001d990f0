"""How times, durations, names and ranks read. Pure: text out, harmless to a terminal."""

import shlex
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime

from krea_runner.model import Run


def utc(at: float | None) -> str | None:
    return None if at is None else datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")


def utc_time(at: float | None) -> str:
    """For pipes: whole seconds, sortable."""
    return "-" if at is None else f"{datetime.fromtimestamp(at, UTC):%Y-%m-%dT%H:%M:%SZ}"


def local_time(at: float | None, now: float) -> str:
    """For terminals: local time, without the date when that is today's."""
    if at is None:
        return "-"
    moment, today = datetime.fromtimestamp(at).astimezone(), datetime.fromtimestamp(now).astimezone().date()
    return f"{moment:%H:%M:%S}" if moment.date() == today else f"{moment:%m-%d %H:%M}"


def local_offset(at: float) -> str:
    """`+0100`: what local times are local to."""
    return f"{datetime.fromtimestamp(at).astimezone():%z}"


def seconds(value: float | None) -> str:
    """`4.2s`, `3m10s`, `2h05m`, `1d03h`; `-` when unknown."""
    if value is None:
        return "-"
    if value < 59.95:
        return f"{value:.1f}s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours < 24 else f"{hours // 24}d{hours % 24:02d}h"


def ago(value: float) -> str:
    """`just now`, `12 s ago`, `3 min ago`, `5 h ago`, `2 days ago`."""
    if value < 1:
        return "just now"
    for size, unit in ((172800, "days"), (7200, "h"), (120, "min")):
        if value >= size:
            return f"{value / {'days': 86400, 'h': 3600, 'min': 60}[unit]:.0f} {unit} ago"
    return f"{value:.0f} s ago"


def one_line(text: str) -> str:
    """`text` on one line without anything that moves a cursor: names, logs and reasons come from jobs."""
    return "".join(
        char if char.isprintable() else {"\n": "\\n", "\t": " ", "\r": "\\r"}.get(char, "?") for char in text
    )


def reference(run: Run) -> str:
    """What to type for a run: its name, quoted, or its id where the name cannot be typed."""
    typable = run.name.isprintable() and run.name.strip() == run.name != "" and not run.name.startswith("-")
    return shlex.quote(run.name) if typable else str(run.run_id)


def phases(names: Iterable[str]) -> str:
    """`step`, or `3 step, 1 checkpoint` when the ranks are not in the same phase."""
    counted = Counter(one_line(name) for name in names).most_common()
    if len(counted) == 1:
        return counted[0][0]
    return ", ".join(f"{count} {name}" for name, count in counted)
