"""Sources of a policy's answers in an evaluation: a model on disk or on the hub, or an endpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from verl_atgrpo.files import HUB_NAME
from verl_atgrpo.lab.export import Adapter, check_adapter, check_model, saved_model, trained_policies
from verl_atgrpo.play.remote import RemoteModel
from verl_atgrpo.train.config.policies import ADAPTER_CONFIG

_WHOLE = 1 << 26
"""Bytes up to which all of a file goes into its digest, as those of adapters."""
_EVERY, _SAMPLE = 1 << 20, 1 << 12
"""Of larger files, at this distance in bytes so many go into it: some of every large tensor."""


Source = str | Adapter | RemoteModel
"""A Hugging Face model that vLLM serves in this process, by its folder or its name on the hub; an adapter; or an
endpoint."""


def parse(text: str) -> Source:
    """Parses `MODEL@http(s)://host/v1[#KEY_VARIABLE]`, a folder with a model or adapter, or `owner/name` on the hub.

    Raises ValueError for anything else, and FileError for a folder whose model is damaged.
    """
    if (remote := RemoteModel.parse(text)) is not None:
        return remote
    if Path(text).is_dir():
        if (Path(text) / ADAPTER_CONFIG).is_file():
            return check_adapter(Path(text))
        if not (Path(text) / "config.json").is_file():
            raise ValueError(f"{text} has no config.json: name the folder of a Hugging Face model or of an adapter")
        check_model(Path(text))
    elif not HUB_NAME.fullmatch(text):
        raise ValueError(
            f"{text!r} is not a source of answers: use a folder with a model, owner/name on the hub, or MODEL@http://host/v1"
        )
    return text


def weights_digest(path: str) -> str | None:
    """Returns a digest of a folder's weights and tokenizer, or None for a name on the hub.

    Uses names, sizes and samples of large files: whole ones take minutes to read.
    """
    if not Path(path).is_dir():
        return None
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(Path(path).iterdir()):
        if file.suffix in (".safetensors", ".bin", ".json", ".jinja", ".model"):
            size = file.stat().st_size
            digest.update(f"{file.name}\x1f{size}\x1f".encode())
            with file.open("rb") as data:
                if size <= _WHOLE:
                    digest.update(data.read())
                    continue
                for start in range(0, size, _EVERY):
                    data.seek(start)
                    digest.update(data.read(_SAMPLE))
    return digest.hexdigest()


def of_checkpoint(step: Path, policies: Mapping[str, bool]) -> dict[str, Source]:
    """Returns the source of every policy in a folder `global_step_<n>`; `policies` are the recipe's -> trainable.

    Raises ValueError if it is not a complete checkpoint of these policies, or a policy was saved only as shards.
    """
    saved = trained_policies(step)
    trained = [name for name, trainable in policies.items() if trainable]
    if sorted(saved) != sorted(trained):
        raise ValueError(f"{step} holds the policies {', '.join(saved)}, the recipe trains {', '.join(trained)}")
    sources: dict[str, Source] = {}
    for name, folder in saved.items():
        if (found := saved_model(folder)) is None:
            exported = " ".join(f"--policy {policy}=OUT/{policy}" for policy in saved)
            raise ValueError(f"{folder} has no whole model: run verl-atgrpo export {step} OUT, then name {exported}")
        sources[name] = found if isinstance(found, Adapter) else str(found)
    return sources


def assignments(texts: Sequence[str], option: str, known: Sequence[str], what: str) -> dict[str, str]:
    """Parses `NAME=VALUE` arguments; raises ValueError for unknown and repeated names."""
    found: dict[str, str] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not value:
            raise ValueError(f"{option} {text}: write {option} {what.upper()}=...")
        if name not in known:
            raise ValueError(f"{option} {name}=...: there is no {what} {name!r}, the recipe has {', '.join(known)}")
        if name in found:
            raise ValueError(f"{option} {name}=... is given twice")
        found[name] = value
    return found
