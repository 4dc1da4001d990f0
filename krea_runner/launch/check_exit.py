"""Rules about exit codes and signals: does Slurm, and so whoever restarts the job, hear how the work ended?"""

import re
from collections.abc import Iterator

from krea_runner.launch.check import Hit, Job
from krea_runner.launch.check_shell import Shell, pipelines, program_of, statements, texts
from krea_runner.launch.shell import Command, Pipeline, Sequence, Statement, within

# A right side of `||` that goes on as if nothing had happened.
_HARMLESS = frozenset("true : echo printf sleep date logger rm touch wait sync mail".split())
_ENDS = frozenset({"exit", "return", "false", "kill", "exec", "break"})
_STATUS = re.compile(r"\$\?|\$\{\?|PIPESTATUS")


def pipe_hides_exit(job: Job) -> Iterator[Hit]:
    for shell in job.shells:
        for pipeline in pipelines(shell.sequence):
            first = pipeline.commands[0]
            if len(pipeline.commands) < 2 or not any(shell.is_work(each) for each in pipeline.commands[:-1]):
                continue
            following = shell.after(pipeline.commands[-1])[:2]
            read = any("PIPESTATUS" in text for each in following for text in texts(each))
            if not read and not shell.option_at("pipefail", first):
                last = program_of(pipeline.commands[-1])
                yield Hit(pipeline.line, saw=f"the exit code is {last[0].value}'s" if last else "")


def or_hides_exit(job: Job) -> Iterator[Hit]:
    for shell in job.shells:
        for statement in statements(shell.sequence):
            yield from _or_true(shell, statement)


def _or_true(shell: Shell, statement: Statement) -> Iterator[Hit]:
    for at, operator in enumerate(statement.operators):
        left, right = statement.pipelines[at], statement.pipelines[at + 1]
        if operator == "||" and _is_work(shell, left) and _is_harmless(right):
            yield Hit(right.line, saw=f"`{program_words(right)}` is what counts")


def _is_harmless(pipeline: Pipeline) -> bool:
    """Nothing in it ends the script or looks at the status."""
    found = [part for command in pipeline.commands for part in within(command) if part.kind == "simple" and part.words]
    return bool(found) and all(each.words[0].value in _HARMLESS for each in found)


def program_words(pipeline: Pipeline) -> str:
    first = next((part for part in within(pipeline.commands[0]) if part.words), None)
    return " ".join(word.text for word in first.words) if first else ""


def end_hides_exit(job: Job) -> Iterator[Hit]:
    for shell in job.shells:
        yield from _hidden_end(shell, shell.sequence)


def _hidden_end(shell: Shell, sequence: Sequence) -> Iterator[Hit]:
    """The last statement that does the work, and whether what follows it still knows how it ended."""
    waits = any(statement.background and _works(shell, statement) for statement in statements(shell.sequence))
    places = [
        at for at, statement in enumerate(sequence)
        if not statement.background and (_works(shell, statement) or (waits and _waits_for_one(statement)))
    ]  # fmt: skip
    if not places:
        return
    work, rest = sequence[places[-1]], sequence[places[-1] + 1 :]
    command = work.pipelines[0].commands[0]
    kinds = {part.kind for pipeline in work.pipelines for each in pipeline.commands for part in within(each)}
    if kinds & {"for", "while", "until", "select"} or any(_or_true(shell, work)):
        return  # a loop retries, or counts by itself; the other rule has said it
    if command.kind in {"if", "case"}:
        yield from _hidden_by_branch(shell, work, command)
        return
    if command.kind in {"(", "{"} and len(work.pipelines) == 1 and len(work.pipelines[0].commands) == 1:
        yield from _hidden_end(shell, command.bodies[0])
    if not rest or _handles(work) or (shell.option_at("errexit", command) and not work.operators):
        return
    if len(work.pipelines) > 1 and work.operators[-1] == "||" and not _is_harmless(work.pipelines[-1]):
        return  # || something of the author's own
    yield from _hidden_after(work, rest)


def _hidden_after(work: Statement, rest: Sequence) -> Iterator[Hit]:
    last = rest[-1]
    caught = _caught(rest[0])
    if _leaves(rest[0], bare=True):
        return
    if caught is not None:
        variable = re.compile(rf"\$\{{?#?{re.escape(caught)}\b") if caught else None
        later = [text for each in rest for text in _deciding_texts(each)]
        if not caught or any(variable is not None and variable.search(text) for text in later):
            return
    saw = f"the work, on line {work.line}, may have failed"
    yield Hit(last.line, saw=saw if caught is None else f"{saw}: its code is caught and never used")


