from __future__ import annotations

import io
import struct
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, features
from transformers import AutoImageProcessor
from transformers.image_utils import load_image

from dhp_ray.data.errors import RowError
from dhp_ray.data.images import FORMATS, decode, image_size
from tests.data.samples import picture, processor

PROCESSOR = processor()


def turned(form: str, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return picture(90, 40, form, exif=exif)


def png_chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def with_orientation_behind_the_pixels(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    plain = picture(90, 40)
    end = plain.rindex(b"IEND") - 4
    return plain[:end] + png_chunk(b"eXIf", exif.tobytes()[6:]) + plain[end:]


AVIF = pytest.param("AVIF", marks=pytest.mark.skipif(not features.check("avif"),
                                                     reason="this Pillow was built without AVIF"))


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", AVIF])
def test_the_header_gives_the_size(form: str) -> None:
    assert image_size(picture(123, 45, form)) == (123, 45)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "TIFF", AVIF])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_size_is_that_of_the_upright_picture(form: str, orientation: int, tmp_path: Path) -> None:
    data = turned(form, orientation)
    (tmp_path / "picture").write_bytes(data)
    upright = load_image(str(tmp_path / "picture"))
    assert image_size(data) == upright.size == ((40, 90) if orientation >= 5 else (90, 40))
    assert len(decode(data, PROCESSOR.family)) == np.prod(PROCESSOR.family.grid(image_size(data)))


def test_an_orientation_behind_the_pixels_counts(tmp_path: Path) -> None:
    data = with_orientation_behind_the_pixels(6)
    (tmp_path / "picture").write_bytes(data)
    assert load_image(str(tmp_path / "picture")).size == (40, 90)
    assert image_size(data) == (40, 90)


def test_no_pixel_is_decoded_for_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Image.Image) -> None:
        raise AssertionError("pixels were decoded")

    avif = picture(90, 40, "AVIF") if features.check("avif") else b""
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", refuse)
    if avif:
        monkeypatch.setattr("PIL.AvifImagePlugin.AvifImageFile.load", refuse)
        assert image_size(avif) == (90, 40)
    for form in ("PNG", "JPEG", "WEBP"):
        if form != "WEBP":  # Pillow's reader of WebP has its own load; its header is read all the same
            assert image_size(picture(90, 40, form)) == (90, 40)
    assert image_size(picture(90, 40)[:60]) == (90, 40)


