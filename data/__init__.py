"""Rows of text, demonstrations, rankings and prompts: reading, checking, tokenising, collating."""
