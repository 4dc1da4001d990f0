"""Heartbeats of a Hugging Face Trainer: `Trainer(..., callbacks=[HeartbeatCallback()])`.

Steps are the trainer's global_step. Evaluation and prediction are the phase `evaluation`, a save that the trainer decides on is
the phase `checkpoint`. Budgets are those of run.toml. Needs nothing but transformers and heartbeat.py.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from transformers import TrainerCallback

try:
    from krea_runner.heartbeat import Heartbeat
except ImportError:
    from heartbeat import Heartbeat  # type: ignore[no-redef]


class HeartbeatCallback(TrainerCallback):
    def __init__(self) -> None:
        self.hb = Heartbeat()  # loading the model and the data is the startup
        self.name = ""
        self.phase = ExitStack()

    def _enter(self, name: str) -> None:
        """Into that phase, out of the one before; "" is none."""
        if name != self.name:
            self.phase.close()
            self.name = name
            if name:
                self.phase.enter_context(self.hb.phase(name))

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._enter("")  # a training before this one may have failed
        self.hb = Heartbeat()  # the same, unless that closed it

    def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
        self.hb.beat()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.hb.step(state.global_step)
        self._saves(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._saves(control)

    def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
        self._enter("evaluation")
        self.hb.beat()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._saves(control)
        if args.save_strategy == "best":  # decided after this, and told to nobody
            self._enter("checkpoint")

    def on_predict(self, *args: Any, **kwargs: Any) -> None:
        self._enter("")

    def _saves(self, control: Any) -> None:
        # The trainer tells of a save after it; that it will save it tells here. An evaluation comes first.
        self._enter("evaluation" if control.should_evaluate else "checkpoint" if control.should_save else "")

    def on_save(self, *args: Any, **kwargs: Any) -> None:
        self._enter("")

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._enter("")

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self._enter("")
        self.hb.close()
