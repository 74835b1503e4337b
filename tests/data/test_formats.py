from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dhp_ray.data.errors import RowError
from dhp_ray.data.formats import conversation_of, images_of, resolve
from tests.data.samples import picture, talk


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
    assert images_of({"images": [first, {"bytes": second, "path": None}, {"bytes": None, "path": "a.png"}], "image": None}, str(root)) == [first, second, first]
    assert images_of({"image": first}, str(root)) == [first]
    assert images_of({"image": None}, str(root)) == images_of({}, str(root)) == images_of({"images": []}, str(root)) == []


@pytest.mark.parametrize(("name", "reason"), [
    ("c.png", "image 2: c.png: no such file below data.image_root"),
    ("deep", "image 2: deep is not a file"),
    ("", "image 2: '' is not a relative file name"),
    ("/etc/hostname", "image 2: '/etc/hostname' is not a relative file name"),
    ("../secret", "image 2: '../secret' is not a relative file name"),
    ("deep/../../secret", "image 2: .* without '..'"),
    ("https://example.org/a.png", "image 2: https://example.org/a.png is a URL"),
    ("file:///etc/hostname", "is a URL"),
    ("data:image/png;base64,AAAA", "is a URL"),
    ("a\0.png", "is not a relative file name"),
    ("a.png/x", "image 2: a.png/x: Not a directory"),
    ("x" * 300, "File name too long"),
    (7, "image 2: got int; allowed: a file name or encoded bytes"),
    (None, "image 2: got NoneType"),
    ({"bytes": None, "path": None}, "image 2: got NoneType"),
])
def test_an_image_that_cannot_be_had_is_a_bad_row(root: Path, name: object, reason: str) -> None:
    with pytest.raises(RowError, match=reason) as caught:
        images_of({"image": ["a.png", name]}, str(root))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("link", ["out", "deep/out"])
def test_a_link_out_of_the_root_is_refused(root: Path, link: str) -> None:
    (root / link).symlink_to(root.parent / "secret")
    (root / "inside").symlink_to(root / "a.png")
    with pytest.raises(RowError, match=r"leads out of data\.image_root"):
        images_of({"image": link}, str(root))
    assert images_of({"image": "inside"}, str(root)) == [(root / "a.png").read_bytes()]


def test_a_linked_root_is_followed(root: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(root)
    assert resolve(str(tmp_path / "link"), "deep/b.png") == root / "deep/b.png"


def test_a_folder_whose_name_begins_alike_is_outside(root: Path) -> None:
    (root.parent / "root2").mkdir()
    (root.parent / "root2" / "a.png").write_bytes(b"")
    (root / "twin").symlink_to(root.parent / "root2")
    with pytest.raises(RowError, match="leads out"):
        resolve(str(root), "twin/a.png")


def test_a_pipe_is_not_opened(root: Path) -> None:
    os.mkfifo(root / "pipe")
    with pytest.raises(RowError, match="pipe is not a file"):
        images_of({"image": "pipe"}, str(root))


def test_a_video_is_a_bad_row(root: Path) -> None:
    with pytest.raises(RowError, match="the row has a video; allowed: its frames as images"):
        images_of({"video": "a.mp4"}, str(root))


def test_conversations_are_lists_or_json_text() -> None:
    assert conversation_of({"conversations": talk("a", "b")}) == talk("a", "b")
    assert conversation_of({"conversations": json.dumps(talk("a", "b"))}) == talk("a", "b")
    for value, reason in ((None, "no conversations"), (3, "no conversations"), ('"a"', "no conversations"), ("[{", "conversations is not JSON")):
        with pytest.raises(RowError, match=reason):
            conversation_of({"conversations": value})
