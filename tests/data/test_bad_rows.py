from __future__ import annotations

import pytest

from dhp_ray.data.errors import MOST_BAD_ROWS, BadRows, DataError


def taken(bad_rows: BadRows, reasons: str) -> int:
    """The rows that are taken before an error, pass after pass; a row is bad where `reasons` has an x."""
    for number, reason in enumerate(reasons):
        try:
            bad_rows.take(f"r{number}", reason.strip("."), number % bad_rows.num_rows + 1)
        except DataError:
            return number
    return len(reasons)


def test_a_source_of_which_no_row_can_be_used_is_refused() -> None:
    bad_rows = BadRows("rows.json", 3)
    assert taken(bad_rows, "xx.xx.xx") == 8
    with pytest.raises(DataError) as caught:
        bad_rows.take("r8", "image file is truncated", 3)
    assert str(caught.value) == "data.path: rows.json has no usable row; the last, r8: image file is truncated"


def test_so_is_a_large_one_with_very_many_bad_rows_in_a_row() -> None:
    bad_rows = BadRows("rows.json", 5000)
    assert taken(bad_rows, "x" * (MOST_BAD_ROWS - 1) + "." + "x" * (MOST_BAD_ROWS - 1)) == 2 * MOST_BAD_ROWS - 1
    with pytest.raises(DataError, match=r"^data.path: rows.json has 1000 rows in a row that cannot be used; the last"):
        bad_rows.take("last", "x", 2000)


@pytest.mark.parametrize("passes", ["x.x.", ".xx..xx.", "..xxxx..", ".xxxxxx.", "....xxx."])
def test_a_source_with_usable_rows_is_not_refused_for_an_order_that_has_the_bad_ones_together(passes: str) -> None:
    """One pass may end with all of them, and the next one begin with them."""
    bad_rows = BadRows("rows.json", len(passes) // 2)
    assert taken(bad_rows, passes) == len(passes)


def test_rows_before_the_first_are_not_known_to_be_bad() -> None:
    """A run may go on in the middle of a pass."""
    bad_rows = BadRows("rows.json", 3)
    bad_rows.take("a", "x", 3)
    assert taken(bad_rows, "xxx") == 2
