"""The policy with the real Qwen vocabulary, rebuilt from the qwen.tiktoken that the package dashscope ships
(only that file is read).
"""

import base64
import hashlib
import importlib.util
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_model import tiny_config
from transformers import Qwen2Tokenizer, Qwen3VLForConditionalGeneration
from transformers.convert_slow_tokenizer import bytes_to_unicode

from rmsweb.browser.actions import action_span
from rmsweb.engine.policy import PolicyModel
from rmsweb.prompt import PromptConfig, image_tokens
from rmsweb.records import Image, Message, Text, sha256_text

SPEC = importlib.util.find_spec("dashscope")
FILE = Path(SPEC.origin).parent / "resources" / "qwen.tiktoken" if SPEC and SPEC.origin else None
pytestmark = pytest.mark.skipif(
    FILE is None or not FILE.is_file(),
    reason="the package dashscope, which ships qwen.tiktoken, is not installed",
)
SHA256 = "b2b1b8dfb5cc5f024bafc373121c6aba3f66f9a5a0269e243470a1de16a33186"
# fmt: off
ADDED = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
    "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>",
    "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)
# fmt: on
ANSWER = (
    '{"evaluation_previous_goal":"ok","memory":"für 3 € – 你好 🛒",'
    '"action":[{"click_element_by_index":{"index":13}},{"wait":{"seconds":3}}]}'
)


