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
