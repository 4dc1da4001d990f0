"""Rules about the cluster and its file systems: partition, preemption, times, places."""

import re
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import PurePosixPath

from krea_runner.config.durations import is_slurm_time
from krea_runner.launch.check import Hit, Job, Severity
from krea_runner.launch.check_exit import asked_signal
from krea_runner.launch.check_shell import pipelines, program_of, srun_pairs
from krea_runner.launch.shell import Command, Word
from krea_runner.launch.shell_words import ASSIGNMENT
from krea_runner.schedulers.slurm_facts import ClusterFacts

# sbatch's own words; --signal may come up to this much early, and limits are checked in rounds (sbatch.1; 22.05.8).
SIGNAL_ROUND_S = 60
# With nothing better known: loading, compiling, the first step.
STARTUP_S = 600.0
# From this Slurm on the folders of logs are made for the job (CHANGELOG of 23.02.0rc1; seen on 24.11.5 and 26.05).
MAKES_LOG_FOLDERS = (23, 2)


def slurm_seconds(text: str | None) -> float | None:
    """Seconds of a limit in Slurm's form; None where there is none: empty, NONE, UNLIMITED, 0."""
    if not text or not is_slurm_time(text) or text.upper() in {"UNLIMITED", "INFINITE", "0"}:
        return None
    days, dash, clock = text.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if dash:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    elif len(parts) == 1:
        hours, minutes, seconds = 0, parts[0], 0
    else:
        hours, minutes, seconds = (0, *parts) if len(parts) == 2 else (parts[0], parts[1], parts[2])
    return float(int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds) or None


def _partitions(job: Job, cluster: ClusterFacts) -> Iterator[Mapping[str, str]]:
    """Those that the job may start in and that are known."""
    names = job.option("partition") or job.facts.environ.get("SBATCH_PARTITION")
    for name in names.split(",") if names else [None]:
        partition = cluster.partition(name)
        if partition is not None:
            yield partition


def unknown_partition(job: Job) -> Iterator[Hit]:
    for name in (job.option("partition") or "").split(","):
        if name and job.cluster.partition(name) is None:
            known = ", ".join(sorted(job.cluster.partitions)) or "none"
            yield Hit(job.line_of("partition"), saw=f"there are: {known}", fix="--partition=NAME, of: sinfo -s")


def preempted_by_cancel(job: Job) -> Iterator[Hit]:
    for partition in _partitions(job, job.cluster):
        said = preempt_mode(job.cluster, partition, job.option("qos"))
        if said and "CANCEL" in said.upper():
            yield Hit(job.line_of("qos", "partition"), saw=f"partition {partition['PartitionName']}: {said}")
            return


def preempt_mode(cluster: ClusterFacts, partition: Mapping[str, str], qos: str | None) -> str:
    """Who decides and what: `PreemptMode=CANCEL`; empty where nobody is preempted. With preempt/qos the job's QOS decides,
    unless it says `cluster`; else the partition's mode, which is the configuration's where it has none (slurm.conf.5)."""
    kind = cluster.config.get("PreemptType", "")
    if "none" in kind or not kind:
        return ""
    if "qos" in kind:
        mode = cluster.qos_preempt.get(qos or "normal", "cluster")
        if mode.lower() != "cluster":
            return f"PreemptMode={mode} of the QOS {qos or 'normal'}"
    return f"PreemptMode={partition.get('PreemptMode') or cluster.config.get('PreemptMode', '')}"


# ---------------------------------------------------------------------------------------------------------------- times


def limit_above_partition(job: Job) -> Iterator[Hit]:
    asked = slurm_seconds(job.option("time"))
    limits = [(slurm_seconds(each.get("MaxTime")), each) for each in _partitions(job, job.cluster)]
    if asked is not None and limits and all(limit is not None and asked > limit for limit, _ in limits):
        _, partition = max(limits, key=lambda pair: pair[0] or 0.0)
        most = partition.get("MaxTime", "")
        yield Hit(job.line_of("time"), saw=f"MaxTime={most} in {partition['PartitionName']}", fix=f"--time={most}")


def _limit(job: Job) -> tuple[float | None, str]:
    """The time limit that the job will have, and where it comes from."""
    if "time" in job.options:
        return slurm_seconds(job.option("time")), f"--time={job.option('time')}"
    cluster = job.facts.cluster
    for partition in _partitions(job, cluster) if cluster else ():
        for key in ("DefaultTime", "MaxTime"):  # without a default the maximum holds (slurm.conf.5)
            if seconds := slurm_seconds(partition.get(key)):
                return seconds, f"{key}={partition[key]} of {partition['PartitionName']}"
    return None, ""


