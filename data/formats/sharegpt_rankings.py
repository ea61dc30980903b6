"""ShareGPT conversations with a better and a worse answer (LLaMA-Factory's DPO demos, MedicalGPT).

The conversation is the prompt; each answer is text, or one turn of it.
"""

from typing import Any

from rlhf.data.examples import Ranking, ranked
from rlhf.data.formats import Format
from rlhf.data.messages import as_messages, as_response, awaiting_answer


def _read(row: dict[str, Any]) -> Ranking:
    talk = awaiting_answer(as_messages(row["conversations"], "conversations"))
    responses = []
    for name in ("chosen", "rejected"):
        turn = row[name]
        responses.append(as_response([turn] if isinstance(turn, dict) else turn, name, talk))
    return ranked(talk, responses, [1, 2], source=row.get("source", ""))


FORMATS = (Format("sharegpt_rankings", "preferences", ("conversations", "chosen", "rejected"), _read),)
