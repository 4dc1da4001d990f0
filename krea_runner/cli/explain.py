"""krea-runner explain"""

from dataclasses import asdict
from typing import Annotated

import typer

from krea_runner.cli.status import CANNOT_SEE


def explain(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name of the run, or its id.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON document.")] = False,
) -> None:
    """Show why a run is, or is not, judged to hang.

    Each rule with what it looks at, its budget, the time left and what blocks it; then the budget of each phase and what
    it was learned from. Changes nothing.

    Exit code 75: the scheduler could not be asked.

    Example: krea-runner explain llm-7b
    """
    from krea_runner.cli import context
    from krea_runner.cli.output import print_json, print_sheet
    from krea_runner.cli.status import look
    from krea_runner.clock import SystemClock
    from krea_runner.diagnose.explain import explain_hang
    from krea_runner.errors import NotFound
    from krea_runner.history.last_watch import last_watch
    from krea_runner.report.explain import budgets_sheet, rules_sheet
    from krea_runner.report.words import one_line, seconds

    history, clock = context.history_if_any(), SystemClock()
    if history is None:
        raise NotFound(f"no run is called {run!r}: nothing was ever submitted", hint="krea-runner submit RUN.TOML")
    found = history.find_run(run, user=context.current_user())
    looked = look(history, [found], clock)
    view, remembered = looked.views[0], last_watch(history, found.run_id)
    attempt = view.snapshot.attempt
    # Ages are true only on the clock by which the attempt is watched, and from the second look on.
    watched_here = (
        remembered is not None and attempt is not None and remembered.attempt == str(attempt.key)
        and remembered.epoch_id == clock.epoch_id()
    )  # fmt: skip
    elsewhere = "" if watched_here else view.judgement or "no attempt is being watched"
    explanation = explain_hang(view.snapshot, remembered, elsewhere)
    if as_json:
        print_json({"run": found.name, "attempt": None if attempt is None else str(attempt.key), **asdict(explanation)})
    else:
        typer.echo(f"{one_line(found.name)}: {one_line(explanation.judgement)}")
        if explanation.blind_for_s is not None:
            typer.echo(f"blind: some ranks cannot be read, for {seconds(explanation.blind_for_s)}")
        for sheet in (rules_sheet(explanation), budgets_sheet(explanation)):
            if sheet.rows:
                typer.echo()
                print_sheet(sheet)
    if looked.unasked:
        raise typer.Exit(CANNOT_SEE)
