"""Laws of the statistics: each is a mean or a share that can be counted by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import level_rewards

from rmsweb.salvage import dynamics as d
from rmsweb.salvage import gating as g


@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), level_rewards), max_size=20))
def test_cells_and_shares_are_counted_by_hand(listed: list[tuple[str, list[float]]]) -> None:
    """The four cells partition each category's groups; the shares are counts over all generated groups."""
    groups = [(category, g.gate(values)) for category, values in listed]
    counts = d.cell_counts(groups)
    for category, row in counts.items():
        assert list(row) == list(g.CELLS)
        assert sum(row.values()) == sum(name == category for name, _ in listed)
    no_contrast = [g.sample_std(values) < 0.10 for _, values in listed]
    incompetent = [max(values) < 0.55 for _, values in listed]
    shares, number = d.rejection_shares(counts), max(len(listed), 1)
    assert shares["std_rejected_frac"] == sum(no_contrast) / number
    assert shares["competence_rejected_frac"] == sum(incompetent) / number
    assert (
        shares["competence_rejected_after_std_frac"]
        == sum(b and not a for a, b in zip(no_contrast, incompetent, strict=True)) / number
    )
    rejected = sum(not found.accepted for _, found in groups)
    assert (
        shares["std_rejected_frac"] + shares["competence_rejected_after_std_frac"]
    ) * number == pytest.approx(rejected)


def test_reward_statistics_are_means_over_groups() -> None:
    """Best-of-n, mean and std are means over groups, and 0 without any."""
    found = d.reward_statistics([g.gate([1.0, 0.3]), g.gate([0.0, 0.0])])
    assert found == pytest.approx({"best_of_n": 0.5, "reward_mean": 0.325, "reward_std": 0.2474873734})
    assert set(d.reward_statistics([]).values()) == {0.0}
    assert set(d.rejection_shares({}).values()) == {0.0}


@given(st.lists(st.tuples(st.floats(-9, 0), st.lists(st.floats(-9, 0), max_size=4)), max_size=6))
def test_gap_is_the_mean_over_states_that_have_a_wrong_rollout(
    groups: list[tuple[float, list[float]]],
) -> None:
    """Both parts are over the same states, so their difference is the gap."""
    found = d.preference_gap(groups)
    pairs = [(correct, sum(wrong) / len(wrong)) for correct, wrong in groups if wrong]
    assert found["gap_groups"] == len(pairs)
    if pairs:
        assert found["gap"] == pytest.approx(sum(c - w for c, w in pairs) / len(pairs), abs=1e-9)
        assert found["gap"] == pytest.approx(found["correct_logprob"] - found["wrong_logprob"], abs=1e-9)
        assert found["correct_logprob"] == pytest.approx(sum(c for c, _ in pairs) / len(pairs), abs=1e-9)


def test_a_masked_mean_ignores_what_is_masked() -> None:
    """A masked mean takes no other value in, not even NaN."""
    assert d.masked_mean(torch.tensor([1.0, math.nan, 3.0]), torch.tensor([1, 0, 1])) == 2.0


def test_log_perplexity_weighs_rollouts_and_not_tokens() -> None:
    """Every rollout counts once, however long it is; an empty one does not count."""
    assert d.log_perplexity([torch.tensor([-1.0, -3.0]), torch.tensor([-5.0]), torch.zeros(0)]) == 3.5


def test_loss_statistics_divide_by_their_own_counts() -> None:
    """Each share has the tokens or weights of its own kind below it."""
    sums = {
        "pg": 2.0,
        "pg_weight": 4.0,
        "kl": 3.0,
        "kl_weight": 12.0,
        "nll": 5.0,
        "nll_weight": 2.0,
        "pg_tokens": 40.0,
        "clipped": 10.0,
        "dual_clipped": 4.0,
        "kl_tokens": 80.0,
        "old_minus_new": -8.0,
        "kl_muted": 16.0,
    }
    assert d.loss_statistics(sums) == {
        "pg": 0.5,
        "kl": 0.25,
        "nll": 2.5,
        "clip_frac": 0.25,
        "dual_clip_frac": 0.1,
        "ppo_kl": -0.1,
        "kl_muted_frac": 0.2,
    }


def test_a_step_without_groups_has_statistics_of_zero() -> None:
    """Nothing divides by a count of 0."""
    assert set(d.loss_statistics({}).values()) == {0.0}
    assert set(d.generation_statistics([]).pop("cells")) == set()
    assert d.preference_gap([]) == {"gap": 0.0, "correct_logprob": 0.0, "wrong_logprob": 0.0, "gap_groups": 0}
    assert d.log_perplexity([]) == 0.0
