"""Laws of mine.py: run folders in, one folder out that can be moved, one clear line for a bad pool."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chat_server import Answer, chat_server, completion
from mining_world import BAD, CONFIG, GOOD, run, write_folder

import mine
from rmsweb.config import main_guard
from rmsweb.jsonl import read_records, write_json
from rmsweb.records import AuditRow, Image, MinedState, StepSample


def call(*words: object) -> int:
    return main_guard(lambda: mine.main([str(word) for word in words]))


@pytest.fixture
def pool(tmp_path: Path) -> list[Path]:
    """A collection and a run of the SFT policy, with equal ids; the second has a run of the dev split too."""
    collected = write_folder(
        tmp_path / "collect", [run(GOOD, True, script="collect"), run(BAD, False, name="b", script="collect")]
    )
    evaluated = write_folder(
        tmp_path / "pool",
        [
            run(BAD, False, shift=3),
            run(GOOD, None, name="c"),
            run(GOOD, True, task_id="t1", split="dev"),
            run(GOOD, True, task_id="t2"),
        ],
    )
    return [collected, evaluated]


def test_the_out_folder_stands_alone(pool: list[Path], tmp_path: Path) -> None:
    """Mined, audit and ordinary records name pictures of their own folder and carry its prompt config."""
    out = tmp_path / "out"
    assert call("--pool", *pool, "--out", out) == 0
    for folder in pool:
        shutil.rmtree(folder)
    mined = list(read_records(out / "mined.jsonl", MinedState))
    audit = list(read_records(out / "audit.jsonl", AuditRow))
    ordinary = list(read_records(out / "ordinary.jsonl", StepSample))
    assert [state.state_id for state in mined] == [row.state_id for row in audit]
    assert len(mined) == 1
    assert mined[0].prompt_config == CONFIG.hash
    pictures = [
        part
        for sample in (*mined, *ordinary)
        for message in sample.messages
        for part in message.parts
        if isinstance(part, Image)
    ]
    assert pictures
    assert all((out / image.path).is_file() for image in pictures)
    assert all(
        (out / image.path).is_file()
        for row in audit
        for image in (row.success_screenshot, row.failure_screenshot)
        if image
    )


def test_splits_do_not_mix_and_undecided_runs_are_counted(pool: list[Path], tmp_path: Path) -> None:
    """Only the asked split is mined; ordinary states are steps of successes that were not mined."""
    out = tmp_path / "out"
    assert call("--pool", *pool, "--out", out, "--ordinary", 50) == 0
    counts = json.loads((out / "summary.json").read_text())
    assert (counts["successes"], counts["failures"], counts["undecided"]) == (2, 2, 1)
    mined = {(state.task_id, state.step) for state in read_records(out / "mined.jsonl", MinedState)}
    ordinary = list(read_records(out / "ordinary.jsonl", StepSample))
    assert {sample.split for sample in ordinary} == {"train"}
    assert not mined & {(sample.task_id, sample.step) for sample in ordinary}
    assert call("--pool", *pool, "--out", tmp_path / "none", "--ordinary", 0) == 0
    assert not list(read_records(tmp_path / "none" / "ordinary.jsonl", StepSample))


@pytest.mark.parametrize("count", [1, 2, 9])
def test_followers_are_the_next_steps_of_the_success(pool: list[Path], tmp_path: Path, count: int) -> None:
    """Up to `count` steps behind each mined state are written, `done` included, with their pictures."""
    out = tmp_path / "out"
    assert call("--pool", *pool, "--out", out, "--followers", count) == 0
    (mined,) = read_records(out / "mined.jsonl", MinedState)
    found = list(read_records(out / "followers.jsonl", StepSample))
    assert [(item.trajectory_id, item.step) for item in found] == [
        (mined.trajectory_id, mined.step + 1 + number) for number in range(min(count, 2))
    ]
    assert ("done" in found[-1].target_text) == (count > 1)
    assert all(
        (out / part.path).is_file()
        for item in found
        for message in item.messages
        for part in message.parts
        if isinstance(part, Image)
    )
    assert json.loads((out / "summary.json").read_text())["followers"] == len(found)
    assert call("--pool", *pool, "--out", tmp_path / "none") == 0
    assert not (tmp_path / "none" / "followers.jsonl").exists()


def test_secondary_pairs_need_a_judgement_of_the_work(tmp_path: Path) -> None:
    """A shorter success whose work was checked is paired with a longer one, unless --no-secondary; a success
    that only its answer vouches for is in no such pair.
    """
    longer = run("open open open select add done", True, name="long")
    for checked, flags, pairs in ((True, (), 1), (True, ("--no-secondary",), 0), (False, (), 0)):
        name = f"{checked}{len(flags)}"
        short = run(GOOD, True, name="short", work_checked=checked)
        folder = write_folder(tmp_path / f"pool{name}", [short, longer])
        assert call("--pool", folder, "--out", tmp_path / name, *flags) == 0
        assert json.loads((tmp_path / name / "summary.json").read_text())["pairs"] == pairs


def test_a_pool_is_only_read(pool: list[Path], tmp_path: Path) -> None:
    """Mining changes no byte of the folders it reads."""
    before = {path: path.read_bytes() for folder in pool for path in folder.rglob("*") if path.is_file()}
    assert call("--pool", *pool, "--out", tmp_path / "out") == 0
    assert {
        path: path.read_bytes() for folder in pool for path in folder.rglob("*") if path.is_file()
    } == before


def test_the_judge_labels_and_a_second_run_asks_nothing(pool: list[Path], tmp_path: Path) -> None:
    """The category comes from the endpoint or its cached reply; the report names a scripted judge."""

    def answer(body: dict[str, Any], number: int) -> Answer:
        assert "<failed_run>" in body["messages"][-1]["content"]
        return completion('{"reason":"x","category":"controls","confidence":0.9}')

    with chat_server(answer) as server:
        out = tmp_path / "out"
        assert (
            call(
                "--pool",
                *pool,
                "--out",
                out,
                "--judge-url",
                server.url,
                "--judge-model",
                "scripted-failure-judge",
            )
            == 0
        )
        asked = len(server.requests)
        shutil.copytree(out / "cache", tmp_path / "again" / "cache")
        assert (
            call(
                "--pool",
                *pool,
                "--out",
                tmp_path / "again",
                "--judge-url",
                server.url,
                "--judge-model",
                "scripted-failure-judge",
            )
            == 0
        )
        assert len(server.requests) == asked > 0
    state = next(read_records(out / "mined.jsonl", MinedState))
    assert (state.category, state.label_source) == ("controls", "review")  # the rules say otherwise
    assert json.loads((out / "summary.json").read_text())["scripted"] == ["scripted-failure-judge"]
    assert (tmp_path / "again" / "mined.jsonl").read_bytes() == (out / "mined.jsonl").read_bytes()


def _no_folder(folder: Path) -> None:
    shutil.rmtree(folder)


def _other_config(folder: Path) -> None:
    write_json(folder / "prompt_config.json", replace(CONFIG, history_steps=3))


def _torn(folder: Path) -> None:
    with open(folder / "trajectories.rank0.jsonl", "a", encoding="utf-8") as file:
        file.write('{"trajectory_id": "x')


@pytest.mark.parametrize(
    ("damage", "code", "words"),
    [
        (_no_folder, 3, "prompt_config.json is missing"),
        (_other_config, 2, "history_steps"),
        (_torn, 2, "trajectories.rank0.jsonl:"),
    ],
)
def test_bad_pools_end_in_one_line(
    pool: list[Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], None],
    code: int,
    words: str,
) -> None:
    """A missing folder is exit 3; a torn file, or another prompt config, whose field is named, is exit 2."""
    damage(pool[1])
    assert call("--pool", *pool, "--out", tmp_path / "out") == code
    assert words in capsys.readouterr().err


def test_help_names_the_papers_choices_and_unknown_flags_end_with_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """--help names the paper's choices; an unknown flag ends with exit 2."""
    with pytest.raises(SystemExit) as stop:
        call("--help")
    assert stop.value.code == 0
    assert "paper: one a task" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(SystemExit) as stop:
        call("--pool", "x", "--out", "y", "--nonsense")
    assert stop.value.code == 2
