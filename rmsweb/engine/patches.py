"""Patches: a picture as Qwen3-VL's vision tower takes it, without torchvision.

Purpose: the model sees a picture as rows of patches (16 x 16 pixels); a square of 2 x 2 patches becomes one
token. The numbers of this format travel with the checkpoint, in preprocessor_config.json, so that another
server sees the same picture.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path

import numpy as np
import PIL.Image
import torch
from torch import Tensor

from rmsweb.jsonl import write_json
from rmsweb.pictures import load_picture
from rmsweb.prompt import PromptConfig, image_size
from rmsweb.records import Image

FILE = "preprocessor_config.json"


@dataclass(frozen=True, slots=True)
class PixelFormat:
    """How a picture becomes patches; the fields have the names of the file."""

    patch_size: int = 16  # pixels a side
    temporal_patch_size: int = 2  # a still picture is repeated this often
    merge_size: int = 2  # patches a side of one image token
    image_mean: Sequence[float] = (0.5, 0.5, 0.5)
    image_std: Sequence[float] = (0.5, 0.5, 0.5)

    @classmethod
    def read(cls, folder: Path) -> "PixelFormat":
        """Return the format of a checkpoint folder; what its file does not say has the default."""
        path = folder / FILE
        data = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        return cls(**{field.name: data[field.name] for field in fields(cls) if field.name in data})

    def write(self, folder: Path, config: PromptConfig) -> None:
        """Write the file, with the prompt config's bounds of a picture's area."""
        size = {"shortest_edge": config.image_min_pixels, "longest_edge": config.image_max_pixels}
        kind = {"image_processor_type": "Qwen2VLImageProcessor"}
        write_json(folder / FILE, {**kind, **asdict(self), "size": size})


@lru_cache(maxsize=256)  # 190 MB at the paper's 640 x 384 pixels
def load_pixels(image: Image, root: Path, config: PromptConfig) -> np.ndarray:
    """Return the picture in the size that the model sees, [height, width, 3] uint8.

    `root` is the folder that the image's path is relative to. Raises FileNotFoundError for a picture that is
    not there, ValueError for a file that is no picture.
    """
    picture = load_picture(image, root)
    size = image_size(picture.width, picture.height, config)
    return np.asarray(picture.resize(size, PIL.Image.Resampling.BICUBIC))


def patchify(pixels: np.ndarray, form: PixelFormat) -> Tensor:
    """Cut a picture [height, width, 3] uint8 into patches [patches, 3 x time x patch x patch] float32.

    The patches are in the order of the 2 x 2 merger: those of one token lie one after another.
    """
    height, width = pixels.shape[:2]
    mean, std = (np.asarray(values, np.float32) for values in (form.image_mean, form.image_std))
    scaled = (pixels.astype(np.float32) / 255 - mean) / std
    side, merge = form.patch_size, form.merge_size
    cells = scaled.reshape(height // (side * merge), merge, side, width // (side * merge), merge, side, 3)
    # row, column of tokens; row, column in the token; channel; row, column in the patch
    cells = cells.transpose(0, 3, 1, 4, 6, 2, 5)
    frames = np.repeat(cells[:, :, :, :, :, None], form.temporal_patch_size, axis=5)
    return torch.from_numpy(np.ascontiguousarray(frames.reshape(height * width // side**2, -1)))
