"""What `scontrol show partition` and `sacctmgr show qos` print, read."""

from krea_runner.schedulers.slurm_facts import ClusterFacts, parse_partitions, parse_qos

# Slurm 22.05.8, shortened.
PARTITIONS = """\
PartitionName=train AllowGroups=ALL Default=YES QoS=N/A DefaultTime=NONE MaxTime=UNLIMITED Nodes=n[1-2] PreemptMode=OFF State=UP
PartitionName=low AllowGroups=ALL Default=NO QoS=N/A DefaultTime=01:00:00 MaxTime=1-00:00:00 Nodes=n1 PreemptMode=CANCEL State=UP
"""


def test_partitions_are_found_by_name_and_by_default() -> None:
    facts = ClusterFacts({}, parse_partitions(PARTITIONS))
    assert (facts.partition("low") or {})["PreemptMode"] == "CANCEL"
    assert (facts.partition(None) or {})["PartitionName"] == "train"
    assert facts.partition("nope") is None


def test_a_cluster_without_partitions_has_no_default() -> None:
    facts = ClusterFacts({}, parse_partitions("No partitions in the system\n"))
    assert (facts.partitions, facts.partition(None)) == ({}, None)


def test_qos_by_name() -> None:
    assert parse_qos("normal|cluster\nlow|cancel\n") == {"normal": "cluster", "low": "cancel"}