def limit_below_checkpoint(job: Job) -> Iterator[Hit]:
    limit, source = _limit(job)
    if limit is None:
        return
    every, startup = job.facts.checkpoint_every_s, job.facts.startup_s
    needed = (startup or STARTUP_S) + (every or 0.0) + (job.facts.checkpoint_s or 0.0)
    if limit >= needed:
        return
    parts = [f"start {_span(startup or STARTUP_S)}" + ("" if startup else " (assumed)")]
    parts += [f"interval {_span(every)}" if every else "interval not known"]
    parts += [f"saving {_span(job.facts.checkpoint_s)}"] if job.facts.checkpoint_s else []
    fix = f"--time={int(needed * 2 + 59) // 60} or more (minutes)"
    # Budgets are upper bounds: with them alone it is likely, not certain.
    certain = every is not None and limit < every
    severity = None if certain else Severity.WARNING if startup or every else Severity.NOTE
    yield Hit(
        job.line_of("time"),
        text="" if "time" in job.options else "(no --time)",
        saw=f"{source}; {', '.join(parts)}",
        fix=fix,
        severity=severity,
    )


def signal_too_late(job: Job) -> Iterator[Hit]:
    asked = asked_signal(job)
    if asked is None:
        return
    target, name, lead = asked
    saving = job.facts.checkpoint_s
    wanted = int(max(SIGNAL_ROUND_S, saving or 0.0))
    if lead < wanted:
        why = (
            f"saving may take {_span(saving)}"
            if saving and saving > SIGNAL_ROUND_S
            else "60 s is the least that Slurm counts in"
        )
        prefix = f"{target}:" if target else ""
        value = f"{prefix}{name}@{wanted + 60}"
        fix = f"#SBATCH --signal={value}" if job.ours is None else f'signal = "{value}"'
        yield Hit(job.options["signal"].line, saw=f"{lead} s; {why}", fix=fix)


def _span(seconds: float | None) -> str:
    value = seconds or 0.0
    return f"{value / 3600:g} h" if value >= 7200 else f"{value / 60:g} min" if value >= 120 else f"{value:g} s"


# --------------------------------------------------------------------------------------------------------------- places

# Places that each node has for itself nearly everywhere. What a site calls otherwise cannot be known.
_LOCAL_PLACES = re.compile(
    r"(/tmp|/var/tmp|/dev/shm|/run|/scratch/local|/local|/localscratch|/local_scratch|/lscratch|/ssd|/nvme|/mnt/(nvme|ssd|local)\w*)(/|$)"
    r"|\$\{?(TMPDIR|SLURM_TMPDIR|LOCAL_SCRATCH|LSCRATCH|TMP)\b"
)
_IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})
_SHARED = re.compile(
    r"nfs|lustre|gpfs|beegfs|ceph|wekafs|pvfs|orangefs|panfs|glusterfs|afs|cifs|smb|9p|virtiofs|fuse|mmfs|vast|daos"
)
_KEPT_NAME = re.compile(
    r"(ckpt|checkpoint|save|resume|out(put)?[_-]?dir|log(ging)?[_-]?dir|default[_-]root[_-]dir|run[_-]dir)",
    re.IGNORECASE,
)


def node_local(job: Job) -> Iterator[Hit]:
    for path, line, what in _places(job):
        if re.match(r"/dev/(?!shm)", path):
            continue  # /dev/null and the like hold nothing
        kind = job.facts.file_system(path) if path.startswith("/") else ""
        if _SHARED.search(kind):
            continue
        if _LOCAL_PLACES.match(path):
            yield Hit(line, saw=f"{what} {path} is usually each node's own")
        elif kind in _IN_MEMORY:
            yield Hit(line, saw=f"{what} {path} is in memory here ({kind})")
        elif kind:
            saw = f"{what} {path} is on {kind} here: shared only if this host exports it"
            yield Hit(line, saw=saw, severity=Severity.NOTE)


def _places(job: Job) -> Iterator[tuple[str, int, str]]:
    """(path, line, what it is), each once a line: logs and checkpoints of this job."""
    if job.ours is not None:
        shared = job.ours.directories if job.asks_slurm else ()
        yield from ((path, -line, what) for path, line, what in shared)
        return
    here = PurePosixPath(job.facts.submit_dir, job.option("chdir") or "")
    for name in ("output", "error"):
        if name in job.options or name == "output":
            yield str(here / (job.option(name) or "slurm-%j.out")), job.line_of(name, "chdir"), "the log"
    seen: set[tuple[str, int]] = set()
    for shell in job.shells:
        logs = {
            id(tee)
            for each in pipelines(shell.sequence)
            if any(map(shell.is_work, each.commands))
            for tee in each.commands
        }
        for command in shell.flat:
            of_log = _log_options(command) if id(command) in logs or shell.is_work(command) else ()
            for path, line, what in (*_named_paths(command), *of_log):
                if (path, line) not in seen:
                    seen.add((path, line))
                    yield path, line, what


