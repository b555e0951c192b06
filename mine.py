"""Mining: same-task successes and failures -> the critical states that RL trains on (Sec. 3, App. K).

    python mine.py --pool runs/collect runs/pool --out runs/mined --judge-url https://host/v1

Reads run folders of collect.py and evaluate.py; writes mined.jsonl (only the success side's state and
action), audit.jsonl (both branches, for people), ordinary.jsonl (other steps of the same successes, half of
what chooses an RL checkpoint), report.json; with
--followers also followers.jsonl, what the success did next.

ours: followers are no part of the paper's corpus (0 is its value). A mined answer is never `done`, and the
careful step is always still to be taken; a very small policy that trains on such states alone repeats that
step or fails to finish more often (docs/study.md). Followers show the way on.
"""

import asyncio
import json
import random
import shutil
import sys
from collections.abc import Iterator, Sequence, Set
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from rmsweb.collection.filters import action_sample
from rmsweb.config import Config as BaseConfig
from rmsweb.config import main_guard, opt, parse_config, progress
from rmsweb.evaluation.judges import judge_failure
from rmsweb.jsonl import read_records, write_json, write_records
from rmsweb.llm import Endpoint
from rmsweb.mining.alignment import Contrast, Run
from rmsweb.mining.search import Judge, Mined, Render, Settings, mine, report, summary
from rmsweb.mining.taxonomy import features_text
from rmsweb.prompt import PromptConfig, differing_fields, load_prompt_config, token_counter
from rmsweb.records import AuditRow, Image, Judgement, MinedState, Split, StepSample, Trajectory, is_success
from rmsweb.runs import RunWriter

# kind of a judgement that saw the work done, not its outcome alone; no environment of ours gives it yet
WORK_CHECK = "work"


@dataclass(frozen=True, kw_only=True)
class Config(BaseConfig):
    """Mine failure-critical states from a pool of runs."""

    pool: tuple[Path, ...] = opt(help="run folders of collect.py and evaluate.py")
    out: Path = opt(help="run folder to write")
    split: Split = opt(
        "train", "split of the runs to use; dev states choose the RL checkpoint and are never trained on"
    )
    judge_url: str | None = opt(
        None,
        "endpoint of the failure judge; without it the rule category labels every pair (paper: an LLM judge)",
    )
    judge_model: str = opt("gpt-4o", "model of the failure judge (paper: not named)")
    concurrency: int = opt(16, "judge calls at a time")
    secondary: bool = opt(
        True,
        "pair the shortest success with longer ones too, where the shorter one passed a check of the work (paper: yes)",
    )
    strict_non_terminal: bool = opt(False, "the failing side's done is no candidate either")
    per_pair: bool = opt(False, "one state a pair instead of one a task (paper: one a task)")
    ordinary: int = opt(200, "ordinary states to write beside the mined ones, at most")
    followers: int = opt(
        0,
        "steps of the success behind each mined state to write to followers.jsonl, as further states for RL (paper: 0)",
    )
    tokenizer: Path | None = opt(
        None, "checkpoint folder whose tokenizer counts the prompt budget; without it an upper estimate"
    )
    seed: int = opt(0, "seed of the draw of ordinary states")
    resume: bool = opt(
        False,
        "go on with the run in --out: every file is written again, what the judge has answered is not asked again",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.concurrency < 1:
            raise ValueError(f"--concurrency {self.concurrency}: expected at least 1")
        if min(self.ordinary, self.followers) < 0:
            raise ValueError(
                f"--ordinary {self.ordinary} and --followers {self.followers}: expected at least 0"
            )


def read_runs(path: Path, split: Split) -> Iterator[Run]:
    """The runs of a split in a run folder, which is only read; a run without a readable verdict counts as
    undecided.
    """
    verdicts = {
        found.trajectory_id: found
        for file in sorted(path.glob("judgements.rank*.jsonl"))
        for found in read_records(file, Judgement)
    }
    for file in sorted(path.glob("trajectories.rank*.jsonl")):
        for trajectory in read_records(file, Trajectory):
            if trajectory.task.split == split:
                judgement = verdicts.get(trajectory.trajectory_id)
                known = judgement is not None and judgement.verdict in ("success", "not_success")
                checked = judgement is not None and judgement.judge == WORK_CHECK
                yield Run(
                    trajectory,
                    is_success(trajectory, judgement) if known else None,
                    path,
                    work_checked=checked,
                )


def load_pool(config: Config) -> tuple[list[Run], PromptConfig]:
    """The runs of the wanted split, and the prompt configuration that all folders share; errors name the
    folder.
    """
    runs: list[Run] = []
    shared: PromptConfig | None = None
    for path in config.pool:
        if not (path / "prompt_config.json").is_file():
            raise FileNotFoundError(f"--pool {path}: no run folder there (prompt_config.json is missing)")
        own = load_prompt_config(path / "prompt_config.json")
        if shared is not None and own != shared:
            raise ValueError(
                f"--pool {path}: its prompt config differs from {config.pool[0]}'s in {', '.join(differing_fields(own, shared))}"
            )
        shared = own
        for found in progress(read_runs(path, config.split), label=f"runs of {path.name}"):
            if found.trajectory.prompt_config != own.hash:
                raise ValueError(
                    f"--pool {path}: {found.trajectory.trajectory_id} was made with another prompt config than {path / 'prompt_config.json'}"
                )
            runs.append(found)
    if shared is None or not runs:
        raise ValueError(f"--pool: no runs of split {config.split} in {', '.join(map(str, config.pool))}")
    return runs, shared


def _judge(config: Config, root: Path) -> Endpoint | None:
    if not config.judge_url:
        return None
    return Endpoint(
        role="failure judge",
        url=config.judge_url,
        model=config.judge_model,
        image_root=root,
        cache=root / "cache",
        concurrency=config.concurrency,
        options={"temperature": 0.0},
    )


def _labeller(judge: Endpoint) -> Judge:
    async def label(pair: Contrast, first: tuple[str, float] | None) -> tuple[str, float] | None:
        task, evidence = pair.success.trajectory.task.text, features_text(pair.features)
        return await judge_failure(
            judge,
            task_text=task,
            success=summary(pair.success),
            failure=summary(pair.failure),
            evidence=evidence,
            first=first,
        )

    return label


def ordinary_states(
    mined: Set[tuple[str, int]], runs: Sequence[Run], render: Render, count: int, seed: int
) -> list[tuple[StepSample, Path]]:
    """Up to `count` steps of successful runs that were not mined, drawn by seed, each with its run folder."""
    places = [
        (run, number)
        for run in sorted(runs, key=lambda run: run.key)
        if run.success
        for number in range(len(run.trajectory.steps))
    ]
    random.Random(seed).shuffle(places)
    found: list[tuple[StepSample, Path]] = []
    for run, number in places:
        if len(found) == count:
            break
        sample = render(run, number)
        if sample is not None and (sample.trajectory_id, sample.step) not in mined:
            found.append((sample, run.folder))
    return found


def followers(
    result: Mined, mined: Set[tuple[str, int]], render: Render, count: int
) -> list[tuple[StepSample, Path]]:
    """The next `count` steps of the success behind each mined state, where they are not mined themselves,
    each with its run folder.
    """
    found: dict[tuple[str, int], tuple[StepSample, Path]] = {}
    for item in result.found:
        for place in range(item.state.step, len(item.success.trajectory.steps))[
            :count
        ]:  # a step's number is the place of the next one
            sample = render(item.success, place)
            if sample is not None and (key := (sample.trajectory_id, sample.step)) not in mined:
                found[key] = (sample, item.success.folder)
    return list(found.values())


def copy_pictures(result: Mined, others: Sequence[tuple[StepSample, Path]], out: Path) -> None:
    """Copies the pictures that the written records name into the run folder; their names are hashes of their
    bytes, so none overwrites another.
    """
    wanted: dict[str, Path] = {}
    for sample, folder in [*((item.state, item.success.folder) for item in result.found), *others]:
        wanted |= {
            part.path: folder
            for message in sample.messages
            for part in message.parts
            if isinstance(part, Image)
        }
    for item in result.found:
        sides = (
            (item.audit.success_screenshot, item.success.folder),
            (item.audit.failure_screenshot, item.failure.folder),
        )
        wanted |= {image.path: folder for image, folder in sides if image is not None}
    for name, folder in wanted.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / name, out / name)


