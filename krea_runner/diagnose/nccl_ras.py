"""The report of NCCL's RAS port (`ncclras`, `nc localhost 28028`), as JSON or text: who is missing, dead, behind or in error.

Read from NCCL's source, src/ras/client_support.cc, 2.24.3 to 2.30.7: text since 2.24; JSON (`SET FORMAT json`) since 2.28.7. The
text names ranks only where they are few against the communicator (or with `VERBOSE STATUS`); the JSON names all. An NCCL that
knows no JSON answers `ERROR: Unknown command` and then the text. Replies of the handshake before the report are passed over.

Counts are host-side launches: lower means that the rank has not come to the call that the others wait in. Equal counts in one
report say nothing; `progressed` compares two.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from krea_runner.errors import KreaRunnerError

MOST_TEXT = 64 << 20  # 16,384 ranks are 9 MB of JSON a communicator
NAMED = 8
DEAD, MISSING, ERROR, BEHIND, STATUS, TIMEOUT = "dead", "missing", "error", "behind", "status", "timeout"
# What the others wait for comes first; a rank that reports an error has often only noticed another's death.
_ORDER = (DEAD, MISSING, BEHIND, STATUS, ERROR, TIMEOUT)
# nccl.h, ncclResult_t. 0 is success, 7 in progress.
_RESULTS = {
    1: "unhandled CUDA error",
    2: "unhandled system error",
    3: "internal error",
    4: "invalid argument",
    5: "invalid usage",
    6: "remote error",
}
_FINE = {0, 7}


class RasError(KreaRunnerError):
    """No RAS report, or one that is cut short."""


@dataclass(frozen=True, slots=True)
class RasProcess:
    """A rank of a communicator, or (rank None) a process of the job. Unknown: host "", pid None, gpu None."""

    rank: int | None = None
    host: str = ""
    pid: int | None = None
    gpu: int | None = None
    """The CUDA index, as the process counts."""


@dataclass(frozen=True, slots=True)
class RasFinding:
    kind: str
    """dead, missing, error, behind, status, timeout."""
    communicator: str
    """Its hash; empty: of the job."""
    suspects: tuple[RasProcess, ...]
    """Empty where the report tells how many but not which."""
    reason: str
    confidence: str
    size: int = 0
    """Ranks of the communicator; 0: the report does not say. Ranks of one smaller than the job are not global ranks."""


@dataclass(frozen=True, slots=True)
class RasCommunicator:
    hash: str
    size: int
    counts: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    """Collective → rank → launches. Only in JSON; text tells only those that differ, in the findings."""


@dataclass(frozen=True, slots=True)
class RasVerdict:
    form: str
    """json or text."""
    nccl_version: str
    healthy: bool
    """True: the report has no error and no difference. A hang can still be: see `progressed`."""
    reason: str
    confidence: str
    findings: tuple[RasFinding, ...] = ()
    communicators: tuple[RasCommunicator, ...] = ()
    suspect_ranks: tuple[int, ...] = ()
    """Of the first finding that names some, in that communicator's own numbering."""
    suspect_hosts: tuple[str, ...] = ()


def analyse_ras(text: str) -> RasVerdict:
    """Raises `RasError` on anything that is no complete report."""
    if len(text) > MOST_TEXT:
        raise RasError(f"RAS report: {len(text)} characters, more than {MOST_TEXT} are not read")
    start = re.search(r"^\s*\{", text, re.MULTILINE)
    if start is not None and '"nccl_version"' in text:
        return _json_report(text[start.start() :])
    if "NCCL version " in text or "Job summary" in text:
        return _text_report(text)
    raise RasError(
        "not a report of NCCL's RAS port",
        hint="Save one with: srun --overlap -w NODE -n1 ncclras -v > ras.txt",
    )


def progressed(before: RasVerdict, after: RasVerdict) -> bool | None:
    """Whether any rank launched a collective between two JSON reports (≥ 30 s apart); None: they cannot tell."""
    counts = [{comm.hash: comm.counts for comm in verdict.communicators if comm.counts} for verdict in (before, after)]
    shared = counts[0].keys() & counts[1].keys()
    if not shared:
        return None
    return any(counts[0][name] != counts[1][name] for name in shared)


