"""Exporters: samples and mined states in the formats of other trainers, evaluations as logs others open.

    python -m rmsweb.collection.exporters llamafactory runs/collect/samples.jsonl --out export
    python -m rmsweb.collection.exporters verl runs/mined/mined.jsonl --out export
    python -m rmsweb.collection.exporters dpo runs/mined/mined.jsonl --out export
    python -m rmsweb.collection.exporters inspect runs/eval --out export

Purpose: the corpus serves whoever has a trainer already. Every file is JSON Lines without a header, because
loaders take ours for a row. Pictures are written with the index boxes that the prompt asks for. A literal
"<image>" in page text is written "< image>", because loaders count the placeholder. Targets are JSON text,
never nested objects, because loaders unify the shapes of objects.

ours: a preference pair is a mined state, its verified answer, and the failing branch's action on the same
page; a pair whose failing action names an element that the page lacks is left out and counted.
"""

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rmsweb.browser.actions import canonical_action
from rmsweb.config import main_guard
from rmsweb.jsonl import dumps, inside, read_records, write_json
from rmsweb.llm import data_url
from rmsweb.pictures import load_picture
from rmsweb.records import (
    AuditRow,
    Image,
    Judgement,
    Message,
    MinedState,
    StepSample,
    Trajectory,
    is_success,
    sha256_text,
)
from rmsweb.runs import RunFolder, read_samples

PLACEHOLDER, ESCAPED = "<image>", "< image>"
Row = dict[str, Any]


@dataclass
class Album:
    """The pictures of an export, each written once: `images/` in the folder `out`."""

    root: Path
    out: Path
    names: dict[Image, str] = field(default_factory=dict)

    def add(self, image: Image) -> str:
        """Write a picture, boxes drawn, and return its path below `out`."""
        if image not in self.names:
            source = inside(self.root, image.path)
            suffix = ".png" if image.boxes else source.suffix
            name = f"images/{sha256_text(dumps(image))[:16]}{suffix}"
            (self.out / "images").mkdir(parents=True, exist_ok=True)
            if image.boxes:
                load_picture(image, self.root).save(self.out / name)
            else:
                shutil.copyfile(source, self.out / name)
            self.names[image] = name
        return self.names[image]


def content(message: Message, album: Album) -> tuple[str, list[str]]:
    """Return a message as text with placeholders, and the paths of its pictures in order."""
    texts, images = [""], []
    for part in message.parts:
        if isinstance(part, Image):
            images.append(album.add(part))
            texts.append("")
        else:
            texts[-1] += part.text  # joined first: two parts may make a placeholder together
    return PLACEHOLDER.join(text.replace(PLACEHOLDER, ESCAPED) for text in texts), images


def chat(sample: StepSample, album: Album) -> tuple[list[Row], list[str]]:
    """Return the prompt as messages with placeholders, and all its pictures."""
    rows, images = [], list[str]()
    for message in sample.messages:
        text, shown = content(message, album)
        rows.append({"role": message.role, "content": text})
        images += shown
    return rows, images


def in_parts(messages: Sequence[Row], image: Callable[[int], Row]) -> list[Row]:
    """Return messages whose content is a list of parts; `image` makes the part of a picture's number."""
    rows, number = [], 0
    for message in messages:
        parts = list[Row]()
        for place, text in enumerate(message["content"].split(PLACEHOLDER)):
            if place:
                parts.append(image(number))
                number += 1
            if text:
                parts.append({"type": "text", "text": text})
        rows.append({"role": message["role"], "content": parts})
    return rows


# -------------------------------------------------------------------------------------------------- the rows


def llamafactory(sample: StepSample, album: Album) -> Row:
    """A row of LLaMA-Factory's sharegpt format with OpenAI's role names."""
    messages, images = chat(sample, album)
    return {"messages": [*messages, {"role": "assistant", "content": sample.target_text}], "images": images}


def openai(sample: StepSample, album: Album) -> Row:
    """OpenAI's chat messages, pictures as data URLs."""
    messages, _ = chat(sample, album)
    pictures = [part for message in sample.messages for part in message.parts if isinstance(part, Image)]

    def image(number: int) -> Row:
        return {"type": "image_url", "image_url": {"url": data_url(pictures[number], album.root)}}

    answer = {"role": "assistant", "content": sample.target_text}
    return {"messages": [*in_parts(messages, image), answer]}


