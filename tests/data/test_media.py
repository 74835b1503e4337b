from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dhp_ray.data.conversation import MEDIA, OWN_SETTINGS, media_keys, own_media, read_turns
from dhp_ray.data.errors import RowError
from dhp_ray.data.formats.rows import Row
from dhp_ray.data.media import MediaLimits, column_media, file_bytes, read_media, resolve, with_videos
from dhp_ray.data.reader import read_contents
from tests.data.samples import picture, processor, talk, video


def images_of(fields: Mapping[str, Any], root: str, limit: int = MediaLimits().max_file_bytes) -> list[bytes]:
    """What a row holds, shown by as many marks as there are."""
    count = len(column_media(fields, "image"))
    turns = read_turns(talk("<image>" * count + "?", "a"))
    return list(read_media(fields, turns, root, MediaLimits(max_file_bytes=limit)).values())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An image root with pictures in it, and a secret beside it."""
    folder = tmp_path / "root"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.png").write_bytes(picture(30, 40))
    (folder / "deep" / "b.png").write_bytes(picture(50, 60))
    (tmp_path / "secret").write_bytes(b"secret")
    return folder


def test_images_of_every_form_are_their_bytes(root: Path) -> None:
    first, second = (root / "a.png").read_bytes(), (root / "deep/b.png").read_bytes()
    assert images_of({"image": "a.png"}, str(root)) == [first]
    assert images_of({"image": ["a.png", "deep/b.png"]}, str(root)) == [first, second]
    assert images_of({"images": [first, {"bytes": second, "path": None}, {"bytes": None, "path": "a.png"}],
                      "image": None}, str(root)) == [first, second, first]
    assert images_of({"image": first}, str(root)) == [first]
    assert images_of({"image": None},
                     str(root)) == images_of({}, str(root)) == images_of({"images": []}, str(root)) == []


@pytest.mark.parametrize("kind", ["image", "video"])
def test_mappings_name_a_file_as_parts_of_the_content_do(root: Path, kind: str) -> None:
    data = (root / "a.png").read_bytes()
    for form in ({kind: "a.png"}, {"type": kind, kind: "a.png", "fps": 2}, {kind: data}, {"url": "a.png"},
                 {"path": "a.png"}, {"bytes": data, "path": "absent.png"}, {"bytes": b"", "path": "a.png"},
                 {kind: {"bytes": None, "path": "a.png"}}, {f"{kind}_url": {"url": "a.png"}},
                 {"type": f"{kind}_url", f"{kind}_url": "a.png"}, {"type": kind, kind: None, "path": "a.png"}):
        for fields in ({kind: form}, {f"{kind}s": form}, {f"{kind}s": [form]}):
            assert shown(root, f"<{kind}>", **fields) == [data]
            assert file_bytes(fields, str(root)) == (0 if data in form.values() else len(data))


def of_videos(root: Path, *texts: str, **columns: Any) -> list[str]:
    """What a row's images and videos are called."""
    return list(read_media(columns, with_videos(columns, read_turns(talk(*texts))), str(root), MediaLimits()))


def test_image_marks_stand_for_the_videos_of_a_row_without_images(root: Path) -> None:
    """The form of LLaVA-NeXT; a row with images, or with marks for videos, says itself which is which."""
    assert of_videos(root, "<image>\nWhat?", "a", video="a.png") == ["video 1"]
    assert of_videos(root, "<image>What?", "a", "<image>", "b", videos=["a.png"] * 2) == ["video 1", "video 2"]
    assert of_videos(root, "<image><video>", "a", video="a.png", image="a.png") == ["image 1", "video 1"]
    for texts, columns, reason in (
            (("<image><image>", "a"), {"video": "a.png"}, "2 <video> marks for 1 videos"),
            (("<image><video>", "a"), {"video": "a.png"}, "1 <image> marks for 0 images"),
            (("<image>", "a"), {"video": "a.png", "image": "a.png"}, "0 <video> marks for 1 videos"),
            (("<image>", "a"), {}, "1 <image> marks for 0 images")):
        with pytest.raises(RowError, match=reason):
            of_videos(root, *texts, **columns)
    (root / "cat.mp4").write_bytes(video())
    row = Row("a", {"conversations": talk("<image>\nWhat?", "a"), "video": "cat.mp4"})
    turns, _, sizes = read_contents(row, processor(), str(root))
    given = processor().encode(talk("<video>\nWhat?", "a"), sizes)
    assert processor().encode_turns(turns, sizes).input_ids.tolist() == given.input_ids.tolist()
    parts = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "What?"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "a"}]
    assert with_videos({"video": "a.png"}, read_turns(messages)) == read_turns(messages)


