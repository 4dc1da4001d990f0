"""The watcher's memory: how long each counter has not moved, on the watcher's own clock."""

from krea_runner.model import HeartbeatReading, RankBeat, RankWatch, Watch


def advance_watch(
    old: Watch | None,
    reading: HeartbeatReading,
    *,
    attempt: str,
    log_size_bytes: int,
    epoch_id: str,
    mono: float,
    wall: float,
) -> Watch:
    """The memory after one more look. It starts afresh at the attempt's border and on another host or boot, because
    monotonic readings of two clocks cannot be compared. A rank that was not seen this time keeps what is known of it.
    """
    if old is None or old.attempt != attempt or old.epoch_id != epoch_id:
        old = Watch(attempt=attempt, epoch_id=epoch_id, since_mono=mono, log_moved_mono=mono)
    known = {rank.rank: rank for rank in old.ranks}
    seen = {beat.rank: _advance_rank(known.get(beat.rank), beat, mono) for beat in reading.ranks}
    ranks = known | seen
    moved = any(rank.beat_moved_mono == mono for rank in seen.values())
    log_moved = log_size_bytes != old.log_size_bytes
    return Watch(
        attempt=attempt,
        epoch_id=epoch_id,
        since_mono=old.since_mono,
        ranks=tuple(ranks[rank] for rank in sorted(ranks)),
        log_size_bytes=log_size_bytes,
        log_moved_mono=mono if log_moved else old.log_moved_mono,
        moved_wall_at=wall if moved else old.moved_wall_at,
    )


def _advance_rank(old: RankWatch | None, beat: RankBeat, mono: float) -> RankWatch:
    same_beat = old is not None and old.beat == beat.beat and old.phase == beat.phase
    same_flush = old is not None and old.flush == beat.flush
    return RankWatch(
        beat.rank,
        beat.node,
        beat.beat,
        beat.flush,
        beat.step,
        beat.phase,
        beat.phase_budget_s,
        old.beat_moved_mono if old is not None and same_beat else mono,
        old.flush_moved_mono if old is not None and same_flush else mono,
    )
