"""What is known of a run now, from one fresh look and from what the supervisor remembers. Pure; nothing is written."""

from collections.abc import Sequence
from dataclasses import dataclass

from krea_runner.decide.decision import restarts_in_window
from krea_runner.diagnose.end import diagnose_end
from krea_runner.diagnose.hang import judge_hang
from krea_runner.model import Action, Attempt, Incident, JobState, RunState, Snapshot, SourceWatch, Warned, Watch
from krea_runner.report.words import ago


@dataclass(frozen=True, slots=True)
class RunView:
    """`judgement` is one sentence; `is_failing`: it is about a hang or an end that calls for a restart; `blind`: it
    says what could not be seen."""

    snapshot: Snapshot
    attempt_number: int
    """Of this start among all of the run, from 1; 0 before the first."""
    restarts_used: int
    judgement: str
    is_failing: bool = False
    blind: bool = False
    beat_age_s: float | None = None
    """How long no beat has been seen to move by anybody who looked; None when this is the first look."""
    last_incident: Incident | None = None
    action: Action | None = None
    warned: tuple[Warned, ...] = ()
    """Of how it saves, what a person should look at now."""

    @property
    def step(self) -> int | None:
        beats = [beat.step for beat in self.snapshot.heartbeats.ranks if beat.step >= 0]
        if beats:
            return max(beats)
        watch, attempt = self.snapshot.watch, self.snapshot.attempt
        shown = watch.step if watch is not None else None
        return shown if shown is not None or attempt is None else attempt.last_step

    @property
    def nodes(self) -> str:
        job, attempt = self.snapshot.job, self.snapshot.attempt
        return (job.nodelist if job else "") or (attempt.nodelist if attempt else "")


def source_words(source: SourceWatch, mono: float) -> str:
    step = f"step {source.step}, " if source.step is not None else ""
    if source.unseen:
        return f"{source.name}: {step}could not see: {source.unseen}"
    moved = "not seen to move yet" if source.moved_mono is None else f"moved {ago(max(0.0, mono - source.moved_mono))}"
    return f"{source.name}: {step}{moved}"


@dataclass(frozen=True, slots=True)
class _Judgement:
    line: str
    is_failing: bool = False
    blind: bool = False


def view_run(
    snapshot: Snapshot,
    memory: Watch | None,
    *,
    attempts: Sequence[Attempt],
    incidents: Sequence[Incident],
    action: Action | None,
    epoch_id: str,
) -> RunView:
    """`memory` is the supervisor's watch of this attempt from before the snapshot; `attempts` and `incidents` are the
    run's, oldest first."""
    beat_age_s = _beat_age_s(snapshot, memory)
    judgement = _judge(snapshot, memory, beat_age_s, epoch_id)
    earlier = [] if snapshot.attempt is None else [known for known in attempts if known.key < snapshot.attempt.key]
    return RunView(
        snapshot=snapshot,
        attempt_number=0 if snapshot.attempt is None else len(earlier) + 1,
        restarts_used=restarts_in_window(incidents, snapshot.run.config.policy, snapshot.wall_at),
        judgement=judgement.line,
        is_failing=judgement.is_failing,
        blind=judgement.blind,
        beat_age_s=beat_age_s,
        last_incident=incidents[-1] if incidents else None,
        action=action,
    )


def _beat_age_s(snapshot: Snapshot, memory: Watch | None) -> float | None:
    """By counters; the wall clock only dates what a watcher saw, perhaps on another host."""
    watch = snapshot.watch
    if memory is None or watch is None or not watch.ranks or memory.attempt != watch.attempt:
        return None
    before = {rank.rank: rank.beat for rank in memory.ranks}
    if any(before.get(rank.rank) != rank.beat for rank in watch.ranks):
        return 0.0
    return None if memory.moved_wall_at is None else max(0.0, snapshot.wall_at - memory.moved_wall_at)


def _judge(snapshot: Snapshot, memory: Watch | None, beat_age_s: float | None, epoch_id: str) -> _Judgement:
    run, job, watch = snapshot.run, snapshot.job, snapshot.watch
    if snapshot.blind:
        return _Judgement(snapshot.blind, blind=True)
    if run.state in {RunState.DONE, RunState.STOPPED}:
        return _Judgement("")
    if run.job_id is None:
        return _Judgement(
            "no job id yet: the answer to its submission was lost; the supervisor looks for its tag", blind=True
        )
    if job is None:
        return _Judgement(f"could not see: job {run.job_id} is not known to the scheduler any more", blind=True)
    if job.state is not JobState.RUNNING:
        ended = None if run.state is RunState.HELD else diagnose_end(snapshot)
        return _Judgement(ended.summary, is_failing=True) if ended is not None else _Judgement("")
    moves = watch is not None and (watch.ranks or any(source.moved_mono is not None for source in watch.sources))
    if moves and memory is None:
        return _Judgement("seen for the first time: the next look tells whether it moves")
    if memory is not None and memory.epoch_id != epoch_id:
        # Its monotonic readings mean nothing here, so the hang is judged where it is watched.
        seen = "no beat seen yet" if beat_age_s is None else f"a beat was last seen to move {ago(beat_age_s)}"
        return _Judgement(f"watched from {memory.epoch_id.split('/')[0]}: {seen}")
    hang = judge_hang(snapshot)
    return _Judgement(hang.line, is_failing=hang.finding is not None, blind=hang.blind)