def _hidden_by_branch(shell: Shell, work: Statement, command: Command) -> Iterator[Hit]:
    """`if srun ...; then ...; else echo failed; fi`"""
    in_condition = any(
        shell.is_work(each) for statement in command.condition for p in statement.pipelines for each in p.commands
    )
    if in_condition and not _handles(work):
        yield Hit(command.line, saw="no branch ends with the code")


def _handles(statement: Statement) -> bool:
    """It ends the script, or reads the status, by itself. Inside a subshell `exit` ends the subshell, with its code."""
    parts = [part for pipeline in statement.pipelines for each in pipeline.commands for part in within(each)]
    first_words = {part.words[0].value for part in parts if part.kind == "simple" and part.words}
    return bool(first_words & _ENDS) or any(_STATUS.search(text) for part in parts for text in texts(part))


def _caught(statement: Statement) -> str | None:
    """The variable that takes the status, empty where something else reads it; None where nothing does."""
    for pipeline in statement.pipelines:
        for command in pipeline.commands:
            for part in within(command):
                for word in (*part.assignments, *part.words):
                    match = re.fullmatch(r"(\w+)=[\"']?\$(\?|\{PIPESTATUS\[\d+\]\}|\{\?\})[\"']?", word.text)
                    if match:
                        return match[1]
            if any(_STATUS.search(text) for text in texts(command)):
                return ""
    return None


def _deciding_texts(statement: Statement) -> Iterator[str]:
    for pipeline in statement.pipelines:
        for command in pipeline.commands:
            for part in within(command):
                if not (part.words and part.words[0].value in {"echo", "printf", "logger"}):
                    yield from (word.text for word in (*part.words, *part.assignments))


def _leaves(statement: Statement, *, bare: bool = False) -> bool:
    words = statement.pipelines[0].commands[0].words
    return (
        bool(words) and words[0].value in {"exit", "return"} and (len(words) == 1 or not bare or words[1].value != "0")
    )


def _works(shell: Shell, statement: Statement) -> bool:
    return any(_is_work(shell, pipeline) for pipeline in statement.pipelines)


def _is_work(shell: Shell, pipeline: Pipeline) -> bool:
    return any(shell.is_work(command) for command in pipeline.commands)


# ------------------------------------------------------------------------------------------------------------ background


def background_without_wait(job: Job) -> Iterator[Hit]:
    for shell, statement in _in_background(job):
        waits = _waits_after(shell, statement)
        if not waits:
            yield Hit(statement.line)


def bare_wait_hides_exit(job: Job) -> Iterator[Hit]:
    for shell, statement in _in_background(job):
        waits = _waits_after(shell, statement)
        if waits and not any(len(wait.words) > 1 for wait in waits):
            yield Hit(waits[-1].line, saw=f"started on line {statement.line}")
            return


def _in_background(job: Job) -> Iterator[tuple[Shell, Statement]]:
    for shell in job.shells:
        for statement in statements(shell.sequence, into_functions=False):
            if statement.background and _works(shell, statement):
                yield shell, statement


def _waits_after(shell: Shell, statement: Statement) -> list[Command]:
    return [
        each
        for each in shell.after(statement.pipelines[-1].commands[-1])
        if each.words and each.words[0].value == "wait"
    ]


def _waits_for_one(statement: Statement) -> bool:
    words = statement.pipelines[-1].commands[-1].words
    return len(words) > 1 and words[0].value == "wait"


def idle_end(job: Job) -> Iterator[Hit]:
    """`sleep infinity`, `tail -f` as the last thing: nodes are kept after the work has died."""
    for shell in job.shells[:1]:
        last = shell.sequence[-1] if shell.sequence else None
        program = program_of(last.pipelines[-1].commands[0]) if last else ()
        text = " ".join(word.value for word in program)
        if last and not last.background and re.match(r"sleep (infinity|inf|\d+d|\d{5,})\b|tail (\S+ )*-\w*[fF]", text):
            yield Hit(last.line)


# --------------------------------------------------------------------------------------------------------------- signals


