"""The JSON form of records: JSON values, JSONL files, and the replacement of a file as a whole.

Purpose: one owner for the bytes. A file of records is UTF-8 JSON Lines whose first line is a header
`{"schema_version": 1, "kind": "Trajectory"}`, followed by one record a line. Any dataclass of plain types has
this form, whether it is one of `records` or the configuration of a prompt.
"""

import codecs
import json
import os
import re
import threading
import types
import typing
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

SCHEMA_VERSION = 1
JSON_TYPES: dict[Any, tuple[type, ...]] = {tuple: (list,), float: (int, float)}  # others are their own type
JSON_NAMES = {tuple: "a list", dict: "an object"}
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
R = TypeVar("R")


class RecordError(ValueError):
    """A file does not hold what it should: the message names file, line, what was found and expected."""


# --------------------------------------------------------------------------------------------------- values


def _plain(value: Any) -> Any:
    """Return what JSON has for a record or a path."""
    if is_dataclass(value):
        return {item.name: getattr(value, item.name) for item in fields(value)}
    return os.fspath(value)


def to_json(value: Any) -> Any:
    """Turn records, paths and containers into plain JSON values (dicts, lists, strings, numbers, None)."""
    return json.loads(json.dumps(value, default=_plain))


def dumps(value: Any) -> str:
    """Return one line of JSON for a record or a plain value: compact, UTF-8 kept, keys in field order."""
    return json.dumps(value, default=_plain, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object; ValueError for one with a key twice, of which JSON would keep the last in silence."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"a key is given twice among {', '.join(key for key, _ in pairs)[:200]}")
    return found


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def parse_json(data: bytes, where: str, advice: str = "", *, finite: bool = True) -> Any:
    """Return the value of a JSON text in UTF-8.

    Raises RecordError, naming the place, for anything else: another encoding, a byte order mark, an empty
    line, a key given twice, endless nesting, half of a surrogate pair, and NaN if only `finite` numbers are
    expected.
    """
    if data.startswith(codecs.BOM_UTF8):
        raise RecordError(f"{where}: found a byte order mark, expected plain UTF-8")
    if not data.strip():
        raise RecordError(f"{where}: found an empty line, expected a JSON value")
    try:
        number = _no_number if finite else None
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=number)
        if SURROGATE.search(data):  # half of a pair has no UTF-8, so nothing could write it again
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeDecodeError as error:
        raise RecordError(f"{where}: not UTF-8 ({error.reason})") from None
    except RecursionError:
        raise RecordError(f"{where}: nested too deeply for a record") from None
    except ValueError as error:
        raise RecordError(f"{where}: not JSON ({' '.join(str(error).split())}){advice}") from None


@cache
def _layout(cls: Any) -> dict[str, tuple[Any, bool]]:
    """Return the type hint of each field, and whether the field must be given."""
    hints = typing.get_type_hints(cls)
    return {
        item.name: (hints[item.name], item.default is MISSING and item.default_factory is MISSING)
        for item in fields(cls)
    }


def _decode(hint: Any, value: Any, where: str) -> Any:
    """Turn a plain JSON value into what the type hint says; RecordError names the place."""
    kind, args = typing.get_origin(hint) or hint, typing.get_args(hint)
    if hint is Any or (value is None and types.NoneType in args):
        return value
    if kind in (types.UnionType, typing.Union):
        options: list[Any] = [option for option in args if option is not types.NoneType]
        chosen = options[0]
        if len(options) > 1 and isinstance(value, dict):  # the first record that has all fields of the value
            chosen = max(options, key=lambda option: value.keys() <= _layout(option).keys())
        return _decode(chosen, value, where)
    if is_dataclass(hint):
        return from_json(typing.cast(type, hint), value, where)
    if kind is Literal:
        fits, expected = value in args, f"one of {', '.join(map(repr, args))}"
    else:
        fits = type(value) in JSON_TYPES.get(kind, (kind,))
        expected = JSON_NAMES.get(kind, kind.__name__)
    if not fits:
        raise RecordError(f"{where}: found {value!r}, expected {expected}")
    if kind is tuple:
        hints = args[:1] * len(value) if args[-1] is Ellipsis else args
        if len(hints) != len(value):
            raise RecordError(f"{where}: found {len(value)} items, expected {len(hints)}")
        pairs = zip(hints, value, strict=True)
        return tuple(_decode(inner, item, f"{where}[{i}]") for i, (inner, item) in enumerate(pairs))
    if kind is dict:
        return {key: _decode(args[1], item, f"{where}.{key}") for key, item in value.items()}
    return float(value) if kind is float else value


