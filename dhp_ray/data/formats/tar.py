"""WebDataset shards: tar files in which consecutive members with the same key are a sample.

    0001.json   the row: conversations or messages; or only the list of turns
    0001.txt    instead of it: what the assistant says about the images and videos of the sample
    0001.jpg, 0001.1.png, 0001.mp4, ...   images and videos; the row names them ("1.png" or "0001.1.png"),
                                          or they are taken in the order of their names, 2 before 10

Nothing is unpacked: members are read in place, and those that would run code when read are refused.
"""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO

from dhp_ray.data.conversation import IMAGE_MARK, VIDEO_MARK, json_of, own_media
from dhp_ray.data.errors import DataError, RowError
from dhp_ray.data.formats.rows import Row, cut_fragments, too_large
from dhp_ray.data.fragments import Fragment, UniqueIds
from dhp_ray.data.media import column_media, frame_sources
from dhp_ray.errors import first_line

SUFFIXES = (".tar",)
IMAGES = ("png", "jpg", "jpeg", "webp", "gif", "bmp", "tif", "tiff", "ppm", "avif")
VIDEOS = ("mp4", "m4v", "mov", "webm", "mkv", "avi")
PICKLES = ("pkl", "pickle", "pyd", "pt", "pth", "ckpt", "joblib")


def scan(path: str, names: UniqueIds, progress: Callable[[int], None]) -> Iterator[Fragment]:
    rows = ((key, (start, stop)) for key, start, stop in scan_samples(path, progress))
    yield from cut_fragments(path, "tar", rows, names)


def read(fragment: Fragment, numbers: Sequence[int], max_bytes: int, media: bool) -> Iterator[Row]:
    """Without `media` the bytes of images and videos are still read, one sample at a time, but not kept."""
    with open(fragment.path, "rb") as file:
        for start, stop in (fragment.spans[number] for number in numbers):
            key = ""
            try:
                file.seek(start)
                key = first_key(file)
                if (error := too_large(stop - start, max_bytes)):
                    raise RowError(error)
                file.seek(start)
                data = file.read(stop - start)
                fields, members = read_sample(data)
                yield Row(key, fields, members=members if media else {})
            except RowError as raised:
                yield Row(key, {}, str(raised), {})
            except (tarfile.TarError, EOFError, ValueError) as raised:
                yield Row(key, {}, f"the sample's part of the tar file cannot be read: {first_line(raised)}", {})


def scan_samples(path: str, progress: Callable[[int], None]) -> Iterator[tuple[str, int, int]]:
    """(key, start, stop) of every sample, by headers alone. DataError: this is no uncompressed tar file."""
    try:
        with tarfile.open(path, "r:") as archive:
            current, start, stop = None, 0, 0
            while (member := archive.next()) is not None:
                archive.members = []  # type: ignore[attr-defined]  # otherwise it keeps all members
                progress(member.offset)
                if member.isdir():
                    continue
                key = split_name(member.name)[0]
                if key != current:
                    if current is not None:
                        yield current, start, stop
                    current, start = key, member.offset
                stop = archive.offset
            if current is not None:
                yield current, start, stop
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise DataError(f"data.path: {path} is not a tar file that can be read: {first_line(error)}; allowed: "
                        "uncompressed tar") from None


def read_sample(data: bytes) -> tuple[dict[str, Any], dict[str, bytes]]:
    """A sample's row, and its images and videos by name. RowError: a member is refused, or there is no row."""
    texts: dict[str, bytes] = {}
    media: dict[str, bytes] = {}
    shown: dict[str, list[str]] = {"images": [], "videos": []}
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
        for member in archive:
            if member.isdir():
                continue
            extension = split_name(member.name)[1]
            kind = extension.rpartition(".")[2].lower()
            if kind in PICKLES:
                raise RowError(f"member {member.name} is a pickle, which can run code when read; allowed: json, txt, "
                               "images and videos")
            if not member.isreg() or member.issparse():
                raise RowError(f"member {member.name} is a link or another special file; allowed: plain files")
            if kind not in ("json", "txt", *IMAGES, *VIDEOS):
                continue
            file = archive.extractfile(member)
            content = file.read() if file else b""
            if len(content) != member.size:
                raise RowError(f"member {member.name} is cut short")
            if kind in ("json", "txt"):
                if kind in texts:
                    raise RowError(f"member {member.name} is a second {kind} of one key; allowed: one of each key")
                texts[kind] = content
                continue
            shown["images" if kind in IMAGES else "videos"].append(member.name)
            media |= {extension: content, member.name.rpartition("/")[2]: content, member.name: content}
    for names in shown.values():
        names.sort(key=_numbered)
    fields = _fields(texts, {name: len(names) for name, names in shown.items()})
    frames = [name for value in column_media(fields, "video") for name in frame_sources(value)]
    of_videos = {name for name in frames if isinstance(name, str)}
    shown["images"] = [name for name in shown["images"]
                       if not of_videos & {name, name.rpartition("/")[2], split_name(name)[1]}]
    own = own_media(fields)
    for plural, names in shown.items():
        if names and all(fields.get(column) is None for column in (plural, plural[:-1])) and not own:
            fields[plural] = names
    return fields, media


def first_key(file: BinaryIO) -> str:
    """The key of the sample that begins here in a tar file."""
    with tarfile.open(fileobj=file, mode="r:") as archive:
        member = archive.next()
        while member is not None and member.isdir():
            member = archive.next()
        return split_name(member.name)[0] if member else ""


def split_name(name: str) -> tuple[str, str]:
    """(key, extension) of a member: the extension begins at the first dot of the file's name."""
    folder, slash, file = name.rpartition("/")
    stem, _, extension = file.partition(".")
    return f"{folder}{slash}{stem}", extension


def _numbered(name: str) -> list[str | int]:
    """What sorts the members of a key: one without a number is the first, and numbers count by their value."""
    pieces = re.split("([0-9]+)", split_name(name)[1].rpartition(".")[0])
    return [int(piece) if place % 2 else piece for place, piece in enumerate(pieces)]


def _fields(texts: dict[str, bytes], counts: dict[str, int]) -> dict[str, Any]:
    if "json" in texts:
        row = json_of(texts["json"], "the member json")
        row = {"conversations": row} if isinstance(row, list) else row
        if not isinstance(row, dict):
            raise RowError(f"the member json holds {type(row).__name__}; allowed: an object, or a list of turns")
        return dict(row)
    if "txt" not in texts:
        raise RowError("the sample has neither a member json nor txt")
    try:
        caption = texts["txt"].decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise RowError(f"the member txt is not UTF-8 text: {first_line(error)}") from None
    marks = IMAGE_MARK * counts["images"] + VIDEO_MARK * counts["videos"]
    return {"messages": [{"role": "user", "content": marks}, {"role": "assistant", "content": caption}]}
