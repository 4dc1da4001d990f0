"""Records in, tables out. Pure.

A sheet has two forms. In a pipe each row is one aligned line with every column in full, so that grep and awk work. On a
terminal a row shows its short columns, cut to the width, and under them its notes, wrapped: what a tired reader needs
fits 80 columns.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from krea_runner.model import DecisionKind, Incident, JobRecord, RunState
from krea_runner.report.status import RunView, source_words
from krea_runner.report.words import ago, local_offset, local_time, one_line, phases, reference, seconds, utc_time

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

GAP = "  "
INDENT = 4
NARROWEST = 6


@dataclass(frozen=True, slots=True)
class Column:
    title: str
    right: bool = False
    short: bool = False
    """Shown on a terminal."""
    terminal_title: str = ""
    """Where it is not the same as `title`."""


@dataclass(frozen=True, slots=True)
class Note:
    text: str
    style: str = "dim"


@dataclass(frozen=True, slots=True)
class Row:
    cells: tuple[str, ...]
    terminal: tuple[str, ...] = ()
    """The same cells where a terminal shows them otherwise (times); empty: as they are."""
    notes: tuple[Note, ...] = ()
    styles: tuple[tuple[str, str], ...] = ()
    """Column title and the style of its cell."""


@dataclass(frozen=True, slots=True)
class Sheet:
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    caption: str = ""


# ------------------------------------------------------------------------------------------------------ the two forms


def plain_lines(sheet: Sheet) -> list[str]:
    """Header, one line a row, the caption: nothing cut, no escape codes. A cell without a value is `-`."""
    rows = [[column.title for column in sheet.columns]]
    rows += [[one_line(cell) or "-" for cell in row.cells] for row in sheet.rows]
    lines = _aligned(sheet.columns, rows) if sheet.rows else []
    return lines + ([sheet.caption] if sheet.caption else [])


def terminal_sheet(sheet: Sheet, width: int) -> "RenderableType":
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    shown = [index for index, column in enumerate(sheet.columns) if column.short]
    columns = [sheet.columns[index] for index in shown]
    cells = [[column.terminal_title or column.title for column in columns]]
    for row in sheet.rows:
        source = row.terminal or row.cells
        cells.append([one_line(source[index]) or "-" for index in shown])
    widths = _fitted(cells, width)
    parts: list[RenderableType] = []
    if sheet.rows:
        parts.append(_terminal_line(columns, cells[0], widths, {}, default="bold"))
    for row, line in zip(sheet.rows, cells[1:], strict=True):
        parts.append(_terminal_line(columns, line, widths, dict(row.styles)))
        parts += [
            Padding(Text(one_line(note.text), style=note.style), (0, 0, 0, INDENT), expand=False) for note in row.notes
        ]
    if sheet.caption:
        parts.append(Text(one_line(sheet.caption), style="dim"))
    return Group(*parts)


def _terminal_line(
    columns: Sequence[Column], cells: Sequence[str], widths: Sequence[int], styles: dict[str, str], default: str = ""
) -> "Text":
    from rich.text import Text

    line = Text(no_wrap=True, overflow="ellipsis")
    for index, (column, cell, width) in enumerate(zip(columns, cells, widths, strict=True)):
        text = Text(cell, style=styles.get(column.title, default))
        text.truncate(width, overflow="ellipsis")
        text.align("right" if column.right else "left", width)
        line.append_text(text)
        if index < len(columns) - 1:
            line.append(GAP)
    return line


def _fitted(cells: Sequence[Sequence[str]], width: int) -> list[int]:
    """Column widths that fit `width`: the widest gives way first, down to NARROWEST."""
    widths = _widths(cells)
    while sum(widths) + len(GAP) * (len(widths) - 1) > width and max(widths) > NARROWEST:
        widths[widths.index(max(widths))] -= 1
    return widths


def _widths(cells: Sequence[Sequence[str]]) -> list[int]:
    from rich.cells import cell_len

    return [max(cell_len(cell) for cell in column) for column in zip(*cells, strict=True)]


def _aligned(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[str]:
    from rich.cells import cell_len

    widths = _widths(rows)

    def pad(column: Column, cell: str, width: int) -> str:
        space = " " * (width - cell_len(cell))
        return space + cell if column.right else cell + space

    return [
        GAP.join(pad(column, cell, width) for column, cell, width in zip(columns, row, widths, strict=True)).rstrip()
        for row in rows
    ]


# ---------------------------------------------------------------------------------------------------------- incidents

_DECISION_STYLE = {DecisionKind.HOLD: "yellow", DecisionKind.STOP: "magenta", DecisionKind.REQUEUE: "cyan"}
_INCIDENT_COLUMNS = (
    Column("run", short=True),
    Column("attempt"),
    Column("step", right=True, short=True),
    Column("symptom"),
    Column("cause", short=True),
    Column("node", short=True),
    Column("lost", right=True, short=True),
    Column("noticed", right=True, short=True),
    Column("resumed", right=True, short=True),
    Column("decision"),
    Column("why"),
    Column("what"),
)


def history_sheet(incidents: Sequence[Incident], *, now: float, caption: str = "") -> Sheet:
    """One row an incident, in the order given. `lost` counts steps since the newest whole checkpoint; `noticed` is the
    time from the last progress to the incident, `resumed` from there to the first step of the next attempt."""
    when = Column("when", short=True, terminal_title=f"when {local_offset(now)}")
    rows = tuple(_incident_row(incident, local_time(incident.noticed_at, now)) for incident in incidents)
    return Sheet((when, *_INCIDENT_COLUMNS), rows, caption)


def _incident_row(incident: Incident, when: str) -> Row:
    finding, decision = incident.finding, incident.decision
    cells = (
        utc_time(incident.noticed_at),
        incident.run_name,
        str(incident.attempt),
        _number(finding.step),
        finding.symptom.value,
        finding.known_cause,
        finding.blamed_node,
        _number(incident.lost_steps),
        seconds(incident.notice_s),
        seconds(incident.resume_s),
        decision.kind.value,
        decision.reason,
        finding.line,
    )
    notes = (
        Note(f"{finding.summary} (attempt {incident.attempt})", ""),
        *((Note(finding.why),) if finding.why else ()),
        Note(f"→ {decision.kind}: {decision.reason}", _DECISION_STYLE.get(decision.kind, "")),
    )
    return Row(cells=cells, terminal=(when, *cells[1:]), notes=notes)


def incident_line(incident: Incident, when: Callable[[float | None], str]) -> str:
    """The whole incident, for the block about one run."""
    finding, decision = incident.finding, incident.decision
    end = f"; stepping again after {seconds(incident.resume_s)}" if incident.resume_s is not None else ""
    return f"{when(incident.noticed_at)} {finding.line} → {decision.kind}: {decision.reason}{end}"


# --------------------------------------------------------------------------------------------------------------- runs

_RUN_STYLE = {RunState.HELD: "bold yellow", RunState.DONE: "green", RunState.STOPPED: "dim"}
_RUN_COLUMNS = (
    Column("run", short=True),
    Column("state", short=True),
    Column("job", short=True),
    Column("slurm", short=True),
    Column("reason"),
    Column("attempt", right=True, terminal_title="att", short=True),
    Column("nodes"),
    Column("step", right=True, short=True),
    Column("saved", right=True, short=True),
    Column("beat", right=True, short=True),
    Column("phase"),
    Column("restarts", right=True, short=True, terminal_title="used"),
    Column("notes"),
)


def status_sheet(views: Sequence[RunView], *, now: float, caption: str = "") -> Sheet:
    """One row a run. `saved` is the step of the newest whole checkpoint, `beat` how long no rank was seen to beat,
    `restarts` how much of the budget is used."""
    return Sheet(_RUN_COLUMNS, tuple(_run_row(view, now) for view in views), caption)


def _run_row(view: RunView, now: float) -> Row:
    run, snapshot = view.snapshot.run, view.snapshot
    job, newest = snapshot.job, snapshot.checkpoints.newest
    notes = run_notes(view, now, partial(local_time, now=now))
    cells = (
        run.name,
        run.state.value,
        run.job_id or "",
        "" if job is None else job.raw_state,
        "" if job is None or job.reason == "None" else job.reason,
        str(view.attempt_number) if view.attempt_number else "",
        view.nodes,
        _number(view.step),
        _number(newest.step if newest else None),
        seconds(view.beat_age_s),
        phases(beat.phase for beat in snapshot.heartbeats.ranks),
        f"{view.restarts_used}/{run.config.policy.max_restarts}",
        "; ".join(note.text for note in run_notes(view, now, utc_time)),
    )
    return Row(cells=cells, notes=tuple(notes), styles=(("state", _RUN_STYLE.get(run.state, "")),))


def run_notes(view: RunView, now: float, when: Callable[[float | None], str]) -> list[Note]:
    """What is to be said of a run beyond its numbers, the most urgent first."""
    run, snapshot = view.snapshot.run, view.snapshot
    notes = []
    if run.state is RunState.HELD:
        notes.append(Note(f"HELD: {run.state_reason}. To go on: krea-runner resume {reference(run)}", "bold yellow"))
    elif not run.state.is_supervised:
        notes.append(Note(f"{run.state_reason or run.state} ({ago(now - run.updated_at)})"))
    if view.judgement:
        notes.append(Note(view.judgement, "red" if view.is_failing else "yellow" if view.blind else ""))
    if view.action is not None:
        notes.append(
            Note(
                f"{view.action.kind.lower()} of job {view.action.job_id} under way: {view.action.stage.lower()}", "cyan"
            )
        )
    problems = [f"could not see: {problem}" for problem in snapshot.problems]
    notes += [Note(problem, "yellow") for problem in problems[:2]]
    if len(problems) > 2:
        notes.append(Note(f"… and {len(problems) - 2} more: krea-runner status {reference(run)}", "yellow"))
    if snapshot.checkpoints.incomplete:
        notes.append(Note(f"checkpoint not whole: {_some(snapshot.checkpoints.incomplete)}"))
    notes += [Note(f"warning: {one.text}", "yellow") for one in view.warned]
    if view.last_incident is not None:
        notes.append(Note(_last_incident(view.last_incident, when)))
    return notes


# Of what was collected before a hung step was killed (docs/reference/evidence.md), the lines that name ranks.
_LOOKED_AT = ("collected ", "stacks: ", "processes: ")


def _last_incident(incident: Incident, when: Callable[[float | None], str]) -> str:
    """Short enough for one line of a terminal."""
    finding = incident.finding
    where = f" on {finding.blamed_node}" if finding.blamed_node else ""
    step = f" at step {finding.step}" if finding.step is not None else ""
    why = f" ({finding.known_cause})" if finding.known_cause != finding.cause else ""
    return f"last incident {when(incident.noticed_at)}: {finding.symptom}{why}{where}{step} → {incident.decision.kind}"


def run_block(
    view: RunView, *, now: float, when: Callable[[float | None], str], saving: Sequence[tuple[str, str, str]] = ()
) -> list[tuple[str, str, str]]:
    """Label, text and style of the lines that say all about one run; without a label a line continues the last. `saving`:
    lines about how it saves."""
    run, snapshot = view.snapshot.run, view.snapshot
    job, checkpoints = snapshot.job, snapshot.checkpoints
    policy = run.config.policy
    lines = [("run", f"{run.name}  {run.state}", _RUN_STYLE.get(run.state, "bold"))]
    if run.state is RunState.HELD:
        lines.append(("", f"held: {run.state_reason}", "yellow"))
        lines.append(("", f"to go on: krea-runner resume {reference(run)}", "yellow"))
    elif run.state_reason:
        lines.append(("", f"{run.state_reason} ({ago(now - run.updated_at)})", ""))
    where = f" on {view.nodes}" if view.nodes else ""
    lines.append(("job", f"{run.job_id or 'none yet'} ({run.config.endpoint}){where}", ""))
    if job is not None:
        lines.append(("", _job_words(job, now, when), ""))
    if view.attempt_number:
        lines.append(("attempt", f"{view.attempt_number} ({snapshot.attempt.key if snapshot.attempt else '-'})", ""))
    if view.judgement:
        lines.append(("judged", view.judgement, "red" if view.is_failing else "yellow" if view.blind else ""))
    phase = phases(beat.phase for beat in snapshot.heartbeats.ranks)
    beat = f", phase {phase or '-'}, last beat {_beat(view)}" if job is not None and job.state.is_live else ""
    lines.append(("progress", f"step {_number(view.step)}{beat}", ""))
    sources = snapshot.watch.sources if snapshot.watch is not None and job is not None and job.state.is_live else ()
    lines += [("", source_words(one, snapshot.mono), "yellow" if one.unseen else "") for one in sources]
    newest = checkpoints.newest
    lines.append(("saved", f"step {newest.step}, {newest.path}" if newest else "no whole checkpoint", ""))
    if checkpoints.incomplete:
        lines.append(("", f"not whole: {_some(checkpoints.incomplete)}", "yellow"))
    lines += saving
    lines += [("unseen" if index == 0 else "", text, "yellow") for index, text in enumerate(snapshot.problems)]
    used = f"{view.restarts_used} of {policy.max_restarts} in {seconds(policy.window_s)}"
    lines.append(("restarts", used, ""))
    if view.last_incident is not None:
        lines.append(("incident", incident_line(view.last_incident, when), ""))
        lines += [("", line, "") for line in view.last_incident.finding.evidence if line.startswith(_LOOKED_AT)]
    if view.action is not None:
        action = view.action
        detail = f": {action.detail}" if action.detail else ""
        lines.append(("action", f"{action.kind.lower()} of job {action.job_id} {action.stage.lower()}{detail}", "cyan"))
    lines.append(("folder", str(run.config.run_dir), ""))
    return lines


def _job_words(job: JobRecord, now: float, when: Callable[[float | None], str]) -> str:
    words = job.raw_state + (f" ({job.reason})" if job.reason not in {"", "None"} else "")
    if job.state.is_queued and job.started_at is not None and job.started_at > now:
        return f"{words}, starts at {when(job.started_at)}"
    if job.state.is_live and job.started_at is not None:
        return f"{words} for {seconds(max(0.0, now - job.started_at))}"
    if job.state.is_ended and job.ended_at is not None:
        return f"{words} {ago(now - job.ended_at)}"
    return words


def _beat(view: RunView) -> str:
    if view.beat_age_s is not None:
        return ago(view.beat_age_s)
    return "not yet known" if view.snapshot.heartbeats.ranks else "none"


def _some(names: Sequence[str], room: int = 3) -> str:
    return ", ".join(names[:room]) + (f" and {len(names) - room} more" if len(names) > room else "")


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)
