"""Tasks from data sets: local JSON lines or parquet files and data sets of the Hugging Face hub, by column names."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from verl_atgrpo.environment import EnvironmentConfigError

Record = dict[str, Any]
_KEYS = ("path", "columns", "split", "subset")
_LINES, _TABLE = (".jsonl", ".jsonl.gz", ".json.gz"), (".parquet",)


def read_records(
    source: object, option: str, columns: Mapping[str, str], optional: Iterable[str] = ()
) -> tuple[Record, ...]:
    """Returns the rows of a data set, each with our names for its columns.

    Args:
        source: the option's value in the recipe: a mapping with `path` (a file `.jsonl`, `.jsonl.gz` or `.parquet`,
            or the name of a data set on the hub), and where needed `columns` (our name -> the data set's), and for
            the hub `split` and `subset`.
        option: the option's name, for messages.
        columns: the columns wanted, our name -> the name it has where the recipe says nothing.
        optional: those of them that a data set may lack; their value is None then.

    Raises EnvironmentConfigError if the option is malformed, the data cannot be read, or a column is missing.
    """
    where = f"at_grpo.environment.{option}"
    if not isinstance(source, Mapping) or not isinstance(source.get("path"), str):
        raise EnvironmentConfigError(f"{where}={source!r}: a section with path: <file or data set>")
    for key in source:
        if key not in _KEYS:
            raise EnvironmentConfigError(f"{where}.{key} is not a known key: use one of {', '.join(_KEYS)}")
    given = source.get("columns") or {}
    for name in given:
        if name not in columns:
            raise EnvironmentConfigError(f"{where}.columns.{name} is not a column here: use {', '.join(columns)}")
    names = {**columns, **given}
    rows = _read(source, where)
    if not rows:
        raise EnvironmentConfigError(f"{where}.path={source['path']!r}: there is no row in it")
    for ours, theirs in names.items():
        if theirs not in rows[0] and (ours in given or ours not in optional):
            raise EnvironmentConfigError(
                f"{where}.columns.{ours}={theirs!r}: {source['path']!r} has no such column; it has "
                f"{', '.join(rows[0])}"
            )
    return tuple({ours: row.get(theirs) for ours, theirs in names.items()} for row in rows)


def _read(source: Mapping[str, Any], where: str) -> list[Record]:
    path = source["path"]
    is_file = path.endswith(_LINES + _TABLE)
    for key in ("split", "subset"):
        if is_file and source.get(key) is not None:
            raise EnvironmentConfigError(f"{where}.{key}={source[key]!r} has no effect on a file: remove it")
    try:
        if path.endswith(_LINES):
            data = Path(path).read_bytes()
            text = (gzip.decompress(data) if path.endswith(".gz") else data).decode()
            # Not splitlines: texts may hold other separators.
            return [json.loads(line) for line in text.split("\n") if line.strip()]
        if is_file:
            import pyarrow.parquet

            table: list[Record] = pyarrow.parquet.read_table(path).to_pylist()
            return table
    except (OSError, ValueError) as error:
        raise EnvironmentConfigError(f"{where}.path={path!r} cannot be read: {error}") from error
    return _from_hub(source, where)


def _from_hub(source: Mapping[str, Any], where: str) -> list[Record]:
    import datasets

    if source.get("split") is None:
        raise EnvironmentConfigError(f"{where}.split is missing: name the split of the data set {source['path']!r}")
    try:
        rows = datasets.load_dataset(source["path"], source.get("subset"), split=source["split"])
    except (OSError, ValueError) as error:  # what datasets raises for names it does not find, or no network
        raise EnvironmentConfigError(
            f"{where}.path={source['path']!r}: neither a file {', '.join(_LINES + _TABLE)} nor a data set on the hub "
            f"({error})"
        ) from error
    return [dict(row) for row in rows]
