"""What Slurm says of its nodes, and of the nodes that a job may have.

`scontrol show node` and not `sinfo -N`: it takes 22 ms at 4,000 nodes where sinfo takes 629, and sinfo shows fewer flags (no
`*`, no RESERVED; 22.05.8). Not with `-o` either: there a reason's line breaks become spaces. In the long form a reason's
further lines are indented by ten columns, every key of the node's own by three.
"""

import re
from collections.abc import Sequence

from krea_runner.errors import SchedulerOutputError
from krea_runner.schedulers import NodeRecord, Placement
from krea_runner.schedulers.nodelist import NodelistError, expand

NODES_ARGV = ("scontrol", "-a", "show", "node")
_NOTHING = frozenset({"", "(null)", "N/A", "None"})
_FIELD_END, _ROW_END = "\x1f", "\x1e"  # a partition may be called `a|b` (22.05.8)
_FORMAT = _FIELD_END.join(("%i", "%P", "%x", "%n", "%v", "%f"))


def placements_argv(job_ids: Sequence[str]) -> list[str]:
    # Not -O, which has no field for excluded nodes (22.05.8). The first id twice: a single one that is not known is an error.
    ids = ",".join([*job_ids, job_ids[0]])
    return ["squeue", "-a", "-r", "-h", "-t", "all", "-j", ids, "-o", f"{_FORMAT}{_ROW_END}"]


def parse_placements(stdout: str) -> dict[str, Placement]:
    """By job id; a heterogeneous job's leader has the id that was asked for.

    Raises: SchedulerOutputError.
    """
    found: dict[str, Placement] = {}
    *rows, rest = stdout.split(_ROW_END)
    for row in rows:
        job_id, *values = row.lstrip("\n").split(_FIELD_END, 5)
        if len(values) < 5:
            raise SchedulerOutputError("reading squeue: not what was asked for", line=row)
        found.setdefault(job_id.partition("+")[0], _placement(values))
    if rest.strip():
        raise SchedulerOutputError("reading squeue: not what was asked for", line=rest)
    return found


def _placement(values: Sequence[str]) -> Placement:
    partitions, excluded, required, reservation, features = ("" if value in _NOTHING else value for value in values)
    return Placement(
        partitions=_words(partitions),
        excluded=tuple(_names(excluded)),
        required=tuple(_names(required)),
        reservation=reservation,
        # `[a|b]`, `a*2`, ...: which nodes those allow is Slurm's to know.
        features=frozenset(re.split("[&,]", features) if re.fullmatch(r"[\w.&,-]+", features) else ()),
    )


def parse_nodes(stdout: str, names: Sequence[str] | None = None) -> dict[str, NodeRecord]:
    """By name, in Slurm's order. `names` picks some.

    Raises: SchedulerOutputError.
    """
    wanted = None if names is None else frozenset(names)
    found: dict[str, NodeRecord] = {}
    for block in re.split(r"\n\n(?=NodeName=)", stdout.strip()):
        if block in {"", "No nodes in the system"}:
            continue
        match = re.match(r"NodeName=(\S+)", block)
        if match is None:
            raise SchedulerOutputError("reading scontrol show node: not what was asked for", line=block[:500])
        if (wanted is None or match[1] in wanted) and match[1] not in found:
            found[match[1]] = _node(match[1], block)
    return found


def _node(name: str, block: str) -> NodeRecord:
    reason, by, at = _reason(block)
    state = _value(block, "State")
    if not state:
        raise SchedulerOutputError(f"reading scontrol show node: {name} has no state", line=block[:500])
    return NodeRecord(
        name=name,
        raw_state=state,
        partitions=_words(_value(block, "Partitions")),
        features=_words(_value(block, "ActiveFeatures")),
        gres=_value(block, "Gres"),
        reservation=_value(block, "ReservationName"),
        reason=reason,
        reason_by=by,
        reason_at=at,
    )


def _value(block: str, key: str) -> str:
    """Of the first line of the node's own that starts with it: what an operator wrote comes after those."""
    match = re.search(rf"^   {key}=(\S*)", block, re.MULTILINE)
    return match[1] if match and match[1] not in _NOTHING else ""


def _reason(block: str) -> tuple[str, str, float | None]:
    """Its text with its line breaks, who set it and when: ` [root@1796222348]` stands after the first line."""
    match = re.search(r"^   Reason=(.*(?:\n {10}.*)*)", block, re.MULTILINE)
    if match is None:
        return "", "", None
    first, *more = match[1].split("\n")
    signed = re.fullmatch(r"(.*) \[([^\[\]@]+)@([^\]]*)\]", first)
    text, by, at = signed.groups() if signed else (first, "", "")
    return "\n".join([text, *(line[10:] for line in more)]), by, float(at) if at.isdigit() else None


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)


def _names(text: str) -> list[str]:
    try:
        return expand(text)
    except NodelistError as error:
        raise SchedulerOutputError(f"reading squeue: {error}", line=text) from error