EMPTY = [None, "", b"", [], [""], [None], {"bytes": None, "path": ""}, [{"image": "", "video": ""}]]


@pytest.mark.parametrize("value", EMPTY)
@pytest.mark.parametrize("column", ["image", "images", "video", "videos"])
def test_an_empty_column_is_a_row_without_an_image(root: Path, column: str, value: Any) -> None:
    assert shown(root, "What?", **{column: value}) == []
    kind = column.removesuffix("s")
    with pytest.raises(RowError, match=f"1 <{kind}> marks for 0 {kind}s; allowed: as many marks as {kind}s"):
        shown(root, f"<{kind}>", **{column: value})
    assert shown(root, f"<{kind}>", **{f"{kind}s": value, kind: "a.png"}) == [(root / "a.png").read_bytes()]


@pytest.mark.parametrize("empty", [None, "", b"", {"bytes": None, "path": ""}])
@pytest.mark.parametrize("kind", MEDIA)
def test_an_empty_entry_of_a_list_is_none_of_a_row(root: Path, kind: str, empty: Any) -> None:
    for column in (kind, f"{kind}s"):
        for values in (["a.png", empty], [empty, "a.png"], [empty, "a.png", empty]):
            assert shown(root, f"<{kind}>", **{column: values}) == [(root / "a.png").read_bytes()]
            with pytest.raises(RowError, match=f"2 <{kind}> marks for 1 {kind}s"):
                shown(root, f"<{kind}><{kind}>", **{column: values})


@pytest.mark.parametrize(("name", "reason"), [
    ("c.png", "image 2: c.png: no such file below data.image_root"),
    ("deep", "image 2: deep is not a file"),
    ("/etc/hostname", "image 2: /etc/hostname leads out of data.image_root"),
    ("../secret", "image 2: '../secret' is not a relative file name"),
    ("deep/../../secret", "image 2: .* without '..'"),
    ("https://example.org/a.png", "image 2: https://example.org/a.png is a URL"),
    ("file:///etc/hostname", "image 2: /etc/hostname leads out of data.image_root"),
    ("file://../secret", "image 2: '../secret' is not a relative file name"),
    ("file://https://example.org/a.png", "is a URL"),
    (f"https://me:secret{'x' * 80}@example.org/a.png", r"^image 2: https://\*\*\*@example\.org/a\.png is a URL"),
    ("data:image/png;base64,A", "image 2: 'data:image/png;base64,A' is not a data URI; allowed: data:image/png;base64"),
    ("data:image/png,AAAA", "is not a data URI"),
    ("a\0.png", "is not a relative file name"),
    ("a.png/x", "image 2: a.png/x: Not a directory"),
    ("x" * 300, "File name too long"),
    ("\ud800.png", r"image 2: '.ud800\.png' is not a file name"),
    (7, "image 2: got int; allowed: a file name or encoded bytes"),
])
def test_an_image_that_cannot_be_had_is_a_bad_row(root: Path, name: object, reason: str) -> None:
    with pytest.raises(RowError, match=reason) as caught:
        images_of({"image": ["a.png", name]}, str(root))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("link", ["out", "deep/out"])
def test_a_link_out_of_the_root_is_refused(root: Path, link: str) -> None:
    (root / link).symlink_to(root.parent / "secret")
    (root / "inside").symlink_to(root / "a.png")
    with pytest.raises(RowError) as caught:
        images_of({"image": link}, str(root))
    secret = root.parent / "secret"
    assert str(caught.value) == (
        f"image 1: {link} leads out of data.image_root ({root}): {root / link} is a link to {secret}; allowed: files "
        f"below it, also after links: copy them there, or set data.image_root={root.parent} and name files below that")
    assert images_of({"image": "inside"}, str(root)) == [(root / "a.png").read_bytes()]


