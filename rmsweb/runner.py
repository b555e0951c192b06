"""Episodes: the judged episode that collection and evaluation share, and judging stored ones again.

Purpose: `Episodes` is what a script hands its policy, its environment and its run folder to; it runs them on
the pool of browsers. `judge_stored` needs neither.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from rmsweb.agent import Episode
from rmsweb.browser.chromium import Browser, BrowserOptions, find_chromium
from rmsweb.browser.session import Session
from rmsweb.config import Config, argv_of, flat, opt, parse_config, part, progress, rank
from rmsweb.evaluation.environments import Environment
from rmsweb.evaluation.judges import JudgeConfig, judge_run
from rmsweb.evaluation.tasks import load_tasks
from rmsweb.jsonl import write_json
from rmsweb.llm import ChatConfigError, ChatError, Endpoint
from rmsweb.pool import Job, Launch, OpenSession, Outcome, Worker, run_jobs, unused_name, work_off
from rmsweb.prompt import PromptConfig, checkpoint_prompt_config
from rmsweb.records import WORK_CHECK, Judgement, Policy, Source, Split, Task, Trajectory, derive_seed
from rmsweb.runs import Inputs, RunFolder, RunWriter
from rmsweb.tokens import CountTokens, token_counter, tokenizer_files

C = TypeVar("C")
R = TypeVar("R")
OWN_VERDICTS = ("check", WORK_CHECK, "rule")  # of the site and of the rule "no done": no judge changes them


def browser_pool(
    folder: Path, *, host_map: str | None, config: PromptConfig, headless: bool
) -> tuple[Launch, OpenSession]:
    """Return how to start a real browser, and how to open a session that writes into the run folder.

    The session has no page until the job's `Environment.reset`, which every episode begins with, opens its
    context.
    """
    options = BrowserOptions(headless=headless, host_map=host_map, viewport=config.viewport)

    async def open_session(browser: Browser, name: str) -> Session:
        return Session(browser, folder, name=unused_name(name), image_format=config.image_format)

    return (lambda: Browser.launch(options)), open_session


def pool_of(
    environment: Environment, folder: Path, *, config: PromptConfig, headless: bool
) -> tuple[Launch, OpenSession]:
    """Return how a started environment gets its browsers and sessions: its own way, or real ones."""
    if environment.pool is not None:
        return environment.pool(folder, config=config)
    return browser_pool(folder, host_map=environment.host_map, config=config, headless=headless)


# ---------------------------------------------------------------------------------------- settings of a run


@dataclass(frozen=True, kw_only=True)
class Actor:
    """A policy that is ready to be asked, and how its prompts are made.

    `extraction` answers extract_structured_data, None where the policy does.
    """

    policy: Policy
    name: str
    prompt_config: PromptConfig
    count_tokens: CountTokens
    sha256: str | None = None
    extraction: Policy | None = None


@dataclass(frozen=True, kw_only=True)
class EpisodeConfig(Config):
    """Episodes: of which tasks, how long, how many at a time."""

    tasks: Path = opt(
        help='task file: JSON lines of {"task_id": ..., "text": ..., "start_url": ...}, or what '
        "python -m rmsweb.playground tasks writes"
    )
    out: Path = opt(help="run folder to write")
    split: Split = opt(
        "train",
        "split of the tasks to run; train runs feed SFT and the miner, dev runs choose checkpoints and are "
        "never trained on",
    )
    limit: int | None = opt(None, "run at most so many tasks")
    max_steps: int = opt(50, "agent turns of an episode at most", paper="not stated", at_least=1)
    concurrency: int = opt(16, "episodes at a time in this process", paper="16 in evaluation", at_least=1)
    sessions_per_browser: int = opt(4, "episodes that share one Chromium process", at_least=1)
    headless: bool = opt(True, "run Chromium without a window")
    prompt_config: Path | None = opt(
        None,
        "JSON file of a PromptConfig (default: the paper's sizes: 12,000 prompt tokens, 262,144 px, 2,048 "
        "answer tokens); a checkpoint brings its own and must agree",
    )
    tokenizer: Path | None = opt(
        None,
        "checkpoint folder behind an endpoint: its tokenizer counts the prompt budget (without it an upper "
        "estimate), and its prompt configuration is used",
        paper="Qwen3-VL's",
    )
    judge: JudgeConfig = part(JudgeConfig)
    seed: int = opt(0, "seed; every policy call carries one derived from (seed, task, arm, round, run)")
    resume: bool = opt(
        False, "go on with the run in --out; finished episodes are kept, nothing is written twice"
    )
    rejudge: bool = opt(
        False,
        "ask the judge again about the runs in --out that a judge has decided, and rewrite what follows from "
        "the verdicts; no browser, no policy, and all flags but the judge's come from the run",
    )

    def load_tasks(self, *, browser: bool = True) -> list[Task]:
        """Return the tasks, and look for a browser if one is needed: without it, no folder is made."""
        tasks = load_tasks(self.tasks, split=self.split, limit=self.limit)
        if browser:
            find_chromium()
        return tasks

    def inputs(self) -> Inputs:
        """Return the files that a resumed run must find unchanged, by flag."""
        return {
            "tasks": (self.tasks,),
            "prompt_config": (self.prompt_config,) if self.prompt_config else (),
            "tokenizer": tokenizer_files(self.tokenizer),
        }

    def actor(self, endpoint: Endpoint, extraction: Policy | None = None) -> Actor:
        """Return an endpoint as the actor, with the prompt configuration and the tokenizer of the flags."""
        return Actor(
            policy=endpoint,
            name=endpoint.model,
            prompt_config=checkpoint_prompt_config(self.tokenizer, self.prompt_config),
            count_tokens=token_counter(self.tokenizer),
            extraction=extraction,
        )


MAY_DIFFER = ("policy_url", *flat(JudgeConfig()), "concurrency", "sessions_per_browser", "headless")


@contextmanager
def open_run(
    config: Config, own: EpisodeConfig, free: Sequence[str] = (), further: Inputs = MappingProxyType({})
) -> Iterator[RunWriter]:
    """Make the run folder of a script, or open it again; values of the flags `free` may differ then.

    Args: further: files beside the tasks' that must be unchanged then, by flag.
    """
    inputs, may_differ = {**own.inputs(), **further}, (*MAY_DIFFER, *free)
    with RunWriter(own.out, config, resume=own.resume, may_differ=may_differ, inputs=inputs) as folder:
        folder.repair()
        try:
            yield folder
        except KeyboardInterrupt:
            finished = len(folder.finished())
            print(f"{own.out} holds {finished} finished episodes; --resume goes on", file=sys.stderr)
            raise


def parse_run_config(cls: type[C], argv: Sequence[str] | None, *, prog: str) -> C:
    """Make a script's config from its flags; with --rejudge, what is not given is as the run in --out has it.

    Raises FileNotFoundError where no run is.
    """
    argv = sys.argv[1:] if argv is None else argv
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--rejudge", action="store_true")
    first.add_argument("--out", type=Path)
    known, _ = first.parse_known_args(argv)
    stored: list[str] = []
    if known.rejudge and known.out:
        values = RunFolder(known.out).json("config.json")
        if not values:
            raise FileNotFoundError(f"--rejudge: no run in {known.out} (config.json is missing)")
        stored = argv_of(cls, values)
    return parse_config(cls, [*stored, *argv], prog=prog)


# ------------------------------------------------------------------------------------ judging stored episodes


@contextmanager
def stored_run(config: EpisodeConfig) -> Iterator[RunWriter]:
    """Open the run in --out to judge it again, and note with which judge."""
    if not config.judge.url:
        raise ValueError("--rejudge needs --judge-url")
    with RunWriter(config.out) as folder:
        folder.repair()
        folder.write_json("config.json", folder.json("config.json") | flat(config.judge))
        yield folder


async def judge_stored(config: EpisodeConfig, folder: RunWriter) -> dict[str, str]:
    """Judge this rank's stored episodes that have no verdict, with --rejudge also those that a judge decided.

    Return why the others of them have none. Verdicts of a site's own check and of the rule stay.
    """
    again, verdicts = config.rejudge, folder.judgements()
    chosen = [
        name
        for name in folder.own_episodes()
        if name not in verdicts or (again and verdicts[name].judge not in OWN_VERDICTS)
    ]
    judge = config.judge.ask(folder.path, config.concurrency, cached=not again)
    if judge is None:
        return dict.fromkeys(chosen, "no verdict so far: give --judge-url")

    async def run(_: int, name: str) -> None:
        folder.judge_again(await judge_run(folder.trajectory(name), None, judge))

    async with judge:
        failed = await work_off(chosen, run, concurrency=config.concurrency)
    if again and rank() == 0:
        kept = Counter(verdict.judge for verdict in verdicts.values() if verdict.judge in OWN_VERDICTS)
        own = ", ".join(f"{count} by {name}" for name, count in kept.items()) or "none"
        print(f"judged {len(chosen) - len(failed)} runs again; verdicts that no judge gave stay: {own}")
    return failed


# -------------------------------------------------------------------------------------------- new episodes


@dataclass(kw_only=True)
class Episodes:
    """The episodes of a script's run; `arm` names the kind of run in ids and seeds."""

    config: EpisodeConfig
    folder: RunWriter
    environment: Environment
    actor: Actor
    script: str
    arm: str
    stop_on_stall: bool
    counts: Counter[str] = field(default_factory=Counter, init=False)  # shown beside the progress bar
    bar: Any = field(init=False)
    judge: Endpoint | None = field(init=False)
    unjudged: dict[str, Exception] = field(default_factory=dict, init=False)  # why an episode has no verdict

    async def run(self, jobs: Mapping[str, Job], *, total: int, label: str) -> Outcome:
        """Run the jobs of this process, which has `total` with those that were finished before."""
        config, prompt_config, first = self.config, self.actor.prompt_config, self.folder.first
        if first is not None and first.prompt_config != prompt_config.hash:
            raise ValueError(
                f"{self.folder.path}: the prompt config was {first.prompt_config}, is {prompt_config.hash} "
                "now: another config, or a version of the package with another system text"
            )
        write_json(self.folder.path / "prompt_config.json", prompt_config)
        async with AsyncExitStack() as stack:
            self.judge = config.judge.ask(self.folder.path, config.concurrency)
            if self.judge:
                await stack.enter_async_context(self.judge)
            await self.environment.start()
            stack.push_async_callback(self.environment.stop)
            self.bar = stack.enter_context(progress(total=total, initial=total - len(jobs), label=label))
            launch, open_session = pool_of(
                self.environment, self.folder.path, config=prompt_config, headless=config.headless
            )
            return await run_jobs(
                jobs,
                launch=launch,
                open_session=open_session,
                concurrency=min(config.concurrency, len(jobs)),
                sessions_per_browser=config.sessions_per_browser,
                on_done=self.bar.update,
            )

    async def attempt(
        self, worker: Worker, task: Task, *, round: int = 1, run: int = 0, guide: str | None = None
    ) -> tuple[Trajectory, Judgement | None]:
        """Run and judge one episode: by the environment's own check, else by the outcome judge.

        Its id and its seed follow from (task, arm, round, run). Where the judge fails there is no judgement,
        and `commit` says why.
        """
        actor, environment, session = self.actor, self.environment, worker.session
        start_url = await environment.reset(session, task)
        trajectory = await Episode(
            policy=actor.policy,
            session=session,
            task=task,
            trajectory_id=attempt_id(task, self.arm, round=round, run=run),
            source=Source(
                script=self.script,
                policy=actor.name,
                checkpoint_sha256=actor.sha256,
                arm=self.arm,
                round=round,
                run=run,
                seed=self.config.seed,
            ),
            seed=derive_seed(self.config.seed, task.task_id, self.arm, round, run),
            config=actor.prompt_config,
            max_steps=self.config.max_steps,
            stop_on_stall=self.stop_on_stall,
            record_broken=worker.last_try,
            extraction_policy=actor.extraction,
            guide=guide,
            date=environment.now().isoformat(),
            count_tokens=actor.count_tokens,
            on_step=self._on_step,
        ).run(start_url)
        try:
            check = partial(environment.check, session, trajectory)
            return trajectory, await judge_run(trajectory, check, self.judge)
        except (ChatError, ChatConfigError) as error:
            self.unjudged[trajectory.trajectory_id] = error
            return trajectory, None

    def commit(self, trajectory: Trajectory, judgement: Judgement | None) -> None:
        """Write an episode; raise the judge's error where there is no judgement, once the episode is kept."""
        self.folder.commit(trajectory, judgement)
        if judgement is None:
            raise self.unjudged.pop(trajectory.trajectory_id)

    def _on_step(self) -> None:
        self.counts["steps"] += 1
        self.bar.set_postfix(self.counts, refresh=False)
        self.bar.update(0)


def attempt_id(task: Task, arm: str, *, round: int = 1, run: int = 0) -> str:
    """Return the id of an episode, which is unique in a run."""
    return f"{task.task_id}.{arm}.r{round}.n{run}"


def when_complete(folder: RunWriter, write: Callable[[], R]) -> R:
    """Call `write` until no episode was finished meanwhile.

    So what the last of several ranks writes holds the episodes of all.
    """
    while True:
        before = len(folder.finished())
        result = write()
        if len(folder.finished()) == before:
            return result
