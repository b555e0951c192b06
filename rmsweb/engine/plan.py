"""The plan of an RL run: parameters, memory of a GPU, and the work of a step, from a model's shape alone.

Purpose: `train_rl.py --plan` says before a machine is rented whether a run fits and what packing saves. The
model is built on the meta device, the packs are those that `packing.plan_packs` would make, and the limits of
the sampler are its own constants; there are no weights, no data and no GPU. What a step does comes in numbers
from the script, which knows the algorithm.

Shapes: P prompt tokens, R answer tokens, n rollouts, T tokens of a pack, L decoder layers.

1. ours: memory counts tensors of the engine, to which allocator, CUDA context and kernels' work space come on
   top (2 to 4 GiB as a rule).
2. ours: bytes are those of bfloat16 weights and activations, with float32 adapters.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from rmsweb.config import Config, opt
from rmsweb.engine.distributed import EngineConfig, samples_by_layer
from rmsweb.engine.lora import LoraConfig, add_lora, lora_layers
from rmsweb.engine.packing import Lengths, cost, deal_packs, lengths_in, plan_packs
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
class StepNumbers:
    """What a step does, in numbers."""

    prompts: int  # sampled together, over all GPUs
    num_rollouts: int
    response_budget: int  # tokens of the longest answer
    token_budget: int  # of a pack
    generated: int  # groups
    mini_batches: Sequence[Sequence[bool]]  # of each optimizer step: whether its groups were accepted


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Four tables: parameters, memory of a GPU in bytes while it trains and while it samples, work of a step."""

    parameters: dict[str, int]
    training: dict[str, int]
    sampling: dict[str, int]
    work: dict[str, int | float]


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def plan(
    config: Qwen3VLConfig, machine: MachineConfig, step: StepNumbers, *, lora: LoraConfig, engine: EngineConfig
) -> Plan:
    """Return the plan of a run."""
    with torch.device("meta"):
        model = Qwen3VLForConditionalGeneration._from_config(config, dtype=torch.bfloat16)
    total, vision = _count(model), _count(model.model.visual)
    layer = _count(model.model.language_model.layers[0])
    rank = lora.lora_rank
    adapters = add_lora(model, rank=rank, alpha=lora.lora_alpha, scope=lora.lora_scope)
    trained = sum(parameter.numel() for parameter in adapters)
    text, shard = config.text_config, engine.shard
    weights, replicated = 2 * total, 2 * vision
    root = weights - replicated - 2 * layer * text.num_hidden_layers  # embeddings, head, final norm
    # one layer computes while the next arrives
    gathered = root + 2 * 2 * layer if shard else 0
    common = {
        "weights": replicated + (weights - replicated) // machine.world_size if shard else weights,
        "adapters and optimizer": 4 * 4 * trained,  # float32: value, gradient, two moments
    }
    by_layer = samples_by_layer(weights, round(machine.gpu_gib * GIB))
    whole = gathered if by_layer or not shard else weights - replicated
    return Plan(
        parameters={
            "total": total,
            "language": total - vision,
            "vision": vision,
            "trainable": trained,
            "adapters": len(lora_layers(model)),
        },
        training={
            **common,
            "gathered weights": gathered,
            "activations": _activations(text, machine, step, recompute=engine.recompute),
            "logits of a chunk": 3 * 4 * LOGIT_CHUNK,  # values, exponentials, gradient
        },
        sampling={**common, "gathered weights": whole, **_decoding(text, machine, step)},
        work=_work(machine, step),
    )


def _activations(text: Any, machine: MachineConfig, step: StepNumbers, *, recompute: bool) -> int:
    """Return the bytes of activations that the longest pack keeps for backward."""
    tokens = max(step.token_budget, machine.prompt_tokens + step.response_budget)
    inside = tokens * _layer_bytes(text)
    if recompute:  # the input of every layer, and one layer from the inside
        return 2 * tokens * text.hidden_size * text.num_hidden_layers + inside
    return inside * text.num_hidden_layers


