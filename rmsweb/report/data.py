"""The report's data files: one script a run or RL group, which the viewer loads when it is opened, and the
lists of all of them.

Purpose: a page of file:// may not fetch, so each file is a script that calls `loaded(name, data)`. Runs are
read, written and forgotten one at a time. What links to a step (a mined pair, an RL state) finds it by the
hash of its picture: ids of two folders may be equal.

Texts come from pages and models. They are JSON in ASCII here, and the viewer only ever sets them as text.
"""

import json
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from rmsweb.browser.actions import canonical_action
from rmsweb.evaluation.figures import Results, RunRow, failure_modes
from rmsweb.jsonl import from_json, inside, parse_json, read_records
from rmsweb.mining.taxonomy import TITLES
from rmsweb.prompt import PromptConfig, build_prompt, load_prompt_config
from rmsweb.records import (
    Action,
    AuditRow,
    Image,
    Message,
    Observation,
    Step,
    StepSample,
    Text,
    Trajectory,
    record,
)
from rmsweb.runs import ROLLOUTS, read_samples
from rmsweb.stats import Price, cost
from rmsweb.tokens import CountTokens

FOLDER = "report_files"
NO_LIMIT = 10**9  # tokens
SAMPLE_FILES = ("mined", "followers", "ordinary", "samples")

Data = dict[str, Any]


@record
class Answer:
    """One rollout of rollouts.jsonl."""

    reward: float
    why: str
    text: str


@record
class Group:
    """One line of rollouts.jsonl: a state's answers and the verdict of the gates."""

    step: int
    state: str
    category: str
    gate: str
    target: str
    rollouts: tuple[Answer, ...]


@dataclass(frozen=True)
class StepPlace:
    """Where a step can be seen: its run's address and file, and the hash of its picture."""

    run: str
    file: str
    sha256: str


# ------------------------------------------------------------------------------------------ a step and a run


def tokens_and_time(prompt: int, completion: int, seconds: float, price: Price | None) -> Data:
    """Return tokens, seconds and US dollars as the page shows them."""
    return {
        "tokens": f"{prompt:,} + {completion:,}",
        "seconds": f"{seconds:.1f}",
        "cost": f"{cost(prompt, completion, price):.4f}" if price else "",
    }


def parts_of(messages: Sequence[Message]) -> list[Data]:
    """Return the texts of a prompt by tag; neighbours of one tag are one part, a picture is its size."""
    found: list[Data] = []
    for part in (part for message in messages for part in message.parts):
        text, tag = (
            (part.text, part.tag) if isinstance(part, Text) else (f"{part.width} x {part.height}", "image")
        )
        if found and found[-1]["tag"] == tag:
            found[-1]["text"] += text
        else:
            found.append({"tag": tag, "text": text})
    return found


def boxes_of(observation: Observation, shown: Sequence[int], actions: Sequence[Action]) -> list[Data]:
    """Return the boxes of the elements in the viewport that the prompt shows, in shares of the picture."""
    used = {action.params.get("index") for action in actions}
    width, height = observation.viewport
    return [
        {
            "index": node.index,
            "name": f"{node.tag} {node.text}"[:100],
            "used": node.index in used,
            "box": [node.box[0] / width, node.box[1] / height, node.box[2] / width, node.box[3] / height],
        }
        for node in observation.nodes
        if node.index in shown and node.box and node.in_viewport
    ]