def trl(sample: StepSample, album: Album) -> Row:
    """TRL's conversational prompt and completion, with what `hooks.trl_reward` reads as further columns."""
    messages, images = chat(sample, album)
    return {
        "prompt": in_parts(messages, lambda number: {"type": "image"}),
        "completion": [{"role": "assistant", "content": [{"type": "text", "text": sample.target_text}]}],
        "images": images,
        "target": sample.target_text,
        "prompt_indices": list(sample.prompt_indices),
    }


def _facts(sample: StepSample) -> Row:
    """Return what a reward hook and a log want to know of a sample."""
    return {
        "split": sample.split,
        "sample_id": sample.sample_id,
        "task_id": sample.task_id,
        "category": getattr(sample, "category", ""),
        "prompt_indices": list(sample.prompt_indices),
    }


def verl(sample: StepSample, album: Album) -> Row:
    """A row of verl's RL dataset; picture paths are absolute, as verl reads them."""
    messages, images = chat(sample, album)
    return {
        "data_source": "rmsweb",
        "prompt": messages,
        "images": [str((album.out / name).resolve()) for name in images],
        "ability": "web",
        "reward_model": {"style": "rule", "ground_truth": sample.target_text},
        "extra_info": _facts(sample),
    }


def slime(sample: StepSample, album: Album) -> Row:
    """A row for slime: --input-key prompt --label-key label --metadata-key metadata."""
    messages, images = chat(sample, album)
    return {
        "prompt": messages,
        "label": sample.target_text,
        "images": [str((album.out / name).resolve()) for name in images],
        "metadata": _facts(sample),
    }


ROWS: dict[str, Callable[[StepSample, Album], Row]] = {
    "llamafactory": llamafactory,
    "openai": openai,
    "trl": trl,
    "verl": verl,
    "slime": slime,
}


def rejected_text(state: MinedState, audit: AuditRow) -> str | None:
    """Return the answer that takes the failing branch's action, None if the page lacks its element."""
    if not audit.rejected:
        return None
    answer = json.loads(state.target_text)
    answer["action"] = [json.loads(canonical_action(action)) for action in audit.rejected]
    return dumps(answer)


def dpo(state: MinedState, album: Album, rejected: str) -> Row:
    """A preference pair in LLaMA-Factory's ranking format; TRL reads chosen and rejected of it too."""
    messages, images = chat(state, album)
    return {
        "messages": messages,
        "chosen": {"role": "assistant", "content": state.target_text},
        "rejected": {"role": "assistant", "content": rejected},
        "images": images,
    }


# ------------------------------------------------------------------------------------------------- the files


def _write(path: Path, rows: Iterator[Row]) -> int:
    """Write rows as JSON Lines without a header and return their number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        return sum(bool(file.write(dumps(row) + "\n")) for row in rows)


def dataset_info(name: str, *, ranking: bool) -> Row:
    """Return LLaMA-Factory's description of an exported file."""
    columns = {"messages": "messages", "images": "images"}
    columns |= {"chosen": "chosen", "rejected": "rejected"} if ranking else {}
    tags = {f"{role}_tag": role for role in ("user", "assistant", "system")}
    return {
        f"rmsweb_{name}": {
            "file_name": f"{name}.jsonl",
            "formatting": "sharegpt",
            **({"ranking": True} if ranking else {}),
            "columns": columns,
            "tags": {"role_tag": "role", "content_tag": "content", **tags},
        }
    }


def card(name: str, source: Path, count: int) -> str:
    """Return the README.md by which Hugging Face `datasets` loads an exported file."""
    return (
        f"---\nconfigs:\n- config_name: default\n  data_files: {name}.jsonl\n---\n\n# rmsweb {name}\n\n"
        f"{count} rows exported from `{source.name}` by rmsweb. Picture paths are relative to this folder. "
        f'A literal "{PLACEHOLDER}" of a page is written "{ESCAPED}".\n'
    )


def export_samples(kind: str, path: Path, out: Path) -> dict[str, int]:
    """Export samples or mined states; return the counts of rows and pictures.

    Raises RecordError for a file of another kind, ValueError for a picture that cannot be read.
    """
    album = Album(path.parent, out)
    count = _write(out / f"{kind}.jsonl", (ROWS[kind](sample, album) for sample in read_samples(path)))
    if kind == "llamafactory":
        write_json(out / "dataset_info.json", dataset_info(kind, ranking=False))
    (out / "README.md").write_text(card(kind, path, count), encoding="utf-8")
    return {"rows": count, "pictures": len(album.names)}


