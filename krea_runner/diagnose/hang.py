"""Is the gang stuck? Pure: a Snapshot in, a judgement out, never a clock read.

The rule (design §7, rules 4 to 6). A gang hangs when *every* rank is past the budget of the phase it is in: a synchronous
gang waits for its slowest member, so one rank that saves a checkpoint within its budget explains all that wait for
it. Then one independent signal must agree, or a longer budget must have passed. What could not be seen is never held
against a run.
"""

from dataclasses import dataclass

from krea_runner.diagnose.progress import judge_progress
from krea_runner.model import Finding, JobState, RankWatch, Snapshot, Suspect, Symptom, Watch

# The client flushes once a second (heartbeat.py): three missed flushes are the least that can mean anything.
FLUSH_SILENT_S = 3.0
# No verdict sooner, whatever the budget: by then a silent flush is told from a live one, so that the right rank is named.
LEAST_BUDGET_S = FLUSH_SILENT_S + 0.5
NAMED = 4  # ranks a line has room for
OVER = "done"  # the phase of a rank that has closed its heartbeat: it owes no more beats


@dataclass(frozen=True, slots=True)
class HangJudgement:
    """`finding` is set when the gang hangs; `line` says in any case what is known, for `status`."""

    line: str
    finding: Finding | None = None
    blind: bool = False


@dataclass(frozen=True, slots=True)
class _RankAge:
    rank: int
    node: str
    phase: str
    step: int
    beat: int
    age_s: float
    budget_s: float
    flush_age_s: float | None  # None: never wrote

    @property
    def left_s(self) -> float:
        return self.budget_s - self.age_s


def judge_hang(snapshot: Snapshot) -> HangJudgement:
    watch, job = snapshot.watch, snapshot.job
    if snapshot.blind:
        return HangJudgement(snapshot.blind, blind=True)
    if watch is None or job is None or job.state is not JobState.RUNNING:
        return HangJudgement("not running")
    if not watch.ranks:
        return HangJudgement(*judge_progress(snapshot, watch))
    unseen = {rank.rank for rank in watch.ranks} - {beat.rank for beat in snapshot.heartbeats.ranks}
    if unseen:
        why = snapshot.heartbeats.problems[:1] or ("its heartbeat is gone",)
        return HangJudgement(f"could not see {_ranks(sorted(unseen))}: {why[0]}", blind=True)

    missing = sum(age.flush_age_s is None for age in _ages(snapshot, watch))
    if missing and snapshot.heartbeats.problems:
        return HangJudgement(f"could not see {missing} ranks: {snapshot.heartbeats.problems[0]}", blind=True)

    ages = [age for age in _ages(snapshot, watch) if age.phase != OVER]
    if not ages:
        return HangJudgement("every rank has finished")
    patient = max(ages, key=lambda age: age.left_s)
    if patient.left_s > 0:
        return HangJudgement(_progress_line(ages, patient))

    agreed_by = _second_signal(watch, snapshot.mono, ages)
    frozen_s = min(age.age_s for age in ages)
    if not agreed_by:
        longer_s = snapshot.run.config.budgets.second_look
        left_s = max(age.budget_s * longer_s - age.age_s for age in ages)
        if left_s > 0:
            return HangJudgement(f"frozen {frozen_s:.0f} s, no second signal; judged a hang in {left_s:.0f} s")
        agreed_by = f"{longer_s:g} times the budget has passed"
    return HangJudgement(f"hung: frozen {frozen_s:.0f} s", _finding(watch, ages, frozen_s, agreed_by))


def _ages(snapshot: Snapshot, watch: Watch) -> list[_RankAge]:
    budgets = snapshot.run.config.budgets
    known = {rank.rank: rank for rank in watch.ranks}
    # A gang that has stepped has all its ranks: one that never wrote does not take part (only rank 0 beats, say).
    stepped = any(rank.step >= 0 for rank in watch.ranks)
    world = sorted(known if stepped else {*range(snapshot.run.config.gang.world_size), *known})

    def age(number: int) -> _RankAge:
        rank: RankWatch | None = known.get(number)
        if rank is None:  # a rank that has never written is still starting
            return _RankAge(number, "", "startup", -1, 0, snapshot.mono - watch.since_mono, budgets.startup_s, None)
        given_s = rank.phase_budget_s if rank.phase_budget_s is not None else budgets.for_phase(rank.phase)
        budget_s = max(given_s, LEAST_BUDGET_S)
        return _RankAge(
            number, rank.node, rank.phase, rank.step, rank.beat, snapshot.mono - rank.beat_moved_mono, budget_s,
            snapshot.mono - rank.flush_moved_mono,
        )  # fmt: skip

    return [age(number) for number in world]


