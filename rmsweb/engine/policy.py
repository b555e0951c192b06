"""The policy: a Qwen3-VL with its tokenizer, from messages to tokens and from packs to log-probabilities.

Purpose: App. F/G train Qwen3-VL-Instruct with the chat template qwen3_vl_nothink: no default system message,
no thinking block, the answer ends with <|im_end|>. This room owns that template, mRoPE positions, and the
memory-lean log-probabilities of answers.

Shapes: T tokens of a pack, N answer tokens of a pack, P prompt, R response, V vocabulary, D hidden.

1. ours: page text and task are tokenized as plain text; `<|im_end|>` or `<|image_pad|>` in them never becomes
   a control token.
2. ours: image features are put in by place, not by token id, so that a sampled <|image_pad|> is one more
   ordinary token.
3. ours: the newline after the answer's <|im_end|> is not part of the answer; serving stops at <|im_end|>.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from transformers import AutoTokenizer, GenerationConfig, Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.utils import logging as transformers_logging

from rmsweb.engine.attention import use_segment_attention
from rmsweb.engine.lora import merged_state_dict
from rmsweb.engine.packing import EncodedPrompt, Pack
from rmsweb.engine.patches import PixelFormat, load_pixels, patchify
from rmsweb.jsonl import write_json
from rmsweb.prompt import (
    PromptConfig,
    differing_fields,
    image_tokens,
    load_prompt_config,
)
from rmsweb.records import Image, Message

T = TypeVar("T")
LOGIT_CHUNK = 1 << 24  # logits held at a time (float32: 64 MiB); above it they are recomputed in backward
IM_START, IM_END, VISION_START, VISION_END, IMAGE_PAD = CONTROL = (
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
)


def token_logprobs(hidden: Tensor, head: nn.Linear, targets: Tensor) -> Tensor:
    """Return log softmax(head(hidden)) at the targets: hidden [N, D], targets [N] -> [N] float32.

    [N, V] never exists for large N x V: the head is applied in chunks, which are recomputed in backward
    (Sec. 5: long prompts, V = 151,936).
    """

    def chunk(part: Tensor, wanted: Tensor) -> Tensor:
        return -cross_entropy(head(part).float(), wanted, reduction="none")

    rows = max(1, LOGIT_CHUNK // head.out_features)
    if len(hidden) <= rows:
        return chunk(hidden, targets)
    pairs = zip(hidden.split(rows), targets.split(rows), strict=True)
    return torch.cat([checkpoint(chunk, part, wanted, use_reentrant=False) for part, wanted in pairs])


class Scorer(nn.Module):
    """The forward pass of training as one module, so that FSDP can hook it."""

    def __init__(self, model: Qwen3VLForConditionalGeneration) -> None:
        super().__init__()
        self.model = model

    def hidden(self, pack: Pack) -> Tensor:
        """Return the final hidden states of a row, [T, D]."""
        backbone = self.model.model
        embeddings = backbone.language_model.embed_tokens(pack.ids)  # [1, T, D]
        visual: dict[str, Any] = {}
        if pack.pixel_values is not None:
            pixels = pack.pixel_values.to(embeddings.dtype)
            seen = backbone.visual(pixels, grid_thw=pack.image_grid, return_dict=True)
            place = torch.zeros_like(pack.ids, dtype=torch.bool)
            place[0, pack.image_index] = True
            embeddings = embeddings.masked_scatter(place[..., None], seen.pooler_output.to(embeddings.dtype))
            visual = {"visual_pos_masks": place, "deepstack_visual_embeds": list(seen.deepstack_features)}
        return backbone.language_model(
            inputs_embeds=embeddings,
            position_ids=pack.positions,
            layout=pack.layout,
            use_cache=False,
            **visual,
        ).last_hidden_state[0]

    def forward(self, pack: Pack) -> Tensor:
        """Return the log-probabilities [N] float32 of a pack's answer tokens."""
        return token_logprobs(self.hidden(pack)[pack.source], self.model.lm_head, pack.targets)


def recompute_layers(model: Qwen3VLForConditionalGeneration) -> None:
    """Let every decoder layer recompute itself in backward; it does so in training mode."""
    text = model.model.language_model
    if hasattr(text, "activation_checkpointing_enable"):  # the name since transformers 5.24
        text.activation_checkpointing_enable()
        text.disable_input_require_grads()  # switched on above; recomputing without reentrance needs none
    else:
        text.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


