"""Heartbeats of a PyTorch Lightning trainer: `Trainer(callbacks=[HeartbeatCallback()])`. NeMo's trainer is one of these.

Steps are the trainer's global_step. Validation, test and prediction are the phase `evaluation`, save_checkpoint is `checkpoint`.
Budgets are those of run.toml. Needs nothing but Lightning (2.x, either package) and heartbeat.py.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback
try:
    from krea_runner.heartbeat import Heartbeat
except ImportError:
    from heartbeat import Heartbeat  # type: ignore[no-redef]


class HeartbeatCallback(Callback):
    def __init__(self) -> None:
        self.evaluation = ExitStack()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        # In the process that trains: Lightning may have started it, and then no variable says its rank.
        self.hb = Heartbeat(trainer.global_rank, trainer.local_rank)
        self._undo(trainer)  # a training before this one may have failed
        save = trainer.save_checkpoint

        def save_checkpoint(*args: Any, **kwargs: Any) -> None:
            with self.hb.phase("checkpoint"):
                save(*args, **kwargs)

        trainer.save_checkpoint = save_checkpoint  # Lightning has a hook before a save, and none after it

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        # Not called when training failed: then the last phase stands.
        self._undo(trainer)
        self.hb.close()

    def _undo(self, trainer: Any) -> None:
        self.evaluation.close()
        vars(trainer).pop("save_checkpoint", None)

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.hb.step(trainer.global_step)

    def _begin(self, *args: Any) -> None:
        self.evaluation.enter_context(self.hb.phase("evaluation"))

    def _beat(self, *args: Any) -> None:
        self.hb.beat()

    def _end(self, *args: Any) -> None:
        self.evaluation.close()

    on_validation_start = on_test_start = on_predict_start = _begin
    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = _beat
    on_validation_end = on_test_end = on_predict_end = _end
