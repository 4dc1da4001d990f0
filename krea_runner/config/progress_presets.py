"""What the training frameworks print as they step: one expression a framework, for `[progress] pattern`.

`step` is the optimizer step. `mark` is something that changes and is no such step: a bar counts from 0 in each epoch.
The real lines that each was made from are in tests/unit/test_progress_presets.py, with their sources.
"""

import re

# A bar of tqdm up to its time: "  8%|███   | 1999/24128 [1:52:09<", in a notebook without the bar itself.
_BAR = r"[|%]\s*(?P<{name}>\d+)/\d+ \["

PRESETS = {
    # megatron/training/training.py, training_log; GPT-NeoX and Megatron-DeepSpeed print the same words.
    "megatron": r"\biteration\s+(?P<step>\d+)/\s*\d+ \|",
    # DeepSpeedEngine._report_progress and ThroughputTimer.stop: both only where `steps_per_print` is set.
    "deepspeed": r"\b(?:global_)?step=(?P<step>\d+), (?:skipped|RunningAvgSamplesPerSec)=",
    # torchtitan's MetricsProcessor.log; the colours that stand between the words are taken out before.
    "torchtitan": r"\bstep:\s*(?P<step>\d+)\s+\w+:",
    # NeMo 2's MegatronProgressPrinter; in NeMo 1 the postfix of its bar.
    "nemo": r"\bglobal_step[:=]\s?(?P<step>\d+)",
    "lightning": _BAR.format(name="mark"),
    "tqdm": _BAR.format(name="mark"),
    # transformers' ProgressCallback: the bar over all steps, or, without a bar, what PrinterCallback prints.
    "hf": _BAR.format(name="step") + r"|\{'(?:train_|eval_)?loss': ",
}

NAMED_BY = {"step", "mark"}


def compiled(pattern: str) -> re.Pattern[str]:
    """A preset's name, or an expression. Raises: re.error."""
    return re.compile(PRESETS.get(pattern, pattern))
