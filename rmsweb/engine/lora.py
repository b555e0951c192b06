"""LoRA: low-rank adapters on the linear layers of a frozen model.

Purpose: App. F trains the adapters of SFT (r=64, alpha=128, dropout 0.05), App. G those of RL (r=64,
alpha=128, dropout 0). A layer y = W x becomes y = W x + (alpha / r) B A dropout(x), with A Kaiming-uniform
and B zero at the start, so the adapted model begins as the base. The reference policy of the KL is the same
model with its adapters disabled.

Shapes: r rank, A [r, in], B [out, r].

1. ours: adapters are float32 whatever the base's dtype is, so that small updates are not rounded away.
2. ours: "all linear layers" of SFT are the language model's seven projections, "qkv and output projections"
   of RL its q, k, v, o with one adapter each; scopes "all" and "attn+vision" add the vision tower's.
3. ours: in float32 without dropout a long row goes through W + (alpha / r) B A at once, which is the same up
   to rounding.
4. ours: the adapter is saved in the common file layout (adapter_config.json, adapter_model.safetensors),
   readable by other tools.
"""

import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import dropout, linear

Scope = Literal["language", "all", "attn", "attn+vision"]
_ATTENTION = r"language_model\.layers\.\d+\.self_attn\.[qkvo]_proj"
_MLP = r"language_model\.layers\.\d+\.mlp\.(gate|up|down)_proj"
_VISION_ATTENTION = r"visual\.blocks\.\d+\.attn\.(qkv|proj)"
_VISION = rf"{_VISION_ATTENTION}|visual\.blocks\.\d+\.mlp\.linear_fc[12]|visual\.(merger|deepstack_merger_list\.\d+)\.linear_fc[12]"
SCOPES: dict[Scope, str] = {
    "language": f"{_ATTENTION}|{_MLP}",
    "all": f"{_ATTENTION}|{_MLP}|{_VISION}",
    "attn": _ATTENTION,
    "attn+vision": f"{_ATTENTION}|{_VISION_ATTENTION}",
}


class LoRALinear(nn.Linear):
    """A linear layer with an adapter. Weight and bias keep their names and are the base's own tensors."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float, dropout_p: float) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        device = base.weight.device
        self.lora_A = nn.Parameter(torch.empty(rank, base.in_features, dtype=torch.float32, device=device))
        self.lora_B = nn.Parameter(torch.empty(base.out_features, rank, dtype=torch.float32, device=device))
        self.reset()
        self.rank, self.alpha, self.dropout_p, self.enabled = rank, alpha, dropout_p, True
        self.training = base.training

    def reset(self) -> None:
        """Makes the adapter a new one: A Kaiming-uniform, B zero.

        On the meta device there is nothing to draw.
        """
        if not self.lora_A.is_meta:
            nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
            nn.init.zeros_(self.lora_B)

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def delta(self) -> Tensor:
        """What the adapter adds to the weight, [out, in] float32."""
        return self.scale * (self.lora_B @ self.lora_A)

    def forward(self, x: Tensor) -> Tensor:
        if not self.enabled:
            return linear(x, self.weight, self.bias)
        drops = self.training and self.dropout_p > 0
        rows = x.numel() // self.in_features
        if (
            not drops
            and x.dtype == self.weight.dtype == torch.float32
            and rows > max(self.in_features, self.out_features)
        ):
            # for many rows a sum of two matrices is cheaper than two more products
            return linear(x, torch.addmm(self.weight, self.lora_B, self.lora_A, alpha=self.scale), self.bias)
        inner = dropout(x.float(), self.dropout_p, drops)
        out = linear(x, self.weight, self.bias)
        return out + linear(linear(inner, self.lora_A), self.scale * self.lora_B).to(out.dtype)


def lora_layers(model: nn.Module) -> dict[str, LoRALinear]:
    """Adapted layers by their full name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)}


def add_lora(
    model: nn.Module, *, rank: int, alpha: float, dropout_p: float = 0.0, scope: Scope = "language"
) -> list[nn.Parameter]:
    """Freezes the model, puts adapters on the scope's linear layers and returns the adapters' parameters.

    ValueError for a rank below 1, an unknown scope, a model that has adapters already, or one without such
    layers.
    """
    if rank < 1 or not 0 <= dropout_p < 1:
        raise ValueError(
            f"lora: rank {rank} and dropout {dropout_p}: expected a rank of at least 1 and a dropout in [0, 1)"
        )
    if scope not in SCOPES:
        raise ValueError(f"lora: unknown scope {scope!r}, expected one of {', '.join(SCOPES)}")
    if lora_layers(model):
        raise ValueError("lora: the model has adapters already; merge them first")
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
    return [parameter for layer in lora_layers(model).values() for parameter in (layer.lora_A, layer.lora_B)]