@dataclass
class Writer:
    """Writes the data files of a report into the folder `out`; `rows` become the lists."""

    out: Path
    prices: Mapping[str, Price]
    count_tokens: CountTokens
    estimated: bool  # count_tokens is an estimate
    rows: dict[str, list[Data]] = field(default_factory=lambda: {"runs": [], "pairs": [], "groups": []})
    wanted: set[tuple[str, int]] = field(default_factory=set)  # (trajectory, step) that something links to
    places: dict[tuple[str, int], list[StepPlace]] = field(default_factory=lambda: defaultdict(list))
    states: dict[str, Data] = field(default_factory=dict)  # state of a group -> its list row's part
    _numbers: Iterator[int] = field(default_factory=count)

    def write(self, name: str, data: object) -> None:
        """Write one data file."""
        text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
        path = self.out / FOLDER / f"{name}.js"
        path.write_text(f'loaded("{name}",{text});\n', encoding="ascii")

    def link(self, folder: Results, image: Image | None) -> str | None:
        """Return the address of a picture relative to the page; RecordError if outside of its folder."""
        if image is None:
            return None
        path = inside(folder.path, image.path)
        return quote(Path(os.path.relpath(path.resolve(), self.out.resolve())).as_posix())

    # ---------------------------------------------------------------------------------------------- runs

    def runs(self, folder: Results, peers: Sequence[Results]) -> None:
        """Write the runs of a folder; failures are compared with the successes of `peers`."""
        if not folder.rows:
            return
        file = folder.path / "prompt_config.json"
        config = load_prompt_config(file if file.exists() else None)
        modes = failure_modes(folder, peers)
        for row, trajectory in zip(folder.rows, folder.trajectories(), strict=True):
            name = f"r{next(self._numbers)}"
            listed = self.run_row(folder, row, modes.get(row.trajectory_id, "")) | {"file": name}
            self.rows["runs"].append(listed)
            for step in trajectory.steps:
                place = (trajectory.trajectory_id, step.number)
                if place in self.wanted and step.observation.screenshot:
                    sha256 = step.observation.screenshot.sha256
                    self.places[place].append(StepPlace(listed["key"], name, sha256))
            self.write(name, self.run_data(folder, row, trajectory, config))

    def price(self, row: RunRow) -> Price | None:
        """Return the price of a run's policy."""
        return self.prices.get(row.policy)

    def run_row(self, folder: Results, row: RunRow, mode: str) -> Data:
        """Return what the list shows of a run."""
        return {
            "key": f"{folder.name}/{row.trajectory_id}",
            "policy": folder.name,
            "task": row.task,
            "task_id": row.task_id,
            "site": row.site,
            "outcome": "success" if row.success else "failure",
            "mode": TITLES.get(mode, mode),
            "ended": row.ended,
            "run": f"run {row.run}, round {row.round}",
            "steps": row.turns,
            "reason": row.judgement.reason if row.judgement else "",
            **tokens_and_time(row.prompt_tokens, row.completion_tokens, row.seconds, self.price(row)),
        }

    def run_data(self, folder: Results, row: RunRow, found: Trajectory, config: PromptConfig) -> Data:
        """Return what the viewer shows of a run."""
        verdict = row.judgement
        steps = [
            self.step_data(folder, found, number, config, self.price(row))
            for number in range(len(found.steps))
        ]
        return {
            "by": found.source.policy,
            "verdict": f"{verdict.verdict} ({' '.join(filter(None, (verdict.judge, verdict.model)))})"
            if verdict
            else "not judged",
            "reason": verdict.reason if verdict else "",
            "raw": verdict.raw if verdict else "",
            "answer": found.final_text,
            "declared": {True: "success", False: "failure", None: ""}[found.declared_success],
            "error": found.error,
            "guide_in": found.guide_in,
            "guide_out": found.guide_out,
            "steps": steps,
        }

    def prompt_data(
        self, found: Trajectory, number: int, config: PromptConfig
    ) -> tuple[Data, tuple[int, ...]]:
        """Return the prompt of a step as the policy saw it, and the indices in it.

        A note says what could not be rebuilt exactly.
        """
        date = found.task.environment.get("date")
        given: Data = {
            "task_text": found.task.text,
            "observation": found.steps[number].observation,
            "history": found.steps[:number],
            "count_tokens": self.count_tokens,
            "date": date if isinstance(date, str) else None,
            "guide": found.guide_in,
        }
        whole = build_prompt(replace(config, prompt_budget=NO_LIMIT), **given)
        try:
            prompt = build_prompt(config, **given)
        except ValueError:  # an estimate of the tokens is more than what was sent
            prompt = whole
        notes = []
        if found.prompt_config != config.hash:
            notes.append("recorded by another version, rendered by this one")
        if self.estimated and prompt.messages != whole.messages:
            notes.append("cut to its budget by an estimate; --tokenizer cuts as the policy's tokenizer does")
        return {"prompt": parts_of(prompt.messages), "note": "; ".join(notes)}, prompt.indices

    def step_data(
        self, folder: Results, found: Trajectory, number: int, config: PromptConfig, price: Price | None
    ) -> Data:
        """Return what the viewer shows of a step."""
        step = found.steps[number]
        output, usage = step.output, step.usage
        actions = output.actions if output else ()
        prompt, indices = self.prompt_data(found, number, config)
        return {
            "number": step.number,
            "url": step.observation.url,
            "title": step.observation.title,
            "picture": self.link(folder, step.observation.screenshot),
            "boxes": boxes_of(step.observation, indices, actions),
            "thinking": output and output.thinking,
            "evaluation": output and output.evaluation_previous_goal,
            "memory": output and output.memory,
            "goal": output and output.next_goal,
            "actions": [{"text": canonical_action(action)} for action in actions],
            "unusable": "" if output else (step.parse_failure.reason if step.parse_failure else "no answer"),
            "response": step.response_text,
            "results": results_of(step),
            "finish": usage.finish_reason,
            "restarts": step.browser_restarts or "",
            **prompt,
            **tokens_and_time(usage.prompt_tokens, usage.completion_tokens, step.duration_s, price),
        }

    # ------------------------------------------------------------------------- what links to a step of a run

    def side(self, folder: Results, name: str, trajectory: str, step: int, image: Image | None) -> Data:
        """Return how the viewer finds a step: its run where that is in the report."""
        known = [place for place in self.places[trajectory, step] if image and place.sha256 == image.sha256]
        found = {"run": known[0].run, "file": known[0].file} if known else {}
        return {"name": name, "step": step, "picture": self.link(folder, image), **found}

    def want(self, folders: Sequence[Results]) -> None:
        """Note which steps pairs and groups link to, and write the states of the groups."""
        for folder in folders:
            for audit in audits(folder):
                self.wanted |= {
                    (audit.success_trajectory, audit.success_step),
                    (audit.failure_trajectory, audit.failure_step),
                }
        missing = {group.state for folder in folders for _, group in groups(folder)}
        for kind in SAMPLE_FILES:
            for path in (folder.path / f"{kind}.jsonl" for folder in folders if missing):
                if path.exists():
                    for sample in read_samples(path):
                        if sample.name in missing:
                            missing.remove(sample.name)
                            self.state(path.parent, sample)

    def state(self, root: Path, sample: StepSample) -> None:
        """Write the state of RL groups: its prompt, picture and verified answer."""
        self.wanted.add((sample.trajectory_id, sample.step))
        images = [part for message in sample.messages for part in message.parts if isinstance(part, Image)]
        file = f"s{next(self._numbers)}"
        self.write(file, {"prompt": parts_of(sample.messages), "note": ""})
        self.states[sample.name] = {
            "state_file": file,
            "target": sample.target_text,
            "site": sample.host,
            "place": {
                "folder": Results(root),
                "name": "state",
                "trajectory": sample.trajectory_id,
                "step": sample.step,
                "image": images[0] if images else None,
            },
        }

    def pairs(self, folder: Results) -> None:
        """List the mined pairs of a folder."""
        for audit in audits(folder):
            sides = [
                self.side(folder, name, trajectory, step, image)
                | {"url": url, "actions": [{"text": canonical_action(action)} for action in actions]}
                for name, trajectory, step, image, url, actions in (
                    ("success", audit.success_trajectory, audit.success_step, audit.success_screenshot,
                     audit.success_url, audit.success_actions),
                    ("failure", audit.failure_trajectory, audit.failure_step, audit.failure_screenshot,
                     audit.failure_url, audit.failure_actions),
                )
            ]  # fmt: skip
            self.rows["pairs"].append(
                {
                    "key": f"{folder.name}/{audit.state_id}",
                    "policy": folder.name,
                    "task": audit.task_text,
                    "site": urlsplit(audit.success_url).netloc or "(none)",
                    "category": TITLES.get(audit.category, audit.category),
                    "source": audit.label_source,
                    "confidence": f"{audit.confidence:.2f}",
                    "total": f"{audit.scores.total:.2f}",
                    "why": audit.why,
                    "opinions": [{"text": text} for text in audit.opinions],
                    "sides": sides,
                }
            )

    def groups(self, folder: Results) -> None:
        """Write the RL groups of a folder."""
        for number, group in groups(folder):
            name, rewards = f"g{next(self._numbers)}", [answer.reward for answer in group.rollouts]
            state = self.states.get(group.state, {})
            if state.get("target") != group.target:  # another collection's record of this name
                state = {}
            self.write(name, {"answers": [answer_data(answer) for answer in group.rollouts]})
            self.rows["groups"].append(
                {
                    "key": f"{folder.name}/{number}",
                    "policy": folder.name,
                    "step": group.step,
                    "state": group.state,
                    "site": state.get("site", "(unknown)"),
                    "category": TITLES.get(group.category, group.category),
                    "gate": group.gate,
                    "best": f"{max(rewards, default=math.nan):.2f}",
                    "mean": f"{sum(rewards) / max(1, len(rewards)):.2f}",
                    "target": group.target,
                    "file": name,
                    "state_file": state.get("state_file"),
                    "sides": [self.side(**state["place"])] if state else [],
                }
            )


