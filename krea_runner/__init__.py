"""Crash-and-restart orchestration for Slurm training runs.

Public names are imported on first use, so that `import krea_runner` in a training script costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Heartbeat", "KreaExecutor", "KreaJob", "__version__", "save_checkpoint", "submit"]

if TYPE_CHECKING:
    from krea_runner.heartbeat import Heartbeat
    from krea_runner.launch.submitit_entry import save_checkpoint
    from krea_runner.launch.submitit_executor import KreaExecutor, KreaJob, submit

_HOMES = {
    "Heartbeat": "krea_runner.heartbeat",
    "save_checkpoint": "krea_runner.launch.submitit_entry",
    **dict.fromkeys(("KreaExecutor", "KreaJob", "submit"), "krea_runner.launch.submitit_executor"),
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'krea_runner' has no attribute {name!r}")
