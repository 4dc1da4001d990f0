"""Events → one verdict. What came first, what only followed, who did it.

1. Cut the appended log: only what came after the last restart counts.
2. Set aside what the run survived: events with progress after them.
3. Pick the cause: Slurm's decision, unless something had failed before it; the kernel's word; the fault that names
   itself; then symptoms, each weaker than the one before it.
4. Name suspects by the rule of that cause (blame.py, timeouts.py)."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from krea_runner.diagnose.gather import SURVIVED_BY, Event, Log
from krea_runner.diagnose.kernel import KernelFact, facts
from krea_runner.diagnose.layout import Layout
from krea_runner.diagnose.timeouts import Blame, analyse

FAILING = ("root", "exception", "signal", "fabric", "network", "stuck", "timeout", "exit", "scheduler")
SAME_MOMENT_S = 5.0  # the kernel log has whole seconds, and another clock
USER_FAULTS = frozenset(
    "user_exception launch_config_error cuda_oom numeric_divergence collective_desync storage_full checkpoint_corrupt "
    "external_service_error cuda_device_assert shm_exhausted".split()
)
GPU_FAULTS = frozenset("gpu_ecc gpu_fell_off_bus gpu_nvlink gpu_hang_driver gpu_init_failure".split())
# Of exceptions that no signature knows: the class or the message says that something outside of the process may have done it.
_FROM_OUTSIDE = re.compile(
    r"[\w.]*(?:Connect|Timeout|TimedOut|Network|Socket|Pipe|Unavailable|Retr(?:y|ies)|Interrupt|Cancel|Signal|Peer|EOF|IOError"
    r"|SystemExit)|(?:[\w.]+\.)?(?:OSError|BlockingIOError)\b"
    r"|.{0,300}?\b(?i:connection|timed? ?out|broken pipe|unreachable|unavailable|reset by peer|refused|temporar|try again)"
)
STOPS_IN_PEACE = {"slurm_cancelled", "slurm_preempted", "slurm_time_limit"}


@dataclass(slots=True)
class TableRow:
    """A process in torchelastic's table of failures."""

    rank: int
    node: str
    code: int
    pid: int


@dataclass(slots=True)
class Story:
    """What is known before the suspects are named."""

    cause: str
    first: Event | None = None
    events: list[Event] = field(default_factory=list)
    """That speak for the cause, in order of time."""
    fallout: list[Event] = field(default_factory=list)
    kernel: list[KernelFact] = field(default_factory=list)
    table: list[TableRow] = field(default_factory=list)
    blame: Blame | None = None
    confidence: str = "high"
    why: str = ""


def tell(logs: list[Log], layout: Layout, since: float | None = None) -> Story:
    """`since`: when the attempt began, where that is known better than from the first time in its logs."""
    events = sorted(
        (event for log in logs if not log.kernel for event in this_attempt(log)), key=lambda event: event.order
    )
    table = elastic_table(events, layout)
    known = {log_number: log for log_number, log in enumerate(logs)}
    failing = [event for event in events if event.role in FAILING and not _is_harmless(event)]
    open_events = [event for event in failing if known[event.log].progress_after(event.line) < SURVIVED_BY]
    ended_badly = [event for event in open_events if event.role in {"exit", "scheduler", "signal"}]
    if not open_events:
        return _no_failure(events, layout)
    if layout.still_running and all(known[e.log].progress_after(e.line) for e in open_events) and not ended_badly:
        return _no_failure(events, layout)
    if any(event.role == "end" and _exit_0(event, open_events) for event in events):
        return _no_failure(events, layout)
    if any(event.role == "end" for event in events) and all(
        event.role in {"network", "fallout"} for event in open_events
    ):
        return _no_failure(events, layout)
    kernel = facts(logs, layout, since if since is not None else _started_at(logs))
    story = _choose(open_events, events, kernel, table, layout)
    story.table, story.kernel = table, kernel
    story.fallout = [event for event in events if event.role != "context" and event not in story.events]
    return story


def this_attempt(log: Log) -> list[Event]:
    """The log's events after its last restart: a start banner after something had ended, or torchelastic's own word."""
    begin, ended = 0, False
    for event in log.events:
        if event.role == "restart" or (event.role == "start" and ended):
            begin, ended = event.line, False
        elif event.role in {"exit", "scheduler", "signal"}:
            ended = True
    return [event for event in log.events if event.line >= begin]


def _exit_0(event: Event, failures: list[Event]) -> bool:
    """The script's own word that all ended well, and nothing after it."""
    return event.message.startswith("==> exit") and all(failure.line < event.line for failure in failures)


