"""What is wrong with how a run saves, before it is lost work. Pure: what was seen in, a sentence for each kind out."""

from krea_runner.model import Attempt, Saves

# Saves for which there should be room.
ROOM = 2
# Without a save for this many times the usual interval, and at least this long.
LATE = 3.0
LATE_LEAST_S = 600.0
# Nobody has written to a save that is not over for this long, or this many times what one takes.
STALLED_LEAST_S = 600.0
STALLED = 3.0
SHRUNK = 0.8

NO_ROOM, LATE_SAVE, STALLED_SAVE, SHRINKING, BEFORE_LIMIT, FROM_NOTHING = KINDS = (
    "no room", "no save", "save stalled", "save shrinks", "time limit", "resumed from nothing",
)  # fmt: skip


def saving_troubles(saves: Saves, *, now: float, started_at: float | None) -> dict[str, str]:
    """Of a run whose job runs since `started_at`, by kind. What is not known gives none."""
    found = {}
    room, took_s, interval_s = saves.room, saves.took_s or 0.0, saves.interval_s
    if room is not None and room < ROOM:
        found[NO_ROOM] = f"room for {int(room)} more saves like the last, {ROOM} should fit: prune, or get more space"
    if len(saves.sizes_bytes) > 1 and saves.sizes_bytes[0] < SHRUNK * saves.sizes_bytes[1]:
        part = saves.sizes_bytes[0] / saves.sizes_bytes[1]
        found[SHRINKING] = f"the last save holds {part:.0%} of what the one before it does: is all of it there?"
    if saves.growing and saves.growing_at is not None:
        silent_s = now - saves.growing_at
        if silent_s > max(STALLED_LEAST_S, STALLED * took_s):
            found[STALLED_SAVE] = (
                f"{saves.growing} is not whole, and nobody has written to it for {silent_s / 60:.0f} min"
            )
    since = max(
        (at for at in (saves.written_at[0] if saves.written_at else None, started_at) if at is not None), default=None
    )
    if interval_s is None or since is None:
        return found
    if now - since > max(LATE_LEAST_S, LATE * interval_s) and STALLED_SAVE not in found:
        found[LATE_SAVE] = (
            f"no save for {(now - since) / 60:.0f} min; usually one comes every {interval_s / 60:.0f} min"
        )
    if saves.limit_at is not None and now < saves.limit_at:
        over_s = since + interval_s + took_s - saves.limit_at
        if over_s > 0:
            lost_s = max(0.0, saves.limit_at - since)
            found[BEFORE_LIMIT] = (
                f"the time limit comes in {(saves.limit_at - now) / 60:.0f} min and the next save would be over "
                f"{over_s / 60:.0f} min after it: {lost_s / 60:.0f} min of work are lost unless it is told to save before"
            )
    return found


def from_nothing(attempt: Attempt, resume_step: int | None, oldest_step: int | None) -> str:
    """Why an attempt has not gone on from where it should have; empty when it has, or where that is not known. One step less
    is a matter of counting."""
    first = attempt.first_step
    if resume_step is None or first is None or first >= resume_step - 1:
        return ""
    if oldest_step is not None and first < oldest_step - 1:
        return f"resumed from nothing: its first step was {first}, though step {resume_step} was there to be loaded"
    return f"resumed from an older checkpoint: its first step was {first}, though step {resume_step} was there to be loaded"
