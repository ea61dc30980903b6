"""Write docs/recipes.md from the settings' types and descriptions: `python docs/make_recipes.py`. A test compares."""

import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo

from rlhf.data.sources import Source, TextSource
from rlhf.pipeline.recipe import Recipe
from rlhf.stages.feedback.config import FeedbackSettings
from rlhf.stages.ppo.config import PPOSettings, RewardSpec, RolloutSettings
from rlhf.stages.pretrain.config import PretrainSettings
from rlhf.stages.reward.config import RewardSettings
from rlhf.stages.settings import LoraSettings, ServedModel, Settings, StageSettings, meaning, origin
from rlhf.stages.sft.config import SFTSettings

PAGE = Path(__file__).parent / "recipes.md"
INTRODUCTION = """# All settings

<!-- written by docs/make_recipes.py -->

A recipe is a YAML file with a section per stage; a section that is left out is a stage that does not run. Any setting
can be given on the command line, dotted: `rlhf run RECIPE ppo.kl_coef=0.1`. `${seed}` takes over another value of the
file. Shipped recipes go by name: `rlhf run demo` ([what they reach](shipped.md)). Paths are relative to the folder that
`rlhf` is started in, wherever the recipe lies.

A model may be a folder or a hub id, and also the folder of a stage or of a run. Of a run it is the newest model of the
last stage that is finished, of ppo, sft or pretrain; where a reward model is wanted, of reward. `rlhf plan` and
`rlhf run` say which one that is.

`seed`, `eval_share` and `judge` at the top are taken over by every section that does not set its own; but `feedback`
does not take over the judge. A setting that would have no effect beside the others is refused.

The last column says where a setting comes from, or its default; [below](#sources) the names are spelled out. A type
that ends in "or null" may be left open, which the description tells the meaning of.
"""
SECTIONS = (
    ("The whole recipe", Recipe, {}),
    ("Every stage", StageSettings, {}),
    ("pretrain", PretrainSettings, StageSettings.model_fields),
    ("sft", SFTSettings, StageSettings.model_fields),
    ("feedback", FeedbackSettings, StageSettings.model_fields),
    ("reward", RewardSettings, StageSettings.model_fields),
    ("ppo", PPOSettings, StageSettings.model_fields),
    ("Each of `ppo.rewards`", RewardSpec, {}),
    ("`ppo.rollout`", RolloutSettings, {}),
    ("`answers_from` (of reward) and `judge_from` (of feedback)", ServedModel, {}),
    ("`lora` (of sft, reward and ppo)", LoraSettings, {}),
    ("A source of rows (`data`, `eval_data`)", Source, {}),
    ("A source of text among several (`pretrain.data`), besides these", TextSource, Source.model_fields),
)
NAMES = {bool: "true or false", int: "int", float: "float", str: "text", Any: "any value"}
SOURCES = {
    "Vaswani 2017": "Attention is all you need, arXiv 1706.03762",
    "Press & Wolf 2017": "Using the output embedding to improve language models, arXiv 1608.05859",
    "AdamW": "Loshchilov and Hutter 2019, Decoupled weight decay regularization, arXiv 1711.05101",
    "GPT-2": "Radford et al. 2019, Language models are unsupervised multitask learners",
    "GPT-3": "Brown et al. 2020, Language models are few-shot learners, arXiv 2005.14165",
    "LLaMA": "Touvron et al. 2023, LLaMA: open and efficient foundation language models, arXiv 2302.13971",
    "Llama 2": "Touvron et al. 2023, Llama 2: open foundation and fine-tuned chat models, arXiv 2307.09288",
    "GQA": "Ainslie et al. 2023, GQA: training generalized multi-query transformer models, arXiv 2305.13245",
    "SwiGLU": "Shazeer 2020, GLU variants improve Transformer, arXiv 2002.05202",
    "PaLM": "Chowdhery et al. 2022, PaLM: scaling language modeling with Pathways, arXiv 2204.02311",
    "OPT": "Zhang et al. 2022, OPT: open pre-trained Transformer language models, arXiv 2205.01068",
    "MiniCPM": "Hu et al. 2024, MiniCPM: unveiling the potential of small language models, arXiv 2404.06395",
    "Muon": "Jordan et al. 2024, Muon: an optimizer for hidden layers in neural networks",
    "LoRA": "Hu et al. 2021, LoRA: low-rank adaptation of large language models, arXiv 2106.09685",
    "QLoRA": "Dettmers et al. 2023, QLoRA: efficient finetuning of quantized LLMs, arXiv 2305.14314",
    "PPO": "Schulman et al. 2017, Proximal policy optimization algorithms, arXiv 1707.06347",
    "GAE": "Schulman et al. 2016, High-dimensional continuous control using GAE, arXiv 1506.02438",
    "Ziegler 2019": "Fine-tuning language models from human preferences, arXiv 1909.08593",
    "InstructGPT": "Ouyang et al. 2022, Training language models to follow instructions, arXiv 2203.02155",
    "Ye 2020": "Mastering complex control in MOBA games with deep reinforcement learning, arXiv 1912.09729",
    "Coste 2023": "Reward model ensembles help mitigate overoptimization, arXiv 2310.02743",
    "Gao 2022": "Scaling laws for reward model overoptimization, arXiv 2210.10760",
    "Secrets of RLHF": "Zheng et al. 2023, Secrets of RLHF in large language models part I: PPO, arXiv 2307.04964",
    "Eisenstein 2023": "Helping or herding? Reward model ensembles mitigate but do not eliminate, arXiv 2312.09244",
    "N+": "Huang et al. 2024, The N+ implementation details of RLHF with PPO, arXiv 2403.17031",
    "VC-PPO": "Yuan et al. 2025, What's behind PPO's collapse in long-CoT?, arXiv 2503.01491",
    "DAPO": "Yu et al. 2025, DAPO: an open-source LLM reinforcement learning system at scale, arXiv 2503.14476",
    "Dr. GRPO": "Liu et al. 2025, Understanding R1-zero-like training, arXiv 2503.20783",
    "KL approximations": "Schulman 2020, Approximating KL divergence (joschu.net/blog/kl-approx.html)",
    "Luce 1959, Plackett 1975": "Individual choice behavior; The analysis of permutations",
}
"""Papers by the names that descriptions have for them in brackets at their end, up to a comma."""
LIBRARIES = ("Accelerate", "PEFT", "TRL", "datasets", "transformers")


