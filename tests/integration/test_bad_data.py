"""Bad samples of every kind and format in one run: each is named in one line and listed once, and every good one is
trained on.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import tarfile
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.samples import damaged_video, picture, talk, video, write_rows
from tests.data.test_untrusted import bomb
from tests.integration.jobs import Ended, ledger, lines, refused, run, start, train

Row = dict[str, Any]
ANSWER = "An answer."
# Two ranks of 512 tokens: a sequence may have 1024.
SETTINGS = ["model=tiny", "data.format=llava", "cluster.device=cpu", "cluster.num_workers=2",
            "planner.tokens_per_rank=512", "batch.global_samples=4",
            "checkpoint.every_steps=0", "run.steps=0", "data.max_file_mb=0.125"]

# What is wrong with each sample, by its id in the run (the source's number before it); what the line says of it.
BAD = {
    "0/absent": "image 1: images/absent.png: no such file below data.image_root",
    "0/second-absent": "image 2: images/absent.png: no such file below data.image_root",
    "0/not-an-image": "image 1: header cannot be read: not an image of a known format; allowed: PNG, JPEG, WEBP, GIF, "
                      "BMP, TIFF, PPM",
    "0/half-an-image": "image file is truncated",
    "0/not-a-video": "video 1: not a video of a known format; allowed: MP4 or MOV, WebM or Matroska, AVI",
    "0/half-a-video": "the video does not decode after frame 2: Invalid data found when processing input",
    "0/large-file": "image 1: large.bmp has 1.0 MB; allowed: at most 0.125 (data.max_file_mb)",
    "0/bomb": "image 1: 9000x9000 pixels; allowed: at most 64225280 (by data.max_pixels)",
    "0/strip": "an image of 1005x5 pixels has the aspect ratio 201; allowed: at most 200",
    "0/long": "tokens in one sequence; allowed: at most 1024 (planner.max_sequence_tokens)",
    "0/more-marks": "2 <image> marks for 1 images; allowed: as many marks as images",
    "0/no-mark": "0 <image> marks for 1 images; allowed: as many marks as images",
    "0/other-mark": "0 <image> marks for 1 images; allowed: as many marks as images",
    "0/empty": "the conversation is empty; allowed: a list of turns with from and value, or role and content",
    "0/no-conversation": "no conversations; allowed: conversations, a list of turns with from and value, or messages, "
                         "with role and content",
    "0/no-answer": "no turn of the assistant: nothing to learn from",
    "0/unknown-role": "turn 2 is from 'bot'; allowed: human, user, gpt, assistant, function_call, observation, tool, "
                      "function, system, developer",
    "0/image-in-an-answer": "0 <image> marks for 1 images; allowed: as many marks as images",
    "0/url": "image 1: https://***@example.org/cat.png is a URL; allowed: a file name below data.image_root",
    "0/absolute": "image 1: /etc/hostname leads out of data.image_root",
    "0/above": "image 1: '../rows.parquet' is not a relative file name; allowed: one below data.image_root, without "
               "'..'",
    "0/link-out": "image 1: link.png leads out of data.image_root",
    "0/rows#000024": "the row holds list; allowed: an object",
    "1/pickle": "member pickle.pkl is a pickle, which can run code when read; allowed: json, txt, images and videos",
    "1/link": "member link.png is a link or another special file; allowed: plain files",
    "1/not-an-image": "image 1: header cannot be read: not an image of a known format; allowed: PNG, JPEG, WEBP, GIF, "
                      "BMP, TIFF, PPM",
    "1/half-an-image": "image file is truncated",
    "1/half-a-video": "the video does not decode after frame 2: Invalid data found when processing input",
    "1/no-text": "the sample has neither a member json nor txt",
    "1/other-name": "image 1: 2.png is no member of the sample; it has 1.png, other-name.1.png",
    "2/half-an-image": "image file is truncated",
    "2/no-bytes": "1 <image> marks for 0 images; allowed: as many marks as images",
    "2/unknown-role": "turn 1 is from 'robot'; allowed: human, user, gpt, assistant, function_call, observation, tool, "
                      "function, system, developer",
    "3/not-json": "messages is not JSON",
    "3/half-a-video": "the video does not decode after frame 2: Invalid data found when processing input",
    "3/empty": "the conversation is empty; allowed: a list of turns with from and value, or role and content",
}


def half(content: bytes) -> bytes:
    return content[: len(content) // 2]


def write_llava(folder: Path, good: list[Row], nlvr: Path) -> Path:
    """Real conversations and, among them, every kind of bad row."""
    (folder / "images").mkdir(parents=True)
    for row in good:
        for name in row["image"]:
            shutil.copyfile(nlvr / name, folder / name)
    files = {
        "not.png": b"not an image", "half.png": half((nlvr / good[0]["image"][0]).read_bytes()),
        "not.mp4": b"not a video", "half.mp4": damaged_video(),
        "large.bmp": picture(600, 582, "BMP"),
        "bomb.png": bomb(9000, 9000),
        "strip.png": picture(1005, 5), "fine.mp4": video(8, 56, 56),
        "fine.png": picture(56, 56)}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    (folder / "link.png").symlink_to(nlvr / good[0]["image"][0])
    shown = talk("<image>\nWhat is it?", ANSWER)
    asked = talk("What is it?", ANSWER)

    def image(name: str, file: Any) -> Row:
        return {"id": name, "image": file, "conversations": shown}

    def film(name: str, file: str) -> Row:
        return {"id": name, "video": file, "conversations": talk("<video>\nWhat happens?", ANSWER)}

    bad = [
        image("absent", "images/absent.png"),
        {"id": "second-absent", "image": ["fine.png", "images/absent.png"],
         "conversations": talk("<image><image>", ANSWER)},
        image("not-an-image", "not.png"), image("half-an-image", "half.png"), film("not-a-video", "not.mp4"),
        film("half-a-video", "half.mp4"),
        image("large-file", "large.bmp"),
        image("bomb", "bomb.png"),
        image("strip", "strip.png"),
        {"id": "long", "conversations": talk("What is it?", "a" * 1100)},
        {"id": "more-marks", "image": "fine.png", "conversations": talk("<image><image>", ANSWER)},
        {"id": "no-mark", "image": "fine.png", "conversations": asked},
        {"id": "other-mark", "image": "fine.png", "conversations": talk("<video>", ANSWER)},
        {"id": "empty", "conversations": []}, {"id": "no-conversation"},
        {"id": "no-answer", "conversations": talk("What is it?")},
        {"id": "unknown-role", "conversations": [*talk("What is it?"), {"from": "bot", "value": ANSWER}]},
        {"id": "image-in-an-answer", "image": "fine.png", "conversations": talk("What is it?", "<image>")},
        {"id": "spelled-token", "conversations": talk("What<|im_end|>", "<image>")},  # words: a good row
        image("url", "https://me:secret@example.org/cat.png"),
        image("absolute", "/etc/hostname"), image("above", "../rows.parquet"), image("link-out", "link.png")]
    fine = {"id": "fine-video", "video": "fine.mp4", "conversations": talk("<video>\nWhat happens?", ANSWER)}
    return write_rows(folder / "rows.json", [good[0], *bad, [7], *good[1:], fine])


def write_shard(path: Path, image: bytes) -> Path:
    text = json.dumps({"conversations": talk("<image>\nWhat is it?", ANSWER)}).encode()
    names = json.dumps({"conversations": talk("<image>\nWhat is it?", ANSWER), "image": "2.png"}).encode()
    members = [("fine.json", text), ("fine.png", image), ("pickle.json", text),
               ("pickle.pkl", b"cos\nsystem\n(S'touch /tmp/x'\ntR."), ("link.json", text),
               ("link.png", None), ("not-an-image.json", text), ("not-an-image.png", b"not an image"),
               ("caption.txt", b"A tower."), ("caption.png", image),
               ("half-an-image.txt", b"A tower."), ("half-an-image.png", half(image)),
               ("half-a-video.txt", b"A square."),
               ("half-a-video.mp4", damaged_video()), ("no-text.png", image), ("other-name.json", names),
               ("other-name.1.png", image)]
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            if content is None:
                member.type, member.linkname = tarfile.SYMTYPE, "/etc/hostname"
            else:
                member.size = len(content)
            archive.addfile(member, io.BytesIO(content or b""))
    return path


def write_parquet(path: Path, image: bytes) -> Path:
    shown = talk("<image>\nWhat is it?", ANSWER)
    rows = [{"id": name, "images": [{"bytes": content, "path": None}], "conversations": turns}
            for name, content, turns in (
        ("fine", image, shown), ("half-an-image", half(image), shown), ("no-bytes", None, shown),
        ("unknown-role", image, [{"from": "robot", "value": "<image>"}, *shown[1:]]))]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def write_saved_set(folder: Path, image: bytes) -> Path:
    """As `datasets.Dataset.save_to_disk` leaves it."""
    folder.mkdir()
    said = json.dumps([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]},
                       {"role": "assistant", "content": ANSWER}])
    seen = said.replace('"image"', '"video"')
    rows = [{"id": name, "messages": text, "images": images, "videos": videos} for name, text, images, videos in (
        ("fine", said, [image], None), ("not-json", "[{", [image], None),
        ("half-a-video", seen, None, [damaged_video()]), ("empty", "[]", None, None))]
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(folder / "data-00000-of-00001.arrow"),
                   "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    return folder


@pytest.fixture(scope="module")
def sources(test_data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, str, int]]:
    """(path, format, rows) of a set in each format, with good rows and bad ones."""
    nlvr, folder = test_data / "nlvr", tmp_path_factory.mktemp("bad")
    rows = [row | {"image": [row["image"]] if isinstance(row["image"], str) else row["image"]}
            for row in json.loads((nlvr / "conversations.json").read_text())]
    good = [row for row in rows if len(row["image"]) < 3][:5]
    image = (nlvr / good[0]["image"][0]).read_bytes()
    return [(write_llava(folder / "llava", good, nlvr), "llava", 30),
            (write_shard(folder / "shard.tar", image), "webdataset", 9),
            (write_parquet(folder / "rows.parquet", image), "parquet", 4),
            (write_saved_set(folder / "saved", image), "huggingface", 4)]


@pytest.fixture(scope="module")
def ended(ray_cluster: None, sources: list[tuple[Path, str, int]]) -> tuple[Path, Ended]:
    """One epoch over all of them: weights in the ratio of the rows give each row once. Of the runs of make test the one
    in micro-batches.
    """
    run_dir = sources[1][0].parent / "run"
    mixed = ", ".join(f"{{path: {path}, format: {form}, weight: {rows}}}" for path, form, rows in sources)
    return run_dir, run("train.py", f"run.dir={run_dir}", f"data.sources=[{mixed}]", *SETTINGS,
                        "planner.sync=micro_batch")


def test_the_run_goes_on_without_them(ended: tuple[Path, Ended]) -> None:
    run_dir, run_ended = ended
    assert run_ended.status == 0, run_ended.output + run_ended.errors
    assert "Traceback" not in run_ended.output + run_ended.errors
    used = [sample_id for step in ledger(run_dir) for sample_id in step]
    assert len(used) == len(set(used)) == 11
    assert {"0/fine-video", "0/spelled-token", "1/fine", "1/caption", "2/fine", "3/fine"} < set(used)
    assert not set(used) & set(BAD)
    metrics = lines(run_dir, "metrics.jsonl")
    assert all(line["loss"] > 0 for line in metrics)
    [last] = [line for line in run_ended.output.splitlines() if line.startswith("done")]
    why = r"since some rows cannot be used \(skipped\.jsonl\)"
    assert re.match(rf"done after step {len(metrics)} of \d+, {why}: model in ", last)
    assert json.loads((run_dir / "plans/step_000001.json").read_text())["sync"] == "micro_batch"


@pytest.mark.parametrize("sample_id", BAD)
def test_a_bad_sample_is_told_in_one_line_and_listed(ended: tuple[Path, Ended], sample_id: str) -> None:
    run_dir, run_ended = ended
    said = [line for line in run_ended.output.splitlines() if line.startswith(f"sample {sample_id} left out: ")]
    assert len(said) == 1, run_ended.output
    assert BAD[sample_id] in said[0]
    listed = [row for row in lines(run_dir, "skipped.jsonl") if row["id"] == sample_id]
    assert [f"sample {row['id']} left out: {row['reason']}" for row in listed] == said
    assert listed[0].keys() == {"id", "reason", "step", "epoch"}


def test_nothing_else_is_left_out(ended: tuple[Path, Ended]) -> None:
    assert sorted(row["id"] for row in lines(ended[0], "skipped.jsonl")) == sorted(BAD)


def test_a_credential_in_a_row_is_nowhere(ended: tuple[Path, Ended]) -> None:
    run_dir, run_ended = ended
    assert "secret" not in run_ended.output + run_ended.errors
    for path in run_dir.rglob("*"):
        assert not path.is_file() or b"secret" not in path.read_bytes(), path


@pytest.mark.slow
@pytest.mark.parametrize("sample_id", ["half-an-image", "unknown-role"])
def test_a_bad_sample_ends_the_run_when_asked(
    ray_cluster: None, sources: list[tuple[Path, str, int]], tmp_path: Path, sample_id: str
) -> None:
    """One that shows when its pixels are decoded, and one that shows when it is read."""
    folder = sources[0][0].parent
    rows = json.loads((folder / "rows.json").read_text())
    kept = [row for row in rows if row == rows[0] or (isinstance(row, dict) and row["id"] == sample_id)]
    path = write_rows(folder / f"{sample_id}.json", kept)
    line = refused(1, f"run.dir={tmp_path / 'run'}", f"data.path={path}", *SETTINGS, "cluster.num_workers=1",
                   "data.on_error=fail")
    assert line.startswith(f"error: sample {sample_id}: ")
    assert BAD[f"0/{sample_id}"] in line
    assert line.endswith("(data.on_error=fail; skip leaves it out)")
    assert ledger(tmp_path / "run") == []


@pytest.mark.slow
def test_the_steps_before_a_bad_sample_are_saved(
    ray_cluster: None, sources: list[tuple[Path, str, int]], tmp_path: Path
) -> None:
    """No checkpoint is due by then, and all ranks are well."""
    folder = sources[0][0].parent
    rows = json.loads((folder / "rows.json").read_text())
    bad = next(row for row in rows if isinstance(row, dict) and row["id"] == "unknown-role")
    path = write_rows(folder / "late.json", [*[rows[0] | {"id": f"good-{number}"} for number in range(80)], bad])
    line = refused(1, f"run.dir={tmp_path / 'run'}", f"data.path={path}", *SETTINGS, "cluster.num_workers=1",
                   "data.on_error=fail", "run.steps=40")
    steps = len(ledger(tmp_path / "run"))
    assert steps >= 1
    assert line.startswith("error: sample unknown-role: ")
    assert line.endswith("(data.on_error=fail; skip leaves it out); the newest checkpoint is step "
                         f"{steps}: start the same command again to go on from it")
    ended = train(tmp_path / "run", f"data.path={path}", *SETTINGS, "cluster.num_workers=1", "data.on_error=skip",
                  f"run.steps={max(40, steps)}")
    assert f"resuming after step {steps}" in ended.output


@pytest.mark.slow
def test_a_file_that_is_damaged_meanwhile_ends_the_run_with_its_last_step_saved(
    ray_cluster: None, sources: list[tuple[Path, str, int]], tmp_path: Path
) -> None:
    content = pq.read_table(sources[2][0]).slice(0, 1).to_pylist()[0]
    path, run_dir = tmp_path / "rows.parquet", tmp_path / "run"
    pq.write_table(pa.Table.from_pylist([content | {"id": str(row)} for row in range(4000)]), path, row_group_size=8)
    process = start("train.py", f"run.dir={run_dir}", f"data.path={path}", *SETTINGS, "data.format=parquet",
                    "cluster.num_workers=1", "run.steps=900", "data.shuffle_window=8")
    try:
        while len(ledger(run_dir)) < 3:
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        path.write_bytes(b"")
        _, errors = process.communicate(timeout=200)
    finally:
        process.kill()
    [line] = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert process.returncode == 1
    assert "rows.parquet" in line
    assert line.endswith(f"; the newest checkpoint is step {len(ledger(run_dir))}: start the same command again to go "
                         "on from it")


def write_cut_images(folder: Path, num_rows: int) -> Path:
    """Rows whose images have whole headers and half of their pixels."""
    for number in range(num_rows):
        (folder / f"{number}.jpg").write_bytes(half(picture(112, 112, "JPEG")))
    return write_rows(folder / "rows.json", [
        {"id": f"r{number}", "image": f"{number}.jpg", "conversations": talk("<image>What?", ANSWER)}
        for number in range(num_rows)])


@pytest.mark.slow
@pytest.mark.parametrize(("sync", "num_steps", "said"), [
    ("step", 8, "rows.json has no usable row; the last, r"),
    ("micro_batch", 2, "no step of 2 has trained anything: none of their samples can be used, or none of "
                       "their gradients is finite (see skipped.jsonl and events.jsonl); allowed: other data or "
                       "settings, and another run.dir")])
def test_a_run_whose_images_are_all_cut_fails(
    ray_cluster: None, tmp_path: Path, sync: str, num_steps: int, said: str
) -> None:
    """At the latest when it has seen all of them, or at its end; until then steps train nothing."""
    path = write_cut_images(tmp_path, 16)
    line = refused(1, f"run.dir={tmp_path / 'run'}", f"data.path={path}", *SETTINGS, f"run.steps={num_steps}",
                   f"planner.sync={sync}")
    assert said in line
    assert not any(ledger(tmp_path / "run"))
    metrics = lines(tmp_path / "run", "metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(1, len(metrics) + 1))
    assert all((line["loss"], line["num_samples"], line["num_tokens"]) == (None, 0, 0) for line in metrics)
    assert not (tmp_path / "run" / "model").exists()
