"""The watcher's memory: how long each counter has not moved, on the watcher's own clock, and what healthy waits taught."""

from collections.abc import Iterable
from dataclasses import replace

from krea_runner.model import Budgets, HeartbeatReading, Learned, RankBeat, RankWatch, Watch

# What lies between two looks counts as silence for no longer than this, or than twice the time between the two looks before: a
# watcher that was stopped for ten minutes has not seen ten minutes of silence. Cron's looks are 60 s apart.
LOOK_CAP_S = 90.0
DONE = "done"
LAG_CAP_S = 300.0
BEHIND_WEIGHT = 0.05  # of one look, in the mean of how often a node was at a lower step than others
BEHIND_KEPT = 0.02


def advance_watch(
    old: Watch | None,
    reading: HeartbeatReading,
    *,
    attempt: str,
    log_size_bytes: int,
    epoch_id: str,
    mono: float,
    wall: float,
    budgets: Budgets | None = None,
) -> Watch:
    """The memory after one more look. It starts afresh at the attempt's border and on another host or boot, because
    monotonic readings of two clocks cannot be compared; only what was learned goes on. A rank that was not seen this time
    keeps what is known of it, and the time until it is seen again counts no more than a look does.
    """
    if old is None or old.attempt != attempt or old.epoch_id != epoch_id:
        learned = Learned() if old is None else old.learned.at_border()
        old = Watch(attempt=attempt, epoch_id=epoch_id, since_mono=mono, log_moved_mono=mono, learned=learned)
    cap_s = max(LOOK_CAP_S, 2 * old.look_s)
    unwatched_s = 0.0 if old.looked_mono is None else max(0.0, mono - old.looked_mono - cap_s)
    known = {rank.rank: rank for rank in old.ranks}
    seen = {beat.rank: _advance_rank(known.get(beat.rank), beat, mono, cap_s) for beat in reading.ranks}
    ranks = known | seen
    moved = any(rank.beat_moved_mono == mono for rank in seen.values())
    log_moved = log_size_bytes != old.log_size_bytes
    newest = max((rank.step for rank in seen.values()), default=-1)
    some_unseen = len(seen) < len(ranks)
    since_mono = old.since_mono + unwatched_s
    watch = Watch(
        attempt=attempt,
        epoch_id=epoch_id,
        since_mono=since_mono,
        ranks=tuple(ranks[rank] for rank in sorted(ranks)),
        log_size_bytes=log_size_bytes,
        log_moved_mono=mono if log_moved else old.log_moved_mono + unwatched_s,
        moved_wall_at=wall if moved else old.moved_wall_at,
        looked_mono=mono,
        look_s=0.0 if old.looked_mono is None else mono - old.looked_mono,
        first_step=newest if old.first_step is None and newest >= 0 else old.first_step,
        unseen_since_mono=(mono if old.unseen_since_mono is None else old.unseen_since_mono) if some_unseen else None,
        behind=_behind(old.behind, seen.values()),
        learned=old.learned,
        slow_said=old.slow_said and old.learned.is_slow,
    )
    if unwatched_s or not moved or old.unseen_since_mono is not None:
        return watch
    return replace(watch, learned=_learn(old, watch, known, budgets or Budgets()))


def _advance_rank(old: RankWatch | None, beat: RankBeat, mono: float, cap_s: float) -> RankWatch:
    same_beat = old is not None and (old.beat, old.phase) == (beat.beat, beat.phase)
    same_flush = old is not None and old.flush == beat.flush
    unseen_s = 0.0 if old is None or old.seen_mono is None else max(0.0, mono - old.seen_mono - cap_s)
    return RankWatch(
        rank=beat.rank,
        node=beat.node,
        beat=beat.beat,
        flush=beat.flush,
        step=beat.step,
        phase=beat.phase,
        phase_budget_s=beat.phase_budget_s,
        beat_moved_mono=old.beat_moved_mono + unseen_s if old is not None and same_beat else mono,
        flush_moved_mono=old.flush_moved_mono + unseen_s if old is not None and same_flush else mono,
        seen_mono=mono,
    )


# ----------------------------------------------------------------------------------------------------------- learning


def _learn(old: Watch, watch: Watch, known: dict[int, RankWatch], budgets: Budgets) -> Learned:
    """The gang has just moved. How long it had not is judged against a budget, so that is what is learned; a silence that was
    judged a hang, and ended all the same, is not."""
    learned, mono, looked_mono = old.learned, watch.looked_mono, old.looked_mono
    if mono is None or looked_mono is None:  # the first look: since when it runs is not known
        return learned
    if old.first_step is None:
        startup_s = mono - watch.since_mono
        return learned if watch.first_step is None else learned.with_wait("startup", startup_s, startup_s, startup_s)
    before = [rank for rank in old.ranks if rank.phase != DONE]
    if not before:
        return learned
    learned = replace(learned, lag_s=max(learned.lag_s, _lag_s(watch, known, mono)))
    phase, allowed_s = _patient(
        learned, {(rank.phase, rank.phase_budget_s) for rank in before}, budgets, old.is_warming_up
    )
    last_mono = max(rank.beat_moved_mono for rank in before)
    during_s, silent_s = mono - last_mono, looked_mono - last_mono
    if silent_s > allowed_s * budgets.second_look:
        return learned
    beats = max(rank.beat - known[rank.rank].beat for rank in watch.ranks if rank.rank in known)
    usual_s = during_s / max(1, beats)
    if phase == "step" and old.is_warming_up:
        phase = "compile"
    # Between two looks many beats may have passed: then their mean is what is known, and the silence that was seen.
    return learned.with_wait(phase, usual_s, max(usual_s, silent_s), during_s)


def _patient(
    learned: Learned, phases: set[tuple[str, float | None]], budgets: Budgets, warm_up: bool
) -> tuple[str, float]:
    """The phase that allows the longest wait, and how long: what the gang waited for."""

    def allowed_s(phase: tuple[str, float | None]) -> float:
        name, own_s = phase
        return learned.budget(name, budgets, warm_up=warm_up).seconds if own_s is None else own_s

    patient = max(sorted(phases, key=str), key=allowed_s)
    return patient[0], allowed_s(patient)


def _lag_s(watch: Watch, known: dict[int, RankWatch], mono: float) -> float:
    """How long the flush that came last had not been seen; looks that are far apart lag too."""
    lags = [
        mono - known[rank.rank].flush_moved_mono
        for rank in watch.ranks
        if rank.flush_moved_mono == mono and rank.rank in known
    ]
    return min(LAG_CAP_S, max(lags, default=0.0))


def _behind(old: tuple[tuple[str, float], ...], seen: Iterable[RankWatch]) -> tuple[tuple[str, float], ...]:
    ranks = [rank for rank in seen if rank.step >= 0 and rank.phase != DONE]
    newest = max((rank.step for rank in ranks), default=-1)
    late = {rank.node for rank in ranks if rank.step < newest}
    shares = dict(old)
    for node in shares.keys() | late:
        shares[node] = shares.get(node, 0.0) * (1 - BEHIND_WEIGHT) + BEHIND_WEIGHT * (node in late)
    return tuple(sorted((node, share) for node, share in shares.items() if share >= BEHIND_KEPT))
