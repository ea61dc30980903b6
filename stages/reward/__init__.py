"""Reward model on ranked answers."""
