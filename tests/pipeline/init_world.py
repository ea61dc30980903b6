"""What the tests of `rlhf init` are made of: a few rows of each kind, and the recipe that it wrote."""

from typing import Any

from rlhf.pipeline.recipe import Recipe, load_recipe

NAMES = ("fox", "cat", "dog", "bear")
DEMONSTRATIONS = [{"prompt": f"Who is {name}?", "response": f"A {name}."} for name in NAMES]
RANKINGS = [{"prompt": f"Who is {name}?", "chosen": f"A {name}.", "rejected": "No."} for name in NAMES]
PROMPTS = [{"prompt": f"Where is {name}?"} for name in NAMES]
TEXT = "To be, or not to be: that is the question. " * 60
BIRD, FISH = "Name a bird.", "Name a fish."
ONE_A_ROW = "prompt,response,rank\n" + "".join(
    f"{prompt},{answer},{rank}\n" for rank, answer in enumerate(("This.", "That."), 1) for prompt in (BIRD, FISH)
)


def recipe() -> Recipe:
    return load_recipe("mine.yaml")


def sections() -> dict[str, Any]:
    loaded = recipe()
    return {stage: loaded.section(stage) for stage in loaded.stages}
