"""The four training stages and what they share: settings, artifacts, models, the runtime."""