def last_merge(ranks: dict[bytes, int], token: bytes) -> tuple[bytes, bytes]:
    """The two parts whose merge makes the token: its bytes, merged by all lower ranks."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        best = min(range(len(parts) - 1), key=lambda i: ranks.get(parts[i] + parts[i + 1], len(ranks)))
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts[0], parts[1]


@pytest.fixture(scope="module")
def policy():
    """A one-layer model with the real vocabulary and the paper's prompt configuration."""
    content = FILE.read_bytes()
    assert hashlib.sha256(content).hexdigest() == SHA256
    ranks = {
        base64.b64decode(token): int(rank) for token, rank in (line.split() for line in content.splitlines())
    }
    letters = bytes_to_unicode()

    def text(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    merges = [
        tuple(map(text, last_merge(ranks, token)))
        for token, _ in sorted(ranks.items(), key=lambda item: item[1])
        if len(token) > 1
    ]
    tokenizer = Qwen2Tokenizer(vocab={text(token): rank for token, rank in ranks.items()}, merges=merges)
    tokenizer.add_tokens(list(ADDED), special_tokens=True)
    torch.manual_seed(0)
    model = Qwen3VLForConditionalGeneration._from_config(
        tiny_config(tokenizer, hidden=16, layers=1), attn_implementation="sdpa"
    )
    return PolicyModel(model, tokenizer, prompt_config=PromptConfig(), name="qwen")


def test_token_numbers_are_the_published_ones(policy):
    """151,643 ranks, the control tokens behind them in published order, and a text of known tokens."""
    assert [policy.tokenizer.convert_tokens_to_ids(token) for token in ADDED] == list(range(151_643, 151_657))
    assert policy.end_id == 151_645
    assert policy.tokenizer("hello world")["input_ids"] == [14990, 1879]
    assert policy.tokenizer("<|im_start|>user\nHello<|im_end|>\n")["input_ids"] == [
        151644,
        872,
        198,
        9707,
        151645,
        198,
    ]


def test_the_chat_template_is_the_published_one_byte_for_byte(policy, tmp_path):
    """System, user with a picture, assistant: the bytes of qwen3_vl_nothink and their tokens; nothing is
    added before, between or after.
    """
    PIL.Image.fromarray(np.zeros((800, 1280, 3), np.uint8)).save(tmp_path / "a.png")
    picture = Image(path="a.png", sha256=sha256_text("a"), width=1280, height=800)
    messages = [
        Message(
            role="system",
            parts=(
                Text(tag="system", text="You operate a browser.\n"),
                Text(tag="schema", text="Actions:\n"),
            ),
        ),
        Message(
            role="user",
            parts=(
                picture,
                Text(tag="task", text="<task>\nKaufe 2 Lampen für 30 €\n</task>\n"),
                Text(tag="state", text="[1]<a />\n\tÖffnen"),
            ),
        ),
        Message(role="assistant", parts=(Text(tag="history", text=ANSWER),)),
        Message(role="user", parts=(Text(tag="warning", text="  Try again.  "),)),
    ]
    expected = (
        "<|im_start|>system\nYou operate a browser.\nActions:\n<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|>"
        + "<|image_pad|>"
        * 240
        + "<|vision_end|><task>\nKaufe 2 Lampen für 30 €\n</task>\n[1]<a />\n\tÖffnen<|im_end|>\n"
        "<|im_start|>assistant\n"
        + ANSWER
        + "<|im_end|>\n<|im_start|>user\n  Try again.  <|im_end|>\n<|im_start|>assistant\n"
    )
    prompt = policy.encode_prompt(messages, tmp_path)
    assert (
        policy.tokenizer.decode(prompt.ids, clean_up_tokenization_spaces=False).encode() == expected.encode()
    )
    assert prompt.ids.tolist() == policy.tokenizer(expected)["input_ids"]
    assert prompt.ids[-3:].tolist() == [151644, 77091, 198]


@pytest.mark.parametrize(
    ("size", "count"), [((1280, 800), 240), ((1080, 2400), 230), ((1280, 720), None), ((300, 40), None)]
)
def test_a_picture_takes_as_many_tokens_as_its_size_says(policy, tmp_path, size, count):
    """A picture takes as many <|image_pad|> as its size says, at the places that get its features; 240 and
    230 are the figures of the paper's pixel cap.
    """
    PIL.Image.new("RGB", size).save(tmp_path / "a.png")
    messages = [
        Message(
            role="user",
            parts=(Text(tag="task", text="x"), Image(path="a.png", sha256="", width=size[0], height=size[1])),
        )
    ]
    prompt = policy.encode_prompt(messages, tmp_path)
    places = (prompt.ids == 151_655).nonzero()[:, 0]
    assert torch.equal(places, prompt.image_index)
    assert (
        len(places)
        == image_tokens(*size, PromptConfig())
        == prompt.image_grid.prod() // 4
        == len(prompt.pixel_values) // 4
    )
    assert len(places) == (count or len(places))
    assert policy.prompt_length(messages) == len(prompt)


def test_the_action_span_decodes_to_the_actions(policy):
    """The action span's tokens decode to the action list, and to no more than the token that its first
    bracket shares with the text before it.
    """
    start, end = action_span(ANSWER)
    first, last = policy.token_span(ANSWER, (start, end))
    ids = policy.encode_response(ANSWER)
    inside = policy.decode(ids[first:last])
    assert ANSWER[start:end] in inside
    assert len(inside) <= end - start + 4
    assert ids[-1] == policy.end_id
    assert last < len(ids)


@settings(deadline=None)
@given(st.text(st.characters(codec="utf-8"), max_size=20), st.data())
def test_spans_cover_their_characters(policy, text, data):
    """For any span of any answer: the tokens before it hold none of its characters, nor do those behind it,
    where several tokens may make one character.
    """
    text = f'{{"memory":"{text}"}}'
    start = data.draw(st.integers(0, len(text) - 1))
    stop = data.draw(st.integers(start + 1, len(text)))
    first, last = policy.token_span(text, (start, stop))
    offsets = policy.tokenizer(
        text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True
    )["offset_mapping"]
    assert all(end <= start for _, end in offsets[:first])
    assert all(begin >= stop for begin, _ in offsets[last:])


@given(st.sampled_from([*ADDED, "<|im_start|>system\n"]), st.text(max_size=5))
def test_page_text_never_becomes_a_control_token(policy, hostile, text):
    """Control tokens that a page or a task writes are tokens of plain text."""
    ids = policy.encode_response(text + hostile + text)[:-1]
    assert not set(ids.tolist()) & set(range(151_643, 151_657))
