from __future__ import annotations

import pytest

from replayssm.evaluate.report import words
from replayssm.evaluate.stats import Estimate


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (None, "\N{EM DASH}"), (0, "0"), (0.00123456, "0.00123"), (1.23456, "1.23"),
        (123456.0, "123,456"), (1.5e-7, "1.5e-7"), (float("inf"), "infinite"),
    ],
)  # fmt: skip
def test_numbers_keep_three_digits(x, text):
    assert words.number(x) == text


@pytest.mark.parametrize(
    ("n", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (1 << 30, "1.0 GiB")]
)
def test_sizes_take_a_unit_that_fits(n, text):
    assert words.size(n) == text


def test_durations():
    assert words.duration(12.4) == "12 s"
    assert words.duration(185) == "3 min 5 s"


def test_intervals_are_shown_with_the_number():
    e = Estimate(1.234, 1.1, 1.37, 6, "")
    assert words.ratio_range(e) == "1.23x (1.10\N{EN DASH}1.37)"
    assert words.percent_range(Estimate(0.5, 0.4, 0.6, 6, ""), 0) == "50 % (40 to 60)"


@pytest.mark.parametrize(
    ("x", "text"),
    [(0.001, "0.001"), (0.0001, "1e-4"), (2.5e-5, "2.5e-5"), (0.05, "0.05"), (1.05, "1.05")],
)
def test_margins_have_no_trailing_zeros(x, text):
    assert words.limit(x) == text


def test_shares_stay_between_nothing_and_the_whole():
    assert words.share_range(Estimate(0.072, -0.04, 0.184, 6, "")) == "7.2 % (0.0 to 18.4)"
    assert words.share_range(Estimate(-0.01, -0.04, 1.2, 6, ""), 0) == "0 % (0 to 100)"


def test_counts_read_as_words():
    assert [words.count(n, "thread") for n in (1, 2)] == ["1 thread", "2 threads"]
    assert [words.span(3, n) for n in (3, 8)] == ["3", "3 to 8"]
