"""The kinds of healthy runs and of hangs, and who looks at them how: data."""

from dataclasses import dataclass, replace

from tests.cases.traces.world import Shape


@dataclass(frozen=True)
class Watching:
    """How the supervisor looks."""

    every_s: float = 10.0
    pause_every_s: float = 0.0  # it is stopped (SIGSTOP, a swapped-out login node) for `pause_s`
    pause_s: float = 600.0
    restart_every_s: float = 0.0  # a new process: what it remembers comes from the history
    move_every_s: float = 0.0  # to another host, whose clock cannot be compared
    torn_share: float = 0.0  # of looks in which a slot cannot be read
    through_files: bool = False  # written as slots and read by the real reader


USUAL = Shape()
HEALTHY: dict[str, Shape] = {
    "steps of 0.3 s": replace(USUAL, step_s=0.3),
    "steps of 2 s": USUAL,
    "steps of 45 s": replace(USUAL, step_s=45, log_every_steps=1),
    "steps of 400 s": replace(USUAL, step_s=400, log_every_steps=1, checkpoint_every_s=7200),
    "one node": replace(USUAL, nodes=1, ranks_per_node=4),
    "only rank 0 beats": replace(USUAL, only_rank_0=True),
    "slow steps": replace(USUAL, slow_share=0.01, slow_s=(10, 60)),
    "very uneven steps": replace(USUAL, step_s=5, spread=1.0),
    "20-minute checkpoints": replace(USUAL, checkpoint_every_s=3600, checkpoint_s=(900, 1300)),
    "20-minute checkpoints by rank 0": replace(
        USUAL, checkpoint_every_s=3600, checkpoint_s=(900, 1300), saved_by_all=False
    ),
    "evaluation without beats": replace(USUAL, evaluation_every_s=5400, evaluation_s=(600, 1200)),
    "evaluation with beats": replace(USUAL, evaluation_every_s=3600, evaluation_s=(600, 3000), evaluation_beats=True),
    "compile pauses": replace(
        USUAL, startup_s=(300, 1500), compile_s=(60, 400), recompile_every_s=5400, recompile_s=(20, 100)
    ),
    "long pauses, undeclared": replace(USUAL, recompile_every_s=1500, recompile_s=(150, 220)),
    "a rare pause": replace(USUAL, recompile_every_s=9000, recompile_s=(95, 115)),
    "data waits": replace(USUAL, data_s=(0, 60)),
    "slow drift": replace(USUAL, step_s=10, drift_an_hour=1.25),
    "NFS lumps": replace(USUAL, lump_s=(60, 90)),
    "NFS lumps, one node": replace(USUAL, nodes=1, lump_s=(60, 90)),
    "NFS lumps, steps of 25 s": replace(USUAL, step_s=25, spread=0.3, log_every_steps=1, lump_s=(60, 90)),
    "NFS lumps from the third hour, steps of 23 s": replace(
        USUAL, step_s=23, spread=0.3, log_every_steps=1, lump_s=(60, 90), lump_from_s=7200
    ),
    "NFS lumps, slow steps": replace(USUAL, slow_share=0.01, slow_s=(10, 60), lump_s=(60, 90)),
    "file system away 1 to 8 min": replace(USUAL, away_every_s=3600, away_s=(60, 480)),
    "clocks apart and stepping": replace(USUAL, skew_s=600),
    "log rotated and truncated": replace(USUAL, rotate_every_s=600, log_every_steps=60),
    "fail-slow, 8 times": replace(USUAL, slower_at_s=2.5 * 3600, slower=8.0),
    "everything at once": Shape(
        nodes=4, step_s=4, spread=0.3, slow_share=0.005, slow_s=(10, 60), compile_s=(30, 200), recompile_every_s=9000,
        recompile_s=(20, 60), checkpoint_every_s=3600, checkpoint_s=(300, 1200), saved_by_all=False,
        evaluation_every_s=7200, evaluation_s=(300, 900), rotate_every_s=3000, lump_s=(60, 90), skew_s=300,
    ),
}  # fmt: skip

WATCHING: dict[str, Watching] = {
    "loop, 1 s": Watching(every_s=1.0, restart_every_s=7200),
    "loop, 10 s": Watching(every_s=10.0, torn_share=0.002),
    "cron": Watching(every_s=60.0, restart_every_s=60.0),
    "paused": Watching(every_s=5.0, pause_every_s=2400),
    "moving": Watching(every_s=10.0, move_every_s=5400),
    "files": Watching(every_s=15.0, through_files=True),
}


@dataclass(frozen=True)
class Hang:
    """`where`: what the gang is doing when it happens. `who`: rank, node or all that fall silent; none: every flusher lives."""

    cause: str
    where: str = "step"  # or startup, warm-up, checkpoint, evaluation, data
    who: str = ""  # "", rank, node, all, missing
    behind: bool = False  # the rank to blame has done one step less
    logs_on: bool = False
    away: bool = False
    """Nothing new is shown to the watcher, whatever the gang does."""
    shape: Shape = USUAL


_SAVING = replace(USUAL, checkpoint_every_s=900, checkpoint_s=(30, 90))
HANGS: dict[str, Hang] = {
    "loop stuck, all wait": Hang("loop_stuck"),
    "loop stuck, one rank behind": Hang("loop_stuck", behind=True),
    "livelock, logs go on": Hang("loop_stuck", logs_on=True),
    "one rank stopped": Hang("rank_stopped", who="rank"),
    "one rank stopped, logs go on": Hang("rank_stopped", who="rank", logs_on=True),
    "one rank stopped, steps of 45 s": Hang("rank_stopped", who="rank", shape=HEALTHY["steps of 45 s"]),
    "one rank stopped, NFS lumps": Hang("rank_stopped", who="rank", shape=HEALTHY["NFS lumps"]),
    "node silent": Hang("node_silent", who="node"),
    "everyone stopped": Hang("all_silent", who="all"),
    "file system frozen": Hang("all_silent", away=True),
    "stuck in checkpoint": Hang("loop_stuck", where="checkpoint", shape=_SAVING),
    "stopped in checkpoint": Hang("rank_stopped", where="checkpoint", who="rank", shape=_SAVING),
    "stuck in checkpoint of rank 0": Hang("loop_stuck", where="checkpoint", shape=replace(_SAVING, saved_by_all=False)),
    "stuck in evaluation": Hang(
        "loop_stuck", where="evaluation", shape=replace(USUAL, evaluation_every_s=1200, evaluation_s=(60, 200))
    ),
    "data stall": Hang("loop_stuck", where="data", shape=replace(USUAL, data_s=(0, 10))),
    "stuck in startup": Hang("loop_stuck", where="startup"),
    "stuck in the first steps": Hang("loop_stuck", where="warm-up", shape=replace(USUAL, compile_s=(20, 60))),
    "a rank never started": Hang("rank_never_started", where="startup", who="missing"),
    "only rank 0 beats, stuck": Hang("loop_stuck", shape=HEALTHY["only rank 0 beats"]),
    "a log is truncated while it hangs": Hang("loop_stuck", shape=HEALTHY["log rotated and truncated"]),
}