def page() -> str:
    """The whole page."""
    parts, named = [INTRODUCTION], set()
    for title, cls, known in SECTIONS:
        parts.append(f"## {title}\n\n| setting | type | default | meaning | from |\n|---|---|---|---|---|")
        for name, field in cls.model_fields.items():
            if name not in known or _row(name, field) != _row(name, known[name]):
                named |= set(sources(field))
                parts.append(_row(name, field))
        parts.append("")
    parts.append("## Sources\n\n| | |\n|---|---|")
    parts += (f"| {name} | {text} |" for name, text in SOURCES.items() if name in named)
    return "\n".join(parts) + "\n"


def _row(name: str, field: FieldInfo) -> str:
    cells = (f"`{name}`", shown_type(field), shown_default(field), meaning(field), origin(field))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells).rstrip() + " |"


def sources(field: FieldInfo) -> list[str]:
    """Names of the papers that a setting comes from. Raises KeyError for one that SOURCES does not have."""
    found = []
    for part in filter(None, origin(field).split("; ")):
        name = part if part in SOURCES else part.partition(",")[0]
        if name not in LIBRARIES:
            SOURCES[name]
            found.append(name)
    return found


def shown_type(field: FieldInfo) -> str:
    """A setting's type in words, with its bounds: `0 < float ≤ 1`."""
    return _bounded(_words(field.annotation), field.metadata)


def _words(kind: Any) -> str:
    if get_origin(kind) in (Union, types.UnionType):
        parts = [part for part in get_args(kind) if part is not type(None)]
        words = "true, false" if parts == [bool] else " or ".join(_words(part) for part in parts)
        return words if len(parts) == len(get_args(kind)) else f"{words} or null"
    if get_origin(kind) is Literal:
        return " | ".join(f"`{value}`" for value in get_args(kind))
    if get_origin(kind) is list:
        return f"list of {_words(get_args(kind)[0])}"
    if get_origin(kind) is dict:
        return f"mapping to {_words(get_args(kind)[1])}"
    if isinstance(kind, type) and issubclass(kind, Source):
        return "[source](#a-source-of-rows-data-eval_data)"
    return NAMES.get(kind, "section")


def _bounded(words: str, metadata: list[Any]) -> str:
    """The first number in the words with its bounds on both sides."""
    low = high = ""
    for bound in metadata:
        for name, sign in (("ge", "≥"), ("gt", ">")):
            if (value := getattr(bound, name, None)) is not None:
                low = f"{sign} {value:g}"
        for name, sign in (("le", "≤"), ("lt", "<")):
            if (value := getattr(bound, name, None)) is not None:
                high = f"{sign} {value:g}"
    if not low and not high:
        return words
    number = "float" if "float" in words else "int"
    if low and high:
        sign, value = low.split(" ")
        return words.replace(number, f"{value} {'≤' if sign == '≥' else '<'} {number} {high}", 1)
    return words.replace(number, f"{number} {low or high}", 1)


def shown_default(field: FieldInfo) -> str:
    """The default as a recipe would write it."""
    if field.is_required():
        return "*needed*"
    default = field.get_default(call_default_factory=True)
    if isinstance(default, Settings):
        return "as listed below"
    written = yaml.safe_dump(default, default_flow_style=True, width=10**6).removesuffix("...\n").strip()
    return f"`{written}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
