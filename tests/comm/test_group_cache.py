from dhp_ray.comm.group_cache import GroupCacheState


def test_changes_come_in_the_order_in_which_ranks_make_them() -> None:
    cache = GroupCacheState(2)
    assert list(cache.take([(0, 1), (2,), (1, 2)])) == [("create", (0, 1)), ("create", (1, 2))]
    assert list(cache.take([(2, 3), (1, 0)])) == [("hit", (0, 1)), ("evict", (1, 2)), ("create", (2, 3))]
    assert cache.held() == [(0, 1), (2, 3)]


def test_groups_of_one_plan_never_evict_one_another() -> None:
    cache = GroupCacheState(2)
    changes = list(cache.take([(0, 1), (1, 2), (0, 2), (1, 0)]))
    assert changes == [("create", (0, 1)), ("create", (1, 2)), ("overflow", (0, 2))]
    assert list(cache.take([(0, 2)])) == [("evict", (0, 1)), ("create", (0, 2))]


def test_a_pool_without_room_holds_nothing() -> None:
    cache = GroupCacheState(0)
    assert list(cache.take([(0, 1)])) == [("overflow", (0, 1))]
    assert cache.held() == []
