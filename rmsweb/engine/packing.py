"""Packing: prompts and answers -> rows of tokens under a token budget, dealt evenly to ranks.

Purpose: an RL group (one prompt, n answers), an SFT sample (one prompt, one answer) and a prefill (prompts
alone) are all bundles of one packed row. Positions of every answer restart at its prompt's end, so n answers
cost one prompt: n(P+R) tokens become P+nR. A bundle that exceeds the budget is split into several packs that
repeat the prompt. How bundles are packed changes nothing but speed: sums over answers are the same for every
budget and every number of ranks.

Shapes: n answers, T tokens, N answer tokens of a pack, P prompt, R response. Positions have three axes (time,
height, width), as Qwen3-VL's mRoPE wants.

ours: packs are dealt by cost to the rank with the least so far; a rank with fewer packs gets dummies of zero
weight, so that every rank takes part in the same number of collectives.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rmsweb.engine.attention import Keep, PackLayout

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


Lengths = tuple[int, tuple[int, ...]]  # of a bundle: P, (R, ...)
Bin = tuple[tuple[int, tuple[int, ...]], ...]  # content of a pack: (bundle, its answers' numbers), ...


@dataclass(frozen=True, slots=True)
class Bundle:
    """A prompt and its answers, each [R] int64: the unit of packing."""

    prompt: EncodedPrompt
    responses: tuple[Tensor, ...] = ()

    @property
    def lengths(self) -> Lengths:
        """The tokens of the prompt and of each answer."""
        return len(self.prompt), tuple(map(len, self.responses))


@dataclass(frozen=True, slots=True)
class Packable:
    """A bundle that can be planned with: its lengths are known, and the rank that needs it encodes it."""

    lengths: Lengths
    encode: Callable[[], Bundle]


@dataclass(frozen=True, slots=True)
class Pack:
    """One row of bundles, on a device.

    Answer tokens are numbered in order of bundles, then answers, then tokens: N in all.
    """

    ids: Tensor  # [1, T]
    positions: Tensor  # [3, 1, T]
    layout: PackLayout
    source: Tensor  # [N] the place whose hidden state predicts each answer token
    targets: Tensor  # [N] the answer tokens
    response_lengths: tuple[int, ...]  # of all answers of the row; sum = N
    image_index: Tensor  # [image tokens] places in the row
    pixel_values: Tensor | None  # None: the row has no picture
    image_grid: Tensor | None


def _joined(parts: Iterable[Tensor | None], device: torch.device | str) -> Tensor | None:
    """Return the tensors one after another on the device, None if there is no tensor."""
    found = [part for part in parts if part is not None]
    return torch.cat(found).to(device) if found else None


def make_pack(
    bundles: Sequence[Bundle],
    device: torch.device | str = "cpu",
    keep: Keep | None = None,
) -> Pack:
    """Lay the bundles in a row, in order.

    `keep` is handed to the layout. Raises ValueError for no bundle or an empty answer.
    """
    layout = PackLayout([bundle.lengths for bundle in bundles], device, keep)
    none = torch.zeros(0, dtype=torch.long)
    ids, positions, source, targets, images, start = [], [], [none], [none], [], 0
    for bundle in bundles:
        prompt, last = bundle.prompt, start + len(bundle.prompt) - 1
        ids.append(prompt.ids)
        positions.append(prompt.positions)
        images.append(prompt.image_index + start)
        start += len(prompt)
        for response in bundle.responses:
            length = len(response)
            ids.append(response)
            positions.append(torch.arange(prompt.next_position, prompt.next_position + length).expand(3, -1))
            # the prompt's last token predicts the first one of every answer
            source += [torch.tensor([last]), torch.arange(start, start + length - 1)]
            targets.append(response)
            start += length
    return Pack(
        ids=torch.cat(ids)[None].to(device),
        positions=torch.cat(positions, 1)[:, None].to(device),
        layout=layout,
        source=torch.cat(source).to(device),
        targets=torch.cat(targets).to(device),
        response_lengths=tuple(length for _, answers in layout.bundles for length in answers),
        image_index=torch.cat(images).to(device),
        pixel_values=_joined((bundle.prompt.pixel_values for bundle in bundles), device),
        image_grid=_joined((bundle.prompt.image_grid for bundle in bundles), device),
    )


def dummy_pack(device: torch.device | str = "cpu") -> Pack:
    """Return a row of one prompt token and one answer token, for a rank that has no pack left.

    Its loss must get weight zero.
    """
    token = torch.zeros(1, dtype=torch.long)
    return make_pack([Bundle(EncodedPrompt(token, token.expand(3, 1), 1, token[:0]), (token,))], device)


def plan_packs(lengths: Sequence[Lengths], token_budget: int) -> list[Bin]:
    """Pack the answers of all bundles into bins of at most `token_budget` tokens.

    A prompt counts once in every bin that repeats it. First fit over pieces in falling order of length, so
    the plan depends on the lengths alone. A single answer that exceeds the budget together with its prompt
    gets a bin of its own. Every answer lies in exactly one bin; a bundle without answers is one piece.

    >>> plan_packs([(10, (5, 5, 5)), (3, (2,))], 20)
    [((0, (0, 1)),), ((0, (2,)), (1, (0,)))]
    """
    if token_budget < 1:
        raise ValueError(f"token budget {token_budget}: expected at least 1")
    pieces: list[tuple[int, int, tuple[int, ...]]] = []  # tokens, bundle, answers
    for number, (prompt, answers) in enumerate(lengths):
        part: tuple[int, ...] = ()
        size = prompt
        for answer, length in enumerate(answers):
            if part and size + length > token_budget:
                pieces.append((size, number, part))
                part, size = (), prompt
            part += (answer,)
            size += length
        pieces.append((size, number, part))
    bins: list[list[tuple[int, tuple[int, ...]]]] = []
    room: list[int] = []  # of each bin, in tokens
    for size, number, part in sorted(pieces, key=lambda piece: (-piece[0], *piece[1:])):
        place = next((i for i, left in enumerate(room) if left >= size), len(bins))
        if place == len(bins):
            bins.append([])
            room.append(token_budget)
        bins[place].append((number, part))
        room[place] -= size
    return [tuple(sorted(content)) for content in bins]


def lengths_in(content: Bin, lengths: Sequence[Lengths]) -> list[Lengths]:
    """Return the lengths of what a bin holds."""
    return [
        (lengths[number][0], tuple(lengths[number][1][a] for a in answers)) for number, answers in content
    ]


def bundles_in(content: Bin, items: Sequence[Packable]) -> list[Bundle]:
    """Return the bundles of a bin, each with the answers that the bin holds of it."""
    wholes = [items[number].encode() for number, _ in content]
    return [
        Bundle(whole.prompt, tuple(whole.responses[answer] for answer in answers))
        for whole, (_, answers) in zip(wholes, content, strict=True)
    ]


def cost(lengths: Sequence[Lengths]) -> float:
    """Return the relative cost of a pack.

    It is linear in tokens, plus the pairs of attention: P^2 of each prompt, R (2 P + R) of each answer.
    """
    total = 0.0
    for prompt, answers in lengths:
        pairs = prompt**2 + sum(answer * (2 * prompt + answer) for answer in answers)
        total += (prompt + sum(answers)) * LINEAR_COST + pairs
    return total


def deal_packs(costs: Sequence[float], num_ranks: int) -> list[list[int | None]]:
    """Deal packs to ranks: the dearest first, each to the rank with the least so far.

    Every rank gets equally many; None means a dummy.

    >>> deal_packs([5.0, 1.0, 3.0], 2)
    [[0, None], [2, 1]]
    """
    hands: list[list[int]] = [[] for _ in range(num_ranks)]
    for pack in sorted(range(len(costs)), key=lambda i: -costs[i]):
        min(hands, key=lambda hand: (sum(costs[i] for i in hand), len(hand))).append(pack)
    longest = max(map(len, hands))
    return [[*hand, *[None] * (longest - len(hand))] for hand in hands]
