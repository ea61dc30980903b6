"""Run the stage in a folder with a settings.yaml: `accelerate launch -m rlhf.stages.reward FOLDER`."""

from rlhf.stages.entry import run_stage
from rlhf.stages.reward.train import train

if __name__ == "__main__":
    run_stage(train)
