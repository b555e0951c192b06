"""The tiny base: a Qwen3-VL with about one million parameters, its tokenizer, and its training by drills.

Purpose: it takes the place of Qwen3-VL-8B-Instruct, so that the whole pipeline runs on a laptop. `python -m
rmsweb.playground.base_model --out DIR` rebuilds what is committed under `playground/base/`. It has never seen
a page, a task or an entity of the playground in its role (see `drills`).

ours: everything. A word is one token in every place: the space between two words is implied (dropped when
encoding, put back when decoding), and pieces of the state's and the answer's structure are single tokens. In
every layer but the first the query projection starts as a copy of the key projection. So a token attends to
equal tokens from the start, without which look-up is not learned in minutes. Stages advance at a running
accuracy on words and numbers; structure tokens weigh 0.2.
"""

import argparse
import dataclasses
import json
import math
import operator
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image as PILImage
from PIL import ImageDraw
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from rmsweb.engine.distributed import Ranks
from rmsweb.engine.packing import Bundle, EncodedPrompt, Pack, make_pack
from rmsweb.engine.policy import PolicyModel
from rmsweb.engine.training import Trainer, TrainerConfig
from rmsweb.playground.drills import NUM_VALUES, STAGES, Drill, Words
from rmsweb.prompt import PromptConfig, load_prompt_config
from rmsweb.records import Image

BASE_FOLDER = Path(__file__).parent / "base"
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
STRUCTURE = (
    "user\n", "system\n", "assistant\n", "\n", "\t", "\n\t", "\n[", "[", "\n*[", "*[",
    "]<a />\n\t", "]<button />\n\t", "]<input name=", "]<select name=", " value=", " />",
    "<browser_state>\nPage: ", "</browser_state>\n", "<history>\n", "</history>\n", "Task: ",
    "<guide>\n", "</guide>\n", "Warning: ",
    '{"evaluation_previous_goal":"', '","memory":"', '","next_goal":"', '","action":[{"',
    "click_element_by_index", "input_text", "select_dropdown_option", "done", "go_back",
    '":{"index":', "}}]}", ',"text":"', '"}}]}', '":{"text":"', '","success":true}}]}',
    '","success":false}}]}', '":{}}]}',
)  # fmt: skip
CLOSING = "<|im_end|>\n<|im_start|>assistant\n"
STRUCTURE_WEIGHT = 0.2
GATES = (0.8, 0.8, 0.8, 0.85)  # running accuracy that ends a stage
REPLAY = 0.2  # share of a batch that comes from older stages
# steps; look-up is found while the rate is low (at 1e-3 from step 50 on it was not found in 1,600 steps)
WARM_UP = 400
PEAK_RATE = 1e-3
BATCH = 16  # drills

# -------------------------------------------------------------------------------------------------- tokenizer


def build_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """Return a word-level tokenizer over `words`, the numbers 0..99 and the structure tokens.

    Unknown words become <unk>.
    """
    vocabulary = {token: i for i, token in enumerate(SPECIAL)}
    plain = ["<unk>", *(str(number) for number in range(NUM_VALUES)), *sorted(set(words) - {"done"})]
    for token in plain:
        vocabulary.setdefault(token if token == "<unk>" else f"▁{token}", len(vocabulary))
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always", split=True)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Fuse(), decoders.Replace(Regex(r"(?<![\p{L}\p{N}.,])▁"), ""), decoders.Replace("▁", " ")]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in STRUCTURE])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", unk_token="<unk>"
    )


# ------------------------------------------------------------------------------------------------------ model


