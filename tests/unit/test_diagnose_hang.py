import dataclasses

from krea_runner.diagnose.hang import judge_hang
from krea_runner.model import JobRecord, JobState
from krea_runner.observe.watch import advance_watch

ALL = {0, 1, 2, 3}


def test_a_gang_that_steps_is_in_progress(gang) -> None:
    judgement = judge_hang(gang.pass_time(60, beating=ALL, logging=True))
    assert judgement.finding is None
    assert "in progress" in judgement.line


def test_one_stopped_rank_is_named_once_all_are_past_their_budget(gang) -> None:
    gang.pass_time(5, beating=ALL)
    assert judge_hang(gang.pass_time(9, flushing={0, 1, 3})).finding is None
    finding = judge_hang(gang.pass_time(3, flushing={0, 1, 3})).finding
    assert finding is not None
    assert (finding.cause, finding.node, finding.step) == ("rank_stopped", "n2", 10)
    assert "rank 2" in finding.summary
    assert "rank 2 writes no heartbeat" in finding.agreed_by
    assert [(s.kind, s.name) for s in finding.suspects] == [("rank", "2"), ("node", "n2")]
    assert len(finding.evidence) == 4


def test_a_whole_silent_node_is_told_from_one_silent_rank(gang) -> None:
    gang.pass_time(5, beating=ALL)
    finding = judge_hang(gang.pass_time(12, flushing={0, 1})).finding
    assert finding is not None
    assert (finding.cause, finding.node) == ("node_silent", "n2")


def test_a_stuck_loop_needs_a_second_signal(gang) -> None:
    gang.pass_time(5, beating=ALL, logging=True)
    still_logging = judge_hang(gang.pass_time(15, logging=True))
    assert still_logging.finding is None
    assert "no second signal" in still_logging.line


def test_silent_logs_are_a_second_signal(gang) -> None:
    gang.pass_time(5, beating=ALL, logging=True)
    finding = judge_hang(gang.pass_time(12)).finding
    assert finding is not None
    assert finding.agreed_by.startswith("logs silent")
    assert finding.cause == "loop_stuck"


def test_without_a_second_signal_twice_the_budget_is_enough(gang) -> None:
    gang.pass_time(5, beating=ALL, logging=True)
    assert judge_hang(gang.pass_time(19, logging=True)).finding is None
    finding = judge_hang(gang.pass_time(2, logging=True)).finding
    assert finding is not None
    assert "2 times the budget" in finding.agreed_by


def test_logs_that_never_existed_do_not_agree(gang) -> None:
    gang.log_size = 0
    gang.pass_time(5, beating=ALL)
    assert judge_hang(gang.pass_time(12)).finding is None


def test_everybody_silent_may_be_the_file_system_and_waits_longer(gang) -> None:
    gang.pass_time(5, beating=ALL, logging=True)
    assert judge_hang(gang.pass_time(15, flushing=set())).finding is None
    finding = judge_hang(gang.pass_time(6, flushing=set())).finding
    assert finding is not None
    assert finding.cause == "all_silent"


def test_a_rank_saving_a_checkpoint_explains_all_that_wait_for_it(gang) -> None:
    gang.pass_time(5, beating=ALL)
    gang.change(0, phase="checkpoint")
    judgement = judge_hang(gang.pass_time(90))
    assert judgement.finding is None
    assert "rank 0 is in checkpoint" in judgement.line
    assert judge_hang(gang.pass_time(12)).finding is not None


def test_a_budget_given_by_the_rank_wins(gang) -> None:
    gang.pass_time(5, beating=ALL)
    gang.change(0, phase="checkpoint", phase_budget_s=5.0)
    assert judge_hang(gang.pass_time(12)).finding is not None


def test_the_rank_that_stopped_stepping_first_is_named(gang) -> None:
    gang.pass_time(5, beating=ALL)
    gang.pass_time(1, beating={0, 2, 3})
    finding = judge_hang(gang.pass_time(12)).finding
    assert finding is not None
    assert [(s.kind, s.name) for s in finding.suspects] == [("rank", "1"), ("node", "n1")]
    assert "stopped stepping first" in finding.summary


def test_while_any_rank_steps_nothing_hangs(gang) -> None:
    gang.pass_time(5, beating=ALL)
    judgement = judge_hang(gang.pass_time(40, beating={3}, flushing={3}))
    assert judgement.finding is None
    assert "ranks 0,1,2 silent" in judgement.line