@contextmanager
def disabled(model: nn.Module) -> Iterator[None]:
    """Inside, the model computes as if it had no adapters: the reference policy."""
    layers = list(lora_layers(model).values())
    before = [layer.enabled for layer in layers]
    for layer in layers:
        layer.enabled = False
    try:
        yield
    finally:
        for layer, enabled in zip(layers, before, strict=True):
            layer.enabled = enabled


@contextmanager
def merged(model: nn.Module) -> Iterator[None]:
    """Inside, adapters are added into the weights, for fast sampling; afterwards the weights are the very
    same bytes as before.

    ours: the old weights are kept aside and put back, never subtracted, because a bfloat16 sum cannot be
    undone. Not for sharded weights.
    """
    layers = [layer for layer in lora_layers(model).values() if layer.enabled]
    kept = [layer.weight.data for layer in layers]
    for layer in layers:
        layer.weight.data = (layer.weight.data.float() + layer.delta().detach()).to(layer.weight.dtype)
        layer.enabled = False
    try:
        yield
    finally:
        for layer, weight in zip(layers, kept, strict=True):
            layer.weight.data, layer.enabled = weight, True


def merge(model: nn.Module) -> None:
    """Adds the adapters into the weights for good and puts plain linear layers back."""
    for name, layer in lora_layers(model).items():
        plain = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        plain.weight, plain.bias = layer.weight, layer.bias
        plain.weight.data = (layer.weight.data.float() + layer.delta().detach()).to(layer.weight.dtype)
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, plain)


def merged_state_dict(
    model: nn.Module, whole: Callable[[Tensor], Tensor | None] = lambda tensor: tensor
) -> dict[str, Tensor]:
    """State dict of the model as if merged; the model itself is left alone.

    `whole` gathers a sharded tensor, and gives None for one to leave out.
    """
    layers, state = lora_layers(model), {}
    for name, tensor in model.state_dict().items():
        if name.endswith((".lora_A", ".lora_B")) or (full := whole(tensor)) is None:
            continue
        layer = layers.get(name.removesuffix(".weight"))
        state[name] = (
            full if layer is None else (full.float() + layer.delta().detach().to(full.device)).to(full.dtype)
        )
    return state


def save_adapter(model: nn.Module, folder: Path, base_name: str) -> None:
    """Writes adapter_config.json and adapter_model.safetensors (keys base_model.model.<layer>.lora_A.weight,
    ...).
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
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    tensors = {
        f"base_model.model.{name}.{leaf}.weight": getattr(layer, leaf).detach().contiguous()
        for name, layer in layers.items()
        for leaf in ("lora_A", "lora_B")
    }
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def load_adapter(model: nn.Module, folder: Path) -> list[nn.Parameter]:
    """Puts a saved adapter on a model without adapters and returns its parameters; ValueError naming a layer
    that does not fit.
    """
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    tensors = load_file(folder / "adapter_model.safetensors")
    if lora_layers(model):
        raise ValueError(f"{folder}: the model has adapters already; merge them first")
    model.requires_grad_(False)
    modules = dict(model.named_modules())
    for name in config["target_modules"]:
        base = modules.get(name)
        if not isinstance(base, nn.Linear):
            raise ValueError(f"{folder}/adapter_config.json: the model has no linear layer {name}")
        layer = LoRALinear(base, config["r"], config["lora_alpha"], config["lora_dropout"])
        for leaf in ("lora_A", "lora_B"):
            value, parameter = tensors.get(f"base_model.model.{name}.{leaf}.weight"), getattr(layer, leaf)
            if value is None or value.shape != parameter.shape:
                found = None if value is None else tuple(value.shape)
                raise ValueError(
                    f"{folder}: {name}.{leaf} has shape {found}, expected {tuple(parameter.shape)}"
                )
            parameter.data.copy_(value)
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, layer)
    return [parameter for layer in lora_layers(model).values() for parameter in (layer.lora_A, layer.lora_B)]
