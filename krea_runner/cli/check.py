"""krea-runner check, and what `submit` says of the same findings."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from krea_runner.launch.check import Finding, Report
    from krea_runner.model import RunConfig

_COLOUR = {"error": "red", "warning": "yellow", "note": "cyan"}
# What submit asks of the cluster must not delay it by much.
SUBMIT_TIMEOUT_S = 5.0


def check(
    path: Annotated[
        Path, typer.Argument(metavar="RUN.TOML|JOB.SBATCH", help="A run's configuration, or any batch script.")
    ],
    checkpoint_every: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="How often a checkpoint is written. Default: as seen in [checkpoint] dir.",
            show_default=False,
        ),
    ] = None,
    startup: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="From the start to the first step. Default: [budgets] startup.", show_default=False
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON document.")] = False,
) -> None:
    """Find what will lose work, before it is submitted.

    Exit code 0 without findings (or with notes only), 1 with errors or warnings, 78 when the file cannot be read. What must
    be asked of the cluster is asked of the one that sbatch would use, and not judged when it does not answer.

    Example: krea-runner check job.sbatch --checkpoint-every 30m
    """
    from krea_runner.config.durations import parse_duration
    from krea_runner.launch.check_facts import check_run, check_script

    try:
        every_s, startup_s = (None if text is None else parse_duration(text) for text in (checkpoint_every, startup))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    look = check_run if path.suffix == ".toml" else check_script
    report = look(path, every_s=every_s, startup_s=startup_s)
    if as_json:
        _print_json(path, report)
    else:
        _print(path, report)
    if any(finding.severity != "note" for finding in report.findings):
        raise typer.Exit(1)


def check_before_submit(path: Path, config: "RunConfig", *, refuse_errors: bool) -> None:
    """Errors and warnings to stderr, one line each.

    Raises: KreaRunnerError when there are errors and `refuse_errors`.
    """
    from krea_runner.launch.check import Severity
    from krea_runner.launch.check_facts import check_run, refuse
    from krea_runner.report.words import one_line

    report = check_run(path, config, timeout_s=SUBMIT_TIMEOUT_S)
    for finding in report.findings:
        if finding.severity != Severity.NOTE:
            saw = f" ({finding.saw})" if finding.saw else ""
            text = f"{finding.severity}: {finding.where}: {finding.harm}{saw} → {finding.fix} [{finding.code}]"
            sys.stderr.write(f"krea-runner: {one_line(text)}\n")
    if refuse_errors and report.count(Severity.ERROR):
        raise refuse(report, path)


def _print(path: Path, report: "Report") -> None:
    from krea_runner.launch.check import Severity
    from krea_runner.report.words import one_line

    for finding in report.findings:
        typer.echo("\n".join(_lines(finding)) + "\n")
    counts = [(report.count(severity), severity) for severity in Severity]
    said = ", ".join(f"{count} {severity}{'s' * (count != 1)}" for count, severity in counts if count)
    typer.echo(f"{one_line(str(path))}: {said or 'nothing found'}")
    if report.unjudged:
        typer.echo(f"not judged: {', '.join(report.unjudged)} ({one_line(report.why)})")


def _lines(finding: "Finding") -> list[str]:
    from krea_runner.report.words import one_line

    word = typer.style(f"{finding.severity:7}", fg=_COLOUR[finding.severity], bold=finding.severity == "error")
    lines = [f"{word}  {one_line(finding.where)}  [{finding.code}]"]
    if finding.text:
        lines.append(f"  {one_line(finding.text[:200])}")
    lines.append(f"  {finding.harm}" + (f" ({one_line(finding.saw)})" if finding.saw else ""))
    return [*lines, f"  → {one_line(finding.fix)}"]


def _print_json(path: Path, report: "Report") -> None:
    from krea_runner.cli.output import print_json

    print_json(
        {
            "path": str(path),
            "findings": [_document(finding) for finding in report.findings],
            "not_judged": list(report.unjudged),
            "not_judged_because": report.why or None,
        }
    )


def _document(finding: "Finding") -> dict[str, Any]:
    return {
        "code": finding.code,
        "severity": str(finding.severity),
        "path": finding.path,
        "line": finding.line or None,
        "text": finding.text,
        "harm": finding.harm,
        "saw": finding.saw,
        "fix": finding.fix,
    }
