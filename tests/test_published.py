"""benchmarks/published.py: its data file, its fits and what a row's prediction has seen."""

from __future__ import annotations

import statistics
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import yaml

from benchmarks.published import fitted_on, main, predictions
from benchmarks.published_offload import offload_curve
from benchmarks.published_points import FILE, Point, Published, least_squares
from benchmarks.published_ratios import Ratio, encoder_apart, packs_in_order, scatter
from dhp_ray.config import CONF
from dhp_ray.planner.cost.derived import Device

PUBLISHED = Published.load()


@pytest.fixture
def small() -> Published:
    """The source of eight rows alone, so that fits take little."""
    return replace(PUBLISHED, sources=[source for source in PUBLISHED.sources if source.device == "h100_500w"])


def test_every_source_is_cited_and_fitted_as_agreed() -> None:
    for source in PUBLISHED.sources:
        assert source.url.startswith("https://")
        assert source.note
        assert not source.fits or len(source.points) >= 5
    assert all(len(names) <= 3 for names in PUBLISHED.fitted.values())


@pytest.mark.parametrize(("change", "message"), [
    ("rows", "4 rows; at least 5 to fit on"), ("fitted", "got 4; allowed: three at most")])
def test_what_is_not_allowed_to_be_fitted(tmp_path: Path, change: str, message: str) -> None:
    tree = yaml.safe_load(FILE.read_text())
    if change == "rows":
        tree["sources"][0]["rows"] = tree["sources"][0]["rows"][:4]
    else:
        tree["devices"]["h100"]["fitted"] = ["matrix_flops", "attention_flops", "memory_bytes_per_s", "message_s"]
    (tmp_path / "changed.yaml").write_text(yaml.safe_dump(tree))
    with pytest.raises(ValueError, match=message):
        Published.load(tmp_path / "changed.yaml")


def test_a_row_is_predicted_without_its_own_figure(small: Published) -> None:
    source = small.sources[0]
    changed = replace(source, points=(replace(source.points[0], figure=10 * source.points[0].figure),
                                      *source.points[1:]))
    before, after = (predictions(replace(small, sources=[one]), one) for one in (source, changed))
    assert after[0].figure == before[0].figure
    assert after[1].figure != before[1].figure


def test_rates_that_made_the_figures_are_found_again() -> None:
    device, true = PUBLISHED.devices["h100_500w"], {"matrix_flops": 5e14, "attention_flops": 2e14, "fp8_flops": 8e14}
    points = [Point("llama3_8b", length, 8, 1, 1, False, 1.0, fp8=fp8)
              for length in (2048, 8192, 32768) for fp8 in (False, True)]
    made = [replace(point, figure=point.length / PUBLISHED.step_s(point, device, true, travels=False))
            for point in points]
    assert PUBLISHED.fit("h100_500w", made) == pytest.approx(true, rel=1e-6)


def test_a_step_by_hand() -> None:
    """One GPU, three packs of 2 x 1,024 tokens, and nothing but products takes time: 6 operations a parameter and
    token, of layers and head."""
    model = {"count": 2, "width": 64, "heads": 4, "vocabulary_size": 1000, "like": "llama", "mlp_width": 256}
    published = Published([], {"tiny": model}, {}, {}, {})
    device = replace(Device.load(CONF / "device" / "h100.yaml"), matrix_flops=1e9, attention_flops=1e30,
                     memory_bytes_per_s=1e30, intra_bytes_per_s=1e30, launch_s=0.0, message_s=0.0)
    layer, head = 4 * 64 * 64 + 3 * 64 * 256, 1000 * 64
    point = Point("tiny", 1024, 1, 2, 3, False, 1.0)
    expected = 3 * 2048 * 6 * (2 * layer + head) / 1e9
    assert published.step_s(point, device, {}) == pytest.approx(expected, rel=5e-3)  # norms are counted with products


@pytest.mark.parametrize("seed", range(4))
def test_least_squares_by_trying_all_of_a_grid(seed: int) -> None:
    draw = np.random.default_rng(seed)
    parts, wanted = draw.uniform(0.0, 1.0, (6, 3)), draw.uniform(-0.5, 1.0, 6)
    found = least_squares(parts, wanted)
    error = ((parts @ found - wanted) ** 2).sum()
    assert (found >= 0).all()
    assert all(((parts @ np.array(tried) - wanted) ** 2).sum() >= error - 1e-12
               for tried in product(np.linspace(0.0, 2.0, 21), repeat=3))


def test_packs_in_the_order_of_their_sequences() -> None:
    assert packs_in_order([4000, 4000, 200, 8192, 1], 1) == [[4000, 4000], [200], [8192], [1]]
    assert packs_in_order([4000, 100, 8192], 3) == [[4000], [8192], [100]]


def test_scatter_is_what_no_line_can_meet() -> None:
    assert scatter([Ratio("", published, 0.0) for published in (1.0, 2.0, 3.0)]) == pytest.approx(0.0, abs=1e-9)
    assert scatter([Ratio("", published, 0.0) for published in (0.0, 3.0, 0.0)]) == pytest.approx(2.0)


def test_an_encoder_beside_its_language_model_takes_the_longer_of_both() -> None:
    """With products at no cost, attention alone is left, and of both one after the other a part is saved."""
    ratios = encoder_apart(6e14, 2e14, 1e12)
    assert [ratio.predicted for ratio in ratios] == sorted(ratio.predicted for ratio in ratios)
    assert all(0.5 <= ratio.predicted < 1 for ratio in ratios)


def test_the_offload_curve_is_met_where_layers_decide() -> None:
    """Seconds of all rows within 10 %, and bytes of share 0.5. Those of share 1 and with recomputation are both 27 GB,
    of which something decides that is no layer's: it is not in the model, which says less."""
    for ratio in offload_curve():
        if "time" in ratio.name or ratio.name == "share 0.5, memory":
            assert abs(ratio.error) < 0.1, ratio
        else:
            assert -0.25 < ratio.error < 0, ratio


def test_unknown_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["row"]) == 2
    assert capsys.readouterr().err == "published.py: row: allowed: rows\n"


def test_the_median_over_sources_is_within_ten_percent() -> None:
    medians = [statistics.median(abs(row.error) for row in predictions(PUBLISHED, source))
               for source in PUBLISHED.sources]
    assert statistics.median(medians) <= 0.1
    assert all(fitted_on(PUBLISHED, source.device) for source in PUBLISHED.sources if source.fits)
