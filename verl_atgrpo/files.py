"""Files that commands read and write.

Inputs are bounded in size and checked against a type; errors are one line with the file, the line and what was
expected. Outputs are written to a temporary file or folder beside their place and then renamed, so that a command that
fails leaves what was there before.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import reprlib
import secrets
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator
from io import BufferedIOBase
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, Strict, TypeAdapter, ValidationError

logger = logging.getLogger(__name__)

MAX_DOCUMENT = 64 << 20
"""Most bytes of a file that holds one JSON value."""
MAX_LINES = 1 << 30
"""Most bytes of a file of JSON lines, which is read line by line."""
MAX_LINE = 16 << 20
"""Most bytes of a line. Python's objects of a line may take twenty times as much."""
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
"""`owner/name` of a model on the Hugging Face hub, where no folder has this name."""
_BYTE_ORDER_MARK = "\ufeff"
_PARTIAL = ".partial"

Whole = Annotated[int, Strict(), Field(ge=0, le=2**53)]
"""A count, an index or a step; 2**53 is the largest number that JavaScript and float64 count to."""
Number = Annotated[float, Strict(), Field(allow_inf_nan=False)]
T = TypeVar("T")
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 120


class FileError(ValueError):
    """A file that cannot be used. The message is one line with the file, the line and what was expected."""


# ---------------------------------------------------------------------- reading


def check_file(path: Path, most: int = MAX_DOCUMENT) -> None:
    """Raises FileError for a folder, a pipe or a file of more than `most` bytes, and OSError if there is none."""
    found = path.stat()
    if stat.S_ISDIR(found.st_mode):
        raise FileError(f"{path} is a folder: name a file")
    if not stat.S_ISREG(found.st_mode):  # opening a pipe would wait for a writer
        raise FileError(f"{path} is not a regular file")
    if found.st_size > most:
        raise FileError(f"{path} has {found.st_size:,} bytes, at most {most:,} are read: name a smaller file")


def read_json(path: Path, accepted: TypeAdapter[T], what: str) -> T:
    """Returns the value of a JSON file of at most `MAX_DOCUMENT` bytes, as `parse`.

    Raises FileError if it is not JSON, or of another type; OSError if it cannot be read.
    """
    check_file(path)
    return parse(path.read_bytes(), accepted, what, path)


def lines(path: Path, most: int = MAX_LINES) -> Iterator[tuple[int, bytes]]:
    """Yields (number, bytes) of the lines of a file of JSON objects, without an incomplete last line, which is logged.

    A last line that has no newline counts if it is an object, since no beginning of an object is one. Raises FileError
    for a file of more than `most` bytes, or a line of more than `MAX_LINE`; OSError if it cannot be read.
    """
    check_file(path, most)
    with path.open("rb") as file:
        for number, line in bounded(file, path):
            if line.endswith(b"\n") or is_whole(line):
                yield number, line
            else:
                logger.warning("%s:%d: ignored an incomplete last line (%d bytes)", path, number, len(line))


def is_whole(line: bytes) -> bool:
    """Returns whether a last line that has no newline is a whole object rather than the beginning of one."""
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def bounded(file: BufferedIOBase, path: Path, longest: int = MAX_LINE) -> Iterator[tuple[int, bytes]]:
    """Yields (number, bytes) of the lines of an open file; raises FileError for one of more than `longest` bytes."""
    number = 0
    while line := file.readline(longest + 1):
        number += 1
        if len(line) > longest:
            raise FileError(f"{path}:{number}: the line is longer than {longest:,} bytes")
        yield number, line


