"""Every key of run.toml: one table, from which files are checked and docs/reference/run-toml.md is made."""

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from krea_runner.config.durations import is_slurm_time, parse_duration
from krea_runner.config.progress_presets import PRESETS, compiled
from krea_runner.model import SCHEDULERS

Check = Callable[[Any], Any]
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"text in quotes is wanted, not {value!r}")
    if _CONTROL.search(value):
        raise ValueError(f"control characters and line breaks are not allowed: {value!r}")
    return value


def name(value: Any) -> str:
    result = text(value).strip()
    if not 0 < len(result) <= 100 or not result.isprintable():
        raise ValueError(f"a name has 1 to 100 printable characters, unlike {result[:100]!r}")
    return result


def path(value: Any) -> str:
    result = text(value)
    if not result.strip():
        raise ValueError("a path is wanted, not an empty text")
    try:
        Path(result).expanduser()
    except RuntimeError:
        raise ValueError(f"there is no home directory for {result!r}") from None
    return result


def ssh_host(value: Any) -> str:
    result = text(value)
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.:-]*", result):
        raise ValueError(f"the name of a host is wanted (its user and port stand in ~/.ssh/config), not {value!r}")
    return result


def command(value: Any) -> tuple[str, ...] | str:
    if isinstance(value, str) and value.strip():
        if "\x00" in value:
            raise ValueError("a command cannot hold a zero byte")
        return value
    if isinstance(value, list) and value and all(isinstance(word, str) and "\x00" not in word for word in value):
        if not value[0] or value[0].startswith("-"):  # srun would take it for an option of its own
            raise ValueError(f"a program is wanted as the first word, not {value[0]!r}")
        return tuple(value)
    raise ValueError('a list of words is wanted, such as ["python", "train.py"], or one shell line in quotes')


def one_of(*words: str) -> Check:
    def check(value: Any) -> str:
        if value not in words:
            raise ValueError(f"one of {', '.join(map(repr, words))} is wanted, not {value!r}")
        return str(value)

    return check


def count(least: int) -> Check:
    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"a whole number of at least {least} is wanted, not {value!r}")
        return value

    return check


def budget(value: Any) -> float | None:
    """Seconds; None where it is to be learned."""
    return None if value == "auto" else parse_duration(value)


def factor(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value <= 100:
        raise ValueError(f"a number from 1 to 100 is wanted, not {value!r}")
    return float(value)


def yes_or_no(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"true or false is wanted, not {value!r}")
    return value


def evidence_time(value: Any) -> float:
    seconds = parse_duration(value)
    if not 5 <= seconds <= 60:
        raise ValueError(f"5 s to 60 s are possible, not {value!r}: the step hangs meanwhile")
    return seconds


def exit_codes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(code) is int and 0 < code < 256 for code in value):
        raise ValueError(f"a list of exit codes from 1 to 255 is wanted, not {value!r}")
    return tuple(value)


def pattern(value: Any) -> str:
    result = text(value)
    if result.count("{step}") != 1 or "/" in result:
        raise ValueError(
            f'the name of one checkpoint with {{step}} once is wanted, such as "step_{{step}}", not {value!r}'
        )
    return result


def file_name(value: Any) -> str:
    result = text(value)
    if "/" in result:
        raise ValueError(f"a file name inside the checkpoint is wanted, not a path: {value!r}")
    return result


def progress_pattern(value: Any) -> str:
    result = text(value)
    if result in PRESETS:
        return result
    near = (
        difflib.get_close_matches(result.lower(), PRESETS, n=1, cutoff=0.7) if re.fullmatch(r"[\w-]+", result) else []
    )
    if near:
        raise ValueError(f"unknown preset {result!r}; did you mean {near[0]!r}?")
    if len(result) > 1000:
        raise ValueError("an expression has at most 1000 characters")
    try:
        matches_nothing = compiled(result).search("")
    except re.error as error:
        raise ValueError(f"no regular expression: {error} in {result!r}; presets: {', '.join(PRESETS)}") from None
    if matches_nothing:
        raise ValueError(f"{result!r} matches every line, even an empty one")
    return result