def _is_harmless(event: Event) -> bool:
    return event.mild and event.role != "timeout"


def _started_at(logs: list[Log]) -> float | None:
    starts = [log.first_at for log in logs if not log.kernel and log.first_at is not None]
    return min(starts) if starts else None


def _no_failure(events: list[Event], layout: Layout) -> Story:
    if any(event.role == "end" for event in events):
        return Story("completed", why="the log says that training is done, and nothing failed before that")
    steps = [event for event in events if event.signature.name in {"slurm-step-cancelled", "slurm-task-failure"}]
    if steps and not layout.still_running:
        return Story(
            "slurm_cancelled",
            steps[0],
            steps,
            confidence="medium",
            why="the step was cancelled, and nothing had failed",
        )
    if layout.still_running is False:
        return Story("completed", confidence="medium", why="the job has ended and no line of it tells of a failure")
    return Story("healthy_running", why="no failure, or progress went on after it")


def elastic_table(events: Iterable[Event], layout: Layout) -> list[TableRow]:
    rows, node, rank = list[TableRow](), "", -1
    for event in sorted(events, key=lambda event: (event.log, event.line)):
        name = event.signature.name
        if name == "elastic-table-host":
            node = layout.short(event.groups["node"]) or event.groups["node"]
        elif name == "elastic-table-rank":
            rank = int(event.groups["rank"])
            layout.rank_nodes.setdefault(rank, node)
        elif name == "elastic-table-exit" and rank >= 0:
            row = TableRow(rank, node, int(event.groups["code"]), int(event.groups["pid"]))
            layout.pid_ranks.setdefault((node, row.pid), rank)
            layout.pid_ranks.setdefault(("", row.pid), rank)
            rows.append(row)
            rank = -1
    return rows


def _choose(
    events: list[Event], everything: list[Event], kernel: list[KernelFact], table: list[TableRow], layout: Layout
) -> Story:
    _find_ranks(events, layout)
    by_role: dict[str, list[Event]] = {}
    for event in events:
        by_role.setdefault(event.role, []).append(event)
    cut = _teardown_line(by_role)
    faults = _faults(by_role, table)
    scheduler = _scheduler(by_role, faults)
    strong = [fact for fact in kernel if not fact.weak]
    if scheduler is not None and not (scheduler.cause == "node_failure" and strong):
        return scheduler
    word = _kernel_word(kernel, strong, faults, by_role)
    if word is not None:
        return word
    deaths = [event for event in by_role.get("signal", []) if _is_death(event, cut)]
    lost = _lost_peer(deaths, faults, by_role)
    if faults and not lost:
        return _fault_story(faults, everything)
    hard = lost or [event for event in deaths if not _is_abort(event)]
    if hard:
        return _signal_story(hard)
    for role, why in (
        ("fabric", "RDMA errors, and nothing before them"),
        ("network", "connections broke, and nothing says why"),
        ("stuck", "the reporting rank itself is stuck"),
    ):
        found = [event for event in by_role.get(role, []) if role != "network" or event.signature.cause]
        if role == "network":
            found = _network(found, by_role)
        if role == "stuck":
            found = _stuck(found, by_role)
        if found:
            return _symptom_story(found, why, by_role, role)
    if "timeout" in by_role:
        return _timeout_story(by_role["timeout"], everything, layout)
    if deaths:
        return _signal_story(deaths)
    rest = by_role.get("network", []) or by_role.get("exit", []) or events
    if rest[0].role == "network":
        return Story(
            rest[0].signature.cause, rest[0], rest, confidence="low", why="only secondary network errors are left"
        )
    return Story("unknown_failure", rest[0], rest[:1], confidence="low", why="an exit code, and no line that says why")


def _find_ranks(events: list[Event], layout: Layout) -> None:
    """Second look, now that tables and NCCL lines of the whole log are known."""
    for event in events:
        if event.rank is None and event.pid is not None:
            event.rank = layout.rank_of_pid(event.node, event.pid)
        if event.rank is None and "pid" in event.groups:
            event.rank = layout.pid_ranks.get(("", int(event.groups["pid"])))
        if not event.node and event.rank is not None:
            event.node = layout.node_of(event.rank)


def _teardown_line(by_role: dict[str, list[Event]]) -> tuple[float, int, int]:
    """From here on, deaths are Slurm's doing."""
    cancelled = [event.order for event in by_role.get("scheduler", [])]
    return min(cancelled, default=(float("inf"), 0, 0))


