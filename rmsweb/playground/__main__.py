"""`python -m rmsweb.playground serve | tasks | teacher | play`: look at the sites, write the task files, run
the scripted LLM roles, step through a task in the terminal.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from rmsweb.jsonl import write_records
from rmsweb.playground.server import Server
from rmsweb.playground.sites import SITES
from rmsweb.playground.tasks import make_worlds
from rmsweb.playground.teacher import ROLES, TeacherServer
from rmsweb.records import Split, Task


def _serve(port: int) -> None:
    server = Server(port).start()
    print("The playground (stop with Ctrl-C):")
    for site in SITES:
        print(f"  http://{site}.localhost:{server.port}/", flush=True)
    try:
        server.wait()
    finally:
        server.stop()


def _tasks(out: Path, counts: dict[Split, int], trouble: float) -> None:
    for split, count in counts.items():
        path = out / f"{split}.jsonl"
        write_records(path, Task, (world.task(trouble) for world in make_worlds(split, count)))
        print(f"{path}: {count} tasks")


def _teacher(port: int) -> None:
    server = TeacherServer(port).start()
    print(f"{server.url} serves {', '.join(ROLES)} (stop with Ctrl-C)", flush=True)
    try:
        server.wait()
    finally:
        server.stop()


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; exit code 2 for bad usage, 3 for a missing checkpoint, 130 when interrupted."""
    parser = argparse.ArgumentParser(prog="python -m rmsweb.playground", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="serve the sites for a person to browse")
    serve.add_argument("--port", type=int, default=8000, help="loopback port (default 8000)")
    tasks = commands.add_parser("tasks", help="write the task files of the three splits")
    tasks.add_argument(
        "--out", type=Path, required=True, help="folder for train.jsonl, dev.jsonl and held-out.jsonl"
    )
    tasks.add_argument("--train", type=int, default=400, help="number of training tasks (default 400)")
    tasks.add_argument("--dev", type=int, default=60, help="number of development tasks (default 60)")
    tasks.add_argument("--held-out", type=int, default=64, help="number of held-out tasks (default 64)")
    tasks.add_argument(
        "--trouble",
        type=float,
        default=0.0,
        help="share of pages that answer late and with status 503 the first time (default 0)",
    )
    teacher = commands.add_parser("teacher", help="serve the scripted LLM roles in the OpenAI chat format")
    teacher.add_argument("--port", type=int, default=8001, help="loopback port (default 8001)")
    steps = commands.add_parser("play", help="step through a task in the terminal, without a browser")
    steps.add_argument("task_id", nargs="?", help="a task, such as shop.buy-held-out-0 (default: by --seed)")
    steps.add_argument("--split", choices=get_args(Split), default="held-out", help="default held-out")
    steps.add_argument("--seed", type=int, default=0, help="number of the task in the split (default 0)")
    steps.add_argument("--policy", type=Path, help="checkpoint whose answers to each state are shown")
    options = parser.parse_args(argv)
    try:
        if options.command == "serve":
            _serve(options.port)
        elif options.command == "tasks":
            if not 0 <= options.trouble <= 1:
                parser.error(f"--trouble is {options.trouble}, expected a share between 0 and 1")
            _tasks(
                options.out,
                {"train": options.train, "dev": options.dev, "held-out": options.held_out},
                options.trouble,
            )
        elif options.command == "play":
            from rmsweb.playground.play import play  # brings the browser layer along

            play(
                sys.stdin,
                task_id=options.task_id,
                split=options.split,
                seed=options.seed,
                policy=options.policy,
            )
        else:
            _teacher(options.port)
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 3 if isinstance(error, FileNotFoundError) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
