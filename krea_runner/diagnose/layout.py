"""Who is where: rank → node → GPU, from what the supervisor knows (job.json) and from what NCCL printed at start-up."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from krea_runner.errors import KreaRunnerError

_AGENT = re.compile(r"\b(?:torchrun|torch\.distributed\.(?:run|launch)|accelerate[\w.]* launch|deepspeed)\b")
_PER_NODE = re.compile(r"--nproc[-_]per[-_]node[= ](\d{1,4})\b")


@dataclass(slots=True)
class Layout:
    nodes: list[str] = field(default_factory=list)
    gpus_per_node: int = 0
    world_size: int = 0
    launcher: str = ""
    """`srun`: one task a rank, so srun's task numbers are ranks; `torchrun`: one task a node; empty: not known."""
    still_running: bool | None = None
    addresses: dict[str, str] = field(default_factory=dict)
    """Address → node."""
    known: bool = False
    """Whether job.json was given."""
    rank_nodes: dict[int, str] = field(default_factory=dict)
    pid_ranks: dict[tuple[str, int], int] = field(default_factory=dict)
    """(node or "", pid) → rank."""
    first_pids: dict[str, set[int]] = field(default_factory=dict)
    """Node → pid minus CUDA device, of every process seen: one value if the launcher started them in a row."""
    bus_devices: dict[str, int] = field(default_factory=dict)
    """PCI bus and device ("9d00") → CUDA device: the same on all nodes of one kind."""

    def node_of(self, rank: int | None) -> str:
        if rank is None or rank < 0:
            return ""
        if rank in self.rank_nodes:
            return self.rank_nodes[rank]
        per = self.gpus_per_node
        return self.nodes[rank // per] if per and rank // per < len(self.nodes) else ""

    def ranks_on(self, node: str) -> list[int]:
        if self.nodes and self.gpus_per_node and node in self.nodes:
            first = self.nodes.index(node) * self.gpus_per_node
            return [rank for rank in range(first, first + self.gpus_per_node) if rank < (self.world_size or 1 << 30)]
        return sorted(rank for rank, where in self.rank_nodes.items() if where == node)

    def rank_at(self, node: str, device: int | None) -> int | None:
        if (
            device is None
            or device < 0
            or node not in self.nodes
            or not self.gpus_per_node
            or device >= self.gpus_per_node
        ):
            return None
        return self.nodes.index(node) * self.gpus_per_node + device

    def rank_of_pid(self, node: str, pid: int | None) -> int | None:
        if pid is None:
            return None
        known = self.pid_ranks.get((node, pid), self.pid_ranks.get(("", pid)))
        bases = self.first_pids.get(node, set())
        if known is None and len(bases) == 1:
            return self.rank_at(node, pid - next(iter(bases)))
        return known

    def gpu_of(self, rank: int) -> int | None:
        return rank % self.gpus_per_node if self.gpus_per_node else None

    def short(self, name: str) -> str:
        """A node's name as the node list has it: `n7`, for `n7.cluster.local`, `n7-ib`, an address."""
        if not name:
            return ""
        if name in self.nodes:
            return name
        if name.removeprefix("::ffff:") in self.addresses:
            return self.addresses[name.removeprefix("::ffff:")]
        first = name.split(".", maxsplit=1)[0]
        for node in self.nodes:
            if first == node or first.removesuffix("-ib") == node or node.split(".")[0] == first:
                return node
        return "" if self.nodes or first.isdigit() else first

    def device_of_pci(self, pci: str) -> int | None:
        return self.bus_devices.get(bus_key(pci))


def bus_key(pci: str) -> str:
    """`0000:9d:00.0`, `0000:9D:00` and NCCL's `9d000` are all "9d00"; a domain that is not 0 stays in front."""
    text = pci.lower().rstrip(".")
    if ":" not in text:
        return text[:-1].lstrip("0") if len(text) > 1 else text
    parts = text.split(".")[0].split(":")
    return "".join(parts).lstrip("0")


def ranks_a_task(command: str | Sequence[str]) -> int | None:
    """How many ranks each of srun's tasks starts when the command is an agent (torchrun, ...), 0 where it does not say; None:
    the task is the rank."""
    text = command if isinstance(command, str) else " ".join(command)
    if not _AGENT.search(text):
        return None
    told = _PER_NODE.search(text)
    return int(told[1]) if told else 0


def from_job(document: Mapping[str, Any]) -> Layout:
    """`document` is a job.json; missing keys are not known. Raises KreaRunnerError where the nodes are no list of names."""
    nodes = document.get("nodes") or document.get("node_list") or []
    if not isinstance(nodes, list) or not all(isinstance(node, str) for node in nodes):
        raise KreaRunnerError(
            "the nodes of the job are not a list of names",
            hint='for example {"nodes": ["n1", "n2"], "gpus_per_node": 8}',
        )
    gpus = _count(document.get("gpus_per_node"))
    tasks = _count(document.get("tasks_per_node"))
    launcher = str(document.get("launcher") or "")
    if not launcher and tasks:
        launcher = "srun" if tasks == gpus and gpus > 1 else "torchrun"
    still = document.get("still_running")
    addresses = document.get("node_ips") or {}
    return Layout(
        nodes=list(nodes),
        gpus_per_node=gpus,
        world_size=_count(document.get("world_size")) or gpus * len(nodes),
        launcher=launcher,
        still_running=still if isinstance(still, bool) else None,
        addresses={str(value): str(key) for key, value in addresses.items()} if isinstance(addresses, dict) else {},
        known=True,
    )


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 24 else 0
