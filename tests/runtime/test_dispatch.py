import ray

from dhp_ray.data.stream import Batch
from dhp_ray.planner.plan import RankPack, RankPlan, Sample
from dhp_ray.runtime.dispatch import blocks_of
from dhp_ray.runtime.prefetch import encoded_images

SAMPLES = [Sample("a", 8, 4, ((1, 4, 4),)), Sample("b", 9), Sample("c", 7, 8, ((1, 4, 4), (1, 4, 4)))]


def test_each_block_is_sent_once_with_the_rows_that_a_rank_needs(ray_cluster: None) -> None:
    first, second = ray.put(1), ray.put(2)
    batch = Batch(0, SAMPLES, {"a": (second, 5), "b": (first, 0), "c": (second, 2)}, [], {"epoch": 0, "fragment": 0, "row": 0, "num_rows": 9})
    plan = RankPlan(1, 0, (), (RankPack(0, (0,), (SAMPLES[0],), (0,), 1.0), RankPack(1, (0, 1), (SAMPLES[1], SAMPLES[2]), (1, 0), 1.0)))
    blocks = blocks_of(plan, batch)
    assert [(block.reference, block.rows) for block in blocks] == [([second], [2, 5]), ([first], [0])]


def test_a_rank_decodes_the_images_that_the_plan_gives_it() -> None:
    pack = RankPack(0, (4, 6), (SAMPLES[0], SAMPLES[1], SAMPLES[2]), (1, 0, 1), 1.0)
    assert encoded_images(pack, 4) == [(False,), (), (True, False)]
    assert encoded_images(pack, 6) == [(True,), (), (False, True)]