def _named_paths(command: Command) -> Iterator[tuple[str, int, str]]:
    """What follows a name such as `--save` or `CKPT_DIR=`, in arrays and strings of options too."""
    words = [each for word in (*command.assignments, *command.words) for each in _words_in(word)]
    for (word, line), (following, _) in zip_longest(words, words[1:], fillvalue=("", 0)):
        name, equals, value = word.partition("=")
        if not equals and name.startswith("-"):
            value = following
        if _KEPT_NAME.search(name) and re.search(r"[/$]", value):
            yield value, line, name.lstrip("-")


def _words_in(word: Word) -> Iterator[tuple[str, int]]:
    """Each with its line. Of `ARGS=(...)` and `ARGS="..."` those in it, where there are options among them."""
    match = ASSIGNMENT.match(word.text)
    inside = word.text[match.end() :] if match else ""
    if not re.search(r"(^|[\s(\"'])--?\w", inside):
        yield word.value, word.line
        return
    for line, row in enumerate(inside.split("\n"), word.line):
        for each in re.sub(r"(^|\s)#.*|\\$", "", row).split():
            yield re.sub(r"^[(\"']+|[)\"']+$", "", each), line


def _log_options(command: Command) -> Iterator[tuple[str, int, str]]:
    """Where srun or tee write."""
    program = program_of(command)
    name = program[0].value.rpartition("/")[2] if program else ""
    if name == "tee":
        yield from ((word.value, word.line, "the log") for word in program[1:] if not word.value.startswith("-"))
    for option, value in srun_pairs(program)[0] if name == "srun" else ():
        match = re.fullmatch(r"(?:--(?:output|error)=?|-[oe])(.*)", option.value)
        if match and (path := match[1] or (value.value if value else "")):
            yield path, option.line, "the log"


def missing_log_folder(job: Job) -> Iterator[Hit]:
    if job.ours is not None or _makes_log_folders(job.facts.cluster):
        return  # then it is made: by us, or by Slurm
    for name in ("output", "error"):
        folder = str(PurePosixPath(job.option(name) or "").parent)
        if name not in job.options or folder == "." or re.search(r"[$`~]", folder):
            continue
        line = job.options[name].line
        whole = str(PurePosixPath(job.facts.submit_dir, job.option("chdir") or "", folder))
        if "%" in folder:
            if re.search(r"%\d*[jJAan]", folder):
                yield Hit(
                    line,
                    saw=f"{folder} is a new folder for each job, and Slurm makes none",
                    fix="move the pattern into the file's name",
                )
        elif not job.facts.exists(whole):
            yield Hit(line, saw=f"{whole} is not there, seen from this host", fix=f"mkdir -p {whole}")
            return


def _makes_log_folders(cluster: ClusterFacts | None) -> bool:
    """False where the version is not known."""
    version = re.match(r"(\d+)\.(\d+)", cluster.config.get("SLURM_VERSION", "") if cluster else "")
    return version is not None and (int(version[1]), int(version[2])) >= MAKES_LOG_FOLDERS


def missing_workdir(job: Job) -> Iterator[Hit]:
    folder = job.option("chdir") or ""
    if folder.startswith("/") and not re.search(r"[$`%]", folder) and not job.facts.exists(folder):
        yield Hit(
            job.line_of("chdir"),
            saw=f"{folder} is not there, seen from {job.facts.seen_from}",
            fix=f"mkdir -p {folder}",
        )


# ------------------------------------------------------------------------------------------------------------- defaults

# What it does to a run (22.05.8). Of the rest of sbatch's options, our scripts set what a run stands on.
_STAYS = {
    "array": ("each task of the array is a job: several gangs in one run directory", Severity.ERROR),
    "test-only": ("nothing is submitted, and sbatch exits 0", Severity.ERROR),
    "quiet": ("sbatch does not say the job's id", Severity.WARNING),
    "hold": ("the job waits until somebody types: scontrol release JOBID", Severity.WARNING),
}


def defaults_that_stay(job: Job) -> Iterator[Hit]:
    """Lines of ~/.slurm/defaults, `[[command:]cluster:]option = value`, as cli_filter/user_defaults reads them."""
    for number, line in enumerate(job.facts.defaults.splitlines(), 1):
        key, equals, _ = line.partition("=")
        *where, name = [word.strip() for word in key.split(":")]
        command, name_of_cluster = ["*", "*", *where][-2:] if len(where) < 3 else ("", "")
        ours = command.lower() in {"*", "sbatch"} and name_of_cluster in {"*", job.cluster.config.get("ClusterName")}
        if equals and not line.lstrip().startswith("#") and ours and name in _STAYS and name not in job.options:
            saw, severity = _STAYS[name]
            yield Hit(
                0,
                text=f"~/.slurm/defaults:{number}: {line.strip()}",
                saw=f"line {number}, {name}: {saw}",
                severity=severity,
            )
