"""Laws of the joint objective, against per-token Python loops in float64."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rmsweb.salvage import objective as o
from rmsweb.salvage.dynamics import loss_statistics
from rmsweb.salvage.gating import gate

DOUBLE = torch.float64
PAPER = o.ObjectiveConfig()
configs = st.builds(
    o.ObjectiveConfig,
    clip_low=st.sampled_from([0.1, 0.2]),
    clip_high=st.sampled_from([0.28, 0.32]),
    dual_clip=st.sampled_from([None, 3.0, 1.5]),
    salvage_weight=st.sampled_from([0.0, 0.1, 1.0]),
    kl_weight=st.sampled_from([0.0, 1e-3, 1.0]),
)


class Case:
    """A mini-batch: answers, the log-probs of the policy being updated, and the sizes M and n."""

    def __init__(
        self,
        answers: list[o.Answer],
        new: list[Tensor],
        groups: list[int],
        num_groups: int,
        num_rollouts: int,
    ) -> None:
        self.answers, self.new, self.groups = answers, new, groups
        self.num_groups, self.num_rollouts = num_groups, num_rollouts

    @property
    def num_tokens(self) -> int:
        return sum(int(answer.mask.sum()) for answer in self.answers if not answer.is_target)


@st.composite
def cases(draw: st.DrawFn, scales: tuple[float, ...] = (0.05, 1.0, 30.0)) -> Case:
    """Ragged groups of both kinds, with masks, targets and log-ratios from tiny to beyond every clamp."""
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    num_rollouts, num_groups, count = (
        draw(st.integers(1, 4)),
        draw(st.integers(1, 4)),
        draw(st.integers(1, 4)),
    )
    scale = draw(st.sampled_from(scales))

    def logprobs(near: Tensor) -> Tensor:
        return near + scale * torch.randn(near.shape, generator=random, dtype=DOUBLE)

    answers, new, groups = [], [], []
    for group in range(min(count, num_groups)):
        accepted = bool(torch.rand((), generator=random) < 0.5)
        for rollout in range(num_rollouts + 1):
            length = int(torch.randint(1, 6, (), generator=random))
            mask = torch.rand(length, generator=random) < 0.7
            mask[int(torch.randint(length, (), generator=random))] = True
            base = -torch.rand(length, generator=random, dtype=DOUBLE) * 3
            if rollout == num_rollouts:
                answers.append(o.Answer(mask=mask, accepted=accepted))
            else:
                advantage = float(torch.randn((), generator=random, dtype=DOUBLE)) if accepted else 0.0
                answers.append(
                    o.Answer(
                        mask=mask,
                        accepted=accepted,
                        advantage=advantage,
                        old=logprobs(base),
                        ref=logprobs(base),
                    )
                )
            new.append(logprobs(base))
            groups.append(group)
    return Case(answers, new, groups, num_groups, num_rollouts)


def clamp(value: float, low: float, high: float) -> float:
    return max(low, min(high, value))


def loop_loss(case: Case, config: o.ObjectiveConfig) -> float:
    """Eq. 2-3, token by token, straight from the definition."""
    total = 0.0
    for group in sorted(set(case.groups)):
        pg = kl = nll = 0.0
        accepted = False
        for answer, new, owner in zip(case.answers, case.new, case.groups, strict=True):
            if owner != group:
                continue
            accepted = answer.accepted
            tokens = [t for t in range(len(new)) if answer.mask[t]]
            if answer.old is None or answer.ref is None:
                nll += sum(-float(new[t]) for t in tokens) / len(tokens)
                continue
            pg_sum = kl_sum = 0.0
            for t in tokens:
                ratio = math.exp(clamp(float(new[t] - answer.old[t]), -20, 20))
                gain = min(
                    ratio * answer.advantage,
                    clamp(ratio, 1 - config.clip_low, 1 + config.upper_clip) * answer.advantage,
                )
                if config.dual_clip is not None and answer.advantage < 0:
                    gain = max(gain, config.dual_clip * answer.advantage)
                d = clamp(float(answer.ref[t] - new[t]), -20, 20)
                pg_sum, kl_sum = pg_sum - gain, kl_sum + clamp(math.exp(d) - d - 1, -10, 10)
            share = (
                1 / len(tokens)
                if config.aggregation == "seq-mean-token-mean"
                else case.num_rollouts * case.num_groups / case.num_tokens
            )
            pg, kl = pg + pg_sum * share / case.num_rollouts, kl + kl_sum * share / case.num_rollouts
        k = float(accepted)
        total += (k * pg + (1 - k) * config.salvage_weight * nll + config.kl_weight * kl) / case.num_groups
    return total


def value_of(case: Case, config: o.ObjectiveConfig, places: list[int] | None = None) -> float:
    return float(our_loss(case, config, places)[0].detach())


def our_loss(
    case: Case, config: o.ObjectiveConfig, places: list[int] | None = None
) -> tuple[Tensor, list[Tensor], dict[str, float]]:
    """Loss of some of the answers (all by default), the leaves that its gradient reaches, and the sums."""
    places = list(range(len(case.answers))) if places is None else places
    leaves = [case.new[place].clone().requires_grad_() for place in places]
    tokens = o.lay_out(
        [case.answers[place] for place in places],
        num_groups=case.num_groups,
        num_rollouts=case.num_rollouts,
        num_tokens=case.num_tokens if config.aggregation == "token-mean" else None,
        dtype=DOUBLE,
    )
    loss, sums = o.joint_loss(torch.cat(leaves), tokens, config)
    return loss, leaves, sums


def gradients(case: Case, config: o.ObjectiveConfig, places: list[int] | None = None) -> list[Tensor]:
    loss, leaves, _ = our_loss(case, config, places)
    return list(torch.autograd.grad(loss, leaves))


# ------------------------------------------------------------------------------------------------ the formula


@given(cases(), configs, st.sampled_from(["seq-mean-token-mean", "token-mean"]))
def test_loss_equals_the_per_token_loop(case: Case, config: o.ObjectiveConfig, aggregation: str) -> None:
    """The weighted sum over tokens is Eq. 3 averaged over groups, for every switch."""
    config = replace(config, aggregation=aggregation)
    loss, _, sums = our_loss(case, config)
    assert float(loss.detach()) == pytest.approx(loop_loss(case, config), rel=1e-9, abs=1e-9)
    assert sums["loss"] == float(loss.detach())


def worked_case() -> Case:
    """The worked case: group A accepted, group B rejected by competence, n = 2, M = 2."""
    a, b = gate([1.0, 0.3]), gate([0.3, 0.0])
    rollouts = [
        (0, a, 0, (-0.5, -1), (-0.9, -1), (-0.6, -1.2)),
        (0, a, 1, (-0.2, -0.3, -2), (-0.2, -0.4, -1.5), (-0.3, -0.3, -1.8)),
        (1, b, 0, (-1,), (-1.1,), (-0.7,)),
        (1, b, 1, (-0.4, -0.8), (-0.4, -0.8), (-0.4, -0.9)),
    ]
    answers = [
        o.Answer(
            mask=torch.ones(len(new), dtype=torch.bool),
            accepted=found.accepted,
            advantage=found.advantages[i],
            old=torch.tensor(old, dtype=DOUBLE),
            ref=torch.tensor(ref, dtype=DOUBLE),
        )
        for _, found, i, new, old, ref in rollouts
    ]
    answers.append(o.Answer(mask=torch.tensor([False, True, True, True, False]), accepted=b.accepted))
    new = [torch.tensor(row[3], dtype=DOUBLE) for row in rollouts] + [
        torch.tensor([-7.0, -2, -0.1, -0.3, -9], dtype=DOUBLE)
    ]
    return Case(answers, new, [0, 0, 1, 1, 1], 2, 2)


def test_worked_case_to_1e_9() -> None:
    """PG and KL means, NLL, both group losses and the mini-batch loss are the worked figures to 1e-9."""
    case = worked_case()
    near = {"abs": 1e-9, "rel": 0}
    sums = [our_loss(case, PAPER, [place])[2] for place in range(5)]
    assert [found["pg"] * 4 for found in sums[:2]] == pytest.approx([-0.820242209037, 0.684753968814], **near)
    kl = [0.011784085557, 0.008746725399, 0.049858807576, 0.002418709018]
    assert [found["kl"] * 4 for found in sums[:4]] == pytest.approx(kl, **near)
    assert sums[4]["nll"] * 2 == pytest.approx(0.8, **near)
    assert value_of(case, PAPER, [0, 1]) * 2 == pytest.approx(-0.067733854706, **near)
    assert value_of(case, PAPER, [2, 3, 4]) * 2 == pytest.approx(0.080026138758, **near)
    assert value_of(case, PAPER) == pytest.approx(0.006146142026, **near)
    assert loop_loss(case, PAPER) == pytest.approx(0.006146142026, **near)


def test_default_weights_and_clips_are_the_papers() -> None:
    """App. G: clip 0.2 and 0.32, lambda 0.10, beta 1e-3, sequence means of token means; dual clip off."""
    assert (PAPER.clip_low, PAPER.upper_clip, PAPER.salvage_weight, PAPER.kl_weight) == (
        0.2,
        0.32,
        0.10,
        1e-3,
    )
    assert (PAPER.dual_clip, PAPER.aggregation) == (None, "seq-mean-token-mean")
    assert (o.LOG_RATIO_CLAMP, o.KL_CLAMP, o.DUAL_CLIP) == (20.0, 10.0, 3.0)


@given(cases(), configs, st.data())
def test_gradient_does_not_depend_on_split_or_order(
    case: Case, config: o.ObjectiveConfig, data: st.DataObject
) -> None:
    """Dealing answers to packs or ranks in any order changes neither loss, gradients nor statistics."""
    owner = data.draw(st.lists(st.integers(0, 2), min_size=len(case.answers), max_size=len(case.answers)))
    order = data.draw(st.permutations(range(len(case.answers))))
    whole, leaves, whole_sums = our_loss(case, config)
    expected = torch.autograd.grad(whole, leaves)
    total, sums = 0.0, dict.fromkeys(whole_sums, 0.0)
    for pack in range(3):
        places = [place for place in order if owner[place] == pack]
        if not places:
            continue
        loss, leaves, part = our_loss(case, config, places)
        total += float(loss.detach())
        sums = {name: sums[name] + part[name] for name in sums}
        for place, gradient in zip(places, torch.autograd.grad(loss, leaves), strict=True):
            torch.testing.assert_close(gradient, expected[place], rtol=1e-12, atol=1e-15)
    assert total == pytest.approx(float(whole.detach()), rel=1e-9, abs=1e-9)
    whole_statistics = loss_statistics(whole_sums)
    assert loss_statistics(sums) == pytest.approx(whole_statistics, rel=1e-9, abs=1e-9)


@given(cases(), configs, st.sampled_from([math.nan, math.inf, -math.inf, -1e30]))
def test_padding_and_masked_places_do_not_exist(case: Case, config: o.ObjectiveConfig, junk: float) -> None:
    """Whatever masked places and padding hold, NaN too, loss and gradients are as without them."""

    def pad(values: Tensor | None) -> Tensor | None:
        return None if values is None else torch.cat([values, torch.full((2,), junk, dtype=DOUBLE)])

    masks = [torch.cat([answer.mask, torch.zeros(2, dtype=torch.bool)]) for answer in case.answers]
    answers = [
        replace(answer, mask=mask, old=pad(answer.old), ref=pad(answer.ref))
        for answer, mask in zip(case.answers, masks, strict=True)
    ]
    new = [torch.where(mask, pad(values), junk) for values, mask in zip(case.new, masks, strict=True)]
    padded = Case(answers, new, case.groups, case.num_groups, case.num_rollouts)
    assert value_of(padded, config) == pytest.approx(value_of(case, config), rel=1e-12, abs=1e-15)
    for gradient, plain, mask in zip(gradients(padded, config), gradients(case, config), masks, strict=True):
        torch.testing.assert_close(gradient[:-2], plain, rtol=0, atol=0)
        assert (gradient[~mask] == 0).all()


@given(cases(), configs)
def test_the_anchor_touches_the_action_span_only(case: Case, config: o.ObjectiveConfig) -> None:
    """The gradient on a rejected group's target is -lambda / (M |A|) on A and exactly 0 elsewhere."""
    for gradient, answer in zip(gradients(case, config), case.answers, strict=True):
        if answer.is_target:
            share = (
                0.0
                if answer.accepted
                else -config.salvage_weight / (case.num_groups * int(answer.mask.sum()))
            )
            torch.testing.assert_close(
                gradient,
                torch.zeros(len(gradient), dtype=DOUBLE).masked_fill(answer.mask, share),
                rtol=1e-12,
                atol=0,
            )


