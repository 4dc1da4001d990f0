"""A small model really trained by a gang of ranks: what `krea-runner demo` and the tests supervise.

Each rank runs `python -m krea_runner.demo.train`; no library is needed. It beats, saves a checkpoint every so many steps,
resumes from the newest whole one, and is deterministic: interrupted or not, it ends with the same weights, bit for bit.
"""

import argparse
import hashlib
import json
import math
import os
import random
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from krea_runner.demo.gang import Gang, GangBroken
from krea_runner.heartbeat import Heartbeat

INPUTS, HIDDEN, BATCH = 4, 12, 8
WEIGHTS = HIDDEN * (INPUTS + 1) + HIDDEN + 1
RATE, MOMENTUM = 0.02, 0.9
COMPLETE = "COMPLETE"


@dataclass(slots=True)
class State:
    """Everything a checkpoint must hold for the next step to be the same."""

    step: int
    weights: list[float]
    velocity: list[float]

    def flat(self) -> list[float]:
        return [float(self.step), *self.weights, *self.velocity]

    @classmethod
    def from_flat(cls, values: list[float]) -> "State":
        return cls(int(values[0]), values[1 : 1 + WEIGHTS], values[1 + WEIGHTS :])


def main() -> int:
    options = _options()
    rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))
    world_size = int(os.environ.get("SLURM_NTASKS", os.environ.get("WORLD_SIZE", "1")))
    attempt = os.environ.get("KREA_ATTEMPT", "by-hand")
    run_dir = Path(os.environ.get("KREA_RUN_DIR", options.checkpoint_dir))
    heartbeat = Heartbeat()
    try:
        gang = Gang(rank, world_size, attempt, run_dir / "rendezvous" / attempt)
        state = State.from_flat(gang.broadcast(_resume(options).flat() if rank == 0 else None))
        if rank == 0:
            print(f"resumed from step {state.step}" if state.step else "starting from step 0", flush=True)
        train(options, rank, gang, state, heartbeat)
        gang.close()
    except GangBroken as error:
        print(error, file=sys.stderr, flush=True)
        return 1
    heartbeat.close()
    return 0


def train(options: argparse.Namespace, rank: int, gang: Gang, state: State, heartbeat: Heartbeat) -> None:
    while state.step < options.steps:
        started = time.monotonic()
        loss, gradient = loss_and_gradient(state.weights, options.seed, state.step, rank)
        mean = gang.average([loss, *gradient])
        update(state, mean[1:])
        state.step += 1
        heartbeat.step(state.step)
        if rank == 0:
            print(f"step {state.step} loss {mean[0]:.6f}", flush=True)
        if state.step % options.checkpoint_every == 0 or state.step == options.steps:
            with heartbeat.phase("checkpoint"):
                if rank == 0:
                    save(Path(options.checkpoint_dir), state)
        time.sleep(max(0.0, options.step_time - (time.monotonic() - started)))
    if rank == 0:
        _write(Path(options.checkpoint_dir) / "final.json", json.dumps({"step": state.step, "sha256": digest(state)}))


# ---------------------------------------------------------------------------------------------------------- the model


def loss_and_gradient(weights: list[float], seed: int, step: int, rank: int) -> tuple[float, list[float]]:
    """Mean squared error of one hidden layer of tanh on a batch that only (seed, step, rank) decide, and its gradient."""
    draw = random.Random(f"{seed}/{step}/{rank}")
    gradient = [0.0] * WEIGHTS
    out = HIDDEN * (INPUTS + 1)
    total = 0.0
    for _ in range(BATCH):
        x = [draw.uniform(-1, 1) for _ in range(INPUTS)]
        target = math.sin(2 * x[0]) + x[1] * x[2] - 0.5 * x[3]
        hidden = []
        for unit in range(HIDDEN):
            base = unit * (INPUTS + 1)
            hidden.append(math.tanh(weights[base] + sum(weights[base + 1 + i] * x[i] for i in range(INPUTS))))
        error = weights[out] + sum(weights[out + 1 + unit] * hidden[unit] for unit in range(HIDDEN)) - target
        total += error * error
        slope = 2 * error / BATCH
        gradient[out] += slope
        for unit in range(HIDDEN):
            gradient[out + 1 + unit] += slope * hidden[unit]
            back = slope * weights[out + 1 + unit] * (1 - hidden[unit] * hidden[unit])
            base = unit * (INPUTS + 1)
            gradient[base] += back
            for i in range(INPUTS):
                gradient[base + 1 + i] += back * x[i]
    return total / BATCH, gradient


def update(state: State, gradient: list[float]) -> None:
    """Gradient descent with momentum."""
    state.velocity = [MOMENTUM * v - RATE * g for v, g in zip(state.velocity, gradient, strict=True)]
    state.weights = [w + v for w, v in zip(state.weights, state.velocity, strict=True)]


def digest(state: State) -> str:
    return hashlib.sha256(" ".join(value.hex() for value in state.flat()).encode()).hexdigest()


# --------------------------------------------------------------------------------------------------------- checkpoints


def save(directory: Path, state: State) -> None:
    """Written beside its place, synced, renamed, and only then marked: a kill at any moment leaves the one before whole."""
    target = directory / f"step_{state.step:08d}"
    partial = directory / f".{target.name}.{os.getpid()}"
    for leftover in (partial, target):  # of an attempt that was killed in the middle
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir(parents=True)
    values = [value.hex() for value in state.flat()]
    _write(partial / "state.json", json.dumps({"sha256": digest(state), "values": values}))
    partial.rename(target)
    _sync(directory)
    _write(target / COMPLETE, "")


def load(path: Path) -> State:
    """Raises: ValueError when the content is not what was saved."""
    try:
        stored = json.loads((path / "state.json").read_text())
        state = State.from_flat([float.fromhex(value) for value in stored["values"]])
    except (KeyError, TypeError, IndexError, OSError) as error:
        raise ValueError(f"cannot be read: {error}") from error
    if digest(state) != stored["sha256"] or len(state.velocity) != WEIGHTS:
        raise ValueError("its content does not match its checksum")
    return state


def _resume(options: argparse.Namespace) -> State:
    directory = Path(options.checkpoint_dir)
    directory.mkdir(parents=True, exist_ok=True)
    for path in sorted(directory.glob("step_*"), reverse=True):
        if not (path / COMPLETE).exists():
            print(f"skipping {path.name}: not complete", flush=True)
            continue
        try:
            return load(path)
        except ValueError as error:
            print(f"skipping {path.name}: {error}", flush=True)
    draw = random.Random(options.seed)
    return State(0, [draw.uniform(-0.5, 0.5) for _ in range(WEIGHTS)], [0.0] * WEIGHTS)


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    _sync(path.parent)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m krea_runner.demo.train", description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoint-every", type=int, default=20, metavar="K")
    parser.add_argument("--checkpoint-dir", default=os.environ.get("KREA_CHECKPOINT_DIR", "checkpoints"))
    parser.add_argument("--step-time", type=float, default=0.0, metavar="S", help="seconds a step takes at least")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
