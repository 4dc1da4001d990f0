"""Write down what the Slurm of each named Debian release says, or of this machine (`native`):

    python -m tests.recordings native trixie sid

As root, in the checkout's root folder, with two clusters for each: one without accounting and one with (record.py).
"""

import os
import subprocess
import sys
from pathlib import Path

DEV_CLUSTER = [sys.executable, str(Path(__file__).parents[2] / "scripts" / "dev-cluster")]
PORT_BASE = 27300
KINDS: tuple[tuple[list[str], list[str]], ...] = (  # what `up` is told, the groups that are recorded
    ([], ["jobs", "refusals", "controller", "accounting"]),
    (["--accounting"], ["accounting"]),
)


def main() -> None:
    for release in sys.argv[1:] or sys.exit(__doc__):
        for more, groups in KINDS:
            where = ["--dir", f"/tmp/krea-recording-{os.getpid()}"]
            which = [] if release == "native" else ["--release", release]
            try:
                subprocess.run([*DEV_CLUSTER, "up", *where, *which, *more, "--port-base", str(PORT_BASE)], check=True)
                words = [sys.executable, "-m", "tests.recordings.record", *groups]
                subprocess.run([*DEV_CLUSTER, "shell", *where, "--", *words], check=True)
            finally:
                subprocess.run([*DEV_CLUSTER, "down", *where], check=True)


if __name__ == "__main__":
    main()
