"""Prompts that differ in their Unicode normal form alone: é as one character, or as e and an accent (NFC, NFD).

They look the same, and count as different prompts. `rlhf data check` tells them; reading changes no text.
"""

from collections.abc import Mapping
from unicodedata import is_normalized, normalize

from rlhf.data.messages import Messages, prompt_key
from rlhf.data.report import FIRST_FEW


class NormalForms:
    """Remembers the prompts that are not in NFC, as hashes; most sets have none of them."""

    def __init__(self) -> None:
        self._composed: dict[int, int] = {}
        """By the hash of such a prompt's key, that of the same prompt in NFC."""

    def add(self, key: str, prompt: Messages) -> None:
        """Look at one prompt, whose `prompt_key` is `key`."""
        if r"\u" not in key or hash(key) in self._composed:  # JSON, in which all beyond ASCII is escaped
            return
        if all(is_normalized("NFC", message["content"]) for message in prompt):
            return
        composed = prompt_key([message | {"content": normalize("NFC", message["content"])} for message in prompt])
        if composed != key:  # which leaves outer blanks out
            self._composed[hash(key)] = hash(composed)

    def warnings(self, rows: Mapping[int, int]) -> list[str]:
        """One warning, if any prompts are alike; `rows` has the first row of each prompt by the hash of its key."""
        alike: dict[int, list[int]] = {}
        for this, composed in self._composed.items():
            found = alike.setdefault(composed, [rows[composed]] if composed in rows else [])
            found.append(rows[this])
        pairs = sorted((first, other) for first, *others in map(sorted, alike.values()) for other in others)
        if not pairs:
            return []
        shown = ", ".join(f"{first} and {other}" for first, other in pairs[:FIRST_FEW])
        more = ", …" if len(pairs) > FIRST_FEW else ""
        counted = "1 prompt differs" if len(pairs) == 1 else f"{len(pairs)} prompts differ"
        return [
            f"{counted} from another in Unicode normal form alone (rows {shown}{more}): one may be trained on while "
            "the other is held out; write all texts in one form, as unicodedata.normalize('NFC', text) does in Python"
        ]