def from_json(cls: type[R], data: Any, where: str = "record") -> R:
    """Turn a JSON object into a record.

    Unknown fields are ignored (newer writers); missing ones and wrong types raise RecordError.

    >>> from rmsweb.records import Tab
    >>> from_json(Tab, {"tab_id": "0001", "url": "http://a/", "title": "A"})
    Tab(tab_id='0001', url='http://a/', title='A')
    """
    if not isinstance(data, dict):
        raise RecordError(f"{where}: found {type(data).__name__}, expected an object for {cls.__name__}")
    layout = _layout(typing.cast(Any, cls))
    missing = sorted(name for name, (_, required) in layout.items() if required and name not in data)
    if missing:
        raise RecordError(f"{where}: {cls.__name__} lacks {', '.join(missing)}")
    given = {name: hint for name, (hint, _) in layout.items() if name in data}
    return cls(**{name: _decode(hint, data[name], f"{where}.{name}") for name, hint in given.items()})


# --------------------------------------------------------------------------------------------------- files


def _header(cls: type) -> dict[str, Any]:
    return {"schema_version": SCHEMA_VERSION, "kind": cls.__name__}


def check_header(line: bytes, cls: type, where: str) -> None:
    """Raise RecordError unless a file's first line is the header of that kind of record."""
    data, wanted = parse_json(line, where), _header(cls)
    if not isinstance(data, dict) or not wanted.items() <= data.items():
        raise RecordError(f"{where}: header says {line[:200]!r}, expected {wanted}")


def read_records(path: Path, cls: type[R]) -> Iterator[R]:
    """Yield the records of a JSONL file in file order.

    Raises RecordError, naming file and line, and FileNotFoundError.
    """
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}:{number}"
            if number == 1:
                check_header(line, cls, where)
                continue
            yield from_json(cls, parse_json(line, where), where)


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Give a temporary path to write to, which replaces `path` at the end of the block, or not at all.

    Folders are made as needed. Nothing is left behind where the block raises.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file as a whole; dataclasses and paths are converted."""
    with replace_file(path) as temporary:
        text = json.dumps(value, default=_plain, indent=1, ensure_ascii=False)
        temporary.write_text(text + "\n", encoding="utf-8")


def write_records(path: Path, cls: type[R], records: Iterable[R]) -> None:
    """Write a whole file of records at once."""
    with replace_file(path) as temporary, open(temporary, "w", encoding="utf-8", newline="\n") as file:
        file.write(json.dumps(_header(cls)) + "\n")
        file.writelines(dumps(item) + "\n" for item in records)


def append_record(path: Path, item: Any) -> None:
    """Add one record, with the header where the file is new; one write call, flushed to disk."""
    new = not path.exists() or path.stat().st_size == 0
    with open(path, "a", encoding="utf-8", newline="\n") as file:
        header = json.dumps(_header(type(item))) + "\n" if new else ""
        file.write(header + dumps(item) + "\n")
        file.flush()
        os.fsync(file.fileno())


def cut_torn_line(path: Path) -> None:
    """Remove an unfinished last line that a killed writer left; finish a whole one that lacks its end."""
    data = path.read_bytes() if path.exists() else b""
    if not data or data.endswith(b"\n"):
        return
    start = data.rfind(b"\n") + 1
    try:
        parse_json(data[start:], str(path))
    except RecordError:
        os.truncate(path, start)
        return
    with open(path, "ab") as file:
        file.write(b"\n")


def inside(root: Path, name: str) -> Path:
    """Return the path of a file that a record names relative to its run folder.

    Raises RecordError for a name that leaves the folder: absolute, by `..`, or through a link. A run folder
    may come from a stranger.
    """
    path = root / name
    if "\0" in name or Path(name).is_absolute() or not path.resolve().is_relative_to(root.resolve()):
        raise RecordError(f"{root}: a record names the file {name!r}, which is outside of this folder")
    return path
