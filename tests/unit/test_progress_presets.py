"""Each preset against real lines, as people pasted them or as a library printed them here: the step, and what is no step."""

import re

import pytest

from krea_runner.config.keys import progress_pattern
from krea_runner.config.progress_presets import PRESETS, compiled

REAL = {
    "megatron": [
        # NVIDIA/Megatron-LM#756
        (" [2024-04-06 02:59:36] iteration       43/     100 | consumed samples:         5504 | elapsed time per iteration (ms): "
         "5444.9 | throughput per GPU (TFLOP/s/GPU): 239.8 | learning rate: 8.600000E-06 | global batch size:   128 |", "43"),
        # epfLLM/Megatron-LLM#11
        (" iteration      122/  250000 | consumed samples:       124928 | elapsed time per iteration (ms): 86545.2 |", "122"),
        # deepspeedai/DeepSpeed#3742, GPT-NeoX
        (" samples/sec: 7.799 | iteration       34/   10000 | elapsed time per iteration (ms): 4103.1 | learning rate:", "34"),
    ],
    "deepspeed": [
        # deepspeedai/DeepSpeed#1825
        ("[2022-03-11 02:06:58,985] [INFO] [logging.py:69:log_dist] [Rank 0] step=40, skipped=2, lr=[5e-05], mom=[[0.9, 0.999]]",
         "40"),
        # deepspeedai/DeepSpeed#3742
        ("[2023-07-25 21:03:17,269] [INFO] [timer.py:215:stop] epoch=0/micro_step=34/global_step=34, RunningAvgSamplesPerSec="
         "7.864669709950182, CurrSamplesPerSec=8.00912418308922, MemAllocated=59.65GB, MaxMemAllocated=63.31GB", "34"),
        # huggingface/transformers#14531: behind a bar on the same line
        ("  8%|█████████████      | 1999/24128 [1:52:09<20:27:23,  3.33s/it][2021-11-26 03:07:16,494] [INFO] "
         "[logging.py:69:log_dist] [Rank 0] step=2000, skipped=1995, lr=[0.001, 0.001], mom=[0.0, 0.0]", "2000"),
    ],
    "torchtitan": [
        # pytorch/torchtitan#3393
        ("[rank0]:[titan] 2026-05-18 16:04:46,338 - root - INFO - step: 14  loss:  3.24405  grad_norm:  0.8319  "
         "memory:  9.46GiB(64.99%)  tps: 7,282  tflops: 0.52  mfu: 0.17%", "14"),
        # pytorch/torchtitan#1287
        ("[rank0]:[titan] 2025-06-16 22:30:50,322 - root - INFO - step: 200  loss:  6.1384  memory: 49.66GiB(52.28%)", "200"),
        # pytorch/torchtitan#2389
        ("[titan] 2026-02-24 19:46:17,508 - root - INFO - step:  4  loss:  7.62585  grad_norm: 26.6250", "4"),
    ],
    "nemo": [
        # NVIDIA-BioNeMo/bionemo-recipes#740, NeMo 2
        ("Training epoch 0, iteration 120/149 | lr: 3e-05 | consumed_samples: 121 | global_batch_size: 1 | global_step: 120 | "
         "reduced_train_loss: 1.233 | train_step_timing in s: 0.03146 | val_loss: 4.106", "120"),
        # NVIDIA/NeMo-Framework-Launcher#55, NeMo 1
        ("Epoch 0:   1%|          | 795/77225 [9:07:58<878:01:48, 41.36s/it, loss=3.1, v_num=, reduced_train_loss=3.090, "
         "global_step=794.0, consumed_samples=1.63e+6]", "794"),
    ],
    "lightning": [
        # Lightning-AI/pytorch-lightning#4225
        ("Epoch 0:  22%|██▏       | 4/18 [00:17<01:02,  4.47s/it, loss=10.072, v_num=193315]", "4"),
        # Lightning-AI/pytorch-lightning#3866
        ("Epoch 0:  93% 1586/1702 [12:50<00:56,  2.06it/s, loss=0.158, v_num=0, train_loss=0.149]", "1586"),
        # ecmwf/anemoi-core#614, Lightning 2.5
        ("Epoch 0:   2%|▏         | 3744/150000 [3:12:36<125:24:04,  0.32it/s, v_num=35a4, ...]", "3744"),
    ],
    "tqdm": [
        # tqdm 4.70.1, run for this test with its standard error in a file
        (" 13%|█▎        | 4/30 [00:00<00:00, 35.84it/s]", "4"),
        ("  5%|▌         | 5001/100000 [00:25<07:54, 200.03it/s]", "5001"),
    ],
    "hf": [
        # huggingface/transformers#14531
        ("  8%|█████████████                                     | 1999/24128 [1:52:09<20:27:23,  3.33s/it]", "1999"),
        ("{'loss': 6.2645, 'learning_rate': 0.001, 'epoch': 0.02}", None),
    ],
}  # fmt: skip

# Near them, and no sign of a step.
NEAR = [
    "time (ms) | forward: 659.86 | backward: 2164.69 | backward-backward: 2164.66 | optimizer: 1172.51",  # DeepSpeed#3742
    "[2023-07-25 21:03:17,269] [INFO] [logging.py:96:log_dist] [Rank 0] rank=0 time (ms) | forward: 652.41 | step: 1172.13",
    "[rank0]:[titan] 2025-06-16 22:30:50,758 - root - INFO - Dumping profiler traces at step 200",  # torchtitan#1287
    "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, but hysteresis is 2.",  # DeepSpeed#5779
    "100%|##########| done",
    "n1:704572:705272 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read",
]


def test_each_preset_has_real_lines() -> None:
    assert REAL.keys() == PRESETS.keys()


@pytest.mark.parametrize(("preset", "line", "shown"), [(name, *item) for name, items in REAL.items() for item in items])
def test_a_preset_finds_the_step_in_a_real_line(preset: str, line: str, shown: str | None) -> None:
    match = compiled(preset).search(line)
    assert match is not None
    groups = match.groupdict()
    assert (groups.get("step") or groups.get("mark")) == shown
    assert ("mark" in groups) == (preset in {"lightning", "tqdm"})


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_leaves_other_lines_alone(preset: str) -> None:
    assert [line for line in NEAR if compiled(preset).search(line)] == []


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("megatrn", "did you mean 'megatron'?"),
        ("DeepSpeed", "did you mean 'deepspeed'?"),
        ("step (", "no regular expression: missing ), unterminated subpattern at position 5"),
        ("(?P<step>[0-9]*)", "matches every line"),
        ("x" * 1001, "at most 1000"),
        (5, "text in quotes"),
    ],
)
def test_a_pattern_that_cannot_be_meant_is_refused_with_what_would_be(value: object, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        progress_pattern(value)


@pytest.mark.parametrize("value", [*PRESETS, "loss", r"update (?P<step>\d+)"])
def test_presets_and_expressions_are_taken_as_they_are(value: str) -> None:
    assert progress_pattern(value) == value
