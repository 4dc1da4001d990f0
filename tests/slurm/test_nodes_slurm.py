"""Nodes of a real Slurm: states, reasons of any bytes, exclusions that hold, and others' drains left alone."""

import json
import os
import random
import signal
import sqlite3
import subprocess
from collections.abc import Iterator

import pytest

from krea_runner.errors import SchedulerError
from krea_runner.observe.heartbeats import read_heartbeats
from krea_runner.proc import run
from krea_runner.schedulers.nodelist import expand
from krea_runner.schedulers.slurm_cli import SlurmCli
from tests.conftest import until
from tests.slurm.test_interference import Desk, desk  # noqa: F401

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(240)]
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, whom the cluster takes for its operator")
REASON = "two\n\nlines | \"q\" 'x' \x1e ünï State=IDLE\nNodeName=n1 State=DOWN\n   State=IDLE"


@pytest.fixture
def slurm(slurm_cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmCli]:
    for name, value in slurm_cluster.env.items():
        monkeypatch.setenv(name, value)
    return SlurmCli()


def scontrol(*words: str) -> str:
    done = run(["scontrol", *words], timeout_s=20)
    assert done.returncode == 0, done.stderr
    return done.stdout


# -------------------------------------------------------------------------------------------------- states and reasons


@as_root
def test_a_reason_of_any_bytes_is_read_whole_and_changes_no_other_node(slurm: SlurmCli) -> None:
    before = slurm.nodes(["n1", "n2"])
    scontrol("update", "nodename=n3", "state=drain", f"reason={REASON}")
    try:
        nodes = slurm.nodes()
        assert list(nodes) == ["n1", "n2", "n3", "n4"]
        assert {name: nodes[name].raw_state for name in before} == {name: before[name].raw_state for name in before}
        node = nodes["n3"]
        # Slurm prints no empty line of it.
        assert (node.reason, node.reason_by) == (REASON.replace("\n\n", "\n"), "root")
        assert ("DRAIN" in node.raw_state, node.is_out, node.is_ours) == (True, True, False)
        with pytest.raises(SchedulerError, match="another reason"):
            slurm.drain(["n3"], "ours")
        with pytest.raises(SchedulerError, match="another reason"):
            slurm.undrain(["n3"])
        assert slurm.nodes(["n3"])["n3"] == node
    finally:
        scontrol("update", "nodename=n3", "state=resume")


@as_root
def test_a_busy_node_that_is_drained_shows_both(slurm: SlurmCli, desk: Desk) -> None:  # noqa: F811
    job_id = desk.submit()
    desk.wait_for_steps(job_id)
    (name, *_) = expand(slurm.jobs([job_id])[job_id].nodelist)
    slurm.drain([name], "test")
    try:
        node = slurm.nodes([name])[name]
        assert node.raw_state.split("+")[1:] == ["DRAIN"]
        assert node.raw_state.split("+")[0] in {"MIXED", "ALLOCATED"}
    finally:
        slurm.undrain([name])


# ---------------------------------------------------------------------------------------------------------- exclusions


def kill_a_rank(desk: Desk, job_id: str) -> None:  # noqa: F811
    ranks = read_heartbeats(desk.folder / "run" / "heartbeats" / f"{job_id}.r0", f"{job_id}.r0").ranks
    os.kill(random.choice(ranks).pid, signal.SIGKILL)
    until(lambda: desk.job(job_id)[0] == "FAILED", "the crash")


def excluded(desk: Desk, job_id: str) -> set[str]:  # noqa: F811
    text = desk.slurm("squeue", "-h", "-t", "all", "-j", job_id, "-o", "%x").strip()
    return set(expand(text)) - {"(null)"}


