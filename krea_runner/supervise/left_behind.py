"""What a failed attempt left behind: its logs, and the dumps and kernel logs that were collected; read within bounds, because a
tick must not wait for a log of 10 GB: of each log the end, and nothing more once the time is up. What was not read is said."""

import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from krea_runner.errors import FilesUnavailable, KreaRunnerError
from krea_runner.model import AttemptKey, Snapshot
from krea_runner.observe.logs import attempt_bytes
from krea_runner.rundir import RunDir
from krea_runner.schedulers.nodelist import NodelistError, expand
from krea_runner.transport.mirror import copy_logs, local_copy

if TYPE_CHECKING:
    from krea_runner.diagnose.layout import Layout
    from krea_runner.diagnose.reading import Part
    from krea_runner.diagnose.signatures import Catalog, Cause
    from krea_runner.diagnose.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much is read. Of all logs together `all_bytes`, each its share, between `least_bytes` and `most_bytes`."""

    all_bytes: int = 256 << 20
    most_bytes: int = 64 << 20
    least_bytes: int = 1 << 20
    far_bytes: int | None = 32 << 20
    """In the place of `all_bytes` over SFTP; None: as copy_logs has it."""
    dumps_bytes: int = 4 << 20
    """Of Flight Recorder dumps together, of which 2 MB are read in a second."""

    def share(self, logs: int) -> int:
        return max(self.least_bytes, min(self.most_bytes, self.all_bytes // max(1, logs)))


IN_A_TICK = Bounds()
# Where hyperscan is not installed: the search then reads some 10 MB a second, and the end of a log is what counts.
IN_A_TICK_SLOWLY = Bounds(all_bytes=16 << 20, most_bytes=8 << 20, least_bytes=128 << 10, far_bytes=16 << 20)
WHOLE = Bounds(1 << 62, 1 << 62, 1 << 62, None, 1 << 62)
SHARED_BYTES = 8 << 20  # of a log that all attempts write to: srun's words and the batch script's
RAS_BYTES = 8 << 20


@dataclass(slots=True)
class Left:
    """What there is to read, here; `near` stands for the run directory `far`."""

    parts: "list[Part]" = field(default_factory=list)
    kernel: "dict[str, str | Part]" = field(default_factory=dict)
    incident: Path | None = None
    near: str = ""
    far: str = ""
    problems: list[str] = field(default_factory=list)

    def where(self, text: str) -> str:
        """`text` with the places over there for those here."""
        return text.replace(self.near, self.far) if self.near else text


def read_left_behind(
    snapshot: Snapshot,
    catalog: "Catalog",
    *,
    still_running: bool,
    bounds: Bounds | None = None,
    suspected: Collection[str] = (),
    is_late: Callable[[], bool] = lambda: False,
    kernel_logs: Mapping[str, str] | None = None,
    ends: Mapping[str, int] | None = None,
) -> "tuple[Verdict | None, Left]":
    """The verdict (None where there is no log at all), and from what. The logs of `suspected` nodes come first: there may be
    time for a part of them only. `kernel_logs` are node → file, beside those that were collected. `ends`: only these logs, and
    no more of them than their first so many bytes.

    Raises: LogUnreadable; KreaRunnerError where the attempt is not known.
    """
    from krea_runner.diagnose.logs import diagnose_parts
    from krea_runner.diagnose.scan import is_fast

    bounds = bounds or (IN_A_TICK if is_fast() else IN_A_TICK_SLOWLY)
    layout = layout_of(snapshot, still_running=still_running)
    with _left_behind(snapshot, layout, suspected, bounds, is_late, ends) as left:
        if not left.parts:
            return None, left
        verdict = diagnose_parts(
            left.parts, layout=layout, dmesg={**left.kernel, **(kernel_logs or {})}, catalog=catalog,
            since=_began(snapshot), is_late=is_late,
        )  # fmt: skip
        verdict = replace(verdict, problems=(*verdict.problems, *left.problems))
        if left.incident is not None:
            verdict = _with_dumps(verdict, left.incident, layout, catalog.causes, bounds, is_late)
    return verdict, left


def _began(snapshot: Snapshot) -> float | None:
    """When the attempt began, on the wall clock of this host's zone: kernel logs tell local time."""
    at = snapshot.attempt.started_at if snapshot.attempt is not None else None
    if at is None:
        return None
    offset = datetime.fromtimestamp(at).astimezone().utcoffset()
    return at + (offset.total_seconds() if offset is not None else 0.0)


# -------------------------------------------------------------------------------------------------------------- layout


def layout_of(snapshot: Snapshot, *, still_running: bool) -> "Layout":
    from krea_runner.diagnose.layout import Layout

    attempt, job = snapshot.attempt, snapshot.job
    nodelist = (attempt.nodelist if attempt is not None else "") or (job.nodelist if job is not None else "")
    try:
        nodes = expand(nodelist)
    except NodelistError:
        nodes = []
    ranks = _ranks_a_task(snapshot)
    gang = snapshot.run.config.gang
    layout = Layout(
        nodes=nodes,
        gpus_per_node=gang.ranks_per_node * ranks,
        world_size=gang.world_size * ranks,
        launcher={0: "", 1: "srun"}.get(ranks, "torchrun"),
        still_running=still_running,
        known=ranks != 0,
    )
    for beat in snapshot.heartbeats.ranks:
        layout.rank_nodes[beat.rank] = layout.short(beat.node) or beat.node
        layout.pid_ranks[layout.rank_nodes[beat.rank], beat.pid] = beat.rank
    return layout


