"""krea-runner status"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from krea_runner.history.store import History
    from krea_runner.history.ticks import TickRecord
    from krea_runner.model import Attempt, Incident, JobRecord, Run
    from krea_runner.report.status import RunView

CANNOT_SEE = 75
ENDED_SHOWN_S = 86400.0  # a run that ended within a day is still of interest


def status(
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="Name of one run, or its id.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON document.")] = False,
    show_all: Annotated[bool, typer.Option("--all", "-a", help="Also runs that ended more than a day ago.")] = False,
) -> None:
    """Show where your runs are.

    And whether they move, and what was last done about them. Changes nothing.

    Exit code 75: the scheduler could not be asked; what is known without it is shown.

    Example: krea-runner status
    """
    from krea_runner.cli import context
    from krea_runner.cli.output import print_json, print_sheet
    from krea_runner.clock import SystemClock
    from krea_runner.errors import NotFound
    from krea_runner.report.saving import saving_document
    from krea_runner.report.tables import status_sheet
    from krea_runner.supervise.saving import saves_of

    history, user, clock = context.history_if_any(), context.current_user(), SystemClock()
    if history is None and run is not None:
        raise NotFound(f"no run is called {run!r}: nothing was ever submitted", hint="krea-runner submit RUN.TOML")
    if history is None:
        looked = _Looked([], unasked=())
    elif run is not None:
        looked = look(history, [history.find_run(run, user=user)], clock)
    else:
        runs = history.list_runs(user=user)
        shown = runs if show_all else _of_interest(runs, clock.wall())
        looked = look(history, sorted(shown, key=_urgency), clock)
    from krea_runner.history.ticks import last_ticks

    tick = next((tick for tick in last_ticks(history) if tick.user == user), None) if history else None
    now = clock.wall()
    caption = supervisor_line(tick, now)
    if as_json:
        print_json(
            {
                "runs": [
                    view_document(view)
                    | saving_document(saves_of(view.snapshot) if run is not None else None, view.warned)
                    for view in looked.views
                ],
                "could_not_ask": list(looked.unasked),
                "supervisor": None if tick is None else _tick_document(tick, now),
            }
        )
    elif run is not None:
        _print_block(looked.views[0], now, caption)
    elif looked.views:
        print_sheet(status_sheet(looked.views, now=now, caption=caption))
    else:
        hint = "krea-runner submit RUN.TOML" if history is None or show_all else "older ones: krea-runner status --all"
        typer.echo(f"no runs ({hint})")
    if looked.unasked:
        raise typer.Exit(CANNOT_SEE)


# ---------------------------------------------------------------------------------------------------------- gathering


@dataclass(frozen=True, slots=True)
class _Looked:
    views: list["RunView"]
    unasked: Sequence[str]
    """Why a scheduler could not be asked, one line each."""


def look(history: "History", runs: Sequence["Run"], clock: Any) -> _Looked:
    """One look at each run: one question a kind of scheduler, the files of each run, and the history."""
    from krea_runner.cli import context
    from krea_runner.errors import SchedulerError
    from krea_runner.transport.mirror import looked_at_together

    jobs: dict[str, JobRecord] = {}
    unasked: dict[str, str] = {}
    asked = [run for run in runs if run.job_id is not None and not _is_over(run)]
    for kind in sorted({run.config.endpoint for run in asked}):
        ids = [run.job_id for run in asked if run.config.endpoint == kind and run.job_id is not None]
        try:
            jobs |= {f"{kind} {job_id}": job for job_id, job in context.scheduler(kind).jobs(ids).items()}
        except SchedulerError as error:
            unasked[kind] = f"could not see: {error}"
    incidents: dict[int, list[Incident]] = {}
    for incident in history.incidents():
        incidents.setdefault(incident.run_id, []).append(incident)
    jobs_of = {run.run_id: jobs.get(f"{run.config.endpoint} {run.job_id}") for run in runs}
    attempts = {run.run_id: _present_attempt(history, run, jobs_of[run.run_id], clock) for run in runs}
    keys = {run_id: attempt.key if attempt else None for run_id, attempt in attempts.items()}
    with looked_at_together([(run.config, keys[run.run_id]) for run in runs]):
        views = [
            _view(
                history,
                run,
                jobs_of[run.run_id],
                attempts[run.run_id],
                "" if _is_over(run) else unasked.get(run.config.endpoint, ""),
                incidents.get(run.run_id, []),
                clock,
            )
            for run in runs
        ]
    return _Looked(views, tuple(unasked.values()))


def _present_attempt(history: "History", run: "Run", job: "JobRecord | None", clock: Any) -> "Attempt | None":
    from krea_runner.model import Attempt, AttemptKey

    if job is None:
        return history.latest_attempt(run.run_id)
    key = AttemptKey(job.job_id, job.restart_count)
    unseen = Attempt(0, run.run_id, key, clock.wall())  # the supervisor has not looked since it started
    return next((known for known in history.attempts(run.run_id) if known.key == key), unseen)


def _view(
    history: "History",
    run: "Run",
    job: "JobRecord | None",
    attempt: "Attempt | None",
    blind: str,
    incidents: Sequence["Incident"],
    clock: Any,
) -> "RunView":
    from krea_runner.errors import FilesUnavailable
    from krea_runner.history.warnings import list_warnings
    from krea_runner.model import Snapshot
    from krea_runner.observe.snapshot import observe
    from krea_runner.report.status import view_run

    attempts = history.attempts(run.run_id)
    memory = history.watch(attempt.attempt_id) if attempt is not None and attempt.attempt_id else None
    try:
        snapshot = replace(observe(run, job, attempt, memory, clock), blind=blind)
    except FilesUnavailable as error:
        why = blind or f"could not see: {error}"
        snapshot = Snapshot(run=run, wall_at=clock.wall(), mono=clock.mono(), job=job, attempt=attempt, blind=why)
    view = view_run(
        snapshot,
        memory,
        attempts=attempts,
        incidents=incidents,
        action=history.open_action(run.run_id),
        epoch_id=clock.epoch_id(),
    )
    return replace(view, warned=tuple(list_warnings(history, run.run_id, open_only=True)))


def _of_interest(runs: Sequence["Run"], now: float) -> list["Run"]:
    return [run for run in runs if not _is_over(run) or now - run.updated_at < ENDED_SHOWN_S]


def _urgency(run: "Run") -> int:
    """What needs a person comes last, next to the prompt."""
    from krea_runner.model import RunState

    return 2 if run.state is RunState.HELD else 0 if _is_over(run) else 1


def _is_over(run: "Run") -> bool:
    from krea_runner.model import RunState

    return run.state in {RunState.DONE, RunState.STOPPED}


# ----------------------------------------------------------------------------------------------------------- printing


def supervisor_line(tick: "TickRecord | None", now: float) -> str:
    from krea_runner.report.words import ago, one_line

    if tick is None:
        return "no supervisor has run: krea-runner supervise --every 10s"
    line = f"supervisor last looked {ago(now - tick.at)} on {tick.host}"
    return line + (f", and could not see: {one_line(tick.blind)}" if tick.blind else "")


def _print_block(view: "RunView", now: float, caption: str) -> None:
    from krea_runner.report.saving import saving_lines
    from krea_runner.report.tables import run_block
    from krea_runner.report.words import local_time, one_line, utc_time
    from krea_runner.supervise.saving import saves_of

    terminal = sys.stdout.isatty()
    when = partial(local_time, now=now) if terminal else utc_time
    saving = saving_lines(saves_of(view.snapshot), view.warned, now)
    lines = [
        *run_block(view, now=now, when=when, saving=saving),
        ("supervisor", caption.removeprefix("supervisor "), ""),
    ]
    width = max(len(label) for label, _, _ in lines)
    if not terminal:
        typer.echo("\n".join(f"{label:{width}}  {one_line(text)}" for label, text, _ in lines))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    for label, text, style in lines:
        grid.add_row(Text(label, style="dim"), Text(one_line(text), style=style, overflow="fold"))
    Console(highlight=False).print(grid)


def view_document(view: "RunView") -> dict[str, Any]:
    from krea_runner.cli.history import incident_document
    from krea_runner.report.words import utc

    snapshot, run = view.snapshot, view.snapshot.run
    job, attempt, checkpoints = snapshot.job, snapshot.attempt, snapshot.checkpoints
    times = ("submitted_at", "started_at", "ended_at", "created_at", "updated_at")

    def document(record: Any) -> dict[str, Any]:
        return {key: utc(value) if key in times else value for key, value in asdict(record).items()}

    return {
        "run_id": run.run_id,
        "name": run.name,
        "user": run.user,
        "state": run.state,
        "state_reason": run.state_reason,
        "created_at": utc(run.created_at),
        "updated_at": utc(run.updated_at),
        "run_dir": str(run.config.run_dir),
        "scheduler": run.config.scheduler,
        "ssh_host": run.config.ssh_host or None,
        "job_id": run.job_id,
        "job": None if job is None else document(job),
        "could_not_see": [*([snapshot.blind] if snapshot.blind else []), *snapshot.problems],
        "attempt": None if attempt is None else str(attempt.key),
        "attempt_number": view.attempt_number,
        "nodelist": view.nodes,
        "step": view.step,
        "last_beat_age_s": view.beat_age_s,
        "ranks": [
            {"rank": beat.rank, "node": beat.node, "step": beat.step, "phase": beat.phase}
            for beat in snapshot.heartbeats.ranks
        ],
        "progress": [
            {
                "source": source.name,
                "step": source.step,
                "moved_age_s": None if source.moved_mono is None else round(snapshot.mono - source.moved_mono, 3),
                "could_not_see": source.unseen or None,
            }
            for source in (snapshot.watch.sources if snapshot.watch else ())
        ],
        "checkpoint_step": checkpoints.newest.step if checkpoints.newest else None,
        "checkpoint": str(checkpoints.newest.path) if checkpoints.newest else None,
        "checkpoints_incomplete": list(checkpoints.incomplete),
        "restarts_used": view.restarts_used,
        "restarts_max": run.config.policy.max_restarts,
        "restarts_window_s": run.config.policy.window_s,
        "judgement": view.judgement,
        "is_failing": view.is_failing,
        "last_incident": None if view.last_incident is None else incident_document(view.last_incident),
        "open_action": None if view.action is None else document(view.action),
    }


def _tick_document(tick: "TickRecord", now: float) -> dict[str, Any]:
    from krea_runner.report.words import utc

    return {"host": tick.host, "at": utc(tick.at), "age_s": round(now - tick.at, 3), "could_not_see": tick.blind}
