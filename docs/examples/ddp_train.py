"""A PyTorch DistributedDataParallel job as krea_runner supervises it: four things to add to a training script.

1. `hb = Heartbeat()` and `hb.step(n)` after each optimizer step.
2. `with hb.phase("checkpoint"):` around what is not a step.
3. Checkpoints written beside their place, renamed, and marked complete last.
4. Resume from the newest complete one.

Runs on CPU with gloo; see ddp_run.toml. Interrupted or not, it ends with the same weights, bit for bit.
"""

import argparse
import hashlib
import json
import os
import shutil
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from krea_runner import Heartbeat

COMPLETE = "COMPLETE"


def main() -> None:
    options = arguments()
    hb = Heartbeat()
    rank, world_size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    # gloo gives up after 30 minutes of its own; the supervisor notices long before.
    dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=timedelta(hours=1))

    torch.manual_seed(options.seed)
    layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    # Only for bits that compare: DDP lays its buckets out anew after the first step of a process, and sums in another
    # order from then on; with find_unused_parameters it keeps them, so a resumed run adds up as an undisturbed one does.
    model = nn.parallel.DistributedDataParallel(layers, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = resume(options.checkpoint_dir, model, optimizer)
    if rank == 0:
        print(f"resumed from step {step}" if step else "starting from step 0", flush=True)

    while step < options.steps:
        started = time.monotonic()
        draw = torch.Generator().manual_seed(options.seed * 1_000_003 + step * world_size + rank)
        x = torch.randn(16, 8, generator=draw)
        loss = nn.functional.mse_loss(model(x), x[:, :1].sin() + x[:, 1:2] * x[:, 2:3])
        optimizer.zero_grad()
        loss.backward()  # the all-reduce: when one rank stops, the others wait here
        optimizer.step()
        step += 1
        hb.step(step)
        if rank == 0:
            print(f"step {step} loss {loss.item():.6f}", flush=True)
        if step % options.checkpoint_every == 0 or step == options.steps:
            with hb.phase("checkpoint"):
                if rank == 0:
                    save(options.checkpoint_dir, step, model, optimizer)
                dist.barrier()
        time.sleep(max(0.0, options.step_time - (time.monotonic() - started)))

    if rank == 0:
        weights = b"".join(bytes(value.view(torch.uint8).flatten().tolist()) for value in model.state_dict().values())
        final = {"step": step, "sha256": hashlib.sha256(weights).hexdigest()}
        (options.checkpoint_dir / "final.json").write_text(json.dumps(final))
    dist.destroy_process_group()
    hb.close()


def save(directory: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    target = directory / f"step_{step:08d}"
    partial = directory / f".{target.name}.partial"
    for leftover in (partial, target):  # of an attempt that was killed in the middle
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir(parents=True)
    with (partial / "state.pt").open("wb") as file:
        torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(target)
    sync(directory)
    (target / COMPLETE).touch()
    sync(target)


def sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def resume(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The step of the newest complete checkpoint, loaded; 0 when there is none."""
    complete = [path for path in sorted(directory.glob("step_*")) if (path / COMPLETE).exists()]
    if not complete:
        return 0
    state = torch.load(complete[-1] / "state.pt", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoint-every", type=int, default=20, metavar="K")
    parser.add_argument(
        "--checkpoint-dir", type=Path, default=Path(os.environ.get("KREA_CHECKPOINT_DIR", "checkpoints"))
    )
    parser.add_argument("--step-time", type=float, default=0.0, metavar="S", help="seconds a step takes at least")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
