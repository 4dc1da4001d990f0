"""Rules about what a restart finds: the log, the queue, the environment, the evidence of a hang."""

import re
from collections.abc import Iterator

from krea_runner.launch.check import SHELLS, Hit, Job, Severity, interpreter
from krea_runner.launch.check_exit import parse_action
from krea_runner.launch.check_shell import (
    Shell,
    is_launch,
    pipelines,
    program_of,
    srun_options,
    srun_pairs,
    texts,
    variable_in,
)
from krea_runner.launch.sbatch_lines import header_end, option_pairs
from krea_runner.launch.shell import Command, Word, commands

# ------------------------------------------------------------------------------------------------- the file as a whole


def no_interpreter(job: Job) -> Iterator[Hit]:
    if not job.lines[0].startswith("#!"):
        yield Hit(1)


def bad_interpreter(job: Job) -> Iterator[Hit]:
    words = job.lines[0][2:].split() if job.lines[0].startswith("#!") else []
    if words and (not words[0].startswith("/") or not job.facts.exists(words[0])):
        yield Hit(1, saw=f"{words[0]} is not on this host" if words[0].startswith("/") else "not an absolute path")


def carriage_returns(job: Job) -> Iterator[Hit]:
    number = next((at for at, line in enumerate(job.lines, 1) if line.endswith("\r")), 0)
    if number:
        yield Hit(number, text=job.lines[number - 1].strip() + "\\r", fix=f"sed -i 's/\\r$//' {job.path}")


def unreadable_shell(job: Job) -> Iterator[Hit]:
    if job.unreadable is not None:
        yield Hit(job.unreadable.line, saw=str(job.unreadable), fix=f"bash -n {job.path}")
    elif not job.shells and job.lines[0].startswith("#!") and interpreter(job.lines[0]) not in SHELLS:
        saw = f"{interpreter(job.lines[0])} is not looked into; only the #SBATCH lines were"
        yield Hit(1, saw=saw, severity=Severity.NOTE, fix="nothing, or start it from a bash script")


def option_too_late(job: Job) -> Iterator[Hit]:
    end = header_end(job.lines)
    inside = _quoted_lines(job)
    for number, line in enumerate(job.lines[end:], end + 1):
        if line.startswith("#SBATCH") and number not in inside:
            yield Hit(number, saw=f"options end at line {end + 1}")


def _quoted_lines(job: Job) -> set[int]:
    """Lines inside of words and here-documents: a script that writes another script."""
    inside: set[int] = set()
    for shell in job.shells[:1]:
        for command in shell.flat:
            for word in (*command.words, *command.assignments):
                inside |= set(range(word.line + 1, word.line + word.text.count("\n") + 1))
            for redirect in command.redirects:
                if redirect.operator in {"<<", "<<-"}:
                    inside |= _here_document(job, redirect.target.line, redirect.target.value)
    return inside


def _here_document(job: Job, start: int, delimiter: str) -> set[int]:
    end = next((at for at in range(start, len(job.lines)) if job.lines[at].strip() == delimiter), len(job.lines))
    return set(range(start + 1, end + 1))


def option_misspelt(job: Job) -> Iterator[Hit]:
    for number, line in enumerate(job.lines[: header_end(job.lines)], 1):
        if re.match(r"\s*#\s*SBATCH\s+-", line, re.IGNORECASE) and not line.startswith("#SBATCH"):
            yield Hit(number, fix=re.sub(r"^\s*#\s*SBATCH", "#SBATCH", line, flags=re.IGNORECASE).strip())


def option_not_expanded(job: Job) -> Iterator[Hit]:
    for option in job.options.values():
        if re.search(r"\$\w|\$\{|\$\(|`|^~", option.value) and option.name not in {"comment", "job-name", "wrap"}:
            yield Hit(option.line, saw=f"{option.value} is taken literally")


# -------------------------------------------------------------------------------------------------------------- requeue


def log_truncated(job: Job) -> Iterator[Hit]:
    mode = job.option("open-mode") or job.facts.environ.get("SBATCH_OPEN_MODE", "")
    cluster = job.facts.cluster
    if mode.startswith("a") or (not mode and cluster and cluster.config.get("JobFileAppend") == "1"):
        return
    line = job.line_of("open-mode", "output", "error")
    yield Hit(line, text="" if line else "(no --open-mode=append)")


