"""Which nodes a requeued job is kept off: the user's own and ours, and never so many that the gang finds no place."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from krea_runner.errors import SchedulerError
from krea_runner.history.exclusions import list_exclusions
from krea_runner.history.store import History
from krea_runner.model import Run, RunConfig
from krea_runner.schedulers import NodeRecord, Placement, Scheduler
from krea_runner.schedulers.nodelist import expand, fold


@dataclass(slots=True)
class Places:
    """Where jobs may go, and what state those nodes are in: asked once for all jobs that are started again together, and only
    when one of them has exclusions on record."""

    scheduler: Scheduler
    job_ids: Sequence[str]
    _known: tuple[Mapping[str, Placement], Mapping[str, NodeRecord]] | None = None

    def seen(self) -> tuple[Mapping[str, Placement], Mapping[str, NodeRecord]]:
        """Raises: SchedulerError."""
        if self._known is None:
            self._known = self.scheduler.placements(self.job_ids), self.scheduler.nodes()
        return self._known


def start_elsewhere(places: Places, run: Run, job_id: str, history: History, now: float) -> str:
    """Lift the start time, together with the exclusions that are on record. Returns what is to be said of those.

    Raises: SchedulerError.
    """
    scheduler, excluded = places.scheduler, _excluded(places, run, job_id, history, now)
    if excluded is None:
        scheduler.start_now(job_id)
        return ""
    return _first_with(excluded, lambda: scheduler.start_now(job_id, excluded), lambda: scheduler.start_now(job_id))[1]


def submit_elsewhere(
    places: Places, run: Run, script: Path, old_job: str, history: History, now: float
) -> tuple[str, str]:
    """Submit the run's script as a new job, in place of `old_job`, off the same nodes. Returns the job id, and what is to be
    said of the exclusions.

    Raises: SchedulerError, as submit does.
    """
    scheduler, excluded = places.scheduler, _excluded(places, run, old_job, history, now)
    if excluded is None:
        return scheduler.submit(script, tag=run.tag), ""
    return _first_with(
        excluded,
        lambda: scheduler.submit(script, tag=run.tag, excluded=excluded),
        lambda: scheduler.submit(script, tag=run.tag),
    )


_T = TypeVar("_T")


def _first_with(excluded: Sequence[str], do: Callable[[], _T], without: Callable[[], _T]) -> tuple[_T, str]:
    """Where Slurm does not take the exclusions, the start comes first: a job that does not run helps nobody."""
    try:
        return do(), f"off {fold(excluded)}" if excluded else "no node excluded any more"
    except SchedulerError as error:
        if error.transient:
            raise
        return without(), f"NOT kept off {fold(excluded)}: {error}"


def _excluded(places: Places, run: Run, job_id: str, history: History, now: float) -> list[str] | None:
    """The job's whole list; None when it is right as it is. A run without exclusions costs no question."""
    known = list_exclusions(history, user=run.user, run_id=run.run_id)
    if not known:
        return None
    placements, nodes = places.seen()
    # The partition of a job that is forgotten, where run.toml names one.
    named = str(run.config.slurm.get("partition", ""))
    placement = placements.get(job_id) or Placement(tuple(filter(None, named.split(","))))
    active = list(dict.fromkeys(exclusion.node for exclusion in known if exclusion.is_active(now)))
    ever = {exclusion.node for exclusion in known}
    own = list(dict.fromkeys([*users_own(run.config), *(node for node in placement.excluded if node not in ever)]))
    chosen = choose(nodes, placement, own, active, run.config.gang.nodes)
    wanted = [*own, *chosen]
    return None if set(wanted) == set(placement.excluded) else wanted


def users_own(config: RunConfig) -> list[str]:
    """What run.toml itself excludes, as `exclude` or among the extra options."""
    lists = [str(config.slurm.get("exclude", ""))]
    words = " ".join(str(option) for option in config.slurm.get("extra", ())).replace("=", " ").split()
    lists += [after for word, after in itertools.pairwise(words) if word in {"--exclude", "-x"}]
    return [name for text in lists for name in expand(text)]


def choose(
    nodes: Mapping[str, NodeRecord], placement: Placement, own: Sequence[str], wanted: Sequence[str], gang: int
) -> list[str]:
    """Those of `wanted`, the most urgent first, that can be excluded while `gang` nodes remain which can take the job, and
    that it does not ask for by name."""
    left = {name for name, node in nodes.items() if not node.is_out and placement.allows(node) and name not in own}
    chosen = []
    for name in wanted:
        if (
            left
            and name in nodes
            and name not in {*own, *placement.required}
            and len(left - {name}) >= min(gang, len(left))
        ):
            chosen.append(name)
            left.discard(name)
    return chosen
