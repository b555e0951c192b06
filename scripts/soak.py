"""Many sessions on one browser for minutes: the playground's episodes, one after the other, and whether
anything of them stays behind.

`python scripts/soak.py --sessions 16 --minutes 10` prints a line a window (a minute; half a minute in runs of
less than four minutes) and exits with 1 and what leaked where a page or a context is left at the end, or
where the memory of the last window is more than 15% above that of an early
one: the third minute, or the second half minute. Memory is the proportional share (Pss in /proc) of this
process and all that it started: shared pages count once. An episode is the scripted teacher's, and every
fourth one clicks at random; each session is closed and opened anew now and then.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rmsweb.agent import Episode  # noqa: E402 (the checkout need not be installed)
from rmsweb.browser.chromium import Browser, BrowserOptions  # noqa: E402
from rmsweb.browser.session import Session  # noqa: E402
from rmsweb.playground import teacher  # noqa: E402
from rmsweb.playground.environment import PlaygroundEnvironment  # noqa: E402
from rmsweb.playground.tasks import make_worlds  # noqa: E402
from rmsweb.prompt import PromptConfig, render_text  # noqa: E402
from rmsweb.records import Action, Message, Reply, Source  # noqa: E402

SAMPLE_S = 2.0
MAX_GROWTH = 0.15
STEPS = 12  # of an episode
EPISODES = 10  # of a session before it is opened anew
CONFIG = PromptConfig(thinking=False)


def memory_mib() -> float:
    """Memory of this process and its descendants in MiB."""
    parents = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit():
                parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:  # it ended meanwhile
            continue
    ours, before = {int(Path("/proc/self").readlink().name)}, 0
    while len(ours) > before:
        before = len(ours)
        ours |= {pid for pid, parent in parents.items() if parent in ours}
    total = 0
    for pid in ours:
        try:
            total += int(
                (Path("/proc") / str(pid) / "smaps_rollup").read_text().split("\nPss:")[1].split()[0]
            )
        except (OSError, IndexError):
            continue
    return total / 1024


@dataclass
class Count:
    """What happened since the last line."""

    episodes: int = 0
    steps: int = 0
    memory: list[float] = field(default_factory=list)


async def scripted(messages: list[Message], *, seed: int, purpose: str, max_tokens: int) -> Reply:
    """The scripted teacher as a policy."""
    return Reply(text=teacher.teacher(render_text(messages), seed))


async def at_random(session: Session, r: random.Random, count: Count) -> None:
    """Clicks and steps back anywhere."""
    for _ in range(STEPS):
        seen = await session.observe()
        shown = [node.index for node in seen.nodes if node.index is not None]
        back = Action(name="go_back", params={})
        action = (
            Action(name="click_element_by_index", params={"index": r.choice(shown)})
            if shown and r.random() < 0.9
            else back
        )
        await session.act([action], seen, lambda *_: asyncio.sleep(0, ""))
        count.steps += 1


async def work(
    number: int, browser: Browser, environment: PlaygroundEnvironment, folder: Path, end: float, count: Count
) -> None:
    """One session's episodes until `end`."""
    r, worlds = random.Random(number), make_worlds("train", 40)
    session = await Session.open(browser, folder, pause_s=0)
    try:
        for episode in range(10**9):
            if episode and episode % EPISODES == 0:
                await session.close()
                session = await Session.open(browser, folder, pause_s=0)
            world = r.choice(worlds)
            start = await environment.reset(session, world.task())
            if episode % 4 == 3:
                await session.goto(start)
                await at_random(session, r, count)
            else:
                played = Episode(
                    policy=scripted,
                    session=session,
                    task=world.task(),
                    trajectory_id=f"{number}-{episode}",
                    source=Source(script="soak", policy="teacher"),
                    seed=episode,
                    config=CONFIG,
                    max_steps=STEPS,
                )
                steps = len((await played.run(start)).steps)
                count.steps += steps
            count.episodes += 1
            if time.monotonic() >= end:
                return
    finally:
        await session.close()


def leaks(memory: Sequence[float], early: int, contexts: int, pages: int, tasks: int) -> list[str]:
    """What is left behind, in words. `memory`: MiB, mean of each window; `early`: number of the window that
    the last one is compared with.

    >>> leaks([500, 600, 610, 640], 2, 0, 0, 0), leaks([100, 100, 116], 1, 1, 2, 0)
    ([], ['1 contexts and 2 pages are still open', 'memory grew from 100 to 116 MiB (+16.0%)'])
    """
    found = []
    if contexts or pages:
        found.append(f"{contexts} contexts and {pages} pages are still open")
    if tasks:
        found.append(f"{tasks} tasks of closed sessions still run")
    growth = memory[-1] / memory[early] - 1
    if growth > MAX_GROWTH:
        found.append(f"memory grew from {memory[early]:.0f} to {memory[-1]:.0f} MiB ({growth:+.1%})")
    return found


async def watch(browser: Browser, window_s: float, windows: int, count: Count, limit: float) -> list[float]:
    """Prints a line for each window; the mean memory of each."""
    means = []
    for number in range(1, windows + 1):
        end = limit - (windows - number) * window_s
        while (left := end - time.monotonic()) > 0:
            await asyncio.sleep(min(SAMPLE_S, left))
            count.memory.append(memory_mib())
        means.append(sum(count.memory) / len(count.memory))
        open_pages = sum(len(context.pages) for context in browser.process.contexts)
        done = f"{count.episodes} episodes, {count.steps} steps, {means[-1]:.0f} MiB"
        there = f"{len(browser.process.contexts)} contexts, {open_pages} pages, {browser.restarts} restarts"
        print(f"{number * window_s / 60:4.1f} min: {done}, {there}", flush=True)
        count.episodes, count.steps, count.memory = 0, 0, []
    return means


async def soak(sessions: int, minutes: float) -> list[str]:
    """Runs the sessions; returns what leaked."""
    window_s, early = (60.0, 2) if minutes >= 4 else (30.0, 1)
    windows = max(early + 2, round(minutes * 60 / window_s))
    environment, count = PlaygroundEnvironment(), Count()
    await environment.start()
    try:
        with tempfile.TemporaryDirectory() as folder:
            async with Browser.launch(BrowserOptions(host_map=environment.host_map)) as browser:
                limit = time.monotonic() + windows * window_s
                async with asyncio.TaskGroup() as group:
                    for number in range(sessions):
                        group.create_task(work(number, browser, environment, Path(folder), limit, count))
                    watching = group.create_task(watch(browser, window_s, windows, count, limit))
                contexts = browser.process.contexts
                tools = await browser.process.new_browser_cdp_session()
                targets = (await tools.send("Target.getTargets"))["targetInfos"]
                pages = sum(target["type"] == "page" for target in targets)
                await tools.detach()
                ours = [task for task in asyncio.all_tasks() if "rmsweb" in str(task.get_coro())]
                return leaks(watching.result(), early, len(contexts), pages, len(ours))
    finally:
        await environment.stop()


def main(argv: Sequence[str] | None = None) -> int:
    """0 where nothing leaked, else 1."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sessions", type=int, default=16, help="concurrent sessions (default 16)")
    parser.add_argument("--minutes", type=float, default=10.0, help="length of the run (default 10)")
    options = parser.parse_args(argv)
    if options.sessions < 1 or options.minutes <= 0:
        parser.error(f"--sessions {options.sessions} and --minutes {options.minutes:g} must be positive")
    found = asyncio.run(soak(options.sessions, options.minutes))
    print("; ".join(f"leak: {problem}" for problem in found) or "no leak")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
