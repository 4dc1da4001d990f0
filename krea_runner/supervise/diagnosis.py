"""What did it, from what a failed attempt left behind: its logs, and the dumps and kernel logs that were collected.

Read before anything is decided, because the decision depends on it, and within bounds, because a tick must not wait for a log of
10 GB: of each log the end, and nothing more once the time is up. What was not read is said. A fault in here is a line of the
incident's: it is recorded, and decided about, as if nothing had been read. Nothing of `diagnose/` that is costly to load is
loaded before there is an incident.
"""

import json
import os
import stat
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from krea_runner.errors import FilesUnavailable, KreaRunnerError, fault_line
from krea_runner.model import EXPLAINED, Diagnosis, Finding, Snapshot, Suspect, Symptom
from krea_runner.observe.logs import attempt_bytes, printable
from krea_runner.rundir import RunDir
from krea_runner.schedulers.nodelist import NodelistError, expand
from krea_runner.supervise.supervisor import Supervisor
from krea_runner.transport.mirror import copy_logs, local_copy, mirrored, put_files

if TYPE_CHECKING:
    from krea_runner.diagnose.layout import Layout
    from krea_runner.diagnose.reading import Part
    from krea_runner.diagnose.verdict import Verdict

RUN_S = 5.0
"""For one run; all runs of a tick share Supervisor.diagnosis_left_s."""
ALL_BYTES = 256 << 20
FAR_BYTES = 32 << 20  # over SFTP
MOST_BYTES, LEAST_BYTES = 64 << 20, 1 << 20  # of one log
DUMPS_BYTES = 16 << 20  # dumps are read at some 10 MB/s
RAS_BYTES = 8 << 20
TEXT_SHOWN = 160
# Of these Slurm's word is the cause; the logs only matter where they tell of something else.
_SLURMS_WORD = frozenset({"slurm_time_limit", "slurm_preempted", "slurm_cancelled", "node_failure"})


@dataclass(slots=True)
class Left:
    """What there is to read, here; `near` stands for the run directory `far`."""

    parts: "list[Part]" = field(default_factory=list)
    kernel: "dict[str, str | Part]" = field(default_factory=dict)
    incident: Path | None = None
    near: str = ""
    far: str = ""
    problems: list[str] = field(default_factory=list)


def diagnosed(supervisor: Supervisor, snapshot: Snapshot, finding: Finding) -> tuple[Finding, dict[str, Any] | None]:
    """The finding with its diagnosis, and the document to keep beside the incident. Never raises."""
    clock = supervisor.clock
    begun = clock.mono()
    until = begun + min(RUN_S, supervisor.diagnosis_left_s)
    told: dict[str, Any] | None = None
    try:
        if snapshot.attempt is None:
            return finding, None
        if begun >= until:
            raise KreaRunnerError("logs not read: this tick's time for that is spent")
        diagnosis, told = _diagnose(snapshot, finding, lambda: clock.mono() >= until)
    except Exception as error:  # noqa: BLE001
        diagnosis = Diagnosis("unknown_failure", problems=(printable(fault_line(error)),))
    finally:
        supervisor.diagnosis_left_s -= clock.mono() - begun
    return _with(finding, diagnosis), told


def keep_diagnosis(snapshot: Snapshot, told: dict[str, Any] | None) -> None:
    """Write diagnosis.json beside evidence.json. The incident's row has what counts, so a full disk must not stop anything."""
    if told is None or snapshot.attempt is None:
        return
    config = snapshot.run.config
    folder, data = RunDir(config.run_dir).incident(snapshot.attempt.key), json.dumps(told, indent=1).encode()
    try:
        if config.files == "sftp":
            put_files(config, [folder], {folder / "diagnosis.json": data})
            return
    except FilesUnavailable:
        folder = local_copy(config).incident(snapshot.attempt.key)
    partial = folder / f".diagnosis.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(data)
        partial.replace(folder / "diagnosis.json")
    except OSError:
        return  # as said above


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
    snapshot: Snapshot, finding: Finding, is_late: Callable[[], bool]
) -> tuple[Diagnosis, dict[str, Any] | None]:
    from krea_runner.diagnose.document import document
    from krea_runner.diagnose.logs import diagnose_parts
    from krea_runner.diagnose.site import site_catalog

    catalog, problems = site_catalog()
    layout = layout_of(snapshot, still_running=finding.symptom is Symptom.HANG)
    suspected = {suspect.name for suspect in finding.suspects if suspect.kind == "node"}
    with _left_behind(snapshot, layout, suspected, is_late) as left:
        if not left.parts:
            return Diagnosis("unknown_failure", problems=tuple(left.problems or ["there is no log"])), None
        verdict = diagnose_parts(
            left.parts, layout=layout, dmesg=left.kernel, catalog=catalog, since=_began(snapshot), is_late=is_late
        )
        verdict = replace(verdict, problems=(*verdict.problems, *left.problems, *problems))
        if left.incident is not None:
            verdict = _with_dumps(verdict, left.incident, layout, catalog.causes, is_late)
    told = document(verdict)
    if left.near != left.far:
        told = json.loads(json.dumps(told).replace(json.dumps(left.near)[1:-1], json.dumps(left.far)[1:-1]))
    return _diagnosis(verdict, left, shared_log=snapshot.run.config.job_log is not None and _is_restart(snapshot)), told


