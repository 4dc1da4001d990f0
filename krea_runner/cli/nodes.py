"""krea-runner nodes"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from krea_runner.errors import KreaRunnerError, MayNotDrain, NotFound, SchedulerError

if TYPE_CHECKING:
    from krea_runner.history.exclusions import Exclusion
    from krea_runner.model import Run
    from krea_runner.schedulers import NodeRecord, Scheduler

app = typer.Typer(rich_markup_mode=None)
FOR = "30d"
_TITLES = ("NODE", "STATE", "PARTITIONS", "HAS", "REASON", "EXCLUDED")
_IN_NOTES = frozenset({"PARTITIONS", "HAS"})

Nodes = Annotated[str, typer.Argument(metavar="NODE", help="A node, or several in Slurm's form: n[01-04,7].")]
OneRun = Annotated[str | None, typer.Option("--run", help="Name of the run, or #ID.", show_default=False)]
AllRuns = Annotated[bool, typer.Option("--all", help="For all of your runs.")]
Reason = Annotated[str, typer.Option("--reason", help="Why; shown to whoever asks.")]
For = Annotated[str, typer.Option("--for", metavar="TIME", help="How long, e.g. 12h or 2d.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done; change nothing.")]


def _known_kind(kind: str) -> str:
    if kind.partition("@")[0] not in {"slurm", "local"}:
        raise typer.BadParameter(f"{kind!r} is none of: slurm, local, slurm@HOST")
    return kind


Kind = Annotated[str, typer.Option("--scheduler", help="slurm, local, or slurm@HOST.", callback=_known_kind)]


@app.callback(invoke_without_command=True)
def nodes(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON document.")] = False,
    kind: Kind = "slurm",
) -> None:
    """Show the nodes of your runs; exclude, drain and resume nodes.

    The nodes on which your runs last ran and those that you have excluded: their state, its reason, your exclusions.

    Example: krea-runner nodes
    """
    if context.invoked_subcommand is not None:
        return
    from krea_runner.cli import context as opened
    from krea_runner.cli.output import print_json, print_sheet
    from krea_runner.history.exclusions import list_exclusions
    from krea_runner.report.tables import Column, Note, Row, Sheet

    history, user, now = opened.history_if_any(), opened.current_user(), _now()
    exclusions = [one for one in list_exclusions(history, user=user) if one.is_active(now)] if history else []
    names = dict.fromkeys([*(_used(history, user, kind) if history else []), *(one.node for one in exclusions)])
    found = opened.scheduler(kind).nodes(list(names)) if names else {}
    if as_json:
        print_json({"nodes": [_document(name, found.get(name), exclusions) for name in sorted(names)]})
        return
    if not names:
        typer.echo("no nodes: none of your runs has run yet")
        return
    rows = []
    for name in sorted(names):
        node = found.get(name)
        ours = "; ".join(f"{_scope(one)}: {one.reason}" for one in exclusions if one.node == name)
        state, partitions, has, why = _said_of(node)
        notes = (Note(f"{partitions}: {has}"),) if has else ()
        rows.append(Row((name, state, partitions, has, why, ours), notes=notes))
    columns = [Column(title, short=title not in _IN_NOTES) for title in _TITLES]
    print_sheet(Sheet(tuple(columns), tuple(rows)))


@app.command()
def exclude(
    node: Nodes, reason: Reason, run: OneRun = None, every: AllRuns = False, lasts: For = FOR, dry_run: DryRun = False
) -> None:
    """Keep a run, or all of yours, off a node from its next start on.

    Never so many that fewer nodes than the gang needs are left; what you exclude yourself in run.toml stays.

    Example: krea-runner nodes exclude n07 --run llm-7b --reason "Xid 79 twice" --for 2d
    """
    from krea_runner.cli import context
    from krea_runner.schedulers.nodelist import fold

    names, seconds = _names(node), _seconds(lasts)
    _check_reason(reason)
    if (run is None) == (not every):
        raise typer.BadParameter("which runs? give either --run NAME or --all")
    history, user = context.history(), context.current_user()
    found = None if run is None else history.find_run(run, user=user)
    text = f"{fold(names)} for {lasts} from " + ("all your runs" if found is None else repr(found.name))
    if found is not None:
        endpoints = {found.config.endpoint}
    else:
        endpoints = {run.config.endpoint for run in _live(history, user)} or {"slurm"}
    _check_known([context.scheduler(endpoint) for endpoint in sorted(endpoints)], names)
    if dry_run:
        typer.echo(f"would exclude {text}")
        return
    _exclude(names, None if found is None else found.run_id, reason, seconds)
    typer.echo(f"excluded {text}, from the next start on")


@app.command()
def include(node: Nodes, run: OneRun = None, dry_run: DryRun = False) -> None:
    """Take your exclusions of a node back.

    Example: krea-runner nodes include n07
    """
    from krea_runner.cli import context
    from krea_runner.history.exclusions import end_exclusions, list_exclusions
    from krea_runner.schedulers.nodelist import fold

    names, history, user = _names(node), context.history(), context.current_user()
    run_id = None if run is None else history.find_run(run, user=user).run_id
    active = [
        one
        for one in list_exclusions(history, user=user)
        if one.is_active(_now()) and one.node in names and run_id in {None, one.run_id}
    ]
    if not active:
        raise NotFound(f"{fold(names)} is not excluded", hint="see what is: krea-runner nodes")
    if not dry_run:
        end_exclusions(history, names, user=user, run_id=run_id, now=_now())
    typer.echo(f"{'would take' if dry_run else 'took'} back {len(active)} exclusion(s) of {fold(names)}")


@app.command()
def drain(node: Nodes, reason: Reason, kind: Kind = "slurm", dry_run: DryRun = False) -> None:
    """Let no new job of anybody start on a node. For Slurm's operators.

    A node that is out for another's reason is left alone. Who may not drain has the node excluded from all own runs.

    Example: krea-runner nodes drain n07 --reason "fails NCCL tests"
    """
    from krea_runner.cli import context
    from krea_runner.schedulers import refuse_others_drains
    from krea_runner.schedulers.nodelist import fold

    names, scheduler = _names(node), context.scheduler(kind)
    _check_reason(reason)
    if dry_run:
        refuse_others_drains(scheduler.nodes(names), names, f"draining {fold(names)}")
        typer.echo(f"would drain {fold(names)}, or where you may not, exclude it from all your runs for {FOR}")
        return
    try:
        scheduler.drain(names, reason)
    except MayNotDrain:
        _exclude(names, None, reason, _seconds(FOR))
        typer.echo(
            f"you may not drain {fold(names)}; excluded instead, from all your runs for {FOR}, from their next start on",
            err=True,
        )
        raise typer.Exit(SchedulerError.exit_code) from None
    typer.echo(f"drained {fold(names)}; undo it with: krea-runner nodes resume {fold(names)}")


@app.command()
def resume(node: Nodes, kind: Kind = "slurm", dry_run: DryRun = False) -> None:
    """Give a node back that krea-runner drained. For Slurm's operators.

    Example: krea-runner nodes resume n07
    """
    from krea_runner.cli import context
    from krea_runner.schedulers import refuse_others_drains
    from krea_runner.schedulers.nodelist import fold

    names, scheduler = _names(node), context.scheduler(kind)
    if dry_run:
        refuse_others_drains(scheduler.nodes(names), names, f"resuming {fold(names)}", lifting=True)
        typer.echo(f"would resume {fold(names)}")
        return
    scheduler.undrain(names)
    typer.echo(f"resumed {fold(names)}")


# ------------------------------------------------------------------------------------------------------------- inside


def _now() -> float:
    from krea_runner.clock import SystemClock

    return SystemClock().wall()


def _names(text: str) -> list[str]:
    from krea_runner.schedulers.nodelist import expand

    names = list(dict.fromkeys(expand(text)))
    if not names:
        raise KreaRunnerError("no node is named", hint="e.g. n07 or n[01-04]")
    return names


def _check_reason(text: str) -> None:
    if not text.strip():
        raise KreaRunnerError("no reason is given", hint='whoever finds the node out asks why: --reason "Xid 79 twice"')


def _seconds(text: str) -> float:
    from krea_runner.config.durations import parse_duration

    try:
        return parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--for") from None


def _check_known(schedulers: "Sequence[Scheduler]", names: Sequence[str]) -> None:
    known = {name for scheduler in schedulers for name in scheduler.nodes(names)}
    if unknown := [name for name in names if name not in known]:
        raise NotFound(f"there is no node {unknown[0]!r}", hint="the nodes: sinfo -N")


def _exclude(names: Sequence[str], run_id: int | None, reason: str, seconds: float) -> None:
    from krea_runner.cli import context
    from krea_runner.history.exclusions import add_exclusions
    from krea_runner.supervise.lease import own_holder

    now = _now()
    add_exclusions(
        context.history(), names, run_id=run_id, user=context.current_user(), reason=reason, who=own_holder(), now=now,
        expires_at=now + seconds,
    )  # fmt: skip


def _live(history: Any, user: str) -> "list[Run]":
    from krea_runner.model import RunState

    runs: list[Run] = history.list_runs(user=user, states=[RunState.SUBMITTING, RunState.ACTIVE, RunState.HELD])
    return runs


def _used(history: Any, user: str, kind: str) -> list[str]:
    """The nodes of the last attempt of each run that is not over."""
    from krea_runner.schedulers.nodelist import expand

    latest = [history.latest_attempt(run.run_id) for run in _live(history, user) if run.config.endpoint == kind]
    return [name for attempt in latest if attempt is not None for name in expand(attempt.nodelist)]


def _said_of(node: "NodeRecord | None") -> tuple[str, str, str, str]:
    """State, partitions, what it has, reason."""
    if node is None:
        return "unknown", "", "", ""
    state = f"{node.raw_state} ({node.reservation})" if node.reservation else node.raw_state
    return state, ",".join(node.partitions), " ".join(part for part in (node.gres, *node.features) if part), node.reason


def _scope(exclusion: "Exclusion") -> str:
    return "all runs" if exclusion.run_id is None else f"#{exclusion.run_id}"


def _document(name: str, node: "NodeRecord | None", exclusions: "Sequence[Exclusion]") -> dict[str, Any]:
    from dataclasses import asdict
    from datetime import UTC, datetime

    def when(at: float | None) -> str | None:
        return None if at is None else datetime.fromtimestamp(at, UTC).isoformat()

    record: dict[str, Any] = {"name": name, "raw_state": None} if node is None else asdict(node)
    ours = [asdict(one) for one in exclusions if one.node == name]
    for one in ours:
        one |= {key: when(one[key]) for key in ("created_at", "expires_at")}
    return {**record, "reason_at": when(record.get("reason_at")), "exclusions": ours}