@given(cases())
def test_ratio_one_is_the_plain_policy_gradient(case: Case) -> None:
    """With new = old every token of an accepted rollout has gradient -A / (M n R)."""
    answers = [
        answer if answer.is_target else replace(answer, old=new)
        for answer, new in zip(case.answers, case.new, strict=True)
    ]
    fresh = Case(answers, case.new, case.groups, case.num_groups, case.num_rollouts)
    for gradient, answer in zip(
        gradients(fresh, o.ObjectiveConfig(kl_weight=0.0)), case.answers, strict=True
    ):
        if not answer.is_target:
            share = (
                -answer.advantage / (case.num_groups * case.num_rollouts * int(answer.mask.sum()))
                if answer.accepted
                else 0.0
            )
            torch.testing.assert_close(
                gradient,
                torch.zeros(len(gradient), dtype=DOUBLE).masked_fill(answer.mask, share),
                rtol=1e-9,
                atol=1e-15,
            )


@given(cases(), configs)
def test_ablations_are_the_reduced_formula(case: Case, config: o.ObjectiveConfig) -> None:
    """lambda = 0 drops the anchor alone, beta = 0 the KL alone; no rejected group means no anchor (DAPO)."""
    sums = our_loss(case, config)[2]
    no_anchor = value_of(case, replace(config, salvage_weight=0.0))
    no_brake = value_of(case, replace(config, kl_weight=0.0))
    assert no_anchor == pytest.approx(sums["pg"] + config.kl_weight * sums["kl"], rel=1e-9, abs=1e-9)
    assert no_brake == pytest.approx(sums["pg"] + config.salvage_weight * sums["nll"], rel=1e-9, abs=1e-9)
    places = [place for place, answer in enumerate(case.answers) if answer.accepted]
    if places:
        assert our_loss(case, config, places)[2]["nll_weight"] == 0.0


