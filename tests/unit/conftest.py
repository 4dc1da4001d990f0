import dataclasses
from pathlib import Path
from typing import Any

import pytest

from krea_runner.model import (
    Attempt,
    AttemptKey,
    Budgets,
    CheckpointSpec,
    Gang,
    HeartbeatReading,
    JobRecord,
    JobState,
    LogReading,
    Policy,
    RankBeat,
    Run,
    RunConfig,
    RunState,
    Snapshot,
)
from krea_runner.observe.watch import advance_watch
from tests.training_rank import Rank

PHASES = ("startup", "compile", "step", "data", "checkpoint", "evaluation", "shutdown", "default")


@dataclasses.dataclass
class FakeClock:
    """A clock that moves only when told to, or when somebody sleeps."""

    now: float = 1_800_000_000.0
    steady: float = 1000.0
    host: str = "login1/boot"

    def wall(self) -> float:
        return self.now

    def mono(self) -> float:
        return self.steady

    def epoch_id(self) -> str:
        return self.host

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 1e-3)
        self.steady += max(seconds, 1e-3)


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    return Rank(tmp_path)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def make_config(tmp_path: Path, **changes: Any) -> RunConfig:
    base = RunConfig(
        name="llm", slug="llm", run_dir=tmp_path / "run", command=("true",), workdir=tmp_path, scheduler="local",
        gang=Gang(nodes=2, ranks_per_node=2),
        budgets=Budgets(startup_s=60, step_s=10, checkpoint_s=100, evaluation_s=50, shutdown_s=20, default_s=30, fixed=PHASES),
        checkpoint=CheckpointSpec(directory=tmp_path / "ckpt"), policy=Policy(max_restarts=3),
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


def make_run(config: RunConfig, **changes: Any) -> Run:
    run = Run(
        run_id=1, name=config.name, user="alice", config=config, state=RunState.ACTIVE, state_reason="", job_id="7",
        tag="t", created_at=1_800_000_000.0,
    )  # fmt: skip
    return dataclasses.replace(run, **changes)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(make_config(tmp_path))


@dataclasses.dataclass
class Gang4:
    """Four ranks on two nodes, watched look by look: what a test changes between looks is what the ranks did."""

    run: Run
    clock: FakeClock
    beats: dict[int, RankBeat] = dataclasses.field(default_factory=dict)
    log_size: int = 100
    watch: Any = None
    problems: tuple[str, ...] = ()
    hidden: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        for rank in range(4):
            self.beats[rank] = RankBeat(
                rank=rank, local_rank=rank % 2, node=f"n{rank // 2 + 1}", beat=5, flush=50, step=5, phase="step",
                phase_budget_s=None, pid=100 + rank, wall_at=0.0,
            )  # fmt: skip

    def change(self, *ranks: int, **values: Any) -> None:
        for rank in ranks:
            self.beats[rank] = dataclasses.replace(self.beats[rank], **values)

    def pass_time(
        self,
        seconds: float,
        *,
        beating: set[int] = frozenset(),
        flushing: set[int] = frozenset(range(4)),
        logging: bool = False,
    ) -> Snapshot:
        """Let `seconds` pass, one look a second; the named ranks beat, flush, and the log grows meanwhile."""
        snapshot = self.look()
        for _ in range(round(seconds)):
            self.clock.sleep(1.0)
            for rank, beat in self.beats.items():
                step = 1 if rank in beating else 0
                self.beats[rank] = dataclasses.replace(
                    beat, beat=beat.beat + step, step=beat.step + step, flush=beat.flush + (rank in flushing)
                )
            self.log_size += 10 * logging
            snapshot = self.look()
        return snapshot

    def look(self) -> Snapshot:
        reading = HeartbeatReading(
            ranks=tuple(beat for rank, beat in sorted(self.beats.items()) if rank not in self.hidden),
            problems=self.problems,
        )
        self.watch = advance_watch(
            self.watch, reading, attempt="7.r0", log_size_bytes=self.log_size, epoch_id=self.clock.epoch_id(),
            mono=self.clock.mono(), wall=self.clock.wall(), budgets=self.run.config.budgets,
        )  # fmt: skip
        return Snapshot(
            run=self.run,
            wall_at=self.clock.wall(),
            mono=self.clock.mono(),
            job=JobRecord("7", JobState.RUNNING, "RUNNING", nodelist="n[1-2]"),
            attempt=Attempt(1, 1, AttemptKey("7"), self.clock.wall()),
            watch=self.watch,
            heartbeats=reading,
            log=LogReading(size_bytes=self.log_size),
        )


@pytest.fixture
def gang(run: Run, clock: FakeClock) -> Gang4:
    return Gang4(run, clock)
