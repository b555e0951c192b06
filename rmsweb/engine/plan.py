"""The plan of an RL run: parameters and memory of a GPU from a model's shape alone.

Purpose: `train_rl.py --plan` says before a machine is rented whether a run fits. The model is built on the
meta device, and the limits of the sampler are its own constants; there are no weights, no data and no GPU.
What a step does is planned by the room that knows the algorithm (`salvage.work`).

Shapes: T tokens of a pack, n rollouts, L decoder layers.

1. ours: memory counts tensors of the engine, to which allocator, CUDA context and kernels' work space come on
   top (2 to 4 GiB as a rule).
2. ours: bytes are those of bfloat16 weights and activations, with float32 adapters.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from rmsweb.config import Config, opt
from rmsweb.engine.distributed import EngineConfig, samples_by_layer
from rmsweb.engine.lora import LoraConfig, add_lora, lora_layers
from rmsweb.engine.policy import LOGIT_CHUNK
from rmsweb.engine.sampler import CACHE_BYTES, PREFILL_TOKENS, cache_bytes

GIB = 2**30
SHAPES = Path(__file__).parent / "shapes"  # configurations of published sizes, without weights


@dataclass(frozen=True, kw_only=True)
class MachineConfig(Config):
    """The machine and the lengths that a plan is made for."""

    model_shape: Literal["", "qwen3-vl-8b", "qwen3-vl-32b"] = opt(
        "", "published shape; without it --model names a checkpoint or a configuration"
    )
    world_size: int = opt(8, "GPUs", at_least=1)
    gpu_gib: float = opt(80.0, "memory of a GPU in GiB", above=0)
    prompt_tokens: int = opt(12_000, "tokens of a prompt", paper="at most 12000", at_least=1)
    response_tokens: int = opt(
        300,
        "tokens of an answer, for the work of a step; memory is counted with the longest one",
        at_least=1,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What memory depends on beside the model."""

    prompts: int  # sampled together, over all GPUs
    num_rollouts: int
    response_budget: int  # tokens of the longest answer
    token_budget: int  # tokens of a pack


def plan_memory(
    config: Qwen3VLConfig, machine: MachineConfig, sizes: Sizes, *, lora: LoraConfig, engine: EngineConfig
) -> dict[str, dict[str, int]]:
    """Return three tables: parameters, and the bytes of a GPU while it trains and while it samples."""

    def count(module: nn.Module) -> int:
        return sum(parameter.numel() for parameter in module.parameters())

    with torch.device("meta"):
        model = Qwen3VLForConditionalGeneration._from_config(config, dtype=torch.bfloat16)
    text, shard = config.text_config, engine.shard
    total, vision = count(model), count(model.model.visual)
    layer = 2 * count(model.model.language_model.layers[0])
    adapters = add_lora(model, rank=lora.lora_rank, alpha=lora.lora_alpha, scope=lora.lora_scope)
    trained = sum(parameter.numel() for parameter in adapters)
    language = 2 * (total - vision)
    root = language - layer * text.num_hidden_layers  # embeddings, head, final norm
    gathered = root + 2 * layer if shard else 0  # one layer computes while the next arrives
    tokens = max(sizes.token_budget, machine.prompt_tokens + sizes.response_budget)  # of the longest pack
    inside, depth = tokens * _layer_bytes(text), text.num_hidden_layers
    # for backward: all layers from the inside, or the input of every layer and one layer from the inside
    kept = 2 * tokens * text.hidden_size * depth + inside if engine.recompute else inside * depth
    by_layer = samples_by_layer(2 * total, round(machine.gpu_gib * GIB))
    common = {
        "weights": 2 * vision + (language // machine.world_size if shard else language),
        "adapters and optimizer": 4 * 4 * trained,  # float32: value, gradient, two moments
    }
    return {
        "parameters": {
            "total": total,
            "language": total - vision,
            "vision": vision,
            "trainable": trained,
            "adapters": len(lora_layers(model)),
        },
        "training": common
        | {
            "gathered weights": gathered,
            "activations": kept,
            "logits of a chunk": 3 * 4 * LOGIT_CHUNK,  # values, exponentials, gradient
        },
        "sampling": common
        | {"gathered weights": gathered if by_layer or not shard else language}
        | _decoding(text, machine, sizes),
    }


def _layer_bytes(text: Any) -> int:
    """Return the bytes that one decoder layer keeps for backward, a token."""
    hidden, mlp = text.hidden_size, text.intermediate_size
    queries, keys = text.num_attention_heads * text.head_dim, text.num_key_value_heads * text.head_dim
    # bfloat16: residuals and norms; q, k before and after; v; attention; gate, up, act, product
    half = 4 * hidden + 3 * (queries + keys) + keys + queries + 4 * mlp
    # float32: upcasts of four norms; inputs of four adapters
    single = 2 * hidden + 2 * (queries + keys) + 3 * hidden + queries
    return 2 * half + 4 * single


def _decoding(text: Any, machine: MachineConfig, sizes: Sizes) -> dict[str, int]:
    """Return the bytes of a decoding batch with the longest answers allowed: its cache, one prefill pass."""
    length, dtype = machine.prompt_tokens, torch.bfloat16
    each = cache_bytes(text, dtype, sizes.num_rollouts, length, sizes.response_budget)
    own = math.ceil(sizes.prompts / machine.world_size)
    batch = min(own, max(1, CACHE_BYTES["cuda"] // each))
    tokens = min(batch, max(1, PREFILL_TOKENS // length)) * length
    prefill = cache_bytes(text, dtype, 0, tokens, 0) + tokens * _layer_bytes(text)
    return {"key/value cache": batch * each, "prefill": prefill}
