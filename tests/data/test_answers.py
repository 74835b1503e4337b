"""Scores of answers: published examples, and values by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dhp_ray.data.evaluation import (
    MeanScores,
    Scores,
    anls,
    edit_distance,
    exact_match,
    normalised,
    score,
    token_f1,
)

words = st.text("ab c.é", max_size=9)


@pytest.mark.parametrize(("text", "wanted"), [
    ("The  Denver Broncos.", "denver broncos"),
    ("An apple, a day", "apple day"),
    ("theatre", "theatre"),
    ("it's U.S.A.!", "its usa"),
    ("  \n", "")])
def test_case_punctuation_articles_and_spaces_do_not_count(text: str, wanted: str) -> None:
    assert normalised(text) == wanted


@pytest.mark.parametrize(("prediction", "reference", "match", "f1"), [
    ("the Denver Broncos", "Denver Broncos!", 1, 1),
    ("true", "false", 0, 0),
    # precision 2/2, recall 2/3
    ("golden anniversary", "golden anniversary celebration", 0, 0.8),
    # "x x" and "x y": one word in common, of two each
    ("x x", "x y", 0, 0.5),
    # precision 1/5, recall 1/1
    ("it is a large blue block", "blue", 0, 1 / 3),
    ("", "", 1, 1),
    ("the", "", 1, 1),
    ("", "cat", 0, 0),
    ("Zürich", "zürich", 1, 1)])
def test_exact_match_and_f1_as_squad(prediction: str, reference: str, match: float, f1: float) -> None:
    assert exact_match(prediction, reference) == match
    assert token_f1(prediction, reference) == pytest.approx(f1)


@pytest.mark.parametrize(("first", "second", "distance"), [
    ("kitten", "sitting", 3), ("saturday", "sunday", 3), ("flaw", "lawn", 2), ("intention", "execution", 5),
    ("", "abc", 3), ("abc", "", 3), ("", "", 0), ("naïve", "naive", 1), ("😀a", "a", 1),
    ("caf\ud83d", "café", 1)])  # half of a pair of UTF-16, as JSON may hold one
def test_the_textbooks_edit_distances(first: str, second: str, distance: int) -> None:
    assert edit_distance(first, second) == distance


def slow_distance(first: str, second: str) -> int:
    """By its definition."""
    if not first or not second:
        return len(first) + len(second)
    return min(slow_distance(first[1:], second) + 1, slow_distance(first, second[1:]) + 1,
               slow_distance(first[1:], second[1:]) + (first[0] != second[0]))


@given(st.text("abc", max_size=5), st.text("abc", max_size=5))
def test_the_edit_distance_is_that_of_its_definition(first: str, second: str) -> None:
    assert edit_distance(first, second) == slow_distance(first, second)


@pytest.mark.parametrize(("prediction", "reference", "wanted"), [
    ("kitten", "sitting", 1 - 3 / 7),
    ("Coca  Cola", "coca cola", 1),
    ("coca-cola", "coca cola", 1 - 1 / 9),
    # a distance of half the length is too far
    ("abcd", "abxy", 0),
    ("abcd", "abcx", 0.75),
    ("yes", "no", 0),
    ("", "", 1),
    ("", "x", 0)])
def test_anls_by_hand(prediction: str, reference: str, wanted: float) -> None:
    assert anls(prediction, reference) == pytest.approx(wanted)


def test_the_best_reference_counts_for_each_score() -> None:
    found = score("the red car", ["a blue car", "red cars", "red card"])
    assert found == Scores(0.0, pytest.approx(1 - 5 / 11), pytest.approx(0.5))
    assert score("Red car", ["bus", "red car."]).exact_match == 1
    assert score("caf\ud83d", ["no", "caf\ud83d"]) == Scores(1, 1, 1)
    assert score("A car.\n</think>\n\nred", ["<think>Hm.</think>red"]) == Scores(1, 1, 1)  # thoughts do not count
    assert score("Say </think> here", ["here"]).exact_match == 0  # prose does
    with pytest.raises(ValueError, match="empty"):
        score("red", [])


def test_means() -> None:
    means = MeanScores()
    assert means.by_name() == {}
    means.add(Scores(1, 1, 1))
    means.add(Scores(0, 0.5, 0.25))
    assert means.by_name() == {"exact_match": 0.5, "anls": 0.75, "f1": 0.625}


@given(words, words)
def test_scores_are_symmetric_and_between_0_and_1(first: str, second: str) -> None:
    for one in (exact_match, anls, token_f1):
        assert 0 <= one(first, second) <= 1
        assert one(first, second) == one(second, first)
        assert one(first, first) == 1
