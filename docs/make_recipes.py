"""Write docs/recipes.md from the settings' own descriptions: `python docs/make_recipes.py`. A test compares."""

from pathlib import Path

from rlhf.data.sources import Source, TextSource
from rlhf.pipeline.recipe import Recipe
from rlhf.stages.feedback.config import FeedbackSettings
from rlhf.stages.ppo.config import PPOSettings, RewardSpec, RolloutSettings
from rlhf.stages.pretrain.config import PretrainSettings
from rlhf.stages.reward.config import RewardSettings
from rlhf.stages.settings import LoraSettings, ServedModel, Settings, StageSettings, meaning
from rlhf.stages.sft.config import SFTSettings

PAGE = Path(__file__).parent / "recipes.md"
INTRODUCTION = """# Recipes

<!-- written by docs/make_recipes.py -->

A recipe is a YAML file with a section per stage; a section that is left out is a stage that does not run. Any setting
can be given on the command line, dotted: `rlhf run RECIPE ppo.kl_coef=0.1`. `${seed}` takes over another value of the
file. Shipped recipes go by name: `rlhf run demo`.

`seed`, `eval_share` and `judge` at the top are taken over by every section that does not set its own; but `feedback`
does not take over the judge.
"""
SECTIONS = (
    ("The whole recipe", Recipe, ()),
    ("Every stage", StageSettings, ()),
    ("pretrain", PretrainSettings, StageSettings.model_fields),
    ("sft", SFTSettings, StageSettings.model_fields),
    ("feedback", FeedbackSettings, StageSettings.model_fields),
    ("reward", RewardSettings, StageSettings.model_fields),
    ("ppo", PPOSettings, StageSettings.model_fields),
    ("Each of `ppo.rewards`", RewardSpec, ()),
    ("`ppo.rollout`", RolloutSettings, ()),
    ("`answers_from` (of reward) and `judge_from` (of feedback)", ServedModel, ()),
    ("`lora` (of sft, reward and ppo)", LoraSettings, ()),
    ("A source of rows (`data`, `eval_data`)", Source, ()),
    ("A source of text among several (`pretrain.data`), besides these", TextSource, Source.model_fields),
)


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for title, cls, known in SECTIONS:
        parts.append(f"## {title}\n\n| setting | default | |\n|---|---|---|")
        for name, field in cls.model_fields.items():
            if name not in known:
                default = "*needed*" if field.is_required() else _shown(field.get_default(call_default_factory=True))
                text = meaning(field).replace("|", "\\|")
                parts.append(f"| `{name}` | {default} | {text} |")
        parts.append("")
    return "\n".join(parts)


def _shown(default: object) -> str:
    return "as listed below" if isinstance(default, Settings) else f"`{default}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
