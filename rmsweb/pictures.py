"""Pictures as a model gets them: the screenshot from disk, with the index boxes that its prompt asks for.

Purpose: a set-of-marks picture (`PromptConfig.index_boxes`) for the checkpoint and for an endpoint alike.
Files hold the page as it was; the boxes travel in the message and are drawn each time the picture is read.
"""

import io
from pathlib import Path

import PIL.Image
from PIL import ImageDraw, ImageFont

from rmsweb.jsonl import inside
from rmsweb.records import Image, sha256_bytes

MAX_RATIO = 200  # of Qwen3-VL's image processor
COLORS = ("#d92d20", "#155eef", "#067647", "#b54708", "#6938ef", "#0e7090")  # by index: neighbours differ


def load_picture(image: Image, root: Path) -> PIL.Image.Image:
    """Return the picture in RGB at its own size, boxes drawn.

    Raises FileNotFoundError, and ValueError for a file that is no whole picture or outside of the folder.
    """
    try:
        with PIL.Image.open(inside(root, image.path)) as file:
            picture = file.convert("RGB")
    except (PIL.UnidentifiedImageError, SyntaxError) as error:
        raise ValueError(f"{root / image.path}: not a picture ({error})") from None
    pen, font = ImageDraw.Draw(picture), ImageFont.load_default()
    for index, x, y, width, height in image.boxes:
        color = COLORS[index % len(COLORS)]
        pen.rectangle((x, y, max(x, x + width - 1), max(y, y + height - 1)), outline=color, width=2)
        label = pen.textbbox((x + 2, y), str(index), font=font)
        pen.rectangle((x, y, label[2] + 2, label[3] + 1), fill=color)
        pen.text((x + 2, y), str(index), fill="white", font=font)
    return picture


def check_picture(image: Image, root: Path) -> None:
    """Raise ValueError unless a picture is there whole, of the recorded size and content.

    The official image processor refuses sides of more than 200 to 1; so do we, before anything is trained.
    """
    path = inside(root, image.path)
    data = path.read_bytes() if path.is_file() else b""
    if not data:
        raise ValueError(f"{path}: {'an empty file' if path.is_file() else 'no such picture'}")
    if sha256_bytes(data) != image.sha256:
        raise ValueError(f"{path}: its content is not that of the record (sha256 {image.sha256[:12]}...)")
    try:
        with PIL.Image.open(io.BytesIO(data)) as file:
            size = file.size
            file.load()
    except (OSError, SyntaxError) as error:
        raise ValueError(f"{path}: not a whole picture ({error})") from None
    if size != (image.width, image.height):
        raise ValueError(f"{path}: found {size} pixels, the record says {(image.width, image.height)}")
    if max(size) > MAX_RATIO * min(size):
        raise ValueError(f"{path}: found {size} pixels, expected sides of at most {MAX_RATIO} to 1")
