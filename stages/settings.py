"""Typed settings: what every stage shares, and errors that name the key and the cure. No torch here."""

import difflib
import importlib.util
import math
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from rlhf.data.errors import SettingsError, plain_words
from rlhf.data.sources import Source, named
from rlhf.stages.secrets import exposed


class Settings(BaseModel):
    """A section of a recipe: unknown keys are refused, values are typed, nothing can be changed later."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )

    @classmethod
    def load(cls, mapping: Mapping[str, Any], where: str) -> Self:
        """Validate `mapping`; a SettingsError lists every problem. `where` names the section, '' for the top."""
        for place, name in exposed(mapping, where):
            raise SettingsError(
                f"{place}: holds the secret of the environment variable {name}, and settings are written down; take it "
                "out (libraries read their own variables; a function of yours can read os.environ)"
            )
        try:
            return cls.model_validate(dict(mapping))
        except ValidationError as error:
            problems = [_problem(cls, where, details) for details in error.errors()]
            raise SettingsError("\n".join(problems)) from None


def one_or_several(schema: dict[str, Any]) -> None:
    """In a JSON schema: where a list of texts is wanted, a text alone will do."""
    whole = {name: schema.pop(name) for name in ("anyOf", "items", "type") if name in schema}
    schema["anyOf"] = [{"type": "string"}, *whole.pop("anyOf", [whole])]


_ORIGIN = re.compile(r" \[([^\[\]]+)\]$")


def meaning(field: FieldInfo) -> str:
    """What the text under a setting says, in one line."""
    return _ORIGIN.sub("", _text(field))


def origin(field: FieldInfo) -> str:
    """Where a setting comes from, or its default: papers and libraries in brackets at the end of its text, with `; `
    between them."""
    found = _ORIGIN.search(_text(field))
    return found[1] if found else ""


def _text(field: FieldInfo) -> str:
    return " ".join((field.description or "").split())


TRACKERS: dict[str, tuple[str, ...]] = {
    "tensorboard": ("tensorboard", "tensorboardX"), "wandb": ("wandb",), "trackio": ("trackio",),
    "mlflow": ("mlflow",), "comet_ml": ("comet_ml",), "clearml": ("clearml",), "aim": ("aim",),
    "dvclive": ("dvclive",), "swanlab": ("swanlab",),
}  # fmt: skip
"""Accelerate's trackers, each with the packages of which it needs one."""


def tracker_is_installed(name: str) -> bool:
    """Whether one of a tracker's packages is there; a mere folder of that name, as wandb leaves behind, is none."""
    specs = map(importlib.util.find_spec, TRACKERS[name])
    return any(spec is not None and spec.origin is not None for spec in specs)


class ServedModel(Settings):
    """A model behind an OpenAI-compatible server."""

    url: str
    """Address of the server, such as http://127.0.0.1:8000; it is not in the key, as the model is."""
    model: str
    """The model, by the server's name for it."""
    key_variable: str | None = None
    """Environment variable that holds the server's API key, if it wants one."""


MICROBATCH_TOKENS = 16384
"""In a forward pass, where nothing else is said: they keep a large GPU busy."""


def _or_default(value: Any) -> Any:
    return MICROBATCH_TOKENS if value is None else value  # null stands in settings of before there was a default


MicrobatchTokens = Annotated[int, Field(ge=1), BeforeValidator(_or_default)]


class LoraSettings(Settings):
    """Low-rank adapters (Hu et al. 2021, through PEFT)."""

    r: int = Field(16, ge=1)
    """Rank of the update. [LoRA]"""
    alpha: int = Field(32, ge=1)
    """Scale of the update: alpha / r. [LoRA]"""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout on the adapter's input. [LoRA]"""
    target_modules: list[str] | str = "all-linear"
    """Names of the layers to adapt, such as [q_proj, v_proj]; by default all but what makes logits or scores. [PEFT;
    QLoRA]"""

    @field_validator("target_modules")
    @classmethod
    def _name_is_no_pattern(cls, value: list[str] | str) -> list[str] | str:
        return value if value == "all-linear" or isinstance(value, list) else [value]  # PEFT takes a text as a pattern


