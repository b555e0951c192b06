"""A tiny Qwen3-VL of the real class with random weights and a small byte-level tokenizer, for every test that
needs a policy.
"""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from rmsweb.engine.policy import PolicyModel
from rmsweb.prompt import PromptConfig

CONTROL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
CORPUS = [
    '{"evaluation_previous_goal":"ok","memory":"","next_goal":"click lamp",'
    '"action":[{"click_element_by_index":{"index":3}}]}',
    "<task>\nBuy the red lamp\n</task>\n<browser_state>\n[1]<input name=q />\n[2]<button />\n\tSearch\n"
    "</browser_state>\n",
]
SMALL_PROMPT = PromptConfig(
    history_steps=2,
    viewport=(160, 96),
    image_min_pixels=1024,
    image_max_pixels=16384,
    prompt_budget=400,
    response_budget=64,
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with a few merges: every text can be encoded and comes back unchanged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=340, special_tokens=CONTROL, initial_alphabet=alphabet, show_progress=False
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )


def tiny_config(
    tokenizer: PreTrainedTokenizerFast,
    *,
    hidden: int = 64,
    layers: int = 2,
    vision: int = 32,
    tied: bool = True,
) -> Qwen3VLConfig:
    number = tokenizer.convert_tokens_to_ids
    return Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 32768,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5e6,
                "mrope_interleaved": True,
                "mrope_section": [6, 5, 5],
            },
        },
        vision_config={
            "depth": 2,
            "hidden_size": vision,
            "intermediate_size": 2 * vision,
            "num_heads": 2,
            "patch_size": 16,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            "out_hidden_size": hidden,
            "deepstack_visual_indexes": [0, 1],
            "num_position_embeddings": 64,
        },
        image_token_id=number("<|image_pad|>"),
        video_token_id=number("<|video_pad|>"),
        vision_start_token_id=number("<|vision_start|>"),
        vision_end_token_id=number("<|vision_end|>"),
        tie_word_embeddings=tied,
    )


def tiny_policy(
    *,
    seed: int = 0,
    hidden: int = 64,
    layers: int = 2,
    tied: bool = True,
    std: float = 0.2,
    prompt_config: PromptConfig = SMALL_PROMPT,
) -> PolicyModel:
    """A policy in memory.

    `std` of the random weights: large enough that its answers differ from prompt to prompt.
    """
    tokenizer = tiny_tokenizer()
    torch.manual_seed(seed)
    model = Qwen3VLForConditionalGeneration._from_config(
        tiny_config(tokenizer, hidden=hidden, layers=layers, tied=tied), attn_implementation="sdpa"
    )
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=std)
    return PolicyModel(model, tokenizer, prompt_config=prompt_config, name="tiny")


def tiny_checkpoint(folder: Path, **arguments: object) -> Path:
    """A tiny policy as a checkpoint folder."""
    tiny_policy(**arguments).save(folder)  # type: ignore[arg-type]
    return folder
