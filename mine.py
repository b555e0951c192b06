"""Mining: same-task successes and failures -> the critical states that RL trains on (Sec. 3, App. K).

    python mine.py --pool runs/collect runs/pool --out runs/mined --judge-url https://host/v1

Reads run folders of collect.py and evaluate.py. Writes mined.jsonl (only the success side's state and
action), audit.jsonl (both branches, for people), ordinary.jsonl (other steps of the same successes, half of
what chooses an RL checkpoint), summary.json, and with --followers also followers.jsonl (what the success did
next).
"""

import asyncio
import json
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from rmsweb.collection.filters import action_sample
from rmsweb.config import Config as BaseConfig
from rmsweb.config import main_guard, opt, parse_config, part, progress
from rmsweb.evaluation.judges import FailureJudgeConfig, judge_failure
from rmsweb.jsonl import write_json, write_records
from rmsweb.llm import Endpoint
from rmsweb.mining.alignment import AlignedRun, Contrast
from rmsweb.mining.corpus import (
    copy_pictures,
    followers,
    ordinary_states,
    place_of,
    read_runs,
    shared_prompt_config,
)
from rmsweb.mining.search import Judge, MinerConfig, Render, corpus_report, mine, run_summary
from rmsweb.mining.taxonomy import Features, Label, features_text
from rmsweb.prompt import PromptConfig, checkpoint_prompt_config
from rmsweb.records import AuditRow, MinedState, Split, StepSample
from rmsweb.runs import RunWriter
from rmsweb.tokens import token_counter, tokenizer_files


@dataclass(frozen=True, kw_only=True)
class Config(BaseConfig):
    """Mine failure-critical states from a pool of runs."""

    pool: tuple[Path, ...] = opt(help="run folders of collect.py and evaluate.py")
    out: Path = opt(help="run folder to write")
    split: Split = opt(
        "train", "split of the runs to use; dev states choose the RL checkpoint and are never trained on"
    )
    judge: FailureJudgeConfig = part(FailureJudgeConfig)
    concurrency: int = opt(16, "judge calls at a time", at_least=1)
    miner: MinerConfig = part(MinerConfig)
    ordinary: int = opt(200, "ordinary states to write beside the mined ones, at most", at_least=0)
    followers: int = opt(
        0,
        "steps of the success behind each mined state to write to followers.jsonl, as further states for RL",
        paper=0,
        at_least=0,
    )
    tokenizer: Path | None = opt(
        None, "checkpoint folder whose tokenizer counts the prompt budget; without it an upper estimate"
    )
    seed: int = opt(0, "seed of the draw of ordinary states")
    resume: bool = opt(
        False, "go on with the run in --out: all files are written again, answers of the judge are reused"
    )


def labeller(judge: Endpoint) -> Judge:
    """Return the miner's judge, which asks an endpoint."""

    async def label(pair: Contrast, seen: Features, opinions: Sequence[Label]) -> Label | None:
        return await judge_failure(
            judge,
            task_text=pair.success.trajectory.task.text,
            success=run_summary(pair.success),
            failure=run_summary(pair.failure),
            evidence=features_text(seen),
            opinions=opinions,
        )

    return label


def renderer(config: Config, prompt_config: PromptConfig) -> Render:
    """Return the miner's rendering of a step as a training sample."""
    count_tokens = token_counter(config.tokenizer)

    def render(run: AlignedRun, position: int) -> StepSample | None:
        sample = action_sample(run.trajectory, position, prompt_config, count_tokens)
        return sample if isinstance(sample, StepSample) else None

    return render


async def run(config: Config) -> int:
    """Mine the pool and write the run folder."""
    prompt_config = shared_prompt_config(config.pool)
    checkpoint_prompt_config(config.tokenizer, config.pool[0] / "prompt_config.json")
    inputs = {"pool": config.pool, "tokenizer": tokenizer_files(config.tokenizer)}
    with RunWriter(config.out, config, resume=config.resume, inputs=inputs) as folder:
        runs = list(progress(read_runs(config.pool, config.split, prompt_config), label="runs"))
        if not runs:
            raise ValueError(f"--pool: no runs of split {config.split} in {', '.join(map(str, config.pool))}")
        render = renderer(config, prompt_config)
        write_json(folder.path / "prompt_config.json", prompt_config)
        async with AsyncExitStack() as stack:
            judge = config.judge.ask(folder.path, config.concurrency)
            if judge is not None:
                await stack.enter_async_context(judge)
            bar = stack.enter_context(progress(label="pairs"))
            asked = labeller(judge) if judge else None
            result = await mine(runs, render=render, judge=asked, config=config.miner, on_pair=bar.update)
        states, rows = [item.state for item in result.found], [item.audit for item in result.found]
        mined = set(map(place_of, states))
        ordinary = ordinary_states(runs, mined, render, count=config.ordinary, seed=config.seed)
        behind = followers(result.found, mined, render, count=config.followers)
        copy_pictures([*states, *ordinary, *behind], rows, config.pool, folder.path)
        write_records(folder.path / "mined.jsonl", MinedState, states)
        write_records(folder.path / "audit.jsonl", AuditRow, rows)
        write_records(folder.path / "ordinary.jsonl", StepSample, ordinary)
        if config.followers:
            write_records(folder.path / "followers.jsonl", StepSample, behind)
        counts = corpus_report(result) | {
            "split": config.split,
            "ordinary": len(ordinary),
            "followers": len(behind),
            "scripted": sorted(folder.scripted),
        }
        folder.write_json("summary.json", counts)
    shown = {name: value for name, value in counts.items() if name != "score_histograms"}
    print(json.dumps(shown, indent=1))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    return asyncio.run(run(parse_config(Config, argv, prog="mine.py", description=__doc__ or "")))


if __name__ == "__main__":
    sys.exit(main_guard(main))
