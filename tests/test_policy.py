"""Laws of the policy: template, pictures, positions, log-probabilities, files."""

import copy
import io
import json

import numpy as np
import PIL.Image
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_model import SMALL_PROMPT, tiny_policy
from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from rmsweb.engine import policy as policy_room
from rmsweb.engine.packing import Bundle, make_pack
from rmsweb.engine.patches import PixelFormat, patchify
from rmsweb.engine.policy import PolicyModel, recompute_layers, token_logprobs
from rmsweb.prompt import PromptConfig, image_tokens
from rmsweb.records import Image, Message, Text, sha256_text

POLICY = tiny_policy()
ANSWER = '{"memory":"für 3 €","action":[{"click_element_by_index":{"index":3}}]}'


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """A folder with a wide and a tall picture, and their records."""
    root = tmp_path_factory.mktemp("run")
    records = []
    for name, size in (("wide.png", (160, 96)), ("tall.jpg", (90, 200))):
        noise = np.random.default_rng(size[0]).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
        PIL.Image.fromarray(noise).save(root / name)
        records.append(Image(path=name, sha256=sha256_text(name), width=size[0], height=size[1]))
    return root, records


def user(*parts):
    return [
        Message(
            role="user",
            parts=tuple(Text(tag="task", text=part) if isinstance(part, str) else part for part in parts),
        )
    ]


def with_answers(policy, root, messages, answers):
    return Bundle(
        policy.encode_prompt(messages, root), tuple(policy.encode_response(answer) for answer in answers)
    )


def library_logprobs(policy, group, answer):
    """Oracle: transformers' own forward with SDPA over prompt and answer alone."""
    prompt = group.prompt
    ids = torch.cat([prompt.ids, answer])[None]
    types = (ids == policy.model.config.image_token_id).int()
    policy.model.set_attn_implementation("sdpa")
    out = policy.model(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        mm_token_type_ids=types,
        pixel_values=prompt.pixel_values,
        image_grid_thw=prompt.image_grid,
        use_cache=False,
    )
    policy_room.use_segment_attention(policy.model.model.language_model.config)
    policy.model.model.rope_deltas = None
    logits = out.logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return logits.gather(1, answer[:, None])[:, 0]


def test_the_template_is_the_papers(pictures):
    """qwen3_vl_nothink: no default system message, no thinking block, the picture in its place."""
    root, (wide, _) = pictures
    messages = [
        Message(role="system", parts=(Text(tag="system", text="Be brief."),)),
        *user(wide, "Buy ", "it.\n"),
    ]
    ids = POLICY.encode_prompt(messages, root).ids
    pads = "<|image_pad|>" * image_tokens(160, 96, SMALL_PROMPT)
    expected = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
        f"<|vision_start|>{pads}<|vision_end|>Buy it.\n<|im_end|>\n<|im_start|>assistant\n"
    )
    assert POLICY.tokenizer.decode(ids, clean_up_tokenization_spaces=False) == expected
    assert ids.tolist() == POLICY.tokenizer(expected)["input_ids"]
    assert POLICY.prompt_length(messages) == len(ids)


@given(st.text(max_size=30))
@settings(deadline=None)
def test_any_text_comes_back_and_never_holds_control_tokens(text):
    """Control tokens in page text are plain text; an answer decodes to itself."""
    hostile = text.replace("\ufffd", "") + "<|im_end|><|image_pad|>"
    response = POLICY.encode_response(hostile)
    assert POLICY.decode(response) == hostile
    assert (response == POLICY.end_id).sum() == 1
    assert POLICY.count_tokens(hostile) == len(response) - 1


@given(st.integers(0, len(ANSWER) - 1), st.integers(1, 30))
def test_token_span_holds_every_overlapping_token(start, length):
    """The tokens of the span cover the characters, and no token beside it touches them."""
    stop = min(len(ANSWER), start + length)
    first, last = POLICY.token_span(ANSWER, (start, stop))
    ids = POLICY.encode_response(ANSWER)
    raw = ANSWER.encode()
    begin, end = len(ANSWER[:start].encode()), len(ANSWER[:stop].encode())
    pieces = [
        len(POLICY.tokenizer.convert_ids_to_tokens(int(i))) for i in ids[:-1]
    ]  # byte-level: one character a byte
    assert sum(pieces) == len(raw)
    assert sum(pieces[:first]) <= begin
    assert sum(pieces[:last]) >= end
    assert 0 <= first < last < len(ids)


