"""Checkpoints of every framework, as the real libraries write them: recognised, found whole, and found out when they are not."""

import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from krea_runner.errors import NotFound
from krea_runner.model import CheckpointSpec
from krea_runner.observe.checkpoints.checksums import compare
from krea_runner.observe.checkpoints.examine import Examined, State, examine, examine_directory, step_of
from krea_runner.observe.checkpoints.pickles import Made, read_pickle
from krea_runner.observe.checkpoints.tree import CheckpointError, walk

RECORDED = Path(__file__).parents[1] / "recordings" / "checkpoints"
# What torch itself writes: made once, by the real library, in a process of their own.
MAKE = """
import sys, torch, torch.distributed.checkpoint as dcp
from pathlib import Path
root = Path(sys.argv[1])
state = {"model": {"w": torch.arange(4096.0).reshape(64, 64), "b": torch.zeros(300)}, "step": 40}
for step in (30, 40):
    dcp.save(state, storage_writer=dcp.FileSystemWriter(root / "dcp" / f"step_{step}", thread_count=3))
(root / "torch").mkdir()
torch.save({"step": 7, "model": {"w": torch.ones(5000)}}, root / "torch" / "model_7.pt")
torch.save({"step": 8, "w": torch.ones(10)}, root / "torch" / "old_8.pt", _use_new_zipfile_serialization=False)
torch.save({"step": 9, "w": torch.ones(10)}, root / "torch" / "last.pt")
"""


@pytest.fixture(scope="session")
def made(tmp_path_factory) -> Path:
    pytest.importorskip("torch")
    root = tmp_path_factory.mktemp("made")
    subprocess.run([sys.executable, "-W", "ignore", "-c", MAKE, str(root)], check=True, capture_output=True)
    (root / "safetensors").mkdir()
    shutil.copy(RECORDED / "transformers/checkpoint-2/model.safetensors", root / "safetensors/model-5.safetensors")
    return root


@pytest.fixture
def own(tmp_path, request):
    """A copy of one recorded or just made directory, to be damaged."""

    def copy(name: str) -> Path:
        source = RECORDED / name
        if not source.exists():
            source = request.getfixturevalue("made") / name
        return Path(shutil.copytree(source, tmp_path / "own" / name, symlinks=True))

    return copy


def look(directory: Path, *, later_s: float = 3600.0, headers: bool = True) -> dict[str, Examined]:
    """By name; as seen `later_s` after now, so that nothing is young unless it is wanted."""
    listed = examine_directory(directory, now=time.time() + later_s, headers=headers)
    assert not listed.could_not_see
    return {one.name: one for one in listed.found}


def one(directory: Path, name: str, *, later_s: float = 3600.0) -> Examined:
    return look(directory, later_s=later_s)[name]


# --------------------------------------------------------------------------------------------------- what there is


@pytest.mark.parametrize(
    ("directory", "format", "steps"),
    [
        ("transformers", "hf-trainer", {"checkpoint-2": 2, "checkpoint-4": 4}),
        ("transformers", "safetensors", {"sharded": None}),
        ("lightning", "lightning", {"epoch=0-step=2.ckpt": 2, "epoch=0-step=4.ckpt": 4}),
        ("orbax", "orbax", {"10": 10, "20": 20}),
        ("deepspeed", "deepspeed", {"global_step1": 1, "global_step2": 2}),
        ("megatron/torch_dist", "megatron", {"iter_0000100": 100, "iter_0000200": 200}),
        ("megatron/legacy", "megatron-legacy", {"iter_0000100": 100}),
        ("dcp", "dcp", {"step_30": 30, "step_40": 40}),
        ("torch", "torch", {"model_7.pt": 7, "old_8.pt": 8, "last.pt": 9}),
        ("safetensors", "safetensors", {"model-5.safetensors": 5}),
    ],
)
def test_what_the_real_library_wrote_is_recognised_and_whole(own, directory, format, steps) -> None:
    found = {name: one for name, one in look(own(directory)).items() if one.format == format}
    assert {name: one.step for name, one in found.items()} == steps
    for one in found.values():
        assert (one.state, one.whys) == (State.WHOLE, ())
        assert one.size_bytes > 0
        assert one.written_from is not None
        assert one.written_to is not None
        assert one.written_from <= one.written_to


def test_a_link_to_a_checkpoint_is_not_another_checkpoint(own) -> None:
    directory = own("lightning")
    assert (directory / "last.ckpt").is_symlink()  # Lightning's save_last="link"
    assert "last.ckpt" not in look(directory)