def test_an_absolute_name_below_the_root_is_its_file(root: Path, tmp_path: Path) -> None:
    first, second = (root / "a.png").read_bytes(), (root / "deep/b.png").read_bytes()
    (tmp_path / "link").symlink_to(root)
    (root / "inside").symlink_to(root / "a.png")
    for folder in (root, tmp_path / "link"):
        names = [str(folder / "a.png"), {"path": str(folder / "deep" / "b.png")}, str(folder / "inside"),
                 str(root / "a.png"), str(tmp_path / "link" / "a.png"), f"file://{folder}/a.png"]
        assert images_of({"image": names}, str(folder)) == [first, second, first, first, first, first]
        parts = [{"type": "image_url", "image_url": {"url": str(folder / "a.png")}},
                 {"type": "image", "image": str(folder / "deep/b.png")}]
        assert shown(folder, parts) == [first, second]
        assert file_bytes({"image": str(folder / "a.png")}, str(folder)) == len(first)


@pytest.mark.parametrize("name", ["{beside}/secret", "{root}/../secret", "{root}/out", "{root}2/a.png", "{beside}",
                                  "/"])
def test_an_absolute_name_outside_of_the_root_is_refused(root: Path, name: str) -> None:
    (root / "out").symlink_to(root.parent / "secret")
    (root.parent / "root2").mkdir()
    (root.parent / "root2" / "a.png").write_bytes(picture(30, 40))
    with pytest.raises(RowError, match=r"leads out of data.image_root .*; allowed: files below it|without '..'"):
        images_of({"image": name.format(root=root, beside=root.parent)}, str(root))


@pytest.mark.parametrize("head", ["data:image/png;base64,", "data:image/svg+xml;charset=utf-8;base64,",
                                  "data:;base64,", "DATA:image/PNG;BASE64,"])
def test_a_data_uri_in_a_column_is_its_bytes(root: Path, head: str) -> None:
    data = (root / "a.png").read_bytes()
    uri = head + base64.b64encode(data).decode()
    wrapped = head + base64.encodebytes(data).decode()
    for value in (uri, [uri], {"url": uri}, {"path": uri, "bytes": None}, wrapped):
        assert images_of({"image": value}, str(root)) == [data]
    assert shown(root, [{"type": "image", "image": uri}, {"type": "image_url", "image_url": uri}]) == [data, data]
    assert shown(root, "<video>", videos=[uri]) == [data]
    turns = read_turns(talk("<image>", "a"))
    assert read_media({"image": uri}, turns, "", MediaLimits(), members={}) == {"image 1": data}
    with pytest.raises(RowError, match=r"it has 0\.0 MB; allowed"):
        images_of({"image": uri}, str(root), 10)


@pytest.mark.parametrize("name", [
    base64.b64encode(bytes(300_000)).decode(), "data:image/png;base64," + "?" * 300_000, "data:" + "A" * 300_000,
    "https://example.org/" + "a" * 300_000, "/" + "a/" * 150_000, "a/" * 2000, "b" * 3000])
def test_a_name_of_any_length_gives_a_short_line(root: Path, name: str) -> None:
    for members in (None, {}):
        with pytest.raises(RowError) as caught:
            read_media({"image": name}, read_turns(talk("<image>", "a")), str(root), MediaLimits(), members)
        assert len(str(caught.value)) < 250 + len(str(root))


