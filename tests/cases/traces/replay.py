"""Drives the real memory and the real judgement through a trace."""

import random
import shutil
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from krea_runner.diagnose.hang import judge_hang
from krea_runner.heartbeat import FORMAT, SLOT
from krea_runner.history.watches import watch_from_text, watch_to_text
from krea_runner.model import (
    Attempt,
    AttemptKey,
    Budgets,
    Finding,
    Gang,
    HeartbeatReading,
    JobRecord,
    JobState,
    LogReading,
    RankBeat,
    Run,
    RunConfig,
    RunState,
    Snapshot,
    Watch,
)
from krea_runner.observe.heartbeats import read_heartbeats
from krea_runner.observe.watch import advance_watch
from tests.cases.traces.kinds import Hang, Watching
from tests.cases.traces.world import Shape, World

WALL = 1_800_000_000.0
WAIT_S = 6 * 3600.0  # a hang that is not noticed by then is missed


@dataclass
class Outcome:
    hours: float = 0.0
    killed: Finding | None = None
    noticed_s: float | None = None
    slow_lines: set[str] = field(default_factory=set)
    watch: Watch | None = None


def config_for(shape: Shape, budgets: Budgets | None = None) -> RunConfig:
    return RunConfig(
        name="trace", slug="trace", run_dir=Path("/none"), command=("true",), workdir=Path("/none"),
        gang=Gang(shape.nodes, shape.ranks_per_node), budgets=budgets or Budgets(),
    )  # fmt: skip


class Watcher:
    """The supervisor's side: its clock, its memory, and what befalls it."""

    def __init__(
        self, world: World, how: Watching, seed: int, folder: Path | None, memory: Watch | None = None
    ) -> None:
        self.world, self.how, self.rng, self.folder = world, how, random.Random(seed), folder
        config = config_for(world.shape)
        self.run = Run(1, "trace", "alice", config, RunState.ACTIVE, "", "7", "t", WALL)
        self.watch = memory
        self.restart = 0 if memory is None else int(memory.attempt.partition(".r")[2]) + 1
        self.host, self.base = 0, self.rng.uniform(0, 1e6)
        self.pause_at, self.restart_at, self.move_at = (
            world._after(every) for every in (how.pause_every_s, how.restart_every_s, how.move_every_s)
        )
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
            (folder / self.attempt).mkdir(parents=True)

    @property
    def attempt(self) -> str:
        return f"7.r{self.restart}"

    def looks(self, until: float) -> Iterator[tuple[float, Snapshot]]:
        t = self.world.t
        while t < until:
            t += self.how.every_s * self.rng.uniform(0.95, 1.05)
            if t >= self.pause_at:
                t += self.how.pause_s
                self.pause_at = t + self.world._after(self.how.pause_every_s)
            if t >= self.restart_at and self.watch is not None:
                self.watch = watch_from_text(watch_to_text(self.watch))
                self.restart_at = t + self.world._after(self.how.restart_every_s)
            if t >= self.move_at:
                self.host, self.base = self.host + 1, self.rng.uniform(0, 1e6)
                self.move_at = t + self.world._after(self.how.move_every_s)
            yield t, self.look(t)

    def look(self, t: float) -> Snapshot:
        slots, log_bytes = self.world.look(t)
        beats = [self._beat(*slot) for slot in slots]
        problems: tuple[str, ...] = ()
        if beats and self.rng.random() < self.how.torn_share:
            del beats[self.rng.randrange(len(beats))]
            problems = ("n0.hb slot 0: torn, or not a heartbeat",)
        reading = self._read(beats) if self.folder is not None else HeartbeatReading(tuple(beats), problems)
        mono = self.base + t
        self.watch = advance_watch(
            self.watch, reading, attempt=self.attempt, log_size_bytes=log_bytes, epoch_id=f"login{self.host}/boot",
            mono=mono, wall=WALL + t, budgets=self.run.config.budgets,
        )  # fmt: skip
        return Snapshot(
            run=self.run, wall_at=WALL + t, mono=mono, job=JobRecord("7", JobState.RUNNING, "RUNNING"),
            attempt=Attempt(1, 1, AttemptKey("7", self.restart), WALL), watch=self.watch, heartbeats=reading,
            log=LogReading(log_bytes),
        )  # fmt: skip

    def _beat(self, rank: int, node: int, beat: int, flush: int, step: int, phase: str) -> RankBeat:
        jump = 3600.0 * (1 - 2 * (node % 2)) if self.world.shape.skew_s and int(self.world.t / 1800) % 2 else 0.0
        at = WALL + self.world.t + self.world.skew[node] + jump
        return RankBeat(
            rank, rank % self.world.shape.ranks_per_node, f"n{node + 1}", beat, flush, step, phase, None, 100 + rank, at
        )

    def _read(self, beats: list[RankBeat]) -> HeartbeatReading:
        """As the client writes them (docs/reference/heartbeat.md), by the real reader."""
        folder = (self.folder or Path()) / self.attempt
        for node in {beat.node for beat in beats}:
            slots = {beat.local_rank: slot(beat, self.attempt) for beat in beats if beat.node == node}
            data = b"".join(slots.get(local, bytes(SLOT)) for local in range(max(slots) + 1))
            (folder / f"{node}.hb").write_bytes(data)
        return read_heartbeats(folder, self.attempt)


