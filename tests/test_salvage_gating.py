"""Laws of the gates, the advantages, the refill and the dealing of groups."""

import math
from fractions import Fraction
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import level_rewards, rewards

from rmsweb.salvage import gating as g

flags = st.lists(st.booleans(), max_size=60)


def exact_variance(values: list[float]) -> Fraction:
    """Bessel-corrected sample variance in exact arithmetic."""
    numbers = [Fraction(value) for value in values]
    mean = sum(numbers) / len(numbers)
    return sum((number - mean) ** 2 for number in numbers) / (len(numbers) - 1)


# ------------------------------------------------------------------------------------------ gates, advantages


@given(rewards)
def test_std_is_the_bessel_corrected_one(values: list[float]) -> None:
    """sigma equals the square root of the exact sample variance with n - 1."""
    assert g.sample_std(values) == pytest.approx(math.sqrt(exact_variance(values)), rel=1e-12, abs=1e-15)
    assert g.gate(values).std == g.sample_std(values)


@given(rewards)
def test_gate_is_equation_1(values: list[float]) -> None:
    """k_g is 1[sigma >= 0.10] 1[max >= 0.55], and A is k_g (r - mean) / (sigma + 1e-6)."""
    found, std, mean = g.gate(values), g.sample_std(values), sum(values) / len(values)
    assert found.accepted == (std >= 0.10 and max(values) >= 0.55)
    expected = [(value - mean) / (std + 1e-6) for value in values] if found.accepted else [0.0] * len(values)
    assert found.advantages == pytest.approx(expected, rel=1e-9, abs=1e-9)
    if not found.accepted:
        assert set(found.advantages) == {0.0}


@given(rewards)
def test_advantages_sum_to_zero(values: list[float]) -> None:
    """Advantages of a group sum to 0 (to rounding), accepted or not."""
    assert sum(g.gate(values).advantages) == pytest.approx(0, abs=1e-9)


@given(level_rewards, st.randoms())
def test_gate_does_not_depend_on_order(values: list[float], random: Random) -> None:
    """Permuting rewards permutes advantages and changes nothing else, to the bit."""
    order = list(range(len(values)))
    random.shuffle(order)
    a, b = g.gate(values), g.gate([values[place] for place in order])
    assert b.advantages == tuple(a.advantages[place] for place in order)
    assert (a.accepted, a.std, a.mean, a.best) == (b.accepted, b.std, b.mean, b.best)


@given(
    st.floats(0, 1),
    st.integers(1, 16),
    st.sampled_from([float, np.float32, np.float64, np.float16]),
    st.sampled_from([0.0, 0.10]),
)
def test_uniform_groups_are_rejected(value: float, size: int, kind: type, min_std: float) -> None:
    """Equal rewards have sigma exactly 0 and are rejected, whatever value, float type and variant."""
    found = g.gate([kind(value)] * size, min_std=min_std, min_competent=None)
    assert found.std == 0.0
    assert not found.accepted
    assert found.cell in ("no contrast", "neither")


@given(st.lists(st.sampled_from([0.0, 0.3, 0.5, 0.549999999]), min_size=2, max_size=8))
def test_wrong_but_different_answers_are_rejected(values: list[float]) -> None:
    """A group without a competent rollout never trains by relative advantage, whatever its contrast."""
    found = g.gate(values)
    assert not found.accepted
    assert set(found.advantages) == {0.0}
    assert found.cell in ("not competent", "neither")


def test_thresholds_hold_with_equality() -> None:
    """sigma = 0.10 and a best reward of 0.55 are enough; a hair less is not."""
    assert g.gate([0.55, 0.3]).accepted
    assert not g.gate([math.nextafter(0.55, 0), 0.3]).accepted
    at = [1.0, 1.0 - 0.1 * math.sqrt(2)]
    std = g.sample_std(at)
    assert g.gate(at, min_std=std).accepted
    assert not g.gate(at, min_std=math.nextafter(std, 1)).accepted
    assert (g.MIN_STD, g.MIN_COMPETENT, g.ADVANTAGE_EPS) == (0.10, 0.55, 1e-6)
    assert [g.gate([1.0, 1.0 - gap]).accepted for gap in (0.1415, 0.1414)] == [True, False]


def test_seven_to_one_passes_and_eight_to_none_does_not() -> None:
    """App.

    H: adjacent levels, 7 to 1 among eight, give 0.3 / sqrt(8) = 0.106; 8 to 0 gives 0. Advantages 2.474850401
    and -0.353550057.
    """
    found = g.gate([0.7] * 7 + [1.0])
    assert found.std == pytest.approx(0.106066017, abs=1e-9)
    assert found.std == pytest.approx(0.3 / math.sqrt(8), abs=1e-12)
    assert found.accepted
    assert found.advantages == pytest.approx([-0.353550057] * 7 + [2.474850401], abs=1e-9)
    assert g.gate([0.7] * 8).std == 0.0


def test_the_worked_case_gives_its_advantages() -> None:
    """The worked case: sigma and advantages of groups A and B to 1e-9."""
    a, b = g.gate([1.0, 0.3]), g.gate([0.3, 0.0])
    assert a.std == pytest.approx(0.494974747, abs=1e-9)
    assert a.advantages == pytest.approx([0.707105353, -0.707105353], abs=1e-9)
    assert (a.accepted, a.cell) == (True, "accepted")
    assert b.std == pytest.approx(0.212132034, abs=1e-9)
    assert (b.accepted, b.advantages, b.cell) == (False, (0.0, 0.0), "not competent")