def export_pairs(path: Path, out: Path) -> dict[str, int]:
    """Export mined states and their audit rows as preference pairs; return the counts.

    Raises FileNotFoundError without the audit.jsonl beside the mined states.
    """
    audits = {row.state_id: row for row in read_records(path.parent / "audit.jsonl", AuditRow)}
    album, left_out = Album(path.parent, out), 0

    def rows() -> Iterator[Row]:
        nonlocal left_out
        for state in read_records(path, MinedState):
            rejected = rejected_text(state, audits[state.state_id])
            left_out += rejected is None
            if rejected is not None:
                yield dpo(state, album, rejected)

    count = _write(out / "dpo.jsonl", rows())
    write_json(out / "dataset_info.json", dataset_info("dpo", ranking=True))
    (out / "README.md").write_text(card("dpo", path, count), encoding="utf-8")
    return {"rows": count, "left_out": left_out, "pictures": len(album.names)}


# ------------------------------------------------------------------------------------- logs of an evaluation


def export_inspect(folder: Path, out: Path) -> dict[str, int]:
    """Export an evaluation as a log of inspect_ai, without pictures; return the count of samples."""
    run = RunFolder(folder)
    samples = [_inspect_sample(*judged) for judged in run.judged()]
    if run.first is None:
        raise ValueError(f"{folder}: no run of an episode in it")
    began = str(run.json("env.json").get("started") or time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
    value = sum(sample["scores"]["success"]["value"] for sample in samples) / len(samples)
    tasks = sorted({sample["id"] for sample in samples})
    log = {
        "version": 2,
        "status": "success",
        "eval": {
            "created": began,
            "task": folder.name,
            "dataset": {"name": run.first.task.benchmark, "samples": len(tasks), "sample_ids": tasks},
            "model": run.first.source.policy,
            "config": {"epochs": max(sample["epoch"] for sample in samples)},
        },
        "results": {
            "total_samples": len(samples),
            "completed_samples": len(samples),
            "scores": [
                {"name": "success", "scorer": "judge", "metrics": {"mean": {"name": "mean", "value": value}}}
            ],
        },
        "stats": {"started_at": began, "completed_at": began},
        "samples": samples,
    }
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / f"{began.replace(':', '-')}_{folder.name}_rmsweb.json", log)
    return {"samples": len(samples)}


def _inspect_sample(trajectory: Trajectory, judgement: Judgement | None) -> Row:
    messages = [{"role": "user", "content": trajectory.task.text}]
    for step in trajectory.steps:
        messages.append({"role": "user", "content": f"step {step.number}: {step.observation.url}"})
        messages.append({"role": "assistant", "content": step.response_text})
    return {
        "id": trajectory.task.task_id,
        "epoch": trajectory.source.run + 1,
        "input": trajectory.task.text,
        "target": "",
        "messages": messages,
        "scores": {
            "success": {
                "value": float(is_success(trajectory, judgement)),
                "answer": trajectory.final_text or "",
                "explanation": judgement.reason if judgement else "not judged",
            }
        },
        "metadata": {"ended": trajectory.ended, "steps": len(trajectory.steps)},
        "total_time": sum(step.duration_s for step in trajectory.steps),
    }


def export(kind: str, path: Path, out: Path) -> dict[str, int]:
    """Export a file or run folder in one of the formats; return the counts."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or run folder")
    if kind == "inspect":
        return export_inspect(path, out)
    return export_pairs(path, out) if kind == "dpo" else export_samples(kind, path, out)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m rmsweb.collection.exporters",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("format", choices=[*ROWS, "dpo", "inspect"])
    parser.add_argument("path", type=Path, help="samples.jsonl, mined.jsonl, or the folder of an evaluation")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    options = parser.parse_args(argv)
    counts = export(options.format, options.path, options.out)
    print(f"{os.fspath(options.out)}: {', '.join(f'{count} {name}' for name, count in counts.items())}")
    return 0


if __name__ == "__main__":
    sys.exit(main_guard(main))