def _diagnosis(verdict: "Verdict", left: Left, *, shared_log: bool) -> Diagnosis:
    """`shared_log`: nothing marks where the attempt begins in its log, so that what it says may be an earlier one's."""
    first, shown = verdict.first_evidence, ""
    if first is not None:
        name = first.file.replace(left.near, left.far).removeprefix(f"{left.far}/")
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
        problems=tuple(
            printable(text.replace(left.near, left.far) if left.near else text) for text in verdict.problems
        ),
    )


def _is_restart(snapshot: Snapshot) -> bool:
    return snapshot.attempt is not None and snapshot.attempt.key.restart_count > 0


def _began(snapshot: Snapshot) -> float | None:
    """When the attempt began, on the wall clock of this host's zone: kernel logs tell local time."""
    at = snapshot.attempt.started_at if snapshot.attempt is not None else None
    if at is None:
        return None
    offset = datetime.fromtimestamp(at).astimezone().utcoffset()
    return at + (offset.total_seconds() if offset is not None else 0.0)


# -------------------------------------------------------------------------------------------------------------- layout


def layout_of(snapshot: Snapshot, *, still_running: bool) -> "Layout":
    from krea_runner.diagnose.layout import Layout, ranks_a_task

    config, attempt, job = snapshot.run.config, snapshot.attempt, snapshot.job
    nodelist = (attempt.nodelist if attempt is not None else "") or (job.nodelist if job is not None else "")
    try:
        nodes = expand(nodelist)
    except NodelistError:
        nodes = []
    tasks = config.gang.ranks_per_node
    ranks = ranks_a_task(config.command)
    layout = Layout(
        nodes=nodes,
        gpus_per_node=tasks * (ranks or 1) if ranks != 0 else 0,
        world_size=config.gang.world_size * (ranks or 1) if ranks != 0 else 0,
        launcher="srun" if ranks is None else "torchrun",
        still_running=still_running,
        known=ranks != 0,
    )
    for beat in snapshot.heartbeats.ranks:
        layout.rank_nodes[beat.rank] = layout.short(beat.node) or beat.node
        layout.pid_ranks[layout.rank_nodes[beat.rank], beat.pid] = beat.rank
    return layout


# --------------------------------------------------------------------------------------------------------------- files


@contextmanager
def _left_behind(
    snapshot: Snapshot, layout: "Layout", suspected: Collection[str], is_late: Callable[[], bool]
) -> Iterator[Left]:
    """The logs of `suspected` nodes come first: there may be time for a part of them only."""
    config, attempt = snapshot.run.config, snapshot.attempt
    assert attempt is not None  # noqa: S101 - asked before
    if config.job_log is not None:
        yield _parts(Left(), config.job_log, (), snapshot)
        return
    if config.files != "sftp":
        yield _of_run_dir(RunDir(config.run_dir), snapshot, layout, suspected)
        return
    with tempfile.TemporaryDirectory(prefix="krea-runner-") as folder:
        try:
            cut = copy_logs(config, attempt.key, Path(folder), all_bytes=FAR_BYTES, is_late=is_late)
            left = _of_run_dir(RunDir(Path(folder)), snapshot, layout, suspected)
            left.problems += _not_whole([(name, f"its end, of {_size(size)}") for name, size in cut])
        except FilesUnavailable as error:
            left = _of_run_dir(RunDir(mirrored(config, attempt.key).run_dir), snapshot, layout, suspected)
            left.problems.append(f"logs not read whole, only what was copied before: {error}")
        yield left