def parse(text: bytes, accepted: TypeAdapter[T], what: str, path: Path, line: int | None = None) -> T:
    """Returns the value of a JSON text, strictly: UTF-8 without byte order mark, no key twice, not nested too deeply.

    Args:
        text: the content of a file, or one line of it.
        accepted: the value's type.
        what: names the type in messages, such as "a model's configuration".
        path: the file, for messages, which are FileErrors.
        line: the number of the line; None if `text` is the whole file.
    """
    first = line or 1
    where = f"{path}:{line}" if line else str(path)
    text = text.rstrip()  # an error at the end of a line would be on the next one
    try:
        decoded = text.decode()
        if decoded.startswith(_BYTE_ORDER_MARK):
            raise FileError(f"{where}: begins with a byte order mark: save it as UTF-8 without one")
        value = _JSON.decode(decoded)
    except FileError:
        raise
    except UnicodeDecodeError as error:
        at = first + text[: error.start].count(b"\n")
        raise FileError(f"{path}:{at}: not {what}: byte {error.start} is not UTF-8") from None
    except json.JSONDecodeError as error:
        place = f"column {error.colno}" if text.strip() else "it is empty"
        raise FileError(f"{path}:{first + error.lineno - 1}: not JSON ({error.msg}, {place})") from None
    except RecursionError:
        raise FileError(f"{where}: not {what}: nested too deeply") from None
    except ValueError as error:  # a key twice, or a number with thousands of digits
        raise FileError(f"{where}: not {what}: {error}") from None
    try:
        return accepted.validate_python(value)
    except ValidationError as error:
        raise FileError(f"{where}: not {what}: {_first(error, value)}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Interned: the lines of a file have the same keys.
    found = {sys.intern(key): value for key, value in pairs}
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {_SHORT.repr(twice)} is given twice")
    return found


_JSON = json.JSONDecoder(object_pairs_hook=_object)


def _first(error: ValidationError, value: Any) -> str:
    """Returns the first error that pydantic found: key, value, and what is accepted."""
    first = error.errors(include_url=False)[0]
    place = place_of(first["loc"], value)
    if first["type"] == "missing":
        return f"{'.'.join([*place, str(first['loc'][-1])])} is missing"
    message = first["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    key = _SHORT.repr(".".join(place))[1:-1]
    if first["type"] == "extra_forbidden":
        return f"{key} is not a known key"
    return f"{key}{'=' if key else ''}{_SHORT.repr(first['input'])}: {message}"


def place_of(location: Iterable[str | int], value: Any) -> list[str]:
    """Returns the keys in the location of one of pydantic's errors in a value; the rest names union alternatives."""
    place = []
    for part in location:
        try:
            value = value[part]
        except (KeyError, TypeError):
            continue
        place.append(str(part))
    return place


def check_safetensors(path: Path) -> None:
    """Raises FileError unless the file has a valid header and all the bytes that it announces; reads the header."""
    from safetensors import SafetensorError, safe_open

    check_file(path, most=sys.maxsize)
    try:
        with safe_open(path, framework="np"):
            pass
    except (SafetensorError, OSError) as error:
        raise FileError(f"{path}: not whole safetensors: {error}") from None


# ---------------------------------------------------------------------- writing


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields the name of a file beside `path`, with its suffix, which replaces it if the block ends without an error.

    Missing folders are made, and removed again after an error. Raises FileError for a folder, OSError if it cannot
    write.
    """
    if path.is_dir():
        raise FileError(f"{path} is a folder: name a file")
    with naming(path), folders(path.parent):
        partial = path.parent / f".{secrets.token_hex(8)}{_PARTIAL}{path.suffix}"
        try:
            yield partial
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes or replaces a text file, whole or not at all; raises FileError or OSError."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def temporary_folder(place: Path) -> Iterator[Path]:
    """Yields an empty folder, removed at the end: in `place` if it is there, so on its device, otherwise beside it.

    Missing folders above `place` are made, and removed again after an error. Raises FileError if `place` is a file or
    a link to nothing; OSError if the folder cannot be made.
    """
    if (place.exists() or place.is_symlink()) and not place.is_dir():
        raise FileError(f"{place} is not a folder: name another place")
    above = place if place.is_dir() else place.parent
    with naming(place), folders(above):
        partial = above / f".{secrets.token_hex(8)}{_PARTIAL}"
        partial.mkdir()
        try:
            yield partial
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def move_into(made: Path, folder: Path, last: str) -> None:
    """Moves the files of a temporary folder to `folder`, replacing those with the same names, the file `last` at last.

    So `last` says that the folder is complete, if it is removed before. Raises OSError.
    """
    folder.mkdir(exist_ok=True)
    for path in sorted(made.iterdir(), key=lambda path: (path.name == last, path.name)):
        os.replace(path, folder / path.name)


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yields an empty folder that becomes `path`, which must not exist, if the block ends without an error.

    Raises FileExistsError if `path` exists, OSError if the folder cannot be made.
    """
    if path.exists() or path.is_symlink():
        raise FileExistsError(f"{path} exists: remove it, or use another folder")
    with temporary_folder(path) as partial:
        made = partial / "made"
        made.mkdir()
        yield made
        made.rename(path)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds the file to an OSError that names none, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


@contextlib.contextmanager
def folders(path: Path, keep: bool = True) -> Iterator[None]:
    """Makes a folder and those above it; removes what it made if the block ends with an error, or not to be kept."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        yield
        missing = [] if keep else missing
    finally:
        for folder in missing:
            with contextlib.suppress(OSError):  # somebody else may use it by now
                folder.rmdir()