def test_a_linked_root_is_followed(root: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(root)
    assert resolve(str(tmp_path / "link"), "deep/b.png") == root / "deep/b.png"


def test_a_folder_whose_name_begins_alike_is_outside(root: Path) -> None:
    (root.parent / "root2").mkdir()
    (root.parent / "root2" / "a.png").write_bytes(b"")
    (root / "twin").symlink_to(root.parent / "root2")
    (root / "first").symlink_to("twin")
    for name in ("twin/a.png", "first/a.png", f"{root}/first/a.png"):
        link = root / name.removesuffix("/a.png")
        with pytest.raises(RowError, match=rf": {link} is a link to {root}2; .* data.image_root={root}2 and"):
            resolve(str(root), name)


def test_a_pipe_is_not_opened(root: Path) -> None:
    os.mkfifo(root / "pipe")
    with pytest.raises(RowError, match="pipe is not a file"):
        images_of({"image": "pipe"}, str(root))


def shown(root: Path, content: object, **fields: Any) -> list[bytes]:
    turns = read_turns([{"role": "user", "content": content}, {"role": "assistant", "content": "a"}])
    return list(read_media(fields, turns, str(root), MediaLimits()).values())


def test_parts_bring_their_own_images_or_take_the_next(root: Path) -> None:
    first, second = (root / "a.png").read_bytes(), (root / "deep/b.png").read_bytes()
    uri = "data:image/png;base64," + base64.b64encode(second).decode()
    parts = [
        {"type": "image"}, {"type": "image", "image": "deep/b.png"},
        {"type": "text", "text": "<image> is no mark here", "image": None},
        {"type": "image_url", "image_url": {"url": uri}}, {"type": "image_url", "image_url": {"url": "a.png"}},
        {"type": "image", "bytes": first},
        {"type": "image", "image": {"bytes": None, "path": "a.png"}}, {"type": "image", "text": None, "image": ""}]
    assert shown(root, parts, images=["deep/b.png", "a.png"]) == [second, second, second, first, first, first, first]
    assert shown(root, "<image> and <image>", images=["a.png", second]) == [first, second]


@pytest.mark.parametrize("kind", MEDIA)
def test_a_part_brings_what_it_shows_under_any_key(root: Path, kind: str) -> None:
    """Also in a row with images in a column, of which it would otherwise take the next one."""
    data = (root / "a.png").read_bytes()
    forms: list[Any] = [{key: value} for key in media_keys(kind) for value in (
        ("a.png", {"url": "a.png"}, {kind: {"path": "a.png"}}) if key != "base64" else
        (base64.b64encode(data).decode(), f"data:image/png;base64,{base64.b64encode(data).decode()}"))]
    for form in [*forms, {"bytes": data, "path": "absent.png"}, {kind: "", "url": "a.png"}]:
        for name in (kind, f"{kind}_url"):
            part = {"type": name, **form}
            assert shown(root, [part]) == [data], part
            assert shown(root, [{"type": kind}, part], **{f"{kind}s": [b"stored"]}) == [b"stored", data]
            row = {"messages": [{"role": "user", "content": [part]}]}
            assert file_bytes(row, str(root)) == (len(data) if "a.png" in str(form) else 0)
            assert own_media(row) == [(kind, part)]
    with pytest.raises(RowError, match=r"'data:;base64,\?' is not a data URI"):
        shown(root, [{"type": kind, "base64": "?"}])
    with pytest.raises(RowError, match="1: an image or video has its own nframes, 8; allowed: those of the run"):
        shown(root, [{"type": kind, kind: {"url": "a.png", "nframes": 8}}])


def test_videos_and_images_keep_the_order_of_the_text(root: Path) -> None:
    assert shown(root, "<video>x<image><video>", images=[b"i"], videos=[b"v1", b"v2"]) == [b"v1", b"i", b"v2"]
    with pytest.raises(RowError, match="1 <video> marks for 0 videos; allowed: as many marks as videos"):
        shown(root, "<video>")
    with pytest.raises(RowError, match="0 <video> marks for 1 videos"):
        shown(root, "a", video="a.mp4")
    with pytest.raises(RowError, match=r"video 2: b\.mp4: no such file"):
        shown(root, "<video><image><video>", images=["a.png"], videos=["a.png", "b.mp4"])


def test_parts_name_the_images_of_a_row_by_their_index(root: Path) -> None:
    parts = [{"type": "image", "text": None, "index": 1}, {"type": "text", "text": "x", "index": None},
             {"type": "image", "text": None, "index": 0}]
    assert shown(root, parts, images=[b"first", b"second"]) == [b"second", b"first"]
    for indices, named in (([0, 0], "0, 0"), ([1, 2], "1, 2"), ([0, None], "0, None"), ([-1, 0], "-1, 0")):
        parts = [{"type": "image", "index": index} for index in indices]
        with pytest.raises(RowError, match=f"^the images of a row have the index {named}; allowed: each from 0 to 1 "):
            shown(root, parts, images=[b"first", b"second"])
    for index in ([0], "0", 0.5, float("inf"), float("nan")):
        with pytest.raises(RowError, match=r"^turn 1 has a part of the index .*; allowed: a number from 0 on"):
            shown(root, [{"type": "image", "index": index}], images=[b"first"])
    with pytest.raises(RowError, match=r"^the images of a row have the index 1000"):
        shown(root, [{"type": "image", "index": 10**400}], images=[b"first"])


@pytest.mark.parametrize("name", OWN_SETTINGS)
def test_settings_of_one_image_or_video_are_refused(root: Path, name: str) -> None:
    reason = f"an image or video has its own {name}, 56; allowed: those of the run"
    for part in ({"type": "image", "image": "a.png"}, {"type": "image_url", "image_url": {"url": "a.png"}},
                 {"type": "video", "video": "a.png"}, {"type": "video"}):
        assert len(shown(root, [part | {name: None}], videos=["a.png"] * (part == {"type": "video"}))) == 1
        with pytest.raises(RowError, match=f"^turn 1: {reason}"):
            shown(root, [part | {name: 56}], videos=["a.png"])
    for kind in MEDIA:
        with pytest.raises(RowError, match=reason):
            shown(root, f"<{kind}>", **{kind: {kind: "a.png", name: 56}})


def test_a_video_file_is_sampled_as_the_run_says(root: Path) -> None:
    reason = r"video 1: fps is 1\.0 for a video file; allowed: 2 \(data\.video_fps\)"
    part, encoded = {"type": "video", "video": "a.png"}, [(root / "a.png").read_bytes()]
    assert shown(root, [part | {"fps": 2}]) == shown(root, "<video>", videos=[part | {"fps": 2.0}]) == encoded
    for content, videos in (([part | {"fps": 1.0}], []), ("<video>", [part | {"fps": 1.0}]),
                            ([{"type": "video_url", "video_url": {"url": "a.png"}, "fps": 1.0}], [])):
        with pytest.raises(RowError, match=reason):
            shown(root, content, videos=videos)
    for fps in (2.0, "2.0", None):
        assert shown(root, [{"type": "video", "fps": fps}], videos=["a.png"]) == encoded
    with pytest.raises(RowError, match=reason):
        shown(root, [{"type": "video", "fps": 1.0}], videos=["a.png"])
    for given in ({"video_start": 0}, {"max_pixels": None}, {"index": 0.0}, {"index": None}):
        assert shown(root, [{"type": "video"} | given], videos=["a.png"]) == encoded


@pytest.mark.parametrize(("part", "reason"), [
    ({"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
     "image 1: https://example.org/a.png is a URL"),
    ({"type": "image_url", "image_url": {"url": "file:///etc/hostname"}}, "leads out of data.image_root"),
    ({"type": "image_url", "image_url": {"url": "data:image/png;base64,A"}},
     "'data:image/png;base64,A' is not a data URI"),
    ({"type": "image_url", "image_url": {"url": "data:text,a"}}, "is not a data URI"),
    ({"type": "image_url", "image_url": {"url": "/etc/hostname"}}, "leads out of data.image_root"),
    ({"type": "image_url", "image_url": None}, "turn 1 has a part image_url without url"),
    ({"type": "image", "image": "../secret"}, "is not a relative file name"),
    ({"type": "audio"}, "turn 1 has a part of the type 'audio'; allowed: text, image"),
    (["a"], "turn 1 has a part that holds list"),
    ({"type": "text", "text": None}, "turn 1 has a part text with None; allowed: a text"),
])
def test_a_part_that_cannot_be_had_is_a_bad_row(root: Path, part: object, reason: str) -> None:
    with pytest.raises(RowError, match=reason) as caught:
        shown(root, [part])
    assert "\n" not in str(caught.value)


def test_a_large_file_is_refused_unread(root: Path) -> None:
    with open(root / "huge.png", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(RowError,
                       match=r"image 1: huge.png has 1048576.0 MB; allowed: at most 512 \(data.max_file_mb\)"):
        images_of({"image": "huge.png"}, str(root))
    with pytest.raises(RowError, match=r"it has 0\.0 MB; allowed"):
        images_of({"image": b"x" * 11}, str(root), 10)
