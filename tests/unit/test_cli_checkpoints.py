"""`krea-runner checkpoints`, as it is typed."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from krea_runner.history.store import open_history
from krea_runner.model import AttemptKey, CheckpointSpec
from krea_runner.rundir import RunDir
from tests.unit.conftest import make_config

RECORDED = Path(__file__).parents[1] / "recordings" / "checkpoints"


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("KREA_RUNNER_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


def typed(*words: str | Path):
    from krea_runner.cli.app import _app

    return CliRunner().invoke(_app(), ["checkpoints", *map(str, words)], catch_exceptions=True)


def document(*words: str | Path):
    return json.loads(typed(*words, "--json").stdout)


@pytest.fixture
def saved(tmp_path) -> Path:
    """Of HF Trainer, old: steps 2, 4, 6, 8."""
    directory = tmp_path / "saved"
    for step in (2, 4, 6, 8):
        shutil.copytree(RECORDED / "transformers" / "checkpoint-2", directory / f"checkpoint-{step}")
    for path in directory.rglob("*"):
        os.utime(path, (1_700_000_000, 1_700_000_000))
    return directory


@pytest.fixture
def run(saved, state):
    """A live run whose checkpoints they are."""
    spec = CheckpointSpec(directory=saved, pattern="checkpoint-{step}", complete="trainer_state.json")
    config = dataclasses.replace(make_config(saved.parent), checkpoint=spec)
    from krea_runner.cli.context import current_user

    history = open_history(state)
    found = history.create_run(config, user=current_user(), tag="t", now=1_700_000_100.0)
    attempt = history.add_attempt(found.run_id, AttemptKey("7"), now=1_700_000_100.0)
    return found, attempt


def test_ls_shows_what_there_is_newest_first(saved) -> None:
    done = typed("ls", saved)
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert [line.split()[:4] for line in lines[1:5]] == [
        [str(step), f"checkpoint-{step}", "hf-trainer", "whole"] for step in (8, 6, 4, 2)
    ]
    assert lines[-1].endswith("4 whole")


def test_ls_of_a_run_is_of_its_checkpoint_directory(run, saved) -> None:
    found = document("ls", "llm")
    assert found["directory"] == str(saved)
    assert [one["step"] for one in found["checkpoints"]] == [8, 6, 4, 2]
    assert found["schema_version"] == 1


def test_ls_of_a_directory_that_cannot_be_read_is_75(saved, monkeypatch) -> None:
    real = os.scandir

    def refuse(path):
        if path == saved:
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(os, "scandir", refuse)
    done = typed("ls", saved)
    assert done.exit_code == 75
    assert "could not see: Permission denied" in done.stdout


@pytest.mark.parametrize("depth", ["structure", "headers", "full"])
def test_verify_finds_all_whole(saved, depth) -> None:
    assert typed("verify", saved, "--depth", depth).exit_code == 0


def test_verify_at_its_three_depths_finds_what_each_can(saved) -> None:
    assert typed("verify", saved, "--depth", "full").exit_code == 0  # first sight
    path = saved / "checkpoint-8" / "optimizer.pt"
    told, data = path.stat(), bytearray(path.read_bytes())
    data[data.find(b"data.pkl") + 200] ^= 1  # in the middle of a member
    path.write_bytes(data)
    os.utime(path, ns=(told.st_atime_ns, told.st_mtime_ns))
    assert [typed("verify", saved, "--depth", depth).exit_code for depth in ("structure", "headers", "full")] == [
        0,
        0,
        1,
    ]
    os.truncate(path, len(data) - 1)
    os.utime(path, ns=(told.st_atime_ns, told.st_mtime_ns))
    assert [typed("verify", saved, "--depth", depth).exit_code for depth in ("structure", "headers")] == [0, 1]


def test_verify_with_nothing_whole_is_1(saved) -> None:
    for path in saved.glob("*/trainer_state.json"):
        path.unlink()
    assert typed("verify", saved).exit_code == 1


# ------------------------------------------------------------------------------------------------------------- prune


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_prune_changes_nothing_unless_told_to(saved) -> None:
    before = names(saved)
    done = typed("prune", saved, "--keep-last", 1)
    assert done.exit_code == 0
    assert "would delete  checkpoint-2" in done.stdout
    assert names(saved) == before


def test_prune_deletes_what_no_rule_keeps(saved) -> None:
    done = typed("prune", saved, "--keep-last", 1, "--keep-every", 4, "--delete")
    assert done.exit_code == 0, done.output
    assert names(saved) == {"checkpoint-4", "checkpoint-6", "checkpoint-8"}
    assert "deleted 1 checkpoint" in done.stdout


def test_prune_without_a_rule_is_a_usage_error(saved) -> None:
    assert typed("prune", saved, "--delete").exit_code == 2
    assert typed("prune", saved, "--keep-best", 1, "--delete").exit_code == 2
    assert len(names(saved)) == 4


def test_prune_keeps_what_a_live_attempt_has_loaded(run, saved) -> None:
    found, attempt = run
    events = RunDir(found.config.run_dir).script_events(attempt.key)
    events.parent.mkdir(parents=True)
    events.write_text('{"event":"attempt_start","attempt":"7.r0","at":1,"resume_step":2}\n')
    for where in ("llm", saved):  # also where the directory is named, and not the run
        fates = {one["name"]: one for one in document("prune", where, "--keep-last", 1)["checkpoints"]}
        assert fates["checkpoint-2"] == {"name": "checkpoint-2", "goes": False, "why": "a live attempt has loaded it"}
        assert fates["checkpoint-4"]["goes"]


def test_prune_keeps_what_was_newest_when_a_live_attempt_started(run, saved) -> None:
    """An older script, or an adopted job, does not say what it loaded."""
    for path in (saved / "checkpoint-6", saved / "checkpoint-8"):
        for file in path.rglob("*"):
            os.utime(file, (1_700_005_000, 1_700_005_000))
    fates = {one["name"]: one["why"] for one in document("prune", saved, "--keep-last", 1)["checkpoints"]}
    assert fates["checkpoint-4"] == "a live attempt has loaded it"


def test_prune_never_deletes_what_is_still_being_written(saved) -> None:
    (saved / "checkpoint-2" / "trainer_state.json").unlink()
    for file in (saved / "checkpoint-2").rglob("*"):
        os.utime(file)
    typed("prune", saved, "--keep-last", 1, "--unfinished", "--delete")
    assert names(saved) == {"checkpoint-2", "checkpoint-6", "checkpoint-8"}


def test_prune_never_counts_a_damaged_one_as_the_newest_whole(saved) -> None:
    os.truncate(saved / "checkpoint-8" / "optimizer.pt", 100)
    typed("prune", saved, "--keep-last", 1, "--delete")
    assert names(saved) == {"checkpoint-4", "checkpoint-6", "checkpoint-8"}


def test_a_prune_that_was_killed_is_finished_by_the_next(saved) -> None:
    (saved / "checkpoint-2").rename(saved / ".krea-deleted.checkpoint-2")
    assert [one["step"] for one in document("ls", saved)["checkpoints"]] == [8, 6, 4]
    typed("prune", saved, "--keep-last", 3, "--delete")
    assert names(saved) == {"checkpoint-4", "checkpoint-6", "checkpoint-8"}


def test_a_link_in_a_checkpoint_is_deleted_and_not_what_it_names(saved, tmp_path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "x").touch()
    (saved / "checkpoint-2" / "link").symlink_to(tmp_path / "precious")
    typed("prune", saved, "--keep-last", 1, "--delete")
    assert "checkpoint-2" not in names(saved)
    assert (tmp_path / "precious" / "x").exists()


def test_the_best_are_kept_by_the_metric_in_hf_trainers_log(saved) -> None:
    for step, loss in ((2, 0.1), (4, 0.9), (6, 0.9), (8, 0.9)):
        path = saved / f"checkpoint-{step}" / "trainer_state.json"
        path.write_text(json.dumps({"global_step": step, "log_history": [{"step": step, "eval_loss": loss}]}))
        os.utime(path, (1_700_000_000, 1_700_000_000))
    fates = {
        one["name"]: one["goes"]
        for one in document("prune", saved, "--keep-best", 1, "--metric", "eval_loss")["checkpoints"]
    }
    assert fates == {"checkpoint-2": False, "checkpoint-4": True, "checkpoint-6": False, "checkpoint-8": False}


# ------------------------------------------------------------------------------------------------------------ resume


@pytest.mark.parametrize(
    ("directory", "pointer", "newest", "wanted"),
    [
        ("deepspeed", "latest", "global_step1", "global_step1"),
        ("megatron/torch_dist", "latest_checkpointed_iteration.txt", "iter_0000100", "100"),
    ],
)
def test_a_pointer_to_a_half_written_checkpoint_is_found_and_fixed(
    tmp_path, directory, pointer, newest, wanted
) -> None:
    root = Path(shutil.copytree(RECORDED / directory, tmp_path / "own"))
    old = (root / pointer).read_text()
    victim = max((path for path in root.iterdir() if path.is_dir()), key=lambda path: path.name)
    os.truncate(next(iter(victim.glob("*.[pd]*"))), 10)
    done = typed("resume", root)
    assert done.exit_code == 1
    assert f"newest whole: {root / newest}" in done.stdout
    assert (root / pointer).read_text() == old
    assert typed("resume", root, "--fix").exit_code == 0
    assert (root / pointer).read_text() == wanted
    assert (root / f"{pointer}.before-krea").read_text() == old
    assert typed("resume", root).exit_code == 0


def test_a_pointer_that_leads_outside_is_not_followed(tmp_path) -> None:
    root = Path(shutil.copytree(RECORDED / "deepspeed", tmp_path / "own"))
    (root / "latest").write_text("../../../etc")
    done = typed("resume", root)
    assert done.exit_code == 1
    assert "does not hold one name" in done.stdout


def test_fixing_a_pointer_that_is_a_link_changes_nothing_outside(tmp_path) -> None:
    root = Path(shutil.copytree(RECORDED / "deepspeed", tmp_path / "own"))
    (tmp_path / "outside").write_text("global_step7")
    (root / "latest").unlink()
    (root / "latest").symlink_to(tmp_path / "outside")
    typed("resume", root, "--fix")
    assert (tmp_path / "outside").read_text() == "global_step7"


# ------------------------------------------------------------------------------------------------------------ advise


def test_advise_says_what_was_measured_and_what_assumed(run) -> None:
    done = typed("advise", "llm", "--mtbf", "3h", "--interval", "1h", "--gpu-hour", "2.5")
    assert done.exit_code == 0, done.output
    assert "a failure every   3h00m (given)" in done.stdout
    assert "assumed: 5 to 20 minutes" in done.stdout
    assert "at 2.5 an hour" in done.stdout


def test_advise_as_a_document(run) -> None:
    found = document("advise", "llm", "--mtbf", "3h", "--interval", "1h", "--gpu-hour", "2")
    best = found["best"]
    assert 0 < best["ettr"] < 1
    assert best["gained_money"] == pytest.approx(best["gained_gpu_s"] / 3600 * 2)


def test_a_run_nobody_knows_is_not_found() -> None:
    from krea_runner.errors import NotFound

    assert isinstance(typed("ls", "nobody").exception, NotFound)
    assert isinstance(typed("advise", "nobody").exception, NotFound)