class StageSettings(Settings):
    """What all four stages have in common."""

    stage: ClassVar[str]
    input_fields: ClassVar[tuple[str, ...]] = ("model",)
    """Fields that name a model: a folder or a hub id; the pipeline fills in what the recipe leaves empty."""
    data_fields: ClassVar[tuple[str, ...]] = ("data", "eval_data")
    length_fields: ClassVar[tuple[str, ...]] = ("max_length",)
    """Fields that together say how many tokens the longest sequence has."""
    code_fields: ClassVar[tuple[str, ...]] = ()
    """Fields that name a `module:function`; the module's source takes part in the key."""
    not_in_key: ClassVar[frozenset[str]] = frozenset(
        {"max_dropped", "log_every", "save_every", "microbatch_size", "auto_microbatch", "max_skipped", "report_to"}
        | {"stop_within", "stop_hung_after"}
    )
    """Fields that cannot change the result."""

    seed: int = Field(0, ge=0)
    """Seed of weights, order of the data and sampling."""
    eval_share: float = Field(0.1, gt=0, lt=1)
    """Share of the prompts (documents, for text) held out for evaluation; chosen by a hash of the prompt."""
    max_dropped: float = Field(0.0, ge=0, lt=1)
    """Share of unusable rows to go on with; above it the stage refuses to start."""
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = "auto"
    """Autocast type; auto takes bf16 where the device has it, else fp32, and in pretrain fp16 on a GPU. Weights stay in
    fp32; tf32 is fp32 whose matrices are multiplied with ten bits."""
    microbatch_size: int | None = Field(None, ge=1)
    """Rows (prompts, episodes) per forward pass on one device; its whole share of the batch by default."""
    auto_microbatch: bool = False
    """Halve microbatch_size (while answers are sampled, generation_batch_size) and try again when memory runs out; the
    global batch stays. For one process."""
    max_skipped: int = Field(3, ge=1)
    """A step whose loss or gradient is not finite is skipped; after so many in a row the stage stops."""
    log_every: int = Field(10, ge=1)
    """Steps between two lines of metrics."""
    report_to: list[str] | None = Field(None, json_schema_extra=one_or_several)
    """Trackers that get the metrics too: tensorboard, wandb, trackio, mlflow, comet_ml, clearml, aim, dvclive, swanlab.
    null: TensorBoard where it is installed; []: none. [Accelerate]"""
    save_every: int = Field(50, ge=1)
    """Steps between two checkpoints of the full training state."""
    stop_within: float = Field(30.0, gt=0)
    """Seconds after a signal (SIGTERM, SIGINT, SIGUSR1) until the stage is gone, its state saved if the step under way
    ends in time."""
    stop_hung_after: float = Field(1800.0, gt=0)
    """Seconds in which none of several processes begins or ends anything, until they end themselves and say which one
    hangs; more than the longest save, first compilation, rollout or answer of a judge takes. While data and models are
    loaded nobody looks; torch's own limit of six hours holds there."""
    attempt: int = Field(0, ge=0)
    """Sets a rerun of the same settings apart; `rlhf run --force STAGE` counts it up."""

    @field_validator("report_to", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("report_to")
    @classmethod
    def _there_to_be_told(cls, names: list[str] | None) -> list[str] | None:
        for name in names or ():
            if name not in TRACKERS:
                raise ValueError(f"no tracker '{name}'; {nearest(name, list(TRACKERS))} ([] for none)")
            if not tracker_is_installed(name):
                installed = [other for other in TRACKERS if tracker_is_installed(other)]
                raise ValueError(
                    f"'{name}' is not installed (installed: {', '.join(installed) or 'no tracker'}); "
                    f"pip install {TRACKERS[name][0]}, or take it out ([] for none)"
                )
        return names

    def inputs(self) -> dict[str, str | None]:
        """The models that the stage needs, by name; None where one is still to be filled in."""
        return {name: getattr(self, name) for name in self.input_fields}

    def sources(self) -> dict[str, Source]:
        """The sources of rows that the stage reads, by name; those of a list are `data[0]`, `data[1]` …"""
        given = {name: value for name in self.data_fields if (value := getattr(self, name)) is not None}
        lists = {name: value if isinstance(value, list) else [value] for name, value in given.items()}
        return {key: source for name, sources in lists.items() for key, source in named(name, sources).items()}

    def code(self) -> dict[str, str]:
        """Each `module:function` that the stage calls, by name."""
        return {name: value for name in self.code_fields if (value := getattr(self, name)) is not None}

    def longest(self) -> tuple[str, int] | None:
        """The settings that say how long a sequence may be, and its tokens; None where they say nothing."""
        lengths = [getattr(self, name) for name in self.length_fields]
        return None if None in lengths else (" + ".join(f"{self.stage}.{x}" for x in self.length_fields), sum(lengths))

    def why_alone(self, num_processes: int) -> str | None:
        """Why the stage cannot have so many processes; None where no setting keeps it from that."""
        if not self.auto_microbatch or num_processes == 1:
            return None
        return (
            f"{self.stage}.auto_microbatch: works with one process, there are {num_processes}: one that runs out of "
            f"memory would leave the others waiting; set {self.stage}.microbatch_size instead"
        )

    def why_not_spread(self) -> Iterator[str]:
        """Why the stage cannot have models that are spread over processes (FSDP), a line for each setting."""
        if self.precision == "fp16":
            yield f"{self.stage}.precision: fp16 is not supported for sharded models; use bf16 or fp32"
        for setting, because in self.only_whole():
            yield f"{self.stage}.{setting}: not with models that are spread over processes (FSDP): {because}"

    def only_whole(self) -> Iterator[tuple[str, str]]:
        """Settings of the stage's own that want whole models, and what to do about each."""
        yield from ()

    def result_settings(self) -> dict[str, Any]:
        """The settings that change the result, without models, data and code, whose digests stand for them."""
        left_out = {*self.not_in_key, *self.input_fields, *self.data_fields, *self.code_fields}
        return self.model_dump(mode="json", exclude=left_out)


AnyStage = TypeVar("AnyStage", bound=StageSettings)
NOT_IN_FSDP = (
    ("offload_params", "use more processes"),
    ("activation_checkpointing", "set the stage's own gradient_checkpointing"),
)
"""Fields of an accelerate config's fsdp_config that ask for what is not done here, and what to do instead."""


def why_uneven(name: str, size: int, num_processes: int, each: int = 1, also: int = 1) -> str | None:
    """Why so many processes cannot have equal shares of a batch; None where they can.

    `name` begins with the setting that would work with the value that is told. It counts `each` for one of the batch,
    and has to be a multiple of `also`, too.
    """
    if not size % num_processes:
        return None
    step = math.lcm(num_processes * each, also)
    cure = f"{name.split()[0]}={math.ceil(size * each / step) * step}"
    return f"{name}: {size} cannot be shared evenly by {num_processes} processes; use a multiple: {cure}"


NUM_LISTED = 20
"""Names that an error lists; nobody reads more."""


def nearest(name: str, names: list[str], listed: str = "") -> str:
    """'did you mean X?' or a list of what there is; of more than NUM_LISTED names, where they are `listed`."""
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"did you mean '{close[0]}'?"
    if listed and len(names) > NUM_LISTED:
        return f"none of the {len(names)} there are has a name like it; {listed}"
    return f"there are {', '.join(sorted(names))}"


def _problem(cls: type[BaseModel], where: str, details: ErrorDetails) -> str:
    """One line for one pydantic error: where, what was found, what would work."""
    loc = [str(part) for part in details["loc"]]
    key = ".".join([where, *loc] if where else loc)
    if details["type"] == "extra_forbidden":
        parent = ".".join([where, *loc[:-1]] if where else loc[:-1])
        names = _fields_at(cls, loc[:-1])
        kind = "setting" if parent else "section or setting"
        listed = "`rlhf schema` and docs/recipes.md list them"
        return f"{parent or 'recipe'}: no {kind} '{loc[-1]}'; {nearest(loc[-1], names, listed)}"
    if details["type"] == "missing":
        return f"{key}: not set; {_description(cls, loc)}"
    if details["type"] == "value_error":  # one of ours: it says what was found
        return f"{key}: {plain_words(details)}"
    message = plain_words(details)
    return f"{key}: {message[0].lower()}{message[1:]} (found {details['input']!r})"


def _class_at(cls: type[BaseModel], path: list[str]) -> type[BaseModel] | None:
    """The section that `path` leads to."""
    for name in path:
        if name.isdigit():  # an item of a list, whose class was found with the list
            continue
        field = cls.model_fields.get(name)
        candidates = (field.annotation, *get_args(field.annotation)) if field else ()
        models = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
        if not models:
            return None
        cls = models[0]
    return cls


def _fields_at(cls: type[BaseModel], path: list[str]) -> list[str]:
    section = _class_at(cls, path)
    return list(section.model_fields) if section else []


def _description(cls: type[BaseModel], path: list[str]) -> str:
    section = _class_at(cls, path[:-1])
    field = section.model_fields.get(path[-1]) if section else None
    return (meaning(field) if field else "") or "a value is needed"
