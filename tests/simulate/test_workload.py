"""Workloads: samples as published distributions have them, cut by the rules of each family; and what is refused."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import pytest

from dhp_ray.config import CONF
from dhp_ray.data.families import FAMILIES
from dhp_ray.data.families.base import SLICE_TOKENS
from dhp_ray.schema import ConfigError
from dhp_ray.simulate.settings import (
    Numbers,
    Part,
    SourceSettings,
    WorkloadSettings,
    load_workload,
    sources_of,
)
from dhp_ray.simulate.workload import Workload, drawn_numbers

NAMES = sorted(path.stem for path in (CONF / "workload").glob("*.yaml"))
DATA = Path(os.environ.get("DHP_RAY_TEST_DATA", "none")) / "lengths"
has_lengths = pytest.mark.skipif(not DATA.is_dir(), reason="DHP_RAY_TEST_DATA names no folder with lengths/")

# text tokens as ms-swift's table has them: mean, deviation, least, most
PUBLISHED = {"llava_video": (273.7, 78.8, 107, 638), "llava_instruct": (630.7, 143, 301, 1166),
             "sharegpt_4o": (599.8, 140, 0, 1e9), "chartqa": (36.8, 6.5, 0, 1e9), "ocr_vqa": (32.3, 5.8, 0, 1e9),
             "sa1b_captions": (106.4, 18.5, 0, 1e9), "docqa_rl": (8307, 7749, 202, 32563)}


def of(**values: object) -> WorkloadSettings:
    return WorkloadSettings(sources=[SourceSettings(name="a", **values)])  # type: ignore[arg-type]


@has_lengths
@pytest.mark.parametrize("family", ["internvl", *(pytest.param(name, marks=pytest.mark.slow) for name, family
                                                  in FAMILIES.items() if family.marks and name != "internvl")])
@pytest.mark.parametrize("name", NAMES)
def test_every_workload_gives_samples_for_every_family(name: str, family: str) -> None:
    settings = load_workload(name)
    samples = Workload(settings, family).batch(3, 60)
    assert len({sample.id for sample in samples}) == 60
    known = FAMILIES[family]
    for sample in samples:
        assert sample.text_tokens >= 1
        area = known.image_settings["merge_size"] ** 2
        assert sample.vision_tokens == sum(math.prod(grid) for grid in sample.vision_grids) // area
        assert all(height % 2 == width % 2 == 0 for _, height, width in sample.vision_grids)
    assert all(source.source for _, source in sources_of(settings)), "a source is missing"


@pytest.mark.parametrize("name", PUBLISHED)
def test_text_is_as_long_as_published(name: str) -> None:
    mean, deviation, least, most = PUBLISHED[name]
    text = np.array([sample.text_tokens for sample in Workload(load_workload(name), "qwen2_5_vl").batch(0, 20_000)])
    assert text.mean() == pytest.approx(mean, rel=0.03)
    assert text.std() == pytest.approx(deviation, rel=0.12)  # the tails are cut where the published ones end
    assert text.min() >= least
    assert text.max() <= most


def test_videos_are_as_long_as_published() -> None:
    samples = Workload(load_workload("msr_vtt"), "internvl").batch(0, 4000)  # 256 tokens a second
    assert np.mean([sample.vision_tokens for sample in samples]) / 256 == pytest.approx(14.8, rel=0.06)
    samples = Workload(load_workload("internvid_videos"), "internvl").batch(0, 8000)
    seconds = np.array([sample.vision_tokens for sample in samples]) / 256
    assert [float((seconds <= 300).mean()), float(((seconds > 300) & (seconds <= 510)).mean())] == [
        pytest.approx(0.49, abs=0.02), pytest.approx(0.26 * 210 / 300, abs=0.02)]
    assert seconds.max() == 512  # frames


def test_a_batch_depends_on_the_seed_and_its_number_alone() -> None:
    workload, again = (Workload(load_workload("llava_video"), "qwen3_vl") for _ in range(2))
    first = workload.batch(1, 50)
    assert again.batch(1, 50) == first
    assert workload.batch(1, 50, seed=1) != first
    assert workload.batch(2, 50) != first


def test_a_mixture_has_its_shares() -> None:
    settings = WorkloadSettings(mixture=[Part(workload="chartqa", weight=3), Part(workload="docqa_rl", weight=1)])
    samples = Workload(settings, "qwen2_5_vl").batch(0, 4000)
    assert np.mean([sample.id.startswith("docqa") for sample in samples]) == pytest.approx(0.25, abs=0.02)


def test_long_samples_are_left_out() -> None:
    settings = load_workload("docqa_rl")
    settings.max_tokens = 3000
    samples = Workload(settings, "qwen2_5_vl").batch(0, 200)
    assert len(samples) == 200
    assert max(sample.num_tokens for sample in samples) <= 3000
    settings.max_tokens = 10
    with pytest.raises(ConfigError, match=r"workload.max_tokens: got 10; allowed: more, or 0"):
        Workload(settings, "qwen2_5_vl").batch(0, 5)


def test_long_videos_are_cut_into_pieces() -> None:
    samples = [sample for sample in Workload(load_workload("llava_video"), "qwen3_vl").batch(0, 20)
               if sample.vision_tokens > SLICE_TOKENS]
    assert samples
    assert all(len(sample.vision_grids) >= sample.vision_tokens / SLICE_TOKENS for sample in samples)
    assert max(math.prod(grid) // 4 for sample in samples for grid in sample.vision_grids) <= SLICE_TOKENS


@pytest.mark.parametrize("family", ["llama", "mpt"])
def test_models_of_text_and_families_that_are_not_known_take_text_alone(family: str) -> None:
    assert Workload(load_workload("docqa_rl"), family).batch(0, 3)[0].vision_grids == ()
    with pytest.raises(ConfigError, match="workload: source chartqa: an image; allowed: text, which is all that "):
        Workload(load_workload("chartqa"), family).batch(0, 3)


@pytest.mark.parametrize(("numbers", "mean", "deviation"), [
    (Numbers(mean=7), 7, 0), (Numbers(kind="normal", mean=50, deviation=5), 50, 5),
    (Numbers(kind="lognormal", mean=50, deviation=60), 50, 60),
    (Numbers(kind="bins", bins=[[0, 2, 1], [10, 10, 3]]), 0.25 * 1 + 0.75 * 10, None)])
def test_distributions(numbers: Numbers, mean: float, deviation: float | None) -> None:
    found = drawn_numbers(numbers, 200_000, np.random.default_rng(0))
    assert found.mean() == pytest.approx(mean, rel=0.02)
    if deviation is not None:
        assert found.std() == pytest.approx(deviation, rel=0.05, abs=1e-9)


SOME = Numbers(mean=5)


@pytest.mark.parametrize(("settings", "words"), [
    (WorkloadSettings(), "workload.sources: got neither of sources and mixture; allowed: exactly one of the two"),
    (WorkloadSettings(mixture=[Part(workload="chartqa")], sources=[SourceSettings(name="a")]),
     "workload.sources: got both"),
    (WorkloadSettings(mixture=[Part(workload="nothing")]), "workload: got 'nothing'; allowed: caption_heavy, "),
    (WorkloadSettings(mixture=[Part(workload="video_heavy")]), "workload.mixture: got 'video_heavy', a mixture itself"),
    (WorkloadSettings(sources=[SourceSettings(text_tokens=SOME)]), "workload source (unnamed): name: got nothing"),
    (of(), "workload source a: text_tokens: got nothing; allowed: a distribution, or a path with rows"),
    (of(text_tokens=SOME, images=SOME), "workload source a: image_width: got nothing with images"),
    (of(text_tokens=SOME, videos=SOME), "workload source a: video_seconds: got nothing with videos"),
    (of(text_tokens=Numbers(minimum=9, maximum=3)), "workload source a: text_tokens: got minimum 9; allowed: at most"),
    (of(images=Numbers(mean=1e9), image_width=Numbers(mean=9), image_height=Numbers(mean=9)),
     "workload source a: images: got mean 1e+09; allowed: at most 100000"),
    (of(text_tokens=Numbers(kind="lognormal")), "workload source a: text_tokens: got mean 0; allowed: above 0"),
    (of(text_tokens=Numbers(kind="bins", bins=[[5, 1, 1]])), "workload source a: text_tokens: bins: got [[5, 1, 1]]"),
    (of(text_tokens=Numbers(kind="bins", bins=[["a", "b", 1]])),  # type: ignore[list-item]
     "workload source a: text_tokens: bins: got [['a', 'b', 1]]; allowed: [[from, to, weight], ...]"),
    (of(text_tokens=Numbers(kind="bins", bins=[[1, 5, 0]])), "workload source a: text_tokens: bins: got [[1, 5, 0]]"),
    (of(path="/no/such.csv"), "workload: /no/such.csv cannot be read: FileNotFoundError"),
    (of(text_tokens=SOME, images=Numbers(mean=1), image_width=Numbers(mean=8), image_height=Numbers(mean=4000)),
     "workload: source a: an image of 8x4000 pixels has the aspect ratio 500; allowed: at most 200")])
def test_what_a_workload_cannot_be_is_one_line(settings: WorkloadSettings, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Workload(settings, "qwen2_5_vl").batch(0, 1)
    assert str(raised.value).startswith(words)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("text", "words"), [
    ("tokens\n5\n", "KeyError: 'num_tokens'; allowed: a CSV file with whole numbers in the column num_tokens"),
    ("num_tokens\nmany\n", "ValueError: "), ("num_tokens\n", "has no rows"), ("num_tokens\n0\n", "less than 1 token")])
def test_a_damaged_file_of_rows_is_one_line(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "rows.csv"
    file.write_text(text)
    with pytest.raises(ConfigError) as raised:
        Workload(of(path=str(file)), "qwen2_5_vl")
    assert words in str(raised.value)


def test_files_are_looked_for_in_the_folder_that_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DHP_RAY_TEST_DATA", raising=False)
    (tmp_path / "rows.csv").write_text("num_tokens\n123\n")
    with pytest.raises(ConfigError, match=r"workload.folder: got nothing for rows.csv; allowed: the folder that"):
        Workload(of(path="rows.csv"), "qwen2_5_vl")
    settings = of(path="rows.csv")
    settings.folder = str(tmp_path)
    assert Workload(settings, "qwen2_5_vl").batch(0, 1)[0].num_tokens == 123
