"""`verl-atgrpo new`: a package with an environment of two agents, its test and a recipe, to be changed."""

from __future__ import annotations

import importlib.util
import keyword
import sys
from pathlib import Path

from verl_atgrpo.play.registry import registered

_TEMPLATE = Path(__file__).parent / "template"
_NAME = "my_team"
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""The model of the new recipe."""


def new(name: str, folder: Path, model: str = MODEL) -> str:
    """Writes the package `name` into `folder/name` and returns what to do next.

    `model` is on the Hugging Face hub or in a folder. Raises ValueError for a name that Python, a module or an
    environment has; FileExistsError if the folder exists.
    """
    if not name.isidentifier() or not name.isascii() or name != name.lower() or keyword.iskeyword(name):
        raise ValueError(f"name={name!r}: use small letters, digits and underscores, such as {_NAME}")
    if name in registered():
        raise ValueError(f"name={name!r}: an environment has this name; use another one")
    if name in sys.stdlib_module_names or importlib.util.find_spec(name) is not None:
        raise ValueError(f"name={name!r}: a module has this name; use another one")
    made = folder / name
    if made.exists():
        raise FileExistsError(f"{made} exists; remove it, or use another name")
    if (there := Path(model).expanduser()).is_dir():
        model = str(there.resolve())
    title = "".join(part.title() for part in name.split("_"))
    made.mkdir(parents=True)
    for source in sorted(_TEMPLATE.iterdir()):
        if source.is_file():
            text = source.read_text().replace("MODEL ", f"{model} ")
            text = text.replace(_NAME, name).replace("MyTeam", title)
            (made / source.name.replace(_NAME, name)).write_text(text)
    return f"""{made}: an environment of two agents, its test and a recipe; CHANGE marks what to change. Try it:
    cd {made} && pip install -e . && python -m pytest -q
    python -m verl.trainer.main_ppo --config-dir=. --config-name={name}_cpu"""
