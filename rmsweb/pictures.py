"""Pictures as a model gets them: the screenshot from disk, with the index boxes that its prompt asks for.

Purpose: a set-of-marks picture (`PromptConfig.index_boxes`) for the checkpoint and for an endpoint alike.
Files hold the page as it was; the boxes travel in the message and are drawn each time the picture is read.
"""

from pathlib import Path

import PIL.Image
from PIL import ImageDraw, ImageFont

from rmsweb.records import Image

COLORS = ("#d92d20", "#155eef", "#067647", "#b54708", "#6938ef", "#0e7090")  # by index: neighbours differ


def load_picture(image: Image, root: Path) -> PIL.Image.Image:
    """Return the picture in RGB at its own size, boxes drawn.

    Raises FileNotFoundError, and ValueError for a file that is no picture.
    """
    try:
        with PIL.Image.open(root / image.path) as file:
            picture = file.convert("RGB")
    except PIL.UnidentifiedImageError as error:
        raise ValueError(f"{root / image.path}: not a picture ({error})") from None
    pen, font = ImageDraw.Draw(picture), ImageFont.load_default()
    for index, x, y, width, height in image.boxes:
        color = COLORS[index % len(COLORS)]
        pen.rectangle((x, y, max(x, x + width - 1), max(y, y + height - 1)), outline=color, width=2)
        label = pen.textbbox((x + 2, y), str(index), font=font)
        pen.rectangle((x, y, label[2] + 2, label[3] + 1), fill=color)
        pen.text((x + 2, y), str(index), fill="white", font=font)
    return picture
