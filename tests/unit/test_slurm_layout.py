"""Where Slurm says the ranks of a job are. Its own words are 22.05.8's."""

import pytest

from krea_runner.errors import SchedulerOutputError
from krea_runner.model import JobRecord, JobState
from krea_runner.schedulers.slurm_layout import laid_out, parse_steps

ENDED = JobRecord("7", JobState.FAILED, "FAILED", nodelist="n[1-2]")


def test_what_accounting_says_of_steps_is_read() -> None:
    """22.05.8, `sacct -P -n --format=JobID,NTasks,NodeList,AllocTRES,Layout`."""
    told = (
        "7||n[1-2]|billing=16,cpu=16,gres/gpu=16,node=2|\n7.batch|1|n1|cpu=8,node=1|Unknown\n"
        "7.0|2|n[1-2]|cpu=2,node=2|Block\n7.1|16|n[1-2]|cpu=16,gres/gpu=16,node=2|Block\n7.extern|2|n[1-2]|node=2|Unknown\n"
    )
    assert parse_steps(told, "7") == (16, 16, "n[1-2]", "Block")
    assert parse_steps(told.replace("7.1|16", "7.1|2"), "7") == (2, 16, "n[1-2]", "Block")
    assert parse_steps("", "7") is None
    with pytest.raises(SchedulerOutputError):
        parse_steps("7|1\n", "7")


@pytest.mark.parametrize(
    ("tasks", "gpus", "layout", "wanted"),
    [
        (16, 16, "Block", {"launcher": "srun", "world_size": 16, "tasks_per_node": 8, "gpus_per_node": 8}),
        (4, 0, "", {"launcher": "srun", "world_size": 4, "tasks_per_node": 2, "gpus_per_node": 2}),
        (2, 16, "Block", {"launcher": "torchrun", "tasks_per_node": 1, "gpus_per_node": 8}),
        (2, 2, "Block", {"launcher": "srun", "world_size": 2, "tasks_per_node": 1, "gpus_per_node": 1}),
        (5, 0, "Block", {"launcher": "srun", "world_size": 5}),
        (4, 4, "Cyclic", {"launcher": "srun", "world_size": 4}),
        (2, 0, "Block", {}),
        (0, 0, "", {}),
    ],
)
def test_ranks_are_placed_only_where_there_is_one_way(tasks: int, gpus: int, layout: str, wanted: dict) -> None:
    known = {"job_id": "7", "nodes": ["n1", "n2"], "still_running": False}
    assert laid_out(ENDED, tasks, gpus, "n[1-2]", layout) == known | wanted
