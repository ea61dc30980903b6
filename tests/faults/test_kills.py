"""kill -9 anywhere: the finished run is the one that nobody disturbed. benchmarks/kills.py has a hundred kills."""

import json
import random
import re
import shutil
from collections import Counter

import pytest
from campaign import Outcome, campaign, differences, undisturbed
from faults_world import Server
from points import OUTSIDE, STAGES, Point

NUM_KILLS = 15


@pytest.fixture(scope="module")
def outcomes(server: Server) -> list[Outcome]:
    """So many kills, of one run after the other."""
    rng, wanted, found = random.Random(6), Counter(dict.fromkeys((*STAGES, OUTSIDE), NUM_KILLS // 5)), list[Outcome]()
    calls = undisturbed(server)
    while sum(len(outcome.kills) for outcome in found) < NUM_KILLS:
        found.append(campaign(server, calls, rng, wanted, f"killed-{len(found)}"))
        assert len(found) < 10
        wanted = +wanted or Counter({STAGES[len(found) % 4]: 4})
    return found


def test_a_run_that_was_killed_many_times_ends_as_if_nothing_had_happened(outcomes: list[Outcome]) -> None:
    assert [outcome.differences for outcome in outcomes] == [[]] * len(outcomes)


def test_no_kill_costs_more_than_what_came_after_the_last_checkpoint(outcomes: list[Outcome]) -> None:
    kills = [kill for outcome in outcomes for kill in outcome.kills]
    assert [kill for kill in kills if kill.lost] == []
    assert {kill.stage for kill in kills} == {*STAGES, OUTSIDE}
    assert len({kill.kind for kill in kills} - {"time"}) > 3
    assert any(kill.kind == "time" for kill in kills)


@pytest.mark.parametrize(("mode", "whole"), [("before", []), ("middle", [False]), ("after", [True])])
def test_a_kill_falls_where_it_is_meant_to(server: Server, mode: str, whole: list[bool]) -> None:
    point = Point("pretrain", "serialize_file", 1, mode)
    ended = server.rlhf("run", "recipe.yaml", "--run-dir", mode, point=point)
    assert (ended.code, ended.stage) == (-9, "pretrain")
    assert ended.calls["pretrain", "serialize_file"] == 1
    found = []
    for file in (server.home / mode).rglob("*.safetensors"):
        size = int.from_bytes(file.read_bytes()[:8], "little")  # of the header, which says where the tensors lie
        tensors = json.loads(file.read_bytes()[8 : 8 + size])
        del tensors["__metadata__"]
        found.append(file.stat().st_size == 8 + size + max(tensor["data_offsets"][1] for tensor in tensors.values()))
    assert found == whole


def test_the_comparison_sees_what_differs(server: Server, outcomes: list[Outcome]) -> None:
    whole, other = server.home / "whole", server.home / "other"
    shutil.copytree(whole, other)
    assert list(differences(other, whole)) == []
    next(other.glob("sft-*/model/model.safetensors")).write_bytes(
        b"other"
    )  # what is sealed counts, not what lies there
    (other / ".stray").touch()
    metrics = next(other.glob("ppo-*/metrics.jsonl"))
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:-1]))
    manifest = next(other.glob("reward-*/manifest.json"))
    manifest.write_text(re.sub(r'("model/model.safetensors": ")\w+', r"\1beef", manifest.read_text()))
    assert [difference.split(" has ")[0] for difference in differences(other, whole)] == [
        "reward: model/model.safetensors",
        ".stray: is in the killed run alone",
    ]