def _verdict(
    form: str, version: str, findings: Iterable[RasFinding], communicators: Iterable[RasCommunicator] = ()
) -> RasVerdict:
    ordered = sorted(findings, key=lambda finding: (_ORDER.index(finding.kind), -finding.size))
    named = next((finding for finding in ordered if finding.suspects), None)
    suspects = named.suspects if named else ()
    return RasVerdict(
        form=form,
        nccl_version=version,
        healthy=not ordered,
        reason=ordered[0].reason if ordered else "no rank is missing, dead, behind or in error",
        confidence=ordered[0].confidence if ordered else "high",
        findings=tuple(ordered),
        communicators=tuple(communicators),
        suspect_ranks=tuple(dict.fromkeys(process.rank for process in suspects if process.rank is not None)),
        suspect_hosts=tuple(dict.fromkeys(process.host for process in suspects if process.host)),
    )


# ------------------------------------------------------------------------------------------------ JSON


def _json_report(text: str) -> RasVerdict:
    try:
        document, _ = json.JSONDecoder().raw_decode(text.lstrip())
        comms = [_communicator(comm) for comm in _rows(document, "communicators")]
        timeouts = _int(document.get("ras", {}).get("timeouts_count", 0))
        version = str(document.get("nccl_version", ""))[:64]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise RasError(f"RAS report: cut short or damaged JSON ({str(error)[:120]})") from None
    findings = [finding for _, found in comms for finding in found]
    if timeouts:
        findings.append(_timeout(timeouts))
    return _verdict("json", version, findings, [comm for comm, _ in comms])


def _timeout(count: int) -> RasFinding:
    return RasFinding(TIMEOUT, "", (), f"{count} processes did not answer RAS in time", "low")


