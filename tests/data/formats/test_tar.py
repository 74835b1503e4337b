from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest

from dhp_ray.data.errors import DataError, RowError
from dhp_ray.data.formats import read_rows
from dhp_ray.data.formats.rows import Row
from dhp_ray.data.formats.tar import read_sample, scan_samples, split_name
from dhp_ray.data.index import index_fragments
from dhp_ray.schema import Data
from tests.data.samples import talk

TALK = json.dumps({"id": "other", "conversations": talk("a", "b")}).encode()


def shard(path: Path, members: list[tuple[str, bytes]], form: int = tarfile.PAX_FORMAT) -> Path:
    with tarfile.open(path, "w", format=form) as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def rows_of(path: Path) -> list[Row]:
    return [row for fragment in index_fragments(Data(format="webdataset", path=str(path)))
            for row in read_rows(fragment)]


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_members_of_a_key_are_a_row(form: int, tmp_path: Path) -> None:
    long = "folder/" + "k" * 90
    path = shard(tmp_path / "a.tar", [("1.json", TALK), ("1.0.avif", b"x" * 700), ("1.png", b"y"),
                                      (f"{long}.txt", b" A b. "), (f"{long}.JPG", b"z"),
                                      ("3.md5", b"?"), ("3.json", TALK), ("1.json", TALK)], form)
    rows = rows_of(path)
    assert [row.id for row in rows] == ["1", long, "3", "1#000003"]
    assert not any(row.error for row in rows)
    assert rows[0].fields["images"] == ["1.png", "1.0.avif"]
    assert rows[0].members == {"0.avif": b"x" * 700, "1.0.avif": b"x" * 700, "png": b"y", "1.png": b"y"}
    assert rows[1].fields["messages"] == [{"role": "user", "content": "<image>"},
                                          {"role": "assistant", "content": "A b."}]
    assert "images" not in rows[2].fields


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        (
            [("a.json", TALK), ("a.pkl", b"cos\nsystem\n(S'id'\ntR.")],
            "member a.pkl is a pickle, which can run code when read",
        ),
        ([("a.json", TALK), ("a.x.PYD", b"")], "member a.x.PYD is a pickle"),
        ([("a.json", b"{")], "the member json is not JSON"),
        ([("a.json", b"3")], "the member json holds int"),
        ([("a.png", b"")], "the sample has neither a member json nor txt"),
        ([("a.txt", b"\xff")], "the member txt is not UTF-8 text"),
    ],
)
def test_a_sample_that_cannot_be_used_names_itself(
    members: list[tuple[str, bytes]], reason: str, tmp_path: Path
) -> None:
    rows = rows_of(shard(tmp_path / "a.tar", [*members, ("b.json", TALK)]))
    assert [row.id for row in rows] == ["a", "b"]
    assert rows[0].error.startswith(reason)
    assert not rows[1].error


def test_images_come_in_the_order_of_their_numbers_however_they_were_sorted(tmp_path: Path) -> None:
    names = ["k.png", *(f"k.{number}.png" for number in range(1, 12))]
    path = shard(tmp_path / "a.tar", [("k.json", TALK), *((name, b"x") for name in sorted(names))])
    assert rows_of(path)[0].fields["images"] == names


@pytest.mark.parametrize("kind", ["txt", "json"])
def test_a_second_text_of_a_key_is_refused(kind: str, tmp_path: Path) -> None:
    [row] = rows_of(shard(tmp_path / "a.tar", [(f"photo.0.{kind}", TALK), (f"photo.1.{kind}", TALK)]))
    assert row.error == f"member photo.1.{kind} is a second {kind} of one key; allowed: one of each key"


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    [row] = rows_of(shard(tmp_path / "a.tar", [("1.txt", b"\xef\xbb\xbfA cat."), ("1.png", b"x")]))
    assert row.fields["messages"][1]["content"] == "A cat."


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_are_refused(kind: bytes, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        member = tarfile.TarInfo("a.png")
        member.type, member.linkname = kind, "/etc/hostname"
        archive.addfile(member)
    row = rows_of(tmp_path / "a.tar")[0]
    assert row.error.startswith("member a.png is a link or another special file")


def test_names_that_lead_elsewhere_are_only_names(tmp_path: Path) -> None:
    path = shard(tmp_path / "a.tar", [("../../evil.json", TALK), ("/etc/evil.png", b"x")])
    assert [row.id for row in rows_of(path)] == ["../../evil", "/etc/evil"]
    assert sorted(found.name for found in tmp_path.iterdir()) == ["a.tar"]


def test_a_cut_shard_is_one_line(tmp_path: Path) -> None:
    path = shard(tmp_path / "a.tar", [("a.json", TALK), ("b.json", TALK * 100)])
    path.write_bytes(path.read_bytes()[:2300])
    for data in (path.read_bytes(), b"hello", b"\x1f\x8b\x08" + b"\0" * 600):
        path.write_bytes(data)
        with pytest.raises(DataError,
                           match=r"a.tar is not a tar file that can be read: .*; allowed: uncompressed tar") as caught:
            list(scan_samples(str(path), lambda position: None))
        assert "\n" not in str(caught.value)


def test_a_part_that_is_cut_short_is_a_bad_sample(tmp_path: Path) -> None:
    path = shard(tmp_path / "a.tar", [("a.json", TALK + b" " * 3000)])
    with pytest.raises((RowError, tarfile.TarError), match=r"cut short|unexpected end"):
        read_sample(path.read_bytes()[:1024])


def test_a_key_ends_at_the_first_dot_of_the_file() -> None:
    assert split_name("a.b/c.d.png") == ("a.b/c", "d.png")
    assert split_name("c") == ("c", "")


@pytest.mark.parametrize("key", ["path", "image", "url"])
def test_frames_given_as_mappings_are_no_images(key: str, tmp_path: Path) -> None:
    for videos in ([[{key: "0.png"}, {key: "a.1.png"}]], {"video": [{key: "0.png"}, {key: "1.png"}], "fps": 4}):
        row = json.dumps({"conversations": talk("<image><video>", "a"), "videos": videos}).encode()
        [found] = rows_of(shard(tmp_path / "a.tar", [("a.json", row), ("a.0.png", b"0"), ("a.1.png", b"1"),
                                                     ("a.2.png", b"2")]))
        assert found.fields["images"] == ["a.2.png"]
