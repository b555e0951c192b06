"""Laws of the adapters."""

import json

import pytest
import torch
from safetensors.torch import load_file
from tiny_model import tiny_policy

from rmsweb.engine.lora import (
    LoRALinear,
    add_lora,
    disabled,
    lora_layers,
    merged_state_dict,
    save_adapter,
)
from rmsweb.engine.packing import Bundle, make_pack
from rmsweb.records import Message, Text


def logprobs(policy):
    messages = [Message(role="user", parts=(Text(tag="task", text="press the button"),))]
    prompt = policy.encode_prompt(messages, None)
    return policy.response_logprobs(
        make_pack([Bundle(prompt, (policy.encode_response("yes"), policy.encode_response("no")))])
    )


def adapted(scope="language", **arguments):
    policy = tiny_policy(std=0.1)
    parameters = add_lora(policy.model, rank=4, alpha=8, scope=scope, **arguments)
    generator = torch.Generator().manual_seed(1)
    for parameter in parameters[1::2]:  # B
        parameter.data.normal_(std=0.1, generator=generator)
    return policy, parameters


def test_a_new_adapter_changes_nothing_and_a_disabled_one_neither():
    """B starts at zero; with adapters disabled the model is the base, bit by bit."""
    base = logprobs(tiny_policy(std=0.1))
    fresh = tiny_policy(std=0.1)
    add_lora(fresh.model, rank=4, alpha=8)
    torch.testing.assert_close(logprobs(fresh), base)
    policy, _ = adapted()
    assert (logprobs(policy) - base).abs().max() > 1e-2
    with disabled(policy.model):
        assert torch.equal(logprobs(policy), base)
    assert (logprobs(policy) - base).abs().max() > 1e-2


def test_the_merged_weights_are_a_plain_model_that_equals_the_adapted_one():
    """The merged state dict loads into a model without adapters, which gives the adapted log-probabilities
    and takes new adapters; the adapted model keeps its bytes.
    """
    policy, _ = adapted()
    expected = logprobs(policy)
    before = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
    state = merged_state_dict(policy.model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.model.state_dict().items())
    plain = tiny_policy()
    plain.model.load_state_dict(state)
    assert not lora_layers(plain.model)
    assert state.keys() == plain.model.state_dict().keys()
    torch.testing.assert_close(logprobs(plain), expected, rtol=1e-4, atol=1e-4)
    add_lora(plain.model, rank=2, alpha=4)  # RL puts a new adapter on the merged SFT model


@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("bias", [True, False])
def test_layer_equals_a_naive_one(rows, bias):
    """Value, gradients of adapter and input, and merge equal y_o = sum_i W_oi x_i + b_o + (alpha / r) sum_k
    B_ok (sum_i A_ki x_i), written as sums, with gradients from difference quotients.
    """
    torch.manual_seed(rows)
    base = torch.nn.Linear(6, 5, bias=bias)
    layer = LoRALinear(base, 2, 3.0, 0.0)
    layer.lora_B.data.normal_()
    W, b = base.weight.tolist(), base.bias.tolist() if bias else [0.0] * 5
    x, weight = torch.randn(rows, 6, requires_grad=True), torch.randn(rows, 5)

    def naive(x, A, B):
        inner = [[sum(A[k][i] * row[i] for i in range(6)) for k in range(2)] for row in x]
        return [
            [
                sum(W[o][i] * row[i] for i in range(6)) + b[o] + 1.5 * sum(B[o][k] * low[k] for k in range(2))
                for o in range(5)
            ]
            for row, low in zip(x, inner, strict=True)
        ]

    def loss(x, A, B):
        return sum(
            w * y
            for weights, outs in zip(weight.tolist(), naive(x, A, B), strict=True)
            for w, y in zip(weights, outs, strict=True)
        )

    values = [x.tolist(), layer.lora_A.tolist(), layer.lora_B.tolist()]
    torch.testing.assert_close(layer(x), torch.tensor(naive(*values)), rtol=1e-4, atol=1e-5)
    found = torch.autograd.grad((layer(x) * weight).sum(), [x, layer.lora_A, layer.lora_B])
    for part, gradient in enumerate(found):
        for i, j in ((0, 0), (1, 1), (-1, -1)):
            entry = values[part][i][j]
            around = []
            for moved in (
                entry + 0.5,
                entry - 0.5,
            ):  # the loss is linear in every single entry, so that the quotient is exact
                values[part][i][j] = moved
                around.append(loss(*values))
            values[part][i][j] = entry
            assert float(gradient[i, j]) == pytest.approx(around[0] - around[1], rel=1e-3, abs=1e-4)
    merged_weight = [
        [W[o][i] + 1.5 * sum(values[2][o][k] * values[1][k][i] for k in range(2)) for i in range(6)]
        for o in range(5)
    ]
    torch.testing.assert_close(base.weight + layer.delta(), torch.tensor(merged_weight), rtol=1e-5, atol=1e-5)


