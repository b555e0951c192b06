"""Laws of the exporters: what is written is read back, placeholders and pictures agree, nothing is lost."""

import asyncio
import base64
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mining_world import BAD, GOOD, held_out, render, run
from sft_world import step_sample, write_run

from rmsweb.collection.exporters import ESCAPED, PLACEHOLDER, ROWS, Album, content, export, main
from rmsweb.jsonl import RecordError, read_records, write_records
from rmsweb.mining.search import MinerConfig, mine
from rmsweb.records import AuditRow, Image, Message, MinedState, Text
from rmsweb.runs import read_samples
from rmsweb.salvage.reward import score


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    """Return a samples.jsonl in which one page says "<image>" and one picture has boxes."""
    folder = tmp_path / "run"
    path = write_run(folder, 4)
    made = list(read_samples(path))
    hostile = Message(role="user", parts=(Text(tag="state", text=f"a page about {PLACEHOLDER} tags"),))
    picture = next(part for part in made[0].messages[0].parts if isinstance(part, Image))
    boxed = Message(
        role="user", parts=(replace(picture, boxes=((3, 5.0, 5.0, 40.0, 20.0),)), hostile.parts[0])
    )
    made += [replace(made[0], sample_id="hostile", messages=(hostile,)), replace(made[0], messages=(boxed,))]
    write_records(path, type(made[0]), made)
    return path


def placeholders(row: dict[str, Any]) -> int:
    """Count the pictures that the texts of a row ask for."""
    messages = row.get("messages") or row["prompt"]
    texts = [message["content"] for message in messages]
    return sum(
        text.count(PLACEHOLDER) if isinstance(text, str) else sum(part["type"] != "text" for part in text)
        for text in texts
    )


@pytest.mark.parametrize("kind", ROWS)
def test_every_row_comes_back(kind: str, samples: Path, tmp_path: Path) -> None:
    """A row a sample, without a header; as many pictures as placeholders; the target is there as text."""
    out = tmp_path / "out"
    counts = export(kind, samples, out)
    made, rows = list(read_samples(samples)), rows_of(out / f"{kind}.jsonl")
    assert counts["rows"] == len(rows) == len(made)
    for sample, row in zip(made, rows, strict=True):
        assert "schema_version" not in row
        pictures = sum(isinstance(part, Image) for message in sample.messages for part in message.parts)
        assert placeholders(row) == pictures
        if kind != "openai":
            assert len(row["images"]) == pictures
            assert all((out / name).is_file() for name in row["images"])
        text = json.dumps(row, ensure_ascii=False)
        assert json.dumps(sample.target_text, ensure_ascii=False) in text
    assert f"{counts['rows']} rows" in (out / "README.md").read_text()


def test_the_target_scores_one_in_every_trainers_row(samples: Path, tmp_path: Path) -> None:
    """What verl, slime and TRL hand to the reward is the verified answer with the indices of its prompt."""
    for kind, places in (
        ("verl", ("reward_model", "ground_truth")),
        ("slime", ("label",)),
        ("trl", ("target",)),
    ):
        export(kind, samples, tmp_path / kind)
        for sample, row in zip(
            read_samples(samples), rows_of(tmp_path / kind / f"{kind}.jsonl"), strict=True
        ):
            target: Any = row
            for place in places:
                target = target[place]
            facts = row.get("extra_info") or row.get("metadata") or row
            assert score(sample.target_text, target, facts["prompt_indices"]).value == 1


def test_boxes_are_drawn_and_plain_pictures_copied(samples: Path, tmp_path: Path) -> None:
    """A prompt with index boxes gets its own picture; the same plain picture is written once."""
    out = tmp_path / "out"
    assert export("llamafactory", samples, out)["pictures"] == 2
    rows = rows_of(out / "llamafactory.jsonl")
    plain, boxed = rows[0]["images"][0], rows[-1]["images"][0]
    assert (out / plain).read_bytes() == (samples.parent / "screenshots" / "a.png").read_bytes()
    with PIL.Image.open(out / boxed) as one, PIL.Image.open(out / plain) as two:
        assert one.size == two.size
        assert one.convert("RGB").tobytes() != two.convert("RGB").tobytes()


def test_openai_rows_carry_their_pictures(samples: Path, tmp_path: Path) -> None:
    """Pictures are data URLs that decode."""
    export("openai", samples, tmp_path / "out")
    parts = rows_of(tmp_path / "out" / "openai.jsonl")[0]["messages"][0]["content"]
    data = next(part["image_url"]["url"] for part in parts if part["type"] == "image_url")
    assert PIL.Image.open(io.BytesIO(base64.b64decode(data.split(",")[1]))).size == (160, 96)


def test_llamafactory_gets_its_description(samples: Path, tmp_path: Path) -> None:
    """dataset_info.json names the file and the columns that its rows have."""
    out = tmp_path / "out"
    export("llamafactory", samples, out)
    (info,) = json.loads((out / "dataset_info.json").read_text()).values()
    row = rows_of(out / info["file_name"])[0]
    assert set(info["columns"].values()) <= row.keys()
    assert {message["role"] for message in row["messages"]} <= set(info["tags"].values())


