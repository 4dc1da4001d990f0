"""Crash-and-restart orchestration for Slurm training runs.

Public names are imported on first use, so that `import krea_runner` in a training script costs nothing.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Heartbeat", "__version__"]

if TYPE_CHECKING:
    from krea_runner.heartbeat import Heartbeat


def __getattr__(name: str) -> Any:
    if name == "Heartbeat":
        from krea_runner.heartbeat import Heartbeat

        return Heartbeat
    raise AttributeError(f"module 'krea_runner' has no attribute {name!r}")