def _traps(shell: Shell) -> Iterator[tuple[Command, str, frozenset[str]]]:
    """Command, action and signals of each `trap` outside of functions."""
    for statement in statements(shell.sequence, into_functions=False):
        for pipeline in statement.pipelines:
            for command in pipeline.commands:
                words = [word.value for word in command.words]
                words = [word for word in words if word != "--"]
                if command.kind == "simple" and len(words) > 2 and words[0] == "trap" and words[1] != "-":
                    yield command, words[1], frozenset(signal_name(word) for word in words[2:])


_NUMBERS = {"0": "EXIT", "1": "HUP", "2": "INT", "10": "USR1", "12": "USR2", "15": "TERM", "18": "CONT"}


def signal_name(word: str) -> str:
    name = word.upper().removeprefix("SIG")
    return _NUMBERS.get(name, name)


def asked_signal(job: Job) -> tuple[str, str, int] | None:
    """(`B`, `R` or both or none, name, seconds before the limit) of --signal; 60 s unless given (sbatch.1)."""
    match = re.fullmatch(r"(?:([BR]+):)?(\w+)(?:@(\d+))?", job.option("signal") or "")
    return (match[1] or "", signal_name(match[2]), int(match[3] or 60)) if match else None


def trap_ignores_signal(job: Job) -> Iterator[Hit]:
    for shell in job.shells:
        for command, action, signals in _traps(shell):
            deadly = signals & {"TERM", "INT"}
            if action == "" and deadly and any(shell.is_work(each) for each in shell.after(command)):
                yield Hit(command.line, saw=f"SIG{min(deadly)} is ignored by the ranks too")


def trap_ends_well(job: Job) -> Iterator[Hit]:
    for shell in job.shells:
        for command, action, _ in _traps(shell):
            if re.search(r"\bexit 0\b", action):
                yield Hit(command.line)


def signal_misses_trap(job: Job) -> Iterator[Hit]:
    """In a script of ours the traps are for what comes from elsewhere; an empty one says that the ranks alone want it."""
    asked = asked_signal(job)
    for shell in job.shells[:1] if asked and "B" not in asked[0] and job.ours is None else ():
        for command, action, signals in _traps(shell):
            if asked and asked[1] in signals and action:
                fix = f"#SBATCH --signal=B:{asked[1]}@{asked[2]}"
                yield Hit(job.options["signal"].line, saw=f"the trap is on line {command.line}", fix=fix)


def signal_kills_script(job: Job) -> Iterator[Hit]:
    asked = asked_signal(job)
    if not asked or "B" not in asked[0] or asked[1] in {"CONT", "CHLD", "URG", "WINCH"} or not job.shells:
        return
    shell = job.shells[0]
    # In functions too: what sets up the traps may be one.
    traps = [each.words for each in shell.flat if each.words and each.words[0].value == "trap"]
    trapped = {signal_name(word.value) for words in traps for word in words[2:]}
    replaced = any(each.words and each.words[0].value == "exec" and len(each.words) > 1 for each in shell.flat)
    if asked[1] not in trapped and not replaced:
        yield Hit(job.options["signal"].line, saw=f"nothing in the script traps {asked[1]}")


def trap_waits_for_foreground(job: Job) -> Iterator[Hit]:
    asked = asked_signal(job)
    if not asked or "B" not in asked[0] or not job.shells:
        return
    shell = job.shells[0]
    for command, _, signals in _traps(shell):
        if asked[1] not in signals:
            continue
        after = shell.after(command)
        for statement in statements(shell.sequence, into_functions=False):
            here = statement.pipelines[-1].commands[-1]
            if (
                not statement.background
                and any(each is here for each in after)
                and here.kind == "simple"
                and _works(shell, statement)
            ):
                yield Hit(statement.line, saw=f"the trap for {asked[1]} on line {command.line} runs only after it")
                return


def exec_skips_trap(job: Job) -> Iterator[Hit]:
    for shell in job.shells[:1]:
        trapped = [command for command, _, _ in _traps(shell)]
        for at, statement in enumerate(shell.sequence):
            words = statement.pipelines[-1].commands[0].words
            if len(words) < 2 or words[0].value != "exec":
                continue
            rest = shell.sequence[at + 1 :]
            if rest and len(statement.pipelines) == 1:
                yield Hit(statement.line, saw=f"line {rest[0].line} is never reached")
            elif any(command.line < statement.line for command in trapped):
                yield Hit(statement.line, saw=f"the trap on line {trapped[0].line} is gone")