def test_a_directory_that_is_a_checkpoint_is_found_itself(own) -> None:
    (found,) = examine_directory(own("dcp") / "step_40", now=time.time(), headers=True).found
    assert (found.name, found.format, found.step, found.state) == ("step_40", "dcp", 40, State.WHOLE)


def test_a_single_file_can_be_named(own) -> None:
    (found,) = examine_directory(own("torch") / "model_7.pt", now=time.time(), headers=True).found
    assert (found.step, found.state) == (7, State.WHOLE)


def test_a_name_that_is_not_there_is_not_found(tmp_path) -> None:
    with pytest.raises(NotFound):
        examine_directory(tmp_path / "none", now=0.0)


def test_a_users_own_rule_decides_for_names_that_match_it(tmp_path) -> None:
    spec = CheckpointSpec(directory=tmp_path, pattern="ck{step}", complete="DONE")
    for name, files in (("ck5", ["a.dat", "DONE"]), ("ck6", ["a.dat"]), ("notes", ["x"])):
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).write_text("x")
    listed = examine_directory(tmp_path, now=time.time() + 3600, spec=spec)
    assert [(one.step, one.format, one.state, one.whys) for one in listed.found] == [
        (6, "pattern", State.UNFINISHED, ("no DONE",)),
        (5, "pattern", State.WHOLE, ()),
    ]


def test_only_the_newest_are_looked_into_and_the_rest_is_said(own) -> None:
    listed = examine_directory(own("transformers"), now=time.time(), most=1)
    assert ([one.name for one in listed.found], listed.left_out) == (["checkpoint-4"], 2)


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("checkpoint-500", 500), ("global_step12", 12), ("iter_0000100", 100), ("epoch=3-step=1000.ckpt", 1000),
        ("model--val_loss=1.25-step=99-consumed_samples=800.0-last", 99), ("20", 20), ("llama-7b.pt", None),
        ("model_7.pt", 7), ("last.ckpt", None), ("step_00000300", 300), ("dcp1", None), ("9" * 19, None),
    ],
)  # fmt: skip
def test_the_step_is_read_from_the_name(name, step) -> None:
    assert step_of(name) == step


# ---------------------------------------------------------------------------------------------- not whole, and why


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def hollow(path: Path) -> None:
    """The right size, and nothing in it: a preallocated or sparse file."""
    size = path.stat().st_size
    os.truncate(path, 0)
    os.truncate(path, size)


