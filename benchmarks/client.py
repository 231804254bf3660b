"""The load client against a server that does no work: schedule lag and what it adds to latencies.

    python benchmarks/client.py --json results.json

Client and server are two processes on the same cores. Requests arrive Poisson, every reply has 64
tokens, each in an event of its own. Lag is the send minus the schedule; TTFT and the excess of the
time between tokens over the server's interval are what client and server together add.
"""

from __future__ import annotations

import argparse
import json
import platform
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from replayssm.evaluate.manifest import machine
from replayssm.traffic.self_check import Load, check

LIMIT_MS = 20.0
LOADS = {
    "200 a second, a token every 10 ms": Load(),
    "200 a second, tokens at once": Load(interval_ms=0.0),
    "200 a second, prompts of 8,192 tokens": Load(prompt=8192, output=16),
}


def environment() -> dict[str, str]:
    """Return what the figures depend on."""
    found = machine()
    return {
        "cpu": found.cpu,
        "cores": str(found.cores),
        "python": platform.python_version(),
        "aiohttp": version("aiohttp"),
    }


def measure(seconds: float) -> dict[str, Any]:
    """Run every load and return what the client kept up."""
    results = {}
    for name, load in LOADS.items():
        load = Load(**{**asdict(load), "seconds": seconds})
        found = check(load)
        passes = found.passes(load.rate, LIMIT_MS)
        results[name] = {"load": asdict(load), "client": asdict(found), "passes": passes}
        print(f"{name}: lag p50 {found.lag_p50_ms:.1f}, p99 {found.lag_p99_ms or 0:.1f} ms")
    return results


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=15.0, help="length of each run")
    parser.add_argument("--json", type=Path, help="write the results there")
    options = parser.parse_args()
    results = {
        "environment": environment(),
        "limit_ms": LIMIT_MS,
        "results": measure(options.seconds),
    }
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
