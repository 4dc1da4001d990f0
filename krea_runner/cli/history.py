"""krea-runner history"""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from krea_runner.model import Incident


def history(
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="Only this run: its name or id.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON document.")] = False,
    limit: Annotated[int, typer.Option("--limit", "-n", min=0, help="Only the newest so many; 0: all of them.")] = 0,
) -> None:
    """Show what went wrong and what was done.

    One line an incident, oldest first.

    lost: steps since the newest whole checkpoint. noticed: time from the last progress to the incident. resumed: time
    from the incident to the first step of the next attempt. In a pipe nothing is cut off and times are UTC.

    Example: krea-runner history llm-7b --limit 20
    """
    from krea_runner.cli import context
    from krea_runner.cli.output import print_json, print_sheet
    from krea_runner.clock import SystemClock
    from krea_runner.errors import NotFound
    from krea_runner.report.tables import history_sheet

    store, user = context.history_if_any(), context.current_user()
    if store is None:
        if run is not None:
            raise NotFound(f"no run is called {run!r}: nothing was ever submitted", hint="krea-runner submit RUN.TOML")
        incidents = []
    elif run is not None:
        incidents = store.incidents(run_id=store.find_run(run, user=user).run_id, limit=limit or None)
    else:
        incidents = store.incidents(limit=limit or None)
    if as_json:
        print_json({"incidents": [incident_document(incident) for incident in incidents]})
    elif incidents:
        print_sheet(history_sheet(incidents, now=SystemClock().wall()))
    else:
        typer.echo("no incidents")


def incident_document(incident: "Incident") -> dict[str, Any]:
    from krea_runner.report.words import utc

    finding = incident.finding
    return {
        "incident_id": incident.incident_id,
        "run_id": incident.run_id,
        "run": incident.run_name,
        "attempt": str(incident.attempt),
        "job_id": incident.attempt.job_id,
        "restart_count": incident.attempt.restart_count,
        "symptom": finding.symptom,
        "cause": finding.cause,
        "by": finding.by,
        "summary": finding.summary,
        "node": finding.node,
        "step": finding.step,
        "checkpoint_step": incident.checkpoint_step,
        "lost_steps": incident.lost_steps,
        "last_progress_at": utc(finding.last_progress_at),
        "noticed_at": utc(incident.noticed_at),
        "notice_s": incident.notice_s,
        "decision": incident.decision.kind,
        "decision_reason": incident.decision.reason,
        "restarted_at": utc(incident.restarted_at),
        "resumed_at": utc(incident.resumed_at),
        "resumed_step": incident.resumed_step,
        "resume_s": incident.resume_s,
        "agreed_by": finding.agreed_by,
        "diagnosis": None if finding.diagnosis is None else asdict(finding.diagnosis),
        "evidence": list(finding.evidence),
        "suspects": [asdict(suspect) for suspect in finding.suspects],
    }
