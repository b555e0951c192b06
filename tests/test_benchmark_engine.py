"""The engine's benchmarks run, compare equal things, and print the fields that docs/engine.md reads."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
import benchmark
import benchmark_engine

SMALL = {
    "sampler": {"sizes": (30,), "response": 4, "num_prompts": 2, "n": 2},
    "update": {"sizes": (30,), "response": 4, "n": 3},
    "memory": {"sizes": (30,), "response": 4, "n": 2},
    "sft": {"shortest": 20, "longest": 60, "num_samples": 8, "response": 5},
    "step": {"size": 120, "responses": (6,), "num_groups": 2, "n": 2},
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name == "memory" else []) for name in sorted(SMALL)],
)
def test_a_line_has_its_fields(name):
    """Both sides agree on gradients or greedy answers (the benchmark raises where not), and every line says
    what was measured.
    """
    lines = list(benchmark_engine.BENCHMARKS[name](**SMALL[name], repeats=1))
    assert len(lines) == (2 if name == "sft" else 1)
    for line in lines:
        assert {
            "benchmark",
            "prompt_tokens",
            "response_tokens",
            "num_rollouts",
            "ratio",
            "token_ratio",
            "spread",
            "device",
        } <= line.keys()
        assert {"ours_s", "baseline_s"} <= line.keys() or {"ours_mib", "baseline_mib"} <= line.keys()
        assert line["benchmark"] == name
        assert line["token_ratio"] > 1


def test_the_dispatcher_knows_them():
    """benchmark.py names the engine's benchmarks without importing torch."""
    assert sorted(benchmark_engine.BENCHMARKS) == sorted(benchmark.ENGINE)


def test_sides_that_differ_are_an_error():
    """A benchmark of two different computations raises."""
    policy, parameters = benchmark_engine.build("attn")
    pack = benchmark_engine.make_pack([benchmark_engine.random_bundle(8, [3, 2])])
    one = benchmark_engine.gradients(parameters, policy.response_logprobs(pack))
    with pytest.raises(ValueError, match="differ by"):
        benchmark_engine.check_equal("x", one, [2 * gradient for gradient in one], 1e-3)


def test_pairs_reach_the_benchmark(monkeypatch, capsys):
    """`--pairs` is the number of runs a side, five where not given; below one it is a usage error."""
    monkeypatch.setitem(benchmark_engine.BENCHMARKS, "step", lambda repeats: iter([{"repeats": repeats}]))
    for flags, expected in (([], 5), (["--pairs", "2"], 2)):
        assert benchmark.main(["step", *flags]) == 0
        printed = json.loads(capsys.readouterr().out)
        assert printed["repeats"] == expected
        assert printed["wall_s"] >= 0
    with pytest.raises(SystemExit) as stop:
        benchmark.main(["step", "--pairs", "0"])
    assert stop.value.code == 2
    assert "--pairs 0: expected at least 1" in capsys.readouterr().err
