"""Which nodes a requeued job is kept off: the user's own and ours, and never so many that the gang finds no place."""

import itertools
from collections.abc import Mapping, Sequence

from krea_runner.errors import SchedulerError
from krea_runner.history.exclusions import list_exclusions
from krea_runner.history.store import History
from krea_runner.model import Run, RunConfig
from krea_runner.schedulers import NodeRecord, Placement, Scheduler
from krea_runner.schedulers.nodelist import expand


def start_elsewhere(scheduler: Scheduler, run: Run, job_id: str, history: History, now: float) -> None:
    """Lift the start time, together with the exclusions that are on record. Where Slurm does not take those, the start comes
    first: a job that does not run helps nobody.

    Raises: SchedulerError.
    """
    excluded = _excluded(scheduler, run, job_id, history, now)
    if excluded is not None:
        try:
            scheduler.start_now(job_id, excluded)
            return
        except SchedulerError as error:
            if error.transient:
                raise
    scheduler.start_now(job_id)


def _excluded(scheduler: Scheduler, run: Run, job_id: str, history: History, now: float) -> list[str] | None:
    """The job's whole list; None when it is right as it is. A run without exclusions costs no question."""
    known = list_exclusions(history, user=run.user, run_id=run.run_id)
    if not known:
        return None
    placement = scheduler.placement(job_id)
    active = list(dict.fromkeys(exclusion.node for exclusion in known if exclusion.is_active(now)))
    ever = {exclusion.node for exclusion in known}
    own = list(dict.fromkeys([*users_own(run.config), *(node for node in placement.excluded if node not in ever)]))
    chosen = choose(scheduler.nodes(), placement, own, active, run.config.gang.nodes)
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
    """Those of `wanted`, the most urgent first, that can be excluded while `gang` nodes remain which can take the job."""
    left = {
        name
        for name, node in nodes.items()
        if not node.is_out and not set(placement.partitions).isdisjoint(node.partitions) and name not in own
    }
    chosen = []
    for name in wanted:
        if name in nodes and name not in own and len(left - {name}) >= min(gang, len(left)):
            chosen.append(name)
            left.discard(name)
    return chosen
