"""Tasks from data sets: local files, files on the Hugging Face hub, and data sets of the hub."""

from __future__ import annotations

import gzip
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from io import BufferedIOBase
from itertools import chain
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import unquote

from pydantic import TypeAdapter

from verl_atgrpo import Environment, EnvironmentConfigError, Split
from verl_atgrpo.environments.common.options import option_error
from verl_atgrpo.files import FileError, bounded, check_file, parse

Task = TypeVar("Task")
Record = dict[str, Any]
Rows = tuple[Sequence[str], Callable[[list[str]], Iterable[Record]]]
"""The columns of a data set, and a function that yields its rows with the given columns."""
_RECORD: TypeAdapter[Record] = TypeAdapter(dict[str, Any])
_ROWS: TypeAdapter[list[Record]] = TypeAdapter(list[dict[str, Any]])
_LONGEST = 256 << 20
"""Most bytes of a row as JSON, which may have megabytes of tests, and of a file that is one list."""
_KEYS = ("path", "columns", "where", "split", "subset")
_JSON, _TABLE = (".jsonl", ".jsonl.gz", ".json", ".json.gz"), (".parquet",)
_HUB_FILE = re.compile(r"hf://datasets/(?P<repo>[^/@]+/[^/@]+)(?:@(?P<revision>[^/]+))?/(?P<file>.+)")


def read_records(
    source: object, option: str, columns: Mapping[str, str], optional: Iterable[str] = ()
) -> Iterator[Record]:
    """Yields the rows of a data set with our names for its columns; the data set need not fit into memory.

    Args:
        source: the option's value in the recipe: a mapping with `path`, optionally `columns` (our name -> the data
            set's; `reward_model.ground_truth` is a key of the mappings in the column `reward_model`), `where` (the
            data set's name for a column -> the value, or a list of values, of the rows that are read), and for a data
            set of the hub `split` and `subset`. The path is a file `.jsonl`, `.json` (JSON lines, or one list of
            rows), either of them with `.gz`, or `.parquet`; or such a file on the hub,
            `hf://datasets/<owner>/<data set>/<file>`, optionally with `@<revision>` after the data set; or the name
            of a data set on the hub.
        option: the option's name, for messages.
        columns: the columns to read, our name -> the default name in the data set.
        optional: columns that a data set may lack; their value is then None.

    Raises EnvironmentConfigError, on the first row, if the option is malformed, the data cannot be read, or a column
    is missing; and at the end if there is no row with the values of `where`.
    """
    if not isinstance(source, Mapping) or not isinstance(source.get("path"), str):
        raise option_error(f"{option}={source!r}: a section with path: <file or data set>")
    for key in source:
        if key not in _KEYS:
            raise option_error(f"{option}.{key} is not a known key: use one of {', '.join(_KEYS)}")
    given = source.get("columns") or {}
    for name in given:
        if name not in columns:
            raise option_error(f"{option}.columns.{name} is not a column here: use {', '.join(columns)}")
    names, path, chosen = {**columns, **given}, source["path"], source.get("where")
    chosen = {} if chosen is None else chosen
    if not isinstance(chosen, Mapping):
        raise option_error(f"{option}.where={chosen!r}: a section, such as {{level: [1, 2]}}")
    try:
        found, rows = _open(source, option)
        if not found:
            raise option_error(f"{option}.path={path!r}: it has no rows")
        parts = {ours: _parts(theirs, found) for ours, theirs in names.items()}
        needed = {ours: own for ours, own in parts.items() if ours in given or ours not in optional}

        def missing(ours: str, known: Iterable[str]) -> EnvironmentConfigError:
            return option_error(
                f"{option}.columns.{ours}={names[ours]!r}: {path!r} has no such column; it has {', '.join(known)}"
            )

        for ours, own in needed.items():
            if own[0] not in found:
                raise missing(ours, found)
        kept = {column: _parts(column, found) for column in chosen}
        for column, own in kept.items():
            if own[0] not in found:
                raise option_error(f"{option}.where.{column}: {path!r} has no such column; it has {', '.join(found)}")
        wanted, some = {own[0] for own in (*parts.values(), *kept.values())}, False
        for number, row in enumerate(rows([name for name in found if name in wanted])):
            if number == 0:
                for ours, own in needed.items():
                    for depth, part in enumerate(own[1:], 1):
                        outer = _inner(row, own[:depth])
                        if not isinstance(outer, Mapping) or part not in outer:
                            keys = outer if isinstance(outer, Mapping) else {}
                            raise missing(ours, [".".join((*own[:depth], key)) for key in keys] or found)
            if all(_is_one_of(_inner(row, own), chosen[column]) for column, own in kept.items()):
                some = True
                yield {ours: _inner(row, own) for ours, own in parts.items()}
        if not some:
            raise option_error(f"{option}.where={dict(chosen)}: {path!r} has no row with these values")
    except EnvironmentConfigError:
        raise
    except (OSError, ValueError, EOFError, zlib.error, RuntimeError) as error:  # datasets: RuntimeError for scripts
        known = f"a file {', '.join(_JSON + _TABLE)}, here or as hf://datasets/..., or a data set on the hub"
        message = f"{option}.path={path!r} cannot be read as {known}: {' '.join(str(error).split())}"
        raise option_error(message) from error


def _parts(name: str, found: Sequence[str]) -> tuple[str, ...]:
    """Returns a column, or with dots, if no column has that name, a column and keys of the mappings in it."""
    return (name,) if name in found else tuple(name.split("."))


