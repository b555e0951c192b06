"""The plan of a run, against counts made by hand from the published shapes and against what torch keeps."""

import re
import shlex

import pytest
import torch
from tiny_model import tiny_config, tiny_tokenizer
from transformers import Qwen3VLForConditionalGeneration

import train_rl
import train_sft
from rmsweb.engine.distributed import EngineConfig
from rmsweb.engine.lora import LoraConfig, add_lora
from rmsweb.engine.packing import Bundle, EncodedPrompt, make_pack
from rmsweb.engine.plan import GIB, MEMORY, SHAPES, check_memory, layer_bytes
from rmsweb.engine.policy import PolicyModel


def plan(script, *flags):
    """The tables that `--plan` of a script prints."""
    return script.make_plan(script.parse_config(script.PlanConfig, [*map(str, flags)]))


def of(name="qwen3-vl-8b", *flags):
    """The plan of the paper's RL run with shards on 8 GPUs of 80 GiB, with some other flags."""
    tables = plan(train_rl, "--model-shape", name, "--shard", *flags)
    return {title.partition(",")[0]: table for title, table in tables.items()}


def kept_bytes(layers, tokens, shape, lora, dropout):
    """Bytes that autograd keeps for the backward pass of a pack, weights left out."""
    config = tiny_config(tiny_tokenizer(), layers=layers)
    for name, value in shape.items():
        setattr(config.text_config, name, value)
    config.text_config.rope_parameters["mrope_section"] = [6, 5, 5]
    model = Qwen3VLForConditionalGeneration._from_config(
        config, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    policy = PolicyModel(model, tiny_tokenizer())
    add_lora(model, rank=lora.lora_rank, alpha=1.0, dropout_p=dropout, scope=lora.lora_scope)
    model.train()
    prompt = EncodedPrompt(
        ids=torch.arange(10, 10 + tokens - 8) % 300,
        positions=torch.arange(tokens - 8).expand(3, -1),
        next_position=tokens - 8,
        image_index=torch.zeros(0, dtype=torch.long),
        pixel_values=None,
        image_grid=None,
    )
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    seen: dict[int, torch.Tensor] = {}

    def keep(tensor):
        if tensor.untyped_storage().data_ptr() not in own:
            seen[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        policy.response_logprobs(make_pack([Bundle(prompt, (torch.arange(20, 28),))], "cpu"))
    return sum(tensor.untyped_storage().nbytes() for tensor in seen.values())


@pytest.mark.parametrize(("scope", "dropout"), [("attn", 0.0), ("language", 0.0), ("language", 0.05)])
@pytest.mark.parametrize(
    "change",
    [{}, {"hidden_size": 128}, {"intermediate_size": 384}, {"num_attention_heads": 8}, {"head_dim": 64}],
    ids=lambda change: next(iter(change), "base"),
)
def test_activations_are_what_torch_keeps(scope, dropout, change):
    """One more decoder layer keeps what the plan says, within 2%, whichever width changes."""
    shape = {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4, "head_dim": 32} | change
    lora, tokens = LoraConfig(lora_rank=8, lora_scope=scope), 512
    one, two = (kept_bytes(layers, tokens, shape, lora, dropout) for layers in (1, 2))
    text = tiny_config(tiny_tokenizer()).text_config
    for name, value in shape.items():
        setattr(text, name, value)
    assert (two - one) / tokens == pytest.approx(layer_bytes(text, lora, dropout), rel=0.02)


def test_a_run_that_cannot_fit_is_refused_in_one_line():
    """The largest table against the free bytes of a GPU; the flags that help and are off are named."""
    tables = plan(train_rl, "--model-shape", "qwen3-vl-32b")
    with pytest.raises(ValueError, match="--shard, a smaller --token-budget") as refused:
        check_memory(tables, 80 * GIB, EngineConfig())
    assert "--recompute" not in str(refused.value)
    assert "\n" not in str(refused.value)
    with pytest.raises(ValueError, match="--recompute"):
        check_memory(
            plan(train_rl, "--model-shape", "qwen3-vl-8b", "--no-recompute"),
            80 * GIB,
            EngineConfig(recompute=False),
        )
    check_memory(
        plan(train_rl, "--model-shape", "qwen3-vl-32b", "--shard"), 80 * GIB, EngineConfig(shard=True)
    )


def test_recompute_is_on_on_a_gpu_alone_unless_given():
    """Run and plan read one default."""
    assert [EngineConfig().recomputes(device) for device in ("cuda", "cpu")] == [True, False]
    for given in (True, False):
        assert (
            EngineConfig(recompute=given).recomputes("cuda")
            is given
            is EngineConfig(recompute=given).recomputes("cpu")
        )
    run = ["--model", "m", "--out", "o"]
    for script, data in ((train_rl, "--states"), (train_sft, "--samples")):
        config = script.parse_config(script.Config, [*run, data, "x"])
        planned = script.parse_config(script.PlanConfig, [*run, data, "x"])
        assert config.engine == planned.engine
        assert config.lora == planned.lora


GPU_COMMANDS = re.findall(
    r"^torchrun (.*?) (train_\w+)\.py (.*)$",
    (SHAPES.parents[2] / "README.md").read_text(encoding="utf-8").replace("\\\n", " "),
    re.MULTILINE,
)


def test_the_readme_names_gpu_commands():
    """Both scripts, both sizes, one node and two."""
    assert len(GPU_COMMANDS) >= 4


@pytest.mark.parametrize(("start", "name", "flags"), GPU_COMMANDS, ids=lambda text: text[:30])
def test_the_readmes_gpu_commands_fit(start, name, flags):
    """On nodes of 8 GPUs with 80 GiB each, with 4 GiB left for allocator and CUDA context."""
    nodes = re.search(r"--nnodes (\d+)", start)
    words = shlex.split(flags)
    size = "32b" if "32" in words[words.index("--model") + 1] + flags else "8b"
    script = {"train_rl": train_rl, "train_sft": train_sft}[name]
    world = 8 * int(nodes[1] if nodes else 1)
    tables = plan(script, *words, "--model-shape", f"qwen3-vl-{size}", "--world-size", world)
    assert max(sum(tables[title].values()) for title in MEMORY if title in tables) < 76 * GIB


@pytest.mark.parametrize(
    ("name", "layers", "hidden", "mlp", "queries", "trainable"),
    [
        ("qwen3-vl-8b", 36, 4096, 12288, 4096, 61_341_696),
        ("qwen3-vl-32b", 64, 5120, 25600, 8192, 159_383_552),
    ],
)
def test_parameters_are_those_of_the_published_shapes(name, layers, hidden, mlp, queries, trainable):
    """Embeddings and an untied head, q, k, v, o, two head norms, three MLP matrices, two norms a layer, a
    last norm; adapters of rank 64 on q, k, v, o.
    """
    layer = 2 * hidden * queries + 2 * hidden * 1024 + 2 * 128 + 3 * hidden * mlp + 2 * hidden
    assert (
        sum(
            64 * (rows + columns)
            for rows, columns in ((queries, hidden), (1024, hidden), (1024, hidden), (hidden, queries))
        )
        * layers
        == trainable
    )
    width, inner, out = 1152, 4304, 4 * 1152
    block = (
        3 * width * width + 3 * width + width * width + width + 2 * width * inner + inner + width + 4 * width
    )
    merger = out * out + out + out * hidden + hidden
    patches = 3 * 2 * 16 * 16 * width + width + 2304 * width
    vision = 27 * block + patches + (merger + 2 * width) + 3 * (merger + 2 * out)
    found = of(name)["parameters"]
    assert found == {
        "total": 2 * 151_936 * hidden + layers * layer + hidden + vision,
        "language": 2 * 151_936 * hidden + layers * layer + hidden,
        "vision": vision,
        "trainable": trainable,
        "adapters": 4 * layers,
    }


def test_memory_of_the_8b_model_by_hand():
    """Shards in bfloat16 with a whole vision tower, 16 bytes an adapter weight, 144 KiB of keys and values a
    token, gathered root and two layers.
    """
    found = of()
    language, vision, layer = 8_190_735_360, 576_388_336, 192_946_432
    root = language - 36 * layer
    training, sampling = found["training"], found["sampling"]
    assert training["weights"] == sampling["weights"] == 2 * vision + 2 * language // 8
    assert training["adapters and optimizer"] == 16 * 61_341_696
    assert training["gathered weights"] == 2 * root + 2 * 2 * layer
    assert sampling["gathered weights"] == 2 * language
    assert (
        sampling["key/value cache"] == 4 * (12_000 + 8 * 2048) * 144 * 1024
    )  # 4 of the 8 prompts of a GPU fit into the sampler's cache
    rows, each = (
        20_480,
        8 * (4096 + 4096 + 1024) + 6 * 12288 + 8 * 32 + 4 * 8 + 8 + 4 * (4 * 4096) + 4 * 4 * 64,
    )
    assert training["activations"] == 36 * 2 * 4096 * rows + each * rows
    assert of("qwen3-vl-8b", "--no-recompute")["training"]["activations"] == 36 * each * rows


def test_work_of_a_step_by_hand():
    """128 groups of one pack each: 64 with 8 answers, 64 with the target as ninth; scoring adds two probes to
    the old pass and none to the reference.
    """
    work = of()["a step"]
    assert (work["accepted groups"], work["retained groups"], work["optimizer steps"]) == (64, 64, 8)
    assert (work["packs updated"], work["packs scored"]) == (128, 256)
    assert (work["forward passes of a GPU"], work["backward passes of a GPU"]) == (48, 16)
    packed, separate = 64 * (2 * 12_000 + 17 * 300), 64 * 17 * 12_300
    assert (work["update tokens, packed"], work["update tokens, unpacked"]) == (packed, separate)
    assert work["packing saves (times)"] == separate / packed
    # 12,000 + 4 x 2048 fit into a row of 20,480: two packs a group, three with the target
    longest = of("qwen3-vl-8b", "--response-tokens", 2048)["a step"]
    assert longest["packs updated"] == 64 * 2 + 64 * 3


def test_sampling_gathers_what_fits():
    """Whole weights on a GPU where they take at most half of it, else a layer at a time; replicated weights
    are never gathered.
    """
    whole, by_layer = of(), of("qwen3-vl-32b", "--world-size", 16)
    assert whole["sampling"]["gathered weights"] > whole["training"]["gathered weights"]
    assert by_layer["sampling"]["gathered weights"] == by_layer["training"]["gathered weights"]
    alone = of("qwen3-vl-8b", "--no-shard")
    assert (alone["training"]["gathered weights"], alone["sampling"]["gathered weights"]) == (0, 0)
    assert alone["training"]["weights"] == 2 * alone["parameters"]["total"]
    large = of("qwen3-vl-32b", "--gpu-gib", 200)["sampling"]
    assert large["gathered weights"] / GIB > 60


@pytest.mark.parametrize(("name", "world"), [("qwen3-vl-8b", 8), ("qwen3-vl-32b", 16)])
def test_the_script_prints_the_plan(capsys, name, world):
    """`--plan` needs no model, states or folder, keeps the flags of a run, and exits with 0."""
    assert (
        train_rl.main(
            [
                "--plan",
                "--model-shape",
                name,
                "--world-size",
                str(world),
                "--shard",
                "--states",
                "gone.jsonl",
                "--lora-rank",
                "64",
            ]
        )
        == 0
    )
    text = capsys.readouterr().out
    for table in of(name, "--world-size", world).values():
        assert all(key in text for key in table)
    parameters = of(name)["parameters"]
    assert f"{parameters['total']:,}" in text
    assert f"{parameters['trainable']:,}" in text
    assert ("one layer at a time" if world == 16 else "whole weights on every GPU") in text
    assert "does not fit" not in text


def test_bad_plans_are_named(capsys):
    """No shape, no GPU, or an unknown shape."""
    with pytest.raises(ValueError, match="--model-shape"):
        train_rl.main(["--plan"])
    with pytest.raises(ValueError, match="--world-size"):
        train_rl.main(["--plan", "--model-shape", "qwen3-vl-8b", "--world-size", "0"])
    with pytest.raises(SystemExit) as stopped:
        train_rl.main(["--plan", "--model-shape", "qwen3-vl-9b"])
    assert stopped.value.code == 2
    capsys.readouterr()
    assert train_rl.main(["--plan", "--model-shape", "qwen3-vl-8b", "--gpu-gib", "8"]) == 0
    assert "does not fit" in capsys.readouterr().out
    assert {file.stem for file in SHAPES.iterdir()} == {"qwen3-vl-8b", "qwen3-vl-32b"}