def test_token_span_needs_a_token():
    """An empty span is an error."""
    with pytest.raises(ValueError, match="no token overlaps"):
        POLICY.token_span("abc", (3, 3))


@pytest.mark.parametrize("size", [(160, 96), (33, 500), (640, 480), (1280, 800)])
@pytest.mark.parametrize("config", [SMALL_PROMPT, PromptConfig()])
def test_patches_equal_the_librarys(tmp_path, size, config):
    """The own path from picture to patches equals transformers' PIL image processor."""
    picture = PIL.Image.fromarray(
        np.random.default_rng(0).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    )
    picture.save(tmp_path / "a.png")
    processor = Qwen2VLImageProcessorPil(
        patch_size=16,
        merge_size=2,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
        size={"shortest_edge": config.image_min_pixels, "longest_edge": config.image_max_pixels},
    )
    theirs = processor(picture, return_tensors="pt")
    policy = PolicyModel(POLICY.model, POLICY.tokenizer, prompt_config=config)
    ours = policy.encode_prompt(user(Image(path="a.png", sha256="", width=size[0], height=size[1])), tmp_path)
    assert ours.image_grid.tolist() == theirs["image_grid_thw"].tolist()
    torch.testing.assert_close(ours.pixel_values, theirs["pixel_values"], rtol=0, atol=1e-6)
    assert len(ours.image_index) == image_tokens(*size, config)
    assert patchify(np.zeros((32, 64, 3), np.uint8), PixelFormat()).shape == (8, 1536)


def test_positions_equal_the_librarys(pictures):
    """mRoPE positions of text and two pictures equal get_rope_index, and the answer goes on behind them."""
    root, (wide, tall) = pictures
    prompt = POLICY.encode_prompt(user("one ", wide, " two ", tall, "."), root)
    ids = prompt.ids[None]
    positions, delta = POLICY.model.model.get_rope_index(
        ids, (ids == POLICY.model.config.image_token_id).int(), prompt.image_grid
    )
    assert torch.equal(positions[:, 0], prompt.positions)
    assert prompt.next_position == len(prompt) + int(delta)


def test_packed_equals_separate_and_the_library(pictures):
    """Log-probabilities and gradients of a pack of groups with pictures equal those of each answer alone, and
    transformers' own.
    """
    root, (wide, tall) = pictures
    policy = tiny_policy(std=0.1)
    groups = [
        with_answers(policy, root, user(wide, "find x"), ["yes", "no, never", ANSWER]),
        with_answers(policy, root, user("plain text"), ["{}", "0"]),
        with_answers(policy, root, user(tall, "a", wide, "b"), [ANSWER]),
    ]
    parameters = list(policy.model.parameters())
    packed = policy.response_logprobs(make_pack(groups))
    weights = torch.linspace(-1, 1, len(packed))
    gradients = torch.autograd.grad((packed * weights).sum(), parameters, allow_unused=True)
    alone = torch.cat(
        [
            policy.response_logprobs(make_pack([Bundle(g.prompt, (answer,))]))
            for g in groups
            for answer in g.responses
        ]
    )
    separate = torch.autograd.grad((alone * weights).sum(), parameters, allow_unused=True)
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(gradients, separate, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4 * float(theirs.abs().max()) + 1e-7)
    with torch.no_grad():
        library = torch.cat([library_logprobs(policy, g, answer) for g in groups for answer in g.responses])
    torch.testing.assert_close(packed.detach(), library, rtol=1e-4, atol=1e-5)


def test_a_sampled_image_token_is_an_ordinary_token(pictures):
    """An answer that holds <|image_pad|> neither fails nor takes a picture's feature."""
    root, (wide, _) = pictures
    group = with_answers(POLICY, root, user(wide, "x"), ["ok"])
    answer = torch.tensor([POLICY.model.config.image_token_id, POLICY.end_id])
    assert POLICY.response_logprobs(make_pack([Bundle(group.prompt, (answer,))])).isfinite().all()


def test_chunked_logprobs_equal_full_ones(monkeypatch):
    """Chunks with recomputation give the values and gradients of one full softmax."""
    head = torch.nn.Linear(8, 50, bias=False)
    hidden, targets = torch.randn(23, 8, requires_grad=True), torch.randint(0, 50, (23,))
    results = []
    for size in (1 << 24, 250):
        monkeypatch.setattr(policy_room, "LOGIT_CHUNK", size)
        out = token_logprobs(hidden, head, targets)
        results.append(
            [out, *torch.autograd.grad((out * torch.linspace(0, 1, 23)).sum(), [hidden, head.weight])]
        )
    full = head(hidden).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(results[0][0], full)
    for one, many in zip(*results, strict=True):
        torch.testing.assert_close(one, many)


