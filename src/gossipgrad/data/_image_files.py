"""Image files through Pillow, cropped for training or for evaluation."""

import math
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import UInt8

if TYPE_CHECKING:
    from PIL import Image

_AREA = (0.08, 1.0)
_RATIO = (3 / 4, 4 / 3)
_LOG_RATIO = (math.log(3 / 4), math.log(4 / 3))
_TRIES = 10
# The shorter side that an image is brought to before a centre of 224 is cut out of it.
_SHORTER_SIDE = 256 / 224


def check_pillow(name: str) -> None:
    """Raise `ValueError` if Pillow is missing, which data `name` needs."""
    if find_spec("PIL") is None:
        raise ValueError(f"data {name!r} is read with Pillow: pip install 'gossipgrad[images]'.")


def read_cropped(
    path: Path, size: int, rng: np.random.Generator | None
) -> UInt8[np.ndarray, "3 size size"]:
    """An image file in colour, cropped and scaled to `size` pixels a side.

    Args:
        path: The file.
        size: Height and width of the result.
        rng: For training: decides a part of 8 to 100 percent of the area, 3:4 to 4:3 in shape, and
            whether it is mirrored. None: the centre, after the shorter side was scaled to
            256 / 224 of `size`.

    Raises:
        ValueError: The file is no image that can be decoded; the message names it.

    References:
        Szegedy et al., Going deeper with convolutions, 2015, section 6: the parts for training.
    """
    from PIL import Image, ImageOps

    image = decoded(path)
    if rng is None:
        image = _centre(image, size)
    else:
        box = training_box(*image.size, rng)
        image = image.crop(box).resize((size, size), Image.Resampling.BILINEAR)
        if rng.random() < 0.5:
            image = ImageOps.mirror(image)
    return np.asarray(image).transpose(2, 0, 1)


def decoded(path: Path) -> "Image.Image":
    """An image file in colour.

    Raises:
        ValueError: The file is no image that can be decoded; the message names it.
    """
    from PIL import Image

    try:
        with Image.open(path) as file:
            return file.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(
            f"{path} cannot be read as an image ({error}); replace or delete it."
        ) from error


def training_box(width: int, height: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
    """A random part of an image, as left, top, right and bottom.

    Its area and the logarithm of its shape are drawn evenly, until it fits; after ten tries the
    largest centre of an allowed shape is taken.
    """
    for _ in range(_TRIES):
        area = width * height * rng.uniform(*_AREA)
        ratio = math.exp(rng.uniform(*_LOG_RATIO))
        part_width, part_height = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
        if 0 < part_width <= width and 0 < part_height <= height:
            left = int(rng.integers(width - part_width + 1))
            top = int(rng.integers(height - part_height + 1))
            return left, top, left + part_width, top + part_height
    part_width = min(width, max(1, round(height * _RATIO[1])))
    part_height = min(height, max(1, round(width / _RATIO[0])))
    left, top = (width - part_width) // 2, (height - part_height) // 2
    return left, top, left + part_width, top + part_height


def _centre(image: "Image.Image", size: int) -> "Image.Image":
    from PIL import Image

    scale = round(size * _SHORTER_SIDE) / min(image.size)
    width, height = (max(size, round(side * scale)) for side in image.size)
    left, top = (width - size) // 2, (height - size) // 2
    scaled = image.resize((width, height), Image.Resampling.BILINEAR)
    return scaled.crop((left, top, left + size, top + size))
