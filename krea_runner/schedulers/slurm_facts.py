"""What the checks before submitting must know of the cluster: one read of its configuration and its partitions."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from krea_runner.errors import SchedulerError
from krea_runner.schedulers.slurm_cli import ask
from krea_runner.schedulers.slurm_parse import parse_config
from krea_runner.transport import HERE, Transport


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """Values in Slurm's own words, as `scontrol show config` and `scontrol show partition` print them."""

    config: Mapping[str, str]
    partitions: Mapping[str, Mapping[str, str]]
    qos_preempt: Mapping[str, str] = field(default_factory=dict)
    """QOS → PreemptMode (`cluster`: the configuration's); empty where the cluster has no accounting or was not asked."""

    def partition(self, name: str | None) -> Mapping[str, str] | None:
        """The partition of that name, or the default one; None where there is none."""
        if name is None:
            return next((each for each in self.partitions.values() if each.get("Default") == "YES"), None)
        return self.partitions.get(name)


def cluster_facts(*, timeout_s: float = 10.0, transport: Transport = HERE) -> ClusterFacts:
    """Asks the controller twice, and accounting once where a QOS decides who is preempted.

    Raises: SchedulerError; SchedulerUnavailable when there was no answer: nothing of the cluster can be judged then.
    """

    def said(*argv: str, doing: str) -> str:
        return ask(argv, doing=doing, timeout_s=timeout_s, transport=transport).stdout

    config = parse_config(said("scontrol", "show", "config", doing="asking how the cluster is configured"))
    shown = said("scontrol", "show", "partition", "-a", "-o", doing="asking for the partitions")
    qos: dict[str, str] = {}
    if "preempt/qos" in config.get("PreemptType", ""):
        try:
            argv = ("sacctmgr", "-n", "-P", "show", "qos", "format=Name,PreemptMode")
            qos = parse_qos(said(*argv, doing="asking for the QOS"))
        except SchedulerError:
            qos = {}  # the partition and the configuration still say something; the page says that a QOS may differ
    return ClusterFacts(config, parse_partitions(shown), qos)


def parse_partitions(stdout: str) -> dict[str, dict[str, str]]:
    """By name, from `scontrol show partition -o`: one line each, `Key=Value` between blanks. A line without a name (`No
    partitions in the system`) is skipped: it is what the command says when there are none."""
    found = {}
    for line in stdout.splitlines():
        values = dict(word.split("=", 1) for word in line.split() if "=" in word)
        if "PartitionName" in values:
            found[values["PartitionName"]] = values
    return found


def parse_qos(stdout: str) -> dict[str, str]:
    """QOS → PreemptMode, from `sacctmgr -n -P show qos format=Name,PreemptMode`."""
    rows = (line.split("|") for line in stdout.splitlines())
    return {row[0]: row[1] for row in rows if len(row) > 1}