def _progress_line(ages: list[_RankAge], patient: _RankAge) -> str:
    late = [age for age in ages if age.left_s <= 0]
    if not late:
        return f"in progress, last beat {min(age.age_s for age in ages):.0f} s ago"
    return (
        f"{_ranks([age.rank for age in late])} silent {late[0].age_s:.0f} s; "
        f"rank {patient.rank} is in {patient.phase}, {patient.left_s:.0f} s left"
    )


def _second_signal(watch: Watch, mono: float, ages: list[_RankAge]) -> str:
    """What agrees that nothing moves, in words; empty when nothing does.

    When nobody's flush arrives any more, the file system may be what stands still: then its silence, the logs' included,
    is one signal and not two.
    """
    silent, flushing = _split_by_flush(ages)
    if not flushing:
        return ""
    if silent:
        return f"{_ranks([age.rank for age in silent])} writes no heartbeat at all while others do"
    log_silent_s = mono - watch.log_moved_mono
    if watch.log_size_bytes and log_silent_s >= min(age.budget_s for age in ages):
        return f"logs silent {log_silent_s:.0f} s"
    return ""


def _split_by_flush(ages: list[_RankAge]) -> tuple[list[_RankAge], list[_RankAge]]:
    """The ranks whose process or node is silent, and those whose flusher lives."""

    def is_silent(age: _RankAge) -> bool:
        return age.flush_age_s is None or age.flush_age_s >= max(FLUSH_SILENT_S, age.budget_s / 2)

    return [age for age in ages if is_silent(age)], [age for age in ages if not is_silent(age)]


def _finding(watch: Watch, ages: list[_RankAge], frozen_s: float, agreed_by: str) -> Finding:
    silent, flushing = _split_by_flush(ages)
    cause, who, reason = _who(ages, silent, flushing)
    nodes = sorted({age.node for age in who if age.node})
    last = who[0] if who else max(ages, key=lambda age: age.step)
    where = f" on {','.join(nodes)}" if nodes else ""
    step = max(age.step for age in ages)
    whom = _ranks([age.rank for age in who]) if who else "the whole gang"
    return Finding(
        symptom=Symptom.HANG,
        cause=cause,
        summary=f"hang: {whom}{where} {reason}, no progress for {frozen_s:.0f} s in {last.phase} at step {max(step, 0)}",
        node=",".join(nodes),
        step=step if step >= 0 else None,
        last_progress_at=watch.moved_wall_at,
        evidence=tuple(
            f"rank {age.rank} {age.node or '-'}: {age.phase} step {age.step} beat {age.beat} frozen {age.age_s:.1f} s "
            f"(budget {age.budget_s:g} s), "
            + ("never wrote" if age.flush_age_s is None else f"flush frozen {age.flush_age_s:.1f} s")
            for age in ages
        ),
        suspects=tuple(Suspect("rank", str(age.rank), reason) for age in who)
        + tuple(Suspect("node", node, reason) for node in nodes),
        agreed_by=agreed_by,
    )


def _who(ages: list[_RankAge], silent: list[_RankAge], flushing: list[_RankAge]) -> tuple[str, list[_RankAge], str]:
    """Cause, the ranks to look at first (empty: no one stands out), and what they did, in words."""
    if silent and flushing:
        nodes = {age.node for age in silent if age.node}
        whole = nodes and not any(age.node in nodes for age in flushing)
        never = all(age.flush_age_s is None for age in silent)
        if never:
            return "rank_never_started", silent, "never wrote a heartbeat"
        if whole and len(silent) > 1:
            return "node_silent", silent, "silent as a whole node"
        return "rank_stopped", silent, "stopped: neither beats nor flushes"
    if not flushing:
        return "all_silent", [], "all silent (processes stopped, or the file system)"
    first = min(age.beat for age in ages)
    behind = [age for age in ages if age.beat == first]
    if len(behind) == len(ages):
        return "loop_stuck", [], "stuck in the same place"
    return "loop_stuck", behind, "stopped stepping first"


def _ranks(numbers: list[int]) -> str:
    shown = ",".join(map(str, numbers[:NAMED])) + (f",… ({len(numbers)})" if len(numbers) > NAMED else "")
    return f"rank {shown}" if len(numbers) == 1 else f"ranks {shown}"
