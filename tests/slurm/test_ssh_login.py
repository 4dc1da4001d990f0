"""Who is let in and which host is believed: a real sshd, a real ssh-agent, files as OpenSSH's own tools write them."""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from krea_runner.transport.known_hosts import Trust, judge, read_known_hosts
from krea_runner.transport.ssh import Ssh
from tests.conftest import free_port, until
from tests.slurm.test_ssh import Site, pytestmark, refusal, site
from tests.ssh_server import Sshd, keygen

__all__ = ["pytestmark", "site"]  # what pytest looks for here


def says(ssh: Ssh) -> str:
    try:
        return ssh.run(["echo", "in"], timeout_s=10).stdout
    finally:
        ssh.close()


def refused(pattern: str) -> str:
    """The hint."""
    error = refusal(lambda: Ssh("login").run(["true"], timeout_s=10))
    assert re.search(pattern, str(error)), error
    return error.hint or ""


@contextmanager
def agent(folder: Path, *keys: Path) -> Iterator[str]:
    sock = str(folder / "agent")
    process = subprocess.Popen(["ssh-agent", "-D", "-a", sock], stdout=subprocess.DEVNULL)
    try:
        until(lambda: Path(sock).exists(), "the agent", 10)
        environment = {**os.environ, "SSH_AUTH_SOCK": sock}
        for key in keys:
            subprocess.run(["ssh-add", "-q", str(key)], env=environment, check=True, stdin=subprocess.DEVNULL)
        yield sock
    finally:
        process.terminate()
        process.wait()