def _ranks_a_task(snapshot: Snapshot) -> int:
    """How many ranks each of srun's tasks is; 0 where nobody knows: a single task a node may be an agent's, under any name."""
    from krea_runner.diagnose.layout import ranks_a_task

    config, beating = snapshot.run.config, len(snapshot.heartbeats.ranks)
    told = ranks_a_task(config.command)
    if told is not None:
        return told
    is_rank = config.gang.ranks_per_node > 1 or (config.gang.nodes > 1 and beating == config.gang.nodes)
    return 1 if is_rank or config.gang.world_size == beating == 1 else 0


# --------------------------------------------------------------------------------------------------------------- files


@contextmanager
def _left_behind(
    snapshot: Snapshot,
    layout: "Layout",
    suspected: Collection[str],
    bounds: Bounds,
    is_late: Callable[[], bool],
    ends: Mapping[str, int] | None,
) -> Iterator[Left]:
    config, attempt = snapshot.run.config, snapshot.attempt
    if attempt is None:
        raise KreaRunnerError(f"nothing is known of a start of {snapshot.run.name}")

    def found(run_dir: RunDir) -> Left:
        left = Left(near=str(run_dir.root), far=str(config.run_dir), incident=run_dir.incident(attempt.key))
        for path in _plain_files(run_dir.incident(attempt.key) / "dmesg"):
            node = next((name for name in (path.name, path.stem) if name in layout.nodes), path.name.split(".")[0])
            if (part := _end_of(path, bounds.most_bytes)) is not None:
                left.kernel[node] = part
        first = {f"node-{number}.log" for number, node in enumerate(layout.nodes) if node in suspected}
        own = sorted(_plain_files(run_dir.attempt_logs(attempt.key)), key=lambda path: (path.name not in first, path))
        most = bounds.share(1 + len(own))
        shared = run_dir.batch_log(attempt.key.job_id)
        parts = [(shared, partial(_own_part, key=attempt.key)), *((path, partial(_end_of, most=most)) for path in own)]
        _add(left, parts, ends)
        return left

    if config.job_log is not None:
        left = Left()
        _add(left, [(config.job_log, partial(_end_of, most=bounds.share(1)))], ends)
        yield left
    elif config.files != "sftp":
        yield found(RunDir(config.run_dir))
    else:
        with tempfile.TemporaryDirectory(prefix="krea-runner-") as folder:
            try:
                cut = copy_logs(config, attempt.key, Path(folder), all_bytes=bounds.far_bytes, is_late=is_late)
                left = found(RunDir(Path(folder)))
                left.problems += _not_whole([(name, f"only its end, of {_size(size)}") for name, size in cut])
            except FilesUnavailable as error:
                left = found(local_copy(config))
                left.problems.append(f"log not read whole: only what was copied before, {error}")
            yield left


def _add(left: Left, logs: "Sequence[tuple[Path, _PartOf]]", ends: Mapping[str, int] | None) -> None:
    cut: list[tuple[str, str]] = []
    for path, part_of in logs:
        end = None if ends is None else ends.get(str(path), 0)
        try:
            part = part_of(path, end=end) if path.is_file() else None  # a FIFO would have us wait
            size = path.stat().st_size if part is not None else 0
        except OSError as error:
            left.problems.append(f"could not read {path}: {error.strerror}")
            continue
        if part is not None:
            left.parts.append(part)
        if part is not None and part.first_line is None:
            cut.append((str(path), f"only its last {_size(size - part.begin)} of {_size(size)}"))
    left.problems += _not_whole(cut)


class _PartOf(Protocol):
    def __call__(self, path: Path, *, end: int | None) -> "Part | None":
        """None where nothing of the attempt is there before `end`."""


def _own_part(path: Path, key: AttemptKey, *, end: int | None = None) -> "Part | None":
    from krea_runner.diagnose.reading import Part

    begin, stop, first_line = attempt_bytes(path, key, SHARED_BYTES)
    stop = stop if end is None else min(stop, end)
    return Part(str(path), begin, stop, first_line) if stop > begin else None


def _end_of(path: Path, most: int, *, end: int | None = None) -> "Part | None":
    from krea_runner.diagnose.reading import Part

    size = path.stat().st_size
    size = size if end is None else min(size, end)
    if end == 0:
        return None
    return Part(str(path), size - most, size, None) if size > most else Part(str(path), 0, size)


def was_collected(folder: Path) -> bool:
    """Whether there is anything of an incident beside its logs."""
    return any(map(_plain_files, (folder / "dmesg", folder / "flight_recorder", folder / "ras")))


def _plain_files(folder: Path) -> list[Path]:
    """A FIFO or a link in its place is nobody's log."""
    try:
        with os.scandir(folder) as entries:
            plain = (entry for entry in entries if not entry.name.startswith("."))  # those are still being written
            return sorted(Path(entry.path) for entry in plain if entry.is_file(follow_symlinks=False))
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
    verdict: "Verdict",
    folder: Path,
    layout: "Layout",
    causes: "Mapping[str, Cause]",
    bounds: Bounds,
    is_late: Callable[[], bool],
) -> "Verdict":
    """Whatever is there of Flight Recorder dumps and of NCCL RAS's report, if there is time."""
    from krea_runner.diagnose.dumps import with_flight_recorder, with_ras

    problems: list[str] = []
    dumps = _plain_files(folder / "flight_recorder")
    size = sum(path.stat().st_size for path in dumps)
    try:
        if dumps and (is_late() or size > bounds.dumps_bytes):
            problems.append(
                f"{len(dumps)} flight recorder dumps of {_size(size)} not read; krea-runner diagnose RUN reads them"
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
    return path.parent.name == "ras" or path.name.startswith("ras")
