"""The plan of an RL run: parameters, memory of a GPU, packs and forward passes of a step, from a model's
shape alone.

Purpose: `train_rl.py --plan` says before a machine is rented whether a run fits and what packing saves. The
model is built on the meta device, the packs are those that `packing.plan_packs` would make, and the limits of
the sampler are its own constants; there are no weights, no data and no GPU.

Shapes: P prompt tokens, R answer tokens, n rollouts, G groups of a step (B accepted and S retained), T tokens
of a pack, L decoder layers.

1. ours: memory counts tensors of the engine, to which allocator, CUDA context and kernels' work space come on
   top (2 to 4 GiB as a rule).
2. ours: a step has as many generation batches as the paper's rejection shares imply, and as many rejected
   groups as it retains at most.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from rmsweb.engine.distributed import samples_by_layer
from rmsweb.engine.lora import Scope, add_lora, lora_layers
from rmsweb.engine.packing import Lengths, cost, deal, plan_packs
from rmsweb.engine.policy import LOGIT_CHUNK
from rmsweb.engine.sampler import CACHE_BYTES, PREFILL_TOKENS, cache_bytes
from rmsweb.salvage.gating import deal_mini_batches as deal_groups
from rmsweb.salvage.gating import select_groups as select

GIB = 2**30
GENERATION_BATCHES = (
    3  # App. J: about 0.36 of the groups pass both gates, so 64 accepted ones take three batches of 64
)
# name -> decoder layers, hidden, MLP, heads, key/value heads, whether embeddings and head are tied
SHAPES: dict[str, tuple[int, int, int, int, int, bool]] = {
    "qwen3-vl-8b": (36, 4096, 12288, 32, 8, False),
    "qwen3-vl-32b": (64, 5120, 25600, 64, 8, False),
}


def shape_config(name: str) -> Qwen3VLConfig:
    """Configuration of a published model size."""
    layers, hidden, mlp, heads, kv_heads, tied = SHAPES[name]
    text = {
        "vocab_size": 151_936,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "max_position_embeddings": 262_144,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5e6,
            "mrope_interleaved": True,
            "mrope_section": [24, 20, 20],
        },
    }
    vision = {
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "out_hidden_size": hidden,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [8, 16, 24],
    }
    return Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=tied)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSizes:
    """Sizes of a run, as `train_rl.py` has them."""

    world_size: int
    gpu_gib: float
    prompt_tokens: int
    response_tokens: int
    train_batch: int = 64
    mini_batch: int = 16
    num_rollouts: int = 8
    token_budget: int = 20_480
    response_budget: int = 2048
    lora_rank: int = 64
    lora_scope: Scope = "attn"
    shard: bool = True
    recompute: bool = True

    def __post_init__(self) -> None:
        if min(self.world_size, self.prompt_tokens, self.response_tokens) < 1 or self.gpu_gib <= 0:
            raise ValueError(
                "--world-size, --prompt-tokens and --response-tokens must be at least 1, --gpu-gib positive"
            )


def plan(config: Qwen3VLConfig, sizes: PlanSizes) -> dict[str, dict[str, Any]]:
    """The plan in four parts: parameters, memory of a GPU in bytes while it trains and while it samples, work
    of a step.
    """
    with torch.device("meta"):
        model = Qwen3VLForConditionalGeneration._from_config(config, dtype=torch.bfloat16)
    total = sum(parameter.numel() for parameter in model.parameters())
    vision = sum(parameter.numel() for parameter in model.model.visual.parameters())
    trained = sum(
        parameter.numel()
        for parameter in add_lora(
            model, rank=sizes.lora_rank, alpha=2.0 * sizes.lora_rank, scope=sizes.lora_scope
        )
    )
    parameters = {
        "total": total,
        "language": total - vision,
        "vision": vision,
        "trainable": trained,
        "adapters": len(lora_layers(model)),
    }
    training, sampling = _memory(model, sizes, weights=2 * total, vision=2 * vision, trained=trained)
    return {"parameters": parameters, "training": training, "sampling": sampling, "work": _work(sizes)}


def _memory(
    model: Any, sizes: PlanSizes, *, weights: int, vision: int, trained: int
) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of one GPU by part, in training and in sampling.

    `weights` and `vision` are bytes in bfloat16, `trained` counts parameters.
    """
    text = model.config.text_config
    layer = sum(
        2 * parameter.numel()
        for name, parameter in model.model.language_model.layers[0].named_parameters()
        if ".lora_" not in name
    )
    root = weights - vision - layer * text.num_hidden_layers  # embeddings, head, final norm
    held = vision + (weights - vision) // sizes.world_size if sizes.shard else weights
    gathered = root + 2 * layer if sizes.shard else 0  # one layer computes while the next arrives
    common = {
        "weights": held,
        "adapters and optimizer": 4 * 4 * trained,
    }  # float32: value, gradient, two moments
    tokens = max(sizes.token_budget, sizes.prompt_tokens + sizes.response_budget)
    kept = 2 * tokens * text.hidden_size * text.num_hidden_layers  # the input of every layer
    inside = tokens * _layer_bytes(text)
    training = common | {
        "gathered weights": gathered,
        "activations": kept + inside if sizes.recompute else inside * text.num_hidden_layers,
        "logits of a chunk": 3 * 4 * LOGIT_CHUNK,  # values, exponentials, gradient
    }
    token = (
        2 * 2 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim
    )  # keys and values of a token, in bfloat16
    stored, pass_tokens = _cache(text, sizes)
    by_layer = sizes.shard and samples_by_layer(weights, round(sizes.gpu_gib * GIB))
    whole = 0 if not sizes.shard else gathered if by_layer else weights - vision
    sampling = common | {
        "gathered weights": whole,
        "key/value cache": stored,
        "prefill": token * pass_tokens + pass_tokens * _layer_bytes(text),
    }
    return training, sampling