async def run(config: Config) -> int:
    """Mines the pool and writes the run folder."""
    runs, prompt_config = load_pool(config)
    with RunWriter(config.out, config, resume=config.resume) as folder:
        return await write(config, folder, runs, prompt_config)


async def write(config: Config, folder: RunWriter, runs: Sequence[Run], prompt_config: PromptConfig) -> int:
    """Mine the runs and write what was found."""
    write_json(folder.path / "prompt_config.json", prompt_config)
    count_tokens = token_counter(config.tokenizer)

    def render(item: Run, position: int) -> StepSample | None:
        sample = action_sample(item.trajectory, position, prompt_config, count_tokens)
        return sample if isinstance(sample, StepSample) else None

    judge = _judge(config, folder.path)
    settings = Settings(
        secondary=config.secondary, strict_non_terminal=config.strict_non_terminal, per_pair=config.per_pair
    )
    async with AsyncExitStack() as stack:
        bar = stack.enter_context(progress(label="pairs"))
        if judge is not None:
            await stack.enter_async_context(judge)
        result = await mine(
            runs,
            render=render,
            judge=_labeller(judge) if judge else None,
            settings=settings,
            on_pair=bar.update,
        )
    mined = {(item.state.trajectory_id, item.state.step) for item in result.found}
    ordinary = ordinary_states(mined, runs, render, config.ordinary, config.seed)
    behind = followers(result, mined, render, config.followers)
    copy_pictures(result, [*ordinary, *behind], folder.path)
    write_records(folder.path / "mined.jsonl", MinedState, (item.state for item in result.found))
    write_records(folder.path / "audit.jsonl", AuditRow, (item.audit for item in result.found))
    write_records(folder.path / "ordinary.jsonl", StepSample, (sample for sample, _ in ordinary))
    if config.followers:
        write_records(folder.path / "followers.jsonl", StepSample, (sample for sample, _ in behind))
    scripted = (
        [config.judge_model] if judge is not None and config.judge_model.startswith("scripted-") else []
    )
    counts = report(result) | {
        "split": config.split,
        "ordinary": len(ordinary),
        "followers": len(behind),
        "scripted": scripted,
    }
    folder.write_json("report.json", counts)
    print(json.dumps({name: value for name, value in counts.items() if name != "score_histograms"}, indent=1))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    return asyncio.run(run(parse_config(Config, argv, prog="mine.py", description=__doc__ or "")))


if __name__ == "__main__":
    sys.exit(main_guard(main))
