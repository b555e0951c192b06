"""The policy: a Qwen3-VL with its tokenizer, from messages to tokens and from packs to log-probabilities.

Purpose: App. F/G train Qwen3-VL-Instruct with the chat template qwen3_vl_nothink: no default system message,
no thinking block, the answer ends with <|im_end|>. This room owns that template, the picture's way into
patches (without torchvision), mRoPE positions, and the memory-lean log-probabilities of answers.

Shapes: T tokens of a pack, N answer tokens of a pack, P prompt, R response, V vocabulary, D hidden.

1. ours: page text and task are tokenized as plain text; `<|im_end|>` or `<|image_pad|>` in them never becomes
   a control token.
2. ours: image features are put in by place, not by token id, so that a sampled <|image_pad|> is one more
   ordinary token.
3. ours: the newline after the answer's <|im_end|> is not part of the answer; serving stops at <|im_end|>.
"""

import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import PIL.Image
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from transformers import AutoTokenizer, GenerationConfig, Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.utils import logging as transformers_logging

from rmsweb.engine.attention import use_read_layer, use_segment_attention
from rmsweb.engine.lora import merged_state_dict
from rmsweb.engine.packing import EncodedPrompt, Pack
from rmsweb.jsonl import write_json
from rmsweb.pictures import load_picture
from rmsweb.prompt import PromptConfig, differing_fields, image_size, image_tokens, load_prompt_config
from rmsweb.records import Image, Message

T = TypeVar("T")
LOGIT_CHUNK = 1 << 24  # logits held at a time (float32: 64 MiB); above it they are recomputed in backward
IMAGE_CACHE_BYTES = 1 << 28  # resized pictures kept, as bytes
IM_START, IM_END, VISION_START, VISION_END, IMAGE_PAD = (
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
)


@dataclass(frozen=True, slots=True)
class PixelFormat:
    """How a picture becomes patches: the numbers of preprocessor_config.json."""

    patch: int = 16
    time: int = 2  # a still picture is repeated this often
    merge: int = 2  # patches a side of one image token
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)