def _is_one_of(value: object, wanted: object) -> bool:
    return value in (wanted if isinstance(wanted, Sequence) and not isinstance(wanted, str) else [wanted])


def _inner(row: object, parts: Iterable[str]) -> Any:
    for part in parts:
        row = row.get(part) if isinstance(row, Mapping) else None
    return row


def data_sets(source: object, option: str) -> dict[str, tuple[str, object]]:
    """Returns the data sets of an option: name -> the option's path for messages, and the section to read.

    The option is one section (its name is ""), or a mapping from names to sections. Names whose section is null are
    left out, so that a recipe can remove a data set of the recipe it extends. Raises EnvironmentConfigError for any
    other mapping, and for a name that cannot be part of a metric's name.
    """
    if not isinstance(source, Mapping):
        return {"": (option, source)}
    given = {str(name): section for name, section in source.items() if section is not None}
    if not any(isinstance(section, Mapping) for name, section in given.items() if name not in ("columns", "where")):
        return {"": (option, given)}
    for name, section in given.items():
        if not isinstance(section, Mapping):
            others = ", ".join(other for other, value in given.items() if isinstance(value, Mapping))
            raise option_error(
                f"{option}.{name}={section!r} is beside the named data sets {others}: name it as well, or set those "
                "to null"
            )
        if not re.fullmatch(r"[\w.-]+", name):
            raise option_error(f"{option}.{name}: a data set's name has letters, digits, '.', '_' and '-'")
    return {name: (f"{option}.{name}", section) for name, section in given.items()}


class DataSetEnvironment(Environment, Generic[Task]):
    """An environment whose tasks are the rows of data sets."""

    train: object
    val: object

    def read_tasks(self, read: Callable[[Split, object, str], Sequence[Task]]) -> None:
        """Reads the tasks of both splits from the options `train` and `val`, each a data set or several named ones.

        Args:
            read: split, section of a data set and its path in the options -> its tasks.
        """
        self._tasks: dict[Split, tuple[Task, ...]] = {}
        self._data_sets: dict[Split, dict[str, int]] = {}
        sources: tuple[tuple[Split, object], ...] = ("train", self.train), ("val", self.val)
        for split, source in sources:
            parts = data_sets(source, split).items()
            tasks = {name: read(split, section, where) for name, (where, section) in parts}
            self._tasks[split] = tuple(chain.from_iterable(tasks.values()))
            self._data_sets[split] = {name: len(mine) for name, mine in tasks.items() if name}

    def task(self, split: Split, index: int) -> Task:
        """Returns task `index` of `split`, in the order of the data."""
        return self._tasks[split][index]

    def num_tasks(self, split: Split) -> int:
        """Returns how many tasks `split` has."""
        return len(self._tasks[split])

    def data_sets(self, split: Split) -> dict[str, int]:
        """Returns the named data sets of `split` and how many tasks each has."""
        return self._data_sets[split]


def _open(source: Mapping[str, Any], option: str) -> Rows:
    path = source["path"]
    if path.endswith(_JSON + _TABLE):
        for key in ("split", "subset"):
            if source.get(key) is not None:
                raise option_error(f"{option}.{key}={source[key]!r} has no effect on a file: remove it")
        local = _fetched(path)
        return _open_table(local) if path.endswith(_TABLE) else _open_json(local)
    if Path(path).is_file():
        raise option_error(f"{option}.path={path!r}: a file ends in {', '.join(_JSON + _TABLE)}; convert or rename it")
    import datasets

    if source.get("split") is None:
        raise option_error(f"{option}.split is missing: name the split of the data set {path!r}")
    data = datasets.load_dataset(path, source.get("subset"), split=source["split"])
    return data.column_names if len(data) else (), data.select_columns


def _fetched(path: str) -> Path:
    on_hub = _HUB_FILE.fullmatch(path)
    if on_hub is None:
        return Path(path)
    from huggingface_hub import hf_hub_download

    revision = on_hub["revision"] and unquote(on_hub["revision"])
    return Path(hf_hub_download(on_hub["repo"], on_hub["file"], repo_type="dataset", revision=revision))


def _open_json(path: Path) -> Rows:
    check_file(path, most=sys.maxsize)

    def opened() -> BufferedIOBase:
        return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")

    def parsed() -> Iterator[Record]:
        with opened() as file:
            # Binary lines end only at \n: texts may contain other line separators.
            for number, line in bounded(file, path, _LONGEST):
                if number == 1 and line.lstrip().startswith(b"["):
                    text = line + file.read(_LONGEST + 1)
                    if len(text) > _LONGEST:
                        raise FileError(
                            f"{path}: a list of more than {_LONGEST:,} bytes; write one row a line (.jsonl)"
                        )
                    yield from parse(text, _ROWS, "a list of rows of a data set", path)
                    return
                if line.strip():
                    yield parse(line, _RECORD, "a row of a data set", path, number)

    rows = parsed()
    first = next(rows, {})
    return list(first), lambda _: chain([first], rows)


def _open_table(path: Path) -> Rows:
    import pyarrow.parquet

    table = pyarrow.parquet.ParquetFile(path)
    # Few rows at a time: a row may have megabytes of tests.
    names = table.schema_arrow.names if table.metadata.num_rows else ()
    return names, lambda wanted: (row for batch in table.iter_batches(64, columns=wanted) for row in batch.to_pylist())
