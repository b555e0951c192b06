"""Checkpoints, and the training states that a killed run goes on from.

Purpose: a checkpoint is what others load: a standard folder with adapters merged, and the adapter by itself.
A training state is what this run needs to go on bit for bit: trained weights, optimizer, and what the trainer
adds, one file a rank. There is no random state in it: every draw has a seed of its own, made of the run's
seed and the step.

ours: a file or folder appears whole or not at all, and the two newest states stay. So a run that is killed at
any moment goes on from the newest state that all ranks have.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rmsweb.engine.distributed import Ranks, whole
from rmsweb.engine.lora import lora_layers, merged_state_dict, save_adapter
from rmsweb.engine.policy import PolicyModel

KEPT_STATES = 2  # newest training states that stay on disk


def trained_parameters(policy: PolicyModel) -> dict[str, nn.Parameter]:
    """Return the parameters that require gradients by their full name."""
    return {name: value for name, value in policy.model.named_parameters() if value.requires_grad}


def save_training_state(
    folder: Path,
    policy: PolicyModel,
    adam: torch.optim.Optimizer,
    ranks: Ranks,
    *,
    step: int,
    extra: dict[str, Any],
) -> None:
    """Write folder/state-<step>.rank<r>-of-<ranks>.pt and delete all but the two newest states.

    `step` counts training steps, skipped ones included; `extra` holds numbers and texts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"state-{step:08d}.rank{ranks.rank}-of-{ranks.world_size}.pt"
    trained = trained_parameters(policy)
    state = {
        "weights": {name: _local(parameter) for name, parameter in trained.items()},
        "adam": {
            name: {slot: _local(value) for slot, value in adam.state[parameter].items()}
            for name, parameter in trained.items()
        },
        "extra": extra,
    }
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    ranks.gather(path.name)  # nobody deletes a state before all have the new one
    for _, old in sorted(_states(folder, ranks).items())[:-KEPT_STATES]:
        old.unlink()


def load_training_state(
    folder: Path, policy: PolicyModel, adam: torch.optim.Optimizer, ranks: Ranks
) -> dict[str, Any] | None:
    """Go back to the newest state that all ranks have and return its `extra`, None without such a state.

    Later states, which some ranks wrote before the run was killed, are deleted. Raises ValueError for a state
    of other parameters or of another number of ranks.
    """
    own = _states(folder, ranks)
    everyone = ranks.gather(own)
    known = {path for states in everyone for path in states.values()}
    if others := set(folder.glob("state-*.pt")) - known:
        raise ValueError(
            f"{min(others)}: was written by another number of ranks than {ranks.world_size}; resume with as "
            "many as before"
        )
    newest = max(set.intersection(*map(set, everyone)), default=-1)
    for step, path in own.items():
        if step > newest:
            path.unlink()
    if newest < 0:
        return None
    state = torch.load(own[newest], map_location="cpu", weights_only=True)
    trained = trained_parameters(policy)
    if trained.keys() != state["weights"].keys():
        raise ValueError(
            f"{own[newest]}: trains other parameters than this run; resume with the flags of the run that "
            "wrote it"
        )
    for name, parameter in trained.items():
        _local(parameter).copy_(state["weights"][name])
        slots = state["adam"][name]
        adam.state[parameter] = {slot: _like(parameter, value) for slot, value in slots.items()}
    return state["extra"]


def _states(folder: Path, ranks: Ranks) -> dict[int, Path]:
    """Return step -> file of this rank's states."""
    files = folder.glob(f"state-*.rank{ranks.rank}-of-{ranks.world_size}.pt")
    return {int(path.name[6:14]): path for path in files}


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor, any other as it is; both share its memory."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _like(parameter: nn.Parameter, value: Tensor) -> Tensor:
    """Return a value of the optimizer on the parameter's device, sharded as the parameter is."""
    value = value.to(parameter.device)
    if not isinstance(parameter, DTensor) or not value.ndim:  # the step number is one number
        return value
    mesh, places = parameter.device_mesh, parameter.placements
    return DTensor.from_local(value, mesh, places, shape=parameter.shape, stride=parameter.stride())


def save_checkpoint(policy: PolicyModel, ranks: Ranks, folder: Path, *, adapter: Path | None = None) -> None:
    """Write the merged standard checkpoint to `folder` and the adapters, if there are any, to `adapter`.

    All ranks must call it; rank 0 writes. Sharded weights are gathered one tensor at a time and kept by rank
    0 alone, in main memory. A folder of the same name is replaced when the new one is complete.
    """

    def keep(tensor: Tensor) -> Tensor | None:
        full = whole(tensor)
        return full.cpu() if ranks.is_main else None

    state = merged_state_dict(policy.model, keep)
    if ranks.is_main:
        _replace(folder, lambda target: policy.save(target, state))
        if adapter is not None and lora_layers(policy.model):
            _replace(adapter, lambda target: save_adapter(policy.model, target, policy.name))
    ranks.gather(folder.name)  # the others wait


def _replace(folder: Path, write: Callable[[Path], None]) -> None:
    new, old = (folder.with_name(f"{folder.name}.{name}.tmp") for name in ("new", "old"))
    for rest in (new, old):  # of a killed run
        shutil.rmtree(rest, ignore_errors=True)
    write(new)
    if folder.exists():
        os.replace(folder, old)
    os.replace(new, folder)
    shutil.rmtree(old, ignore_errors=True)
