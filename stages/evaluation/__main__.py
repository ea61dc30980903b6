"""An evaluation in a process of its own: `python -m rlhf.stages.evaluation RUN DONE SETTINGS`, the last two as JSON."""

import json
import sys
from pathlib import Path

from rlhf.data.errors import RefusedError
from rlhf.stages.evaluation.config import EvaluationSettings
from rlhf.stages.evaluation.evaluate import evaluate
from rlhf.stages.evaluation.records import EvaluationFailed
from rlhf.stages.signals import exit_on_signal, handled
from rlhf.stages.streams import go_on_unread

if __name__ == "__main__":
    go_on_unread()
    run_dir, done, settings = sys.argv[1:]
    folders = {stage: Path(folder) for stage, folder in json.loads(done).items()}
    try:
        with handled(exit_on_signal):
            evaluate(Path(run_dir), folders, EvaluationSettings.model_validate_json(settings))
    except RefusedError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
    except EvaluationFailed as error:
        print(error, file=sys.stderr)
        raise SystemExit(1) from None
