"""The entry point: logs and kernel logs of one attempt → a Verdict."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from krea_runner.diagnose import blame
from krea_runner.diagnose.gather import Event, Log, read_log
from krea_runner.diagnose.layout import Layout
from krea_runner.diagnose.reading import LogUnreadable, Part, blocks, expand
from krea_runner.diagnose.reason import Story, tell
from krea_runner.diagnose.signatures import Catalog, load_catalog
from krea_runner.diagnose.verdict import Evidence, Suspects, Verdict

LABELS_BYTES = 32 << 20
_LABELS = re.compile(rb"^ {0,6}(\d{1,6}): ", re.MULTILINE)
TEXT_SHOWN = 400
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")


def diagnose(
    names: Sequence[str],
    *,
    layout: Layout | None = None,
    dmesg: Mapping[str, str] | None = None,
    catalog: Catalog | None = None,
) -> Verdict:
    """`names` are files, directories or `-`; `dmesg` is node → file. Raises NotFound, and LogUnreadable when not one log
    could be read; what else could not be read is in `problems`."""
    return diagnose_parts(expand(list(names)), layout=layout, dmesg=dmesg, catalog=catalog)


def diagnose_parts(
    sources: Sequence[str | Part],
    *,
    layout: Layout | None = None,
    dmesg: Mapping[str, str | Part] | None = None,
    catalog: Catalog | None = None,
    since: float | None = None,
    is_late: Callable[[], bool] = lambda: False,
) -> Verdict:
    """The same for files, or parts of them, that are there. `since`: when the attempt began, as if local time were UTC; else the
    first time in its logs. Once `is_late` says so nothing more is read, and `problems` says what was left out."""
    layout, catalog = layout or Layout(), catalog or load_catalog()
    wanted = [("", source) for source in sources] + [*(dmesg or {}).items()]
    logs, problems, left_out = list[Log](), list[str](), list[str]()
    for number, (node, source) in enumerate(wanted):
        name = source.name if isinstance(source, Part) else source
        if logs and is_late():
            left_out.append(name)
            continue
        kernel = number >= len(sources)
        try:
            log = read_log(source, len(logs), catalog, layout, node=node, kernel=kernel, is_late=is_late)
        except LogUnreadable as error:
            if len(wanted) == 1:
                raise
            problems.append(str(error))
            continue
        logs.append(log)
        if log.is_cut_short:
            left_out.append(name)
    if not any(not log.kernel for log in logs):
        raise LogUnreadable("; ".join(problems) or "no log was given", hint="krea-runner diagnose LOG")
    problems += [log.problem for log in logs if log.problem]
    if left_out:
        more = f" and {len(left_out) - 1} more" if len(left_out) > 1 else ""
        problems.append(f"log not read whole, there was no time: {left_out[0]}{more}")
    return replace(_verdict(logs, layout, catalog, since, is_late), problems=tuple(problems))


def _verdict(
    logs: list[Log], layout: Layout, catalog: Catalog, since: float | None, is_late: Callable[[], bool]
) -> Verdict:
    story = tell(logs, layout, since)
    spoke = _labels(logs, is_late) if story.cause == "rendezvous_failure" else set()
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
        everywhere=_is_everywhere(story, layout),
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


def _is_everywhere(story: Story, layout: Layout) -> bool:
    """Whether each rank of a gang says the very same: then it is no one node's or GPU's fault, and will be said again."""
    first = story.first
    if first is None or layout.world_size < 2:
        return False
    said = _NUMBER.sub("#", first.message)
    same = [e for e in story.events if e.signature is first.signature and _NUMBER.sub("#", e.message) == said]
    return set().union(*(event.all_ranks for event in same)) >= set(range(layout.world_size))


def evidence(event: Event, logs: list[Log], layout: Layout, count: int | None = None) -> Evidence:
    node, device = event.node or layout.node_of(event.rank), event.device
    if device is None and event.rank is not None and event.signature.cause.startswith(("gpu_", "cuda_")):
        device = layout.gpu_of(event.rank)
    gpu = f"{node}:{device}" if device is not None and node else ""
    return Evidence(
        file=logs[event.log].name, line=event.line, text=event.text[:TEXT_SHOWN], signature=event.signature.name,
        at=event.at, rank=event.rank, node=node, gpu=gpu,
        count=event.count if count is None else count,
    )  # fmt: skip


def fold(events: list[Event], logs: list[Log], layout: Layout) -> tuple[Evidence, ...]:
    """The same kind of event of any number of ranks is one entry."""
    kinds: dict[str, list[Event]] = {}
    for event in events:
        if event.role not in {"start", "end", "context", "restart"}:
            kinds.setdefault(event.signature.name, []).append(event)
    return tuple(evidence(same[0], logs, layout, sum(event.count for event in same)) for same in kinds.values())


def _labels(logs: list[Log], is_late: Callable[[], bool]) -> set[int]:
    """Which labels of `srun -l` said anything at all, in the first LABELS_BYTES of all. Only files can be read twice."""
    found: set[int] = set()
    read = 0
    for log in logs:
        if log.kernel or log.name == "-" or not Path(log.name).is_file():
            continue
        for block in blocks(log.name):
            if read > LABELS_BYTES or is_late():
                return found
            found |= {int(label) for label in _LABELS.findall(block.data)}
            read += len(block.data)
    return found
