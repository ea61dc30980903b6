"""Supervised fine-tuning on prompt/response pairs."""