def slurm_time(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return str(value)
    if not isinstance(value, str) or not is_slurm_time(value):
        raise ValueError(f'Slurm\'s form is wanted, such as "2-00:00:00" or "90" (minutes), not {value!r}')
    return value


def scalar(value: Any) -> str | int | bool:
    if isinstance(value, bool | int):
        return value
    return text(value)


def options(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError(f'a list of whole options is wanted, such as ["--switches=2"], not {value!r}')
    for item in value:
        if not isinstance(item, str) or not re.match(r"--[a-z]", item) or _CONTROL.search(item):
            raise ValueError(f"each extra option begins with -- and stays on one line, unlike {item!r}")
        word = item[2:].split("=")[0].split()[0].replace("-", "_")
        # sbatch takes an option that is cut short, as any getopt_long program does: --job-n is --job-name.
        owned = OWNED.get(word) or next((why for option, why in OWNED.items() if option.startswith(word)), None)
        if owned:
            raise ValueError(f"{item!r} is krea_runner's own: {owned}")
        if re.search(r"[^a-z0-9-]", item.split("=")[0]):  # a second option could hide behind a blank
            raise ValueError(f"one option is written --name=value, unlike {item!r}")
    return tuple(value)


@dataclass(frozen=True, slots=True)
class Key:
    """`check` turns the TOML value into ours or raises ValueError; `default` is for the reference page."""

    name: str
    check: Check
    about: str
    default: str = ""
    required: bool = False


# sbatch options that the template sets itself, and where their value comes from.
OWNED = {
    "nodes": "use [gang] nodes",
    "ntasks": "use [gang] nodes and ranks_per_node",
    "ntasks_per_node": "use [gang] ranks_per_node",
    "output": "logs go to RUN_DIR/logs",
    "error": "logs go to RUN_DIR/logs",
    "open_mode": "it is always append: a restart must not erase the log",
    "requeue": "it is always set",
    "no_requeue": "a run that may not be requeued cannot be restarted",
    "job_name": "use [run] name",
    "comment": "it carries the tag by which a lost submission is found again",
    "export": "use [env]",
    "chdir": "use [run] workdir",
    "array": "one run is one job",
    "wrap": "use [run] command",
    "parsable": "it is always set",
}

SBATCH = (
    "account acctg_freq batch begin clusters constraint container contiguous core_spec cores_per_socket "
    "cpu_freq cpus_per_gpu cpus_per_task deadline delay_boot dependency distribution exclude exclusive extra_node_info "
    "gpu_bind gpu_freq gpus gpus_per_node gpus_per_socket gpus_per_task gres gres_flags hint hold licenses "
    "mail_type mail_user mcs_label mem mem_bind mem_per_cpu mem_per_gpu mincpus network nice nodefile nodelist "
    "ntasks_per_core ntasks_per_gpu ntasks_per_socket overcommit oversubscribe partition power prefer priority profile "
    "propagate qos reboot reservation signal sockets_per_node spread_job switches thread_spec threads_per_core time time_min "
    "tmp use_min_nodes wait_all_nodes wckey"
).split()

_SLURM_KEYS = tuple(
    Key(word, slurm_time if word in {"time", "time_min"} else scalar, f"sbatch --{word.replace('_', '-')}")
    for word in SBATCH
)

TABLES: dict[str, tuple[Key, ...]] = {
    "run": (
        Key("name", name, "What people call it; any printable characters, at most 100.", required=True),
        Key("command", command, "What each rank runs: a list of words, or one shell line.", required=True),
        Key("dir", path, "The run directory, on a file system that all nodes share; relative to this file. "
            "No backslash.", "runs/<name>"),
        Key("workdir", path, "Where the command runs; relative to this file.", "."),
        Key("scheduler", one_of(*SCHEDULERS), "`slurm`, or `local`: one machine that plays the nodes.", "slurm"),
        Key("transport", one_of("local", "ssh"), "Where Slurm's commands run: on this host, or on a login node over SSH.",
            "local"),
        Key("ssh_host", ssh_host, "The login node, as `ssh` knows it: a Host of ~/.ssh/config, or a name.", "none"),
        Key("files", one_of("mounted", "sftp"), "With `transport = \"ssh\"`: the run directory is mounted here under the same "
            "path, or read over SFTP; then `dir` and `workdir` are absolute paths over there.", "mounted"),
    ),
    "env": (),
    "gang": (
        Key("nodes", count(1), "Nodes of the gang: all of them or none.", "1"),
        Key("ranks_per_node", count(1), "Ranks on each node, usually one a GPU.", "1"),
    ),
    "slurm": (*_SLURM_KEYS, Key("extra", options, "Whole sbatch options that have no key here.", "[]")),
    "budgets": (
        Key("startup", budget, "From the start to the first step.", "auto"),
        Key("compile", budget, "In the phase `compile`, and between the first steps of an attempt (where `step` is `auto`).",
            "auto"),
        Key("step", budget, "Between two beats while stepping. No budget is judged below 3.5 s.", "auto"),
        Key("data", budget, "In the phase `data`: the loop waits for its next batch.", "auto"),
        Key("checkpoint", budget, "In the phase `checkpoint`.", "auto"),
        Key("evaluation", budget, "In the phase `evaluation`.", "auto"),
        Key("shutdown", budget, "In the phase `shutdown`.", "auto"),
        Key("default", budget, "In a phase of any other name.", "auto"),
        Key("second_look", factor, "Without a second signal that agrees, wait this many times the budget.", "2.0"),
    ),
    "checkpoint": (
        Key("dir", path, "Where checkpoints are; relative to workdir. Without it, lost steps are not known.", "none"),
        Key("pattern", pattern, "The name of one checkpoint, {step} where its number stands.", "step_{step}"),
        Key("complete", file_name, "A file inside it that exists once it is whole; empty: its name is enough.", "COMPLETE"),
        Key("step_back", yes_or_no, "After two deaths within ten minutes of loading the same one, go on from the one before it. "
            "The training script must load `$KREA_RESUME_FROM`; the run directory must be mounted here.", "false"),
    ),
    "progress": (
        Key("pattern", progress_pattern, "What the log says at each step: a preset (" + ", ".join(f"`{p}`" for p in PRESETS)
            + ") or a regular expression, in which `(?P<step>...)` is the step.", "none"),
        Key("budget", parse_duration, "Between two signs of progress, where no phase is known.",
            "longest of step, checkpoint, evaluation"),
        Key("checkpoints", parse_duration, "A new whole checkpoint at least this often. Without it a new one is a sign of "
            "progress, and none is no sign of a hang.", "none"),
        Key("log_silence", parse_duration, "A log this long silent is a hang, twice as long (`second_look`) without another "
            "sign. Without it silence alone is only told.", "none"),
    ),
    "policy": (
        Key("mode", one_of("act", "observe"), "`observe` records and says what it would do.", "act"),
        Key("max_restarts", count(0), "Restarts after crashes and hangs within `window`.", "20"),
        Key("window", parse_duration, "What `max_restarts` is counted over.", "1d"),
        Key("no_progress_limit", count(1), "Restarts after the same failure without a newer checkpoint, then hold.", "2"),
        Key("never_restart_exit_codes", exit_codes, "Exit codes that mean: a restart makes no sense. 93 always is one.", "[93]"),
        Key("always_restart_exit_codes", exit_codes, "Exit codes after which the run is restarted whatever its logs say and "
            "even without a newer checkpoint, as long as the budget lasts. They win over the ones above, 93 included.", "[]"),
    ),
    "evidence": (
        Key("collect", yes_or_no, "Whether a hung step is looked at before it is killed ([evidence](evidence.md)).", "true"),
        Key("timeout", evidence_time, "How long that may take at most, and so how long it may put off the restart; 5 s to "
            "60 s.", "20s"),
        Key("py_spy", path, "Where py-spy is on the compute nodes, if it is not found (PATH, the rank's and krea_runner's own "
            "environment).", "none"),
    ),
}  # fmt: skip
