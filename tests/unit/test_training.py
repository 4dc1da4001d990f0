"""The training job of the demo: really one gang, and the same to the last bit however often it is interrupted."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from krea_runner.observe.heartbeats import read_heartbeats
from tests.conftest import until

RANKS = 4


class Job:
    """One attempt of four ranks; `folder` is shared by all attempts."""

    def __init__(self, folder: Path, attempt: str = "1.r0", *more: str) -> None:
        self.folder, self.attempt = folder, attempt
        argv = [sys.executable, "-m", "krea_runner.demo.train", "--steps", "30", "--checkpoint-every", "5", *more]
        self.ranks = [
            subprocess.Popen(
                [*argv, "--checkpoint-dir", str(folder / "ckpt")],
                env={
                    **os.environ, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NTASKS": str(RANKS),
                    "SLURMD_NODENAME": "n1", "KREA_ATTEMPT": attempt, "KREA_RUN_DIR": str(folder),
                    "KREA_HEARTBEAT_DIR": str(folder / "beats" / attempt),
                },
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for rank in range(RANKS)
        ]  # fmt: skip

    def step(self, rank: int) -> int:
        beats = {beat.rank: beat for beat in read_heartbeats(self.folder / "beats" / self.attempt, self.attempt).ranks}
        return beats[rank].step if rank in beats else -1

    def wait(self) -> tuple[list[int], list[str]]:
        said = [rank.communicate(timeout=60)[0] for rank in self.ranks]
        return [rank.returncode for rank in self.ranks], said


def digest(folder: Path) -> str:
    return json.loads((folder / "ckpt" / "final.json").read_text())["sha256"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert Job(folder).wait()[0] == [0] * RANKS
    return digest(folder)


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_gang_ends_with_the_same_weights(tmp_path: Path, undisturbed: str, victim: int) -> None:
    job = Job(tmp_path, "1.r0", "--step-time", "0.1")
    until(lambda: job.step(1) >= 7, "some steps")
    job.ranks[victim].kill()
    codes, said = job.wait()
    assert codes[victim] == -signal.SIGKILL
    others = [rank for rank in range(RANKS) if rank != victim]
    assert [codes[rank] for rank in others] == [1] * len(others)
    assert any(f"rank {victim} is gone" in said[rank] for rank in others)
    codes, said = Job(tmp_path, "1.r1").wait()
    assert codes == [0] * RANKS
    assert "resumed from step" in said[0]
    assert digest(tmp_path) == undisturbed


def test_when_one_rank_stops_the_others_wait_for_it(tmp_path: Path, undisturbed: str) -> None:
    job = Job(tmp_path, "1.r0", "--step-time", "0.05")
    until(lambda: job.step(1) >= 3, "some steps")
    job.ranks[2].send_signal(signal.SIGSTOP)
    flushes = [0]

    def flushed_twice() -> bool:
        beats = {beat.rank: beat for beat in read_heartbeats(tmp_path / "beats" / "1.r0", "1.r0").ranks}
        if beats[0].flush != flushes[-1]:
            flushes.append(beats[0].flush)
        return len(flushes) > 4

    until(flushed_twice, "three more flushes")
    stuck = [job.step(rank) for rank in (0, 1, 3)]
    flushes[1:] = []
    until(flushed_twice, "three more flushes")
    assert [job.step(rank) for rank in (0, 1, 3)] == stuck
    assert max(stuck) < 30
    job.ranks[2].send_signal(signal.SIGCONT)
    assert job.wait()[0] == [0] * RANKS
    assert digest(tmp_path) == undisturbed


def test_half_written_and_damaged_checkpoints_are_passed_over(tmp_path: Path, undisturbed: str) -> None:
    assert Job(tmp_path, "1.r0", "--steps", "20").wait()[0] == [0] * RANKS
    checkpoints = tmp_path / "ckpt"
    (checkpoints / "step_00000020" / "COMPLETE").unlink()
    damaged = checkpoints / "step_00000015" / "state.json"
    damaged.write_text(damaged.read_text().replace("0x1", "0x2", 1))
    (checkpoints / "step_00000099").mkdir()
    codes, said = Job(tmp_path, "1.r1").wait()
    assert codes == [0] * RANKS
    assert "skipping step_00000099: not complete" in said[0]
    assert "skipping step_00000020: not complete" in said[0]
    assert "skipping step_00000015: its content does not match its checksum" in said[0]
    assert "resumed from step 10" in said[0]
    assert digest(tmp_path) == undisturbed
