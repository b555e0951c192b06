"""Laws of ranks: sums, gathering, sharded weights. Several ranks are several gloo processes."""

import pytest
import torch
import torch.multiprocessing as mp
from tiny_model import tiny_policy

from rmsweb.engine.distributed import Ranks, ranks, shard, unsharded
from rmsweb.engine.lora import add_lora
from rmsweb.engine.packing import Group, make_pack
from rmsweb.engine.sampler import sample
from rmsweb.records import Message, Text


def test_one_process_needs_nothing(monkeypatch):
    """Without torchrun there is one rank, and sums and gathers are the values themselves."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with ranks("cpu") as alone:
        assert (alone.rank, alone.world_size, alone.is_main) == (0, 1, True)
        assert alone.sum({"a": 2.5}) == {"a": 2.5}
        assert alone.gather("x") == ["x"]
        alone.barrier()


@pytest.mark.parametrize("device", ["gpu", "cuda"])
def test_an_impossible_device_is_an_error(monkeypatch, device):
    """Unknown names, and a GPU where there is none."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="--device"), ranks(device):
        pass


def group_of(policy, count):
    prompt = policy.encode_prompt([Message(role="user", parts=(Text(tag="task", text="press"),))], None)
    return Group(prompt, tuple(policy.encode_response("ab" * (i + 1)) for i in range(count)))


def _worker(rank, folder, expected, drawn):
    import os

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = folder
    torch.set_num_threads(1)
    with ranks("cpu") as here:
        assert here.sum({"b": 1.0, "a": float(rank)}) == {"a": 1.0, "b": 2.0}
        assert here.gather({"rank": rank}) == [{"rank": 0}, {"rank": 1}]
        parameters = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(3, 1))]
        if rank == 0:
            parameters[0].grad = torch.ones(2)
        parameters[1].grad = torch.full((3, 1), 1.0 + rank)
        here.sum_gradients(parameters)
        assert parameters[0].grad.tolist() == [1, 1]
        assert parameters[1].grad.tolist() == [[3.0]] * 3
        _sharded(here, expected, drawn)


def _sharded(here: Ranks, expected, drawn):
    policy = tiny_policy(std=0.1)
    add_lora(policy.model, rank=2, alpha=4)
    shard(policy, here)
    pack = make_pack([group_of(policy, 3)])
    torch.testing.assert_close(policy.response_logprobs(pack).detach(), expected, rtol=1e-4, atol=1e-5)
    with unsharded(policy):  # ranks sample a different number of steps on their own
        prompt = group_of(policy, 0).prompt
        ((rollout,),) = sample(policy, [prompt], n=1, max_new_tokens=3 + 4 * here.rank, seeds=[5])
        assert torch.equal(rollout.ids, drawn[: 3 + 4 * here.rank])
    policy.response_logprobs(pack).sum().backward()


@pytest.mark.filterwarnings("ignore")
def test_two_ranks():
    """Sums, gathers and gradients over two ranks; sharded weights give the log-probabilities and samples of whole ones."""
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    policy = tiny_policy(std=0.1)
    expected = policy.response_logprobs(make_pack([group_of(policy, 3)])).detach()
    ((rollout,),) = sample(policy, [group_of(policy, 0).prompt], n=1, max_new_tokens=7, seeds=[5])
    mp.spawn(_worker, args=(port, expected, rollout.ids), nprocs=2)