@given(st.lists(st.sampled_from([PLACEHOLDER, "<image", ">", "text ", ESCAPED, "<<image>>"]), max_size=8))
def test_no_page_can_add_a_placeholder(words: list[str]) -> None:
    """Whatever a page says, the text has as many placeholders as pictures."""
    message = Message(role="user", parts=tuple(Text(tag="state", text=word) for word in words))
    joined = Message(role="user", parts=(Text(tag="state", text="".join(words)),))
    for given_message in (message, joined):
        text, images = content(given_message, Album(Path(), Path()))
        assert (text.count(PLACEHOLDER), images) == (0, [])


def mined_folder(path: Path) -> Path:
    """Write mined states, their audit rows and the picture that they share."""
    runs = [run(GOOD, True), run(BAD, False, name="b", shift=4)]
    result = asyncio.run(mine(runs, render=render, judge=None, config=MinerConfig()))
    (path / "screenshots").mkdir(parents=True)
    for item in result.found:
        for part in item.state.messages[-1].parts:
            if isinstance(part, Image):
                PIL.Image.new("RGB", (64, 48), "white").save(path / part.path)
    write_records(path / "mined.jsonl", MinedState, [item.state for item in result.found])
    write_records(path / "audit.jsonl", AuditRow, [item.audit for item in result.found])
    return path / "mined.jsonl"


def test_a_preference_pair_is_about_one_page(tmp_path: Path) -> None:
    """The failing branch's action is written with the index that its element has on the success's page."""
    path = mined_folder(tmp_path / "mined")
    assert export("dpo", path, tmp_path / "out")["rows"] == 1
    row = rows_of(tmp_path / "out" / "dpo.jsonl")[0]
    chosen, rejected = (json.loads(row[side]["content"])["action"] for side in ("chosen", "rejected"))
    assert chosen == [{"select_dropdown_option": {"index": 1, "text": "red"}}]
    assert rejected == [{"click_element_by_index": {"index": 2}}]  # 6 on its own page
    assert score(row["rejected"]["content"], row["chosen"]["content"]).value < 0.55
    (info,) = json.loads((tmp_path / "out" / "dataset_info.json").read_text()).values()
    assert info["ranking"] is True


def test_a_pair_whose_element_is_missing_is_left_out(tmp_path: Path) -> None:
    """A failing action that cannot be made on the success's page makes no pair, and is counted."""
    path = mined_folder(tmp_path / "mined")
    audit = path.parent / "audit.jsonl"
    write_records(audit, AuditRow, [replace(row, rejected=()) for row in read_records(audit, AuditRow)])
    assert export("dpo", path, tmp_path / "out") == {"rows": 0, "left_out": 1, "pictures": 0}


def test_an_evaluation_becomes_a_log(tmp_path: Path) -> None:
    """A sample a run, its score what the judge said, the mean over all of them."""
    folder = held_out(tmp_path / "eval", "+-?+++")
    export("inspect", folder, tmp_path / "out")
    (path,) = (tmp_path / "out").iterdir()
    log = json.loads(path.read_text())
    assert [sample["scores"]["success"]["value"] for sample in log["samples"]] == [1, 0, 0, 1, 1, 1]
    assert log["results"]["scores"][0]["metrics"]["mean"]["value"] == pytest.approx(4 / 6)
    assert log["eval"]["config"]["epochs"] == 3
    inspect_ai = pytest.importorskip("inspect_ai.log")
    assert len(inspect_ai.read_eval_log(str(path)).samples) == 6


def test_datasets_reads_what_is_written(samples: Path, tmp_path: Path) -> None:
    """Hugging Face's reader finds every row and the columns of the first one."""
    datasets = pytest.importorskip("datasets")
    export("trl", samples, tmp_path / "out")
    found = datasets.load_dataset(str(tmp_path / "out"), split="train")
    assert len(found) == len(list(read_samples(samples)))
    assert {"prompt", "completion", "images", "target"} <= set(found.column_names)


def test_wrong_input_is_named(tmp_path: Path, samples: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing file, a file of something else, and a format that does not exist are each one sentence."""
    with pytest.raises(FileNotFoundError, match="no such file"):
        export("trl", tmp_path / "none.jsonl", tmp_path / "out")
    other = tmp_path / "tasks.jsonl"
    other.write_text('{"schema_version": 1, "kind": "Task"}\n')
    with pytest.raises(RecordError, match=r"tasks\.jsonl:1"):
        export("trl", other, tmp_path / "out")
    with pytest.raises(SystemExit):
        main(["parquet", str(samples), "--out", str(tmp_path / "out")])
    assert main(["slime", str(samples), "--out", str(tmp_path / "out")]) == 0
    assert "6 rows" in capsys.readouterr().out


def test_a_sample_without_a_picture_exports(tmp_path: Path) -> None:
    """Text-only samples have an empty list of pictures and no placeholder."""
    path = write_run(tmp_path / "run", 0, samples=[step_sample(1)])
    export("llamafactory", path, tmp_path / "out")
    assert rows_of(tmp_path / "out" / "llamafactory.jsonl")[0]["images"] == []
