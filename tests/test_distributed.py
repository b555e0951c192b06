"""Laws of ranks: sums, gathering, sharded weights. Several ranks are several gloo processes."""

import os
import socket
from collections import Counter

import pytest
import torch
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file
from tiny_model import tiny_policy
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from rmsweb.engine.distributed import (
    Ranks,
    ranks,
    read_weights,
    samples_by_layer,
    shard_policy,
    unsharded,
    whole,
)
from rmsweb.engine.lora import add_lora, lora_layers
from rmsweb.engine.packing import Bundle, make_pack
from rmsweb.engine.policy import PolicyModel
from rmsweb.engine.sampler import sample
from rmsweb.records import Message, Text


def test_one_process_needs_nothing(monkeypatch):
    """Without torchrun there is one rank, and what it gathers is its own value."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with ranks("cpu") as alone:
        assert (alone.rank, alone.world_size, alone.is_main) == (0, 1, True)
        assert alone.gather("x") == ["x"]


@pytest.mark.parametrize("device", ["gpu", "cuda"])
def test_an_impossible_device_is_an_error(monkeypatch, device):
    """An unknown name, and a GPU that torch does not see."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="--device"), ranks(device):
        pass


def group_of(policy, count):
    prompt = policy.encode_prompt([Message(role="user", parts=(Text(tag="task", text="press"),))], None)
    return Bundle(prompt, tuple(policy.encode_response("ab" * (i + 1)) for i in range(count)))


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def join(rank, port):
    """Makes this process one of two."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    torch.set_num_threads(1)


class Traffic(TorchDispatchMode):
    """Counts the collectives of this rank by their name."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "c10d" in func.namespace:
            self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


def _plain_worker(rank, port):
    join(rank, port)
    with ranks("cpu") as here:
        assert here.gather({"rank": rank}) == [{"rank": 0}, {"rank": 1}]
        here.agree({"lr": 1.0, "out": "same"})
        with pytest.raises(ValueError, match=r"ranks disagree on lr: 0 on rank 0, 1 on rank 1"):
            here.agree({"lr": rank, "out": "same"})
        parameters = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(3, 1))]
        if rank == 0:
            parameters[0].grad = torch.ones(2)
        parameters[1].grad = torch.full((3, 1), 1.0 + rank)
        with Traffic() as traffic:
            here.sum_gradients(parameters)
        assert traffic.counts.total() == 1
        assert parameters[0].grad.tolist() == [1, 1]
        assert parameters[1].grad.tolist() == [[3.0]] * 3


@pytest.mark.filterwarnings("ignore")
def test_two_ranks_gather_and_sum_gradients_and_name_what_differs():
    """Gradients are summed in one collective; a flag that differs is named on both ranks."""
    mp.spawn(_plain_worker, args=(free_port(),), nprocs=2)


def sharded_policy(folder, here):
    """A policy that was never whole on this rank, with adapters."""
    policy = PolicyModel.load(folder, device="meta")
    torch.manual_seed(7)
    add_lora(policy.model, rank=2, alpha=4)
    shard_policy(policy, here)
    return policy


def _sharded_worker(rank, port, folder, expected, drawn, adapters):
    join(rank, port)
    with ranks("cpu") as here:
        stored = PolicyModel.load(folder).model.state_dict()
        policy = sharded_policy(folder, here)
        for name, value in stored.items():  # every rank has read its slices, padding and ties included
            held = policy.model.state_dict()[name]
            assert torch.equal(whole(held), value), name
        for layer, adapter in zip(lora_layers(policy.model).values(), adapters, strict=True):
            assert torch.equal(layer.lora_A, adapter)
            assert not layer.lora_B.any()
        held = sum(p.to_local().numel() for p in policy.model.parameters() if isinstance(p, DTensor))
        assert held < 0.6 * sum(p.numel() for p in policy.model.parameters() if isinstance(p, DTensor))
        pack = make_pack([group_of(policy, 3)])
        torch.testing.assert_close(policy.response_logprobs(pack).detach(), expected, rtol=1e-5, atol=1e-6)
        for by_layer in (False, True):
            policy.by_layer = by_layer
            with (
                Traffic() as traffic,
                unsharded(policy),
            ):  # ranks sample a different number of steps on their own
                prompt = group_of(policy, 0).prompt
                for _ in range(1 + rank):  # and batches
                    ((rollout,),) = sample(policy, [prompt], n=1, max_new_tokens=3 + 4 * rank, seeds=[5])
            assert torch.equal(rollout.ids, drawn[: 3 + 4 * rank])
            counts = here.gather(dict(traffic.counts))
            assert counts[0] == counts[1]
            assert (sum(counts[0].values()) > 20) == by_layer
            assert all(isinstance(p, DTensor) for p in policy.scorer.model.lm_head.parameters())
        policy.response_logprobs(pack).sum().backward()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
