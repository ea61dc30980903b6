"""Run the step in a folder with a settings.yaml: `accelerate launch -m rlhf.stages.feedback FOLDER`."""

from rlhf.stages.feedback.train import train
from rlhf.stages.runtime import run_stage

if __name__ == "__main__":
    run_stage(train)
