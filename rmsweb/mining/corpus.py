"""What goes into the miner and what goes beside its states: the pool, ordinary states, followers, pictures.

ours: followers are no part of the paper's corpus. A mined answer is never `done`, and at a mined state the
careful step has not been taken yet; a very small policy that trains on such states alone repeats that step or
fails to finish more often (docs/study.md). Followers show the way on.
"""

import random
import shutil
from collections.abc import Iterable, Iterator, Sequence, Set
from itertools import islice
from pathlib import Path

from rmsweb.jsonl import inside, read_records
from rmsweb.mining.alignment import AlignedRun
from rmsweb.mining.search import Found, Render
from rmsweb.pictures import check_picture
from rmsweb.prompt import PromptConfig, differing_fields, load_prompt_config
from rmsweb.records import WORK_CHECK, AuditRow, Image, Split, StepSample, Trajectory, is_success
from rmsweb.runs import RunFolder

Place = tuple[str, int]  # trajectory id, step number


def place_of(sample: StepSample) -> Place:
    """Return which step of which run a sample shows."""
    return sample.trajectory_id, sample.step


def shared_prompt_config(pool: Sequence[Path]) -> PromptConfig:
    """Return the prompt config that all folders of a pool have.

    Raises FileNotFoundError for a folder without one, ValueError naming the fields in which two differ.
    """
    shared: PromptConfig | None = None
    for path in pool:
        file = path / "prompt_config.json"
        if not file.is_file():
            raise FileNotFoundError(f"--pool {path}: no run folder there ({file.name} is missing)")
        own = load_prompt_config(file)
        shared = shared or own
        if own != shared:
            names = ", ".join(differing_fields(own, shared))
            raise ValueError(f"--pool {path}: its prompt config differs from {pool[0]}'s in {names}")
    assert shared is not None
    return shared


def read_runs(pool: Iterable[Path], split: Split, prompt_config: PromptConfig) -> Iterator[AlignedRun]:
    """Yield the runs of a split; the folders are only read.

    A run without a readable verdict counts as undecided. Raises ValueError for a run that was made with
    another prompt config, RecordError for a damaged file.
    """
    for path in pool:
        folder = RunFolder(path)
        verdicts = folder.judgements()
        for file in folder.files("trajectories"):
            for trajectory in read_records(file, Trajectory):
                if trajectory.task.split != split:
                    continue
                if trajectory.prompt_config != prompt_config.hash:
                    raise ValueError(
                        f"--pool {path}: {trajectory.trajectory_id} was made with another prompt config than "
                        f"{path / 'prompt_config.json'}, or by a version with another system text"
                    )
                judgement = verdicts.get(trajectory.trajectory_id)
                decided = judgement is not None and judgement.verdict in ("success", "not_success")
                yield AlignedRun(
                    trajectory,
                    success=is_success(trajectory, judgement) if decided else None,
                    work_checked=judgement is not None and judgement.judge == WORK_CHECK,
                )


def ordinary_states(
    runs: Iterable[AlignedRun], mined: Set[Place], render: Render, *, count: int, seed: int
) -> list[StepSample]:
    """Return up to `count` steps of successful runs that were not mined, drawn by seed."""
    places = [
        (run, position)
        for run in sorted(runs, key=lambda run: run.key)
        if run.success
        for position in range(len(run.steps))
    ]
    random.Random(seed).shuffle(places)
    samples = (render(run, position) for run, position in places)
    return list(islice((sample for sample in samples if sample and place_of(sample) not in mined), count))


def followers(found: Iterable[Found], mined: Set[Place], render: Render, *, count: int) -> list[StepSample]:
    """Return the next `count` steps of the success behind each mined state, those that are mined left out."""
    samples = [
        render(item.success, position)
        for item in found
        # a step's number, from 1, is the position of the next one
        for position in range(item.state.step, len(item.success.steps))[:count]
    ]
    by_place = {place_of(sample): sample for sample in samples if sample}
    return [sample for place, sample in by_place.items() if place not in mined]


def copy_pictures(
    samples: Iterable[StepSample], rows: Iterable[AuditRow], pool: Sequence[Path], out: Path
) -> None:
    """Copy the pictures that the records name from the folders of the pool into the run folder `out`.

    A picture's name is the hash of its bytes, so it does not matter which folder it comes from. Raises
    ValueError naming the file for one that is missing, broken, or not what the record says.
    """
    parts = (part for sample in samples for message in sample.messages for part in message.parts)
    images = [part for part in parts if isinstance(part, Image)]
    images += [image for row in rows for image in (row.success_screenshot, row.failure_screenshot) if image]
    for image in {image.path: image for image in images}.values():
        target = inside(out, image.path)
        target.parent.mkdir(parents=True, exist_ok=True)
        root = next((folder for folder in pool if inside(folder, image.path).is_file()), pool[0])
        check_picture(image, root)
        shutil.copyfile(inside(root, image.path), target)