def test_a_rejected_groups_rollouts_get_the_brake_and_no_surrogate() -> None:
    """A retained rejected group has KL at full weight and no PG, even where an advantage is handed over."""
    answer = o.Answer(
        mask=torch.ones(2, dtype=torch.bool),
        accepted=False,
        advantage=5.0,
        old=torch.zeros(2),
        ref=torch.tensor([-1.0, -1.0]),
    )
    tokens = o.lay_out([answer], num_groups=4, num_rollouts=2)
    assert tokens.pg_weight.tolist() == [0.0, 0.0]
    assert tokens.kl_weight.tolist() == [1 / 16, 1 / 16]
    assert tokens.nll_weight.tolist() == [0.0, 0.0]
    loss, sums = o.joint_loss(torch.tensor([1.0, -1.0]), tokens, PAPER)  # ratios far outside the clip range
    assert (sums["pg"], sums["clipped"], sums["pg_tokens"], sums["kl_tokens"]) == (0.0, 0.0, 0.0, 2.0)
    assert float(loss) == pytest.approx(1e-3 * sums["kl"])


@given(st.integers(1, 8), st.integers(1, 5), st.integers(1, 6))
def test_one_salvage_copy_equals_n(num_rollouts: int, num_groups: int, length: int) -> None:
    """One target a group weighs as much as the n copies that a rollout-wise trainer would make of it."""
    new = -torch.arange(1, length + 1, dtype=DOUBLE)
    answer = o.Answer(mask=torch.ones(length, dtype=torch.bool), accepted=False)
    case = Case([answer], [new], [0], num_groups, num_rollouts)
    copies = sum(float(-new.mean()) / (num_groups * num_rollouts) for _ in range(num_rollouts))
    assert value_of(case, PAPER) == pytest.approx(0.10 * copies, rel=1e-12)


