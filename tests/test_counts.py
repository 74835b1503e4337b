"""benchmarks/counts.py: operators and bytes of a 7B by a trace on fake tensors."""

from __future__ import annotations

import pytest

from benchmarks.counts import MODEL, SEQUENCES, main, pack_counts
from dhp_ray.planner.cost.derived import layer_traffic
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
