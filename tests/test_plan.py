"""The plan of a run, against counts made by hand from the published shapes."""

import pytest

import train_rl
from rmsweb.engine.plan import GIB, SHAPES


def of(name="qwen3-vl-8b", *flags):
    """The plan of the paper's run on 8 GPUs of 80 GiB, with some other flags."""
    return train_rl.make_plan(
        train_rl.parse_config(train_rl.PlanConfig, ["--model-shape", name, *map(str, flags)])
    )


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
        2 * (4 * 4096 + 3 * (4096 + 1024) + 1024 + 4096 + 4 * 12288)
        + 4 * (2 * 4096 + 2 * (4096 + 1024) + 3 * 4096 + 4096),
    )
    assert training["activations"] == 36 * 2 * 4096 * rows + each * rows
    assert of("qwen3-vl-8b", "--no-recompute")["training"]["activations"] == 36 * each * rows


def test_work_of_a_step_by_hand():
    """128 groups of one pack each: 64 with 8 answers, 64 with the target as ninth; scoring adds two probes to
    the old pass and none to the reference.
    """
    work = of()["work"]
    assert (work["accepted groups"], work["retained groups"], work["optimizer steps"]) == (64, 64, 8)
    assert (work["packs updated"], work["packs scored"]) == (128, 256)
    assert (work["forward passes of a GPU"], work["backward passes of a GPU"]) == (48, 16)
    packed, separate = 64 * (2 * 12_000 + 17 * 300), 64 * 17 * 12_300
    assert (work["update tokens, packed"], work["update tokens, unpacked"]) == (packed, separate)
    assert work["packing saves (times)"] == separate / packed
    # 12,000 + 4 x 2048 fit into a row of 20,480: two packs a group, three with the target
    longest = of("qwen3-vl-8b", "--response-tokens", 2048)["work"]
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