def _faults(by_role: dict[str, list[Event]], table: list[TableRow]) -> list[Event]:
    """Faults that name themselves; exceptions nobody knows count unless a hang or an RDMA error came before them."""
    roots = by_role.get("root", [])
    earlier = min((e.order for role in ("fabric", "stuck", "timeout") for e in by_role.get(role, [])), default=None)
    exceptions = [e for e in by_role.get("exception", []) if earlier is None or e.order < earlier]
    faults = sorted([*roots, *exceptions], key=lambda event: event.order)
    if any(event.signature.cause == "silent_data_corruption" for event in faults):
        faults = [event for event in faults if event.signature.cause != "numeric_divergence"]
    known_oom = [event for event in faults if event.signature.cause == "host_oom"]
    if known_oom:  # slurmstepd tells of it last, the dead workers before it
        faults = known_oom + [e for e in faults if e.signature.cause not in {"host_oom", "dataloader_worker_died"}]
        if any(e.order < known_oom[0].order and e.role == "root" for e in faults if e not in known_oom):
            faults = [event for event in faults if event not in known_oom] + known_oom
        elif len(known_oom) < len(faults):
            faults = sorted(faults, key=lambda event: event.order)
    return faults


def _scheduler(by_role: dict[str, list[Event]], faults: list[Event]) -> Story | None:
    decisions = by_role.get("scheduler", [])
    if not decisions:
        return None
    first = decisions[0]
    cause = first.signature.cause
    same = [event for event in decisions if event.signature.cause == cause]
    nodes = [event for event in decisions if event.signature.cause == "node_failure"]
    named = [event for event in nodes if "node" in event.groups]
    before = [event for event in faults if event.order < first.order]
    if nodes:
        if before and not named:
            return None
        return (
            None
            if before and before[0].role == "root"
            else Story("node_failure", nodes[0], nodes, why="Slurm itself gave the node up")
        )
    weaker = ("signal", "exit", "fabric", "stuck", "timeout") if cause in STOPS_IN_PEACE else ("signal",)
    before += [event for role in weaker for event in by_role.get(role, []) if event.order < first.order]
    if before:
        return None
    return Story(cause, first, same, why="Slurm's own word, and nothing had failed before it")


def _kernel_word(
    kernel: list[KernelFact], strong: list[KernelFact], faults: list[Event], by_role: dict[str, list[Event]]
) -> Story | None:
    if not strong and not (kernel and not faults):
        return None
    fact = (strong or kernel)[0]
    if fact.weak and fact.cause != "gpu_ecc":
        return None
    user = [event for event in faults if event.signature.cause in USER_FAULTS]
    if user and user[0] is faults[0]:
        same_node = user[0].node == fact.node or not user[0].node
        timed_after = fact.event.at is None or fact.event.order > user[0].order
        if timed_after or not same_node:
            return None
    if fact.cause == "storage_io_error" and faults and faults[0].signature.cause != "storage_io_error":
        return None
    if fact.cause == "host_oom" and faults and faults[0].signature.cause not in {"host_oom", "dataloader_worker_died"}:
        return None
    if fact.cause == "fabric_link_error" and faults:
        return None
    if fact.cause == "gpu_init_failure" and faults and faults[0].signature.cause != "gpu_init_failure":
        return None
    everything = sorted((e for role in FAILING for e in by_role.get(role, [])), key=lambda event: event.order)
    visible = faults or [e for e in everything if e.role not in {"exit", "scheduler"}] or everything
    on_node = [event for event in visible if event.node == fact.node]
    log_first = (on_node if faults and on_node else visible)[0]
    first = (
        fact.event
        if fact.event.at is not None and fact.event.order[0] < log_first.order[0] - SAME_MOMENT_S
        else log_first
    )
    mine = [f.event for f in strong or kernel if f.cause == fact.cause and f.node == fact.node]
    support = [event for event in on_node if event.role in {"root", "exception", "stuck"}]
    return Story(fact.cause, first, [*mine, *support], why=f"the kernel log of {fact.node or 'the node'} names it")


