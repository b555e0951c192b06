"""A run folder with a few supervised samples over small pictures, for the tests of the trainers."""

from pathlib import Path

import numpy as np
import PIL.Image
from tiny_model import SMALL_PROMPT

import train_sft
from rmsweb.engine.policy import PolicyModel
from rmsweb.jsonl import write_json, write_records
from rmsweb.prompt import PromptConfig
from rmsweb.records import Image, Message, Split, StepSample, Text, sha256_bytes


def step_sample(
    number: int,
    *,
    split: Split = "train",
    picture: Image | None = None,
    config: PromptConfig = SMALL_PROMPT,
    padding: int = 0,
) -> StepSample:
    """A page with one button whose index is the answer."""
    index = 1 + number % 7
    target = f'{{"action":[{{"click_element_by_index":{{"index":{index}}}}}]}}'
    page = f"[{index}]<button />\n\tpress {'x' * (number % 5 + padding)}\nTask: press\n"
    parts = (*((picture,) if picture else ()), Text(tag="state", text=page))
    return StepSample(
        sample_id=f"s{number}",
        kind="action",
        task_id=f"t{number}",
        trajectory_id=f"r{number}",
        step=1,
        split=split,
        host="shop.localhost",
        messages=(Message(role="user", parts=parts),),
        target_text=target,
        action_span=(10, len(target) - 1),
        prompt_indices=(index,),
        prompt_config=config.hash,
    )


def sft_items(config: train_sft.Config, policy: PolicyModel) -> list[train_sft.Item]:
    """The training samples of a run as train_sft.py reads them."""
    return train_sft.read_items(config.samples, policy, config.cutoff, "train")[0]


def write_run(
    folder: Path, count: int, *, split: Split = "train", samples: list[StepSample] | None = None
) -> Path:
    """samples.jsonl, prompt_config.json and screenshots/; every third sample has a picture."""
    (folder / "screenshots").mkdir(parents=True)
    noise = np.random.default_rng(0).integers(0, 255, (96, 160, 3), dtype=np.uint8)
    PIL.Image.fromarray(noise).save(folder / "screenshots" / "a.png")
    data = (folder / "screenshots" / "a.png").read_bytes()
    picture = Image(path="screenshots/a.png", sha256=sha256_bytes(data), width=160, height=96)
    made = [
        step_sample(number, split=split, picture=picture if number % 3 == 0 else None)
        for number in range(count)
    ]
    write_records(folder / "samples.jsonl", StepSample, [*made, *(samples or [])])
    write_json(folder / "prompt_config.json", SMALL_PROMPT)
    return folder / "samples.jsonl"
