"""Run folders: how a run is written, resumed, locked and read. This room is their only reader and writer.

A folder holds config.json, inputs.json, env.json, prompt_config.json, metrics.jsonl, summary.json,
screenshots/, and one file a rank and record kind (trajectories.rank0.jsonl, judgements.rank0.jsonl).

Identity is content: inputs.json has the sha256 of what every flag that names a file held when the run began.
A resumed run compares these and no path, so that folders may be moved, copied and renamed.

ours: an episode counts once its trajectory line is on disk. Its judgement and its line of metrics are written
just before; those without a trajectory (the process was killed in between) are dropped on resume, so nothing
is written twice and nothing finished is lost.
"""

import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Self

from filelock import FileLock, Timeout

from rmsweb.config import defaults_of, flag, flat, rank, world_size
from rmsweb.jsonl import (
    RecordError,
    append_record,
    check_header,
    cut_torn_line,
    from_json,
    parse_json,
    read_records,
    replace_file,
    to_json,
    write_json,
)
from rmsweb.records import Judgement, MinedState, StepSample, Trajectory, is_success

PACKAGES = ("torch", "transformers", "safetensors", "flash-attn", "playwright", "httpx", "numpy", "pillow")
MAX_ID_BYTES = 4_096
RUN_FILES = ("trajectories.rank*.jsonl", "judgements.rank*.jsonl", "prompt_config.json")  # what a pool is
Inputs = Mapping[str, Sequence[Path]]  # field of the config -> the files and folders that it names
ROLLOUTS = "rollouts.jsonl"  # what RL sampled in some steps; rank 0 writes it
Role = Literal["collection", "evaluation", "pool", "mined", "rl", "sft", "none"]