def _layer_bytes(text: Any) -> int:
    """Return the bytes that one decoder layer keeps for backward, a token."""
    hidden, mlp = text.hidden_size, text.intermediate_size
    queries, keys = (
        heads * text.head_dim for heads in (text.num_attention_heads, text.num_key_value_heads)
    )
    # bfloat16: residuals and norms; q, k before and after; v; attention; gate, up, act, product
    half = 4 * hidden + 3 * (queries + keys) + keys + queries + 4 * mlp
    # float32: upcasts of four norms; inputs of four adapters
    single = 2 * hidden + 2 * (queries + keys) + 3 * hidden + queries
    return 2 * half + 4 * single


def _decoding(text: Any, machine: MachineConfig, step: StepNumbers) -> dict[str, int]:
    """Return the bytes of a decoding batch with the longest answers allowed: its cache, one prefill pass."""
    length = machine.prompt_tokens
    each = cache_bytes(text, torch.bfloat16, step.num_rollouts, length, step.response_budget)
    batch = min(math.ceil(step.prompts / machine.world_size), max(1, CACHE_BYTES["cuda"] // each))
    tokens = min(batch, max(1, PREFILL_TOKENS // length)) * length
    kept = cache_bytes(text, torch.bfloat16, 0, tokens, 0)
    return {"key/value cache": batch * each, "prefill": kept + tokens * _layer_bytes(text)}


def _work(machine: MachineConfig, step: StepNumbers) -> dict[str, int | float]:
    """Return the groups, tokens, packs and passes of a step."""
    n, accepted = step.num_rollouts, sum(map(sum, step.mini_batches))
    count = sum(map(len, step.mini_batches))

    def packs(answers: Sequence[int]) -> tuple[int, int, int]:
        """Return packs, passes of each rank, and tokens of groups with so many answers each."""
        lengths: list[Lengths] = [
            (machine.prompt_tokens, (machine.response_tokens,) * num) for num in answers
        ]
        parts = [lengths_in(content, lengths) for content in plan_packs(lengths, step.token_budget)]
        tokens = sum(prompt + sum(held) for part in parts for prompt, held in part)
        return len(parts), len(deal_packs([cost(part) for part in parts], machine.world_size)[0]), tokens

    # the old pass scores the target twice: as it is, and behind the policy's own reasoning
    (old, old_passes, _), (reference, reference_passes, _) = packs([n + 2] * count), packs([n] * count)
    updates = [packs([n if passed else n + 1 for passed in batch]) for batch in step.mini_batches]
    updated, passes, packed = (sum(column) for column in zip(*updates, strict=True))
    separate = (n * count + count - accepted) * (machine.prompt_tokens + machine.response_tokens)
    return {
        "generated groups": step.generated,
        "accepted groups": accepted,
        "retained groups": count - accepted,
        "optimizer steps": len(updates),
        "packs scored": old + reference,
        "packs updated": updated,
        "forward passes of a GPU": old_passes + reference_passes + passes,
        "backward passes of a GPU": passes,
        "prefilled tokens": step.generated * machine.prompt_tokens,
        "update tokens, packed": packed,
        "update tokens, unpacked": separate,
        "packing saves (times)": separate / packed,
    }


def render(name: str, machine: MachineConfig, num_rollouts: int, shard: bool, found: Plan) -> str:
    """Return the plan as text."""

    def table(title: str, values: dict[str, Any], form: str = ",") -> list[str]:
        return ["", title, *(f"  {key:<28}{format(value, form):>16}" for key, value in values.items())]

    placing = "sharded over" if shard else "replicated on"
    lines = [
        f"{name}, {placing} {machine.world_size} GPUs of {machine.gpu_gib:g} GiB; prompts of "
        f"{machine.prompt_tokens} tokens, n={num_rollouts}"
    ]
    lines += table("parameters", found.parameters)
    for phase, parts in (("training", found.training), ("sampling", found.sampling)):
        sizes = {name: size / GIB for name, size in (parts | {"total": sum(parts.values())}).items()}
        lines += table(f"memory of a GPU, {phase} (GiB)", sizes, ".1f")
        if sizes["total"] >= machine.gpu_gib:
            lines[-1] += "   does not fit"
    if shard:
        whole = found.sampling["gathered weights"] != found.training["gathered weights"]
        held = "holds the whole weights on every GPU" if whole else "gathers one layer at a time"
        lines += ["", f"sampling {held}"]
    work = {key: f"{v:,.2f}" if isinstance(v, float) else f"{v:,}" for key, v in found.work.items()}
    return "\n".join(lines + table(f"a step, with answers of {machine.response_tokens} tokens", work, ""))
