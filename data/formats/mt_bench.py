"""Questions in several turns (MT-Bench, the older Arena-Hard files): the first turn is the prompt.

Later turns answer to what a model says to the first, so they are no prompts by themselves.
"""

from typing import Any

from rlhf.data.examples import Prompt
from rlhf.data.formats import Format
from rlhf.data.messages import Unusable, as_prompt


def _read(row: dict[str, Any]) -> Prompt:
    turns = row["turns"]
    if not isinstance(turns, list) or not turns:
        raise Unusable("turns is not a list of questions")
    first = turns[0].get("content") if isinstance(turns[0], dict) else turns[0]
    return Prompt(as_prompt(first), row)


FORMATS = (Format("mt_bench", "prompts", ("turns",), _read),)
