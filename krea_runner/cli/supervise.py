"""krea-runner supervise"""

import gc
import sys
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from krea_runner.supervise.supervisor import TickReport

CANNOT_SEE = 75
# A tick at 16,384 ranks makes 50,000 records, none of them in a circle: at Python's own 700 a fifth of it goes into looking.
COLLECT_AFTER = 50_000


def supervise(
    once: Annotated[bool, typer.Option("--once", help="One tick, then exit (for cron).")] = False,
    every: Annotated[str | None, typer.Option(help="Tick again after this long, e.g. 10s.", show_default=False)] = None,
    duration: Annotated[
        str | None,
        typer.Option("--for", help="Stop after this long, e.g. 55s (for a cron line each minute).", show_default=False),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Look and say what would be done; write nothing.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Say something of every run at every tick.")] = False,
) -> None:
    """Look at your runs; restart what failed.

    What failed is on record before anything is done about it.

    Quiet when all is well. Exit code 75: it could not see (controller away, history locked) and did nothing about that.

    Example: krea-runner supervise --every 10s
    """
    from krea_runner.cli import context
    from krea_runner.config.durations import parse_duration
    from krea_runner.history.ticks import last_ticks
    from krea_runner.supervise.loop import run_loop

    if once and (every or duration):
        raise typer.BadParameter("--once goes alone")
    if not (once or every or duration):
        raise typer.BadParameter("say --once, --every 10s, or --for 55s")
    try:
        every_s = parse_duration(every) if every else 5.0
        for_s = 0.0 if once else (parse_duration(duration) if duration else None)
    except ValueError as error:
        raise typer.BadParameter(f"{error}; durations look like 55s, 2m, 1h30m") from None
    gc.set_threshold(COLLECT_AFTER)
    supervisor = context.supervisor(dry_run=dry_run)
    printer = _Printer(
        verbose=verbose or dry_run or (once and sys.stdout.isatty()),
        already_said={tick.blind for tick in last_ticks(supervisor.history) if tick.blind},
    )
    try:
        report = run_loop(supervisor, every_s=every_s, for_s=for_s, emit=printer.emit)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if report.blind:
        raise typer.Exit(CANNOT_SEE)


@dataclass
class _Printer:
    """What was done is always printed; that one cannot see, once and not at each tick: cron mails every line."""

    verbose: bool
    already_said: set[str]
    last: dict[str, str] = field(default_factory=dict)

    def emit(self, report: "TickReport") -> None:
        if report.error is not None:
            self._say_once(f"could not see: {report.error}" + (f" ({report.error.hint})" if report.error.hint else ""))
        blind: dict[str, list[str]] = {}
        for line in report.lines:
            text = f"{line.run.name}: {line.text}"
            if line.news:
                self._print(text)
            elif line.blind:  # a controller that is away is away for all runs
                blind.setdefault(line.text, []).append(line.run.name)
            elif self.verbose and self.last.get(line.run.name) != line.text:
                self._print(text)
            self.last[line.run.name] = line.text
        for text, names in blind.items():
            more = f" (and {len(names) - 1} more runs)" if len(names) > 1 else ""
            self._say_once(f"{names[0]}: {text}", more)
        if not report.blind:
            self.already_said.clear()

    def _say_once(self, text: str, more: str = "") -> None:
        if text not in self.already_said or self.verbose:
            self._print(text + more)
            self.already_said.add(text)

    def _print(self, text: str) -> None:
        typer.echo(f"{datetime.now().astimezone():%H:%M:%S} {text}")
