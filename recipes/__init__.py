"""Shipped recipes (YAML) and the demo world they use."""
