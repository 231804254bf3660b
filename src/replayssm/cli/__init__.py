"""Command line: one module per subcommand."""

from __future__ import annotations

import os

# Waiting OpenMP threads spin for milliseconds by default. On a machine that does anything else at
# the same time, a decode step of many small operations was seen to take 30 times as long; without
# any spinning it takes 1.5 times as long on an idle one. So: some 30 us. Read when torch loads.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