def token_logprobs(hidden: Tensor, head: nn.Linear, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probabilities [N] float32 of `targets` [N] under softmax(head(hidden) / temperature); hidden [N,
    D].

    [N, V] never exists for large N x V: the head is applied in chunks and recomputed in backward (Sec. 5's
    long prompts, 151,936 tokens).
    """

    def chunk(part: Tensor, wanted: Tensor) -> Tensor:
        logits = head(part).float()
        logits = logits / temperature if temperature != 1.0 else logits
        return -cross_entropy(logits, wanted, reduction="none")

    rows = max(1, LOGIT_CHUNK // head.out_features)
    if len(hidden) <= rows:
        return chunk(hidden, targets)
    pairs = zip(hidden.split(rows), targets.split(rows), strict=True)
    return torch.cat([checkpoint(chunk, part, wanted, use_reentrant=False) for part, wanted in pairs])


class Scorer(nn.Module):
    """The forward pass of training as one module, so that FSDP can hook it: pack -> log-probabilities of its
    answer tokens.
    """

    def __init__(self, model: Qwen3VLForConditionalGeneration) -> None:
        super().__init__()
        self.model = model

    def hidden(self, pack: Pack) -> Tensor:
        """Final hidden states [T, D] of a row, at the places that its layout reads (a prompt's last token,
        and answers).
        """
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

    def forward(self, pack: Pack, temperature: float = 1.0) -> Tensor:
        return token_logprobs(self.hidden(pack)[pack.source], self.model.lm_head, pack.targets, temperature)


def checkpoint_layers(model: Qwen3VLForConditionalGeneration) -> None:
    """Makes every decoder layer recompute itself in backward; call once."""
    for layer in model.model.language_model.layers:
        plain = layer.forward

        def recomputed(*args: Any, plain: Any = plain, **kwargs: Any) -> Tensor:
            if not torch.is_grad_enabled():
                return plain(*args, **kwargs)
            return checkpoint(partial(plain, **kwargs), *args, use_reentrant=False)

        layer.forward = recomputed


class PolicyModel:
    """A Qwen3-VL checkpoint ready for the engine.

    Attributes: model (Qwen3VLForConditionalGeneration with segment attention in its text model), scorer (the
    module that training calls), tokenizer, prompt_config (None where the checkpoint says nothing and none was
    given), pixel_format, device, name.
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
        use_read_layer(model.model.language_model)
        self.model, self.tokenizer, self.prompt_config, self.name = (
            model.to(device).eval(),
            tokenizer,
            prompt_config,
            name,
        )
        self.scorer = Scorer(self.model)
        self.device, self.pixel_format = torch.device(device), pixel_format or PixelFormat()
        self._pictures: OrderedDict[tuple[object, ...], np.ndarray] = OrderedDict()
        self._control = {}
        for token in (IM_START, IM_END, VISION_START, VISION_END, IMAGE_PAD):
            number = tokenizer.convert_tokens_to_ids(token)
            if number is None or number == tokenizer.unk_token_id:
                raise ValueError(f"tokenizer of {name or 'the model'}: lacks the control token {token}")
            self._control[token] = int(number)

    @property
    def end_id(self) -> int:
        """The token that ends an answer."""
        return self._control[IM_END]

    @classmethod
    def load(
        cls,
        source: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        prompt_config: PromptConfig | None = None,
    ) -> "PolicyModel":
        """Loads a checkpoint folder, or a model by its hub name, whatever dtype it is stored in; on the
        device "meta" without its weights.

        The folder's prompt_config.json must equal `prompt_config` where both are there: ValueError naming the
        field that differs. FileNotFoundError where there is no such checkpoint, ValueError where weights are
        missing.
        """
        folder = Path(source)
        if (folder.exists() or len(folder.parts) != 2) and not (folder / "config.json").is_file():
            raise FileNotFoundError(f"{folder}: no checkpoint there (config.json is missing)")
        transformers_logging.disable_progress_bar()
        try:
            if str(device) == "meta":
                with torch.device("meta"):
                    model = Qwen3VLForConditionalGeneration._from_config(
                        Qwen3VLConfig.from_pretrained(source), dtype=dtype, attn_implementation="sdpa"
                    )
                with suppress(OSError):  # a checkpoint need not have one
                    model.generation_config = GenerationConfig.from_pretrained(source)
                wrong = []
            else:
                model, info = Qwen3VLForConditionalGeneration.from_pretrained(
                    source, dtype=dtype, attn_implementation="sdpa", output_loading_info=True
                )
                wrong = [*info["missing_keys"], *info["unexpected_keys"]]
        except OSError as error:
            raise FileNotFoundError(
                f"{source}: neither a checkpoint folder nor a model that can be fetched ({str(error).splitlines()[0]})"
            ) from None
        if wrong:
            raise ValueError(
                f"{source}: the weights do not fit a Qwen3-VL: {', '.join(sorted(wrong)[:3])} missing or unexpected ({len(wrong)} in all)"
            )
        own = folder / "prompt_config.json"
        stored = load_prompt_config(own) if own.is_file() else None
        if stored is not None and prompt_config is not None and stored != prompt_config:
            raise ValueError(
                f"{own}: differs from the given prompt config in {', '.join(differing_fields(stored, prompt_config))}"
            )
        return cls(
            model,
            AutoTokenizer.from_pretrained(source),
            prompt_config=prompt_config or stored,
            pixel_format=_read_pixel_format(folder),
            device=device,
            name=str(source),
        )

    # ---------------------------------------------------------------------------------------- text and tokens

    def count_tokens(self, text: str) -> int:
        """Number of tokens of a plain text."""
        return len(self._tokens(text))

    def encode_response(self, text: str) -> Tensor:
        """Answer text -> [R] tokens, ending with <|im_end|>."""
        return torch.tensor([*self._tokens(text), self.end_id])

    def decode(self, ids: Sequence[int] | Tensor) -> str:
        """Tokens -> answer text, without a final <|im_end|>. Other control tokens stay visible."""
        numbers = [int(number) for number in ids]
        if numbers and numbers[-1] == self.end_id:
            numbers.pop()
        return self.tokenizer.decode(numbers, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def token_span(self, text: str, span: tuple[int, int]) -> tuple[int, int]:
        """Character span of an answer -> span of the tokens of `encode_response(text)` that overlap it;
        ValueError where none does.
        """
        offsets = self.tokenizer(
            text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True
        )["offset_mapping"]
        inside = [
            number for number, (start, stop) in enumerate(offsets) if start < span[1] and stop > span[0]
        ]
        if not inside:
            raise ValueError(f"no token overlaps characters {span} of {text!r}")
        return inside[0], inside[-1] + 1

    def _tokens(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]

    def encode_prompt(self, messages: Sequence[Message], image_root: Path) -> EncodedPrompt:
        """Messages -> tokens of the chat template up to the answer's first place; pictures are read relative
        to `image_root`.

        Raises FileNotFoundError for a picture that is not there, ValueError for one that cannot be read.
        """
        return self._assemble(self._pieces(messages, lambda image: self._picture(image, image_root)))

    def prompt_length(self, messages: Sequence[Message]) -> int:
        """Number of tokens of `encode_prompt(messages)`, from the pictures' recorded sizes, without reading
        them.
        """
        config = self.prompt_config or PromptConfig()
        pieces = self._pieces(messages, lambda image: [0] * image_tokens(image.width, image.height, config))
        return sum(
            1
            if isinstance(piece, int)
            else len(self._tokens(piece))
            if isinstance(piece, str)
            else len(piece)
            for piece in pieces
        )

    def _pieces(self, messages: Sequence[Message], picture: Callable[[Image], T]) -> list[str | int | T]:
        """The chat template: texts between control tokens (joined as far as they go), control tokens, and
        pictures.
        """
        pieces: list[str | int | T] = []

        def write(text: str) -> None:
            if pieces and isinstance(before := pieces[-1], str):
                pieces[-1] = before + text
            else:
                pieces.append(text)

        for message in messages:
            pieces.append(self._control[IM_START])
            write(message.role + "\n")
            for part in message.parts:
                if isinstance(part, Image):
                    pieces += [self._control[VISION_START], picture(part), self._control[VISION_END]]
                else:
                    write(part.text)
            pieces.append(self._control[IM_END])
            write("\n")
        pieces.append(self._control[IM_START])
        write("assistant\n")
        return pieces

    def _assemble(self, pieces: Sequence[str | int | np.ndarray]) -> EncodedPrompt:
        """Tokenizes the pieces and lays out positions (mRoPE) and patches."""
        ids: list[int] = []
        positions, patches, grids, images = [], [], [], []
        next_position = 0
        for piece in pieces:
            if not isinstance(piece, np.ndarray):
                numbers = [piece] if isinstance(piece, int) else self._tokens(piece)
                ids.extend(numbers)
                positions.append(torch.arange(next_position, next_position + len(numbers)).expand(3, -1))
                next_position += len(numbers)
                continue
            merge = self.pixel_format.merge
            rows, columns = (side // (self.pixel_format.patch * merge) for side in piece.shape[:2])
            images.append(torch.arange(len(ids), len(ids) + rows * columns))
            ids.extend([self._control[IMAGE_PAD]] * (rows * columns))
            row, column = (
                axis.reshape(-1)
                for axis in torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
            )
            positions.append(torch.stack([torch.zeros_like(row), row, column]) + next_position)
            next_position += max(rows, columns)
            patches.append(patchify(piece, self.pixel_format))
            grids.append(torch.tensor([[1, rows * merge, columns * merge]]))
        none = torch.zeros(0, dtype=torch.long)
        return EncodedPrompt(
            ids=torch.tensor(ids),
            positions=torch.cat(positions, 1),
            next_position=next_position,
            image_index=torch.cat([none, *images]),
            pixel_values=torch.cat(patches) if patches else None,
            image_grid=torch.cat(grids) if grids else None,
        )

    def _picture(self, image: Image, root: Path) -> np.ndarray:
        """The picture in the size the model sees, [height, width, 3] uint8; recently used ones are
        remembered.
        """
        config = self.prompt_config or PromptConfig()
        key = (str(root / image.path), image.boxes, config.image_min_pixels, config.image_max_pixels)
        if key in self._pictures:
            self._pictures.move_to_end(key)
            return self._pictures[key]
        picture = load_picture(image, root)
        size = image_size(picture.width, picture.height, config)
        pixels = np.asarray(picture.resize(size, PIL.Image.Resampling.BICUBIC))
        self._pictures[key] = pixels
        while (
            len(self._pictures) > 1
            and sum(kept.nbytes for kept in self._pictures.values()) > IMAGE_CACHE_BYTES
        ):
            self._pictures.popitem(last=False)
        return pixels

    # --------------------------------------------------------------------------------------- scores and files

    def response_logprobs(self, pack: Pack, temperature: float = 1.0) -> Tensor:
        """Log-probabilities [N] float32 of a pack's answer tokens, in the pack's order, differentiable."""
        return self.scorer(pack, temperature)

    def save(
        self, folder: Path, dtype: torch.dtype | None = None, state: dict[str, Tensor] | None = None
    ) -> None:
        """Writes a standard checkpoint that `from_pretrained` and other servers load: adapters merged,
        tokenizer, pixel bounds, prompt config.

        Args:
            folder: made if needed; files of the same names are replaced.
            dtype: stored dtype of the weights; None keeps them.
            state: full state dict where the model itself is sharded; None takes the model's.
        """
        state = dict(merged_state_dict(self.model) if state is None else state)
        if self.model.config.tie_word_embeddings:
            state.pop("lm_head.weight", None)
        if dtype is not None:
            state = {
                name: tensor.to(dtype) if tensor.is_floating_point() else tensor
                for name, tensor in state.items()
            }
        folder.mkdir(parents=True, exist_ok=True)
        transformers_logging.disable_progress_bar()
        self.model.save_pretrained(folder, state_dict=state)
        self.tokenizer.save_pretrained(folder)
        form, config = self.pixel_format, self.prompt_config or PromptConfig()
        (folder / "preprocessor_config.json").write_text(
            json.dumps(
                {
                    "image_processor_type": "Qwen2VLImageProcessor",
                    "patch_size": form.patch,
                    "temporal_patch_size": form.time,
                    "merge_size": form.merge,
                    "image_mean": form.mean,
                    "image_std": form.std,
                    "size": {
                        "shortest_edge": config.image_min_pixels,
                        "longest_edge": config.image_max_pixels,
                    },
                },
                indent=1,
            )
            + "\n",
            encoding="utf-8",
        )
        if self.prompt_config is not None:
            write_json(folder / "prompt_config.json", self.prompt_config)


def _read_pixel_format(folder: Path) -> PixelFormat:
    path = folder / "preprocessor_config.json"
    if not path.is_file():
        return PixelFormat()
    data = json.loads(path.read_text(encoding="utf-8"))
    plain = PixelFormat()
    return PixelFormat(
        patch=data.get("patch_size", plain.patch),
        time=data.get("temporal_patch_size", plain.time),
        merge=data.get("merge_size", plain.merge),
        mean=tuple(data.get("image_mean", plain.mean)),
        std=tuple(data.get("image_std", plain.std)),
    )


def patchify(pixels: np.ndarray, form: PixelFormat) -> Tensor:
    """Picture [height, width, 3] uint8 -> [patches, 3 x time x patch x patch] float32, patches in the order
    of the 2x2 merger.
    """
    height, width = pixels.shape[:2]
    scaled = (pixels.astype(np.float32) / 255 - np.asarray(form.mean, np.float32)) / np.asarray(
        form.std, np.float32
    )
    side, merge = form.patch, form.merge
    cells = scaled.reshape(height // (side * merge), merge, side, width // (side * merge), merge, side, 3)
    cells = cells.transpose(
        0, 3, 1, 4, 6, 2, 5
    )  # row, column of tokens; row, column in the token; channel; row, column in the patch
    frames = np.repeat(cells[:, :, :, :, :, None], form.time, axis=5)
    return torch.from_numpy(np.ascontiguousarray(frames.reshape(height * width // side**2, -1)))
