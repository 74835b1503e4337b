"""benchmarks/counts.py: operators and bytes of a 7B by a trace on fake tensors, and its page."""

from __future__ import annotations

import pytest

from benchmarks.counts import MODEL, SEQUENCES, end_of_step, main, pack_counts, rows
from dhp_ray.planner.cost.derived import layer_traffic
from dhp_ray.planner.memory.model import MemoryModel, MemorySettings, PackLoad
from tests.checkout import ROOT
from tests.planner.test_layer_traffic import ELSEWHERE
from tests.published_configs import stored_shape


def test_help_and_what_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert main(["layers"]) == 2
    assert "layers: takes nothing" in capsys.readouterr().err


@pytest.mark.seconds
def test_a_fused_layer_moves_what_the_planner_says_and_keeps_attention_alone_when_selective() -> None:
    layer, num_tokens = stored_shape(MODEL).language[0], sum(SEQUENCES)
    formula = layer_traffic(layer, in_encoder=False, rotates=True, fused=True)
    one, two = (pack_counts(layers) for layers in (1, 2))
    gradients = 10 * layer.num_parameters  # added to those of other packs, which is not of this pack's tokens
    for few, more, wanted, once in ((one.forward, two.forward, formula.forward, 0),
                                    (one.backward, two.backward, formula.backward, gradients)):
        moved = sum(more.moved_bytes[name] - few.moved_bytes[name] for name in more.moved_bytes
                    if name not in ELSEWHERE)
        assert (moved - once) / num_tokens == pytest.approx(wanted, rel=0.03)
    one, two = (pack_counts(layers, "selective") for layers in (1, 2))
    kept = 2 * layer.width + 2 * layer.heads * layer.head_width + 4 * layer.heads  # input, output, log-sum-exp
    assert two.kept_bytes - one.kept_bytes == pytest.approx(kept * num_tokens, rel=0.001)


@pytest.mark.seconds
def test_the_more_ranks_the_fewer_exchanges_end_a_step_within_the_memory_models_term() -> None:
    trace, taken_bytes = end_of_step(64)
    assert trace.launched["c10d"] == 2 * 8 + 1  # eight buckets of 64 slices of 64 MiB, and the norm
    settings = MemorySettings(sync="step", world_size=64, precision="bf16", recomputes=False)
    assert taken_bytes <= sum(MemoryModel(stored_shape(MODEL), settings).moments(PackLoad(1))["update"].values())


@pytest.mark.slow
def test_the_page_has_the_tables_that_the_script_prints() -> None:
    assert "\n".join(rows()) in (ROOT / "benchmarks" / "README.md").read_text()
