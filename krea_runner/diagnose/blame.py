"""Suspects: which nodes, ranks and GPUs, by the rule of the cause. Nobody is named where the evidence singles nobody out."""

import re
from collections import Counter
from dataclasses import dataclass, field

from krea_runner.diagnose.gather import Log
from krea_runner.diagnose.kernel import KernelFact
from krea_runner.diagnose.layout import Layout
from krea_runner.diagnose.reason import GPU_FAULTS, Story, TableRow
from krea_runner.diagnose.verdict import Suspects
from krea_runner.model import Suspect

MISSING_FILE = re.compile(
    r"(?:FileNotFoundError|ModuleNotFoundError|ImportError|PermissionError|NotADirectoryError|OSError)\b"
)
_FOREIGN = re.compile(r"Process (\d+) has ([\d.]+) GiB memory in use")
_OWN = re.compile(r"this process has ([\d.]+) GiB memory in use")
_CODES = {"shm_exhausted": {-7}, "host_oom": {-9}, "process_signal_crash": {-4, -6, -7, -8, -9, -11}}
_NODE_OF_RANK = (
    frozenset("process_signal_crash nccl_watchdog_stuck node_failure silent_data_corruption storage_io_error".split())
    | GPU_FAULTS
)


@dataclass(slots=True)
class Named:
    nodes: set[str] = field(default_factory=set)
    ranks: set[int] = field(default_factory=set)
    gpus: set[str] = field(default_factory=set)
    reason: str = ""


def suspects(story: Story, layout: Layout, logs: list[Log], spoke: set[int]) -> Suspects:
    """`spoke` are the labels seen in the log, for causes where silence is the evidence. May change `story.cause`: a missing
    file on one node only is that node's mount."""
    named = _named(story, layout, logs, spoke)
    named.nodes.discard("")
    reasons = [Suspect("node", node, named.reason) for node in sorted(named.nodes)]
    reasons += [Suspect("rank", str(rank), named.reason) for rank in sorted(named.ranks)[:8]]
    return Suspects(tuple(sorted(named.nodes)), tuple(sorted(named.ranks)), tuple(sorted(named.gpus)), tuple(reasons))


def _named(story: Story, layout: Layout, logs: list[Log], spoke: set[int]) -> Named:
    if story.cause == "silent_data_corruption":
        return _wrong_gpu(story, layout, logs)
    if story.cause in {"fabric_link_error", "nccl_network_error"} and not _by_kernel(story):
        return _endpoints(story, layout)
    if story.cause == "rendezvous_failure":
        return _absent(story, layout, spoke)
    if story.blame is not None:
        return Named(ranks=set(story.blame.ranks), reason=story.blame.reason)
    if story.cause == "collective_desync":
        return Named(ranks={e.rank for e in story.events if e.rank is not None}, reason="issued another collective")
    if story.cause == "node_failure":
        return _lost_node(story, layout)
    if story.cause in {"slurm_launch_failure", "host_oom"} and any("node" in e.groups for e in story.events):
        return _named_by_slurm(story, layout)
    if story.cause.startswith("slurm_") or story.cause in {
        "healthy_running",
        "completed",
        "unknown_failure",
        "launch_config_error",
    }:
        return Named()
    return _reporters(story, layout)


def _wrong_gpu(story: Story, layout: Layout, logs: list[Log]) -> Named:
    """A result that another GPU cannot reproduce accuses the GPU of the attempt before; the reporter ran the check."""
    ranks = {event.rank for event in story.events if event.rank is not None}
    told = [
        e
        for log in logs
        for e in log.events
        if e.signature.name.startswith("megatron-") and "node" in e.groups and e.rank in ranks
    ]
    persistent = any("persistent" in e.message or "different GPU" in e.message for e in story.events)
    if persistent and told:
        told = [event for event in told if event.groups["node"] == told[0].groups["node"]]
    nodes = {layout.short(e.groups["node"]) or e.groups["node"] for e in told} or {
        layout.node_of(rank) for rank in ranks
    }
    gpus = {f"{node}:{e.groups['gpu']}" for e in told for node in nodes}
    return Named(nodes, ranks, gpus, "its GPU gave the result that could not be reproduced")


def _by_kernel(story: Story) -> bool:
    return any(event.role == "kernel" for event in story.events)


