"""When a run without our heartbeats is called hung, from what its other sources showed and when."""

from dataclasses import dataclass, field, replace

import pytest

from krea_runner.diagnose.hang import HangJudgement, judge_hang
from krea_runner.model import (
    BEAT_FILES,
    CHECKPOINTS,
    LOG_PATTERN,
    Attempt,
    AttemptKey,
    JobRecord,
    JobState,
    LogReading,
    ProgressSpec,
    Run,
    Snapshot,
    SourceReading,
    Watch,
)
from krea_runner.observe.progress import advance_sources

SPEC = ProgressSpec(pattern="megatron", budget_s=100)


@dataclass
class Watched:
    """One look every ten seconds; `tick` says which sources moved, which could not be seen, and whether the log grew."""

    run: Run
    mono: float = 1000.0
    marks: dict[str, int] = field(default_factory=dict)
    watch: Watch = field(default_factory=lambda: Watch("7.r0", "e", 1000.0, log_size_bytes=5, log_moved_mono=1000.0))
    log: LogReading = field(default_factory=lambda: LogReading(5))

    def have(self, *names: str) -> None:
        self.marks |= dict.fromkeys(names, 1)

    def spend(
        self, seconds: float, *, moving: tuple[str, ...] = (), unseen: tuple[str, ...] = (), logging: bool = False
    ) -> HangJudgement:
        for _ in range(round(seconds / 10)):
            self.mono += 10
            for name in moving:
                self.marks[name] += 1
            readings = [
                SourceReading(name, unseen="Stale file handle" if name in unseen else "", mark=str(mark), step=mark)
                for name, mark in self.marks.items()
            ]
            self.watch = replace(
                self.watch,
                sources=advance_sources(self.watch.sources, readings, self.mono),
                log_moved_mono=self.mono if logging else self.watch.log_moved_mono,
            )
        return self.judge()

    def judge(self) -> HangJudgement:
        return judge_hang(
            Snapshot(
                run=self.run, wall_at=self.mono, mono=self.mono, job=JobRecord("7", JobState.RUNNING, "RUNNING"),
                attempt=Attempt(1, 1, AttemptKey("7"), 0.0), watch=self.watch, log=self.log,
            )
        )  # fmt: skip


@pytest.fixture
def watched(run: Run) -> Watched:
    return Watched(replace(run, config=replace(run.config, progress=SPEC)))


def set_spec(watched: Watched, **changes) -> None:
    watched.run = replace(watched.run, config=replace(watched.run.config, progress=replace(SPEC, **changes)))


def test_a_run_whose_log_shows_steps_is_in_progress(watched) -> None:
    watched.have(LOG_PATTERN)
    judged = watched.spend(300, moving=(LOG_PATTERN,), logging=True)
    assert (judged.finding, judged.blind) == (None, False)
    assert judged.line == "in progress at step 31, its log pattern moved 0 s ago"


def test_the_silence_of_the_log_in_which_the_pattern_stands_is_no_second_signal(watched) -> None:
    watched.have(LOG_PATTERN)
    watched.spend(50, moving=(LOG_PATTERN,), logging=True)
    judged = watched.spend(190)
    assert judged.finding is None
    assert judged.line == "log pattern frozen 190 s, no second signal; judged a hang in 10 s"
    finding = watched.spend(10).finding
    assert finding is not None
    assert (finding.cause, finding.step, finding.agreed_by) == ("no_progress", 6, "2 times the budget has passed")
    assert finding.summary == "hang: no progress for 200 s at step 6 (log pattern frozen 200 s)"
    assert finding.last_progress_at == watched.mono - 200


def test_beat_files_and_the_pattern_agree(watched) -> None:
    watched.have(LOG_PATTERN, BEAT_FILES)
    watched.spend(50, moving=(LOG_PATTERN, BEAT_FILES), logging=True)
    assert watched.spend(90, logging=True).finding is None
    finding = watched.spend(10, logging=True).finding
    assert finding is not None
    assert finding.agreed_by == "beat files frozen 100 s"


def test_a_silent_log_agrees_with_beat_files(watched) -> None:
    watched.have(BEAT_FILES)
    watched.spend(50, moving=(BEAT_FILES,), logging=True)
    assert watched.spend(90).finding is None
    assert watched.spend(10).finding.agreed_by == "log silent 100 s"


def test_a_log_that_goes_on_does_not_agree_but_the_longer_budget_does(watched) -> None:
    watched.have(BEAT_FILES)
    watched.spend(50, moving=(BEAT_FILES,), logging=True)
    assert watched.spend(190, logging=True).finding is None
    assert watched.spend(10, logging=True).finding.agreed_by == "2 times the budget has passed"