def test_recomputed_layers_give_the_same_gradients(pictures):
    """Activation checkpointing runs every decoder layer once more in backward and changes no bit, in a copy
    of the model as well; without gradient nothing is recomputed.
    """
    root, (wide, _) = pictures
    plain, recomputing = tiny_policy(std=0.05), tiny_policy(std=0.05)
    recompute_layers(recomputing.model)
    copied = PolicyModel(copy.deepcopy(recomputing.model), recomputing.tokenizer, prompt_config=SMALL_PROMPT)
    gradients = []
    for policy, times in ((plain, 1), (recomputing, 2), (copied, 2)):
        calls = []
        for layer in policy.model.model.language_model.layers:
            layer.mlp.register_forward_pre_hook(lambda module, _, calls=calls: calls.append(module))
        policy.model.train()
        pack = make_pack([with_answers(policy, root, user(wide, "x"), ["a", "bc"])])
        policy.response_logprobs(pack).sum().backward()
        assert [calls.count(layer.mlp) for layer in policy.model.model.language_model.layers] == [times] * 2
        with policy.evaluating():
            policy.response_logprobs(pack)
        assert len(calls) == 2 * times + 2
        gradients.append([p.grad for p in policy.model.parameters() if p.grad is not None])
    for expected, *found in zip(*gradients, strict=True):
        assert all(torch.equal(gradient, expected) for gradient in found)


@pytest.mark.parametrize("tied", [True, False])
def test_saved_equals_loaded_equals_from_pretrained(tmp_path, pictures, tied):
    """A saved folder loads here and in plain transformers with the same log-probabilities, and carries prompt
    config and pixel bounds.
    """
    root, (wide, _) = pictures
    policy = tiny_policy(tied=tied)
    policy.save(tmp_path)
    group = with_answers(policy, root, user(wide, "x"), [ANSWER])
    expected = policy.response_logprobs(make_pack([group]))
    loaded = PolicyModel.load(tmp_path)
    assert loaded.prompt_config == SMALL_PROMPT
    assert torch.equal(loaded.encode_prompt(user(wide, "x"), root).ids, group.prompt.ids)
    torch.testing.assert_close(loaded.response_logprobs(make_pack([group])), expected)
    plain = Qwen3VLForConditionalGeneration.from_pretrained(tmp_path)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, policy.model.state_dict()[name]), name
    assert (
        AutoTokenizer.from_pretrained(tmp_path)(ANSWER)["input_ids"] == policy.tokenizer(ANSWER)["input_ids"]
    )
    assert json.loads((tmp_path / "preprocessor_config.json").read_text())["size"] == {
        "shortest_edge": 1024,
        "longest_edge": 16384,
    }
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) == (not tied)


def test_half_precision_files_load_as_float32(tmp_path):
    """Weights stored in half precision are float32 in memory on a CPU."""
    POLICY.save(tmp_path, {name: tensor.half() for name, tensor in POLICY.model.state_dict().items()})
    loaded = PolicyModel.load(tmp_path)
    assert {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()} == {torch.float16}
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.float32}
    torch.testing.assert_close(loaded.model.lm_head.weight, POLICY.model.lm_head.weight, rtol=1e-3, atol=1e-3)


def test_bad_input_says_what_is_wrong(tmp_path):
    """No checkpoint, another prompt config, a missing and a broken picture, a tokenizer without control
    tokens.
    """
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        PolicyModel.load(tmp_path)
    POLICY.save(tmp_path)
    with pytest.raises(ValueError, match="image_max_pixels"):
        PolicyModel.load(tmp_path, prompt_config=PromptConfig())
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(
        {
            name: tensor
            for name, tensor in tensors.items()
            if not name.endswith("layers.1.mlp.up_proj.weight")
        },
        tmp_path / "model.safetensors",
    )
    with pytest.raises(ValueError, match=r"up_proj\.weight missing"):
        PolicyModel.load(tmp_path)
    picture = Image(path="gone.png", sha256="", width=10, height=10)
    with pytest.raises(FileNotFoundError):
        POLICY.encode_prompt(user(picture), tmp_path)
    (tmp_path / "gone.png").write_bytes(io.BytesIO(b"no picture").getvalue())
    with pytest.raises(ValueError, match="not a picture"):
        POLICY.encode_prompt(user(picture), tmp_path)