def _reporters(story: Story, layout: Layout) -> Named:
    """Those whose own message it is."""
    ranks: set[int] = set().union(*(event.all_ranks for event in story.events)) if story.events else set()
    named = Named(reason="reported it first")
    facts = [fact for fact in story.kernel if any(fact.event is event for event in story.events)]
    if facts:
        _from_kernel(named, facts, ranks, story, layout)
        ranks = named.ranks
    elif "hsa" in (story.first.groups if story.first else {}) and story.cause == "gpu_hang_driver":
        named.nodes = {e.node for e in story.events} or set()
        named.nodes |= {row.node for row in story.table[:1]} if not any(named.nodes) else set()
        named.gpus = {f"{node}:hsa-node-{e.groups['hsa']}" for node in named.nodes for e in story.events[:1]}
        if len(layout.nodes) == 1:
            named.nodes = set(layout.nodes)
        return named
    if not ranks:
        ranks = _from_table(story, layout)
    checkpoint = re.search(r"ranks:dict_keys\(\[([\d, ]+)\]", story.first.message) if story.first else None
    if checkpoint and story.cause == "checkpoint_corrupt":
        ranks = {int(number) for number in checkpoint[1].split(",") if number.strip()}
    if layout.world_size > 1 and len(ranks) >= layout.world_size:
        ranks = set()
    named.ranks = ranks
    alone = story.cause == "process_signal_crash" and len(layout.nodes) < 2
    if story.cause in _NODE_OF_RANK - {"storage_io_error"} and not alone:
        named.nodes |= {layout.node_of(rank) for rank in ranks}
        named.nodes |= {event.node for event in story.events if event.node and event.role in {"root", "kernel"}}
    if story.cause in GPU_FAULTS or story.cause in {"silent_data_corruption", "cuda_illegal_access"}:
        named.gpus |= {f"{layout.node_of(r)}:{layout.gpu_of(r)}" for r in ranks if not facts and layout.node_of(r)}
    _one_node_only(named, story, layout)
    return named


def _from_kernel(named: Named, facts: list[KernelFact], ranks: set[int], story: Story, layout: Layout) -> None:
    node = facts[0].node
    named.reason = f"its kernel log: {facts[0].event.message[:90]}"
    if node and story.cause in _NODE_OF_RANK | {"fabric_link_error"}:
        named.nodes.add(node)
    reported = {rank for rank in ranks if layout.node_of(rank) == node}
    own = {fact.rank for fact in facts if fact.rank is not None}
    named.ranks = reported or own
    named.gpus |= {f"{fact.node}:{fact.device}" for fact in facts if fact.device is not None}


def _from_table(story: Story, layout: Layout) -> set[int]:
    """Lines without a rank (before init_process_group, torch <= 2.2) are attributed by the table of the agent that failed."""
    wanted = _CODES.get(story.cause)
    explained = {event.rank for event in story.fallout if event.role in {"network", "timeout", "stuck"}}
    rows: list[TableRow] = [row for row in story.table if row.code != -15 and row.rank not in explained]
    nodes = {event.node for event in story.events if event.node}
    if nodes:
        rows = [row for row in rows if row.node in nodes]
    exact = [row for row in rows if wanted and row.code in wanted]
    if exact:
        return {row.rank for row in exact}
    if story.events and story.events[0].role in {"root", "exception"} and any(row.code == 1 for row in rows):
        rows = [row for row in rows if row.code == 1]
    return {row.rank for row in rows}


def _one_node_only(named: Named, story: Story, layout: Layout) -> None:
    """The same missing file on every rank of one node, while other nodes went on, is that node's mount."""
    if story.cause not in {"user_exception", "storage_io_error"} or len(layout.nodes) < 2 or story.first is None:
        return
    nodes = {layout.node_of(rank) for rank in named.ranks}
    whole = len(nodes) == 1 and len(named.ranks) > 1 and named.ranks == set(layout.ranks_on(next(iter(nodes))))
    if story.cause == "storage_io_error":
        if len(nodes) == 1:
            named.nodes |= nodes
        if whole or _by_kernel(story):
            story.why = f"one node only; {story.why}"
        return
    if whole and MISSING_FILE.match(story.first.message):
        story.cause, story.why = "storage_io_error", "every rank of one node misses a file that the other nodes have"
        named.nodes |= nodes
        named.reason = "the only node where the file is missing"


def stray_process(story: Story, layout: Layout) -> bool:
    """Memory exhausted by a process that is not the job's: the node's fault, not the model's size."""
    if story.cause != "cuda_oom" or story.first is None:
        return False
    own = _OWN.search(story.first.message)
    mine = float(own[1]) if own else 0.0
    for pid, size in _FOREIGN.findall(story.first.message):
        is_ours = any(known == int(pid) for _, known in layout.pid_ranks)
        if not is_ours and float(size) > mine and float(size) > 1.0:
            return True
    return False


