"""run.toml and where the installation keeps its state."""

from krea_runner.config.load import load_run, slug_of
from krea_runner.config.stored import config_from_json, config_to_json

__all__ = ["config_from_json", "config_to_json", "load_run", "slug_of"]
