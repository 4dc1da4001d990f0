"""krea-runner diagnose, krea-runner signatures test"""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from krea_runner.diagnose.layout import Layout
    from krea_runner.diagnose.verdict import Verdict


def diagnose(
    logs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="LOG",
            show_default=False,
            help="Logs of one attempt; a directory; - for standard input; or the name of a run. With --jobid: none, for the "
            "job's own.",
        ),
    ] = None,
    job: Annotated[Path | None, typer.Option("--job", metavar="FILE", help="job.json: nodes, GPUs, launcher.")] = None,
    dmesg: Annotated[
        list[str] | None, typer.Option("--dmesg", metavar="NODE=FILE", help="Kernel log of a node.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON document.")] = False,
    job_id: Annotated[
        str | None, typer.Option("--jobid", metavar="J", help="Ask Slurm for the job's nodes and ranks.")
    ] = None,
    flight_recorder: Annotated[
        Path | None, typer.Option("--flight-recorder", metavar="DIR", help="Folder of Flight Recorder dumps.")
    ] = None,
    ras: Annotated[
        Path | None, typer.Option("--ras", metavar="FILE", help="Status report of NCCL RAS, text or JSON.")
    ] = None,
    table: Annotated[
        list[Path] | None, typer.Option("--signatures", metavar="FILE", help="Also your own signatures.")
    ] = None,
) -> None:
    """Say why a job died, and who did it.

    Reads logs, prints one answer of at most twelve lines. Needs no configuration and changes nothing. Exit code 0 with
    any verdict, also when nothing is wrong. Of a run the attempt of its last incident is meant, else its newest.

    Example: krea-runner diagnose slurm-4711.out
    """
    from krea_runner.cli.diagnose_run import verdict_of_run
    from krea_runner.diagnose.document import document
    from krea_runner.diagnose.logs import diagnose as find_cause
    from krea_runner.diagnose.site import load_site_catalog

    catalog, layout = load_site_catalog(table or ()), _layout(job) if job_id is None else _asked(job_id)
    kernel_logs = dict(_node_file(item) for item in dmesg or [])
    if not logs:
        logs = [_log_of_job(job_id)]
    found = verdict_of_run(logs, catalog, kernel_logs)
    if found is not None:
        verdict, here, there = found
    else:
        verdict, here, there = find_cause(logs, layout=layout, dmesg=kernel_logs, catalog=catalog), "", ""
    if flight_recorder is not None:
        from krea_runner.diagnose.dumps import with_flight_recorder

        verdict = with_flight_recorder(verdict, flight_recorder, catalog.causes)
    if ras is not None:
        from krea_runner.diagnose.dumps import with_ras

        verdict = with_ras(verdict, _text(ras), layout)
    if as_json:
        text, there = json.dumps(document(verdict), indent=2), json.dumps(there)[1:-1]
    else:
        text, there = "\n".join(lines(verdict)), safe(there)
    sys.stdout.write((text.replace(here, there) if here else text) + "\n")


def _layout(job: Path | None) -> "Layout":
    from krea_runner.diagnose.layout import Layout, from_job
    from krea_runner.errors import KreaRunnerError, NotFound

    if job is None:
        return Layout()
    try:
        read = json.loads(job.read_bytes())
    except FileNotFoundError as error:
        raise NotFound(f"there is no {job}", hint="krea-runner diagnose LOG  also works without --job") from error
    except (OSError, ValueError, RecursionError) as error:
        raise KreaRunnerError(f"cannot read {job}: {error}", hint="it must be one JSON object") from error
    if not isinstance(read, dict):
        raise KreaRunnerError(
            f"{job} is not a JSON object", hint='for example {"nodes": ["n1", "n2"], "gpus_per_node": 8}'
        )
    if isinstance(read.get("nodes"), str):
        from krea_runner.schedulers.nodelist import expand

        read["nodes"] = expand(read["nodes"])
    return from_job(read)


def _asked(job_id: str) -> "Layout":
    from krea_runner.diagnose.layout import from_job
    from krea_runner.schedulers.slurm_layout import job_document

    return from_job(job_document(job_id))


