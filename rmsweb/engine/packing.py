"""Packing: prompts and answers -> rows of tokens under a token budget, dealt evenly to ranks.

Purpose: an RL group (one prompt, n answers), an SFT sample (one prompt, one answer) and a prefill (prompts
alone) are all groups of one packed row. Positions of every answer restart at its prompt's end, so n answers
cost one prompt: n(P+R) tokens become P+nR. A group that is longer than the budget is split into several packs
that repeat the prompt. The order of answers is kept track of, and how groups are packed changes nothing but
speed: sums over answers are the same for every budget and every number of ranks.

Shapes: G groups, n answers, T tokens, P prompt, R response. Positions have three axes (time, height, width)
as Qwen3-VL's mRoPE wants.

ours: packs are dealt by cost to the rank with the least so far; a rank with fewer packs gets dummies of zero
weight, so that every rank takes part in the same number of collectives.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rmsweb.engine.attention import PackLayout

# tokens at which attention costs as much as the linear layers of an 8B model (12 x hidden size, roughly)
LINEAR_COST = 24_576


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt in tokens."""

    ids: Tensor  # [P] int64
    positions: Tensor  # [3, P] int64
    next_position: int  # of the first answer token, on all three axes
    image_index: Tensor  # [image tokens] places of the image tokens in ids
    pixel_values: Tensor | None = None  # [patches, channels x time x patch x patch] float32, of all images
    image_grid: Tensor | None = None  # [images, 3] int64: time, height, width in patches

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class Group:
    """A prompt and its answers, each [R] int64."""

    prompt: EncodedPrompt
    responses: tuple[Tensor, ...] = ()

    @property
    def lengths(self) -> tuple[int, tuple[int, ...]]:
        return len(self.prompt), tuple(len(response) for response in self.responses)

    @property
    def num_tokens(self) -> int:
        prompt, responses = self.lengths
        return prompt + sum(responses)


@dataclass(frozen=True, slots=True)
class Pack:
    """One row of groups, on a device.

    Answer tokens are numbered in order of groups, then answers, then tokens: N in all.
    """

    ids: Tensor  # [1, T]
    positions: Tensor  # [3, 1, T]
    layout: PackLayout
    source: Tensor  # [N] the place whose hidden state predicts each answer token
    targets: Tensor  # [N] the answer tokens
    response_lengths: tuple[int, ...]  # of all answers of the row; sum = N
    image_index: Tensor  # [image tokens] places in the row
    pixel_values: Tensor | None = None
    image_grid: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return self.ids.shape[1]


def make_pack(
    groups: Sequence[Group],
    device: torch.device | str = "cpu",
    keep: list[tuple[Tensor, Tensor]] | None = None,
) -> Pack:
    """One row of the groups in order.

    `keep` is handed to the layout. ValueError where there is no group or an empty answer.
    """
    layout = PackLayout([group.lengths for group in groups], device, keep)
    ids, positions, source, targets, images, start = [], [], [], [], [], 0
    for group in groups:
        prompt, last = group.prompt, start + len(group.prompt) - 1
        ids.append(prompt.ids)
        positions.append(prompt.positions)
        images.append(prompt.image_index + start)
        start += len(prompt.ids)
        for response in group.responses:
            length = len(response)
            ids.append(response)
            positions.append(torch.arange(prompt.next_position, prompt.next_position + length).expand(3, -1))
            source += [torch.tensor([last]), torch.arange(start, start + length - 1)]
            targets.append(response)
            start += length
    none = torch.zeros(0, dtype=torch.long)
    pixels = [group.prompt.pixel_values for group in groups if group.prompt.pixel_values is not None]
    grids = [group.prompt.image_grid for group in groups if group.prompt.image_grid is not None]
    return Pack(
        ids=torch.cat(ids)[None].to(device),
        positions=torch.cat(positions, 1)[:, None].to(device),
        layout=layout,
        source=torch.cat([none, *source]).to(device),
        targets=torch.cat([none, *targets]).to(device),
        response_lengths=tuple(length for group in groups for length in group.lengths[1]),
        image_index=torch.cat(images).to(device),
        pixel_values=torch.cat(pixels).to(device) if pixels else None,
        image_grid=torch.cat(grids).to(device) if grids else None,
    )


