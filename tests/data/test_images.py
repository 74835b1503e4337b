from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

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
    assert len(decode(data, PROCESSOR)) == np.prod(PROCESSOR.grid_of(image_size(data)))


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
        decode(cut, PROCESSOR)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "CMYK", "1"])
def test_patches_equal_those_of_transformers(mode: str, tmp_path: Path) -> None:
    PROCESSOR.save(tmp_path)
    reference = AutoImageProcessor.from_pretrained(tmp_path, local_files_only=True, backend="pil")
    stream = io.BytesIO()
    Image.open(io.BytesIO(picture(97, 61))).convert(mode).save(stream, "TIFF")
    (tmp_path / "picture").write_bytes(stream.getvalue())
    expected = reference(images=[load_image(str(tmp_path / "picture"))], return_tensors="np")
    patches = decode(stream.getvalue(), PROCESSOR)
    assert patches.dtype == np.float32
    assert patches.shape == (np.prod(PROCESSOR.grid_of((97, 61))), PROCESSOR.patch_dim)
    assert np.array_equal(patches, expected["pixel_values"])
    assert tuple(expected["image_grid_thw"][0]) == PROCESSOR.grid_of((97, 61))


@pytest.mark.parametrize("form", ["PNG", "TIFF", "PPM"])
def test_16_bits_of_grey_are_scaled_to_8(form: str) -> None:
    grey = np.asarray(Image.open(io.BytesIO(picture(97, 61))).convert("L"))
    narrow, wide = io.BytesIO(), io.BytesIO()
    Image.fromarray(grey).save(narrow, form)
    Image.fromarray(grey.astype(np.uint16) * 257).save(wide, form)
    assert image_size(wide.getvalue()) == (97, 61)
    assert np.array_equal(decode(wide.getvalue(), PROCESSOR), decode(narrow.getvalue(), PROCESSOR))


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
    assert np.array_equal(decode(data, PROCESSOR), decode(eight.getvalue(), PROCESSOR))


@pytest.mark.parametrize("mode", ["I", "F"])
def test_grey_of_an_unknown_range_is_refused(mode: str) -> None:
    stream = io.BytesIO()
    Image.open(io.BytesIO(picture(97, 61))).convert("L").convert(mode).save(stream, "TIFF")
    with pytest.raises(RowError, match="levels of grey of an unknown range"):
        image_size(stream.getvalue())
