"""How a run's saving goes, and warnings: what is not a failure yet."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Saves:
    """What the checkpoint directory shows, newest first; sizes of the newest two only. Times are the file server's.

    `took_s` is the longest that is known of a save: from its first file's end to its last one's, or what the ranks were seen to
    be in the phase for.
    """

    written_at: tuple[float, ...] = ()
    sizes_bytes: tuple[int, ...] = ()
    files: int = 0
    took_s: float | None = None
    growing: str = ""
    """The newest one that is not whole, newer than any that is; with what it holds and when a file of it was last written."""
    growing_bytes: int = 0
    growing_at: float | None = None
    free_bytes: int | None = None
    free_files: int | None = None
    limit_at: float | None = None
    """When the job's time limit ends it."""
    unseen: str = ""

    @property
    def interval_s(self) -> float | None:
        """The usual one between two saves: their median."""
        gaps = sorted(later - earlier for later, earlier in zip(self.written_at, self.written_at[1:], strict=False))
        return gaps[len(gaps) // 2] if gaps and gaps[len(gaps) // 2] > 0 else None

    @property
    def bytes_per_s(self) -> float | None:
        return self.sizes_bytes[0] / self.took_s if self.sizes_bytes and self.took_s else None

    @property
    def room(self) -> float | None:
        """For how many more saves like the last there is room, by bytes and by files."""
        if not self.sizes_bytes or self.free_bytes is None:
            return None
        by_bytes = self.free_bytes / max(1, self.sizes_bytes[0])
        return min(by_bytes, self.free_files / max(1, self.files)) if self.free_files is not None else by_bytes


@dataclass(frozen=True, slots=True)
class Warned:
    """One episode of something that a person should look at before it is a failure."""

    run_id: int
    attempt: str
    kind: str
    text: str
    began_at: float
    ended_at: float | None = None