def test_gradients_reach_adapters_alone():
    """The base is frozen; every adapter on the way gets a gradient."""
    policy, parameters = adapted()
    logprobs(policy).sum().backward()
    assert [name for name, p in policy.model.named_parameters() if p.requires_grad] == [
        f"{name}.{leaf}" for name in lora_layers(policy.model) for leaf in ("lora_A", "lora_B")
    ]
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in parameters)


@pytest.mark.parametrize(
    ("scope", "per_layer", "per_block", "other"),
    [("attn", 4, 0, 0), ("language", 7, 0, 0), ("attn+vision", 4, 2, 0), ("all", 7, 4, 6)],
)
def test_each_scope_has_its_layers(scope, per_layer, per_block, other):
    """Two decoder layers, two vision blocks, and three mergers of two layers each."""
    policy, _ = adapted(scope)
    names = list(lora_layers(policy.model))
    assert len(names) == 2 * per_layer + 2 * per_block + other
    assert not any("lm_head" in name or "patch_embed" in name for name in names)


def test_long_rows_equal_short_ones():
    """A row so long that weight and adapter are summed first gives what its parts give, in value and
    gradient.
    """
    holder = torch.nn.Module()
    holder.language_model = torch.nn.Module()
    holder.language_model.layers = torch.nn.ModuleList(
        [torch.nn.ModuleDict({"self_attn": torch.nn.ModuleDict({"q_proj": torch.nn.Linear(6, 5)})})]
    )
    parameters = add_lora(holder, rank=2, alpha=3, scope="attn")
    (layer,) = lora_layers(holder).values()
    layer.lora_B.data.normal_()
    x = torch.randn(30, 6)
    results = []
    for out in (layer(x), torch.cat([layer(part) for part in x.split(3)])):
        results.append([out, *torch.autograd.grad((out * x[:, :5]).sum(), parameters)])
    for whole, parts in zip(*results, strict=True):
        torch.testing.assert_close(whole, parts)


def test_dropout_only_in_training():
    """Dropout changes the adapter's input in training and not in evaluation."""
    policy, _ = adapted(dropout_p=0.5)
    assert torch.equal(logprobs(policy), logprobs(policy))
    policy.model.train()
    assert not torch.equal(logprobs(policy), logprobs(policy))


def test_the_adapter_file_has_the_common_layout(tmp_path):
    """Names, shapes and config; the tensors are those of the model."""
    policy, _ = adapted("attn")
    save_adapter(policy.model, tmp_path, "base")
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert tensors["base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_A.weight"].shape == (
        4,
        64,
    )
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 8)
    for name, layer in lora_layers(policy.model).items():
        assert torch.equal(tensors[f"base_model.model.{name}.lora_A.weight"], layer.lora_A)
        assert torch.equal(tensors[f"base_model.model.{name}.lora_B.weight"], layer.lora_B)


def test_bfloat16_base_keeps_float32_adapters():
    """Adapters stay float32 on a bfloat16 base, the output is bfloat16, merging leaves the base's bytes."""
    base = torch.nn.Sequential(torch.nn.Linear(8, 8))
    wrapped = torch.nn.ModuleDict(
        {
            "language_model": torch.nn.ModuleDict(
                {
                    "layers": torch.nn.ModuleList(
                        [torch.nn.ModuleDict({"self_attn": torch.nn.ModuleDict({"q_proj": base[0]})})]
                    )
                }
            )
        }
    )
    wrapped.to(torch.bfloat16)
    add_lora(wrapped, rank=2, alpha=4, scope="attn")
    (layer,) = lora_layers(wrapped).values()
    layer.lora_B.data.normal_()
    weight = layer.weight.data.clone()
    assert layer.lora_A.dtype == torch.float32
    assert layer(torch.ones(1, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16
    merged = merged_state_dict(wrapped)["language_model.layers.0.self_attn.q_proj.weight"]
    assert merged.dtype == torch.bfloat16
    assert not torch.equal(merged, weight)
    assert torch.equal(layer.weight, weight)


def test_impossible_adapters_are_refused():
    """Rank zero, an unknown scope, adapters twice, and a model without such layers are errors."""
    policy, _ = adapted()
    with pytest.raises(ValueError, match="rank 0"):
        add_lora(policy.model, rank=0, alpha=1)
    with pytest.raises(ValueError, match="unknown scope"):
        add_lora(policy.model, rank=1, alpha=1, scope="everything")
    with pytest.raises(ValueError, match="already"):
        add_lora(policy.model, rank=1, alpha=1)
    with pytest.raises(ValueError, match="no linear layer"):
        add_lora(torch.nn.Linear(2, 2), rank=1, alpha=1)
    with pytest.raises(ValueError, match="no adapters"):
        save_adapter(tiny_policy().model, None, "")
