"""What Slurm knows of a job that somebody else submitted: enough to look after it."""

import re
from dataclasses import dataclass

from krea_runner.errors import JobNotFound, SchedulerError
from krea_runner.schedulers.slurm_cli import ask, squeue_argv
from krea_runner.schedulers.slurm_parse import ROW_END, TEXT_END, unreadable

_WORDS = ("JobArrayID", "JobID", "Partition", "NumNodes", "NumTasks", "TimeLimit", "BatchHost", "BatchFlag")
# Any character may stand in these: `scontrol show job` prints them raw, line breaks and all, and cannot be read safely.
_TEXTS = ("Name", "WorkDir", "Command", "STDOUT")
FORMAT = ",".join([*(f"{field}:{TEXT_END}" for field in (*_WORDS, *_TEXTS[:-1])), f"{_TEXTS[-1]}:{ROW_END}"])


@dataclass(frozen=True, slots=True)
class JobDescription:
    job_id: str
    raw_id: str
    """Of an array's task, the number that Slurm gives it besides `123_4`."""
    partition: str
    nodes: int
    tasks: int
    time_limit: str
    """As sbatch takes it; `UNLIMITED`, or `Partition_Limit` while pending, where none was asked for."""
    batch_node: str
    has_script: bool
    """False for an allocation of salloc or srun: what runs there is started from outside."""
    name: str
    workdir: str
    command: str
    """Empty for `sbatch --wrap` and a script from standard input."""
    stdout: str
    """As it was given, patterns and all (squeue does not expand them, 22.05.8)."""


def describe(job_id: str) -> JobDescription:
    """Raises: JobNotFound; SchedulerError for the id of a whole array, naming its tasks; SchedulerUnavailable."""
    leader, plus, _ = job_id.partition("+")
    if plus:
        raise SchedulerError(
            f"{job_id} is a part of a heterogeneous job, which Slurm requeues as a whole",
            hint=f"name its leader: {leader}",
        )
    argv = squeue_argv([job_id])
    done = ask([*argv[:-1], FORMAT], doing=f"asking for job {job_id}")
    found = parse_descriptions(done.stdout)
    # First: the id of the whole array is at the same time the raw id of one of its tasks.
    tasks = [job.job_id for job in found if job.job_id.startswith(f"{job_id}_")]
    if tasks:
        named = " ".join(tasks[:8]) + (" ..." if len(tasks) > 8 else "")
        raise SchedulerError(f"job {job_id} is an array: each task is a run of its own", hint=f"name one of: {named}")
    for job in found:
        if job_id in {job.job_id, job.raw_id}:
            return job
    raise JobNotFound(f"Slurm knows no job {job_id}", hint="your jobs: squeue --me")


def parse_descriptions(stdout: str) -> list[JobDescription]:
    """Raises: SchedulerOutputError, also for a job whose name holds the very characters that separate our fields."""
    *rows, rest = stdout.split(f"{ROW_END}\n")
    if rest:
        raise unreadable("squeue", rest)
    return [_description(row) for row in rows]


def _description(row: str) -> JobDescription:
    values = [_text(value) for value in row.split(TEXT_END)]
    try:
        job_id, raw_id, partition, nodes, tasks, limit, batch_node, batch, name, workdir, command, stdout = values
        return JobDescription(
            job_id=job_id.removesuffix("+0"), raw_id=raw_id, partition=partition, nodes=_count(nodes), tasks=_count(tasks),
            time_limit=limit, batch_node=batch_node, has_script=batch != "0", name=name, workdir=workdir,
            command=command, stdout=stdout,
        )  # fmt: skip
    except ValueError as error:
        raise unreadable("squeue", row) from error


def _count(text: str) -> int:
    """A pending job may have a range, `2-4`; from 1024 on squeue writes `1K` where that is exact (22.05.8)."""
    match = re.fullmatch(r"(\d+)([KMG]?)(-\d+[KMG]?)?", text)
    if match is None:
        raise ValueError(text)
    return int(match[1]) * {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[match[2]]


def _text(value: str) -> str:
    return "" if value in {"(null)", "N/A", "n/a"} else value


def log_patterns(job: JobDescription, user: str) -> list[str]:
    """Where the job's standard output may lie, likeliest first; `*` stands where only the node itself knows the value.

    Relative names are below the working directory; a backslash turns patterns off (sbatch.1, "filename pattern"). What
    squeue 22.05.8 says of an array's task without --output, `slurm-<raw id>.out`, is wrong: it is `slurm-123_4.out`.
    """
    array, _, task = job.job_id.partition("_")
    default = f"slurm-{array}_{task}.out" if task else f"slurm-{job.raw_id}.out"
    given = job.stdout or default
    values = {
        "A": array, "a": task or "4294967294", "j": job.raw_id, "J": job.raw_id, "x": job.name, "u": user, "t": "0", "n": "0",
        "s": "batch", "b": str(int(task) % 10) if task.isdigit() else "4294967294", "N": job.batch_node, "%": "%",
    }  # fmt: skip

    def expanded(match: re.Match[str]) -> str:
        width, letter = match[1], match[2]
        value = values.get(letter, match[0])
        return value.rjust(int(width), "0") if width and letter in "Aajtnb" else value

    found = given.replace("\\", "") if "\\" in given else re.sub(r"%(\d*)([A-Za-z%])", expanded, given)
    names = [found]
    if "%N" in given and "\\" not in given:
        values["N"] = "*"
        names.append(re.sub(r"%(\d*)([A-Za-z%])", expanded, given))
    if task and given.endswith(f"/slurm-{job.raw_id}.out"):
        names.insert(0, default)
    return [name if name.startswith("/") else f"{job.workdir}/{name}" for name in names]
