"""Signatures of one's own, in site.toml: used wherever the built-in ones are, and every wrong key named at once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from krea_runner.config.site_toml import site_files
from krea_runner.diagnose.site import load_site_catalog, site_catalog
from krea_runner.errors import ConfigError

OWN = """
[cause.licence_lost]
policy = "restart"
title = "the solver lost its licence"
advice = "restart after a pause"

[[signatures]]
id = "solver-licence"
cause = "licence_lost"
literal = ["licence checkout failed"]
pattern = 'solver: licence checkout failed'
example = ["solver: licence checkout failed (-15)"]
near_miss = ["no licence checkout failed today"]
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KREA_RUNNER_SITE", str(tmp_path / "site.toml"))
    return tmp_path / "site.toml"


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "krea_runner", *argv], capture_output=True, text=True, check=False)


def test_diagnose_and_signatures_test_use_them(site: Path, tmp_path: Path) -> None:
    site.write_text(OWN)
    log = tmp_path / "a.log"
    log.write_text("step 1\n3: solver: licence checkout failed (-15)\nKeyError: 'x'\n")
    shown = run("diagnose", str(log))
    assert shown.stdout.startswith("the solver lost its licence  [licence_lost]\n"), shown.stderr
    rows = [row.split("\t")[:3] for row in run("signatures", "test", str(log)).stdout.splitlines()]
    assert rows == [[f"{log}:2", "solver-licence", "licence_lost"], [f"{log}:3", "python-exception", "user_exception"]]


def test_a_file_of_them_may_be_named_instead(site: Path, tmp_path: Path) -> None:
    (tmp_path / "ours.toml").write_text(OWN.replace("signatures", "signature"))
    for named in ('"ours.toml"', '["ours.toml"]'):
        site.write_text(f"signatures = {named}\n")
        assert "solver-licence" in {signature.name for signature in load_site_catalog().signatures}


def test_every_wrong_key_of_every_file_is_named_at_once_with_the_nearest_right_one(site: Path, tmp_path: Path) -> None:
    (tmp_path / "b.toml").write_text("signature = [{id = 'b'}]\nsignals = 3\n")
    site.write_text(
        '[cause.a]\npolicy = "restrt"\ntitel = "x"\n'
        '[[signatures]]\nid = "one"\nliterl = ["abcd"]\npattern = "("\nliteral = ["abc"]\n'
        '[[signatures]]\nid = "two"\ncause = "gpu_ec"\nliteral = ["some text"]\npattern = "x"\nexample = ["some text"]\n'
        '[[signatures]]\nid = "three"\nrole = "rot"\nliteral = ["text"]\npattern = "text"\nnear_miss = "text"\n'
    )
    with pytest.raises(ConfigError) as caught:
        load_site_catalog([tmp_path / "b.toml"])
    said = [problem.replace(str(tmp_path), "") for problem in caught.value.problems]
    assert said == [
        "/b.toml: unknown key 'signals'; did you mean signature?",
        "/site.toml: cause a: policy: 'restrt' is none of restart, restart_and_exclude_node, stop_for_human, not_a_crash; "
        "did you mean restart?",
        "/site.toml: cause a: unknown key 'titel'; did you mean title?",
        "/site.toml: cause a: title is missing",
        "/site.toml: signature one: unknown key 'literl'; did you mean literal?",
        "/site.toml: signature one: pattern: missing ), unterminated subpattern at position 0",
        "/site.toml: signature one: literal: texts of at least 4 characters are wanted: the fast search looks for them",
        "/site.toml: signature two: its pattern does not match its example 'some text'",
        "/site.toml: signature three: role: 'rot' is none of context, end, exception, exit, fabric, fallout, kernel, network, "
        "restart, root, scheduler, signal, start, stuck, timeout; did you mean root?",
        "/site.toml: signature three: near_miss: a list of texts is wanted, such as [\"licence lost\"], not 'text'",
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("signatures = 3\n", "signatures are tables: write [[signatures]] above each"),
        ("cause = 3\n", "[cause] is a table"),
        ("[[", "is not TOML"),
        ('[[signatures]]\nid = "traceback"\nliteral = ["abcd"]\npattern = "abcd"\n', "there is one of that id already"),
        ('[[signatures]]\nid = "x"\ncause = "gpu_ec"\nliteral = ["abcd"]\npattern = "abcd"\n', "did you mean gpu_ecc?"),
        ('signatures = ["nowhere.toml"]\n', "cannot read signatures from"),
        ("[[signatures]]\n[[signatures]]\n", "signature number 2: id is missing"),
    ],
)
def test_a_site_toml_that_is_wrong_says_how_and_the_supervisor_goes_on_without(
    site: Path, text: str, said: str
) -> None:
    site.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_site_catalog()
    assert said in "\n".join([str(caught.value), *caught.value.problems])
    catalog, problems = site_catalog()
    assert "python-exception" in {signature.name for signature in catalog.signatures}
    assert said in problems[0]


def test_a_supervisor_that_runs_on_sees_what_is_changed(site: Path) -> None:
    site.write_text(OWN)
    first = load_site_catalog()
    assert load_site_catalog() is first
    site.write_text(OWN.replace("solver-licence", "solver-licences"))
    os.utime(site, ns=(1, 1))
    assert "solver-licences" in {signature.name for signature in load_site_catalog().signatures}


def test_the_users_file_comes_before_the_clusters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KREA_RUNNER_SITE", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    cluster = tmp_path / "etc.toml"
    monkeypatch.setattr("krea_runner.config.site_toml.CLUSTER", cluster)
    assert site_files() == []
    cluster.write_text(OWN.replace("licence_lost", "theirs").replace("solver-licence", "solver-theirs"))
    (tmp_path / "krea_runner").mkdir()
    (tmp_path / "krea_runner" / "site.toml").write_text(OWN)
    assert site_files() == [tmp_path / "krea_runner" / "site.toml", cluster]
    own = [s.name for s in load_site_catalog().signatures if s.name.startswith("solver")]
    assert own == ["solver-licence", "solver-theirs"]


def test_a_pattern_whose_rank_is_no_number_breaks_nothing(site: Path, tmp_path: Path) -> None:
    site.write_text(
        OWN.replace("'solver: licence", "'(?P<rank>\\w+): licence").replace(
            'near_miss = ["no licence', 'near_miss = ["no: licences'
        )
    )
    (tmp_path / "a.log").write_text("solver: licence checkout failed\n")
    assert run("diagnose", str(tmp_path / "a.log")).returncode == 0
