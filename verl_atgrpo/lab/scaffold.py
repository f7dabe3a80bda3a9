"""`verl-atgrpo new`: a package with an environment of two agents, its test and a recipe, to be changed."""

from __future__ import annotations

import ast
import importlib.util
import json
import keyword
import re
import shlex
import sys
from pathlib import Path

from omegaconf import OmegaConf

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
    title = "".join(part.title() for part in name.split("_"))
    texts = {source: source.read_text() for source in sorted(_TEMPLATE.iterdir()) if source.is_file()}
    is_text = re.fullmatch("[a-z][a-z0-9_]*[a-z0-9]", name) and OmegaConf.create(f"key: {name}") == {"key": name}
    if not is_text or keyword.iskeyword(name):  # YAML reads `on` as true
        raise ValueError(f"name={name!r}: use small letters, digits and underscores, such as {_NAME}")
    code = ast.walk(ast.parse(texts[_TEMPLATE / f"{_NAME}.py"]))
    taken = {getattr(node, "id", getattr(node, "name", "")) for node in code} - {"MyTeam"}
    if title in taken or keyword.iskeyword(title):
        raise ValueError(f"name={name!r}: Python or the package has this name; use another one")
    if name in registered():
        raise ValueError(f"name={name!r}: an environment has this name; use another one")
    if name in sys.stdlib_module_names or importlib.util.find_spec(name) is not None:
        raise ValueError(f"name={name!r}: a module has this name; use another one")
    made = folder / name
    if made.exists():
        raise FileExistsError(f"{made} exists; remove it, or use another name")
    if (there := Path(model).expanduser()).is_dir():
        model = str(there.resolve())
    made.mkdir(parents=True)
    words = {"MODEL": model if re.fullmatch(r"[\w./-]+", model) else json.dumps(model)}
    words |= {_NAME: name, "MyTeam": title}
    for source, text in texts.items():
        written = re.sub(r"\bMODEL(?= )|my_team|MyTeam", lambda found: words[found[0]], text)
        (made / source.name.replace(_NAME, name)).write_text(written)
    return f"""{made}: an environment of two agents, its test and a recipe; CHANGE marks what to change. Try it:
    cd {shlex.quote(str(made))} && pip install -e . && python -m pytest -q
    python -m verl.trainer.main_ppo --config-dir=. --config-name={name}_cpu"""
