"""RunConfig ↔ JSON, as the history keeps it."""

import json
from dataclasses import asdict, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from krea_runner.model import Budgets, CheckpointSpec, EvidenceSpec, Gang, Policy, ProgressSpec, RunConfig

T = TypeVar("T")


def config_to_json(config: RunConfig) -> str:
    plain = {field.name: getattr(config, field.name) for field in fields(config)}
    plain |= {"env": dict(config.env), "slurm": dict(config.slurm)}
    plain |= {part: asdict(plain[part]) for part in ("gang", "budgets", "checkpoint", "policy", "evidence", "progress")}
    return json.dumps(plain, default=str, sort_keys=True)


def config_from_json(text: str) -> RunConfig:
    """Fields that a newer version added are left out, those that an older one did not know get their default."""
    plain: dict[str, Any] = json.loads(text)
    checkpoint = plain["checkpoint"]
    if checkpoint.get("directory") is not None:
        checkpoint["directory"] = Path(checkpoint["directory"])
    policy = plain["policy"]
    for codes in ("never_restart_exit_codes", "always_restart_exit_codes"):
        if codes in policy:
            policy[codes] = tuple(policy[codes])
    budgets = plain["budgets"]
    budgets["fixed"] = tuple(budgets.get("fixed", [key.removesuffix("_s") for key in budgets if key.endswith("_s")]))
    slurm = plain["slurm"]
    if "extra" in slurm:
        slurm["extra"] = tuple(slurm["extra"])
    command = plain["command"]
    plain |= {
        "run_dir": Path(plain["run_dir"]),
        "workdir": Path(plain["workdir"]),
        "job_log": Path(plain["job_log"]) if plain.get("job_log") else None,
        "command": command if isinstance(command, str) else tuple(command),
        "env": MappingProxyType(plain["env"]),
        "slurm": MappingProxyType(slurm),
        "gang": _known(Gang, plain["gang"]),
        "budgets": _known(Budgets, budgets),
        "checkpoint": _known(CheckpointSpec, checkpoint),
        "policy": _known(Policy, policy),
        "evidence": _known(EvidenceSpec, plain.get("evidence", {})),
        "progress": _known(ProgressSpec, plain.get("progress", {})),
    }
    return _known(RunConfig, plain)


def _known(kind: type[T], values: dict[str, Any]) -> T:
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in values.items() if name in names})
