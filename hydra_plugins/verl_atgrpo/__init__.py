"""Makes the recipes known to Hydra, so that `--config-name=plan_path_cpu` works wherever verl is started."""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class VerlAtGrpoSearchPathPlugin(SearchPathPlugin):
    """Appends the packaged recipes; must not import verl, as every Hydra application loads it."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider="verl-atgrpo", path="pkg://verl_atgrpo.recipes")