def _fault_story(faults: list[Event], everything: list[Event]) -> Story:
    first = faults[0]
    cause = first.signature.cause
    if cause in {"cuda_illegal_access", "user_exception"}:
        hardware = [
            event for event in faults
            if event.signature.cause in GPU_FAULTS and (not event.node or not first.node or event.node == first.node)
        ]  # fmt: skip
        if hardware and cause == "cuda_illegal_access":
            first, cause = min(first, hardware[0], key=lambda event: event.order), hardware[0].signature.cause
            return Story(cause, hardware[0], hardware, why="a GPU of the same node reports a hardware fault")
    full = [
        event
        for event in faults
        if event.signature.cause == "storage_full" and event.signature.name != "torch-save-failed"
    ]
    if first.signature.name == "torch-save-failed" and not full:
        io = [event for event in faults if event.signature.cause == "storage_io_error"]
        if io:
            return Story("storage_io_error", first, [first, *io], why="the write failed, and an I/O error is near it")
    same = [event for event in faults if event.signature.cause == cause]
    if cause == "silent_data_corruption":
        doubt = [e for e in everything if e.signature.name == "megatron-unexpected" and e.order <= first.order]
        first, same = (doubt or [first])[0], [*doubt, *same]
    if first.signature.name == "torch-save-failed" and not full:
        why = "a checkpoint could not be written, and torch does not say for what reason"
        return Story(cause, first, same, confidence="medium", why=why)
    if first.role == "exception" and _FROM_OUTSIDE.match(first.message):
        why = "an exception about a connection, a time-out or an interruption: perhaps not the code's fault"
        return Story(cause, first, same, confidence="medium", why=why)
    return Story(cause, first, same, why="the message names the fault, and nothing failed before it")


def _lost_peer(deaths: list[Event], faults: list[Event], by_role: dict[str, list[Event]]) -> list[Event]:
    """One rank died of a signal without a word, before srun had ended any other; then several others raised what nobody knows:
    what their own code says of a peer that is gone."""
    raising: set[int] = set().union(*(event.all_ranks for event in faults))
    dead: set[int] = set().union(*(event.all_ranks for event in deaths))
    if len(dead) != 1 or len(raising) < 2 or dead & raising or any(event.role != "exception" for event in faults):
        return []
    exits = [event for event in by_role.get("exit", []) if event.log == deaths[0].log]
    return deaths[:1] if all(event.line > deaths[0].line for event in exits) else []


def _is_death(event: Event, cut: tuple[float, int, int]) -> bool:
    if event.order > cut:
        return False
    return event.signature.name != "elastic-failed" or int(event.groups["code"]) in {
        -4,
        -6,
        -7,
        -8,
        -9,
        -11,
        132,
        134,
        135,
        137,
        139,
    }


def _is_abort(event: Event) -> bool:
    return event.groups.get("signal") == "Aborted" or event.groups.get("code") in {"-6", "134"}


def _signal_story(deaths: list[Event]) -> Story:
    order = {"Segmentation fault": 0, "Bus error": 0}
    first = min(
        deaths,
        key=lambda event: (
            order.get(event.groups.get("signal", ""), 0 if "signal" not in event.groups else 1),
            event.order,
        ),
    )
    how = (first.groups.get("signal"), first.groups.get("code"))
    same = [event for event in deaths if (event.groups.get("signal"), event.groups.get("code")) == how]
    return Story(
        "process_signal_crash",
        first,
        same or [first],
        confidence="medium",
        why="a process died of a signal, and nothing says why",
    )


def _network(found: list[Event], by_role: dict[str, list[Event]]) -> list[Event]:
    """Broken connections before a hang was noticed are its cause; those after it are its fallout."""
    later = [event.order for role in ("stuck", "timeout") for event in by_role.get(role, [])]
    return [event for event in found if not later or event.order < min(later)]


def _stuck(found: list[Event], by_role: dict[str, list[Event]]) -> list[Event]:
    """A rank that reports a time-out first and a stuck watchdog later is stuck in its own tear-down."""
    reported: dict[int, tuple[float, int, int]] = {}
    for event in by_role.get("timeout", []):
        if event.rank is not None:
            reported.setdefault(event.rank, event.order)
    return [event for event in found if event.rank not in reported or event.order < reported[event.rank]]


def _symptom_story(found: list[Event], why: str, by_role: dict[str, list[Event]], role: str) -> Story:
    cause = found[0].signature.cause
    if role == "network":
        warned = [event for event in found if event.signature.name != "nccl-exception"]
        strong = [event for event in warned if event.signature.name != "ib-completion-flush"]
        found = strong or warned or found
        cause = found[0].signature.cause
    same = [event for event in found if event.signature.cause == cause]
    return Story(cause, found[0], same, confidence="medium", why=why)


def _timeout_story(timeouts: list[Event], everything: list[Event], layout: Layout) -> Story:
    statuses = [event for event in everything if event.signature.name == "collective-status"]
    blame = analyse(timeouts, statuses, layout)
    cause = "collective_desync" if blame.desync else "nccl_timeout"
    return Story(
        cause,
        blame.first,
        timeouts,
        blame=blame,
        confidence="medium" if blame.ranks else "low",
        why="time-outs, and nothing before them",
    )
