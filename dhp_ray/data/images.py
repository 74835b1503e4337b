"""Images: their size from the header, and their patches from the model's own image processor."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from collections.abc import Iterator

import numpy as np
from PIL import ExifTags, Image, ImageOps, features
from PIL import __version__ as pillow_version
from PIL.TiffImagePlugin import TiffImageFile

from dhp_ray.data.errors import RowError
from dhp_ray.data.families.base import Family
from dhp_ray.data.media import MediaLimits
from dhp_ray.errors import first_line

MAX_DECODED_PIXELS = MediaLimits().max_decoded_pixels
# Pillow from 11.3 on, if it was built with libavif
_READS_AVIF = "avif" in features.modules and features.check("avif")
# Raster formats only: Pillow also opens documents, which an external program would have to render.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", *(("AVIF",) if _READS_AVIF else ()))
# `image_size` refuses earlier; Pillow's own error, at twice its limit, stays
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
_GREY_16 = ("PNG", "PPM")  # of which Pillow may call 16 bits of grey I
_BITS_PER_SAMPLE = 258  # TIFF's tag
_PNG = b"\x89PNG\r\n\x1a\n"
_TEXT = (b"tEXt", b"zTXt", b"iTXt")
_OF_ORIENTATION = (b"exif", b"Raw profile type exif", b"XML:com.adobe.xmp")
"""The names of a PNG's texts in which Pillow looks for an orientation."""
_ORIENTATION_BYTES = 1_000_000  # of 2**20 or more unpacked bytes of a text Pillow refuses the picture
_TURNED = (5, 6, 7, 8)  # EXIF orientations that swap width and height


def image_size(data: bytes, max_pixels: int = MAX_DECODED_PIXELS) -> tuple[int, int]:
    """(width, height) in pixels of an encoded image, upright by its EXIF orientation. Reads headers only, and decodes
    pixels only of a PNG with metadata behind them.

    Raises:
        RowError: the header cannot be read, or gives more than `max_pixels` pixels, or grey of an unknown range.
    """
    try:
        data = _without_texts(data)
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


def decode(data: bytes, family: Family) -> np.ndarray:
    """Patches of an encoded image, float32 of shape (P, patch_dim), in the order of the model's own image processor.

    Raises:
        Exception: whatever Pillow raises on bytes that do not decode.
    """
    image = decode_rgb(data, family.limits.max_decoded_pixels)
    values = family.image_processor(images=[image], return_tensors="np")["pixel_values"]
    return family.image_patches(values)


def decode_rgb(data: bytes, max_pixels: int) -> Image.Image:
    """The decoded image.

    It is turned upright and converted to RGB, as `transformers.image_utils.load_image` does; but what is
    transparent lies on white, as in serving engines, and of more than 8 bits of grey the upper 8 count, where that
    would make everything from 255 on white.

    Raises:
        Exception: whatever Pillow raises on bytes that do not decode.
    """
    with Image.open(io.BytesIO(_without_texts(data)), formats=FORMATS) as image:
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


def _without_texts(data: bytes) -> bytes:
    """The encoded image without the texts and colour profile of a PNG, neither of which changes its pixels, except for
    texts that may tell its orientation. Pillow unpacks all of them, and refuses the picture if they are large.
    """
    if not data.startswith(_PNG):
        return data
    kept, begin, room = [], 0, _ORIENTATION_BYTES
    for kind, start, stop in _chunks(data):
        if kind in _TEXT:
            name = data[start + 8 : start + 8 + 80].partition(b"\0")[0]
            length = _text_bytes(kind, data[start + 8 + len(name) : stop - 4], room) if name in _OF_ORIENTATION else -1
            if 0 <= length <= room:
                room -= length
                continue
        elif kind != b"iCCP":
            continue
        kept.append(data[begin:start])
        begin = stop
    return b"".join([*kept, data[begin:]]) if begin else data


def _text_bytes(kind: bytes, content: bytes, most: int) -> int:
    """The bytes of a text that may be compressed: `most` + 1 if there are more, -1 if it cannot be read. `content` is
    what follows the text's name.
    """
    header, rest = (content[1:3], content[3:].split(b"\0", 2)[-1]) if kind == b"iTXt" else (
        b"\1" + content[1:2], content[2:])
    if kind == b"tEXt" or header[:1] == b"\0":
        return min(len(content), most + 1)
    try:
        return len(zlib.decompressobj().decompress(rest, most + 1)) if header[1:] == b"\0" else -1
    except zlib.error:
        return -1


def _chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """(kind, start, stop) of the whole chunks of a PNG, up to its end or to one that is cut short."""
    position = len(_PNG)
    while position + 8 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, position)
        stop = position + length + 12
        if stop > len(data):
            return
        yield kind, position, stop
        if kind == b"IEND":  # zeros behind it would be chunks of 12 bytes
            return
        position = stop


def _foreign(data: bytes) -> str:
    """Describes bytes that no reader accepts."""
    if data[4:12] in (b"ftypavif", b"ftypavis") and "AVIF" not in FORMATS:
        return f"AVIF, which Pillow {pillow_version} of this machine was built without"
    return "not an image of a known format"


def _has_late_metadata(data: bytes) -> bool:
    """Whether a PNG has chunks behind its pixels that may hold an orientation."""
    in_pixels = False
    for kind, *_ in _chunks(data) if data.startswith(_PNG) else ():
        in_pixels = in_pixels or kind == b"IDAT"
        if in_pixels and kind in (b"eXIf", *_TEXT):
            return True
    return False
