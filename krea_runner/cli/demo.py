"""krea-runner demo"""

import contextlib
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from krea_runner.errors import KreaRunnerError

if TYPE_CHECKING:
    from krea_runner.demo.play import Event, Play

_STYLE = {"FAULT": "bold red", "notice": "yellow", "decide": "cyan", "act": "cyan", "resume": "green", "end": "green"}


def demo(
    keep: Annotated[bool, typer.Option("--keep", help="Leave the files of the demo behind and say where.")] = False,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="A new or empty directory for them; kept.", show_default=False)
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Which rank is hit when.", show_default="random")] = None,
) -> None:
    """See it work on this machine, in half a minute.

    A small training run survives a frozen and a killed rank.

    Two nodes with two ranks each really train a small model. One rank is frozen, later one is killed, both from
    outside; the supervisor has to notice by itself. At the end the weights are compared with those of a run that
    nobody disturbed.

    Exit code 0: everything held.

    Example: krea-runner demo --seed 7 --keep
    """
    from krea_runner.cli import context
    from krea_runner.cli.output import print_sheet
    from krea_runner.clock import SystemClock
    from krea_runner.demo.play import perform, write_play
    from krea_runner.report.tables import history_sheet

    clock = SystemClock()
    seed = secrets.randbelow(10_000) if seed is None else seed
    with _folder(directory, keep) as folder:
        play = write_play(folder, seed)
        typer.echo(f"seed {seed}: the same again with --seed {seed}")
        show = _on_terminal if sys.stdout.isatty() else _in_pipe
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.default_int_handler)  # whatever ends the demo ends its jobs
        try:
            with contextlib.closing(perform(play, user=context.current_user(), clock=clock)) as plays:
                show(plays)
        except KeyboardInterrupt:
            typer.echo("interrupted: all jobs of the demo are ended", err=True)
            raise typer.Exit(130) from None
        typer.echo()
        print_sheet(history_sheet(play.incidents, now=clock.wall()))
        typer.echo()
        held = _say_verdict(play)
    if not held:
        raise typer.Exit(1)


@contextlib.contextmanager
def _folder(directory: Path | None, keep: bool) -> Iterator[Path]:
    if directory is None:
        folder = Path(tempfile.mkdtemp(prefix="krea-runner-demo-"))
    else:
        folder = directory.absolute()
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise KreaRunnerError(f"{folder} is not empty", hint="name a directory that does not exist yet")
    try:
        yield folder
    finally:
        if keep or directory is not None:
            typer.echo(f"kept in {folder}; look around: KREA_RUNNER_STATE_DIR={folder}/state krea-runner status --all")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _say_verdict(play: "Play") -> bool:
    verdict = play.verdict
    if verdict is None:
        return False
    if verdict.digest is not None and verdict.digest == verdict.undisturbed:
        typer.echo(f"final weights: identical (sha256 {verdict.digest})")
    else:
        typer.echo(f"final weights: DIFFERENT (sha256 {verdict.digest}, undisturbed {verdict.undisturbed})")
    for problem in verdict.problems:
        typer.echo(f"FAILED: {problem}")
    return not verdict.problems


# ----------------------------------------------------------------------------------------------------------- showing


def _line(event: "Event") -> str:
    from krea_runner.report.words import one_line

    return f"{event.at_s:5.1f}s  {event.kind:6}  {one_line(event.text)}"


def _in_pipe(plays: Generator["Play", None, None]) -> None:
    shown = 0
    for play in plays:
        for event in play.events[shown:]:
            typer.echo(_line(event))
        sys.stdout.flush()
        shown = len(play.events)


def _on_terminal(plays: Generator["Play", None, None]) -> None:
    """Events scroll; the runs stay below them."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console, shown = Console(highlight=False), 0
    with Live(console=console, refresh_per_second=8, transient=True) as live:
        for play in plays:
            for event in play.events[shown:]:
                console.print(Text(_line(event), style=_STYLE.get(event.kind, "")))
            shown = len(play.events)
            live.update(_runs(play))


def _runs(play: "Play") -> Any:
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    from krea_runner.demo.play import STEPS

    table = Table.grid(padding=(0, 2))
    for scene in play.scenes:
        table.add_row(
            Text(scene.name, style="bold"),
            ProgressBar(total=STEPS, completed=scene.step, width=24),
            Text(f"step {scene.step:2}/{STEPS}"),
            Text(f"saved {scene.saved:2}"),
            Text(scene.attempt, style="dim"),
            Text(scene.state, style="green" if scene.state in {"RUNNING", "DONE"} else "yellow"),
        )
    return table