def test_a_run_starts_elsewhere_after_an_exclusion_and_the_users_own_one_is_kept(desk: Desk) -> None:  # noqa: F811
    job_id = desk.submit(slurm='exclude = "n4"')
    desk.wait_for_steps(job_id)
    desk.tick()
    assert "would exclude" in desk.krea("nodes", "exclude", "n1", "--run", "gang", "--reason", "x", "--dry-run").stdout
    desk.krea("nodes", "exclude", "n[1]", "--run", "gang", "--reason", "Xid 79", "--for", "2d")
    (n1,) = (node for node in json.loads(desk.krea("nodes", "--json").stdout)["nodes"] if node["name"] == "n1")
    assert [one["reason"] for one in n1["exclusions"]] == ["Xid 79"]
    kill_a_rank(desk, job_id)
    desk.tick()
    desk.wait_for_steps(job_id, restart=1)
    assert excluded(desk, job_id) == {"n1", "n4"}
    nodes = desk.slurm("squeue", "-h", "-j", job_id, "-o", "%N").strip()
    assert expand(nodes) == ["n2", "n3"]


def test_exclusions_never_leave_fewer_nodes_than_the_gang_needs(desk: Desk) -> None:  # noqa: F811
    job_id = desk.submit()
    desk.wait_for_steps(job_id)
    desk.tick()
    desk.krea("nodes", "exclude", "n[1-4]", "--all", "--reason", "all bad")
    kill_a_rank(desk, job_id)
    desk.tick()
    desk.wait_for_steps(job_id, restart=1)
    assert len(excluded(desk, job_id)) == 2


def test_a_node_that_a_job_asks_for_by_name_is_not_excluded_since_it_would_never_start(desk: Desk) -> None:  # noqa: F811
    job_id = desk.submit(slurm='nodelist = "n3"')
    desk.wait_for_steps(job_id)
    desk.tick()
    desk.krea("nodes", "exclude", "n[1,3]", "--run", "gang", "--reason", "slow")
    kill_a_rank(desk, job_id)
    assert "off n1" in desk.tick()
    desk.wait_for_steps(job_id, restart=1)
    assert excluded(desk, job_id) == {"n1"}


def test_a_run_that_is_submitted_again_starts_elsewhere_too(desk: Desk) -> None:  # noqa: F811
    job_id = desk.submit()
    desk.slurm("scontrol", "update", f"jobid={job_id}", "requeue=0")
    desk.wait_for_steps(job_id)
    desk.tick()
    desk.krea("nodes", "exclude", "n1", "--run", "gang", "--reason", "slow")
    kill_a_rank(desk, job_id)
    said = desk.tick()
    again = str(int(job_id) + 1)
    assert f"job {again}; off n1" in said
    desk.wait_for_steps(again)
    assert excluded(desk, again) == {"n1"}


def test_who_may_not_drain_has_the_node_excluded_instead(desk: Desk) -> None:  # noqa: F811
    if os.geteuid() != 0:
        pytest.skip("whoever runs this cluster is its operator")
    done = desk.krea("nodes", "drain", "n2", "--reason", "bad", check=False)
    assert (done.returncode, "you may not drain n2; excluded instead" in done.stderr) == (69, True)
    (found,) = sqlite3.connect(desk.folder / "state" / "history.db").execute("SELECT node, reason FROM exclusions")
    assert found == ("n2", "bad")
    assert "took back 1" in desk.krea("nodes", "include", "n2").stdout
    assert desk.krea("nodes", "include", "n2", check=False).returncode == 3


@as_root
def test_an_operator_drains_and_resumes(desk: Desk, slurm: SlurmCli) -> None:  # noqa: F811
    desk.operator("true")
    env = {**os.environ, **desk.env}
    krea = [*os.sys.executable.split(), "-m", "krea_runner", "nodes"]
    for words, out in ((("drain", "n4", "--reason", "bad"), True), (("resume", "n4"), False)):
        subprocess.run([*krea, *words], env=env, check=True, capture_output=True)
        # A node that was just resumed may be IDLE+NOT_RESPONDING until it has answered.
        until(lambda out=out: slurm.nodes(["n4"])["n4"].is_out is out, f"n4 after {words}")