def build_model(
    tokenizer: PreTrainedTokenizerFast,
    seed: int,
    *,
    hidden: int = 128,
    layers: int = 3,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
) -> Qwen3VLForConditionalGeneration:
    """Return a model with random weights (std 0.02), and q_proj = k_proj in every layer but the first."""
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in SPECIAL}
    third = head_dim // 6
    vocab = math.ceil(len(tokenizer) / 64) * 64
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": 2 * hidden,
            "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
            "head_dim": head_dim, "max_position_embeddings": 8192,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 5e6, "mrope_interleaved": True,
                "mrope_section": [head_dim // 2 - 2 * third, third, third],
            },
        },
        vision_config={
            "depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 16,
            "temporal_patch_size": 2, "spatial_merge_size": 2, "out_hidden_size": hidden,
            "num_position_embeddings": 64, "deepstack_visual_indexes": [0],
        },
        image_token_id=ids["<|image_pad|>"], video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"],
        eos_token_id=ids["<|im_end|>"], pad_token_id=ids["<|endoftext|>"], tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = Qwen3VLForConditionalGeneration(config)
    text = model.model.language_model
    for parameter in text.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.02)
    for layer in text.layers[1:]:
        keys = layer.self_attn.k_proj.weight.data.view(kv_heads, head_dim, -1)
        layer.self_attn.q_proj.weight.data = (
            keys.repeat_interleave(heads // kv_heads, 0).flatten(0, 1).clone()
        )
    return model


# --------------------------------------------------------------------------------------------------- pictures


def draw_pictures(folder: Path, config: PromptConfig, count: int, seed: int) -> list[Image]:
    """Draw boxes and bars at random on the viewport: they look like pages from afar and say nothing."""
    r, images = random.Random(seed), []
    (folder / "screenshots").mkdir(parents=True, exist_ok=True)
    width, height = config.viewport
    for number in range(count):
        picture = PILImage.new("RGB", (width, height), tuple(r.randint(225, 255) for _ in range(3)))
        pen = ImageDraw.Draw(picture)
        for _ in range(r.randint(6, 20)):
            x, y = r.randrange(width - 60), r.randrange(height - 30)
            pen.rectangle(
                (x, y, x + r.randint(20, 200), y + r.randint(8, 80)),
                fill=tuple(r.randint(40, 255) for _ in range(3)),
            )
        path = f"screenshots/drill{number}.jpeg"
        picture.save(folder / path, quality=60)
        images.append(Image(path=path, sha256=f"drill{number}", width=width, height=height))
    return images


# --------------------------------------------------------------------------------------------------- training


@dataclasses.dataclass(frozen=True, slots=True)
class DrillBatch:
    """A pack of drills."""

    pack: Pack
    weights: Tensor  # [N]: 0 for what is given, 0.2 for structure, 1 for words and numbers


class DrillEncoder:
    """Turns drills into packs of tokens with weights."""

    def __init__(self, policy: PolicyModel, folder: Path) -> None:
        self.policy, self.folder, self.tokenizer = policy, folder, policy.tokenizer
        self.num_closing = len(self.tokenizer(CLOSING, add_special_tokens=False)["input_ids"])
        structure = set(self.tokenizer.convert_tokens_to_ids(list(STRUCTURE + SPECIAL)))
        self.importance = torch.tensor(
            [STRUCTURE_WEIGHT if i in structure else 1.0 for i in range(len(self.tokenizer))]
        )

    def page(self, drill: Drill) -> EncodedPrompt:
        """Return the shared part without the closing of the user's turn."""
        prompt = self.policy.encode_prompt(drill.page, self.folder)
        n = self.num_closing
        return dataclasses.replace(
            prompt,
            ids=prompt.ids[:-n],
            positions=prompt.positions[:, :-n],
            next_position=prompt.next_position - n,
        )

    def turns(self, drill: Drill) -> tuple[list[list[int]], list[Tensor]]:
        """Return the token ids and weights of every turn."""
        middle, end = (CLOSING, "<|im_end|>") if drill.chat else ("", "")
        texts = [
            turn.tail + middle + turn.target + ("" if turn.given and not turn.target.endswith("}") else end)
            for turn in drill.turns
        ]
        encoded = self.tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
        weights = []
        for turn, ids, offsets in zip(
            drill.turns, encoded["input_ids"], encoded["offset_mapping"], strict=True
        ):
            start = len(turn.tail) + len(middle) + turn.given
            trained = torch.tensor([end > start for _, end in offsets])
            weights.append(self.importance[torch.tensor(ids)] * trained)
        return encoded["input_ids"], weights

    def batch(self, drills: Sequence[Drill]) -> DrillBatch:
        groups, weights = [], []
        for drill in drills:
            ids, turn_weights = self.turns(drill)
            if (
                drill.page and not drill.chat and "<browser_state>" not in str(drill.page[0].parts)
            ):  # recall: one causal row
                ids, turn_weights = [[i for row in ids for i in row]], [torch.cat(turn_weights)]
            groups.append(Bundle(prompt=self.page(drill), responses=tuple(torch.tensor(row) for row in ids)))
            weights += turn_weights
        return DrillBatch(make_pack(groups), torch.cat(weights))


def accuracy(logprobs: Tensor, weights: Tensor) -> float:
    """Return the share of words and numbers with a probability above one half, which greedy decoding says."""
    asked = weights == 1.0
    return (logprobs[asked] > math.log(0.5)).float().mean().item()


def skills(
    policy: PolicyModel, encoder: DrillEncoder, words: Words, seed: int = 1, count: int = 64
) -> dict[str, float]:
    """Return the accuracy on fresh drills of every stage."""
    result = {}
    with policy.evaluating():
        for stage in STAGES:
            r = random.Random(f"{seed}/{stage.__name__}")
            batch = encoder.batch([stage(r, words) for _ in range(count)])
            result[stage.__name__] = accuracy(policy.response_logprobs(batch.pack), batch.weights)
    return result


def train(policy: PolicyModel, encoder: DrillEncoder, words: Words, *, seed: int, seconds: float) -> None:
    """Train on staged drills for `seconds` of CPU time; the rate falls over the last 40% of it.

    The run folder lies beside the pictures of the encoder.
    """
    r, stage, running, start = random.Random(seed), 0, 0.0, time.process_time()

    def rate(step: int) -> float:
        left = 1 - (time.process_time() - start) / seconds
        return PEAK_RATE * min(1.0, (step + 1) / WARM_UP) * min(1.0, max(0.05, left / 0.4))

    def draw() -> Drill:
        """Draw a drill of this stage, or now and then of an older one."""
        chosen = stage if r.random() >= REPLAY or stage == 0 else r.randrange(stage)
        return STAGES[chosen](r, words)

    def step() -> dict[str, object] | None:
        nonlocal stage, running
        elapsed = time.process_time() - start
        if elapsed >= seconds:
            return None
        batch = encoder.batch([draw() for _ in range(BATCH)])
        logprobs = policy.response_logprobs(batch.pack)
        loss = -(logprobs * batch.weights).sum() / batch.weights.sum()
        loss.backward()
        trainer.optimizer.step()
        running = 0.95 * running + 0.05 * accuracy(logprobs.detach(), batch.weights)
        if stage < len(STAGES) - 1 and running > GATES[stage]:
            stage, running = stage + 1, 0.3
        name = STAGES[stage].__name__
        return {"seconds": round(elapsed), "stage": name, "loss": loss.item(), "accuracy": running}

    trainer = Trainer(
        TrainerConfig(model="", out=encoder.folder / "run"),
        policy,
        Ranks(0, 1, policy.device),
        rate=rate,
        num_steps=sys.maxsize,
        evaluate_every=sys.maxsize,
        save_every=sys.maxsize,
        best_by="",
        better=operator.gt,
    )
    for group in trainer.optimizer.adam.param_groups:
        group["betas"] = (0.9, 0.98)
    with trainer.folder:
        for values in trainer.run(step, dict, {"seed": seed}):
            if trainer.progress.step % 100 == 0:
                print(json.dumps({"step": trainer.progress.step, **values}), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Build, train and save the base, and print its skills."""
    parser = argparse.ArgumentParser(
        prog="python -m rmsweb.playground.base_model",
        description="Rebuild the tiny base policy from generic drills.",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument(
        "--prompt-config",
        type=Path,
        required=True,
        help="JSON of the prompt configuration (scripts/demo_prompt.json)",
    )
    parser.add_argument("--seconds", type=float, default=1500, help="CPU seconds of training")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and drills")
    options = parser.parse_args(argv)
    from rmsweb.playground.words import vocabulary

    torch.set_num_threads(1)
    config, words = load_prompt_config(options.prompt_config), vocabulary()
    tokenizer = build_tokenizer(words)
    policy = PolicyModel(build_model(tokenizer, options.seed), tokenizer, prompt_config=config)
    with tempfile.TemporaryDirectory() as folder:
        drill_words = Words(words, config, draw_pictures(Path(folder), config, 64, options.seed))
        encoder = DrillEncoder(policy, Path(folder))
        train(policy, encoder, drill_words, seed=options.seed, seconds=options.seconds)
        report = skills(policy, encoder, drill_words)
    policy.model.to(torch.float16)
    policy.save(options.out)
    (options.out / "skills.json").write_text(
        json.dumps({"seed": options.seed, "seconds": options.seconds, "skills": report}, indent=1) + "\n"
    )
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