def _rows(document: Any, name: str) -> list[dict[str, Any]]:
    rows = document.get(name, [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise TypeError(f"{name} is not a list of tables")
    return rows


def _int(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 2**64:
        raise TypeError("a number is not a whole one")
    return value


def _process(row: Mapping[str, Any]) -> RasProcess:
    return RasProcess(
        _int(row["rank"]), str(row.get("host", ""))[:256], _int(row.get("pid", 0)), _int(row.get("cuda_dev", -1))
    )


def _communicator(row: dict[str, Any]) -> tuple[RasCommunicator, list[RasFinding]]:
    name, size = str(row.get("hash", ""))[:64], _int(row.get("size", 0))
    ranks, missing = _rows(row, "ranks"), _rows(row, "missing_ranks")
    counts: dict[str, dict[int, int]] = {}
    for rank in ranks:
        for operation, count in rank.get("collective_counts", {}).items():
            counts.setdefault(str(operation)[:64], {})[_int(rank["rank"])] = _int(count)
    of = {_int(rank["rank"]): _process(rank) for rank in ranks}
    found = [*_absent(missing, name, size)]
    for operation, by_rank in counts.items():
        most = max(by_rank.values())
        late = [of[rank] for rank, count in sorted(by_rank.items()) if count < most]
        if late:
            found.append(_behind(operation, name, size, late, min(by_rank.values()), most))
    states = {rank["rank"]: _state(rank.get("status", {})) for rank in ranks}
    if len(set(states.values())) > 1:
        usual = Counter(states.values()).most_common(1)[0][0]
        odd = [of[rank] for rank, state in sorted(states.items()) if state != usual]
        said = ", ".join(sorted({states[process.rank] for process in odd}))
        found.append(_odd_status(name, size, odd, said, usual))
    found.extend(
        _error(name, size, [_process(rank)], _RESULTS.get(code, f"result {code}"))
        for rank in ranks
        for code in {_int(rank.get("status", {}).get(key, 0)) for key in ("init_state", "async_error")} - _FINE
    )
    return RasCommunicator(name, size, counts), found


def _absent(missing: list[dict[str, Any]], name: str, size: int) -> Iterable[RasFinding]:
    kinds: dict[str, list[RasProcess]] = {DEAD: [], MISSING: [], STATUS: []}
    for rank in missing:
        status = rank.get("status", {})
        # Neither: its process answered, but does not know this communicator (NOCOMM in the text).
        kind = DEAD if status.get("considered_dead") else MISSING if status.get("unresponsive") else STATUS
        kinds[kind].append(_process(rank))
    words = {
        DEAD: "considered dead by RAS",
        MISSING: "did not answer RAS",
        STATUS: "no longer in the communicator (NOCOMM)",
    }
    for kind, processes in kinds.items():
        if processes:
            reason = f"{_named(processes)}: {words[kind]}"
            yield RasFinding(kind, name, tuple(processes), reason, "high" if kind == DEAD else "medium", size)


def _state(status: Mapping[str, Any]) -> str:
    """NCCL's own order in the text report."""
    if status.get("abort_flag"):
        return "ABORT"
    if status.get("finalize_called") or status.get("destroy_flag"):
        return "FINALIZE"
    return "RUNNING" if _int(status.get("init_state", 0)) == 0 else "INIT"


def _behind(operation: str, name: str, size: int, late: list[RasProcess], least: int, most: int) -> RasFinding:
    reason = f"{_named(late)}: {operation} launched {least} times, others {most} (communicator {name})"
    # The ranks of the majority are behind where one ran ahead: then nobody is named with certainty.
    few = not size or len(late) * 2 < size
    return RasFinding(BEHIND, name, tuple(late), reason, "high" if few else "low", size)


def _odd_status(name: str, size: int, odd: list[RasProcess], said: str, usual: str) -> RasFinding:
    reason = f"{_named(odd)}: {said} where the others are {usual or 'otherwise'} (communicator {name})"
    return RasFinding(STATUS, name, tuple(odd), reason, "medium", size)


def _error(name: str, size: int, ranks: list[RasProcess], what: str) -> RasFinding:
    return RasFinding(
        ERROR, name, tuple(ranks), f"{_named(ranks)}: NCCL reported {what} (communicator {name})", "medium", size
    )


def _named(processes: Iterable[RasProcess]) -> str:
    listed = list(processes)
    parts = []
    for process in listed[:NAMED]:
        who = f"rank {process.rank}" if process.rank is not None else f"process {process.pid}"
        parts.append(f"{who} ({process.host})" if process.host else who)
    more = f" and {len(listed) - NAMED} more" if len(listed) > NAMED else ""
    return ", ".join(parts) + more if parts else "some ranks, not named"


# ------------------------------------------------------------------------------------------------ text

_VERSION = re.compile(r"NCCL version ([0-9][^\s]{0,40})")
_GPU = r"GPUs? ([0-9]+)[0-9,]*(?: \(NVML [0-9,]+\))?"
_PROCESS = re.compile(rf"\s*Process ([0-9]{{1,10}}) on node (\S{{1,256}}) managing {_GPU}")
_RANK = re.compile(
    r"\s*Rank ([0-9]{1,9})(?: has status ([A-Z]+)| has launched up to operation ([0-9]{1,19})"
    r"|( has not launched any operations)| reported ([^\n]{1,120}?))? -- "
    rf"(?:{_GPU} managed by process ([0-9]{{1,10}}) on node (\S{{1,256}})|\[process information not found\])"
)
_MANY = re.compile(
    r"\s*([0-9]{1,9}) ranks (?:have status ([A-Z]+)|have launched up to operation ([0-9]{1,19})"
    r"|(have not launched any operations)|reported ([^\n]{1,120}))"
)
# 2.24 and 2.25 list ranks that they know nothing else of: "The missing ranks: 1,3", "Rank 1 has status NOCOMM".
_LISTED = re.compile(r"\s*The (?:missing|unknown) ranks?: ([0-9][0-9, ]{0,4096})")
_BARE = re.compile(r"\s*Rank ([0-9]{1,9}) has status ([A-Z]+)\s*$")
_SECTION = re.compile(r"#[0-9]+-[0-9]+ \(([0-9a-f]{1,16})\) (INCOMPLETE|ERROR|MISMATCH)\s*$")
_JOB_SECTION = re.compile(r"(INCOMPLETE|DEAD|TIMEOUT)\s*$")
_COUNTS = re.compile(r"\s*Communicator ranks have different (\S{1,64}) operation counts")
_STATUSES = re.compile(r"\s*Communicator ranks have different status")
_MISSING = re.compile(r"\s*Missing communicator data from ([0-9]{1,9}) (rank|job process)")
_DEAD = re.compile(r"\s*([0-9]{1,9}) job process(?:es are| is) considered dead")
_TIMEOUTS = re.compile(r"\s*Encountered ([0-9]{1,9}) communication timeout")


@dataclass(slots=True)
class _Block:
    """What one heading of the report covers: a fact of the job, or one table of one communicator."""

    kind: str
    communicator: str = ""
    operation: str = ""
    total: int = 0
    groups: list[tuple[str, int, list[RasProcess]]] = field(default_factory=list)
    """(status, count or error) → how many ranks, and those that are named."""


def _text_report(text: str) -> RasVerdict:
    version = _VERSION.search(text)
    errors = re.search(r"^Errors\s*\n=+", text, re.MULTILINE)
    if errors is None or not re.search(r"^Warnings\s*\n=+", text, re.MULTILINE):
        raise RasError(
            "RAS report: cut short, it has no list of errors and warnings",
            hint="The query takes up to 15 s: give the client that long (ncclras -t 15).",
        )
    blocks: list[_Block] = []
    for line in text[errors.start() :].split("\n"):
        _read_line(line, blocks)
    findings = [finding for block in blocks if (finding := _of_block(block)) is not None]
    return _verdict("text", version[1] if version else "", findings)


def _read_line(line: str, blocks: list[_Block]) -> None:
    if (section := _SECTION.match(line)) is not None:
        kind = {"INCOMPLETE": MISSING, "ERROR": ERROR, "MISMATCH": STATUS}[section[2]]
        blocks.append(_Block(kind, section[1]))
    elif (job := _JOB_SECTION.match(line)) is not None:
        blocks.append(_Block({"INCOMPLETE": MISSING, "DEAD": DEAD, "TIMEOUT": TIMEOUT}[job[1]]))
    elif not blocks:
        return
    elif (counts := _COUNTS.match(line)) is not None:
        blocks.append(_Block(BEHIND, blocks[-1].communicator, counts[1]))
    elif _STATUSES.match(line):
        blocks.append(_Block(STATUS, blocks[-1].communicator))
    elif (total := _MISSING.match(line) or _DEAD.match(line) or _TIMEOUTS.match(line)) is not None:
        blocks[-1].total = int(total[1])
    elif (many := _MANY.match(line)) is not None:
        blocks[-1].groups.append((_value(many[2], many[3], many[4], many[5]), int(many[1]), []))
    elif (listed := _LISTED.match(line)) is not None:
        for number in re.findall(r"[0-9]+", listed[1]):
            _name(blocks[-1], "", RasProcess(int(number)))
    elif (bare := _BARE.match(line)) is not None:
        _name(blocks[-1], bare[2], RasProcess(int(bare[1])))
    elif (process := _PROCESS.match(line)) is not None:
        _name(blocks[-1], "", RasProcess(None, process[2], int(process[1]), int(process[3])))
    elif (rank := _RANK.match(line)) is not None:
        known = rank[8] is not None
        named = RasProcess(
            int(rank[1]), rank[8] or "", int(rank[7]) if known else None, int(rank[6]) if known else None
        )
        _name(blocks[-1], _value(rank[2], rank[3], rank[4], rank[5]), named)


def _value(status: str | None, count: str | None, none: str | None, error: str | None) -> str:
    return status or count or ("0" if none else "") or error or ""


def _name(block: _Block, value: str, process: RasProcess) -> None:
    """A line with a value is a rank alone with it; one without belongs to the `N ranks …` line above."""
    if value or not block.groups:
        block.groups.append((value, 1, [process]))
    else:
        block.groups[-1][2].append(process)


def _of_block(block: _Block) -> RasFinding | None:
    name = block.communicator
    named = [process for _, _, processes in block.groups for process in processes]
    of = f" of communicator {name}" if name else ""
    if block.kind == TIMEOUT:
        return _timeout(block.total)
    if block.kind == DEAD:
        return RasFinding(
            DEAD, "", tuple(named), f"{block.total} processes dead (RAS cannot reach them): {_named(named)}", "high"
        )
    if block.kind == MISSING:
        return RasFinding(
            MISSING,
            name,
            tuple(named),
            f"{block.total} ranks or processes{of} did not answer: {_named(named)}",
            "medium",
        )
    if not block.groups:
        return None  # the bare heading of a MISMATCH, whose tables follow
    size = sum(count for _, count, _ in block.groups)
    if block.kind == BEHIND:
        values = [int(value) for value, _, _ in block.groups if value.isdecimal()]
        late = [group for group in block.groups if group[0].isdecimal() and int(group[0]) < max(values, default=0)]
        processes = [process for _, _, some in late for process in some]
        finding = _behind(block.operation, name, size, processes, min(values, default=0), max(values, default=0))
        return finding if processes else RasFinding(BEHIND, name, (), finding.reason, "low", size)
    if block.kind == STATUS:
        usual = max(block.groups, key=lambda group: group[1])
        odd = [group for group in block.groups if group is not usual]
        said = ", ".join(sorted({group[0] for group in odd}))
        return _odd_status(name, size, [process for _, _, some in odd for process in some], said, usual[0])
    return _error(name, 0, named, ", ".join(dict.fromkeys(value for value, _, _ in block.groups)))