def slot(beat: RankBeat, attempt: str) -> bytes:
    body = (
        f"{FORMAT} rank={beat.rank} local={beat.local_rank} attempt={attempt} beat={beat.beat} flush={beat.flush} "
        f"step={beat.step} phase={beat.phase} budget=- pid={beat.pid} at={beat.wall_at:.3f}"
    )
    padded = body.ljust(SLOT - 14).encode()
    return padded + b" crc=%08x\n" % zlib.crc32(padded)


def healthy(
    shape: Shape, how: Watching, seed: int, hours: float, folder: Path | None = None,
    each: Callable[[Snapshot], None] | None = None,
) -> Outcome:  # fmt: skip
    """Watch a run that never hangs. Its outcome holds what was held against it; `each` is shown every look."""
    world = World(shape, seed)
    watcher = Watcher(world, how, seed + 1, folder if how.through_files else None)
    outcome = Outcome()
    for t, snapshot in watcher.looks(hours * 3600):
        judgement = judge_hang(snapshot)
        if each is not None:
            each(snapshot)
        if judgement.is_slow:
            outcome.slow_lines.add(judgement.line)
        outcome.hours = t / 3600
        if judgement.finding is not None:
            outcome.killed = judgement.finding
            break
    outcome.watch = watcher.watch
    return outcome


def hung(
    hang: Hang, how: Watching, seed: int, hours: float, folder: Path | None = None, memory: Watch | None = None
) -> Outcome:
    """A run that is healthy for `hours` and then hangs: `noticed_s` is from the hang to the verdict. `memory` is what an
    earlier attempt has left."""
    world = World(hang.shape, seed)
    rng = random.Random(seed + 2)
    culprit = rng.randrange(world.world) if not hang.shape.only_rank_0 else 0
    if hang.who == "missing":
        world.missing = {culprit}
    watcher = Watcher(world, how, seed + 1, folder if how.through_files else None, memory)
    outcome = Outcome()
    hung_at: float | None = None
    for t, snapshot in watcher.looks(hours * 3600 + 12 * 3600):
        judgement = judge_hang(snapshot)
        if judgement.finding is not None:
            outcome.killed, outcome.noticed_s = judgement.finding, None if hung_at is None else t - hung_at
            break
        if hung_at is not None and t - hung_at > WAIT_S:
            break
        if hung_at is None and _is_there(hang, world, hours):
            hung_at = world.t
            strike(hang, world, culprit)
    outcome.hours, outcome.watch = (hung_at or world.t) / 3600, watcher.watch
    return outcome


def _is_there(hang: Hang, world: World, hours: float) -> bool:
    if hang.where == "startup":
        return True
    if hang.where == "warm-up":
        return world.step >= 1
    wanted = set(world.phase) == {"step"} if hang.where == "step" else hang.where in world.phase
    return world.t >= hours * 3600 and wanted


def strike(hang: Hang, world: World, culprit: int) -> None:
    world.frozen, world.logs_on = not hang.away, hang.logs_on
    per_node = world.shape.ranks_per_node
    node = culprit // per_node
    silent = {"rank": [culprit], "node": range(node * per_node, (node + 1) * per_node), "all": range(world.world)}
    world.silent_since = dict.fromkeys(silent.get(hang.who, ()), world.t)
    world.behind[culprit] = int(hang.behind)
    if hang.away:
        world.away_until = float("inf")