def test_a_short_mini_batch_keeps_the_constant_denominator() -> None:
    """A group weighs 1 / M whether its mini-batch is full or not."""
    case = worked_case()
    alone = Case(case.answers[:2], case.new[:2], [0, 0], 4, 2)
    assert value_of(alone, PAPER) == pytest.approx(-0.067733854706 / 4, abs=1e-9)


def test_the_anchor_is_weak_where_the_policy_is_sure() -> None:
    """The anchor's gradient on the logits is small for a confident target and large for an unlikely one."""

    def size(target_logit: float) -> float:
        logits = torch.tensor([target_logit, 0.0, 0.0], dtype=DOUBLE, requires_grad=True)
        tokens = o.lay_out(
            [o.Answer(mask=torch.tensor([True]), accepted=False)], num_groups=1, num_rollouts=8, dtype=DOUBLE
        )
        loss, _ = o.joint_loss(torch.log_softmax(logits, 0)[:1], tokens, PAPER)
        return float(torch.autograd.grad(loss, logits)[0].norm())

    assert size(10.0) < 1e-3 * size(-10.0)
    assert size(10.0) < size(5.0) < size(0.0) < size(-10.0)


# ------------------------------------------------------------------------------------- surrogate and KL terms


def surrogate(
    ratio: float, advantage: float, config: o.ObjectiveConfig = PAPER
) -> tuple[float, float, bool, bool]:
    """PG of one token, its gradient in log pi, and whether the clips bind."""
    new = torch.tensor([math.log(ratio)], dtype=DOUBLE, requires_grad=True)
    terms, clipped, dual = o.policy_gradient_terms(
        new, torch.zeros(1, dtype=DOUBLE), torch.tensor([advantage], dtype=DOUBLE), config
    )
    return float(terms.detach()), float(torch.autograd.grad(terms.sum(), new)[0]), bool(clipped), bool(dual)


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "gradient", "clipped"),
    [
        (1.0, 1.0, -1.0, -1.0, False),
        (1.31, 1.0, -1.31, -1.31, False),
        (1.4, 1.0, -1.32, 0.0, True),
        (0.5, 1.0, -0.5, -0.5, False),
        (0.81, -1.0, 0.81, 0.81, False),
        (0.5, -1.0, 0.8, 0.0, True),
        (1.4, -1.0, 1.4, 1.4, False),
        (50.0, -2.0, 100.0, 100.0, False),
        (1.4, 0.0, 0.0, 0.0, False),
    ],
)
def test_the_clip_stops_the_gradient_beyond_its_range(
    ratio: float, advantage: float, value: float, gradient: float, clipped: bool
) -> None:
    """Outside [0.8, 1.32] the gradient stops on the side where the gain would grow."""
    found = surrogate(ratio, advantage)
    assert found[:2] == pytest.approx((value, gradient), abs=1e-12)
    assert found[2:] == (clipped, False)


