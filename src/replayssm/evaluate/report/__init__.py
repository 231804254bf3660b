"""The report: one self-contained HTML file, and the same tables for a terminal."""

from __future__ import annotations

from replayssm.evaluate.report.build import render, render_overview, write, write_overview

__all__ = ["render", "render_overview", "write", "write_overview"]
