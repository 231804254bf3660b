"""Numbers in words: enough digits to decide by, and no more."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from replayssm.evaluate.stats import Estimate

DASH = "\N{EN DASH}"
NONE = "\N{EM DASH}"


def number(x: float | None, digits: int = 3) -> str:
    """Return a number with ``digits`` significant digits, without exponents where it can."""
    if x is None:
        return NONE
    if x == 0:
        return "0"
    if not math.isfinite(x):
        return "infinite" if math.isinf(x) else "not a number"
    size = math.floor(math.log10(abs(x)))
    if -4 <= size < 6:
        return f"{x:,.{max(0, digits - 1 - size)}f}"
    mantissa, exponent = f"{x:.{max(0, digits - 2)}e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def ratio(e: Estimate | None) -> str:
    """Return a speed-up."""
    return NONE if e is None else f"{e.value:.2f}x"


def ratio_range(e: Estimate | None) -> str:
    """Return a speed-up with its interval."""
    return NONE if e is None else f"{e.value:.2f}x ({e.low:.2f}{DASH}{e.high:.2f})"


def percent(x: float, digits: int = 1) -> str:
    """Return a share."""
    return f"{100 * x:.{digits}f} %"


def percent_range(e: Estimate | None, digits: int = 1) -> str:
    """Return a share with its interval."""
    if e is None:
        return NONE
    low, high = 100 * e.low, 100 * e.high
    return f"{percent(e.value, digits)} ({low:.{digits}f} to {high:.{digits}f})"


def share_range(e: Estimate | None, digits: int = 1) -> str:
    """Return the share of a whole with its interval, cut at 0 and 100 %, where noise may lead."""
    if e is None:
        return NONE
    value, low, high = (min(max(x, 0.0), 1.0) for x in (e.value, e.low, e.high))
    return percent_range(replace(e, value=value, low=low, high=high), digits)


def number_range(e: Estimate | None, digits: int = 2) -> str:
    """Return a number with its interval."""
    if e is None:
        return NONE
    return f"{number(e.value, digits)} ({number(e.low, digits)} to {number(e.high, digits)})"


def limit(x: float) -> str:
    """Return a margin as one would write it, without trailing zeros."""
    if x >= 1e-3:
        return f"{x:g}"
    mantissa, exponent = f"{x:e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def count(n: int, noun: str) -> str:
    """Return a number of things."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def capital(text: str) -> str:
    """Return a sentence with a capital first letter."""
    return text[:1].upper() + text[1:]


def span(least: int, most: int) -> str:
    """Return a range of counts, or the one count that it holds."""
    return str(most) if least >= most else f"{least} to {most}"


def size(n: int) -> str:
    """Return bytes in a unit that fits."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = 0 if n < 1 else min(len(units) - 1, int(math.log(n, 1024)))
    return f"{n / 1024**power:.{0 if power == 0 else 1}f} {units[power]}"


def mib(n: float) -> str:
    """Return bytes in MiB, to compare with others in MiB."""
    return f"{n / (1 << 20):.2f} MiB"


def duration(seconds: float) -> str:
    """Return a time span."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{int(seconds // 60)} min {int(seconds % 60)} s"
