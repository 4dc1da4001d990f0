"""What one look at the world gave: heartbeats, checkpoints, logs, and all of it as one Snapshot."""

from dataclasses import dataclass, field
from pathlib import Path

from krea_runner.model.job import JobRecord
from krea_runner.model.learned import WARM_UP_STEPS, Learned
from krea_runner.model.many import by_the_thousand
from krea_runner.model.run import Attempt, Run


@by_the_thousand
class RankBeat:
    """One slot of a heartbeat file, as read."""

    rank: int
    local_rank: int
    node: str
    beat: int
    flush: int
    step: int
    """-1 until the first `hb.step(n)`."""
    phase: str
    phase_budget_s: float | None
    pid: int
    wall_at: float
    """The rank's own clock: for people, never for judging."""


@dataclass(frozen=True, slots=True)
class HeartbeatReading:
    """What one look at heartbeats/<attempt>/ gave. `problems` are the slots and files that could not be read, each
    one line that names the file and says why; they are not evidence of anything else."""

    ranks: tuple[RankBeat, ...] = ()
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    step: int
    path: Path


@dataclass(frozen=True, slots=True)
class CheckpointReading:
    """`newest` is the newest whole one; `incomplete` names the entries that are not, which nobody resumes from."""

    newest: Checkpoint | None = None
    incomplete: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LogReading:
    size_bytes: int = 0
    """Of all logs of the attempt together: it grows, or the logs are silent."""
    tail: str = ""
    """The end of the batch script's own log, control characters removed."""
    problems: tuple[str, ...] = ()


@by_the_thousand
class RankWatch:
    """What the watcher remembers of a rank between two ticks; `_mono` are its own monotonic clock."""

    rank: int
    node: str
    beat: int
    flush: int
    step: int
    phase: str
    phase_budget_s: float | None
    beat_moved_mono: float
    flush_moved_mono: float
    seen_mono: float | None = None
    """At which look it was last there to be read."""


# The sources of progress besides heartbeats.
LOG_PATTERN = "log pattern"
BEAT_FILES = "beat files"
CHECKPOINTS = "checkpoints"
LOG = "log"


@dataclass(frozen=True, slots=True)
class SourceReading:
    """Another source of progress at one look. Three-valued: `unseen` says why it could not be seen; else it moved or not."""

    name: str
    moved: bool = False
    mark: str = ""
    """What it showed, to be told from what it shows next; empty: it keeps no such thing."""
    step: int | None = None
    unseen: str = ""


@dataclass(frozen=True, slots=True)
class SourceWatch:
    """What the watcher remembers of another source of progress. `moved_mono` is None until it was seen to move."""

    name: str
    mark: str = ""
    step: int | None = None
    moved_mono: float | None = None
    unseen: str = ""
    """Why it could not be seen at the last look; empty: it was seen."""
    unseen_since_mono: float | None = None


@by_the_thousand
class FollowedLog:
    """How far one log was read for its progress lines."""

    name: str
    inode: int
    size_bytes: int
    offset: int
    """At the beginning of a line, `size_bytes` or before it."""
    mark: str = ""
    """What its last progress line showed."""


@dataclass(frozen=True, slots=True)
class Watch:
    """The watcher's memory of one attempt. Forgotten at the attempt's border and when `epoch_id` changes."""

    attempt: str
    epoch_id: str
    since_mono: float
    """When this watcher first saw the attempt RUNNING: what `startup` is counted from."""
    ranks: tuple[RankWatch, ...] = ()
    log_size_bytes: int = 0
    log_moved_mono: float = 0.0
    moved_wall_at: float | None = None
    """When any beat was last seen to move, for people."""
    looked_mono: float | None = None
    look_s: float = 0.0
    """Between the last two looks."""
    first_step: int | None = None
    """Of this attempt, as far as it was watched: its first steps are a warm-up."""
    unseen_since_mono: float | None = None
    """Since when some rank that was there before cannot be read."""
    behind: tuple[tuple[str, float], ...] = ()
    """(node, share of late looks at which it was at a lower step than others), where that is worth a word."""
    learned: Learned = field(default_factory=Learned)
    slow_said: bool = False
    """That it has become slow was news once, and is no more."""

    @property
    def is_warming_up(self) -> bool:
        newest = max((rank.step for rank in self.ranks), default=-1)
        return self.first_step is None or newest - self.first_step < WARM_UP_STEPS

    sources: tuple[SourceWatch, ...] = ()
    followed: tuple[FollowedLog, ...] = ()

    @property
    def step(self) -> int | None:
        """The highest that a rank or, without one, another source has shown in this attempt."""
        ranks = [rank.step for rank in self.ranks if rank.step >= 0]
        others = [source.step for source in self.sources if source.step is not None and source.name != CHECKPOINTS]
        return max(ranks or others, default=None)


@dataclass(frozen=True, slots=True)
class ScriptEnd:
    """The batch script's own last word (events/<attempt>.batch.jsonl): the exit code before anybody shortened it."""

    exit_code: int
    at: float
    warned: bool = False  # it had been told to save and end, as Slurm does before a time limit (SIGUSR1)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything one tick knows of one run. `job is None` with no `blind` reason: the scheduler answered and does not
    know the job (any more). A non-empty `blind` means the scheduler could not be asked: nothing may be concluded."""

    run: Run
    wall_at: float
    mono: float
    blind: str = ""
    job: JobRecord | None = None
    attempt: Attempt | None = None
    accounted: JobRecord | None = None  # what accounting keeps of the attempt; asked only once it has ended
    down_nodes: tuple[str, ...] = ()  # of the attempt's; asked only when one may have failed
    watch: Watch | None = None
    heartbeats: HeartbeatReading = field(default_factory=HeartbeatReading)
    checkpoints: CheckpointReading = field(default_factory=CheckpointReading)
    log: LogReading = field(default_factory=LogReading)
    script_end: ScriptEnd | None = None

    @property
    def problems(self) -> tuple[str, ...]:
        return self.heartbeats.problems + self.checkpoints.problems + self.log.problems