Bin = tuple[tuple[int, tuple[int, ...]], ...]  # what a pack holds: (group, its answers' numbers) ...
Lengths = tuple[int, tuple[int, ...]]  # of a group: P, (R, ...)


def plan_packs(lengths: Sequence[Lengths], token_budget: int) -> list[Bin]:
    """Packs every group's answers into bins of at most `token_budget` tokens; a prompt counts once in every
    bin it is repeated in.

    First fit over pieces in falling order of length, so it is a function of the lengths alone. A single
    answer that with its prompt exceeds the budget gets a bin of its own. Every answer lies in exactly one
    bin; a group without answers is one piece.

    >>> plan_packs([(10, (5, 5, 5)), (3, (2,))], 20)
    [((0, (0, 1)),), ((0, (2,)), (1, (0,)))]
    """
    if token_budget < 1:
        raise ValueError(f"token budget {token_budget}: expected at least 1")
    pieces: list[tuple[int, int, tuple[int, ...]]] = []  # tokens, group, answers
    for number, (prompt, answers) in enumerate(lengths):
        part: list[int] = []
        size = prompt
        for answer, length in enumerate(answers):
            if part and size + length > token_budget:
                pieces.append((size, number, tuple(part)))
                part, size = [], prompt
            part.append(answer)
            size += length
        pieces.append((size, number, tuple(part)))
    bins: list[list[tuple[int, tuple[int, ...]]]] = []
    room: list[int] = []
    for size, number, part_ in sorted(pieces, key=lambda piece: (-piece[0], piece[1], piece[2])):
        place = next((i for i, left in enumerate(room) if left >= size), None)
        if place is None:
            place = len(bins)
            bins.append([])
            room.append(token_budget)
        bins[place].append((number, part_))
        room[place] -= size
    return [tuple(sorted(content)) for content in bins]


def select(groups: Sequence[Group] | Mapping[int, Group], content: Bin) -> list[Group]:
    """The groups of a bin, each with the answers that the bin holds of it."""
    return [
        Group(groups[number].prompt, tuple(groups[number].responses[answer] for answer in answers))
        for number, answers in content
    ]


def cost(lengths: Sequence[Lengths]) -> float:
    """Relative cost of a pack: linear in tokens, plus the pairs of attention (each answer against its prompt
    and itself).
    """
    total = 0.0
    for prompt, answers in lengths:
        total += (
            (prompt + sum(answers)) * LINEAR_COST
            + prompt**2
            + sum(answer * (2 * prompt + answer) for answer in answers)
        )
    return total


def deal(costs: Sequence[float], num_ranks: int) -> list[list[int | None]]:
    """Deals packs to ranks: the dearest first to the rank with the least; every rank gets equally many, None
    stands for a dummy.

    >>> deal([5.0, 1.0, 3.0], 2)
    [[0, None], [2, 1]]
    """
    hands: list[list[int | None]] = [[] for _ in range(num_ranks)]
    load = [0.0] * num_ranks
    for pack in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = min(range(num_ranks), key=lambda r: (load[r], len(hands[r]), r))
        hands[rank].append(pack)
        load[rank] += costs[pack]
    longest = max(map(len, hands), default=0)
    return [hand + [None] * (longest - len(hand)) for hand in hands]


def dummy_pack(device: torch.device | str = "cpu") -> Pack:
    """A row of one prompt token and one answer token, for a rank that has no pack left; its loss must get
    weight zero.
    """
    token = torch.zeros(1, dtype=torch.long)
    return make_pack([Group(EncodedPrompt(token, token.expand(3, 1), 1, token[:0]), (token,))], device)
