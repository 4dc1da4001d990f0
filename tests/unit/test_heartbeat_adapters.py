"""The adapters on the real libraries, on CPU: what arrives in the slot while they train, evaluate and save.

They are loaded as a container has them: a copy beside a copy of heartbeat.py, krea_runner not to be had.
"""

import json
import shutil
import subprocess
import sys

import pytest

from tests.training_rank import SOURCE

ADAPTERS = SOURCE.parent / "adapters"

# Each event that the library tells its callbacks is put down with what a flush at that moment writes.
BEGIN = """
import json, os, sys, tempfile, warnings
import torch
sys.modules["krea_runner"] = None
torch.set_num_threads(1)
torch.manual_seed(0)
place = tempfile.mkdtemp(dir=".")
seen = []
def show(what, hb):
    hb._write()
    line = open(os.environ["KREA_HEARTBEAT_DIR"] + "/n1.hb").read().replace(chr(0), "").split()
    fields = dict(part.split("=", 1) for part in line if "=" in part)
    seen.append((what, fields["phase"], int(fields["step"]), int(fields["beat"])))
"""

LIGHTNING = """
try:
    import lightning.pytorch as pl
except ImportError:
    import pytorch_lightning as pl
from lightning import HeartbeatCallback
class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def loss(self, what, batch):
        show(what, mine.hb)
        if failing and self.global_step == 2:
            raise RuntimeError("NCCL")
        return self.layer(batch).square().mean()
    def training_step(self, batch, _): return self.loss("train", batch)
    def validation_step(self, batch, _): return self.loss("validate", batch)
    def test_step(self, batch, _): return self.loss("test", batch)
    def predict_step(self, batch, _): return self.loss("predict", batch)
    def on_save_checkpoint(self, _): show("save", mine.hb)
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), lr=0.01)
def loader(): return torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=2)
failing = False
mine = HeartbeatCallback()
def trainer():
    return pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, val_check_interval=2, logger=False, default_root_dir=place,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=1,
        callbacks=[mine, pl.callbacks.ModelCheckpoint(place, every_n_train_steps=2)],
    )
model, first = Model(), trainer()
first.fit(model, loader(), loader())
show("over", mine.hb)
fitted = list(seen)
seen.clear(); first.test(model, loader(), verbose=False); first.predict(model, loader())
print(json.dumps([fitted, seen]), flush=True)
failing = True
trainer().fit(model, loader(), loader())
"""

TRANSFORMERS = """
import transformers
from transformers_adapter import HeartbeatCallback
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def forward(self, x, labels=None):
        show("train" if self.training else "evaluate", mine.hb)
        if failing and trainer.state.global_step == 2:
            raise RuntimeError("NCCL")
        return {"loss": (self.layer(x) - labels).square().mean(), "logits": self.layer(x)}
    def state_dict(self, *args, **kwargs):
        if "trainer" in globals(): show("save", mine.hb)
        return super().state_dict(*args, **kwargs)
class Data(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, n): return {"x": torch.full((4,), float(n)), "labels": torch.ones(1)}
def make(save):
    arguments = transformers.TrainingArguments(
        place, per_device_train_batch_size=1, per_device_eval_batch_size=4, gradient_accumulation_steps=2, max_steps=4,
        eval_strategy="steps", eval_steps=2, save_strategy=save, save_steps=2, metric_for_best_model="loss",
        use_cpu=True, report_to=[], disable_tqdm=True,
    )
    return transformers.Trainer(Model(), arguments, train_dataset=Data(), eval_dataset=Data(), callbacks=[mine])
failing = False
mine = HeartbeatCallback()
trainer = make("steps")
trainer.train()
show("over", mine.hb)
fitted = list(seen)
seen.clear(); trainer.evaluate(); trainer = make("best"); trainer.train()
print(json.dumps([fitted, seen]), flush=True)
failing = True
trainer.train()
"""


def train(rank, adapter: str, script: str, **env: str) -> "subprocess.CompletedProcess[str]":
    shutil.copy(ADAPTERS / f"{adapter}.py", rank.place / f"{adapter}_adapter.py")
    path = rank.place / "train.py"
    path.write_text(BEGIN + script.replace("from lightning import", "from lightning_adapter import"))
    environment = rank.env(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", HOME=str(rank.place), **env)
    return subprocess.run(
        [sys.executable, path],
        cwd=rank.place,
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def phases(seen: list[tuple[str, str, int, int]]) -> set[tuple[str, str]]:
    return {(what, phase) for what, phase, _, _ in seen}


def need(*modules: str) -> None:
    for module in modules:
        pytest.importorskip(
            module, reason=f"{module} is not installed: its adapter is NOT tested: pip install 'krea-runner[adapters]'"
        )


def test_a_lightning_trainer_beats_in_the_phase_it_is_in(rank) -> None:
    need("pytorch_lightning")
    done = train(rank, "lightning", LIGHTNING, RANK="", LOCAL_RANK="")
    assert "RuntimeError: NCCL" in done.stderr
    fitted, later = json.loads(done.stdout.splitlines()[-1])
    assert phases(fitted) == {
        ("validate", "evaluation"), ("train", "startup"), ("train", "step"), ("save", "checkpoint"), ("over", "done"),
    }  # fmt: skip
    assert [step for what, _, step, _ in fitted if what == "train"] == [-1, 1, 2, 3]
    beats = [beat for *_, beat in fitted]
    assert beats == sorted(set(beats)), "every batch is progress"
    assert phases(later) == {("test", "evaluation"), ("predict", "evaluation")}
    assert "krea_runner heartbeat" not in done.stderr  # no variable said the rank: Lightning did
    beat = rank.beat()
    assert (beat.phase, beat.step, beat.rank, beat.local_rank) == ("evaluation", 2, 0, 0), "it failed there"


def test_a_hugging_face_trainer_beats_in_the_phase_it_is_in(rank) -> None:
    need("transformers", "accelerate")
    done = train(rank, "transformers", TRANSFORMERS, RANK="", LOCAL_RANK="", SLURM_PROCID="5", SLURM_LOCALID="1")
    assert "RuntimeError: NCCL" in done.stderr
    fitted, later = json.loads(done.stdout.splitlines()[-1])
    assert phases(fitted) == {
        ("train", "startup"), ("train", "step"), ("evaluate", "evaluation"), ("save", "checkpoint"), ("over", "done"),
    }  # fmt: skip
    assert [step for what, _, step, _ in fitted if what == "train"] == [-1, -1, 1, 1, 2, 2, 3, 3]
    beats = [beat for *_, beat in fitted]
    assert beats == sorted(beats)
    # Whether the best is saved is decided after the evaluation, and told to no callback.
    assert {phase for what, phase, *_ in later if what == "save"} == {"checkpoint"}
    assert "krea_runner heartbeat" not in done.stderr
    beat = rank.beat()
    assert (beat.phase, beat.step, beat.rank, beat.local_rank) == ("evaluation", 2, 5, 1), "it failed there"