@pytest.mark.parametrize(("tied", "files"), [(True, "one"), (False, "several")])
def test_sharded_weights_are_read_in_slices_and_equal_whole_ones(tmp_path, tied, files):
    """A model made on the meta device gives the log-probabilities and samples of the whole one, whole or a
    layer at a time, with equal collectives.
    """
    policy = tiny_policy(std=0.1, tied=tied, hidden=72)
    policy.save(tmp_path)
    if files == "several":
        (tmp_path / "model.safetensors").unlink()
        policy.model.save_pretrained(tmp_path, max_shard_size="100KB")
        assert (tmp_path / "model.safetensors.index.json").is_file()
    expected = policy.response_logprobs(make_pack([group_of(policy, 3)])).detach()
    ((rollout,),) = sample(policy, [group_of(policy, 0).prompt], n=1, max_new_tokens=7, seeds=[5])
    torch.manual_seed(7)
    add_lora(policy.model, rank=2, alpha=4)
    adapters = [layer.lora_A.detach() for layer in lora_layers(policy.model).values()]
    mp.spawn(_sharded_worker, args=(free_port(), str(tmp_path), expected, rollout.ids, adapters), nprocs=2)


def empty_model(folder):
    """A model of the folder's shape without values."""
    policy = PolicyModel.load(folder, device="meta")
    add_lora(policy.model, rank=2, alpha=4)
    policy.model.to_empty(device="cpu")
    policy.model.tie_weights()  # FSDP keeps ties, to_empty alone does not
    return policy.model


@pytest.fixture
def one_process():
    """A group of this process alone: sharded weights are read by processes that torchrun started."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_weights_that_do_not_fit_are_named(tmp_path):
    """A missing tensor, one too many, another shape, no file."""
    policy = tiny_policy()
    policy.save(tmp_path)
    file, name = tmp_path / "model.safetensors", "model.language_model.norm.weight"
    tensors = load_file(file)
    read_weights(empty_model(tmp_path), str(tmp_path))
    for changed, message in (
        ({key: value for key, value in tensors.items() if key != name}, rf"{name} missing"),
        (tensors | {"more": torch.zeros(1)}, "more missing or unexpected"),
        (tensors | {name: torch.zeros(3)}, rf"{name} has shape \(3,\), expected \(64,\)"),
    ):
        save_file(changed, file, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=message):
            read_weights(empty_model(tmp_path), str(tmp_path))
    model = empty_model(tmp_path)
    file.unlink()
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        read_weights(model, str(tmp_path))


@pytest.mark.parametrize(
    ("weights", "memory", "by_layer"), [(40, 80, False), (41, 80, True), (41, None, False)]
)
def test_layers_are_gathered_one_by_one_where_memory_is_short(weights, memory, by_layer):
    """Beyond half of a GPU; never on a CPU."""
    assert samples_by_layer(weights, memory) == by_layer


@pytest.mark.parametrize(
    "given", [{"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "x"}, {"RANK": "0", "WORLD_SIZE": "2"}]
)
def test_half_an_environment_is_an_error(monkeypatch, given):
    """A rank beyond the world, or no meeting point: said in words instead of waiting for ever."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="torchrun"), ranks("cpu"):
        pass


def test_one_process_cannot_shard():
    """--shard needs several processes."""
    with pytest.raises(ValueError, match="--shard"):
        shard_policy(tiny_policy(), Ranks(0, 1, torch.device("cpu")))


@pytest.mark.parametrize(
    "message", ["[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4", "Broken pipe"]
)
def test_a_lost_rank_is_said_in_one_line(monkeypatch, message):
    """A collective that fails because another process died ends this one in words; other errors keep their
    traceback.
    """
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit, match="another rank has ended"), ranks("cpu"):
        raise RuntimeError(message)
    with pytest.raises(RuntimeError, match="shape"), ranks("cpu"):
        raise RuntimeError("shape mismatch")
