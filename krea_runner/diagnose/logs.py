"""The entry point: logs and kernel logs of one attempt → a Verdict."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from krea_runner.diagnose import blame
from krea_runner.diagnose.gather import Event, Log, read_log
from krea_runner.diagnose.layout import Layout
from krea_runner.diagnose.reading import LogUnreadable, blocks, expand
from krea_runner.diagnose.reason import Story, tell
from krea_runner.diagnose.signatures import Catalog, load_catalog
from krea_runner.diagnose.verdict import Evidence, Suspects, Verdict

LABELS_BYTES = 32 << 20
_LABELS = re.compile(rb"^ {0,6}(\d{1,6}): ", re.MULTILINE)
TEXT_SHOWN = 400


def diagnose(
    names: Sequence[str],
    *,
    layout: Layout | None = None,
    dmesg: Mapping[str, str] | None = None,
    catalog: Catalog | None = None,
) -> Verdict:
    """`names` are files, directories or `-`; `dmesg` is node → file. Raises NotFound, and LogUnreadable when not one log
    could be read; what else could not be read is in `problems`."""
    layout, catalog = layout or Layout(), catalog or load_catalog()
    logs, problems = list[Log](), list[str]()
    for name in expand(list(names)):
        try:
            logs.append(read_log(name, len(logs), catalog, layout))
        except LogUnreadable as error:
            if len(names) == 1:
                raise
            problems.append(str(error))
    for node, name in (dmesg or {}).items():
        try:
            logs.append(read_log(name, len(logs), catalog, layout, node=node, kernel=True))
        except LogUnreadable as error:
            problems.append(str(error))
    if not any(not log.kernel for log in logs):
        raise LogUnreadable("; ".join(problems) or "no log was given", hint="krea-runner diagnose LOG")
    problems += [log.problem for log in logs if log.problem]
    return replace(_verdict(logs, layout, catalog), problems=tuple(problems))


def _verdict(logs: list[Log], layout: Layout, catalog: Catalog) -> Verdict:
    story = tell(logs, layout, catalog)
    spoke = _labels(logs) if story.cause == "rendezvous_failure" else set()
    if blame.stray_process(story, layout):
        story.cause, story.why = "gpu_init_failure", "the memory is held by a process that is not the job's"
    named = blame.suspects(story, layout, logs, spoke)
    cause = catalog.causes[story.cause]
    policy = cause.policy
    if (
        story.cause == "storage_io_error"
        and len(named.nodes) == 1
        and story.why.startswith(("one node only", "every rank of one node"))
    ):
        policy = "restart_and_exclude_node"
    return Verdict(
        cause=story.cause,
        policy=policy,
        title=cause.title,
        advice=cause.advice,
        symptom=_symptom(story),
        confidence=story.confidence,
        why=story.why,
        suspects=named if cause.policy != "not_a_crash" else Suspects(),
        first_evidence=None if story.first is None else evidence(story.first, logs, layout),
        evidence=tuple(evidence(event, logs, layout) for event in story.events[:50]),
        fallout=fold(story.fallout, logs, layout),
    )


def _symptom(story: Story) -> str:
    for role, word in (
        ("timeout", "hang"),
        ("stuck", "hang"),
        ("scheduler", "ended by Slurm"),
        ("signal", "crash"),
        ("exit", "crash"),
    ):
        if any(event.role == role for event in [*story.events, *story.fallout]):
            return word
    return "crash" if story.first is not None else ""


def evidence(event: Event, logs: list[Log], layout: Layout, count: int | None = None) -> Evidence:
    gpu = f"{event.node}:{event.device}" if event.device is not None and event.node else ""
    return Evidence(
        file=logs[event.log].name, line=event.line, text=event.text[:TEXT_SHOWN], signature=event.signature.name,
        at=event.at, rank=event.rank, node=event.node or layout.node_of(event.rank), gpu=gpu,
        count=event.count if count is None else count,
    )  # fmt: skip


def fold(events: list[Event], logs: list[Log], layout: Layout) -> tuple[Evidence, ...]:
    """The same kind of event of any number of ranks is one entry."""
    kinds: dict[str, list[Event]] = {}
    for event in events:
        if event.role not in {"start", "end", "context", "restart"}:
            kinds.setdefault(event.signature.name, []).append(event)
    return tuple(evidence(same[0], logs, layout, sum(event.count for event in same)) for same in kinds.values())


def _labels(logs: list[Log]) -> set[int]:
    """Which labels of `srun -l` said anything at all. Only files can be read twice."""
    found: set[int] = set()
    for log in logs:
        if log.kernel or log.name == "-" or not Path(log.name).is_file():
            continue
        read = 0
        for block in blocks(log.name):
            found |= {int(label) for label in _LABELS.findall(block.data)}
            read += len(block.data)
            if read > LABELS_BYTES:
                break
    return found