class RunFolder:
    """A run folder as its readers see it; nothing is made or changed, and files are read when asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path

    # ------------------------------------------------------------------------------------------- JSON files

    def json(self, name: str) -> dict[str, Any]:
        """Return the object in a JSON file of the folder, empty without such a file.

        Raises RecordError, naming the file, for one that is not JSON.
        """
        file = self.path / name
        data = parse_json(file.read_bytes(), str(file), finite=False) if file.exists() else None
        return data if isinstance(data, dict) else {}

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        file = self.path / "metrics.jsonl"
        lines = file.read_bytes().splitlines() if file.exists() else []
        return [parse_json(line, f"{file}:{number}", finite=False) for number, line in enumerate(lines, 1)]

    # --------------------------------------------------------------------------------------------- episodes

    def files(self, kind: str) -> list[Path]:
        """Return the files of all ranks of a record kind, in order of rank."""
        return sorted(self.path.glob(f"{kind}.rank*.jsonl"), key=_rank_of)

    def finished(self) -> dict[str, tuple[Path, int]]:
        """Return where each committed trajectory lies: trajectory id -> (file, byte offset), sorted by id."""
        found: dict[str, tuple[Path, int]] = {}
        for path in self.files("trajectories"):
            for number, (offset, line) in enumerate(_whole_lines(path, Trajectory), 2):
                try:  # the id comes first; the rest of a long line need not be parsed
                    start = line.index(b":") + 1
                    text = line[start : start + MAX_ID_BYTES].decode("utf-8", "ignore")
                    name = json.JSONDecoder().raw_decode(text)[0]
                except ValueError:
                    raise RecordError(
                        f"{path}:{number}: found {line[:80]!r}, expected a trajectory"
                    ) from None
                found[name] = (path, offset)
        return dict(sorted(found.items()))

    def _read(self, path: Path, offset: int) -> Trajectory:
        with open(path, "rb") as file:
            file.seek(offset)
            where = f"{path} (byte {offset})"
            return from_json(Trajectory, parse_json(file.readline(), where), where)

    def trajectories(self) -> Iterator[Trajectory]:
        """Yield the committed trajectories of all ranks by id, one at a time: a long run exceeds memory."""
        for path, offset in self.finished().values():
            yield self._read(path, offset)

    def trajectory(self, trajectory_id: str) -> Trajectory:
        """Return one committed trajectory; KeyError for an unknown id. Looks for the ids once."""
        return self._read(*self._known[trajectory_id])

    @cached_property
    def _known(self) -> dict[str, tuple[Path, int]]:
        return self.finished()

    def judgements(self) -> dict[str, Judgement]:
        """Return the judgements of all ranks by trajectory id; a later one replaces an earlier one."""
        found: dict[str, Judgement] = {}
        for path in self.files("judgements"):
            for number, (_, line) in enumerate(_whole_lines(path, Judgement), 2):
                where = f"{path}:{number}"
                item = from_json(Judgement, parse_json(line, where), where)
                found[item.trajectory_id] = item
        return found

    def judged(self) -> Iterator[tuple[Trajectory, Judgement | None]]:
        """Yield each trajectory with its judgement."""
        verdicts = self.judgements()
        for trajectory in self.trajectories():
            yield trajectory, verdicts.get(trajectory.trajectory_id)

    # ------------------------------------------------------------------------------------------ what ran here

    @cached_property
    def first(self) -> Trajectory | None:
        """The first committed trajectory by id."""
        return next(self.trajectories(), None)

    @cached_property
    def role(self) -> Role:
        """What wrote the folder, known by the files in it."""
        if self.first is not None:
            if self.first.source.script == "collect":
                return "collection"
            return "evaluation" if self.first.task.split == "held-out" else "pool"
        if (self.path / "mined.jsonl").exists():
            return "mined"
        if any("std_rejected_frac" in line for line in self.metrics):
            return "rl"
        return "sft" if self.metrics else "none"

    @cached_property
    def scripted(self) -> set[str]:
        """The scripted roles that the run used."""
        config = self.json("config.json")
        if not config.get("judge_url"):
            config.pop("judge_model", None)  # the default of a judge that was not asked
        models = {str(value) for name, value in config.items() if name.endswith("_model")}
        models |= {self.first.source.policy} if self.first else set()
        models |= {verdict.model for verdict in self.judgements().values()}
        return {name for name in models if name.startswith("scripted-")}


class RunWriter(RunFolder):
    """A run folder that this process writes.

    Rank 0 locks the folder for all ranks of the run until `close` or the end of the process.
    """

    def __init__(
        self,
        path: Path,
        config: Any = None,
        *,
        resume: bool = False,
        may_differ: Sequence[str] = (),
        inputs: Inputs = MappingProxyType({}),
    ) -> None:
        """Make the folder, or open it again with `resume`; rank 0 writes config, inputs and env.json.

        Raises ValueError where another process writes the folder, where it holds a run and `resume` is off,
        where a config value differs from the run's and is not in `may_differ`, or where the content of an
        input has changed.
        """
        super().__init__(path)
        if config is not None:
            check_out(path, resume)
        self.inputs = {name: digest(paths) for name, paths in inputs.items() if paths}
        self._started = time.monotonic()
        path.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(path / ".lock")
        self.metrics_path = path / ("metrics.jsonl" if rank() == 0 else f"metrics.rank{rank()}.jsonl")
        if rank() == 0:
            try:
                self._lock.acquire(blocking=False)
            except Timeout:
                raise ValueError(
                    f"{path}: another process writes this run; wait for it, or choose another --out"
                ) from None
        cut_torn_line(self.metrics_path)
        if rank() == 0 and config is not None:
            self._start(
                to_json(flat(config)),
                to_json(defaults_of(type(config))),
                {*may_differ, *self.inputs, "resume", "out"},
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let another process write the folder."""
        self._lock.release()

    def _start(self, config: dict[str, Any], defaults: dict[str, Any], free: set[str]) -> None:
        """Compare config and inputs with the run's, if there is one, and write them."""
        if holds_run(self.path):
            before, known = self.json("config.json"), self.json("inputs.json")
            for name in sorted((before.keys() | config.keys()) - free):
                if before.get(name) != config.get(name):
                    raise ValueError(
                        f"{flag(name)} is {config.get(name)!r}, but the run in {self.path} was started with "
                        f"{before.get(name)!r}"
                    )
            changed = sorted(name for name in known | self.inputs if known.get(name) != self.inputs.get(name))
            if changed:
                found = "; ".join(
                    f"{flag(name)} was {str(known.get(name))[:12]}, is {str(self.inputs.get(name))[:12]}"
                    for name in changed
                )
                raise ValueError(
                    f"{self.path}: the content of what the run was started with changed: {found}"
                )
        self.write_json("config.json", config)
        self.write_json("inputs.json", self.inputs)
        self.write_json("env.json", environment() | {"defaults": defaults})

    def write_json(self, name: str, value: Any) -> None:
        """Replace a JSON file of the folder as a whole."""
        write_json(self.path / name, value)

    # ---------------------------------------------------------------------------------------------- metrics

    def log(self, values: dict[str, Any], name: str = "") -> None:
        """Append one line to metrics.jsonl, or to another file of the folder."""
        path = self.path / name if name else self.metrics_path
        with open(path, "a", encoding="utf-8", newline="\n") as file:
            file.write(json.dumps(to_json(values), ensure_ascii=False) + "\n")

    def cut_metrics(self, step: int) -> None:
        """Drop the metrics and rollouts after `step`, which a resumed run writes again; -1 drops all."""
        for path in (self.metrics_path, *([self.path / ROLLOUTS] if rank() == 0 else [])):
            cut_torn_line(path)
            self._keep(path, lambda line: line["step"] <= step)

    # --------------------------------------------------------------------------------------------- episodes

    def records(self, kind: str) -> Path:
        """Return this rank's file of a record kind: "trajectories" is trajectories.rank0.jsonl."""
        return self.path / f"{kind}.rank{rank()}.jsonl"

    def commit(self, trajectory: Trajectory, judgement: Judgement | None) -> None:
        """Write an episode: judgement and line of metrics, then the trajectory, which makes it count."""
        if judgement is not None:
            append_record(self.records("judgements"), judgement)
        self.log(
            {
                "trajectory": trajectory.trajectory_id,
                "round": trajectory.source.round,
                "success": is_success(trajectory, judgement),
                "ended": trajectory.ended,
                "steps": len(trajectory.steps),
                "prompt_tokens": trajectory.usage.prompt_tokens,
                "completion_tokens": trajectory.usage.completion_tokens,
                "usage_unknown": trajectory.usage.usage_unknown,
                "seconds": round(time.monotonic() - self._started, 1),
            }
        )
        append_record(self.records("trajectories"), trajectory)

    def own_episodes(self) -> list[str]:
        """Return the ids of the committed episodes whose files this rank looks after."""
        found = self.finished().items()
        return [name for name, (path, _) in found if _rank_of(path) % world_size() == rank()]

    def judge_again(self, judgement: Judgement) -> None:
        """Add a judgement of a committed episode beside its first one, which it replaces for readers."""
        path, _ = self._known[judgement.trajectory_id]
        append_record(self.path / path.name.replace("trajectories", "judgements"), judgement)

    def repair(self) -> None:
        """Cut torn last lines and drop judgements and metrics without a trajectory; call before resuming.

        The files of ranks that no longer exist (WORLD_SIZE shrank) are shared out among those that do.
        """
        beside = [*self.files("judgements"), *self.path.glob("metrics*.jsonl")]
        paths = [*self.files("trajectories"), *beside]
        mine = [path for path in paths if _rank_of(path) % world_size() == rank()]
        for path in mine:
            cut_torn_line(path)
        known = self.finished()
        for path in mine:
            if path in beside:
                self._keep(path, lambda line: _episode_of(line) is None or _episode_of(line) in known)

    def _keep(self, path: Path, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Drop the lines of a file that are not wanted."""
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        kept = [
            line
            for number, line in enumerate(lines, 1)
            if wanted(parse_json(line, f"{path}:{number}", "; remove this line to go on", finite=False))
        ]
        if len(kept) < len(lines):
            with replace_file(path) as temporary:
                temporary.write_bytes(b"".join(kept))


def holds_run(path: Path) -> bool:
    """Return whether a run was started in a folder; a start that failed before its first record is none."""
    return (path / "config.json").exists() and any(path.glob("*.jsonl"))


def check_out(path: Path, resume: bool) -> None:
    """Raise ValueError for a folder that holds a run and is not to be resumed."""
    if holds_run(path) and not resume:
        raise ValueError(f"{path} already holds a run: go on with --resume, or choose another --out")


def digest(paths: Iterable[Path]) -> str:
    """Return the sha256 of the content of files and folders, whatever they are called and wherever they are.

    Of a run folder the episodes and verdicts count, of any other folder (a checkpoint) all its files.
    """
    total = hashlib.sha256()
    for path in paths:
        parts = (
            sorted(part for pattern in RUN_FILES for part in path.glob(pattern)) if path.is_dir() else [path]
        )
        for part in parts or sorted(part for part in path.iterdir() if part.is_file()):
            total.update(part.name.encode() if path.is_dir() else b"")
            with open(part, "rb") as file:
                total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


def read_samples(path: Path) -> Iterator[StepSample]:
    """Yield the records of a samples.jsonl or mined.jsonl.

    Raises RecordError for a file of something else.
    """
    with open(path, encoding="utf-8") as lines:
        header = lines.readline().strip()
    kind = next((kind for kind in (MinedState, StepSample) if f'"{kind.__name__}"' in header), None)
    if kind is None:
        raise RecordError(
            f"{path}:1: header is {header[:80]!r}, expected one of a MinedState or StepSample file"
        )
    yield from read_records(path, kind)


def _rank_of(path: Path) -> int:
    return int(path.name.split(".rank")[1].split(".")[0]) if ".rank" in path.name else 0


def _episode_of(line: dict[str, Any]) -> str | None:
    """Return the episode that a judgement or a line of metrics is about; None for a header."""
    return line.get("trajectory_id", line.get("trajectory"))


def _whole_lines(path: Path, cls: type) -> Iterator[tuple[int, bytes]]:
    """Yield (byte offset, line) of a record file, without its header and without an unfinished last line.

    Raises RecordError for a file whose first line is no header of this kind.
    """
    with open(path, "rb") as file:
        header = file.readline()
        if header.endswith(b"\n"):
            check_header(header, cls, f"{path}:1")
        offset = len(header)
        for line in file:
            if line.endswith(b"\n"):
                yield offset, line
            offset += len(line)


def _said(*command: str) -> list[str]:
    """Return the lines that a command prints; none without the command or where it fails."""
    with suppress(OSError, subprocess.SubprocessError):
        found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return found.stdout.splitlines()
    return []


def environment() -> dict[str, Any]:
    """Return what a run ran on: commit (marked -dirty if files differ), versions, machine, command line.

    No environment variable is in it, because one may hold a key.
    """
    packages = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            packages[name] = metadata.version(name)
    root = str(Path(__file__).parent.parent)
    checkout = ("git", "--git-dir", f"{root}/.git", "--work-tree", root)
    cpuinfo = Path("/proc/cpuinfo")
    cpu = (
        [line for line in cpuinfo.read_text().splitlines() if "model name" in line]
        if cpuinfo.exists()
        else []
    )
    return {
        "commit": "".join(_said(*checkout, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")),
        "cpu": cpu[0].partition(":")[2].strip() if cpu else platform.processor(),
        "gpus": _said("nvidia-smi", "--query-gpu=name", "--format=csv,noheader"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "packages": packages,
        "argv": sys.argv,
        "world_size": world_size(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
