"""Checkpoints as tables and documents. Pure."""

from collections.abc import Sequence
from typing import Any

from krea_runner.observe.checkpoints.examine import Examined, Listed, State
from krea_runner.report.tables import Column, Note, Row, Sheet
from krea_runner.report.words import ago, one_line, seconds, utc, utc_time

_STYLE = {
    State.WHOLE: "green", State.IN_PROGRESS: "cyan", State.UNFINISHED: "yellow", State.BROKEN: "bold red",
    State.UNSEEN: "yellow",
}  # fmt: skip
_COLUMNS = (
    Column("STEP", right=True, short=True),
    Column("NAME", short=True),
    Column("FORMAT", short=True),
    Column("STATE", short=True),
    Column("SIZE", right=True, short=True),
    Column("FILES", right=True),
    Column("WRITTEN", short=True),
    Column("TOOK", right=True, short=True),
    Column("WHY"),
)


def size_words(count: float) -> str:
    """`512 B`, `1.5 GB`: powers of ten, as disks and file systems are sold."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def took_s(one: Examined) -> float | None:
    """From the first file's end to the last one's: less than the save took, and unknown for one file."""
    if one.files < 2 or one.written_from is None or one.written_to is None:
        return None
    return one.written_to - one.written_from


def checkpoint_sheet(listed: Listed, *, now: float) -> Sheet:
    rows = []
    for one in listed.found:
        step, files = "" if one.step is None else str(one.step), str(one.files)
        why = "; ".join((*one.whys, *one.notes))
        cells = (
            step, one.name, one.format, str(one.state), size_words(one.size_bytes), files, utc_time(one.written_to),
            seconds(took_s(one)), why,
        )  # fmt: skip
        age = "-" if one.written_to is None else ago(max(0.0, now - one.written_to))
        notes = tuple(Note(text, "dim" if one.state is State.WHOLE else "") for text in (*one.whys, *one.notes))
        rows.append(Row(cells, (*cells[:6], age, *cells[7:]), notes=notes, styles=(("STATE", _STYLE[one.state]),)))
    return Sheet(_COLUMNS, tuple(rows), caption=caption(listed))


def caption(listed: Listed) -> str:
    counts = [(state, sum(one.state is state for one in listed.found)) for state in State]
    said = ", ".join(f"{count} {state}" for state, count in counts if count) or "no checkpoints"
    more = f"; {listed.left_out} older not looked at (--all)" if listed.left_out else ""
    blind = f"could not see: {listed.could_not_see}" if listed.could_not_see else said
    return one_line(f"{listed.directory}: {blind}{more}")


def checkpoint_document(one: Examined) -> dict[str, Any]:
    return {
        "name": one.name,
        "path": str(one.path),
        "format": one.format,
        "step": one.step,
        "state": one.state,
        "whys": list(one.whys),
        "notes": list(one.notes),
        "size_bytes": one.size_bytes,
        "files": one.files,
        "written_from": utc(one.written_from),
        "written_to": utc(one.written_to),
    }


def listed_document(listed: Listed) -> dict[str, Any]:
    return {
        "directory": str(listed.directory),
        "could_not_see": listed.could_not_see or None,
        "left_out": listed.left_out,
        "checkpoints": [checkpoint_document(one) for one in listed.found],
    }


def newest_whole(found: Sequence[Examined]) -> Examined | None:
    whole = [one for one in found if one.state is State.WHOLE and one.step is not None]
    return max(whole, key=lambda one: (one.step or 0, one.written_to or 0.0), default=None)
