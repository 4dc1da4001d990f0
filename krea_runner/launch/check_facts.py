"""A run.toml or a batch script with what is known about it here, checked. The only part of the checks that looks at the world."""

import os
import pwd
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

from krea_runner.config.lines import key_lines
from krea_runner.config.load import load_run
from krea_runner.errors import ConfigError, KreaRunnerError, SchedulerError
from krea_runner.launch.check import Facts, Ours, Report, Severity, check, read_job
from krea_runner.launch.check_rules import RULES
from krea_runner.launch.render import render
from krea_runner.model import CheckpointSpec, RunConfig
from krea_runner.observe.checkpoints.times import whole_since
from krea_runner.observe.mounts import file_system
from krea_runner.proc import clean_environment
from krea_runner.rundir import RunDir
from krea_runner.schedulers.slurm_facts import ClusterFacts, cluster_facts
from krea_runner.transport.mirror import exists_there

MAX_BYTES = 1 << 20
# The option of sbatch that each key of run.toml becomes.
_KEYS = {"nodes": ("gang", "nodes"), "ntasks_per_node": ("gang", "ranks_per_node"), "job_name": ("run", "name"),
         "chdir": ("run", "workdir"), "output": ("run", "dir")}  # fmt: skip


def check_script(
    path: Path, *, every_s: float | None = None, startup_s: float | None = None, timeout_s: float = 10.0
) -> Report:
    """Of a batch script, as if it were submitted from this folder with this environment.

    Raises: ConfigError when it cannot be read.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        hint = "krea-runner check wants a batch script or a run.toml"
        raise ConfigError(f"reading {path}: {error.strerror}", hint=hint) from error
    if len(data) > MAX_BYTES or b"\0" in data:
        raise ConfigError(f"{path} is no text of at most 1 MiB: is that a batch script?")
    cluster, unseen = _cluster(timeout_s)
    facts = _facts(cluster, unseen, os.environ, every_s, startup_s, None)
    return check(read_job(str(path), data.decode(errors="replace"), facts), RULES)


def check_run(
    path: Path, config: RunConfig | None = None, *, every_s: float | None = None, startup_s: float | None = None,
    timeout_s: float = 10.0,
) -> Report:  # fmt: skip
    """Of the script that a run.toml becomes; `config` is what was read from it, if it was.

    Raises: ConfigError.
    """
    config = config or load_run(path)
    source = path.read_text(encoding="utf-8")
    cluster, unseen = _cluster(timeout_s, config.ssh_host) if config.scheduler == "slurm" else (None, "")
    every_s = every_s or checkpoint_interval_s(config.checkpoint)
    saving_s = config.budgets.checkpoint_s if config.checkpoint.directory else None
    environ = clean_environment(os.environ)
    facts = _facts(cluster, unseen, environ, every_s, startup_s or config.budgets.startup_s, saving_s)
    if config.files == "sftp":
        exists = partial(exists_there, config)
        facts = replace(facts, exists=exists, file_system=lambda path: "", seen_from=config.ssh_host)
    script = str(RunDir(config.run_dir).script)
    return check(read_job(script, render(config), facts, _ours(path, source, config)), RULES)


def checkpoint_interval_s(spec: CheckpointSpec) -> float | None:
    """The median time between the newest whole checkpoints of the run's earlier jobs; None with fewer than three: a gap
    alone may be a night in the queue."""
    times = whole_since(spec, most=9)
    gaps = [later - earlier for later, earlier in pairwise(times) if later > earlier]
    return median(gaps) if len(gaps) > 1 else None


def _ours(path: Path, source: str, config: RunConfig) -> Ours:
    lines = key_lines(source)

    def line(table: str, key: str) -> int:
        return lines.get((table, key)) or lines.get((table,), 1)

    options = {key: line("slurm", key) for key in config.slurm if key != "extra"}
    options |= {
        option[2:].partition("=")[0].replace("-", "_"): line("slurm", "extra")
        for option in config.slurm.get("extra", ())
    }
    options |= {option: line(*key) for option, key in _KEYS.items()}
    directories = [(str(config.run_dir), line("run", "dir"), "the run directory")]
    if config.checkpoint.directory is not None:
        directories.append((str(config.checkpoint.directory), line("checkpoint", "dir"), "the checkpoints' directory"))
    return Ours(
        str(path), tuple(source.split("\n")), options, line("run", "command"), tuple(directories), config.scheduler
    )


def _cluster(timeout_s: float, ssh_host: str = "") -> tuple[ClusterFacts | None, str]:
    try:
        if ssh_host:
            from krea_runner.transport.ssh import open_ssh

            return cluster_facts(timeout_s=timeout_s, transport=open_ssh(ssh_host)), ""
        return cluster_facts(timeout_s=timeout_s), ""
    except SchedulerError as error:
        return None, str(error)


def _facts(
    cluster: ClusterFacts | None, unseen: str, environ: Mapping[str, str], every_s: float | None, startup_s: float | None,
    saving_s: float | None,
) -> Facts:  # fmt: skip
    try:
        mounts = Path("/proc/self/mountinfo").read_text()
    except OSError:
        mounts = ""  # then no file system has a type, and nothing is said of it
    return Facts(
        cluster=cluster,
        unseen=unseen,
        environ=environ,
        defaults=_defaults(cluster),
        file_system=partial(_type_of, mounts),
        exists=os.path.exists,
        submit_dir=str(Path.cwd()),
        checkpoint_every_s=every_s,
        startup_s=startup_s,
        checkpoint_s=saving_s,
    )


def _defaults(cluster: ClusterFacts | None) -> str:
    """Of the home that passwd names, as Slurm has it."""
    if cluster is None or "user_defaults" not in cluster.config.get("CliFilterPlugins", ""):
        return ""
    try:
        with Path(pwd.getpwuid(os.getuid()).pw_dir, ".slurm", "defaults").open("rb") as file:
            return file.read(MAX_BYTES).decode(errors="replace")
    except (OSError, KeyError):
        return ""  # Slurm, too, then goes without


def _type_of(mounts: str, path: str) -> str:
    kind = file_system(Path(path), mounts)[0]
    return "" if kind in {"unknown", "autofs"} else kind


def refuse(report: Report, path: Path) -> KreaRunnerError:
    """What `submit` says when it does not."""
    errors = report.count(Severity.ERROR)
    word = "error" if errors == 1 else "errors"
    return KreaRunnerError(
        f"not submitted: {errors} {word} in {path}",
        hint=f"with reasons: krea-runner check {path}; submit all the same: krea-runner submit --no-check {path}",
    )
