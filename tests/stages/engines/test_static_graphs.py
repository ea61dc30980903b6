"""The built-in engine with recorded steps and passes, as on a GPU, on a CPU: which rows go on, and what stays."""

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from engines_world import PROMPTS, STOPS, assert_sampled, drawn, new_model

from rlhf.stages.engines import slots, static
from rlhf.stages.engines.static import StaticEngine
from rlhf.stages.engines.twin import Twin


class Graph:
    """Does again what it was made of, as a CUDA graph does: with what it worked on when it was recorded."""

    def __init__(self, function: Callable[[], object], slots_: slots.Slots) -> None:
        self.function, self.slots, self.beginning = function, slots_, slots_.beginning

    def replay(self) -> None:
        self.slots.beginning = self.beginning
        self.function()


class Graphs:
    """Those of a GPU, on a CPU. `trials` are called after a function of shapes that are new was run."""

    def __init__(self, slots_: slots.Slots) -> None:
        self.slots, self.shapes, self.known = slots_, [], set[Any]()
        self.trials: list[Callable[[], object]] = []

    def is_known(self, shapes: Any) -> bool:
        return shapes in self.known

    def capture(self, function: Callable[[], object], shapes: Any) -> Graph:
        self.shapes.append(shapes)
        if shapes not in self.known:
            function()
            for trial in self.trials:
                trial()
        self.known.add(shapes)
        return Graph(function, self.slots)


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[Graphs]:
    """Those of each rollout to come."""
    recordings: list[Graphs] = []

    class Recorded(static._Writing):
        def __init__(self, twin: Twin, slots_: slots.Slots, _: Any, *law: Any) -> None:
            recordings.append(Graphs(slots_))
            super().__init__(twin, slots_, recordings[-1], *law)  # type: ignore[arg-type]
            self.in_kernels = False

        def look(self) -> static._Look:
            return static._Look(self.told, self.num_steps, None)

    monkeypatch.setattr(static, "_Writing", Recorded)
    return recordings


@pytest.mark.parametrize("num_slots", [2, 12, 24])
@pytest.mark.parametrize("same", [False, True])
def test_prompts_that_take_the_place_of_others_may_be_read_in_recorded_passes(
    num_slots: int, same: bool, recordings: list[Graphs]
) -> None:
    """As on a GPU, which makes more steps while something is recorded."""
    model = new_model("mistral")
    prompts = [[3 + i // 3, 4] if same else [3 + i, 4] * (1 + i % 5) * 4 for i in range(90)]
    responses = drawn(StaticEngine(model, batch_size=num_slots), prompts, 10)
    assert_sampled(model, prompts, responses, 0.7, STOPS, 10)
    recorded = [shapes[1] for shapes in recordings[0].shapes if shapes[0] == "prefill"]
    assert recorded
    assert len(set(recorded)) == len(recorded)
    assert all(width % 32 == 0 or width == recordings[0].slots.shape[1] for _, width in recorded)


def test_a_step_that_is_tried_before_it_is_recorded_ends_no_row(
    recordings: list[Graphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU has made the step before and the trial, and not yet begun what is recorded, when the CPU looks."""

    class Tried(static._Writing):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.looks: list[static._Look] = []
            recordings[-1].trials.append(self.seen)

        def look(self) -> static._Look:
            self.looks.append(super().look())
            return self.looks[-1]

        def seen(self) -> None:
            for look in self.looks[-1:]:
                look.told = look.told.clone()

    monkeypatch.setattr(static, "_Writing", Tried)
    model = new_model("mistral")
    prompts = [[3 + i % 90, 4] * (1 + i % 5) for i in range(100)]
    responses = drawn(StaticEngine(model), prompts, 50)
    assert_sampled(model, prompts, responses, 0.7, STOPS, 50)


def test_slots_are_gone_when_their_rollout_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without waiting for Python to find circles, which may take until after the update."""
    there: list[weakref.ref[slots.Slots]] = []

    class Forgetful:
        """They keep no more of a function than CUDA graphs do."""

        def capture(self, function: Callable[[], object], _: Any) -> SimpleNamespace:
            function()
            kept = there[-1]
            return SimpleNamespace(replay=lambda: kept().lengths.zero_())  # type: ignore[union-attr]

    class Recorded(static._Writing):
        def __init__(self, twin: Twin, slots_: slots.Slots, _: Any, *law: Any) -> None:
            there.append(weakref.ref(slots_))
            super().__init__(twin, slots_, None, *law)
            self.prefill.graphs = Forgetful()  # type: ignore[assignment]

        def _go_on(self) -> None:
            pass

    monkeypatch.setattr(static, "_Writing", Recorded)
    gc.collect()
    gc.disable()
    try:
        drawn(StaticEngine(new_model("mistral"), batch_size=8), [[3 + i, 4] for i in range(40)])
        assert there[0]() is None
    finally:
        gc.enable()


def test_answers_of_one_token_take_no_step(recordings: list[Graphs]) -> None:
    model = new_model("mistral")
    responses = drawn(StaticEngine(model, batch_size=3), PROMPTS, 1)
    assert_sampled(model, PROMPTS, responses, 0.7, STOPS, 1)
    assert all(shapes[0] == "prefill" for shapes in recordings[0].shapes)


@pytest.mark.parametrize(
    ("num", "rows"),
    [(1, 8), (8, 8), (9, 16), (33, 64), (64, 64), (65, 96), (96, 96), (97, 128), (150, 192), (193, 256)],
)
def test_a_graph_serves_up_to_so_many_rows(num: int, rows: int) -> None:
    assert static._rows_of_graph(num, 300) == rows
    assert static._rows_of_graph(num, num) == num