def test_the_dual_clip_bounds_the_loss_of_negative_advantages() -> None:
    """With c = 3 the loss of a negative advantage stops at 3 |A|; positive ones are as before."""
    config = replace(PAPER, dual_clip=o.DUAL_CLIP)
    assert surrogate(50.0, -2.0, config) == (6.0, 0.0, False, True)
    assert surrogate(2.9, -1.0, config)[:2] == pytest.approx((2.9, 2.9))
    assert surrogate(0.5, -1.0, config)[0] == pytest.approx(0.8)
    assert surrogate(1.4, 1.0, config) == surrogate(1.4, 1.0)


def test_the_log_ratio_is_clamped() -> None:
    """Beyond +-20 the ratio stays at exp(+-20) and has no gradient."""
    for sign, advantage in ((1, -1.0), (-1, 1.0)):
        value, gradient, _, _ = surrogate(math.exp(sign * 25), advantage)
        assert value == pytest.approx(-advantage * math.exp(sign * 20), rel=1e-12)
        assert gradient == 0.0


@given(st.floats(-40, 0), st.floats(-40, 0))
def test_k3_is_never_negative_and_zero_at_equality(new: float, ref: float) -> None:
    """k3 is in [0, 10], 0 at equality, and its gradient is 1 - exp(d), or 0 where a clamp binds."""
    leaf = torch.tensor([new], dtype=DOUBLE, requires_grad=True)
    k3, muted = o.kl_terms(leaf, torch.tensor([ref], dtype=DOUBLE))
    d, value = clamp(ref - new, -20, 20), float(k3.detach())
    assert 0 <= value <= 10
    assert value == pytest.approx(min(math.expm1(d) - d, 10), rel=1e-12)
    assert float(o.kl_terms(leaf, leaf)[0].detach()) == 0.0
    assert bool(muted) == (abs(ref - new) > 20 or math.expm1(d) - d > 10)
    expected = 0.0 if bool(muted) else -math.expm1(d)
    assert float(torch.autograd.grad(k3.sum(), leaf)[0]) == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_k3_clamps_bind_where_they_should() -> None:
    """d = 2.6 is free, d = 2.62 is cut at 10, and beyond every float k3 is 10 with gradient 0, not NaN."""
    new = torch.zeros(6, dtype=DOUBLE, requires_grad=True)
    k3, muted = o.kl_terms(new, torch.tensor([2.6, 2.62, -10.9, -11.1, 1000.0, math.inf], dtype=DOUBLE))
    assert k3.tolist() == pytest.approx([math.exp(2.6) - 3.6, 10.0, math.exp(-10.9) + 9.9, 10.0, 10.0, 10.0])
    assert muted.tolist() == [False, True, False, True, True, True]
    gradient = torch.autograd.grad(k3.sum(), new)[0].tolist()
    assert gradient == pytest.approx([1 - math.exp(2.6), 0.0, 1 - math.exp(-10.9), 0.0, 0.0, 0.0])
    assert float(o.kl_terms(torch.zeros(1), torch.full((1,), 1e-4))[0]) == pytest.approx(
        5e-9, rel=1e-2
    )  # float32 keeps it


