"""The report: one self-contained HTML file, and the same tables for a terminal."""

from __future__ import annotations

from replayssm.evaluate.report.build import render, render_overview, write, write_overview
from replayssm.evaluate.report.load import render as render_load
from replayssm.evaluate.report.load import write as write_load
from replayssm.evaluate.report.rollout import render as render_rollout
from replayssm.evaluate.report.rollout import write as write_rollout

__all__ = [
    "render",
    "render_load",
    "render_overview",
    "render_rollout",
    "write",
    "write_load",
    "write_overview",
    "write_rollout",
]