def results_of(step: Step) -> list[Data]:
    """Return what the actions of a step did."""
    return [
        {
            "error": result.error,
            "message": result.message,
            "query": result.extraction and f"asked the page: {result.extraction.query}",
            "content": result.content,
        }
        for result in step.results
    ]


def answer_data(answer: Answer) -> Data:
    """Return what the page shows of a rollout."""
    return {"reward": f"{answer.reward:.2f}", "text": answer.text, "why": answer.why}


def audits(folder: Results) -> Iterator[AuditRow]:
    """Yield the mined pairs of a folder."""
    path = folder.path / "audit.jsonl"
    return read_records(path, AuditRow) if path.exists() else iter(())


def groups(folder: Results) -> Iterator[tuple[int, Group]]:
    """Yield the RL groups of a folder with their line; an unfinished last line is no group."""
    path = folder.path / ROLLOUTS
    if path.exists():
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.endswith(b"\n"):
                    where = f"{path}:{number}"
                    yield number, from_json(Group, parse_json(line, where), where)


def write_data(folders: Sequence[Results], writer: Writer) -> dict[str, int]:
    """Write all data files of a report; return the length of each list and the number of prices."""
    target = writer.out / FOLDER
    target.mkdir(parents=True, exist_ok=True)
    for old in target.glob("*.js"):
        old.unlink()
    writer.want(folders)
    for folder in folders:
        evaluated = folder.role == "evaluation"
        writer.runs(folder, [other for other in folders if (other.role == "evaluation") is evaluated])
    for folder in folders:
        writer.pairs(folder)
        writer.groups(folder)
    writer.write("lists", writer.rows)
    return {name: len(rows) for name, rows in writer.rows.items()} | {"priced": len(writer.prices)}
