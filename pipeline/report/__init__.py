"""report.html and comparison.html: what a run brought, for a person who was not there."""

from rlhf.pipeline.report.page import render

__all__ = ["render"]
