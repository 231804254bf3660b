"""The evaluation: probes, statistics, sections and the report."""