def test_a_single_rollout_is_rejected_and_bad_numbers_are_errors() -> None:
    """A group of one has no sigma; no reward, nan and inf are errors."""
    assert not g.gate([1.0]).accepted
    assert not g.gate([1.0], min_std=0.0).accepted
    for values in ([], [math.nan], [1.0, math.inf]):
        with pytest.raises(ValueError, match="expected at least one finite number"):
            g.gate(values)


@given(rewards)
def test_dapo_needs_no_competence(values: list[float]) -> None:
    """Without the competence gate only sigma decides; with min_std 0 any difference passes.

    The cell still tells the competence.
    """
    kept, plain = g.gate(values, min_competent=None), g.gate(values, min_std=0.0, min_competent=None)
    assert kept.accepted == (g.sample_std(values) >= 0.10)
    assert plain.accepted == (max(values) > min(values))
    assert kept.is_competent == (max(values) >= 0.55)


# ------------------------------------------------------------------------------------------ refill, selection


def test_retained_groups_at_the_papers_sizes() -> None:
    """S = 16 floor(min(D, 64) / 16) for every D in 0..200; so S is one of 0, 16, 32, 48, 64."""
    for rejected in range(201):
        expected = max(s for s in (0, 16, 32, 48, 64) if s <= rejected)
        assert g.num_retained(rejected, train_batch=64, mini_batch=16) == expected


@given(st.integers(0, 200), st.integers(1, 70), st.integers(1, 20))
def test_s_is_the_largest_multiple_of_m_within_d_and_b(
    rejected: int, train_batch: int, mini_batch: int
) -> None:
    """S is the largest multiple of M that exceeds neither D nor B."""
    s = g.num_retained(rejected, train_batch=train_batch, mini_batch=mini_batch)
    assert s % mini_batch == 0
    assert s <= min(rejected, train_batch) < s + mini_batch


@given(flags, st.integers(1, 12), st.integers(1, 6), st.booleans())
def test_every_group_ends_in_one_place(
    accepted: list[bool], train_batch: int, mini_batch: int, salvage: bool
) -> None:
    """Every generated group is accepted, dropped, retained or unused, and the first to arrive are kept."""
    found = g.select_groups(accepted, train_batch=train_batch, mini_batch=mini_batch, salvage=salvage)
    everything = found.accepted + found.dropped + found.retained + found.unused
    assert sorted(everything) == list(range(len(accepted)))
    assert found.accepted + found.dropped == tuple(place for place, k in enumerate(accepted) if k)
    assert found.retained + found.unused == tuple(place for place, k in enumerate(accepted) if not k)
    assert len(found.accepted) == min(train_batch, sum(accepted))
    rejected = len(accepted) - sum(accepted)
    assert len(found.retained) == (
        g.num_retained(rejected, train_batch=train_batch, mini_batch=mini_batch) if salvage else 0
    )


@given(st.lists(st.integers(0, 8), min_size=1, max_size=30), st.integers(1, 20), st.integers(1, 16))
def test_refill_stops_at_b_accepted_or_at_the_cap(
    arriving: list[int], train_batch: int, max_batches: int
) -> None:
    """Generation goes on exactly while fewer than B groups are accepted and the cap is not reached."""
    accepted, batches = 0, 0
    while g.needs_refill(accepted, batches, train_batch=train_batch, max_batches=max_batches):
        assert accepted < train_batch
        assert batches < max_batches
        accepted += arriving[batches % len(arriving)]
        batches += 1
    assert accepted >= train_batch or batches == max_batches


@given(flags, st.integers(1, 12), st.integers(1, 6))
def test_dealing_is_even(accepted: list[bool], train_batch: int, mini_batch: int) -> None:
    """Every selected group is dealt once, and mini-batches differ by at most 1 in size and in each kind."""
    found = g.select_groups(accepted, train_batch=train_batch, mini_batch=mini_batch)
    dealt = g.deal_mini_batches(found, mini_batch=mini_batch)
    chosen = found.accepted + found.retained
    assert sorted(place for batch in dealt for place in batch) == sorted(chosen)
    assert len(dealt) == math.ceil(len(chosen) / mini_batch)
    for kind in (chosen, found.accepted, found.retained):
        sizes = [sum(place in kind for place in batch) for batch in dealt] or [0]
        assert max(sizes) - min(sizes) <= 1
        assert max(sizes) <= mini_batch


@pytest.mark.parametrize("s", [0, 16, 32, 48, 64])
def test_a_step_of_the_papers_sizes_has_4_and_s_16th_mini_batches(s: int) -> None:
    """With 64 accepted groups and S retained ones there are 4 + S / 16 full mini-batches of 16."""
    found = g.select_groups([True] * 64 + [False] * (s + 15), train_batch=64, mini_batch=16)
    assert [len(batch) for batch in g.deal_mini_batches(found, mini_batch=16)] == [16] * (4 + s // 16)


def test_a_short_step_has_as_few_mini_batches_as_it_can() -> None:
    """At the cap: accepted alone, salvage alone, or nothing at all (no mini-batch: the step is skipped)."""

    def sizes(accepted: int, rejected: int) -> list[int]:
        found = g.select_groups([True] * accepted + [False] * rejected, train_batch=8, mini_batch=4)
        return [len(batch) for batch in g.deal_mini_batches(found, mini_batch=4)]

    assert sizes(5, 3) == [3, 2]
    assert sizes(0, 9) == [4, 4]
    assert sizes(0, 3) == []
