"""Images: their size from the header, and their patches from the model's own image processor."""

from __future__ import annotations

import io
import struct
import warnings
from typing import TYPE_CHECKING

import numpy as np
from PIL import ExifTags, Image, ImageOps, features
from PIL import __version__ as pillow_version
from PIL.TiffImagePlugin import TiffImageFile

from dhp_ray.data.errors import RowError
from dhp_ray.data.media import MediaLimits
from dhp_ray.errors import first_line

if TYPE_CHECKING:
    from dhp_ray.data.processor import Processor

MAX_DECODED_PIXELS = MediaLimits().max_decoded_pixels
# Pillow from 11.3 on, if it was built with libavif
_READS_AVIF = "avif" in features.modules and features.check("avif")
# Raster formats only: Pillow also opens documents, which an external program would have to render.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", *(("AVIF",) if _READS_AVIF else ()))
# `image_size` refuses earlier; Pillow's own error, at twice its limit, stays
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
_GREY_16 = ("PNG", "PPM")  # of which Pillow may call 16 bits of grey I
_BITS_PER_SAMPLE = 258  # TIFF's tag
_TURNED = (5, 6, 7, 8)  # EXIF orientations that swap width and height


def image_size(data: bytes, max_pixels: int = MAX_DECODED_PIXELS) -> tuple[int, int]:
    """(width, height) in pixels of an encoded image, upright by its EXIF orientation. Reads headers only, and decodes
    pixels only of a PNG with metadata behind them.

    Raises:
        RowError: the header cannot be read, or gives more than `max_pixels` pixels, or grey of an unknown range.
    """
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            if width * height > max_pixels:  # before reading metadata: that of a PNG may lie behind its pixels
                raise RowError(f"{width}x{height} pixels; allowed: at most {max_pixels} (data.max_decoded_pixels)")
            if image.mode == "F" or (image.mode == "I" and image.format not in _GREY_16):
                raise RowError("levels of grey of an unknown range; allowed: 8 bits a colour, up to 16 bits of grey")
            # PngImageFile.getexif decodes the pixels to reach chunks behind them; it is called only if there are any.
            exif = image.getexif() if _has_late_metadata(data) else Image.Image.getexif(image)
            turned = exif.get(ExifTags.Base.Orientation) in _TURNED
            turned = turned and image.format != "TIFF"  # Pillow itself swaps width and height of a TIFF
    except RowError:
        raise
    # image readers raise errors of many kinds on foreign bytes; each makes this row a bad one
    except Exception as error:
        reason = _foreign(data) if isinstance(error, Image.UnidentifiedImageError) else first_line(error)
        raise RowError(f"header cannot be read: {reason}; allowed: {', '.join(FORMATS)}") from None
    return (height, width) if turned else (width, height)


def decode(data: bytes, processor: Processor) -> np.ndarray:
    """Patches of an encoded image, float32 of shape (P, patch_dim), in the order of the model's own image processor.

    The image is first turned upright and converted to RGB, as `transformers.image_utils.load_image` does; but of
    more than 8 bits of grey the upper 8 count, where that would make everything from 255 on white.

    Raises:
        Exception: whatever Pillow raises on bytes that do not decode.
    """
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        if image.width * image.height > processor.limits.max_decoded_pixels:
            raise ValueError(
                f"{image.width}x{image.height} pixels; allowed: at most {processor.limits.max_decoded_pixels}"
            )
        upright = ImageOps.exif_transpose(image)
        if upright.mode.startswith("I"):
            bits = int(image.tag_v2[_BITS_PER_SAMPLE][0]) if isinstance(image, TiffImageFile) else 16
            upright = Image.fromarray((np.asarray(upright) >> (bits - 8)).astype(np.uint8))
    values = processor.image_processor(images=[upright.convert("RGB")], return_tensors="np")["pixel_values"]
    return processor.family.image_patches(values, processor.bounds)


def _foreign(data: bytes) -> str:
    """Describes bytes that no reader accepts."""
    if data[4:12] in (b"ftypavif", b"ftypavis") and "AVIF" not in FORMATS:
        return f"AVIF, which Pillow {pillow_version} of this machine was built without"
    return "not an image of a known format"


def _has_late_metadata(data: bytes) -> bool:
    """Whether a PNG has chunks behind its pixels that may hold an orientation."""
    if not data.startswith(b"\x89PNG\r\n\x1a\n"):
        return False
    position, in_pixels = 8, False
    while position + 8 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, position)
        in_pixels = in_pixels or kind == b"IDAT"
        if in_pixels and kind in (b"eXIf", b"tEXt", b"zTXt", b"iTXt"):
            return True
        position += length + 12
    return False
