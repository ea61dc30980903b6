"""What was trained, measured: the same held-out text and prompts for base, SFT and PPO."""
