"""What did it, from what a failed attempt left behind: its logs, and the dumps and kernel logs that were collected.

Read before anything is decided, because the decision depends on it, and within bounds (left_behind.py). A fault in here is a line
of the incident's: it is recorded, and decided about, as if nothing had been read. Nothing of `diagnose/` that is costly to
load is loaded before there is an incident.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from krea_runner.errors import KreaRunnerError, fault_line
from krea_runner.history.diagnoses import note_diagnosis
from krea_runner.model import EXPLAINED, Diagnosis, Finding, Incident, Snapshot, Suspect, Symptom
from krea_runner.observe.answered import answered
from krea_runner.observe.logs import printable
from krea_runner.rundir import RunDir
from krea_runner.supervise.evidence import write_evidence
from krea_runner.supervise.left_behind import Left, read_left_behind, was_collected
from krea_runner.supervise.supervisor import Supervisor

if TYPE_CHECKING:
    from krea_runner.diagnose.verdict import Verdict

RUN_S = 5.0
"""For one run; all runs of a tick share Supervisor.diagnosis_left_s."""
TEXT_SHOWN = 160
DOCUMENT_BYTES = 4 << 20
# Of these Slurm's word is the cause; the logs only matter where they tell of something else.
_SLURMS_WORD = frozenset({"slurm_time_limit", "slurm_preempted", "slurm_cancelled", "node_failure"})


def diagnosed(
    supervisor: Supervisor, snapshot: Snapshot, finding: Finding, ends: Mapping[str, int] | None = None
) -> tuple[Finding, dict[str, Any] | None]:
    """The finding with its diagnosis, and the document to keep beside the incident. `ends` as read_left_behind has it. Never
    raises."""
    clock = supervisor.clock
    begun = clock.mono()
    until = begun + min(RUN_S, supervisor.diagnosis_left_s)
    told: dict[str, Any] | None = None
    try:
        if snapshot.attempt is None:
            return finding, None
        if begun >= until:
            raise KreaRunnerError("logs not read: this tick's time for that is spent")
        read = partial(_diagnose, snapshot, finding, lambda: clock.mono() >= until, ends)
        diagnosis, told = answered(snapshot.run.config, snapshot.run.config.run_dir, read)
    except Exception as error:  # noqa: BLE001
        diagnosis = Diagnosis("unknown_failure", problems=(printable(fault_line(error)),))
    finally:
        supervisor.diagnosis_left_s -= clock.mono() - begun
    return _with(finding, diagnosis), told


def refine(supervisor: Supervisor, snapshot: Snapshot, incident: Incident) -> None:
    """Of a hang, once its attempt is over: what was collected after it had been put on record may name what did it. Its logs are
    read as far as they went then: what is in them since is how we ended it."""
    config, attempt = snapshot.run.config, snapshot.attempt
    if incident.finding.symptom is not Symptom.HANG or config.files == "sftp" or attempt is None:
        return
    folder = RunDir(config.run_dir).incident(attempt.key)
    ends = answered(
        config, config.run_dir, lambda: _read_before(folder / "diagnosis.json") if was_collected(folder) else {}
    )
    if not ends:
        return
    finding, told = diagnosed(supervisor, snapshot, incident.finding, ends)
    if finding.diagnosis is not None and finding.diagnosis.names_cause and finding != incident.finding:
        note_diagnosis(supervisor.history, incident.incident_id, finding)
        keep_diagnosis(snapshot, told)


def _read_before(path: Path) -> dict[str, int]:
    """File → where its reading ended. The file lies where the job may write: anything else is as good as nothing."""
    try:
        with path.open("rb") as file:
            rows = json.loads(file.read(DOCUMENT_BYTES))["read"]
        return {row["file"]: row["end"] for row in rows if isinstance(row["file"], str) and isinstance(row["end"], int)}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}


def keep_diagnosis(snapshot: Snapshot, told: dict[str, Any] | None) -> None:
    """Write diagnosis.json beside evidence.json. The incident's row has what counts, so a full disk must not stop anything."""
    if told is not None and snapshot.attempt is not None:
        pages = {"diagnosis.json": json.dumps(told, indent=1)}
        write_evidence(snapshot.run.config, snapshot.attempt.key, None, pages)


def _with(finding: Finding, diagnosis: Diagnosis) -> Finding:
    """Nodes of which the logs are sure, and ranks that they name, are suspects of the incident."""
    if finding.symptom not in EXPLAINED and (not diagnosis.names_cause or diagnosis.cause in _SLURMS_WORD):
        return finding
    known = {(suspect.kind, suspect.name) for suspect in finding.suspects}
    named = []
    if diagnosis.is_sure and diagnosis.policy == "restart_and_exclude_node":
        named += [("node", node) for node in diagnosis.nodes]
    if diagnosis.names_cause and diagnosis.confidence != "low":
        named += [("rank", str(rank)) for rank in diagnosis.ranks[:8]]
    more = tuple(Suspect(*one, diagnosis.title) for one in named if one not in known)
    return replace(finding, diagnosis=diagnosis, suspects=finding.suspects + more)


def _diagnose(
    snapshot: Snapshot, finding: Finding, is_late: Callable[[], bool], ends: Mapping[str, int] | None
) -> tuple[Diagnosis, dict[str, Any] | None]:
    from krea_runner.diagnose.document import document
    from krea_runner.diagnose.site import site_catalog

    catalog, problems = site_catalog()
    suspected = {suspect.name for suspect in finding.suspects if suspect.kind == "node"}
    hangs = finding.symptom is Symptom.HANG
    verdict, left = read_left_behind(
        snapshot, catalog, still_running=hangs, suspected=suspected, is_late=is_late, ends=ends
    )
    if verdict is None:
        return Diagnosis("unknown_failure", why="there is no log", problems=tuple(left.problems)), None
    verdict = replace(verdict, problems=(*verdict.problems, *problems))
    # Nothing marks where an attempt begins in the log of an adopted job: what it says may be an earlier one's.
    shared_log = snapshot.run.config.job_log is not None and _is_restart(snapshot)
    read = [{"file": part.name, "begin": part.begin, "end": part.end} for part in left.parts]
    told = left.where(json.dumps({**document(verdict), "read": read}))
    return _diagnosis(verdict, left, shared_log=shared_log), json.loads(told)


def _diagnosis(verdict: "Verdict", left: Left, *, shared_log: bool) -> Diagnosis:
    first, shown = verdict.first_evidence, ""
    if first is not None:
        name = left.where(first.file).removeprefix(f"{left.far}/" if left.far else "")
        shown = printable(f"{name}:{first.line}: {first.text.strip()[:TEXT_SHOWN]}")
    suspects, sure = verdict.suspects, verdict.confidence
    return Diagnosis(
        cause=verdict.cause,
        policy=verdict.policy,
        title=verdict.title,
        advice=verdict.advice,
        confidence="medium" if shared_log and sure == "high" else sure,
        why=printable(verdict.why),
        everywhere=verdict.everywhere,
        first=shown,
        nodes=tuple(map(printable, suspects.nodes)),
        ranks=suspects.ranks,
        gpus=tuple(map(printable, suspects.gpus)),
        problems=tuple(printable(left.where(text)) for text in verdict.problems),
    )


def _is_restart(snapshot: Snapshot) -> bool:
    return snapshot.attempt is not None and snapshot.attempt.key.restart_count > 0
