"""The command line of a script: flags from nested configs, exit codes, progress bars.

Purpose: a config is a frozen dataclass that extends `Config`. Each field is declared once, by `opt`, with its
default, its bounds, its help and the paper's value; `part` nests the config of a room. A script's flags are
the fields of its config and of its parts, so a value travels as the object it belongs to, and the package and
the command line check it alike.

Exit codes: 0 done, 1 unfinished work (the last line says so) or a bug (with traceback), 2 wrong flags or bad
data, 3 something is missing, 130 interrupted.
"""

import argparse
import dataclasses
import json
import os
import sys
import traceback
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial, update_wrapper
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn, TypeVar

from tqdm import tqdm

C = TypeVar("C")
T = TypeVar("T")
Field = dataclasses.Field[Any]
LOG_SECONDS = 30.0  # between two lines of progress in a log
METAVARS: dict[Any, str] = {int: "N", float: "X", Path: "PATH", str: "TEXT"}
BOUNDS = {
    "at_least": (float.__ge__, "at least"),
    "above": (float.__gt__, "more than"),
    "at_most": (float.__le__, "at most"),
    "below": (float.__lt__, "less than"),
}


# ------------------------------------------------------------------------------------------------- configs


def opt(
    default: Any = dataclasses.MISSING,
    help: str = "",
    *,
    paper: object = None,
    alias: str = "",
    **bounds: float,
) -> Any:
    """Declare a config field that is a flag; one without a default is required.

    Args: paper: the paper's value, shown by --help. alias: a second name of the field, whose flag is accepted
    too. bounds: at_least, above, at_most or below, checked when a config is made (None passes).
    """
    if not bounds.keys() <= BOUNDS.keys():
        raise TypeError(f"opt: unknown bounds {sorted(bounds.keys() - BOUNDS.keys())}")
    metadata = {"help": help, "paper": paper, "bounds": bounds, "alias": alias}
    return dataclasses.field(default=default, metadata=metadata)


def part(cls: type[C], **defaults: Any) -> C:
    """Declare a config field that holds the config of a room; `defaults` replace defaults of its fields."""
    return dataclasses.field(default_factory=partial(cls, **defaults), metadata={"part": defaults})


def flag(name: str) -> str:
    """Return the flag of a field: `max_steps` is --max-steps."""
    return "--" + name.replace("_", "-")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Base of all configs: checks the bounds of its fields when it is made.

    A subclass with rules of its own extends `__post_init__` and raises ValueError naming the flag. `prefix`
    begins the names of its flags, so that two parts may have the same fields.
    """

    prefix: ClassVar[str] = ""

    @classmethod
    def title(cls) -> str:
        """Return the heading of the config's flags in --help."""
        return (cls.__doc__ or "").strip().splitlines()[0].rstrip(".")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            for name, bound in field.metadata.get("bounds", {}).items():
                holds, words = BOUNDS[name]
                if value is not None and not holds(float(value), float(bound)):
                    name = flag(self.prefix + field.name)
                    raise ValueError(f"{name} {value}: expected {words} {bound:g}")


def flat(config: Any) -> dict[str, Any]:
    """Return the fields of a config and of its parts by name, as --help lists them."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        values |= flat(value) if "part" in field.metadata else {config.prefix + field.name: value}
    return values


def _flags(cls: Any, defaults: dict[str, Any]) -> Iterator[tuple[Any, Field, Any, Any]]:
    """Yield (config class, field, type, default) of every flag of a config class, parts included."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if "part" in field.metadata:
            yield from _flags(hints[field.name], field.metadata["part"] | defaults)
        else:
            yield cls, field, hints[field.name], defaults.get(field.name, field.default)


def defaults_of(cls: Any) -> dict[str, Any]:
    """Return the default of every flag of a config class by name; required ones are left out."""
    found = {field.name: default for _, field, _, default in _flags(cls, {})}
    return {name: default for name, default in found.items() if default is not dataclasses.MISSING}


def _build(cls: Any, values: dict[str, Any]) -> Any:
    """Make a config and its parts from the values of all flags."""
    hints = typing.get_type_hints(cls)
    return cls(
        **{
            field.name: _build(hints[field.name], values)
            if "part" in field.metadata
            else values[cls.prefix + field.name]
            for field in dataclasses.fields(cls)
        }
    )


# --------------------------------------------------------------------------------------------------- flags


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Exit with code 2 and one line."""
        self.exit(2, f"{self.prog}: {message} (see --help)\n")


def json_object(text: str) -> dict[str, Any]:
    """Return the JSON object that a flag gives."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a JSON object")
    return found


def number_or_none(kind: type, text: str) -> Any:
    """Return a number, None for the word none."""
    return None if text == "none" else kind(text)


