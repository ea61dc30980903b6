"""Proximal policy optimisation against a reward model."""
