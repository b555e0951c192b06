"""Index boxes: asked for by the prompt, drawn when the picture is read, for a checkpoint and for an endpoint;
the file stays as it was.
"""

import base64
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mining_world import page

from rmsweb.llm import openai_messages
from rmsweb.pictures import load_picture
from rmsweb.prompt import PromptConfig, build_prompt
from rmsweb.records import Image, Message

SIDE = st.floats(-50, 400, allow_nan=False)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "screenshots").mkdir()
    PIL.Image.new("RGB", (320, 240), "white").save(tmp_path / "screenshots/a.png")
    return tmp_path


def image(*boxes: tuple[int, float, float, float, float]) -> Image:
    return Image(path="screenshots/a.png", sha256="a", width=320, height=240, boxes=boxes)


def test_a_box_is_drawn_around_its_element_and_nowhere_else(root: Path) -> None:
    """The frame and the number change, the inside and the rest do not, and the file is not touched."""
    before = (root / "screenshots/a.png").read_bytes()
    plain, drawn = (
        np.asarray(load_picture(item, root)).astype(int) for item in (image(), image((7, 100, 60, 90, 50)))
    )
    changed = np.abs(plain - drawn).sum(axis=2) > 0
    assert not (plain != 255).any()
    assert changed[60, 100:190].all()
    assert changed[60:110, 189].all()
    assert not changed[85:105, 130:185].any()
    assert not changed[:58].any()
    assert not changed[:, 192:].any()
    assert (root / "screenshots/a.png").read_bytes() == before


@given(
    boxes=st.lists(
        st.tuples(st.integers(1, 9_999), SIDE, SIDE, st.floats(0, 400), st.floats(0, 400)), max_size=5
    )
)
def test_any_box_can_be_drawn(
    tmp_path_factory: pytest.TempPathFactory, boxes: list[tuple[int, float, float, float, float]]
) -> None:
    """Boxes of no size, or beyond the picture, raise nothing and keep its size."""
    folder = tmp_path_factory.getbasetemp() / "pictures"
    (folder / "screenshots").mkdir(parents=True, exist_ok=True)
    PIL.Image.new("RGB", (320, 240), "white").save(folder / "screenshots/a.png")
    assert load_picture(image(*boxes), folder).size == (320, 240)


def test_the_prompt_asks_for_the_boxes_that_it_shows() -> None:
    """Only elements that stand in the cut prompt and in the viewport, scaled from CSS px to the picture; none
    without the flag.
    """
    seen = page("/", image=replace(image(), width=1280, height=960))
    nodes = tuple(replace(node, in_viewport=node.index != 2) for node in seen.nodes)
    seen = replace(seen, nodes=nodes)
    boxes = {
        flag: build_prompt(PromptConfig(index_boxes=flag), task_text="x", observation=seen, history=())
        .messages[-1]
        .parts[0]
        for flag in (True, False)
    }
    assert isinstance(boxes[True], Image)
    assert isinstance(boxes[False], Image)
    assert boxes[False].boxes == ()
    assert [box[0] for box in boxes[True].boxes] == [1, 3, 4, 5]
    assert boxes[True].boxes[0][1:] == tuple(2.0 * side for side in (10, 40, 90, 30))


def test_an_endpoint_gets_the_boxes(root: Path) -> None:
    """The data URL of a picture with boxes is the drawn picture, of one without the file itself."""
    for item in (image(), image((3, 10, 10, 50, 20))):
        (message,) = openai_messages([Message(role="user", parts=(item,))], root)
        data = base64.b64decode(message["content"][0]["image_url"]["url"].split(",", 1)[1])
        with PIL.Image.open(BytesIO(data)) as sent:
            assert np.array_equal(np.asarray(sent.convert("RGB")), np.asarray(load_picture(item, root)))
    (root / "screenshots/a.png").write_bytes(b"no picture")
    with pytest.raises(ValueError, match="not a picture"):
        load_picture(image(), root)
