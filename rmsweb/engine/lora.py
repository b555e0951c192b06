"""LoRA: low-rank adapters on the linear layers of a frozen model.

Purpose: App. F trains the adapters of SFT (r=64, alpha=128, dropout 0.05), App. G those of RL (r=64,
alpha=128, dropout 0). A layer y = W x becomes y = W x + (alpha / r) B A dropout(x). A starts Kaiming-uniform
and B zero, so the adapted model begins as the base. The reference policy of the KL is the same model with its
adapters disabled.

Shapes: r rank, A [r, in], B [out, r].

1. ours: adapters are float32 whatever the base's dtype is, so that small updates are not rounded away.
2. ours: "all linear layers" of SFT are the language model's seven projections, "qkv and output projections"
   of RL its q, k, v, o with one adapter each; scopes "all" and "attn+vision" add the vision tower's.
3. ours: in float32 without dropout a long row goes through W + (alpha / r) B A at once, which is the same up
   to rounding.
4. ours: the adapter is saved in the common file layout (adapter_config.json, adapter_model.safetensors),
   readable by other tools.
"""

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import dropout, linear

from rmsweb.config import Config, opt
from rmsweb.jsonl import write_json

Scope = Literal["language", "all", "attn", "attn+vision"]
_ATTENTION = r"language_model\.layers\.\d+\.self_attn\.[qkvo]_proj"
_MLP = r"language_model\.layers\.\d+\.mlp\.(gate|up|down)_proj"
_VISION_ATTENTION = r"visual\.blocks\.\d+\.attn\.(qkv|proj)"
_VISION_MLP = r"visual\.blocks\.\d+\.mlp\.linear_fc[12]"
_MERGERS = r"visual\.(merger|deepstack_merger_list\.\d+)\.linear_fc[12]"
SCOPES: dict[Scope, str] = {
    "language": f"{_ATTENTION}|{_MLP}",
    "all": f"{_ATTENTION}|{_MLP}|{_VISION_ATTENTION}|{_VISION_MLP}|{_MERGERS}",
    "attn": _ATTENTION,
    "attn+vision": f"{_ATTENTION}|{_VISION_ATTENTION}",
}


@dataclass(frozen=True, kw_only=True)
class LoraConfig(Config):
    """Adapters."""

    lora_rank: int = opt(64, "rank of the adapters; 0 trains all weights", paper=64, at_least=0)
    lora_alpha: float = opt(128.0, "scale of the adapters is alpha / rank", paper=128)
    lora_scope: Scope = opt("language", "linear layers with adapters")


class LoRALinear(nn.Linear):
    """A linear layer with an adapter. Weight and bias keep their names and are the base's own tensors."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float, dropout_p: float) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        empty = partial(torch.empty, dtype=torch.float32, device=base.weight.device)
        self.lora_A = nn.Parameter(empty(rank, base.in_features))
        self.lora_B = nn.Parameter(empty(base.out_features, rank))
        self.reset()
        self.rank, self.alpha, self.scale = rank, alpha, alpha / rank
        self.dropout_p, self.enabled = dropout_p, True
        self.training = base.training

    def reset(self) -> None:
        """Start the adapter anew: A Kaiming-uniform, B zero.

        On the meta device there is nothing to draw, and no random number is used up.
        """
        if not self.lora_A.is_meta:
            nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
            nn.init.zeros_(self.lora_B)

    def delta(self) -> Tensor:
        """Return what the adapter adds to the weight, [out, in] float32."""
        return self.scale * (self.lora_B @ self.lora_A)

    def forward(self, x: Tensor) -> Tensor:
        """Return W x + b + (alpha / r) B A dropout(x); x [..., in] -> [..., out] in the dtype of W."""
        if not self.enabled:
            return linear(x, self.weight, self.bias)
        drops = self.training and self.dropout_p > 0
        is_long = x.numel() // self.in_features > max(self.in_features, self.out_features)
        if is_long and not drops and x.dtype == self.weight.dtype == torch.float32:
            # for many rows a sum of two matrices is cheaper than two more products
            return linear(x, torch.addmm(self.weight, self.lora_B, self.lora_A, alpha=self.scale), self.bias)
        inner = dropout(x.float(), self.dropout_p, drops)
        out = linear(x, self.weight, self.bias)
        return out + linear(linear(inner, self.lora_A), self.scale * self.lora_B).to(out.dtype)


def lora_layers(model: nn.Module) -> dict[str, LoRALinear]:
    """Return the adapted layers by their full name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)}


