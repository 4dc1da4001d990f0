"""What every verb opens: who is asking, where the history is, how the scheduler is reached."""

import os
import pwd

from krea_runner.clock import SystemClock
from krea_runner.config.site import state_dir
from krea_runner.history.store import History, open_history
from krea_runner.schedulers import Scheduler
from krea_runner.schedulers import open_scheduler as _open
from krea_runner.supervise.lease import own_holder
from krea_runner.supervise.supervisor import Supervisor


def current_user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container without a passwd entry
        return str(os.getuid())


def history() -> History:
    return open_history(state_dir())


def history_if_any() -> History | None:
    """For verbs that only read: None when nothing was ever recorded, and then nothing is made either."""
    try:
        (state_dir() / "history.db").stat()
    except FileNotFoundError:
        return None
    except OSError:
        pass  # opening it says why, and what to do
    return history()


def scheduler(kind: str) -> Scheduler:
    return _open(kind, state_dir=state_dir())


def supervisor(*, dry_run: bool = False) -> Supervisor:
    return Supervisor(
        history=history(),
        open_scheduler=scheduler,
        clock=SystemClock(),
        user=current_user(),
        holder=own_holder(),
        dry_run=dry_run,
    )
