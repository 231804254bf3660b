"""How many threads the compiled kernels may use."""

from __future__ import annotations

import numba


def set_threads(count: int) -> int:
    """Set how many threads the calls of this thread may use; return the number before.

    Args:
        count: 1 to the number that numba started with (``NUMBA_NUM_THREADS``, else all cores).
    """
    before = int(numba.get_num_threads())
    numba.set_num_threads(count)
    return before
