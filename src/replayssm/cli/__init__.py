"""Command line: one module per subcommand."""

from __future__ import annotations

import os

# Waiting OpenMP threads spin by default. On a machine that does anything else at the same time, a
# decode step of many small operations was seen to take 30 times as long. Read when torch loads.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
