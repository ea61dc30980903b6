"""Answers that people and judges ranked: the store, what comes out of it, and how good the labels are."""