def redirect_truncates(job: Job) -> Iterator[Hit]:
    """`srun ... > train.log`, `| tee train.log`, under a name that the next attempt uses too."""
    for shell in job.shells:
        for command in shell.flat:
            if shell.is_work(command):
                for redirect in command.redirects:
                    if redirect.operator in {">", "&>", ">|"} and _same_next_time(job, redirect.target.text):
                        fix = f"{redirect.descriptor}{redirect.operator.rstrip('|').replace('>', '>>')}{redirect.target.text}"
                        yield Hit(redirect.target.line, fix=fix)
            words = [word.value for word in command.words]
            appends = re.search(r" (-\w*a|--append)\b", " " + " ".join(words))
            if (
                words[:1] == ["tee"]
                and len(words) > 1
                and not appends
                and _same_next_time(job, command.words[-1].text)
                and _piped_work(shell, command)
            ):
                yield Hit(command.line, fix=" ".join(["tee -a", *(word.text for word in command.words[1:])]))


def _same_next_time(job: Job, path: str) -> bool:
    """False also where a variable in it is not given a value in this script."""
    parts = [path]
    for name in re.findall(r"\$\{?([A-Za-z_]\w*)", path):
        given = _given(job, name)
        if not given and not name.startswith(("SLURM_", "HOME", "USER", "PWD")):
            return False
        parts += given
    whole = " ".join(parts)
    return not path.startswith(("/dev/", "&", ">(")) and not re.search(r"RESTART|ATTEMPT|date|RANDOM|mktemp", whole)


def _given(job: Job, name: str) -> list[str]:
    """All that the script assigns to a variable, as `name=value`."""
    return [
        word.value for shell in job.shells for command in shell.flat
        for word in (*command.assignments, *command.words) if re.match(rf"{name}\+?=", word.value)
    ]  # fmt: skip


def _piped_work(shell: Shell, tee: Command) -> bool:
    return any(tee in each.commands and any(map(shell.is_work, each.commands)) for each in pipelines(shell.sequence))


def requeue_forbidden(job: Job) -> Iterator[Hit]:
    if "no-requeue" in job.options:
        yield Hit(job.options["no-requeue"].line)


def requeue_not_asked(job: Job) -> Iterator[Hit]:
    if "requeue" in job.options or "no-requeue" in job.options or "SBATCH_REQUEUE" in job.facts.environ:
        return
    default = job.facts.cluster.config.get("JobRequeue") if job.facts.cluster else None
    if default == "0":
        yield Hit(0, text="(no --requeue)", saw="JobRequeue=0 on this cluster")
    else:
        saw = "it works here because JobRequeue=1" if default == "1" else "what JobRequeue is here was not seen"
        yield Hit(0, text="(no --requeue)", saw=saw, severity=Severity.NOTE if default == "1" else Severity.WARNING)


def own_requeue(job: Job) -> Iterator[Hit]:
    for shell in job.shells:
        for command in shell.flat:
            trap = command.kind == "simple" and len(command.words) > 2 and command.words[0].value == "trap"
            for each in commands(parse_action(command.words[1].value)) if trap else [command]:
                words = [word.value for word in program_of(each)]
                if words[:2] in (["scontrol", "requeue"], ["scontrol", "requeuehold"]):
                    yield Hit(command.line)


# ----------------------------------------------------------------------------------------------------------------- srun


def gang_outlives_rank(job: Job) -> Iterator[Hit]:
    cluster = job.facts.cluster
    if cluster and cluster.config.get("KillOnBadExit") == "1":
        return
    exported = _set_in_script(job, "SLURM_KILL_BAD_EXIT")
    for shell in job.shells:
        for command in shell.flat:
            program = program_of(command)
            if not is_launch(program) or program[0].value.rpartition("/")[2] != "srun":
                continue
            options, hidden = srun_options(program), _held_options(job, program)
            if re.search(r"-K(?!0)|--kill-on-bad-exit(?!=0)", hidden or ""):
                continue
            kills = [
                re.sub(r"^(-K|--kill-on-bad-exit)=?", "", each) for each in options if re.match(r"-K|--kill-on", each)
            ]
            if (kills and kills[-1] != "0") or (not kills and exported not in {None, "0"}) or _is_single(job, options):
                continue
            yield Hit(
                command.line,
                saw="unless a variable here says it" if hidden is None else "",
                severity=Severity.NOTE if hidden is None else None,
            )


