"""run.toml and where the installation keeps its state."""

from krea_runner.config.load import check_run, load_run, read_document, slug_of
from krea_runner.config.stored import config_from_json, config_to_json
from krea_runner.config.write import to_toml

__all__ = ["check_run", "config_from_json", "config_to_json", "load_run", "read_document", "slug_of", "to_toml"]
