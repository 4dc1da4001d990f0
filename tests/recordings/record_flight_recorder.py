"""Record Flight Recorder dumps of small hung jobs: real torch, real gloo processes, no GPU.

    python tests/recordings/record_flight_recorder.py            # every scenario, about 10 s each
    python tests/recordings/record_flight_recorder.py chain

Writes tests/recordings/flight-recorder-torch2.13/SCENARIO/fr_rank_N (pickle) and fr_json_N.json, four ranks each. gloo has
no watchdog and no trigger FIFO, so each rank dumps itself 4 s after the last call by torch's private functions.
"""

import datetime
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

SCENARIOS = ("healthy", "behind", "op", "sizes", "dtypes", "chain", "recv", "pairs", "ring")
RING = 5  # entries that the recorder of scenario `ring` keeps
HERE = Path(__file__).parent / "flight-recorder-torch2.13"
WORLD = 4


def train(scenario: str, folder: Path) -> None:
    import torch
    import torch.distributed as dist
    from torch._C import _distributed_c10d as c10d

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
    rank = dist.get_rank()

    def dump() -> None:
        (folder / f"fr_rank_{rank}").write_bytes(c10d._dump_fr_trace())
        text = c10d._dump_fr_trace_json()
        (folder / f"fr_json_{rank}.json").write_bytes(text if isinstance(text, bytes) else text.encode())
        time.sleep(1)  # nobody leaves before all have dumped: a broken connection would end the others' call
        os._exit(0)

    first = dist.new_group([0, 1], group_desc="pipeline")
    second = dist.new_group([1, 2], group_desc="tensor")
    third = dist.new_group([2, 3], group_desc="data")
    tensor = torch.ones(4)
    for _ in range(20 if scenario == "ring" else 3):
        dist.all_reduce(tensor)
    threading.Timer(4, dump).start()
    if scenario == "healthy" or (scenario in {"op", "sizes", "dtypes"} and rank != 1):
        dist.all_reduce(tensor)
    elif scenario == "op":
        dist.all_gather([torch.zeros(4) for _ in range(WORLD)], tensor)
    elif scenario == "sizes":
        dist.all_reduce(torch.ones(8))
    elif scenario == "dtypes":
        dist.all_reduce(torch.ones(4, dtype=torch.int32))
    elif scenario in {"behind", "ring"} and rank != 2:
        dist.all_reduce(tensor)
    elif scenario == "chain" and rank == 1:
        dist.all_reduce(tensor, group=second)  # waits for rank 2, which comes to nothing
    elif scenario == "chain" and rank == 0:
        dist.all_reduce(tensor, group=first)  # waits for rank 1
    elif scenario == "recv" and rank == 0:
        dist.recv(tensor, src=1)
    elif scenario == "pairs":  # two groups, of which only the second differs
        dist.all_reduce(tensor, group=first if rank < 2 else third)
        if rank == 3:
            dist.broadcast(tensor, 3, group=third)
        elif rank == 2:
            dist.all_reduce(tensor, group=third)
    time.sleep(20)


def main() -> None:
    if "RANK" in os.environ:
        train(sys.argv[1], HERE / sys.argv[1])
        return
    for index, scenario in enumerate(sys.argv[1:] or SCENARIOS):
        (HERE / scenario).mkdir(parents=True, exist_ok=True)
        common = {
            **os.environ,
            "TORCH_FR_BUFFER_SIZE": str(RING if scenario == "ring" else 2000),
            "WORLD_SIZE": str(WORLD),
        }
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29613 + index)}
        ranks = [
            subprocess.Popen([sys.executable, __file__, scenario], env={**common, "RANK": str(rank)})
            for rank in range(WORLD)
        ]
        print(scenario, [rank.wait() for rank in ranks])


if __name__ == "__main__":
    main()
