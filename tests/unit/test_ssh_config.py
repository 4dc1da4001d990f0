"""Which login node a run goes through, and what is made of ~/.ssh/config."""

from pathlib import Path

import pytest

from krea_runner.config import load_run
from krea_runner.config.stored import config_from_json, config_to_json
from krea_runner.errors import ConfigError

pytest.importorskip("paramiko", reason="paramiko is not installed: pip install 'krea-runner[ssh]'")

from krea_runner.transport.ssh import remote_line
from krea_runner.transport.ssh_config import read_config, route, split_hop


def load(tmp_path: Path, lines: str):
    path = tmp_path / "run.toml"
    path.write_text(f'[run]\nname = "a"\ncommand = ["true"]\n{lines}\n')
    return load_run(path)


def test_runs_through_one_login_node_are_one_endpoint(tmp_path: Path) -> None:
    config = load(tmp_path, 'transport = "ssh"\nssh_host = "login1"')
    assert config.endpoint == "slurm@login1"
    assert config_from_json(config_to_json(config)) == config
    assert load(tmp_path, "").endpoint == "slurm"


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ('transport = "ssh"', "needs ssh_host"),
        ('ssh_host = "login1"', 'goes with transport = "ssh"'),
        ('transport = "ssh"\nssh_host = "login1"\nscheduler = "local"', 'goes with scheduler = "slurm"'),
        ('transport = "ssh"\nssh_host = "-oProxyCommand=id"', "the name of a host"),
        ('transport = "ssh"\nssh_host = "me@login1"', "~/.ssh/config"),
        ('transport = "telnet"', "one of 'local', 'ssh'"),
    ],
)
def test_keys_that_make_no_sense_together_are_problems(tmp_path: Path, lines: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, lines)
    assert any(problem in line for line in caught.value.problems), caught.value.problems


@pytest.mark.parametrize(
    ("hop", "parts"),
    [
        ("gate", (None, "gate", None)),
        ("me@gate:2222", ("me", "gate", 2222)),
        ("ssh://me@gate", ("me", "gate", None)),
        ("me@[::1]:22", ("me", "::1", 22)),
    ],
)
def test_a_jump_host_is_read_as_openssh_writes_it(hop: str, parts: tuple[object, ...]) -> None:
    assert split_hop(hop) == parts


def test_the_route_goes_through_all_jump_hosts_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "more").write_text("Host gate\n  ProxyJump me@outer:2222\nHost loop\n  ProxyJump loop\n")
    config = tmp_path / ".ssh" / "config"
    config.write_text("Host login\n  ProxyJump gate,inner\nInclude more\n")
    known = read_config(config)
    assert route(known, "login") == ["me@outer:2222", "gate", "inner", "login"]
    assert route(known, "elsewhere") == ["elsewhere"]
    assert route(read_config(tmp_path / "none"), "login") == ["login"]
    with pytest.raises(ConfigError, match="ProxyJump"):
        route(known, "loop")


def test_an_id_cannot_leave_its_word() -> None:
    line = remote_line(["scontrol", "requeue", "1; reboot"], timeout_s=20, users_env=False)
    assert line.endswith(" krea_runner 20 scontrol requeue '1; reboot'")