def _held_options(job: Job, srun: tuple[Word, ...]) -> str | None:
    """What the script puts into the variables that stand among srun's options, as in `srun $ARGS ...`, or are all of its
    command; None where one of them is not given a value here."""
    pairs, command = srun_pairs(srun)
    held = []
    for word in (*(option for option, _ in pairs), *command[:1]):
        if name := variable_in(word):
            given = _given(job, name)
            if not given:
                return None
            held += given
    return " ".join(held)


def _is_single(job: Job, srun: list[str]) -> bool:
    """One task only. Numbers that are computed are not known: then it may be many."""
    asked: dict[str, str] = {name: option.value for name, option in job.options.items()}
    asked |= {name: value for name, value in option_pairs([part for each in srun for part in each.split("=", 1)])}
    tasks = asked.get("ntasks", asked.get("ntasks-per-node", "1"))
    nodes = asked.get("nodes", "1")
    return (tasks, nodes) == ("1", "1")


def _set_in_script(job: Job, name: str) -> str | None:
    """The last value that the script gives to a variable, empty when it is computed; None where it gives none."""
    value = None
    for shell in job.shells:
        for command in shell.flat:
            for word in (*command.assignments, *command.words):
                for each in word.value.removeprefix("--export=").split(","):
                    key, equals, given = each.partition("=")
                    if equals and key == name:
                        value = "" if word.expands else given
    return value


# ---------------------------------------------------------------------------------------------------------- environment

# Seen to reach the job of an `sbatch` that is called inside a job (22.05.8); sbatch sets the other SLURM_* afresh.
LEAKS = (
    "SLURM_CPU_BIND", "SLURM_MEM_BIND", "SLURM_ARRAY_", "SLURM_CPUS_PER_TASK", "SLURM_DISTRIBUTION", "SLURM_NTASKS",
    "SLURM_NPROCS", "SLURM_STEP", "SLURM_GPU", "SLURM_TRES", "SLURM_HINT", "SLURM_EXPORT_ENV", "SLURM_THREADS_PER_CORE",
    "SLURM_MEM_PER_", "SLURM_KILL_BAD_EXIT", "SRUN_", "PMI_", "PMIX_",
)  # fmt: skip
_SUBMIT = {"sbatch", "salloc"}


def inherited_variables(job: Job) -> Iterator[Hit]:
    """Of the environment from which this would be submitted now."""
    if job.ours is not None or _exports(job) not in {"ALL", ""}:
        return
    cleaned = " ".join(text for command in _named(job, "unset") for text in texts(command))
    leaking = sorted(
        name for name in job.facts.environ
        if name.startswith(LEAKS) and name not in cleaned and not re.search(rf"\$\{{!{name.split('_')[0]}_", cleaned)
    )  # fmt: skip
    if leaking:
        shown = ", ".join(leaking[:4]) + (f" and {len(leaking) - 4} more" if len(leaking) > 4 else "")
        clean = " ".join(f"-u {name}" for name in leaking)
        yield Hit(0, text=f"environment: {shown}", fix=f"env {clean} sbatch {job.path}", saw=_harm_of(leaking))


def _harm_of(leaking: list[str]) -> str:
    return "SLURM_CPU_BIND pins every rank to one job's cores" if any("CPU_BIND" in name for name in leaking) else ""


def _exports(job: Job) -> str:
    return (job.option("export") or job.facts.environ.get("SBATCH_EXPORT", "")).split(",")[0].upper()


def _named(job: Job, *names: str) -> Iterator[Command]:
    for shell in job.shells:
        for command in shell.flat:
            program = program_of(command)
            if program and program[0].value.rpartition("/")[2] in names:
                yield command