def _of_run_dir(run_dir: RunDir, snapshot: Snapshot, layout: "Layout", suspected: Collection[str]) -> Left:
    assert snapshot.attempt is not None  # noqa: S101 - asked before
    key = snapshot.attempt.key
    left = Left(near=str(run_dir.root), far=str(snapshot.run.config.run_dir), incident=run_dir.incident(key))
    for path in _plain_files(run_dir.incident(key) / "dmesg"):
        node = path.name if path.name in layout.nodes else path.name.split(".")[0]
        left.kernel[node] = _end_of(path, MOST_BYTES)
    first = {f"node-{number}.log" for number, node in enumerate(layout.nodes) if node in suspected}
    own = sorted(_plain_files(run_dir.attempt_logs(key)), key=lambda path: (path.name not in first, path))
    return _parts(left, run_dir.batch_log(key.job_id), own, snapshot)


def _parts(left: Left, shared: Path, own: Sequence[Path], snapshot: Snapshot) -> Left:
    """Of each log no more than its share, and of the one that other attempts write to as well only this one's part."""
    most = max(LEAST_BYTES, min(MOST_BYTES, ALL_BYTES // (1 + len(own))))
    cut: list[tuple[str, str]] = []
    for path in (shared, *own):
        try:
            part = _own_part(path, snapshot, most) if path == shared else _end_of(path, most)
        except OSError as error:
            left.problems.append(f"could not read {path}: {error.strerror}")
            continue
        if part is None:
            continue
        left.parts.append(part)
        if part.first_line is None:
            size = path.stat().st_size
            cut.append((str(path), f"only its last {_size(size - part.begin)} of {_size(size)}"))
    left.problems += _not_whole(cut)
    return left


def _own_part(path: Path, snapshot: Snapshot, most: int) -> "Part | None":
    from krea_runner.diagnose.reading import Part

    assert snapshot.attempt is not None  # noqa: S101 - asked before
    if not path.exists():
        return None
    if snapshot.run.config.job_log is not None:
        return _end_of(path, most) if path.is_file() else None
    begin, end, first_line = attempt_bytes(path, snapshot.attempt.key, min(most, LEAST_BYTES * 8))
    return Part(str(path), begin, end, first_line) if end > begin else None


def _end_of(path: Path, most: int) -> "Part":
    from krea_runner.diagnose.reading import Part

    size = path.stat().st_size
    return Part(str(path), size - most, size, None) if size > most else Part(str(path))


def _plain_files(folder: Path) -> list[Path]:
    """A FIFO or a link in its place is nobody's log."""
    try:
        with os.scandir(folder) as entries:
            return sorted(Path(entry.path) for entry in entries if entry.is_file(follow_symlinks=False))
    except OSError:
        return []


def _not_whole(cut: list[tuple[str, str]]) -> list[str]:
    if not cut:
        return []
    name, what = cut[0]
    more = f" (and {len(cut) - 1} more)" if len(cut) > 1 else ""
    return [f"log not read whole: {name}: {what}; its lines are counted from there{more}"]


def _size(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"


# --------------------------------------------------------------------------------------------------------------- dumps


def _with_dumps(
    verdict: "Verdict", folder: Path, layout: "Layout", causes: Mapping[str, Any], is_late: Callable[[], bool]
) -> "Verdict":
    """Whatever is there of Flight Recorder dumps and of NCCL RAS's report, if there is time."""
    from krea_runner.diagnose.dumps import with_flight_recorder, with_ras

    problems: list[str] = []
    dumps = _plain_files(folder / "flight_recorder")
    size = sum(path.stat().st_size for path in dumps)
    try:
        if dumps and (is_late() or size > DUMPS_BYTES):
            problems.append(
                f"{len(dumps)} flight recorder dumps of {_size(size)} not read: krea-runner diagnose reads them"
            )
        elif dumps:
            verdict = with_flight_recorder(verdict, folder / "flight_recorder", causes)
    except (KreaRunnerError, OSError) as error:
        problems.append(str(error))
    reports = [path for path in (*_plain_files(folder / "ras"), *_plain_files(folder)) if _is_ras(path)]
    for path in reports[-1:]:
        try:
            with path.open("rb") as file:
                verdict = with_ras(verdict, file.read(RAS_BYTES).decode("utf-8", "replace"), layout)
        except (KreaRunnerError, OSError) as error:
            problems.append(f"{path.name}: {error}")
    return replace(verdict, problems=(*verdict.problems, *problems))


def _is_ras(path: Path) -> bool:
    return (path.parent.name == "ras" or path.name.startswith("ras")) and stat.S_ISREG(path.lstat().st_mode)
