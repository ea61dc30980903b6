"""Run the stage in a folder with a settings.yaml: `accelerate launch -m rlhf.stages.sft FOLDER`."""

from rlhf.stages.entry import run_stage

if __name__ == "__main__":
    run_stage("sft")
