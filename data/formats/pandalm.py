"""PandaLM's test set: an instruction, two responses, and the verdicts of several annotators (1, 2, or 0 for a tie)."""

from typing import Any

from rlhf.data.examples import UNJUDGED, Ranking, by_votes, number
from rlhf.data.formats import Format
from rlhf.data.formats.alpaca_votes import instructed
from rlhf.data.messages import Unusable, as_response

_VOTES = {1: 0, 2: 1, 0: None}


def _read(row: dict[str, Any]) -> Ranking:
    verdicts = [v for name, v in row.items() if name.startswith("annotator") and v is not None and v != ""]
    if not verdicts:
        raise Unusable(UNJUDGED, ": no annotator's verdict")
    votes = []
    for verdict in verdicts:
        if (found := number(verdict, "verdict")) not in _VOTES:
            raise Unusable("an annotator's verdict is not 0, 1 or 2", f": {verdict!r}")
        votes.append(_VOTES[int(found)])
    prompt = instructed(row)
    return by_votes(prompt, [as_response(row[name], name, prompt) for name in ("response1", "response2")], votes)


FORMATS = (Format("pandalm", "preferences", ("instruction", "response1", "response2", "annotator1"), _read),)