def _log_of_job(job_id: str | None) -> str:
    from krea_runner.cli import context
    from krea_runner.errors import NotFound
    from krea_runner.launch.adopt import log_of
    from krea_runner.schedulers.slurm_cli import SlurmCli
    from krea_runner.schedulers.slurm_describe import describe

    if job_id is None:
        raise typer.BadParameter("name a log, a run, or a job with --jobid", param_hint="LOG")
    record = SlurmCli().jobs([job_id]).get(job_id)
    log = None if record is None else log_of(describe(job_id), record, record.user or context.current_user())
    if log is None:
        raise NotFound(f"where job {job_id} writes its log, Slurm does not say", hint="krea-runner diagnose LOG")
    return str(log)


def _text(path: Path) -> str:
    from krea_runner.errors import KreaRunnerError

    try:
        with path.open("rb") as file:
            return file.read(64 << 20).decode("utf-8", "replace")
    except OSError as error:
        raise KreaRunnerError(f"cannot read {path}: {error}", hint="check the path and its permissions") from error


def _node_file(item: str) -> tuple[str, str]:
    node, equals, name = item.partition("=")
    if not equals or not node or not name:
        raise typer.BadParameter(f"{item!r} is not NODE=FILE", param_hint="--dmesg")
    return node, name


def lines(verdict: "Verdict") -> list[str]:
    """At most twelve. Everything that comes from a log is escaped."""
    from krea_runner.diagnose.document import log_time

    shown = [f"{verdict.title}  [{verdict.cause}]"]
    first = verdict.first_evidence
    if first is not None:
        where = [
            f"rank {first.rank}" if first.rank is not None else "",
            first.node,
            first.gpu,
            log_time(first.at) if first.at else "",
        ]
        shown.append(
            f"first    {safe(first.file)}:{first.line}  {safe('  '.join(part for part in where if part))}".rstrip()
        )
        shown.append(f"         {safe(first.text.strip())[:160]}")
    for kind, names in (
        ("nodes", verdict.suspects.nodes), ("ranks", [str(r) for r in verdict.suspects.ranks]), ("GPUs", verdict.suspects.gpus)
    ):  # fmt: skip
        if names:
            shown.append(
                f"suspect  {kind} {safe(', '.join(names[:12]))}{f' and {len(names) - 12} more' if len(names) > 12 else ''}"
            )
    if verdict.suspects.reasons:
        shown.append(f"because  {safe(verdict.suspects.reasons[0].reason)}")
    if verdict.fallout and first is not None:
        folded = ", ".join(f"{item.signature} ({item.count})" for item in verdict.fallout[:4])
        shown.append(f"fallout  {safe(folded)}")
    shown.append(f"do       {verdict.advice}  [{verdict.policy}]")
    everywhere = "; every rank says the same" if verdict.everywhere else ""
    shown.append(f"sure     {verdict.confidence}: {safe(verdict.why)}{everywhere}")
    shown += [f"unread   {safe(problem)}" for problem in verdict.problems[: 12 - len(shown)]]
    return shown[:12]


def safe(text: str) -> str:
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


signatures = typer.Typer(
    help="Known messages of failing jobs.\n\nExample: krea-runner signatures test slurm-4711.out",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@signatures.command("test")
def signatures_test(
    logs: Annotated[list[str], typer.Argument(metavar="FILE...", help="Logs; - for standard input.")],
    table: Annotated[
        list[Path] | None, typer.Option("--signatures", metavar="FILE", help="Also your own signatures.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON document.")] = False,
) -> None:
    """Say which signatures match where.

    One row a line that matched: file:line, signature, cause, rank, node, text.

    Example: krea-runner signatures test slurm-4711.out
    """
    from krea_runner.diagnose.document import evidence_document
    from krea_runner.diagnose.gather import read_log
    from krea_runner.diagnose.layout import Layout
    from krea_runner.diagnose.logs import evidence
    from krea_runner.diagnose.reading import expand
    from krea_runner.diagnose.site import load_site_catalog

    catalog, layout = load_site_catalog(table or ()), Layout()
    read = [read_log(name, number, catalog, layout) for number, name in enumerate(expand(logs))]
    found = [(event, evidence_document(evidence(event, read, layout))) for log in read for event in log.events]
    if as_json:
        rows = [{**row, "role": event.role, "cause": event.signature.cause} for event, row in found]
        sys.stdout.write(json.dumps({"schema_version": 1, "matches": rows}, indent=2) + "\n")
        return
    for event, row in found:
        who = f"rank {row['rank']}" if row["rank"] is not None else row["node"] or "-"
        what = event.signature.cause or event.role
        parts = (f"{row['file']}:{row['line']}", row["signature"], what, who, row["text"][:120])
        sys.stdout.write("\t".join(safe(part) for part in parts) + "\n")