def submits_with_everything(job: Job) -> Iterator[Hit]:
    """sbatch inside the script. What `env` is given must be a name: `${!SLURM_@}` behind -u is not one."""
    for command in _named(job, *_SUBMIT):
        words = [word.value for word in command.words]
        program = [word.value for word in program_of(command)]
        before = " ".join(words[: len(words) - len(program)]) + " "
        cleaned = re.search(r"\benv .*?(?<= )(-i|-|--ignore-environment|(-u ?|--unset[= ])[A-Za-z_]\w*) ", before)
        if cleaned or re.search(r" --export[= ](NONE|NIL)\b", " ".join(program), re.IGNORECASE):
            continue
        if program[0].rpartition("/")[2] == "sbatch":
            yield Hit(command.line, fix=" ".join([program[0], "--export=NONE", *program[1:]])[:100])
        else:
            yield Hit(command.line, fix=" ".join(["env -u SLURM_CPU_BIND", *program])[:100])


def export_none(job: Job) -> Iterator[Hit]:
    if _exports(job) not in {"NONE", "NIL"}:
        return
    unset = any("SLURM_EXPORT_ENV" in text for command in _named(job, "unset") for text in texts(command))
    if unset or _set_in_script(job, "SLURM_EXPORT_ENV") is not None:
        return
    for command in _named(job, "srun"):
        if not any(each.startswith("--export") for each in srun_options(program_of(command))):
            yield Hit(command.line, saw=f"--export={_exports(job)} on line {job.line_of('export')}")
            return


# ------------------------------------------------------------------------------------------------------------- evidence

# The name that every torch understands, the one of 2.13.0 and newer, a value.
FLIGHT_RECORDER = (
    ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE", "2000"),
    ("TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_FR_DUMP_ON_TIMEOUT", "1"),
    ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_FR_DUMP_TEMP_FILE", "/path/that/all/nodes/share/fr_rank_"),
)
_PYTHON = re.compile(r"(.*/)?(python[\d.]*|torchrun|deepspeed|accelerate)$")
_TORCH = re.compile(r"torchrun|torch\.distributed|torch|deepspeed|accelerate|lightning|megatron|nemo", re.IGNORECASE)


def flight_recorder_missing(job: Job) -> Iterator[Hit]:
    command = _training(job)
    if command is None:
        return
    missing = [(old, value) for old, new, value in FLIGHT_RECORDER if not (_is_set(job, old) or _is_set(job, new))]
    if missing:
        fix = "[env] " + ", ".join(f'{name} = "{value}"' for name, value in missing)
        certain = _TORCH.search("\n".join(job.lines)) is not None
        yield Hit(
            -job.ours.command_line if job.ours else command.line,
            saw="not set: " + ", ".join(name for name, _ in missing),
            fix=fix if job.ours else "export " + " ".join(f"{name}={value}" for name, value in missing),
            severity=None if certain else Severity.NOTE,
        )


def flight_recorder_off(job: Job) -> Iterator[Hit]:
    bad = {
        "TORCH_FR_BUFFER_SIZE": "0", "TORCH_NCCL_TRACE_BUFFER_SIZE": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }  # fmt: skip
    for shell in job.shells:
        for command in shell.flat:
            for word in (*command.assignments, *command.words):
                name, equals, value = word.value.partition("=")
                if equals and bad.get(name) in {value, {"false": "0", "no": "0"}.get(value.lower(), value)}:
                    yield Hit(word.line)


def _training(job: Job) -> Command | None:
    """The first command that starts a program in Python."""
    for shell in job.shells:
        for command in filter(shell.is_work, shell.flat):
            held = {name for word in command.words for name in re.findall(r"\$\{?(\w+)", word.value)}
            given = [each.partition("=")[2].strip("( )") for name in held for each in _given(job, name)]
            started = (*(word.value for word in command.words), *(part for each in given for part in each.split()))
            python = any(_PYTHON.match(each) for each in started)
            if python and command.kind == "simple":
                return command
    return None


def _is_set(job: Job, name: str) -> bool:
    if _set_in_script(job, name) is not None or f",{name}=" in "," + (job.option("export") or ""):
        return True
    return name in job.facts.environ and _exports(job) in {"", "ALL"}
