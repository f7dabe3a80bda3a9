"""Adds the recipes to Hydra's search path, so that `--config-name=plan_path_cpu` works in any folder."""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class VerlAtGrpoSearchPathPlugin(SearchPathPlugin):
    """Appends the packaged recipes. Every Hydra application loads it, so it must not import verl."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider="verl-atgrpo", path="pkg://verl_atgrpo.recipes")