def lora_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return A and B of every adapted layer by their full name, layer by layer."""
    return {
        f"{name}.{leaf}": getattr(layer, leaf)
        for name, layer in lora_layers(model).items()
        for leaf in ("lora_A", "lora_B")
    }


def add_lora(
    model: nn.Module, *, rank: int, alpha: float, dropout_p: float = 0.0, scope: Scope = "language"
) -> list[nn.Parameter]:
    """Freeze the model, put adapters on the linear layers of a scope and return the adapters' parameters.

    Raises ValueError for a rank below 1, an unknown scope, a model that has adapters already, or a model
    without such layers.
    """
    if rank < 1 or not 0 <= dropout_p < 1:
        raise ValueError(f"lora: rank {rank} and dropout {dropout_p}: expected rank >= 1, 0 <= dropout < 1")
    if scope not in SCOPES:
        raise ValueError(f"lora: unknown scope {scope!r}, expected one of {', '.join(SCOPES)}")
    if lora_layers(model):
        raise ValueError("lora: the model has adapters already; load a merged checkpoint")
    model.requires_grad_(False)
    pattern = re.compile(rf"(.*\.)?({SCOPES[scope]})")
    targets = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and pattern.fullmatch(name)
    }
    if not targets:
        raise ValueError(f"lora: no linear layer of the model matches scope {scope!r}")
    for name, module in targets.items():
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, LoRALinear(module, rank, alpha, dropout_p))
    return list(lora_parameters(model).values())


@contextmanager
def disabled(model: nn.Module) -> Iterator[None]:
    """Let the model compute as if it had no adapters: the reference policy."""
    layers = [layer for layer in lora_layers(model).values() if layer.enabled]
    for layer in layers:
        layer.enabled = False
    try:
        yield
    finally:
        for layer in layers:
            layer.enabled = True


def merged_state_dict(
    model: nn.Module, whole: Callable[[Tensor], Tensor | None] = lambda tensor: tensor
) -> dict[str, Tensor]:
    """Return the state dict that the model would have with its adapters added into the weights.

    The model itself stays as it is. `whole` gathers a sharded tensor; a tensor for which it returns None is
    left out.
    """
    layers, state = lora_layers(model), {}
    for name, tensor in model.state_dict().items():
        if name.endswith((".lora_A", ".lora_B")) or (full := whole(tensor)) is None:
            continue
        if layer := layers.get(name.removesuffix(".weight")):  # the bias has another name
            # ours: summed in float32 and rounded once, because a bfloat16 sum would lose small updates
            full = (full.float() + layer.delta().detach().to(full.device)).to(full.dtype)
        state[name] = full
    return state


def save_adapter(model: nn.Module, folder: Path, base_name: str) -> None:
    """Write adapter_config.json and adapter_model.safetensors.

    The keys are base_model.model.<layer>.lora_A.weight and the same with lora_B.
    """
    layers = lora_layers(model)
    if not layers:
        raise ValueError(f"{folder}: the model has no adapters to save")
    first = next(iter(layers.values()))
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": first.rank,
        "lora_alpha": first.alpha,
        "lora_dropout": first.dropout_p,
        "bias": "none",
        "target_modules": sorted(layers),
    }
    write_json(folder / "adapter_config.json", config)
    tensors = {
        f"base_model.model.{name}.weight": parameter.detach().contiguous()
        for name, parameter in lora_parameters(model).items()
    }
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
