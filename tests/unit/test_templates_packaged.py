"""The template is in the wheel, and is found after an install that knows nothing of the checkout."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from krea_runner.launch.render import TEMPLATE, template_dir

ROOT = Path(__file__).parents[2]


def pip(*words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "pip", *words, "--quiet", "--no-deps", "--disable-pip-version-check"]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=150)


@pytest.mark.skipif(
    not (ROOT / "pyproject.toml").exists(), reason="krea_runner is installed, not a checkout: no wheel to build"
)
def test_an_installed_wheel_finds_its_own_template(tmp_path: Path) -> None:
    # Without hatchling here, pip fetches it for the build; where it cannot, that says nothing of our wheel.
    here = importlib.util.find_spec("hatchling") is not None
    built = pip("wheel", *(["--no-build-isolation"] if here else []), "--wheel-dir", str(tmp_path), str(ROOT))
    if not here and "hatchling" in built.stderr and "No matching distribution" in built.stderr:
        pytest.skip("the wheel is not tested: hatchling is not installed and cannot be fetched; pip install hatchling")
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("krea_runner-*.whl")
    installed = pip("install", "--target", str(tmp_path / "site"), str(wheel))
    assert installed.returncode == 0, installed.stderr
    code = "import krea_runner.launch.render as r; print(r.__file__); print(r.template_dir())"
    found = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(tmp_path / "site")}, cwd=tmp_path,
        capture_output=True, text=True, check=True,
    ).stdout.split("\n")  # fmt: skip
    site = tmp_path / "site" / "krea_runner"
    assert found[:2] == [str(site / "launch" / "render.py"), str(site / "_data" / "sbatch_templates")]
    assert (Path(found[1]) / TEMPLATE).read_bytes() == (template_dir() / TEMPLATE).read_bytes()
