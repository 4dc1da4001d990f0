"""What a supervisor is made of, and what one tick of it says."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from krea_runner.clock import Clock
from krea_runner.errors import HistoryUnavailable
from krea_runner.history.store import History
from krea_runner.model import JobRecord, Run, Snapshot, Watch
from krea_runner.schedulers import NodeRecord, Scheduler


@dataclass(frozen=True, slots=True)
class RunLine:
    """What one tick says of one run. `news`: something was decided or done, worth a line in a log."""

    run: Run
    text: str
    news: bool = False
    blind: bool = False


@dataclass(slots=True)
class TickReport:
    lines: list[RunLine] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)
    """Of the runs in which this tick found nothing wrong; the loop goes on watching these. Their attempts are put on record
    together, when all have been looked at."""
    error: HistoryUnavailable | None = None
    """Set when the history could not be used: nothing was looked at, nothing was done."""

    @property
    def blind(self) -> str:
        """Why this tick could not see, for the first run it could not see; empty when it saw all."""
        if self.error is not None:
            return str(self.error)
        return next((f"{line.run.name}: {line.text}" for line in self.lines if line.blind), "")


@dataclass(slots=True)
class Supervisor:
    """What a tick needs. `memory` keeps each attempt's watch between looks of the same process, finer than the history
    does between ticks."""

    history: History
    open_scheduler: Callable[[str], Scheduler]
    clock: Clock
    user: str
    holder: str
    dry_run: bool = False
    job_ids: list[str] = field(default_factory=list)
    starts: dict[str, list[JobRecord]] | None = None
    nodes: dict[str, NodeRecord] | None = None
    """These three in the present tick, of one scheduler: what one question after another would ask is asked at once."""
    hung: dict[int, dict[str, Any] | None] = field(default_factory=dict)
    """By run, those with an incident whose job may still run (in the present tick, of one scheduler); with what was written of
    it where it is new."""
    saves_looked_mono: dict[int, float] = field(default_factory=dict)
    """By run: when this process last looked at how it saves."""
    diagnosis_left_s: float = 0.0
    """What is left of DIAGNOSIS_S in the present tick."""
    memory: dict[int, Watch] = field(default_factory=dict)
