"""What the five scripts share: flags from a config dataclass, the run folder, metrics, progress bars, exit
codes.

Purpose: a script is a frozen keyword-only dataclass (one field a flag, made by `opt`), a function that
composes the package, and
`sys.exit(main_guard(main))`. Nothing here imports the package.

Exit codes: 0 done, 1 a bug (with traceback), 2 wrong flags or bad data, 3 something is missing, 130
interrupted.
"""

import argparse
import dataclasses
import json
import os
import platform
import sys
import time
import traceback
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

from tqdm import tqdm

C = TypeVar("C")
_PACKAGES = ("torch", "transformers", "safetensors", "flash-attn", "playwright", "httpx", "numpy", "pillow")


# ------------------------------------------------------------------------------------------------------ flags


def opt(default: Any = dataclasses.MISSING, help: str = "") -> Any:
    """A dataclass field that is a flag; without a default the flag is required.

    `help` says the paper's value where there is one.
    """
    return dataclasses.field(default=default, metadata={"help": help})


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line and exit code 2."""
        self.exit(2, f"{self.prog}: {message} (see --help)\n")


def _value_type(hint: Any, flag: str) -> tuple[Any, dict[str, Any]]:
    """Type hint of a field -> (converter, further arguments of add_argument)."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        inner = [a for a in args if a is not type(None)]
        return _value_type(inner[0], flag)
    if origin is Literal:
        return type(args[0]), {"choices": args}
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        return args[0], {"nargs": "+"}
    if hint in (str, int, float, Path):
        return hint, {}
    raise TypeError(f"{flag}: no flag can be made of {hint}")


def _add_flag(parser: argparse.ArgumentParser, field: "dataclasses.Field[Any]", hint: Any) -> None:
    flag, required = "--" + field.name.replace("_", "-"), field.default is dataclasses.MISSING
    shown = field.default if not isinstance(field.default, tuple) else " ".join(map(str, field.default))
    text = field.metadata.get("help", "").replace("%", "%%")
    text += (
        " (required)"
        if required
        else ""
        if shown in (None, "") or isinstance(shown, bool)
        else f" (default: {shown})".replace("%", "%%")
    )
    common: dict[str, Any] = {
        "dest": field.name,
        "required": required,
        "default": None if required else field.default,
    }
    if hint is bool:
        state = "" if required else f" (default: {'on' if field.default else 'off'})"
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, help=text + state, **common)
        return
    kind, extra = _value_type(hint, flag)
    metavar = None if "choices" in extra else {int: "N", float: "X", Path: "PATH"}.get(kind, "TEXT")
    parser.add_argument(flag, type=kind, help=text.strip(), metavar=metavar, **common, **extra)


