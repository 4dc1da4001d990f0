"""What `doctor` says of a Slurm cluster. A check that is ok and has a hint is a warning."""

from collections.abc import Mapping

from krea_runner.errors import SchedulerError
from krea_runner.schedulers import Check
from krea_runner.schedulers.slurm_cli import ask, sacct_argv
from krea_runner.schedulers.slurm_parse import ACCOUNTING_OFF, parse_config, printable
from krea_runner.transport import HERE, Transport

COMMANDS = ("sbatch", "squeue", "scontrol", "scancel")
# A supervisor from cron looks once a minute; an end that is forgotten sooner than a few looks may be missed.
MIN_JOB_AGE_S = 120


def checks(transport: Transport = HERE) -> list[Check]:
    """Stops at the first thing without which the rest would only wait for its timeouts."""
    try:
        missing = [command for command in COMMANDS if not transport.has(command)]
    except SchedulerError as error:
        return [Check("connection", False, str(error), error.hint or "")]
    found = [Check("connection", True, transport.describe())] if transport.host else []
    if missing:
        hint = "run this on a login node of the cluster; Slurm's commands must be on PATH, e.g. module load slurm"
        return [*found, Check("commands", False, f"not on PATH: {', '.join(missing)}", hint)]
    version = _said(["sbatch", "--version"], transport)
    found.append(Check("commands", True, f"{', '.join(COMMANDS)} found, {version}"))
    try:
        ping = ask(["scontrol", "ping"], doing="asking the controller", transport=transport)
        shown = ask(["scontrol", "show", "config"], doing="asking for the configuration", transport=transport)
        config = parse_config(shown.stdout)
    except SchedulerError as error:
        hint = error.hint or "nothing can be supervised until it answers; ask your operators"
        return [*found, Check("controller", False, str(error), hint)]
    version = config.get("SLURM_VERSION", "of unknown version")
    found.append(Check("controller", True, f"Slurm {version}: {printable(ping.stdout)}"))
    return [*found, _nodes(transport), _requeue(config), _preemption(config), _accounting(config, transport)]


def _nodes(transport: Transport) -> Check:
    detail = _said(["sinfo", "-h", "-o", "%R %a, nodes busy/idle/other/all %F"], transport)
    return Check("partitions", True, detail or "none that you may use", "" if detail else "sinfo -s")


def _requeue(config: Mapping[str, str]) -> Check:
    by_default = config.get("JobRequeue", "?")
    return Check("requeue", True, f"JobRequeue={by_default}; our batch scripts ask for it themselves (--requeue)")


def _preemption(config: Mapping[str, str]) -> Check:
    mode = config.get("PreemptMode", "?")
    hint = "a preempted job is ended, not requeued: submit to a partition or QOS that nobody preempts"
    return Check("preemption", True, f"PreemptMode={mode}", hint if "CANCEL" in mode else "")


def _accounting(config: Mapping[str, str], transport: Transport) -> Check:
    kept = config.get("MinJobAge", "?")
    try:
        ask(sacct_argv(["1"]), doing="asking accounting", transport=transport)
    except SchedulerError as error:
        if ACCOUNTING_OFF not in error.stderr:
            return Check("accounting", True, str(error), error.hint or "try it by hand: sacct")
        age = kept.split()[0]
        short = age.isdigit() and 0 < int(age) < MIN_JOB_AGE_S
        hint = f"Slurm forgets how a job ended after {kept}: supervise more often than that, e.g. --every 10s"
        return Check("accounting", True, f"off; an ended job is known for MinJobAge={kept}", hint if short else "")
    return Check("accounting", True, f"{config.get('AccountingStorageType', '?')}, sacct answers; MinJobAge={kept}")


def _said(argv: list[str], transport: Transport) -> str:
    try:
        return printable(ask(argv, doing=f"running {argv[0]}", transport=transport).stdout)
    except SchedulerError as error:
        return str(error)
