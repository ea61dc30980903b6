"""The four training stages and what they share: settings, artifacts, models, the runtime."""

import os

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # TRL's trainers would send a ping; read at import
