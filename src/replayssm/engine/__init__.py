"""The embedded engine: requests in, tokens out, on slots that can be swapped and moved.

:class:`~replayssm.engine.engine.Engine` schedules, :mod:`~replayssm.engine.guard` watches,
:mod:`~replayssm.engine.speculative` drafts. Import from the modules: they need transformers.
"""