def parse_config(
    cls: type[C], argv: Sequence[str] | None = None, *, prog: str | None = None, description: str = ""
) -> C:
    """Flags -> an instance of the dataclass `cls`: field `max_steps` is `--max-steps`, a bool is
    `--x/--no-x`, a tuple takes several values.

    Wrong and unknown flags end the process with one line and exit code 2; `cls.__post_init__` may raise
    ValueError naming a flag.
    """
    text = description or (cls.__doc__ or "").strip()
    parser = _Parser(
        prog=prog, description=text, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(typing.cast(Any, cls)):
        _add_flag(parser, field, hints[field.name])
    values = vars(parser.parse_args(argv))
    return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


# -------------------------------------------------------------------------------------------------- processes


def _count(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdigit():
        raise ValueError(f"environment variable {name} is {text!r}, expected a number")
    return int(text)


def rank() -> int:
    """Number of this process, from the variable that torchrun sets; 0 where there is none."""
    return _count("RANK", 0)


def world_size() -> int:
    """Number of processes, from the variable that torchrun sets; 1 where there is none."""
    return max(1, _count("WORLD_SIZE", 1))


def main_guard(main: Callable[[], int | None]) -> int:
    """Runs a script's main and returns its exit code; bad user data becomes one line on stderr, a bug keeps
    its traceback.

    RMSWEB_TRACEBACK=1 shows the traceback of bad user data too.
    """
    try:
        return main() or 0
    except FileNotFoundError as error:
        code, message = 3, str(error)
    except ValueError as error:
        code, message = 2, str(error)
    except KeyboardInterrupt:
        code, message = 130, "interrupted; everything finished so far is on disk, --resume goes on"
    if os.environ.get("RMSWEB_TRACEBACK"):
        traceback.print_exc()
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    return code


# ------------------------------------------------------------------------------------------------- run folder


def _jsonable(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _jsonable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _jsonable(item) for key, item in value.items()}
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file at once (a temporary file, then a rename); dataclasses and paths are converted."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(_jsonable(value), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def environment() -> dict[str, Any]:
    """What a run ran on: versions, machine, command line. No environment variables: they may hold keys."""
    versions: dict[str, str] = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "packages": versions,
        "argv": sys.argv,
        "world_size": world_size(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


class RunFolder:
    """A run's folder: config.json, env.json, metrics.jsonl, and the record files that the script adds."""

    def __init__(
        self, path: Path, *, resume: bool = False, config: Any = None, may_differ: Sequence[str] = ()
    ) -> None:
        """Makes or reopens the folder; rank 0 writes config.json and env.json.

        ValueError where the folder holds records of a run and `resume` is off, or where a config field that
        is not in `may_differ` (nor `resume` itself) is another one than before.
        """
        self.path, self.resume = path, resume
        path.mkdir(parents=True, exist_ok=True)
        self.metrics_path = path / ("metrics.jsonl" if rank() == 0 else f"metrics.rank{rank()}.jsonl")
        self._cut_torn_metrics()
        if rank() != 0:
            return
        file = path / "config.json"
        if file.exists() and any(
            path.glob("*.jsonl")
        ):  # a start that failed before its first record is no run
            if not resume:
                raise ValueError(f"{path} already holds a run: go on with --resume, or choose another --out")
            self._compare(file, _jsonable(config), {*may_differ, "resume"})
        write_json(file, config)
        write_json(path / "env.json", environment())

    @staticmethod
    def _compare(file: Path, config: Any, free: set[str]) -> None:
        try:
            before = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{file}: not JSON ({error})") from None
        if not isinstance(before, dict) or not isinstance(config, dict):
            return
        for name in sorted((before.keys() | config.keys()) - free):
            if before.get(name) != config.get(name):
                flag = name.replace("_", "-")
                raise ValueError(
                    f"--{flag} is {config.get(name)!r}, but the run in {file.parent} was started with {before.get(name)!r}"
                )

    def _cut_torn_metrics(self) -> None:
        """Removes what a killed run left of a last line."""
        data = self.metrics_path.read_bytes() if self.metrics_path.exists() else b""
        if data and not data.endswith(b"\n"):
            os.truncate(self.metrics_path, data.rfind(b"\n") + 1)

    def cut_metrics(self, step: int) -> None:
        """Drops the lines of metrics.jsonl behind those of `step`, which a resumed run writes again; -1 drops
        all.
        """
        kept = 0
        for line in (
            self.metrics_path.read_bytes().splitlines(keepends=True) if self.metrics_path.exists() else ()
        ):
            if json.loads(line)["step"] > step:
                os.truncate(self.metrics_path, kept)
                return
            kept += len(line)

    def metrics(self, values: dict[str, Any]) -> None:
        """Appends one line to metrics.jsonl, on disk when this returns."""
        with open(self.metrics_path, "a", encoding="utf-8", newline="\n") as file:
            file.write(json.dumps(_jsonable(values), ensure_ascii=False) + "\n")

    def records(self, kind: str) -> Path:
        """This rank's file of a record kind: records("trajectories") is trajectories.rank0.jsonl."""
        return self.path / f"{kind}.rank{rank()}.jsonl"

    def all_records(self, kind: str) -> list[Path]:
        """The files of all ranks of a record kind that are there, in order of rank."""
        found = self.path.glob(f"{kind}.rank*.jsonl")
        return sorted(found, key=lambda path: int(path.name.split(".rank")[1].split(".")[0]))


def progress(
    items: Iterable[Any] | None = None, *, total: int | None = None, label: str = "", initial: int = 0
) -> Any:
    """A progress bar on stderr (tqdm), silent on ranks other than 0; where stderr is a log file, a line every
    five seconds at most.
    """
    interval = 0.2 if sys.stderr.isatty() else 5.0
    return tqdm(
        items,
        total=total,
        desc=label,
        initial=initial,
        disable=rank() != 0,
        mininterval=interval,
        dynamic_ncols=sys.stderr.isatty(),
    )
