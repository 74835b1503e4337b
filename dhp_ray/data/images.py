"""Images: their size from the header, and their patches from the model's own image processor."""

from __future__ import annotations

import io
import warnings

import numpy as np
from PIL import ExifTags, Image, ImageOps, PngImagePlugin, features
from PIL import __version__ as pillow_version
from PIL.TiffImagePlugin import TiffImageFile

from dhp_ray.data.errors import RowError
from dhp_ray.data.families.base import VisionFamily
from dhp_ray.data.media import MediaLimits
from dhp_ray.errors import first_line

# Pillow from 11.3 on, if it was built with libavif
_READS_AVIF = "avif" in features.modules and features.check("avif")
# Raster formats only: Pillow also opens documents, which an external program would have to render.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", *(("AVIF",) if _READS_AVIF else ()))
# `image_size` refuses earlier; Pillow's own error, at twice its limit, stays
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
# Pillow refuses a PNG with a text or a colour profile of more bytes, unpacked. Workflows of generators have more than
# its default of 2**20.
PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY
_GREY_16 = ("PNG", "PPM")  # of which Pillow may call 16 bits of grey I
_BITS_PER_SAMPLE = 258  # TIFF's tag
_PNG = b"\x89PNG\r\n\x1a\n"
_TURNED = (5, 6, 7, 8)  # EXIF orientations that swap width and height


def image_size(data: bytes, max_pixels: int = MediaLimits().max_decoded_pixels) -> tuple[int, int]:
    """(width, height) in pixels of an encoded image, upright by EXIF, from its header; pixels only of a PNG with
    metadata behind them. RowError: no header, more than `max_pixels` pixels, or grey of an unknown range.
    """
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            if width * height > max_pixels:  # before reading metadata: that of a PNG may lie behind its pixels
                raise RowError(f"{width}x{height} pixels; allowed: at most {max_pixels} (by data.max_pixels)")
            if image.mode == "F" or (image.mode == "I" and image.format not in _GREY_16):
                raise RowError("levels of grey of an unknown range; allowed: 8 bits a colour, up to 16 bits of grey")
            # PngImageFile.getexif decodes the pixels to reach chunks behind them; it is called only if there are any.
            exif = image.getexif() if _has_late_metadata(data) else Image.Image.getexif(image)
            turned = exif.get(ExifTags.Base.Orientation) in _TURNED
            turned = turned and image.format != "TIFF"  # Pillow itself swaps width and height of a TIFF
    except (RowError, MemoryError):  # memory is the machine's, not the image's
        raise
    # image readers raise errors of many kinds on foreign bytes; each makes this row a bad one
    except Exception as error:
        reason = _foreign(data) if isinstance(error, Image.UnidentifiedImageError) else first_line(error)
        raise RowError(f"header cannot be read: {reason}; allowed: {', '.join(FORMATS)}") from None
    return (height, width) if turned else (width, height)


def decode(data: bytes, family: VisionFamily) -> np.ndarray:
    """Patches of an image, float32 (P, patch_dim), in its processor's order. Raises what Pillow raises."""
    image = decode_rgb(data, family.limits.max_decoded_pixels)
    values = family.image_processor(images=[image], return_tensors="np")["pixel_values"]
    return family.image_patches(values)


def decode_rgb(data: bytes, max_pixels: int) -> Image.Image:
    """The decoded image, upright and in RGB, as by `transformers.image_utils.load_image`; but what is transparent lies
    on white, as in serving engines, and of more than 8 bits of grey the upper 8 count.
    """
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        if image.width * image.height > max_pixels:
            raise ValueError(f"{image.width}x{image.height} pixels; allowed: at most {max_pixels}")
        upright = ImageOps.exif_transpose(image)
        if upright.mode.startswith("I"):
            bits = int(image.tag_v2[_BITS_PER_SAMPLE][0]) if isinstance(image, TiffImageFile) else 16
            levels = np.asarray(upright)
            clear = levels == upright.info.get("transparency", -1)
            upright = Image.fromarray(np.where(clear, 255, levels >> (bits - 8)).astype(np.uint8))
        return _on_white(upright)


def _on_white(image: Image.Image) -> Image.Image:
    """The image in RGB; what is transparent shows white."""
    if not image.has_transparency_data:
        return image.convert("RGB")
    drawn = image.convert("RGBA")
    white = Image.new("RGB", image.size, "white")
    white.paste(drawn, mask=drawn.getchannel("A"))
    return white


def _foreign(data: bytes) -> str:
    """Describes bytes that no reader accepts."""
    if data[4:12] in (b"ftypavif", b"ftypavis") and "AVIF" not in FORMATS:
        return f"AVIF, which Pillow {pillow_version} of this machine was built without"
    return "not an image of a known format"


def _has_late_metadata(data: bytes) -> bool:
    """Whether a PNG has something behind its pixels that may hold an orientation."""
    behind = data[data.rfind(b"IDAT"):] if data.startswith(_PNG) else b""
    return any(kind in behind for kind in (b"eXIf", b"tEXt", b"zTXt", b"iTXt"))