def _endpoints(story: Story, layout: Layout) -> Named:
    """The node at which all reports meet; both ends where there is one pair only."""
    pairs: list[tuple[str, str]] = []
    reporters: dict[str, set[int]] = {}
    local = story.first is not None and story.first.signature.blame == "reporter" and story.cause == "fabric_link_error"
    for event in story.events:
        peer = layout.short(next((event.groups[key] for key in ("peer", "peer2", "peer3") if key in event.groups), ""))
        if event.rank is not None:
            reporters.setdefault(event.node, set()).add(event.rank)
        if event.node or peer:
            pairs.append((event.node, peer))
    if story.first is not None and story.first.signature.blame == "ofi":
        return _ofi(story, layout, reporters)
    if local:
        return Named(
            {event.node for event in story.events[:1]},
            story.events[0].all_ranks,
            reason="its own adapter reports the error",
        )
    ends = Counter(end for pair in set(pairs) for end in set(pair) if end)
    peers = {peer for _, peer in pairs if peer}
    sources = {node for node, _ in pairs if node}
    if len(peers) == 0:
        nodes = set(layout.nodes) if len(layout.nodes) == 2 else sources
        return Named(nodes, _flat(reporters), reason="one end of the broken connection")
    top = ends.most_common(2)
    silent = peers - sources
    if story.cause == "nccl_network_error":
        return _broken_socket(story, peers, sources, silent, reporters)
    if len(set(pairs)) > 1 and len(top) == 2 and top[0][1] > top[1][1]:
        node = top[0][0]
        ranks = {
            e.rank for e in story.fallout + story.events if e.node == node and e.rank is not None and "peer" in e.groups
        }
        return Named(
            {node}, ranks or _same_rail(node, reporters, layout), reason="the end that all reports have in common"
        )
    return Named(
        {n for n, _ in top}, _flat(reporters), reason="one end of the only pair that reports; either may be bad"
    )


def _ofi(story: Story, layout: Layout, reporters: dict[str, set[int]]) -> Named:
    """libfabric does not name the peer. Senders that get no answer accuse the one node that reports nothing."""
    quiet = [node for node in layout.nodes if node not in reporters]
    sending = all(
        "SEND" in e.message or "unresponsive" in e.message.lower() for e in story.events if e.signature.blame == "ofi"
    )
    if sending and len(quiet) == 1:
        return Named(set(quiet), _same_rail(quiet[0], reporters, layout), reason="the receiver that did not answer")
    return Named(set(reporters), _flat(reporters), reason="reports the transport error")


def _broken_socket(
    story: Story, peers: set[str], sources: set[str], silent: set[str], reporters: dict[str, set[int]]
) -> Named:
    ranks = _flat(reporters)
    refused = story.first is not None and ("onnect" in story.first.message and "losed" not in story.first.message)
    if refused and "reset by peer" not in story.first.message:  # type: ignore[union-attr]
        return Named(peers | sources, ranks, reason="one end of the connection that could not be made")
    if silent:
        return Named(silent, ranks, reason="the peer whose connections broke, and which says nothing itself")
    return Named(set(), ranks, reason="its connection broke")


def _same_rail(node: str, reporters: dict[str, set[int]], layout: Layout) -> set[int]:
    """Rails join GPUs of the same local number, so the silent end is most likely the reporters' counterpart."""
    locals_ = {layout.gpu_of(rank) for rank in _flat(reporters)}
    rank = layout.rank_at(node, locals_.pop()) if len(locals_) == 1 else None
    return set() if rank is None else {rank}


def _flat(reporters: dict[str, set[int]]) -> set[int]:
    return set().union(*reporters.values()) if reporters else set()


def _absent(story: Story, layout: Layout, spoke: set[int]) -> Named:
    """The node that never said anything, where the others waited for it."""
    if story.first is None or story.first.signature.blame == "none" or len(layout.nodes) < 2:
        return Named()
    if story.first.signature.blame == "rank0":
        rank = 0 if "victim" in story.first.groups or story.first.rank is None else story.first.rank
        return Named({layout.node_of(rank)}, {rank}, reason="the others could not reach its store")
    seen = {layout.node_of(label) for label in spoke} if layout.launcher == "srun" else {
        layout.nodes[label] for label in spoke if label < len(layout.nodes)
    }  # fmt: skip
    ended = {event.node for event in story.events + story.fallout if event.role in {"exit", "signal"} and event.node}
    torn = {layout.short(m[1]) for e in story.fallout if (m := re.match(r"srun: error: (\S+): tasks?", e.message))}
    silent = [node for node in layout.nodes if node not in seen | ended | torn]
    if not seen | ended or len(silent) != 1:
        return Named()
    ranks = set(layout.ranks_on(silent[0])) if layout.launcher == "srun" else set()
    return Named(set(silent), ranks, reason="never said a word while the others waited for it")


def _lost_node(story: Story, layout: Layout) -> Named:
    nodes = {layout.short(e.groups["node"]) or e.groups["node"] for e in story.events if "node" in e.groups}
    ranks = {e.rank for e in story.events if e.signature.role == "stuck" and e.rank is not None}
    if not nodes:
        nodes = {layout.node_of(rank) for rank in ranks}
    for node in nodes:
        ranks |= set(layout.ranks_on(node))
    return Named(nodes, ranks, reason="the node that was lost")


def _named_by_slurm(story: Story, layout: Layout) -> Named:
    nodes = {layout.short(e.groups["node"]) or e.groups["node"] for e in story.events if "node" in e.groups}
    ranks: set[int] = set().union(*(event.all_ranks for event in story.events))
    if story.cause == "host_oom":
        return Named(ranks=ranks or _from_table(story, layout), reason="killed by the memory limit")
    return Named(nodes, reason="named by Slurm")