def _layer_bytes(text: Any) -> int:
    """Bytes that one decoder layer keeps for backward, a token: its bfloat16 activations, and float32 ones of
    norms, rotary embedding and adapters.
    """
    hidden, queries, keys, mlp = (
        text.hidden_size,
        text.num_attention_heads * text.head_dim,
        text.num_key_value_heads * text.head_dim,
        text.intermediate_size,
    )
    half = (
        4 * hidden + 3 * (queries + keys) + keys + queries + 4 * mlp
    )  # residuals and norms; q, k before and after; v; attention; gate, up, act, product
    single = (
        2 * hidden + 2 * (queries + keys) + 3 * hidden + queries
    )  # upcasts of four norms; inputs of four adapters
    return 2 * half + 4 * single


def _cache(text: Any, sizes: PlanSizes) -> tuple[int, int]:
    """Bytes of the keys and values that one decoding batch stores, and tokens of one prefill pass, with the
    longest answers allowed.
    """
    own = math.ceil(sizes.train_batch / sizes.world_size)
    prompt = cache_bytes(text, torch.bfloat16, sizes.num_rollouts, sizes.prompt_tokens, sizes.response_budget)
    batch = min(own, max(1, CACHE_BYTES["cuda"] // prompt))
    return batch * prompt, min(batch, max(1, PREFILL_TOKENS // sizes.prompt_tokens)) * sizes.prompt_tokens


def _work(sizes: PlanSizes) -> dict[str, Any]:
    """Groups, tokens, packs and passes of a step that finds its B accepted groups and retains as many
    rejected ones as it may.
    """
    flags = [True] * sizes.train_batch + [False] * ((GENERATION_BATCHES - 1) * sizes.train_batch)
    chosen = select(flags, train_batch=sizes.train_batch, mini_batch=sizes.mini_batch)

    def group(num_answers: int) -> Lengths:
        return sizes.prompt_tokens, (sizes.response_tokens,) * num_answers

    n, count = sizes.num_rollouts, len(chosen.accepted) + len(chosen.retained)
    old = _packs(
        [group(n + 2)] * count, sizes
    )  # and the target twice, as it stands and behind the policy's own reasoning
    reference = _packs([group(n)] * count, sizes)
    updates = [
        _packs([group(n if flags[place] else n + 1) for place in batch], sizes)
        for batch in deal_groups(chosen, mini_batch=sizes.mini_batch)
    ]
    passes = sum(own for _, own, _ in updates)
    packed = sum(tokens for _, _, tokens in updates)
    separate = (n * count + len(chosen.retained)) * (sizes.prompt_tokens + sizes.response_tokens)
    return {
        "generated groups": len(flags),
        "accepted groups": len(chosen.accepted),
        "retained groups": len(chosen.retained),
        "optimizer steps": len(updates),
        "packs scored": old[0] + reference[0],
        "packs updated": sum(packs for packs, _, _ in updates),
        "forward passes of a GPU": old[1] + reference[1] + passes,
        "backward passes of a GPU": passes,
        "prefilled tokens": len(flags) * sizes.prompt_tokens,
        "update tokens, packed": packed,
        "update tokens, unpacked": separate,
        "packing saves (times)": separate / packed,
    }


def _packs(groups: Sequence[Lengths], sizes: PlanSizes) -> tuple[int, int, int]:
    """Packs of some groups, passes of each rank for them, and their tokens."""
    bins = plan_packs(groups, sizes.token_budget)
    parts = [
        [(groups[number][0], tuple(groups[number][1][a] for a in answers)) for number, answers in content]
        for content in bins
    ]
    tokens = sum(prompt + sum(answers) for part in parts for prompt, answers in part)
    return len(bins), len(deal([cost(part) for part in parts], sizes.world_size)[0]), tokens


def render(name: str, sizes: PlanSizes, found: dict[str, dict[str, Any]]) -> str:
    """The plan as text."""
    placing = "sharded over" if sizes.shard else "replicated on"
    lines = [
        f"{name}, {placing} {sizes.world_size} GPUs of {sizes.gpu_gib:g} GiB; prompts of {sizes.prompt_tokens} tokens, n={sizes.num_rollouts}"
    ]
    lines += ["", "parameters", *(f"  {key:<28}{value:>16,}" for key, value in found["parameters"].items())]
    for phase in ("training", "sampling"):
        parts, total = found[phase], sum(found[phase].values()) / GIB
        lines += [
            "",
            f"memory of a GPU, {phase} (GiB)",
            *(f"  {key:<28}{value / GIB:>16.1f}" for key, value in parts.items()),
        ]
        lines += [f"  {'total':<28}{total:>16.1f}{'' if total < sizes.gpu_gib else '   does not fit'}"]
    if sizes.shard:
        whole = found["sampling"]["gathered weights"] != found["training"]["gathered weights"]
        lines += [
            "",
            "sampling holds the whole weights on every GPU"
            if whole
            else "sampling gathers one layer at a time",
        ]
    lines += ["", f"a step, with answers of {sizes.response_tokens} tokens"]
    lines += [
        f"  {key:<28}{f'{value:,.2f}' if isinstance(value, float) else f'{value:,}':>16}"
        for key, value in found["work"].items()
    ]
    return "\n".join(lines)