def test_a_rank_that_cannot_be_seen_is_blindness_not_a_hang(gang) -> None:
    gang.pass_time(5, beating=ALL)
    gang.hidden, gang.problems = frozenset({2}), ("n2.hb slot 0: torn",)
    judgement = judge_hang(gang.pass_time(100, flushing=set()))
    assert judgement.finding is None
    assert judgement.blind
    assert judgement.line == "could not see rank 2: n2.hb slot 0: torn"


def test_no_heartbeat_at_all_is_blindness_after_the_startup_budget(gang) -> None:
    gang.hidden = frozenset(ALL)
    assert not judge_hang(gang.pass_time(30)).blind
    judgement = judge_hang(gang.pass_time(40))
    assert judgement.finding is None
    assert judgement.blind


def test_a_rank_that_never_wrote_is_missed_after_the_startup_budget(gang) -> None:
    gang.hidden = frozenset({3})
    gang.change(*ALL, step=-1, phase="startup")
    assert judge_hang(gang.pass_time(50)).finding is None
    finding = judge_hang(gang.pass_time(15)).finding
    assert finding is not None
    assert finding.cause == "rank_never_started"
    assert finding.suspects[0].name == "3"


def test_finished_ranks_owe_no_beats(gang) -> None:
    gang.pass_time(5, beating=ALL)
    gang.change(*ALL, phase="done")
    judgement = judge_hang(gang.pass_time(500, flushing=set()))
    assert judgement.finding is None
    assert judgement.line == "every rank has finished"


def test_a_job_that_is_not_running_does_not_hang(gang) -> None:
    gang.pass_time(5, beating=ALL)
    snapshot = gang.pass_time(100, flushing={0})
    ending = dataclasses.replace(snapshot, job=JobRecord("7", JobState.COMPLETING, "COMPLETING"))
    assert judge_hang(ending).finding is None


def test_a_blind_snapshot_is_never_a_hang(gang) -> None:
    gang.pass_time(5, beating=ALL)
    snapshot = dataclasses.replace(gang.pass_time(100, flushing={0}), blind="controller away")
    assert judge_hang(snapshot).finding is None
    assert judge_hang(snapshot).blind


def test_a_watcher_on_another_host_starts_its_clocks_afresh(gang) -> None:
    gang.pass_time(5, beating=ALL)
    gang.pass_time(9, flushing={0})
    gang.clock.host = "login2/other-boot"
    assert judge_hang(gang.pass_time(8, flushing={0})).finding is None
    assert judge_hang(gang.pass_time(5, flushing={0})).finding is not None


def test_the_border_of_an_attempt_resets_every_clock(gang) -> None:
    old = gang.pass_time(50, flushing={0})
    fresh = advance_watch(
        old.watch,
        old.heartbeats,
        attempt="7.r1",
        log_size_bytes=0,
        epoch_id=gang.clock.host,
        mono=old.mono + 1,
        wall=0.0,
    )
    assert {rank.beat_moved_mono for rank in fresh.ranks} == {old.mono + 1}
    assert fresh.since_mono == old.mono + 1


def test_a_phase_change_counts_as_progress(gang) -> None:
    gang.pass_time(5, beating=ALL)
    gang.pass_time(9)
    gang.change(*ALL, phase="evaluation")
    assert judge_hang(gang.pass_time(45)).finding is None


def test_where_only_rank_0_beats_the_others_are_not_missed(gang) -> None:
    gang.hidden = frozenset({1, 2, 3})
    gang.pass_time(100, beating={0}, logging=True)
    assert judge_hang(gang.pass_time(15, logging=True)).finding is None  # past its budget, and nothing agrees
    finding = judge_hang(gang.pass_time(10, logging=True)).finding
    assert finding is not None
    assert "2 times the budget" in finding.agreed_by


def test_a_missing_rank_is_not_held_against_a_run_whose_heartbeats_cannot_be_read(gang) -> None:
    gang.hidden, gang.problems = frozenset({3}), ("n2.hb: Input/output error",)
    gang.change(*ALL, step=-1, phase="startup")
    judgement = judge_hang(gang.pass_time(100))
    assert judgement.finding is None
    assert judgement.blind