def locked_copy(site: Site, name: str = "locked", *format_: str) -> Path:
    """The user's key with a passphrase."""
    path = site.home / name
    shutil.copy(site.sshd.folder / "user_key", path)
    path.chmod(0o600)
    argv = ["ssh-keygen", "-q", "-p", "-P", "", "-N", "secret", *format_, "-f", str(path)]
    subprocess.run(argv, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    return path


# ----------------------------------------------------------------------------------------------------------------- keys


def test_a_key_in_the_agent_is_used_and_only_the_named_one_with_identities_only(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [site.home / f"other{number}" for number in range(7)]  # sshd closes the connection after six
    for other in others:
        keygen(other)
    locked = locked_copy(site)
    with agent(site.home, *others, site.sshd.folder / "user_key") as sock:
        monkeypatch.setenv("SSH_AUTH_SOCK", sock)
        site.write(key=locked)  # IdentitiesOnly: without it the agent's other keys come first
        assert says(Ssh("login")) == "in\n"
        text = (site.home / ".ssh" / "config").read_text()
        bare = re.sub(r" *Identit.*\n", "", text)
        (site.home / ".ssh" / "config").write_text(bare)
        hint = refused("closed the connection after [67] keys")
        assert "IdentitiesOnly" in hint
    with agent(site.home, site.sshd.folder / "user_key") as sock:
        monkeypatch.setenv("SSH_AUTH_SOCK", sock)
        assert says(Ssh("login")) == "in\n"


@pytest.mark.parametrize("form", [[], ["-m", "PEM"]])
def test_a_key_with_a_passphrase_and_no_agent_says_so(site: Site, form: list[str]) -> None:
    if form:
        subprocess.run(["ssh-keygen", "-q", "-t", "rsa", "-b", "2048", "-m", "PEM", "-N", "secret", "-f",
                        str(site.home / "locked")], check=True, stdin=subprocess.DEVNULL)  # fmt: skip
    else:
        locked_copy(site)
    site.write(key=site.home / "locked")
    hint = refused("locked has a passphrase, and no agent holds it")
    assert hint.startswith(f"ssh-add {site.home / 'locked'}")


def test_a_host_that_wants_more_than_a_key_is_not_waited_for(site: Site) -> None:
    site.sshd.stop()
    site.sshd.more = ["AuthenticationMethods publickey,password publickey,keyboard-interactive",
                      "PasswordAuthentication yes", "KbdInteractiveAuthentication yes"]  # fmt: skip
    site.sshd.start()
    began = time.monotonic()
    assert "operators" in refused("login wants .*(password|keyboard-interactive).* beside the key")
    assert time.monotonic() - began < 10


# ------------------------------------------------------------------------------------------------------------ host keys


def test_of_several_host_keys_the_known_one_is_asked_for(site: Site) -> None:
    rsa = site.sshd.folder / "host_rsa"
    subprocess.run(["ssh-keygen", "-q", "-t", "rsa", "-N", "", "-f", str(rsa)], check=True, stdin=subprocess.DEVNULL)
    entry = site.sshd.known_hosts_line.split()[0]
    line = f"{entry} {rsa.with_suffix('.pub').read_text()}"
    site.write(known=line)
    refused("is of another type than the known one")  # it has no such key (yet)
    site.sshd.stop()
    site.sshd.more = [f"HostKey {rsa}"]
    site.sshd.start()
    assert says(Ssh("login")) == "in\n"


def test_one_of_several_keys_of_a_host_is_enough_and_names_may_be_hashed(site: Site) -> None:
    """As of login nodes behind one name."""
    keygen(site.home / "elsewhere")
    entry, real = site.sshd.known_hosts_line.split(maxsplit=1)
    other = (site.home / "elsewhere.pub").read_text()
    site.write(known=f"{entry} {other}{entry} {real}")
    assert says(Ssh("login")) == "in\n"
    known = site.home / ".ssh" / "known"
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", str(known)], check=True, capture_output=True)
    assert "127.0.0.1" not in known.read_text()
    assert says(Ssh("login")) == "in\n"
    site.write(known=f"{entry} {other}")
    refused("has CHANGED")


def test_a_revoked_key_is_refused_though_it_is_known(site: Site) -> None:
    line = site.sshd.known_hosts_line
    site.write(known=line + "@revoked * " + line.split(maxsplit=1)[1])
    assert "grep @revoked" in refused("is REVOKED")


@pytest.mark.parametrize(
    ("names", "host"),
    [
        ("login1", "login1"), ("login1", "login2"), ("login?,!login2", "login2"), ("login?,!login2", "login1"),
        ("*.cluster", "a.cluster"), ("*.cluster", "cluster"), ("[login1]:2222", "[login1]:2222"),
        ("[login1]:2222", "login1"), ("[login*]:2222", "[login1]:2222"), ("LOGIN1", "login1"), ("a,b", "b"), ("l[ab]", "la"),
    ],
)  # fmt: skip
def test_names_in_known_hosts_mean_what_openssh_makes_of_them(names: str, host: str, tmp_path: Path) -> None:
    keygen(tmp_path / "key")
    kind, key = (tmp_path / "key.pub").read_text().split()[:2]
    (tmp_path / "known").write_text(f"{names} {kind} {key}\n")
    found = subprocess.run(["ssh-keygen", "-F", host, "-f", str(tmp_path / "known")], capture_output=True, check=False)
    (line,) = read_known_hosts([str(tmp_path / "known")])
    trust = judge([line], host, kind, line.key)
    assert trust is (Trust.KNOWN if found.returncode == 0 else Trust.UNKNOWN)


# -------------------------------------------------------------------------------------------------------- ~/.ssh/config


@pytest.fixture
def jump(site: Site, tmp_path: Path) -> Iterator[Sshd]:
    jump = Sshd(tmp_path / "jump", free_port(), {"PATH": "/usr/bin:/bin"})
    jump.start()
    site.write(known=site.sshd.known_hosts_line + jump.known_hosts_line)
    yield jump
    jump.stop()


def test_a_proxy_command_is_gone_through_its_end_is_noticed_and_it_is_not_left_behind(site: Site, jump: Sshd) -> None:
    own = site.home / ".ssh" / "for_openssh"
    own.write_text(
        f"Host jump\n  HostName 127.0.0.1\n  Port {jump.port}\n  User {jump.user}\n  IdentitiesOnly yes\n"
        f"  IdentityFile {jump.folder / 'user_key'}\n  UserKnownHostsFile {site.home}/.ssh/known\n"
    )
    known = site.sshd.known_hosts_line + jump.known_hosts_line
    site.write(known=known, more=f"  ProxyCommand ssh -F {own} -W %h:%p jump\n")
    ssh = Ssh("login")
    assert ssh.run(["echo", "through"], timeout_s=10).stdout == "through\n"
    assert jump.connections == 1
    jump.cut()
    assert ssh.run(["echo", "again"], timeout_s=10).stdout == "again\n"
    ssh.close()
    until(lambda: str(own) not in _processes(), "the end of the ProxyCommand", 10)


def _processes() -> str:
    return subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout


def test_a_proxy_command_that_fails_is_named(site: Site) -> None:
    site.write(more="  ProxyCommand /bin/false %h\n")
    began = time.monotonic()
    refused(r"\(ProxyCommand /bin/false 127.0.0.1\)")
    assert time.monotonic() - began < 10


Write = Callable[[str], object]


@pytest.fixture
def config(site: Site) -> Write:
    return (site.home / ".ssh" / "config").write_text


def test_wildcards_match_blocks_and_includes_are_read_as_openssh_reads_them(
    site: Site, config: Write, tmp_path: Path
) -> None:
    folder = site.home / ".ssh"
    (folder / "conf.d").mkdir()
    (folder / "conf.d" / "10 port.conf").write_text(f"Host other\n  Port 1\nHost log*\n  Port {site.sshd.port}\n")
    text = (
        f'Host log*n !login\n  HostName nowhere.invalid\nHost l*\n  Include "conf.d/*.conf"\n  HostName 127.0.0.1\n'
        f"Match originalhost login host 127.0.0.1\n  User {site.sshd.user}\n"
        f"Match all\n  IdentityFile={site.sshd.folder}/user_key\n  UserKnownHostsFile {folder}/known\n"
    )
    config(text)
    assert says(Ssh("login")) == "in\n"
    shown = subprocess.run(
        ["ssh", "-G", "-F", str(folder / "config"), "login"], capture_output=True, text=True, check=True
    )
    assert "hostname 127.0.0.1\n" in shown.stdout


def test_a_host_key_alias_names_the_key(site: Site) -> None:
    kind_and_key = site.sshd.known_hosts_line.split(maxsplit=1)[1]
    site.write(known=f"cluster {kind_and_key}", more="  HostKeyAlias cluster\n")
    assert says(Ssh("login")) == "in\n"
