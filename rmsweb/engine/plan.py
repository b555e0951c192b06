"""The plan of a training run: parameters and memory of a GPU from a model's shape alone.

Purpose: `--plan` of the trainers says before a machine is rented whether a run fits, and a run on GPUs asks
the same question before it loads anything. The model is built on the meta device, and the limits of the
sampler are its own constants; there are no weights, no data and no GPU. What a step does is planned by the
room that knows the algorithm (`salvage.work`).

Shapes: T tokens of a pack, n rollouts, L decoder layers.

1. ours: memory counts tensors of the engine, to which allocator, CUDA context and kernels' work space come on
   top (2 to 4 GiB as a rule).
2. ours: bytes are those of bfloat16 weights and activations, with float32 adapters.
3. ours: dropout is counted with its mask in float32, as torch keeps it on a CPU; kernels of a GPU may keep a
   byte instead.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from rmsweb.config import Config, opt
from rmsweb.engine.distributed import EngineConfig, Ranks, samples_by_layer
from rmsweb.engine.lora import LoraConfig, add_lora, lora_layers
from rmsweb.engine.policy import LOGIT_CHUNK
from rmsweb.engine.sampler import CACHE_BYTES, PREFILL_TOKENS, cache_bytes
from rmsweb.engine.training import TrainerConfig

GIB = 2**30
WITH_MLP = ("language", "all")  # scopes with adapters on gate, up and down
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
    """What memory depends on beside the model. Training alone samples nothing: no prompts and no rollouts."""

    token_budget: int  # tokens of a pack
    longest: int  # tokens of the longest prompt with its answer, which makes a pack of its own
    lora_dropout: float = 0.0
    prompts: int = 0  # sampled together, over all GPUs
    num_rollouts: int = 0
    response_budget: int = 0  # tokens of the longest sampled answer


Tables = dict[str, Mapping[str, float]]
MEMORY = ("training", "sampling")  # the tables whose entries are bytes of a GPU


def read_shape(model: str, published: str = "") -> Qwen3VLConfig:
    """Return the shape of a published size, else of a checkpoint folder or hub name.

    Raises ValueError where neither is named.
    """
    if not model and not published:
        raise ValueError("--plan needs --model-shape (qwen3-vl-8b or qwen3-vl-32b) or --model")
    return Qwen3VLConfig.from_pretrained(SHAPES / f"{published}.json" if published else model)


def plan_memory(
    config: Qwen3VLConfig, machine: MachineConfig, sizes: Sizes, *, lora: LoraConfig, engine: EngineConfig
) -> Tables:
    """Return three tables: parameters, and the bytes of a GPU while it trains and while it samples.

    Raises ValueError for a plan without adapters.
    """
    if not lora.lora_rank:
        raise ValueError("--lora-rank 0: plans are made for adapters")

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
    tokens, depth = max(sizes.token_budget, sizes.longest), text.num_hidden_layers  # of the longest pack
    inside = tokens * layer_bytes(text, lora, sizes.lora_dropout)
    # for backward: all layers from the inside, or the input of every layer and one layer from the inside
    kept = 2 * tokens * text.hidden_size * depth + inside if engine.recomputes("cuda") else inside * depth
    common = {
        "weights": 2 * vision + (language // machine.world_size if shard else language),
        "adapters and optimizer": 4 * 4 * trained,  # float32: value, gradient, two moments
    }
    tables: Tables = {
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
    }
    if sizes.prompts:
        by_layer = samples_by_layer(2 * total, round(machine.gpu_gib * GIB))
        held = {"gathered weights": gathered if by_layer or not shard else language}
        tables["sampling"] = common | held | _decoding(text, machine, sizes, lora)
    return tables


def layer_bytes(text: Any, lora: LoraConfig, lora_dropout: float = 0.0) -> int:
    """Return the bytes that one decoder layer keeps for backward, a token."""
    hidden, mlp = text.hidden_size, text.intermediate_size
    heads, kv_heads = text.num_attention_heads, text.num_key_value_heads
    queries, keys, is_wide = heads * text.head_dim, kv_heads * text.head_dim, lora.lora_scope in WITH_MLP
    # two norms and those of the heads keep their input in float32 with one scale a row; bfloat16: q before
    # and after its position, v, the attention's output; gate, its activation, up
    kept = 8 * hidden + 8 * queries + 8 * keys + 6 * mlp + 8 * heads + 4 * kv_heads + 8
    # float32 inputs of adapters: q, k, v, gate and up read `hidden`, o reads `queries`, down `mlp`
    inputs = (5 if is_wide else 3) * hidden + queries + is_wide * mlp
    return kept + (8 if lora_dropout else 4) * inputs + 4 * lora.lora_rank * (7 if is_wide else 4)


def _decoding(text: Any, machine: MachineConfig, sizes: Sizes, lora: LoraConfig) -> dict[str, int]:
    """Return the bytes of a decoding batch with the longest answers allowed: its cache, one prefill pass."""
    length, dtype = machine.prompt_tokens, torch.bfloat16
    each = cache_bytes(text, dtype, sizes.num_rollouts, length, sizes.response_budget)
    own = math.ceil(sizes.prompts / machine.world_size)
    batch = min(own, max(1, CACHE_BYTES["cuda"] // each))
    tokens = min(batch, max(1, PREFILL_TOKENS // length)) * length
    prefill = cache_bytes(text, dtype, 0, tokens, 0) + tokens * layer_bytes(text, lora)
    return {"key/value cache": batch * each, "prefill": prefill}


def render_plan(head: str, tables: Tables, machine: MachineConfig, engine: EngineConfig) -> str:
    """Return a plan as text: memory in GiB, other tables as they are."""
    placing = "sharded over" if engine.shard else "replicated on"
    layers = "recomputed" if engine.recomputes("cuda") else "not recomputed"
    lines = [f"{head}, {placing} {machine.world_size} GPUs of {machine.gpu_gib:g} GiB; layers {layers}"]
    for title, table in tables.items():
        if title not in MEMORY:
            lines += ["", title]
            lines += [f"  {key:<28}{round(value, 2):>16,}" for key, value in table.items()]
            continue
        total = sum(table.values())
        lines += ["", f"memory of a GPU, {title} (GiB)"]
        lines += [f"  {key:<28}{value / GIB:>16.1f}" for key, value in {**table, "total": total}.items()]
        lines[-1] += "" if total < machine.gpu_gib * GIB else "   does not fit"
        if engine.shard and title == "sampling":
            by_layer = table["gathered weights"] == tables["training"]["gathered weights"]
            how = "gathers one layer at a time" if by_layer else "holds the whole weights on every GPU"
            lines += ["", f"sampling {how}"]
    return "\n".join(lines)


def check_memory(tables: Tables, free: int, engine: EngineConfig) -> None:
    """Refuse a run that cannot fit: raises ValueError where a table's sum exceeds the `free` bytes of a GPU.

    The error names the flags that help.
    """
    sums = {name: sum(tables[name].values()) for name in MEMORY if name in tables}
    title, needed = max(sums.items(), key=itemgetter(1))
    if needed < free:
        return
    off = {"--shard": engine.shard, "--recompute": engine.recomputes("cuda")}
    names = [name for name, is_on in off.items() if not is_on]
    raise ValueError(
        f"{title} needs {needed / GIB:.1f} GiB of a GPU (see --plan), {free / GIB:.1f} GiB are free: try "
        f"{', '.join([*names, 'a smaller --token-budget', 'more GPUs'])}; --no-check-memory starts anyway"
    )


def check_run(config: TrainerConfig, ranks: Ranks, sizes: Sizes, prompt_tokens: int) -> None:
    """Compare the plan of a run on this rank's GPU with the memory that is free there; nothing on a CPU."""
    lora, engine = config.lora, config.engine
    if ranks.device.type != "cuda" or not engine.check_memory or not lora.lora_rank:
        return
    free, total = torch.cuda.mem_get_info(ranks.device)
    machine = MachineConfig(world_size=ranks.world_size, gpu_gib=total / GIB, prompt_tokens=prompt_tokens)
    tables = plan_memory(read_shape(config.model), machine, sizes, lora=lora, engine=engine)
    check_memory(tables, min(ranks.gather(free)), engine)