def _converter(hint: Any, name: str) -> tuple[Any, dict[str, Any]]:
    """Return the converter of a flag's type and further arguments of add_argument."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        kind = next(arg for arg in args if arg is not type(None))
        if kind in (int, float):
            convert = update_wrapper(partial(number_or_none, kind), kind, updated=())
            return convert, {"metavar": METAVARS[kind]}
        return _converter(kind, name)
    if origin is dict:
        return json_object, {"metavar": "JSON"}
    if origin is Literal:
        return type(args[0]), {"choices": args}
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        return args[0], {"nargs": "+", "metavar": METAVARS[args[0]]}
    if hint in METAVARS:
        return hint, {"metavar": METAVARS[hint]}
    raise TypeError(f"{flag(name)}: no flag can be made of {hint}")


def _help(field: Field, hint: Any, default: Any) -> str:
    """Return a flag's help: its text, the paper's value and the default."""
    notes = [] if field.metadata["paper"] is None else [f"paper: {field.metadata['paper']}"]
    if default is dataclasses.MISSING:
        notes.append("required")
    elif hint is bool:
        notes.append(f"default: {'on' if default else 'off'}")
    elif default not in (None, "", ()):
        notes.append(f"default: {' '.join(map(str, default)) if isinstance(default, tuple) else default}")
    return f"{field.metadata['help']} ({'; '.join(notes)})".replace(" ()", "").replace("%", "%%")


def _add_flag(parser: Any, name: str, field: Field, hint: Any, default: Any) -> None:
    required = default is dataclasses.MISSING
    names = [flag(name), *([flag(field.metadata["alias"])] if field.metadata["alias"] else [])]
    common: dict[str, Any] = {
        "dest": name,
        "help": _help(field, hint, default),
        "required": required,
        "default": None if required else default,
    }
    if hint in (bool, bool | None):
        parser.add_argument(*names, action=argparse.BooleanOptionalAction, **common)
        return
    kind, extra = _converter(hint, name)
    parser.add_argument(*names, type=kind, **common, **extra)


def argv_of(cls: Any, values: Mapping[str, Any]) -> list[str]:
    """Return the flags that give a config class the values that `flat` and JSON made of it.

    Names that the class does not know are left out.
    """
    argv: list[str] = []
    for owner, field, hint, _ in _flags(cls, {}):
        name = owner.prefix + field.name
        value = values.get(name)
        if isinstance(value, bool):
            argv.append(flag(name if value else f"no_{name}"))
        elif isinstance(value, list):
            argv += [flag(name), *map(str, value)] if value else []
        elif value is not None:
            argv.append(f"{flag(name)}={json.dumps(value) if isinstance(value, dict) else value}")
        elif name in values and hint in (int | None, float | None):
            argv.append(f"{flag(name)}=none")
    return argv


def parse_config(
    cls: type[C], argv: Sequence[str] | None = None, *, prog: str | None = None, description: str = ""
) -> C:
    """Make a config of class `cls` from the command line.

    A bool is --x/--no-x and a tuple takes several values. Wrong, shortened and unknown flags end the process
    with one line and exit code 2. Raises ValueError, naming the flag, for a value out of its bounds.
    """
    text = description or (cls.__doc__ or "").strip()
    form = argparse.RawDescriptionHelpFormatter
    parser = _Parser(prog=prog, description=text, allow_abbrev=False, formatter_class=form)
    groups: dict[Any, Any] = {cls: parser}
    for owner, field, hint, default in _flags(cls, {}):
        if owner not in groups:
            groups[owner] = parser.add_argument_group(owner.title())
        _add_flag(groups[owner], owner.prefix + field.name, field, hint, default)
    values = vars(parser.parse_args(argv))
    return typing.cast(
        C,
        _build(cls, {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}),
    )


# ----------------------------------------------------------------------------------------------- processes


def _count(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdigit():
        raise ValueError(f"environment variable {name} is {text!r}, expected a number")
    return int(text)


def rank() -> int:
    """Return the number of this process, which torchrun sets; 0 without torchrun."""
    return _count("RANK", 0)


def world_size() -> int:
    """Return the number of processes, which torchrun sets; 1 without torchrun."""
    return max(1, _count("WORLD_SIZE", 1))


def shard(items: Sequence[T]) -> list[T]:
    """Return this process's share of the items: every WORLD_SIZE-th from RANK on.

    Cut before finished work is left out, so that ranks never overlap.
    """
    return list(items[rank() :: world_size()])


def main_guard(main: Callable[[], int | None]) -> int:
    """Run a script's main and return its exit code.

    Bad user data becomes one line on stderr, a bug keeps its traceback. RMSWEB_TRACEBACK=1 shows the
    traceback of bad user data too.
    """
    try:
        return main() or 0
    except FileNotFoundError as error:
        code, message = 3, str(error)
    except ConnectionError as error:  # an endpoint that does not answer
        code, message = 1, str(error)
    except (ValueError, OSError) as error:  # no permission, a full disk, a file where a folder should be
        code, message = 2, str(error)
    except KeyboardInterrupt:
        code, message = 130, "interrupted; what was written before is kept"
    if os.environ.get("RMSWEB_TRACEBACK"):
        traceback.print_exc()
    script = Path(sys.argv[0])
    name = script.parent.name if script.stem == "__main__" else script.name
    print(f"{name}: {message}", file=sys.stderr)
    return code


def progress(
    items: Iterable[Any] | None = None, *, total: int | None = None, label: str = "", initial: int = 0
) -> Any:
    """Return a progress bar on stderr (tqdm), silent on ranks other than 0.

    Where stderr is a log file, it prints a line every LOG_SECONDS at most.
    """
    terminal = sys.stderr.isatty()
    return tqdm(
        items,
        total=total,
        desc=label,
        initial=initial,
        disable=rank() != 0,
        mininterval=0.2 if terminal else LOG_SECONDS,
        dynamic_ncols=terminal,
    )