def test_any_source_that_moves_explains_the_others(watched) -> None:
    watched.have(LOG_PATTERN, BEAT_FILES, CHECKPOINTS)
    watched.spend(50, moving=(LOG_PATTERN, BEAT_FILES))
    assert watched.spend(500, moving=(BEAT_FILES,)).finding is None
    watched.spend(20, moving=(CHECKPOINTS,))
    assert "its checkpoints moved" in watched.spend(90).line


@pytest.mark.parametrize("moved_before", [True, False])
def test_a_source_that_cannot_be_seen_is_not_held_against_the_run(watched, moved_before) -> None:
    watched.have(LOG_PATTERN, BEAT_FILES)
    watched.spend(50, moving=(LOG_PATTERN, BEAT_FILES) if moved_before else (LOG_PATTERN,))
    judged = watched.spend(5000, unseen=(BEAT_FILES,))
    assert (judged.finding, judged.blind) == (None, True)
    assert judged.line == "could not see its beat files for 4990 s: Stale file handle"


def test_a_source_that_was_out_of_sight_and_moved_meanwhile_is_not_frozen(watched) -> None:
    watched.have(LOG_PATTERN)
    watched.spend(50, moving=(LOG_PATTERN,))
    watched.spend(5000, unseen=(LOG_PATTERN,))
    assert watched.spend(10, moving=(LOG_PATTERN,)).line.startswith("in progress")


def test_a_source_that_comes_back_into_sight_as_it_was_has_its_whole_budget_left(watched) -> None:
    """The file system was away, and the ranks waited for it too."""
    watched.have(LOG_PATTERN)
    watched.spend(50, moving=(LOG_PATTERN,))
    watched.spend(5000, unseen=(LOG_PATTERN,))
    judged = watched.spend(10)
    assert (judged.finding, judged.line) == (None, "in progress at step 6, its log pattern moved 10 s ago")


def test_a_pattern_that_never_fitted_kills_nothing_and_is_said(watched) -> None:
    watched.marks = {}
    readings = [SourceReading(LOG_PATTERN)]
    watched.watch = replace(watched.watch, sources=advance_sources((), readings, watched.mono))
    watched.mono += 30
    assert watched.judge().line == "starting: no log pattern yet"
    watched.mono += 100_000
    judged = watched.judge()
    assert (judged.finding, judged.blind) == (None, True)
    assert "no line of its log fits [progress] pattern = 'megatron'" in judged.line


def test_log_silence_alone_is_only_told(watched) -> None:
    set_spec(watched, pattern="")
    judged = watched.spend(100_000)
    assert judged.finding is None
    assert "hangs cannot be seen" in judged.line
    assert "its log is silent for 100000 s" in judged.line


def test_log_silence_kills_only_where_it_was_asked_for_and_after_the_longer_wait(watched) -> None:
    set_spec(watched, pattern="", log_silence_s=300)
    assert watched.spend(590).finding is None
    finding = watched.spend(10).finding
    assert finding is not None
    assert finding.summary == "hang: no progress for 600 s (log silent 600 s)"


def test_a_log_that_cannot_be_read_is_not_silent(watched) -> None:
    set_spec(watched, pattern="", log_silence_s=300)
    watched.log = LogReading(problems=("could not read it",))
    assert watched.spend(100_000).finding is None


def test_checkpoints_that_stay_away_are_no_sign_unless_it_is_said_how_often_they_come(watched) -> None:
    set_spec(watched, pattern="")
    watched.have(CHECKPOINTS)
    watched.spend(20, moving=(CHECKPOINTS,), logging=True)
    assert watched.spend(100_000).finding is None


def test_overdue_checkpoints_and_a_silent_log_are_two_signals(watched) -> None:
    set_spec(watched, pattern="", checkpoints_s=1000)
    watched.have(CHECKPOINTS)
    watched.spend(20, moving=(CHECKPOINTS,), logging=True)
    assert watched.spend(990).line == "checkpoints frozen 990 s of 1000 s"
    assert watched.spend(10).finding.agreed_by == "log silent 1000 s"


def test_overdue_checkpoints_agree_with_a_frozen_pattern(watched) -> None:
    set_spec(watched, checkpoints_s=150)
    watched.have(LOG_PATTERN, CHECKPOINTS)
    watched.spend(20, moving=(CHECKPOINTS, LOG_PATTERN), logging=True)
    assert watched.spend(140, logging=True).finding is None
    assert watched.spend(10, logging=True).finding.agreed_by == "checkpoints frozen 150 s"


def test_without_a_budget_of_its_own_the_longest_pause_is_allowed(watched) -> None:
    set_spec(watched, budget_s=None)  # checkpoint: 100 s, evaluation: 50 s, step: 10 s
    watched.have(LOG_PATTERN)
    watched.spend(20, moving=(LOG_PATTERN,))
    assert watched.spend(90).line.startswith("in progress")
    assert watched.spend(20).line.startswith("log pattern frozen 110 s")
