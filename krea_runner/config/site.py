"""Where this installation keeps its state."""

import os
from pathlib import Path


def state_dir() -> Path:
    """`$KREA_RUNNER_STATE_DIR`, else `$XDG_STATE_HOME/krea_runner`, else `~/.local/state/krea_runner`; not made here.

    It must be one place for all login nodes from which a user supervises: a home directory is, nearly everywhere.
    """
    named = os.environ.get("KREA_RUNNER_STATE_DIR")
    if named:
        return Path(named).absolute()
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "krea_runner"
