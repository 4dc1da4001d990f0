"""The snippets of docs/how-to/heartbeats.md, run as they stand there."""

import re
from pathlib import Path

import pytest

from krea_runner.heartbeat import LAUNCHERS

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "how-to" / "heartbeats.md").read_text()


def snippet(heading: str) -> str:
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return code.replace("from krea_runner import Heartbeat", "from heartbeat import Heartbeat")


SHOWN = "import os, sys\nseen = set()\ndef show(*_): seen.add(hb._phase[0]); return 1\n"


def test_the_loop_beats_in_its_phases(rank) -> None:
    around = "load = first_step = lambda: 1\ntrain = save = evaluate = show\nbatches = lambda: [1]\n"
    process = rank.popen("", begin=SHOWN + around + snippet("A loop of your own") + "print(*sorted(seen))")
    assert process.communicate(timeout=60) == ("checkpoint evaluation startup step\n", "")
    assert (rank.beat().step, rank.beat().phase) == (999, "done")


MEGATRON = """
import sys, types
args = types.SimpleNamespace(curr_iteration=0)
training = types.ModuleType("megatron.training.training")
exec('''
def train_step(*_): show("train"); return "loss"
def save_checkpoint_and_time(*_): show("save")
def evaluate_and_print_results(*_): show("evaluate")
def train():
    for args.curr_iteration in range(4):
        assert train_step(1, 2) == "loss"
    evaluate_and_print_results("prefix")
    save_checkpoint_and_time(4)
''', vars(training))
training.show, training.args = show, args
package = types.ModuleType("megatron.training")
package.get_args, package.training = lambda: args, training
sys.modules.update({"megatron": types.ModuleType("megatron"), "megatron.training": package})
"""


def test_megatrons_lines_wrap_what_its_loop_calls(rank) -> None:
    """On a stand-in: the loop's names and curr_iteration are those of megatron/training/training.py at 001b00c2."""
    end = "with hb:\n    training.train()\nprint(*sorted(seen))"
    process = rank.popen("", begin=SHOWN + MEGATRON + snippet("Megatron-LM") + end)
    assert process.communicate(timeout=60) == ("checkpoint evaluation startup step\n", "")
    assert (rank.beat().step, rank.beat().phase) == (4, "done")


def test_jax_beats_for_the_step_that_the_devices_have_done(rank) -> None:
    pytest.importorskip(
        "jax", reason="JAX is not installed: the lines for it in docs/how-to/heartbeats.md are NOT tested"
    )
    around = "import jax.numpy\nsteps, state = 5, jax.numpy.ones(3)\ntrain_step = jax.jit(lambda x: (x * 2, x.sum()))\n"
    process = rank.popen("", begin=SHOWN + around + snippet("JAX"), JAX_PLATFORMS="cpu")
    assert process.communicate(timeout=120)[1] == ""
    assert (rank.beat().step, rank.beat().phase) == (4, "done")


@pytest.mark.parametrize(("rank_name", "local_name"), LAUNCHERS)
def test_the_reference_has_every_launchers_variables_in_their_order(rank_name, local_name) -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \|", (DOCS / "reference" / "heartbeat.md").read_text(), re.MULTILINE)
    assert rows.index((rank_name, local_name)) == LAUNCHERS.index((rank_name, local_name))
