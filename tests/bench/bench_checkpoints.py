"""What `krea-runner checkpoints verify` costs on a checkpoint of many files, and how many calls to the file system it makes.

python tests/bench/bench_checkpoints.py [FILES...]     (default: 10000)

A sharded safetensors checkpoint with its index, each shard a real file of 16 bytes of data, on the temporary directory's file
system; warm, median of three. The calls are counted by strace where it is installed, up to 10,000 files.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median

from krea_runner.observe.checkpoints.examine import State, examine

LOOK = """
import sys
from pathlib import Path
from krea_runner.observe.checkpoints.examine import examine
print(examine(Path(sys.argv[1]), now=0.0, headers=sys.argv[2] == "headers").state)
"""


def make(folder: Path, files: int) -> Path:
    folder.mkdir()
    header = json.dumps({"t": {"dtype": "U8", "shape": [16], "data_offsets": [0, 16]}}).encode()
    shard = len(header).to_bytes(8, "little") + header + bytes(16)
    names = [f"model-{number:05d}-of-{files:05d}.safetensors" for number in range(1, files + 1)]
    for name in names:
        (folder / name).write_bytes(shard)
    index = {"metadata": {"total_size": 16 * files}, "weight_map": {f"t{n}": name for n, name in enumerate(names)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def measured(folder: Path, *, headers: bool) -> float:
    times = []
    for _ in range(3):
        start = time.perf_counter()
        told = examine(folder, now=time.time(), headers=headers)
        times.append(time.perf_counter() - start)
        assert told.state is State.WHOLE, told.whys
    return median(times)


def calls(folder: Path, depth: str) -> str:
    if shutil.which("strace") is None:
        return "strace is not installed"
    argv = [
        "strace",
        "-f",
        "-qq",
        "-e",
        "trace=%file,getdents64,pread64",
        sys.executable,
        "-c",
        LOOK,
        str(folder),
        depth,
    ]
    lines = subprocess.run(argv, capture_output=True, text=True, check=True).stderr.splitlines()
    counted = Counter(line.split("(", 1)[0].split()[-1] for line in lines if "(" in line)
    return ", ".join(f"{count} {name}" for name, count in counted.most_common(5))


def main() -> None:
    for files in [int(text) for text in sys.argv[1:]] or [10_000]:
        with tempfile.TemporaryDirectory() as parent:
            folder = make(Path(parent) / "step_1", files)
            for depth in ("structure", "headers"):
                took_s = measured(folder, headers=depth == "headers")
                counted = calls(folder, depth) if files <= 10_000 else ""
                print(f"{files:>7} files, {depth:9}: {took_s:6.2f} s   {counted}", flush=True)


if __name__ == "__main__":
    main()
