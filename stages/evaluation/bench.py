"""What the models of a run are measured with: held-out rows, rewards and a judge, and the models themselves."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf.data.errors import ConnectionLost, RefusedError, first_line
from rlhf.data.rows import Demonstration, Prompt, prompt_text
from rlhf.data.tokens import Encoded
from rlhf.stages.artifact import Artifact, code_digest, model_digest
from rlhf.stages.evaluation import held_out, perplexity
from rlhf.stages.evaluation.answers import Answer, Questions, Speaker, answers
from rlhf.stages.evaluation.config import EvaluationSettings
from rlhf.stages.evaluation.judges import judging
from rlhf.stages.evaluation.places import refuse_other_rewards
from rlhf.stages.evaluation.records import read_answers, read_figures, short_hash
from rlhf.stages.evaluation.statistics import Floats
from rlhf.stages.evaluation.subjects import Subject, ppo_settings, reward_models
from rlhf.stages.models import load_tokenizer
from rlhf.stages.ppo.config import PPOSettings
from rlhf.stages.ppo.rewards import Rewards, load_rewards
from rlhf.stages.pretrain.config import PretrainSettings
from rlhf.stages.settings_file import read_settings
from rlhf.stages.sft.config import SFTSettings

Say = Callable[[str], None]


@dataclass
class Bench:
    """Rows are read at once, a model when it is first needed. The cheap form keeps what it measured before, under keys
    that stand for the model and all that it was given."""

    run_dir: Path
    done: Mapping[str, Path]
    asked: EvaluationSettings
    subjects: dict[str, Subject]
    say: Say

    def __post_init__(self) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.tokenizer = load_tokenizer((self.subjects.get("sft") or self.subjects["base"]).reference)
        self.digests = {name: subject.digest for name, subject in self.subjects.items()}
        self.speakers: dict[str, Speaker] = {}
        self.judging = judging(self.asked, self.run_dir)
        self.say("reading held-out data")
        self._read()
        if self.judging is not None and self.questions is not None:
            self.say(f"asking the judge {self.judging.who}")
            self.judging.probe(prompt_text(self.questions.prompts[0].messages))
        self._read_earlier()

    def _read(self) -> None:
        made = {subject.stage: subject.made_by.folder for subject in self.subjects.values() if subject.made_by}
        self.of_text = read_settings(made["pretrain"], PretrainSettings) if "pretrain" in made else None
        of_sft = read_settings(made["sft"], SFTSettings) if "sft" in made else None
        of_ppo = ppo_settings(made["ppo"], self.run_dir) if "ppo" in made else None
        self.blocks: Tensor | None = None
        self.rows: list[Encoded] = []
        self.questions: Questions | None = None
        self.rewards: Rewards | None = None
        self.reward_name: str | None = None
        self.scored_by: list[Any] = []
        self.left_out: dict[str, tuple[str, ...]] = {}
        """What could not be measured, and why, with the names of the models' figures that are missing for it."""
        if self.of_text is not None:
            make = self.asked.form == "full"
            with self._or_left_out("the perplexity of text", "text_perplexity"):
                self.blocks = held_out.text(made["pretrain"], self.of_text, self.tokenizer, self.asked.num_tokens, make)
        rows: list[Demonstration] = []
        if of_sft is not None:
            what, figures = "the perplexity of responses", ["response_perplexity"]
            if of_ppo is None:
                what, figures = f"{what}, all answers", [*figures, "length"]
            with self._or_left_out(what, *figures):
                rows = held_out.demonstrations(made["sft"], of_sft)
            self.rows = held_out.encoded_examples(self.tokenizer, rows, of_sft.max_length, self.asked.num_tokens)
        prompts: list[Prompt] = []
        if of_ppo is not None:
            with self._or_left_out("all answers", "length"):
                prompts = held_out.prompts(made["ppo"], of_ppo)
            if prompts:
                self._ask(of_ppo, prompts, cut=False)
            with self._or_left_out("scores", "score"):
                refuse_other_rewards(of_ppo, made["ppo"])
                self._score(of_ppo)
        elif of_sft is not None and rows:
            law = self._without_ppo(of_sft)
            self._ask(law, held_out.prompts_of(rows), cut=True)
            self._score(law)

    @contextmanager
    def _or_left_out(self, what: str, *figures: str) -> Iterator[None]:
        """Go on without `what`, the `figures` that rest on data or rewards which are not there, or not as they were."""
        try:
            yield
        except (RefusedError, ConnectionLost) as error:
            self.left_out[f"{first_line(error)}; left out: {what}"] = figures

    def _ask(self, law: PPOSettings, prompts: list[Prompt], cut: bool) -> None:
        """Prompts are answered as `law` says."""
        fitting = held_out.encoded_prompts(self.tokenizer, prompts, law.max_prompt_length, self.asked.num_prompts, cut)
        self.questions = Questions(*fitting, law, self.tokenizer)

    def _score(self, law: PPOSettings) -> None:
        """Answers are scored as `law` says."""
        models = reward_models(law)
        functions = [spec.function for spec in law.rewards if spec.function is not None]
        mixed_by = [[spec.weight for spec in law.rewards], law.ensemble, law.ensemble_penalty]
        digests = [model_digest(model, "evaluation") for model in models], [*map(code_digest, functions)]
        self.scored_by = [*digests, mixed_by]
        self.reward_name = " + ".join([*(Subject(model).name for model in models), *functions]) or None

    def _without_ppo(self, of_sft: SFTSettings) -> PPOSettings:
        """How a run is asked that has no ppo, or none yet."""
        length, reward = min(self.asked.max_new_tokens, of_sft.max_length // 2), self.done.get("reward")
        return PPOSettings.load(
            {
                "data": of_sft.data.model_dump(), "seed": of_sft.seed, "max_new_tokens": length,
                "max_prompt_length": of_sft.max_length - length, "temperature": self.asked.temperature,
                "reward_model": str(Artifact(reward.absolute()).model) if reward else None,
            },
            "evaluation",
        )  # fmt: skip

    def _read_earlier(self) -> None:
        earlier = read_figures(self.run_dir) if self.asked.form == "cheap" else None
        self.earlier: dict[str, Any] = earlier["models"] if earlier else {}
        self.earlier_rows = read_answers(self.run_dir, earlier["answers_digest"]) if earlier else []

    def settings(self) -> dict[str, Any]:
        """What decided the figures, as evaluation.json says it."""
        found: dict[str, Any] = {name: getattr(self.asked, name) for name in ("num_samples", "best_of", "num_tokens")}
        law = self.questions and self.questions.settings
        found |= {name: law and getattr(law, name) for name in ("seed", "temperature", "max_new_tokens")}
        return found | {"num_prompts": self.questions and len(self.questions.prompts)}

    def speaker(self, name: str) -> Speaker:
        """The model, in memory."""
        if name not in self.speakers:
            compiled = self.asked.form == "full"
            self.speakers[name] = Speaker(self.subjects[name].reference, self.tokenizer, self.device, compiled)
        return self.speakers[name]

    def perplexities(self, name: str) -> dict[str, Any]:
        """The beginning of a model's entry: which it is, and how it foresees held-out text and responses."""
        found: dict[str, Any] = {
            "model": self.subjects[name].name, "digest": self.digests[name], "keys": {},
            "text_perplexity": None, "num_text_tokens": 0, "text_bits_per_byte": None,
            "response_perplexity": None, "num_response_tokens": 0, "response_bits_per_byte": None,
        }  # fmt: skip
        if self.blocks is not None:
            blocks, texts = self.blocks, self.blocks[:, 1:].tolist()
            assert self.of_text is not None
            across = self.of_text.attend_across_documents
            found |= self._foreseen(
                found, "text", name, blocks.tolist(), texts,
                lambda: perplexity.text_nats(self.speaker(name).model, blocks, self.tokenizer, across),
            )  # fmt: skip
        if self.rows:
            texts = [row.input_ids[max(row.prompt_length, 1) :] for row in self.rows]
            found |= self._foreseen(
                found, "response", name, [[row.input_ids, row.prompt_length] for row in self.rows], texts,
                lambda: perplexity.response_nats(self.speaker(name).model, self.rows, self.tokenizer),
            )  # fmt: skip
        return found

    def _foreseen(
        self,
        found: dict[str, Any],
        part: str,
        name: str,
        given: Any,
        texts: list[list[int]],
        nats_of: Callable[[], float],
    ) -> dict[str, Any]:
        """Perplexity of the `texts`, as it was before if the model was `given` the same; its key goes to the others."""
        fields = (f"{part}_perplexity", f"num_{part}_tokens", f"{part}_bits_per_byte")
        key = found["keys"][part] = short_hash([self.digests[name], given])
        known = self.earlier.get(name, {})
        if known.get("keys", {}).get(part) == key:
            return {field: known[field] for field in fields}
        self.say(f"{name}: perplexity of held-out {part}s")
        nats, num_tokens = nats_of(), sum(map(len, texts))
        bits = perplexity.bits_per_byte(nats, num_tokens, perplexity.num_bytes(self.tokenizer, texts))
        return dict(zip(fields, (perplexity.perplexity(nats), num_tokens, bits), strict=True))

    def answers(self, name: str, found: dict[str, Any]) -> list[list[Answer]]:
        """A model's answers; their key goes into its entry `found`."""
        assert self.questions is not None
        law, of_sft = self.questions.settings, self.digests.get("sft")
        how = [law.seed, law.temperature, law.max_new_tokens, law.generation_batch_size, self.asked.num_samples]
        key = short_hash([self.digests[name], of_sft, how, self.questions.ids, self.scored_by])
        found["keys"]["answers"] = key
        if self.earlier_rows and self.earlier.get(name, {}).get("keys", {}).get("answers") == key:
            kept = ("answers", "lengths", "ended", "kl", "scores")
            return [[Answer(*(row.get(part, {}).get(name) for part in kept))] for row in self.earlier_rows]
        speaker = self.speaker(name)
        reference = self.speaker("sft") if "sft" in self.subjects else None
        given = self.questions, speaker, reference, self._rewards(speaker), self.asked.num_samples
        return answers(*given, lambda text: self.say(f"{name}: {text}"))

    def qualities(self, found: list[list[Answer]]) -> list[list[float]] | None:
        """What the judge says of answers, if there is one that judges each by itself."""
        if self.judging is None or self.judging.compares or self.questions is None:
            return None
        self.say(f"{self.judging.name} judges {sum(map(len, found))} answers")
        return self.judging.qualities(self.questions.prompts, found)

    def wins(self, one: str, other: str, ours: list[list[Answer]], theirs: list[list[Answer]]) -> Floats:
        """1 where an answer of `one` is better than that of `other` by a judge who compares, 0.5 for a tie [P,m]."""
        assert self.judging is not None
        assert self.questions is not None
        compares = f"{self.judging.who} compares {one} and {other}"
        given = self.questions.prompts, ours, theirs
        return np.array(self.judging.wins(*given, lambda text: self.say(f"{compares}: {text}")))

    def several(self, drawn: list[list[Answer]]) -> list[list[Answer]] | None:
        """Answers of SFT to choose the best of: those that were `drawn` already and as many more as are missing.

        None without rewards, or if they are not asked for.
        """
        number = self.asked.best_of
        if not number or self.reward_name is None:
            return None
        if number <= len(drawn[0]):
            return [row[:number] for row in drawn]
        assert self.questions is not None
        speaker = self.speaker("sft")
        given = self.questions, speaker, None, self._rewards(speaker), number - len(drawn[0])
        more = answers(*given, lambda text: self.say(f"sft: the best of {number}: {text}"), stream=1)
        return [row + others for row, others in zip(drawn, more, strict=True)]

    def _rewards(self, speaker: Speaker) -> Rewards | None:
        if self.reward_name is not None and self.rewards is None:
            assert self.questions is not None
            self.rewards = load_rewards(self.questions.settings, self.tokenizer, speaker.model).to(self.device)
        return self.rewards
