from __future__ import annotations

import io
import math
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from dhp_ray.config import PREPARE_DATA, load
from dhp_ray.data.errors import DataError
from dhp_ray.data.images import image_size
from dhp_ray.data.index import index_fragments
from dhp_ray.data.synthetic import (
    COLOURS,
    KINDS,
    LETTER_WIDTH,
    LINE_HEIGHT,
    parameters,
    sample,
    stored_parameters,
    target_tokens,
    write,
)
from dhp_ray.schema import PreparedData, Synthetic
from tests.data.samples import processor

PROCESSOR = processor()
DATA = PreparedData(synthetic=Synthetic(num_samples=150))
ROWS = [sample(index, DATA, 0, PROCESSOR) for index in range(150)]


def num_tokens(row: dict) -> int:
    return len(PROCESSOR.encode(row["conversations"], [image_size(image) for image in row["images"]]).input_ids)


def test_samples_have_the_lengths_that_were_drawn() -> None:
    wanted = np.array([target_tokens(np.random.default_rng([0, index]), DATA) for index in range(len(ROWS))])
    lengths = np.array([num_tokens(row) for row in ROWS])
    assert np.all(lengths >= wanted)
    assert np.array_equal(lengths[wanted >= 96], wanted[wanted >= 96])  # below, a sample is as short as its parts allow
    assert lengths.max() <= DATA.synthetic.max_tokens
    assert lengths.max() > 8 * np.median(lengths)


def test_the_demo_leaves_no_sample_out() -> None:
    demo = load([], PREPARE_DATA)
    drawn = [target_tokens(np.random.default_rng([demo.seed, index]), demo.data)
             for index in range(demo.data.synthetic.num_samples)]
    long = [sample(index, demo.data, demo.seed, PROCESSOR) for index, tokens in enumerate(drawn) if tokens > 480]
    assert len(long) > 20
    encoded = [PROCESSOR.encode(row["conversations"], list(map(image_size, row["images"]))) for row in long]
    largest = max(math.prod(grid) // PROCESSOR.family.merge_size**2 for row in encoded for grid in row.grids)
    assert 480 < largest <= demo.data.max_pixels // 28**2
    assert max(map(num_tokens, long)) <= int(demo.planner.tokens_per_rank) * demo.cluster.num_workers


@pytest.mark.parametrize("shape", [Synthetic(long_fraction=0.0), Synthetic(long_fraction=1.0, max_tokens=100_000),
                                   Synthetic(long_fraction=0.25, short_sigma=0.1, long_median_tokens=5000,
                                             max_tokens=1 << 30)])
def test_lengths_follow_the_mixture(shape: Synthetic) -> None:
    """Kolmogorov-Smirnov distance to the mixture's distribution function, at a level of one in a thousand."""
    data = PreparedData(synthetic=shape)
    drawn = np.sort([target_tokens(np.random.default_rng([1, index]), data) for index in range(4000)])
    # A whole number stands for what rounds to it: the distribution function is taken half a token higher.
    points = np.log(drawn + 0.5)

    def below(median: float, sigma: float) -> np.ndarray:
        return np.array([0.5 * (1 + math.erf((point - math.log(median)) / (sigma * math.sqrt(2)))) for point in points])

    expected = ((1 - shape.long_fraction) * below(shape.short_median_tokens, shape.short_sigma)
                + shape.long_fraction * below(shape.long_median_tokens, shape.long_sigma))
    observed = np.searchsorted(drawn, drawn, side="right") / len(drawn)
    assert np.abs(observed - expected).max() < 1.95 / math.sqrt(len(drawn))


def test_all_kinds_occur_and_clips_have_frames() -> None:
    kinds = [row["id"].split("-")[0] for row in ROWS]
    assert set(kinds) == set(KINDS)
    for kind, row in zip(kinds, ROWS):
        assert len(row["images"]) >= 2 if kind == "clip" else len(row["images"]) == 1


def test_the_answer_is_what_the_picture_shows() -> None:
    """Charts: the colour of the highest bar, found in the pixels. Text: there is room for all of it, and it is drawn.
    """
    for row in ROWS:
        kind, answer = row["id"].split("-")[0], row["conversations"][1]["value"]
        title, _, rest = answer.partition(": ")
        picture = Image.open(io.BytesIO(row["images"][0]))
        pixels = np.asarray(picture).astype(int)
        room = (picture.width // LETTER_WIDTH) * (picture.height // LINE_HEIGHT)
        assert len(title) <= room * (len(row["images"]) if kind == "clip" else 1), row["id"]
        assert (pixels == 90).all(axis=2).any()
        if kind == "chart":
            tops = {name: np.flatnonzero((pixels == colour).all(axis=2).any(axis=1))[0]
                    for name, colour in COLOURS.items()}
            assert min(tops, key=lambda name: tops[name]) == rest
        if kind == "clip":
            cells = rest.split(" ")
            assert len(cells) == len(row["images"])
            for cell, data in zip(cells, row["images"]):
                frame = np.asarray(Image.open(io.BytesIO(data))).astype(int)
                ys, xs = np.nonzero((frame[..., None, :] == np.array(list(COLOURS.values()))).all(axis=3).any(axis=2))
                place = 3 * np.median(xs) / frame.shape[1], 3 * np.median(ys) / frame.shape[0]
                assert ("abc".index(cell[0]), int(cell[1]) - 1) == (int(place[0]), int(place[1]))


def test_a_sample_depends_on_its_index_and_seed_alone() -> None:
    assert sample(17, DATA, 0, PROCESSOR) == ROWS[17]
    assert sample(17, DATA, 1, PROCESSOR) != ROWS[17]
    assert len({row["id"] for row in ROWS}) == len(ROWS)


def test_the_file_has_row_groups_and_its_parameters(tmp_path: Path) -> None:
    data = PreparedData(path=str(tmp_path / "deep/set.parquet"), synthetic=Synthetic(num_samples=70, rows_per_group=32))
    seen: list[int] = []
    write(data.path, data, 0, seen.append)
    assert seen == list(range(1, 71))
    assert pq.read_table(data.path).to_pylist() == ROWS[:70]
    assert [fragment.num_rows for fragment in index_fragments(data)] == [32, 32, 6]
    assert stored_parameters(data.path) == parameters(data, 0) != parameters(data, 1)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["set.parquet"]


def test_an_interrupted_write_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "set.parquet"
    write(path, PreparedData(synthetic=Synthetic(num_samples=2)), 0)
    before = path.read_bytes()

    def stop(done: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(path, PreparedData(synthetic=Synthetic(num_samples=9)), 0, stop)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_is_not_parquet_is_refused(tmp_path: Path) -> None:
    (tmp_path / "set.parquet").write_text("hello")
    with pytest.raises(DataError, match="is not parquet"):
        stored_parameters(tmp_path / "set.parquet")