@pytest.mark.parametrize("data", [b"", b"not an image", b"\x89PNG\r\n\x1a\n", picture(9, 9)[:20],
                                  b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"])
def test_an_unreadable_header_is_a_bad_row(data: bytes) -> None:
    with pytest.raises(RowError, match=r"header cannot be read: .*; allowed: PNG") as caught:
        image_size(data)
    assert "\n" not in str(caught.value)


def test_avif_without_its_reader_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a Pillow that was built without libavif."""
    monkeypatch.setattr("dhp_ray.data.images.FORMATS", tuple(form for form in FORMATS if form != "AVIF"))
    for brand in (b"avif", b"avis"):
        with pytest.raises(
            RowError,
            match=r"^header cannot be read: AVIF, which Pillow [\d.]+ of this machine was built without; "
                  r"allowed: PNG, ",
        ):
            image_size(b"\0\0\0\x20ftyp" + brand + bytes(40))


def test_a_cut_picture_has_a_size_and_does_not_decode() -> None:
    data = picture(300, 200)
    cut = data[: len(data) // 2]
    assert image_size(cut) == (300, 200)
    with pytest.raises(OSError, match="truncated"):
        decode(cut, PROCESSOR.family)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "CMYK", "1"])
def test_patches_equal_those_of_transformers(mode: str, tmp_path: Path) -> None:
    PROCESSOR.save(tmp_path)
    reference = AutoImageProcessor.from_pretrained(tmp_path, local_files_only=True, backend="pil")
    stream = io.BytesIO()
    Image.open(io.BytesIO(picture(97, 61))).convert(mode).save(stream, "TIFF")
    (tmp_path / "picture").write_bytes(stream.getvalue())
    expected = reference(images=[load_image(str(tmp_path / "picture"))], return_tensors="np")
    patches = decode(stream.getvalue(), PROCESSOR.family)
    assert patches.dtype == np.float32
    assert patches.shape == (np.prod(PROCESSOR.family.grid((97, 61))), PROCESSOR.family.patch_dim)
    assert np.array_equal(patches, expected["pixel_values"])
    assert tuple(expected["image_grid_thw"][0]) == PROCESSOR.family.grid((97, 61))


@pytest.mark.parametrize("form", ["PNG", "TIFF", "PPM"])
def test_16_bits_of_grey_are_scaled_to_8(form: str) -> None:
    grey = np.asarray(Image.open(io.BytesIO(picture(97, 61))).convert("L"))
    narrow, wide = io.BytesIO(), io.BytesIO()
    Image.fromarray(grey).save(narrow, form)
    Image.fromarray(grey.astype(np.uint16) * 257).save(wide, form)
    assert image_size(wide.getvalue()) == (97, 61)
    assert np.array_equal(decode(wide.getvalue(), PROCESSOR.family), decode(narrow.getvalue(), PROCESSOR.family))


def test_12_bits_of_grey_are_scaled_to_8() -> None:
    """Of 2 x 2 pixels, in rows of whole bytes: 0xABC and 0x123, 0xFFF and 0."""
    tags = [(256, 3, 2), (257, 3, 2), (258, 3, 12), (259, 3, 1), (262, 3, 1), (273, 4, 8), (277, 3, 1), (278, 3, 2),
            (279, 4, 6)]
    pixels = bytes([0xAB, 0xC1, 0x23, 0xFF, 0xF0, 0x00])
    entries = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in tags)
    data = b"II*\0" + struct.pack("<I", 16) + pixels.ljust(8, b"\0") + struct.pack("<H", len(tags)) + entries + bytes(4)
    assert image_size(data) == (2, 2)
    eight = io.BytesIO()
    Image.fromarray(np.array([[0xAB, 0x12], [0xFF, 0]], np.uint8)).save(eight, "PNG")
    assert np.array_equal(decode(data, PROCESSOR.family), decode(eight.getvalue(), PROCESSOR.family))


@pytest.mark.parametrize("mode", ["I", "F"])
def test_grey_of_an_unknown_range_is_refused(mode: str) -> None:
    stream = io.BytesIO()
    Image.open(io.BytesIO(picture(97, 61))).convert("L").convert(mode).save(stream, "TIFF")
    with pytest.raises(RowError, match="levels of grey of an unknown range"):
        image_size(stream.getvalue())


def levels_of(patches: np.ndarray) -> np.ndarray:
    """The pixels (3, rows, columns) of one token's patches, as levels from 0 to 255."""
    mean, deviation = (np.asarray(PROCESSOR.family.settings[name]).reshape(3, 1, 1)
                       for name in ("image_mean", "image_std"))
    cut = patches.reshape(2, 2, 3, 2, 14, 14)[:, :, :, 0]
    return np.round((cut.transpose(2, 0, 3, 1, 4).reshape(3, 28, 28) * deviation + mean) * 255)


def drawing(mode: str, form: str, **options: Any) -> bytes:
    """Of 56 x 56 pixels: left black and opaque, right transparent over black."""
    image = Image.new("LA", (56, 56), (0, 255))
    image.paste((0, 0), (28, 0, 56, 56))
    if mode == "P":  # entry 0 is black, entry 1 is black and transparent
        image = Image.fromarray(np.where(np.asarray(image)[..., 1] > 0, 0, 1).astype(np.uint8)).convert("P")
        image.putpalette(bytes(768))
        options["transparency"] = bytes([255, 0]) if form == "PNG" else 1
    elif mode in ("L", "RGB", "1", "I;16"):  # one grey or colour is transparent
        shown = np.where(np.asarray(image)[..., 1] > 0, 0, 40 if mode != "1" else 255).astype(np.uint8)
        image = Image.fromarray(shown.astype(np.uint16) * 1000 if mode == "I;16" else shown)
        image = image if mode == "I;16" else image.convert(mode)
        options["transparency"] = {"L": 40, "RGB": (40, 40, 40), "1": 1, "I;16": 40_000}[mode]
    else:
        image = image.convert("RGBA").convert(mode)
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()


@pytest.mark.parametrize(("mode", "form"), [
    ("RGBA", "PNG"), ("LA", "PNG"), ("P", "PNG"), ("L", "PNG"), ("RGB", "PNG"), ("1", "PNG"), ("I;16", "PNG"),
    ("RGBA", "WEBP"), ("RGBA", "TIFF"), ("LA", "TIFF"), ("PA", "TIFF"), ("P", "GIF"), ("RGBA", "GIF"),
    pytest.param("RGBA", "AVIF", marks=AVIF.marks)])
def test_what_is_transparent_shows_white(mode: str, form: str) -> None:
    """A black drawing on a transparent ground, in which the ground is stored as black too."""
    lossless = {"WEBP": {"lossless": True}, "AVIF": {"quality": 100}}
    data = drawing(mode, form, **lossless.get(form, {}))
    with Image.open(io.BytesIO(data)) as image:
        assert image.has_transparency_data
    patches = decode(data, PROCESSOR.family)
    near = 3 if form == "AVIF" else 0
    # tokens of 28 x 28 pixels, one after the other: left, right, and the row below
    for number, level in enumerate((0, 255, 0, 255)):
        shown = levels_of(patches[4 * number:4 * (number + 1)])
        assert np.abs(shown - level)[:, 2:-2, 2:-2].max() <= near, (number, shown.min(), shown.max())


def test_half_transparent_pixels_are_mixed_with_white() -> None:
    stream = io.BytesIO()
    Image.new("RGBA", (28, 28), (10, 200, 30, 128)).save(stream, "PNG")
    shown = levels_of(decode(padded(stream.getvalue()), PROCESSOR.family)[:4])
    assert np.abs(shown[:, 5, 5] - (np.array([10, 200, 30]) * 128 + 255 * 127) / 255).max() <= 1


def padded(data: bytes) -> bytes:
    """The picture four times, so that it has as many pixels as a picture needs not to be enlarged."""
    image = Image.open(io.BytesIO(data))
    whole = Image.new(image.mode, (2 * image.width, 2 * image.height))
    for place in ((0, 0), (image.width, 0), (0, image.height), image.size):
        whole.paste(image, place)
    stream = io.BytesIO()
    whole.save(stream, "PNG")
    return stream.getvalue()


def with_chunks(*chunks: bytes, late: bool = False) -> bytes:
    plain = picture(90, 40)
    place = plain.rindex(b"IEND") - 4 if late else plain.index(b"IDAT") - 4
    return plain[:place] + b"".join(chunks) + plain[place:]


LARGE = b"x" * 3_000_000
METADATA = {
    "zTXt": png_chunk(b"zTXt", b"workflow\0\0" + zlib.compress(LARGE)),
    "iTXt": png_chunk(b"iTXt", b"workflow\0\1\0\0\0" + zlib.compress(LARGE)),
    "iCCP": png_chunk(b"iCCP", b"profile\0\0" + zlib.compress(LARGE)),
    "XMP": png_chunk(b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + zlib.compress(LARGE)),
}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", METADATA)
def test_large_metadata_leaves_sound_pixels_alone(kind: str, late: bool) -> None:
    data = with_chunks(METADATA[kind], late=late)
    assert image_size(data) == (90, 40)
    assert np.array_equal(decode(data, PROCESSOR.family), decode(picture(90, 40), PROCESSOR.family))


def test_packed_metadata_is_bounded() -> None:
    """200 kB that would be 200 MB."""
    packed = zlib.compress(bytes(200_000_000))
    for name in (b"Comment", b"XML:com.adobe.xmp", b"Raw profile type exif"):
        data = with_chunks(png_chunk(b"zTXt", name + b"\0\0" + packed))
        tracemalloc.start()
        try:
            with pytest.raises(RowError, match="header cannot be read: Decompressed data too large"):
                image_size(data)
            assert tracemalloc.get_traced_memory()[1] < 150_000_000
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_an_orientation_in_a_text_still_counts(packed: bool, late: bool) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    profile = exif.tobytes()
    profiles = f"\nexif\n{len(profile):8}\n{profile.hex()}\n".encode()
    xmp = b'<rdf:Description tiff:Orientation="6"/>'
    texts = [png_chunk(b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + zlib.compress(xmp)),
             png_chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(profiles))] if packed else [
        png_chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + xmp),
        png_chunk(b"tEXt", b"Raw profile type exif\0" + profiles)]
    for text in texts:
        data = with_chunks(METADATA["zTXt"], text, METADATA["iTXt"], late=late)
        assert image_size(data) == (40, 90)
        assert len(decode(data, PROCESSOR.family)) == np.prod(PROCESSOR.family.grid((40, 90)))


def test_a_bomb_with_metadata_stays_refused() -> None:
    header = struct.pack(">IIBBBBB", 60000, 60000, 8, 2, 0, 0, 0)
    data = (b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header) + METADATA["zTXt"]
            + png_chunk(b"IDAT", zlib.compress(bytes(1000))) + png_chunk(b"IEND", b""))
    with pytest.raises(RowError, match="Image size"):
        image_size(data)
    with pytest.raises(Exception, match="exceeds limit"):
        decode(data, PROCESSOR.family)