class PolicyModel:
    """A Qwen3-VL checkpoint ready for the engine.

    Attributes:
        model: Qwen3VLForConditionalGeneration with segment attention in its text model.
        text: its text model.
        scorer: the module that training calls.
        prompt_config: the given one, else the checkpoint's, else the default.
        by_layer: whether ranks that share the weights gather them a layer at a time while they sample.
    """

    def __init__(
        self,
        model: Qwen3VLForConditionalGeneration,
        tokenizer: Any,
        *,
        prompt_config: PromptConfig | None = None,
        pixel_format: PixelFormat | None = None,
        device: torch.device | str = "cpu",
        name: str = "",
    ) -> None:
        use_segment_attention(model.model.language_model.config)
        self.model, self.text = model.to(device).eval(), model.model.language_model
        self.scorer, self.by_layer = Scorer(self.model), False
        self.tokenizer, self.prompt_config, self.name = tokenizer, prompt_config or PromptConfig(), name
        self.device, self.pixel_format = torch.device(device), pixel_format or PixelFormat()
        self._control: dict[str, list[int]] = {}
        for token in CONTROL:
            number = tokenizer.convert_tokens_to_ids(token)
            if number is None or number == tokenizer.unk_token_id:
                raise ValueError(f"tokenizer of {name or 'the model'}: lacks the control token {token}")
            self._control[token] = [int(number)]

    @property
    def end_id(self) -> int:
        """The token that ends an answer."""
        return self._control[IM_END][0]

    @classmethod
    def load(
        cls,
        source: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        prompt_config: PromptConfig | None = None,
    ) -> "PolicyModel":
        """Load a checkpoint folder, or a model by its hub name, whatever dtype it is stored in.

        On the device "meta" it comes without weights. The folder's prompt_config.json must equal
        `prompt_config` where both are given: ValueError naming the field that differs. Raises
        FileNotFoundError for a checkpoint that is not there, ValueError for missing weights.
        """
        folder = Path(source)
        if (folder.exists() or len(folder.parts) != 2) and not (folder / "config.json").is_file():
            raise FileNotFoundError(f"{folder}: no checkpoint there (config.json is missing)")
        try:
            model = _load_model(source, dtype, empty=str(device) == "meta")
        except OSError as error:
            reason = str(error).splitlines()[0]
            raise FileNotFoundError(
                f"{source}: neither a checkpoint folder nor a model that can be fetched ({reason})"
            ) from None
        own = folder / "prompt_config.json"
        stored = load_prompt_config(own) if own.is_file() else prompt_config
        if stored and prompt_config and stored != prompt_config:
            fields = ", ".join(differing_fields(stored, prompt_config))
            raise ValueError(f"{own}: differs from the given prompt config in {fields}")
        return cls(
            model,
            AutoTokenizer.from_pretrained(source),
            prompt_config=stored,
            pixel_format=PixelFormat.read(folder),
            device=device,
            name=str(source),
        )

    # ---------------------------------------------------------------------------------------- text and tokens

    def count_tokens(self, text: str) -> int:
        """Return the number of tokens of a plain text."""
        return len(self._tokens(text))

    def encode_response(self, text: str) -> Tensor:
        """Return the tokens [R] of an answer; the last one is <|im_end|>."""
        return torch.tensor([*self._tokens(text), self.end_id])

    def decode(self, ids: Sequence[int] | Tensor) -> str:
        """Return the text of an answer without its final <|im_end|>; other control tokens stay visible."""
        numbers = [int(number) for number in ids]
        if numbers and numbers[-1] == self.end_id:
            numbers.pop()
        return self.tokenizer.decode(numbers, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def token_span(self, text: str, span: tuple[int, int]) -> tuple[int, int]:
        """Turn a span of characters of an answer into the span of the tokens that overlap it.

        The tokens are those of `encode_response(text)`. Raises ValueError where no token overlaps the span.
        """
        offsets = self._encode(text, return_offsets_mapping=True)["offset_mapping"]
        inside = [
            number for number, (start, stop) in enumerate(offsets) if start < span[1] and stop > span[0]
        ]
        if not inside:
            raise ValueError(f"no token overlaps characters {span} of {text!r}")
        return inside[0], inside[-1] + 1

    def _encode(self, text: str, **options: bool) -> Any:
        return self.tokenizer(text, add_special_tokens=False, split_special_tokens=True, **options)

    def _tokens(self, text: str) -> list[int]:
        return self._encode(text)["input_ids"]

    def encode_prompt(self, messages: Sequence[Message], image_root: Path) -> EncodedPrompt:
        """Return the tokens of the chat template up to the answer's first place.

        Pictures are read relative to `image_root`. Raises FileNotFoundError for a picture that is not there,
        ValueError for one that cannot be read.
        """
        config = self.prompt_config
        return self._assemble(self._pieces(messages, lambda image: load_pixels(image, image_root, config)))

    def prompt_length(self, messages: Sequence[Message]) -> int:
        """Return the number of tokens of `encode_prompt(messages)` without reading the pictures.

        Their recorded sizes are enough.
        """
        config = self.prompt_config
        pieces = self._pieces(messages, lambda image: [0] * image_tokens(image.width, image.height, config))
        return sum(map(len, pieces))

    def _pieces(self, messages: Sequence[Message], picture: Callable[[Image], T]) -> Iterator[list[int] | T]:
        """Apply the chat template: tokens of texts and control tokens, and pictures.

        Neighbouring texts are joined before they are tokenized, because a token may cross their border.
        """
        parts: list[str | list[int] | T] = []
        for message in messages:
            parts += [self._control[IM_START], message.role + "\n"]
            for part in message.parts:
                if isinstance(part, Image):
                    parts += [self._control[VISION_START], picture(part), self._control[VISION_END]]
                else:
                    parts.append(part.text)
            parts += [self._control[IM_END], "\n"]
        parts += [self._control[IM_START], "assistant\n"]
        for kind, run in groupby(parts, type):
            if kind is str:
                yield self._tokens("".join(map(str, run)))
            else:
                yield from (part for part in run if not isinstance(part, str))

    def _assemble(self, pieces: Iterable[list[int] | np.ndarray]) -> EncodedPrompt:
        """Lay out tokens, positions (mRoPE) and patches.

        A picture's tokens count rows and columns from the next free position; the text behind it goes on at
        the larger of its sides.
        """
        ids: list[int] = []
        positions, patches, grids, images = [], [], [], [torch.zeros(0, dtype=torch.long)]
        next_position = 0
        for piece in pieces:
            if isinstance(piece, list):
                place, size = torch.arange(len(piece)).expand(3, -1), len(piece)
            else:
                merge = self.pixel_format.merge_size
                rows, columns = (side // (self.pixel_format.patch_size * merge) for side in piece.shape[:2])
                row, column = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).T
                place, size = torch.stack([torch.zeros_like(row), row, column]), max(rows, columns)
                patches.append(patchify(piece, self.pixel_format))
                grids.append(torch.tensor([[1, rows * merge, columns * merge]]))
                images.append(torch.arange(len(ids), len(ids) + len(row)))
                piece = self._control[IMAGE_PAD] * len(row)
            ids += piece
            positions.append(place + next_position)
            next_position += size
        return EncodedPrompt(
            ids=torch.tensor(ids),
            positions=torch.cat(positions, 1),
            next_position=next_position,
            image_index=torch.cat(images),
            pixel_values=torch.cat(patches) if patches else None,
            image_grid=torch.cat(grids) if grids else None,
        )

    # --------------------------------------------------------------------------------------- scores and files

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Compute without gradient and without dropout; the mode of before comes back."""
        training = self.model.training
        self.model.eval()
        with torch.no_grad():
            yield
        self.model.train(training)

    def response_logprobs(self, pack: Pack) -> Tensor:
        """Return the log-probabilities [N] float32 of a pack's answer tokens, differentiable."""
        return self.scorer(pack)

    def save(self, folder: Path, state: dict[str, Tensor] | None = None) -> None:
        """Write a standard checkpoint that `from_pretrained` and other servers load.

        It holds the weights with adapters merged, the tokenizer, pixel bounds and prompt config. Files of the
        same names are replaced. `state` is the full state dict where the model itself is sharded.
        """
        state = dict(merged_state_dict(self.model) if state is None else state)
        if self.model.config.tie_word_embeddings:
            state.pop("lm_head.weight", None)
        folder.mkdir(parents=True, exist_ok=True)
        transformers_logging.disable_progress_bar()
        self.model.save_pretrained(folder, state_dict=state)
        self.tokenizer.save_pretrained(folder)
        self.pixel_format.write(folder, self.prompt_config)
        write_json(folder / "prompt_config.json", self.prompt_config)


def _load_model(source: str | Path, dtype: torch.dtype, *, empty: bool) -> Qwen3VLForConditionalGeneration:
    """Load a model in main memory, or make it `empty`, on the meta device.

    Raises OSError for a source that cannot be read, ValueError for weights that do not fit.
    """
    transformers_logging.disable_progress_bar()
    if empty:
        config = Qwen3VLConfig.from_pretrained(source)
        with torch.device("meta"):
            model = Qwen3VLForConditionalGeneration._from_config(
                config, dtype=dtype, attn_implementation="sdpa"
            )
        with suppress(OSError):  # a checkpoint need not have one
            model.generation_config = GenerationConfig.from_pretrained(source)
        return model
    model, info = Qwen3VLForConditionalGeneration.from_pretrained(
        source, dtype=dtype, attn_implementation="sdpa", output_loading_info=True
    )
    check_weights(source, {*info["missing_keys"], *info["unexpected_keys"]})
    return model


def check_weights(source: str | Path, wrong: Collection[str]) -> None:
    """Raise ValueError where tensors of a checkpoint are missing or too many."""
    if wrong:
        names = ", ".join(sorted(wrong)[:3])
        raise ValueError(
            f"{source}: the weights do not fit a Qwen3-VL: {names} missing or unexpected "
            f"({len(wrong)} in all)"
        )