def test_old_and_reference_get_no_gradient() -> None:
    """Only the log-probs under update are trained."""
    old, ref = (torch.zeros(2, requires_grad=True) for _ in range(2))
    answer = o.Answer(mask=torch.ones(2, dtype=torch.bool), accepted=True, advantage=1.0, old=old, ref=ref)
    new = torch.zeros(2, requires_grad=True)
    loss, sums = o.joint_loss(new, o.lay_out([answer], num_groups=1, num_rollouts=1), PAPER)
    assert float(loss.detach()) == -1.0
    loss.backward()
    assert old.grad is None
    assert ref.grad is None
    assert new.grad is not None
    assert all(type(value) is float for value in sums.values())


# ------------------------------------------------------------------------------------------------- statistics


@given(cases(), configs)
def test_statistics_are_counted_by_hand(case: Case, config: o.ObjectiveConfig) -> None:
    """Clip, muted share and ppo_kl are shares of their own tokens, KL and NLL means over groups."""
    found = loss_statistics(our_loss(case, config)[2])
    clipped, dual, pg_tokens, drift, muted, kl_tokens = 0, 0, 0, 0.0, 0, 0
    for answer, new in zip(case.answers, case.new, strict=True):
        if answer.old is None or answer.ref is None:
            continue
        for t in range(len(new)):
            if not answer.mask[t]:
                continue
            kl_tokens += 1
            drift += float(answer.old[t] - new[t])
            d = float(answer.ref[t] - new[t])
            muted += abs(d) > 20 or math.exp(clamp(d, -20, 20)) - clamp(d, -20, 20) - 1 > 10
            if answer.accepted:
                pg_tokens += 1
                ratio = math.exp(clamp(float(new[t] - answer.old[t]), -20, 20))
                bounded = clamp(ratio, 1 - config.clip_low, 1 + config.upper_clip)
                clipped += -bounded * answer.advantage > -ratio * answer.advantage
                dual += (
                    config.dual_clip is not None
                    and answer.advantage < 0
                    and max(ratio, bounded) > config.dual_clip
                )
    assert found["clip_frac"] == pytest.approx(clipped / max(pg_tokens, 1))
    assert found["dual_clip_frac"] == pytest.approx(dual / max(pg_tokens, 1))
    assert found["ppo_kl"] == pytest.approx(drift / kl_tokens, rel=1e-9, abs=1e-9)
    assert found["kl_muted_frac"] == pytest.approx(muted / kl_tokens)
    rejected = {
        group
        for answer, group in zip(case.answers, case.groups, strict=True)
        if answer.is_target and not answer.accepted
    }
    anchors = [
        float(-new[a.mask].mean())
        for a, new in zip(case.answers, case.new, strict=True)
        if a.is_target and not a.accepted
    ]
    assert found["nll"] == pytest.approx(sum(anchors) / max(len(rejected), 1), rel=1e-9)


def test_nothing_counted_gives_zeros() -> None:
    """A step without groups has statistics of 0, and an empty pack a loss of 0."""
    loss, sums = o.joint_loss(torch.zeros(0), o.lay_out([], num_groups=4, num_rollouts=8), PAPER)
    assert float(loss) == 0.0
    assert set(loss_statistics(sums).values()) == {0.0}


@pytest.mark.parametrize(
    "bad",
    [
        {"clip_low": 1.0},
        {"clip_high": -0.1},
        {"dual_clip": 1.0},
        {"salvage_weight": -1.0},
        {"kl_weight": -1.0},
    ],
)
def test_bad_settings_are_errors(bad: dict[str, float]) -> None:
    """A setting outside its range is refused with its value."""
    with pytest.raises(ValueError, match="expected"):
        o.ObjectiveConfig(**bad)
