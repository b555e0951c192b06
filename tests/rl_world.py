"""What the tests of the RL step and script train: a policy that wavers between two indices, and states."""

import dataclasses
from pathlib import Path

import torch
from tiny_model import SMALL_PROMPT, tiny_policy

import train_rl
from rmsweb.engine.packing import Bundle, make_pack
from rmsweb.engine.policy import PolicyModel
from rmsweb.jsonl import write_json, write_records
from rmsweb.records import Message, MinedState, Scores, Split, StepSample, Text
from rmsweb.salvage.states import State

INDICES = (1, 2, 3, 4, 5, 6)
CATEGORIES = ("navigation", "constraint")


def click(index: int) -> str:
    return f'{{"action":[{{"click_element_by_index":{{"index":{index}}}}}]}}'


def ordinary(index: int, *, split: Split = "train", target: str | None = None) -> StepSample:
    """A page of two buttons, the second of which is right."""
    target = click(index) if target is None else target
    return StepSample(
        sample_id=f"s{index}",
        kind="action",
        task_id=f"t{index}",
        trajectory_id=f"r{index}",
        step=1,
        split=split,
        host="shop.localhost",
        messages=(Message(role="user", parts=(Text(tag="state", text=f"[9]<a />\n[{index}]<a />\n"),)),),
        target_text=target,
        action_span=(10, len(target) - 1),
        prompt_indices=(9, index),
        prompt_config=SMALL_PROMPT.hash,
    )


def mined(index: int, *, split: Split = "train", target: str | None = None) -> MinedState:
    """The same page as a mined state."""
    sample = ordinary(index, split=split, target=target)
    return MinedState(
        **{field.name: getattr(sample, field.name) for field in dataclasses.fields(sample)},
        state_id=f"m{index}",
        category=CATEGORIES[index % 2],
        confidence=1.0,
        label_source="rule",
        scores=Scores(state=1.0, action=1.0, category=1.0, total=1.0),
        pair_kind="success-failure",
    )


def wavering_policy(steps: int = 150) -> PolicyModel:
    """A tiny policy trained to answer with the right index or with 9, about equally often."""
    policy = tiny_policy(std=0.05)
    groups = []
    for index in INDICES:
        prompt = policy.encode_prompt(ordinary(index).messages, Path())
        groups.append(Bundle(prompt, tuple(policy.encode_response(click(answer)) for answer in (index, 9))))
    pack = make_pack(groups)
    adam = torch.optim.AdamW(policy.model.parameters(), lr=5e-3)
    for _ in range(steps):
        loss = -policy.response_logprobs(pack).mean()
        loss.backward()
        adam.step()
        adam.zero_grad()
    return policy


def rl_states(config: train_rl.Config, policy: PolicyModel) -> list[State]:
    """The training states of a run as train_rl.py reads them."""
    return train_rl.read_states(config.states, policy, config.step.response_budget, "train")[0]


def write_states(folder: Path, records: list) -> Path:
    """mined.jsonl or samples.jsonl with its prompt_config.json; returns the file."""
    kind = type(records[0])
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / ("mined.jsonl" if kind is MinedState else "samples.jsonl")
    write_records(file, kind, records)
    write_json(folder / "prompt_config.json", SMALL_PROMPT)
    return file