DAMAGES = [
    ("transformers", "checkpoint-4/trainer_state.json", Path.unlink, State.UNFINISHED, "no trainer_state.json"),
    ("transformers", "checkpoint-4/optimizer.pt", cut, State.BROKEN, "cut short"),
    ("transformers", "checkpoint-4/model.safetensors", cut, State.BROKEN, "4063 bytes where its header says 4064"),
    ("transformers", "sharded/model-00002-of-00004.safetensors", Path.unlink, State.BROKEN, "is missing"),
    ("transformers", "sharded/model-00002-of-00004.safetensors", cut, State.BROKEN, "its header says"),
    ("transformers", "sharded/model.safetensors.index.json", Path.unlink, State.UNFINISHED, "written last"),
    ("lightning", "epoch=0-step=4.ckpt", cut, State.UNFINISHED, "cut short"),
    ("lightning", "epoch=0-step=4.ckpt", hollow, State.UNFINISHED, "only zero bytes"),
    ("orbax", "20/_CHECKPOINT_METADATA", lambda p: p.write_text("{}"), State.UNFINISHED, "no time of commit"),
    ("orbax", "20/default/manifest.ocdbt", Path.unlink, State.UNFINISHED, "manifest.ocdbt is missing"),
    ("orbax", "20/default/ocdbt.process_0/manifest.ocdbt", Path.unlink, State.BROKEN, "manifest.ocdbt is missing"),
    ("deepspeed", "global_step2/mp_rank_00_model_states.pt", Path.unlink, State.UNFINISHED, "no model_states"),
    ("deepspeed", "global_step2/mp_rank_00_model_states.pt", cut, State.UNFINISHED, "cut short"),
    ("megatron/torch_dist", "iter_0000200/metadata.json", Path.unlink, State.UNFINISHED, "no metadata.json"),
    ("megatron/torch_dist", "iter_0000200/__0_0.distcp", cut, State.BROKEN, "1640 bytes where .metadata wants 1641"),
    ("megatron/legacy", "iter_0000100/mp_rank_00/model_optim_rng.pt", Path.unlink, State.UNFINISHED, "is missing"),
    ("dcp", "step_40/__0_1.distcp", Path.unlink, State.BROKEN, "__0_1.distcp is missing, .metadata names it"),
    ("dcp", "step_40/__0_0.distcp", cut, State.BROKEN, "where .metadata wants"),
    ("dcp", "step_40/__0_0.distcp", hollow, State.BROKEN, "zero bytes where its data should be"),
    ("dcp", "step_40/.metadata", Path.unlink, State.UNFINISHED, "no .metadata: it is written last"),
    ("dcp", "step_40/.metadata", cut, State.BROKEN, "cut short"),
    ("torch", "model_7.pt", cut, State.UNFINISHED, "cut short"),
    ("torch", "model_7.pt", lambda p: p.write_bytes(b""), State.UNFINISHED, "is empty"),
    ("safetensors", "model-5.safetensors", cut, State.UNFINISHED, "header says"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("directory", "file", "damage", "state", "why"), DAMAGES, ids=[f"{one[1]}-{one[4][:12]}" for one in DAMAGES]
)
def test_damage_is_found_out_and_said_why(own, directory, file, damage, state, why) -> None:
    root = own(directory)
    damage(root / file)
    found = one(root, file.partition("/")[0])
    assert found.state is state
    assert any(why in text for text in found.whys), found.whys


@pytest.mark.parametrize(
    ("directory", "file", "damage", "state", "why"),
    [one for one in DAMAGES if one[3] is State.UNFINISHED],
    ids=[f"{one[1]}-{one[4][:12]}" for one in DAMAGES if one[3] is State.UNFINISHED],
)
def test_what_is_still_being_written_is_in_progress_not_corrupt(own, directory, file, damage, state, why) -> None:
    root = own(directory)
    damage(root / file)
    for path in root.rglob("*"):
        os.utime(path, follow_symlinks=False)
    assert one(root, file.partition("/")[0], later_s=1.0).state is State.IN_PROGRESS


def test_a_finished_checkpoint_with_a_damaged_file_is_broken_however_young(own) -> None:
    root = own("dcp")
    (root / "step_40" / "__0_0.distcp").unlink()
    for path in root.rglob("*"):
        os.utime(path)
    assert one(root, "step_40", later_s=1.0).state is State.BROKEN


def test_a_grid_of_ranks_names_the_one_that_is_missing(own) -> None:
    root = own("megatron/legacy")
    (root / "iter_0000100" / "mp_rank_01").rename(root / "iter_0000100" / "mp_rank_03")
    assert any("mp_rank 1, 0, 0 is missing: 2 of at least 4" in why for why in one(root, "iter_0000100").whys)


def test_deepspeeds_own_count_of_ranks_finds_the_last_one_missing(own) -> None:
    root = own("deepspeed")
    name = "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    shutil.copy(root / "global_step2" / name, root / "global_step2" / name.replace("pp_rank_0", "pp_rank_1"))
    found = one(root, "global_step2")
    assert any("written by 1 data-parallel ranks, of 2 there are" in why for why in found.whys)


@pytest.mark.parametrize(
    ("directory", "pointer", "says"),
    [("deepspeed", "latest", "global_step1"), ("megatron/legacy", "latest_checkpointed_iteration.txt", "50")],
)
def test_what_is_newer_than_the_pointer_is_not_finished(own, directory, pointer, says) -> None:
    """DeepSpeed and Megatron's legacy form have no other sign."""
    root = own(directory)
    (root / pointer).write_text(says)
    newest = max(look(root).values(), key=lambda one: one.step or 0)
    assert newest.state is State.UNFINISHED
    assert pointer in newest.whys[0]


@pytest.mark.parametrize(
    "name", ["30.orbax-checkpoint-tmp-1720000000", "tmp-checkpoint-6", "step_50.tmp", "step_50.partial"]
)
def test_a_save_that_was_never_renamed_into_place_is_not_whole(own, name) -> None:
    root = own("dcp")
    (root / "step_40").rename(root / name)
    assert one(root, name).state is State.UNFINISHED


def test_nemos_marker_says_that_it_is_not_finished(own) -> None:
    root = own("megatron/torch_dist")
    name = "model--val_loss=1.20-step=200-consumed_samples=3200.0"
    (root / name).mkdir()
    (root / "iter_0000200").rename(root / name / "weights")
    assert (one(root, name).format, one(root, name).step, one(root, name).state) == ("nemo", 200, State.WHOLE)
    (root / f"{name}-unfinished").touch()
    assert one(root, name).state is State.UNFINISHED


# ------------------------------------------------------------------------------------------------------- bad input


def test_an_index_that_names_a_file_outside_is_said_and_nothing_outside_is_opened(own, monkeypatch) -> None:
    root = own("transformers")
    index = root / "sharded" / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    names = iter(["../../../../../etc/passwd", "/etc/shadow", "a/../../b", "nul\0"])
    document["weight_map"] = {key: next(names, value) for key, value in document["weight_map"].items()}
    index.write_text(json.dumps(document))
    opened = []
    real = os.open
    monkeypatch.setattr(
        os, "open", lambda path, *args, **named: (opened.append(os.fspath(path)), real(path, *args, **named))[1]
    )
    found = one(root, "sharded")
    assert found.state is State.BROKEN
    assert "names a file outside of the checkpoint: '../../../../../etc/passwd'" in " ".join(found.whys)
    assert all(not str(path).startswith(("/etc", "..")) for path in opened)


def test_symbolic_links_are_not_followed(own) -> None:
    root = own("dcp") / "step_40"
    (root / "loop").symlink_to(root)
    (root / "passwd").symlink_to("/etc/passwd")
    (root / "__0_1.distcp").unlink()
    (root / "__0_1.distcp").symlink_to("/dev/zero")
    os.mkfifo(root / "fifo.pt")
    found = one(root.parent, "step_40")
    assert found.state is State.UNSEEN
    assert any("__0_1.distcp is a symbolic link: not followed" in why for why in found.whys)
    assert "4 symbolic link(s), not followed" in found.notes


def test_names_of_any_bytes_are_carried_and_harmless(tmp_path) -> None:
    from krea_runner.report.checkpoints import checkpoint_sheet
    from krea_runner.report.tables import plain_lines

    for name in (b"step_5\nwhole", b"\x1b[31mstep_6", b"step_7\xff"):
        path = os.path.join(os.fsencode(tmp_path), name)
        os.mkdir(path)
        with open(os.path.join(path, b"__0_0.distcp"), "wb") as file:
            file.write(b"x")
    listed = examine_directory(tmp_path, now=time.time() + 3600)
    assert len(listed.found) == 3
    lines = plain_lines(checkpoint_sheet(listed, now=time.time()))
    assert len(lines) == 5
    assert all(line.isprintable() for line in lines)


def test_files_that_vanish_during_the_walk_make_it_in_progress(own, monkeypatch) -> None:
    root = own("dcp")
    real = os.stat

    def gone(path, **named):
        if path == "__0_1.distcp":
            raise FileNotFoundError(2, "No such file or directory")
        return real(path, **named)

    monkeypatch.setattr(os, "stat", gone)
    found = one(root, "step_40")
    assert found.state is State.IN_PROGRESS
    assert "1 file(s) vanished" in found.whys[-1]


def test_a_directory_that_is_deleted_and_written_all_the_time_never_breaks_the_look(tmp_path) -> None:
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            for step in range(3):
                path = tmp_path / "c" / f"step_{step}"
                path.mkdir(parents=True, exist_ok=True)
                (path / "__0_0.distcp").write_bytes(b"x" * 100)
                shutil.rmtree(path, ignore_errors=True)

    (tmp_path / "c").mkdir()
    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(100):
            for found in examine_directory(tmp_path / "c", now=time.time(), headers=True).found:
                assert found.state in {State.IN_PROGRESS, State.UNFINISHED}
    finally:
        stop.set()
        thread.join()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_may_not_be_read_is_not_seen_and_not_broken(own) -> None:
    root = own("dcp")
    (root / "step_40").chmod(0)
    try:
        assert one(root, "step_40").state is State.UNSEEN
    finally:
        (root / "step_40").chmod(0o755)


def test_a_folder_that_cannot_be_listed_is_not_seen_and_not_broken(own, monkeypatch) -> None:
    """The same for root, who may read everything: the file system says no."""
    root = own("dcp")
    real = os.scandir

    def refuse(path):
        if isinstance(path, int) and os.readlink(f"/proc/self/fd/{path}").endswith("step_40"):
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(os, "scandir", refuse)
    found = examine(root / "step_40", now=time.time() + 3600)
    assert (found.state, found.whys) == (State.UNSEEN, (".: Permission denied",))


def test_deep_folders_end_the_walk_and_are_said(tmp_path) -> None:
    path = tmp_path / "step_1"
    (path / "/".join("d" * 40)).mkdir(parents=True)
    (path / ".metadata").write_bytes(b"")
    found = one(tmp_path, "step_1")
    assert found.state is State.UNSEEN


@pytest.mark.parametrize("count", [5_000])
def test_many_entries_cost_a_bounded_number_of_calls(tmp_path, count) -> None:
    """100,000 are in tests/bench; a thread a core would not make this faster here, a hundred calls a file would show."""
    path = tmp_path / "step_5"
    path.mkdir()
    for number in range(count):
        os.close(os.open(path / f"__{number}_0.distcp", os.O_CREAT | os.O_WRONLY))
    tree = walk(path)
    assert (len(tree.files), tree.truncated) == (count, False)
    assert one(tmp_path, "step_5").files == count


def test_more_entries_than_are_looked_at_are_said(tmp_path, monkeypatch) -> None:
    import krea_runner.observe.checkpoints.tree as module

    monkeypatch.setattr(module, "MOST_FILES", 10)
    path = tmp_path / "step_5"
    path.mkdir()
    for number in range(30):
        (path / f"__{number}_0.distcp").touch()
    assert one(tmp_path, "step_5").state is State.UNSEEN


class Evil:
    def __reduce__(self):
        return os.system, ("touch /tmp/krea-evil-checkpoint",)


def test_a_pickle_that_would_run_a_program_is_read_and_runs_nothing(own) -> None:
    marker = Path("/tmp/krea-evil-checkpoint")
    marker.unlink(missing_ok=True)
    root = own("dcp")
    (root / "step_40" / ".metadata").write_bytes(pickle.dumps(Evil()))
    found = one(root, "step_40")
    assert found.state is State.BROKEN
    assert "no index of torch.distributed.checkpoint" in found.whys[0]
    assert not marker.exists()


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_of_any_protocol_is_described_not_loaded(protocol) -> None:
    value = {"a": [1, 2.5, "x", None, True], "b": ("t", b"y"), "evil": Evil(), "big": 10**30, "path": Path("/x")}
    read = read_pickle(pickle.dumps(value, protocol=protocol))
    assert isinstance(read, dict)
    assert read["a"] == [1, 2.5, "x", None, True]
    assert read["big"] == 10**30
    assert isinstance(read["evil"], Made)
    assert read["evil"].what in {"posix.system", "nt.system", "os.system"}


@given(st.binary(max_size=300))
def test_no_bytes_make_the_pickle_reader_raise_anything_else(data) -> None:
    with suppress(CheckpointError):
        read_pickle(data)


def test_a_deeply_nested_key_does_not_overflow_the_stack() -> None:
    nested = b"(" * 1 + b")" + b"\x85" * 300_000
    read_pickle(b"\x80\x02}" + nested[1:] + b"K\x01s.")


@given(data=st.binary(max_size=400), at=st.integers(0, 2000))
def test_no_content_of_a_file_makes_the_look_raise(shared, data, at) -> None:
    for path in sorted(shared.rglob("*")):
        if path.is_file() and path.stat().st_size:
            original = path.read_bytes()
            path.write_bytes(original[:at] + data + original[at + len(data) :])
            try:
                look(shared)
            finally:
                path.write_bytes(original)
            break


@pytest.fixture(scope="module", params=["deepspeed", "megatron/torch_dist", "orbax"])
def shared(request, tmp_path_factory) -> Path:
    return Path(shutil.copytree(RECORDED / request.param, tmp_path_factory.mktemp("shared") / "c"))


# ------------------------------------------------------------------------------------------------------- checksums


@pytest.fixture
def state(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("KREA_RUNNER_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


def test_a_bit_that_flips_behind_the_file_systems_back_is_found(own, state) -> None:
    path = own("dcp") / "step_40"
    assert compare(walk(path), now=1.0).recorded
    assert compare(walk(path), now=2.0).changed == ()
    shard = path / "__0_1.distcp"
    told = shard.stat()
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    os.utime(shard, ns=(told.st_atime_ns, told.st_mtime_ns))
    assert compare(walk(path), now=3.0).changed == ("__0_1.distcp",)
    assert compare(walk(path), now=3.0).changed == ("__0_1.distcp",)  # and is not forgotten by having been told


def test_a_file_that_was_written_again_is_news_and_no_damage(own, state) -> None:
    path = own("dcp") / "step_40"
    compare(walk(path), now=1.0)
    (path / "__0_1.distcp").write_bytes(b"another run's")
    told = compare(walk(path), now=2.0)
    assert (told.changed, told.rewritten) == ((), ("__0_1.distcp",))
    assert compare(walk(path), now=3.0).rewritten == ()


def test_a_file_that_is_gone_is_damage(own, state) -> None:
    path = own("dcp") / "step_40"
    compare(walk(path), now=1.0)
    (path / "__0_1.distcp").unlink()
    assert compare(walk(path), now=2.0).gone == ("__0_1.distcp",)
