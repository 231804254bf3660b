"""The report: one self-contained HTML file, and the same tables for a terminal."""

from __future__ import annotations

from replayssm.evaluate.report.build import render, write

__all__ = ["render", "write"]
