"""Laws of the data contracts: records survive JSON, files survive a kill, bad files are named by file and
line.
"""

import dataclasses
import json
import typing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmsweb import jsonl as j
from rmsweb import records as r

IMAGE = r.Image(path="screenshots/a.png", sha256="0" * 64, width=640, height=480)
OBSERVATION = r.Observation(
    url="http://shop.localhost/",
    title="shop home",
    tabs=(r.Tab(tab_id="0001", url="http://shop.localhost/", title="shop home"),),
    active_tab="0001",
    viewport=(640, 480),
    nodes=(
        r.Element(index=1, node_key="1", tag="a", box=(1.0, 2.0, 3.0, 4.0)),
        r.Element(index=None, node_key="2", tag="#text", text="ünïcode 🙂", depth=1),
    ),
    screenshot=IMAGE,
)
TASK = r.Task(
    task_id="t",
    text="do it",
    start_url=None,
    split="train",
    benchmark="playground",
    environment={"seed": 1, "nested": {"a": [1, None]}},
)
STEP = r.Step(
    number=1,
    observation=OBSERVATION,
    response_text="{}",
    output=r.AgentOutput(actions=(r.Action(name="wait", params={"seconds": 1}),), present_keys=("action",)),
    results=(
        r.ActionResult(
            message="waited",
            extraction=r.Extraction(query="q", page_text_path="p", page_text_sha256="s", answer="a"),
        ),
    ),
)
TRAJECTORY = r.Trajectory(
    trajectory_id="x",
    task=TASK,
    source=r.Source(script="collect", policy="teacher"),
    steps=(STEP, dataclasses.replace(STEP, output=None, parse_failure=r.ParseFailure(reason="no json"))),
    final_text=None,
    declared_success=None,
    ended="max_steps",
)
MESSAGE = r.Message(role="user", parts=(IMAGE, r.Text(tag="task", text="do it")))
SAMPLE: dict[str, typing.Any] = {
    "sample_id": "s",
    "kind": "action",
    "task_id": "t",
    "trajectory_id": "x",
    "step": 1,
    "split": "train",
    "host": "shop.localhost",
    "messages": (MESSAGE,),
    "target_text": "{}",
    "action_span": (0, 2),
    "prompt_indices": (1,),
    "prompt_config": "h",
}
MINED = r.MinedState(
    **SAMPLE,
    state_id="m",
    category="c",
    confidence=0.5,
    label_source="rule",
    scores=r.Scores(state=1, action=1, category=1, total=1),
    pair_kind="success-failure",
)


@pytest.mark.parametrize(
    "record",
    [TASK, OBSERVATION, STEP, TRAJECTORY, MESSAGE, r.StepSample(**SAMPLE), MINED],
    ids=lambda x: type(x).__name__,
)
def test_a_record_survives_json(record: typing.Any) -> None:
    """from_json(to_json(x)) == x."""
    assert j.from_json(type(record), json.loads(j.dumps(record))) == record


@given(st.text(), st.text())
def test_any_text_survives_a_file(tmp_path_factory: pytest.TempPathFactory, text: str, other: str) -> None:
    """What is written comes back, whatever characters it holds."""
    path = tmp_path_factory.mktemp("records") / "tabs.jsonl"
    tabs = [r.Tab(tab_id="0001", url=text, title=other), r.Tab(tab_id="0002", url=other, title=text)]
    for tab in tabs:
        j.append_record(path, tab)
    assert list(j.read_records(path, r.Tab)) == tabs


@given(cut=st.integers(1, 60))
def test_a_torn_line_is_cut_and_nothing_else(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    """A kill in the middle of a write loses at most the record being written."""
    path = tmp_path_factory.mktemp("records") / "tabs.jsonl"
    tab = r.Tab(tab_id="0001", url="http://a/", title="ü")
    j.append_record(path, tab)
    whole = path.read_bytes()
    torn = (j.dumps(tab) + "\n").encode()[: min(cut, len(j.dumps(tab).encode()))]
    path.write_bytes(whole + torn)
    for _ in range(2):
        j.cut_torn_line(path)
        assert path.read_bytes() == whole


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    """The error names file, line, field, what was found and what was expected."""
    path = tmp_path / "tabs.jsonl"
    j.append_record(path, r.Tab(tab_id="0001", url="u", title="t"))
    with open(path, "a") as file:
        file.write('{"tab_id":"0002","url":3,"title":"t"}\n')
    with pytest.raises(j.RecordError, match=r"tabs.jsonl:3.url: found 3, expected str"):
        list(j.read_records(path, r.Tab))
    with pytest.raises(j.RecordError, match="header says"):
        list(j.read_records(path, r.Task))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"split": "test"}, "expected one of"),
        ({"task_id": None}, "expected str"),
        ({"environment": []}, "expected an object"),
    ],
)
def test_wrong_types_are_errors(change: dict[str, typing.Any], message: str) -> None:
    """A wrong type never becomes a record."""
    with pytest.raises(j.RecordError, match=message):
        j.from_json(r.Task, j.to_json(TASK) | change)


def test_missing_fields_are_named() -> None:
    """A field fewer is an error, a field more is not."""
    data = j.to_json(TASK)
    assert j.from_json(r.Task, data | {"later": 1}) == TASK
    del data["text"]
    with pytest.raises(j.RecordError, match="Task lacks text"):
        j.from_json(r.Task, data)


def test_seeds_do_not_depend_on_the_process() -> None:
    """The value is fixed for ever: resumed runs and other machines derive the same seeds."""
    assert r.derive_seed(0, "task", "arm", 1, 0) == 1345881927
    assert r.derive_seed(0, "task", "arm", 1, 1) != r.derive_seed(0, "task", "arm", 1, 0)
