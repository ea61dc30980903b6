"""A report of a run in which something is damaged or missing: that costs its own part of the page, which says so."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from report_world import CARD, FIGURES, METRICS, SAMPLE, WORST, make_run, set_metrics, words, write_lines

from rlhf.data.errors import SettingsError
from rlhf.pipeline.report.files import Fault
from rlhf.pipeline.report.judgement import judge_run
from rlhf.pipeline.report.page import page, write
from rlhf.pipeline.report.run import read_run
from rlhf.pipeline.summary import read_summary
from rlhf.stages.evaluation.records import short_hash

Rlhf = Callable[..., tuple[int, str, str]]
SPREAD = {"mean": 0.5, "std": 1.0, "quantiles": [-1.0, 0.0, 0.25, 1.0, 2.0]}
ANSWERED = [{"prompt": "Why?", "answers": {"sft": "s", "ppo": "p"}, "scores": {"sft": 0.5, "ppo": 1.5}}]
EVALUATION: dict[str, Any] = {
    "form": "full", "answers_digest": short_hash(ANSWERED),
    "models": {name: {"model": f"{name}-0123abcd", "score": SPREAD} for name in ("sft", "ppo")},
    "best_of_n": [{"n": n, "score": 0.5, "kl": 0.25} for n in (1, 4)],
}  # fmt: skip
DOCUMENTS = {"name": "web", "path": "web.jsonl", "documents": 90, "left_out": {"too short": 7}}
PART = {"points": [[1e3, 4.0], [1e4, 2.0]], "fit": {"exponent": 0.3, "log10_constant": 5.0, "r_squared": 0.98}}
SWEEP: dict[str, Any] = {
    "rows": [{"name": "wide", "settings": {}, "folder": "pretrain-0123abcd", "num_tokens": 300, "val_loss": 2.5}],
    "scaling": dict.fromkeys(("parameters", "tokens", "compute"), PART),
}
TITLES = {
    "summary.json": "Verdicts", "recipe.yaml": "How it was made", "sweep.json": "Sweep",
    "evaluation.json": "Evaluation", "evaluation.jsonl": "Answers before and after PPO",
    "pretrain-0123abcd/metrics.jsonl": "Curves", "pretrain-0123abcd/samples.jsonl": "Curves",
    "pretrain-0123abcd/corpus.json": "How it was made", "pretrain-0123abcd/manifest.json": "How it was made",
    "reward-0123abcd/card.json": "The reward model's report card",
    "reward-0123abcd/worst_pairs.jsonl": "The reward model's report card",
    "ppo-0123abcd/samples.jsonl": "Answers before and after PPO",
}  # fmt: skip
"""By file the part of the page that it is for."""
NOT_ALL_HAVE = ("sweep.json", "evaluation.json")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of all stages in which every file is that a report reads."""
    run_dir = make_run(tmp_path_factory.mktemp("whole") / "run", list(METRICS), [SAMPLE, SAMPLE])
    pretrain, reward = run_dir / "pretrain-0123abcd", run_dir / "reward-0123abcd"
    write_lines(pretrain / "samples.jsonl", [{"step": step, "prompt": "Once", "text": "…"} for step in (1, 2)])
    (pretrain / "corpus.json").write_text(json.dumps({"sources": [DOCUMENTS]}), encoding="utf-8")
    (reward / "card.json").write_text(json.dumps(CARD), encoding="utf-8")
    write_lines(reward / "worst_pairs.jsonl", [WORST, WORST])
    (run_dir / "evaluation.json").write_text(json.dumps(EVALUATION), encoding="utf-8")
    write_lines(run_dir / "evaluation.jsonl", ANSWERED)
    (run_dir / "sweep.json").write_text(json.dumps(SWEEP), encoding="utf-8")
    (run_dir / "recipe.yaml").write_text("seed: 7\nppo: {kl_coef: 0.1}\n", encoding="utf-8")
    for stage, metrics in (METRICS | {"reward": METRICS["reward"] | FIGURES}).items():
        files = {path.name: path.stat().st_size for path in run_dir.glob(f"{stage}-*/*") if path.suffix != ".yaml"}
        manifest = json.loads((run_dir / f"{stage}-0123abcd" / "manifest.json").read_text(encoding="utf-8"))
        del files["manifest.json"]
        manifest |= {"files": dict.fromkeys(files, "beef"), "sizes": files, "metrics": metrics}
        (run_dir / f"{stage}-0123abcd" / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    return run_dir


@pytest.fixture
def run_dir(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf.pipeline.report.charts.draw_lines", lambda *_: "")


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf.pipeline.report.drawing._draw", lambda *_: "")


def other_numbers(content: Any, value: Any) -> Any:
    """The same with `value` in the place of each number."""
    if isinstance(content, dict | list):
        pairs = list(content.items() if isinstance(content, dict) else enumerate(content))
        found = {key: other_numbers(part, value) for key, part in pairs}
        return found if isinstance(content, dict) else list(found.values())
    return value if isinstance(content, int | float) and not isinstance(content, bool) else content


def damages(path: Path) -> dict[str, Callable[[], object]]:
    """What may have happened to a file."""
    text = path.read_bytes()
    texts = {"half": text[: len(text) // 2], "emptied": b"", "other bytes": b"\xff\xfe" + text}
    texts |= {other: other.encode() for other in ("[]", "{}", "null", "5", "[[{}]]", '"text"')}
    texts |= {"deeply nested": b"[" * 10_000 + b"]" * 10_000}
    if path.suffix == ".jsonl":
        first, second = text.split(b"\n")[0], b"\n".join(text.split(b"\n")[1:])
        texts |= {f"a line of {line[:4]!r}": line + b"\n" + second for line in (b"[]", b"{}", b"\xff", b"[" * 10_000)}
        texts |= {"the last line cut": text[: -len(first) // 2], "the last line gone": text[: -len(first) - 1]}
    for value in ("a text", float("nan"), 1e308, 10**400, [], {}):
        lines = text.split(b"\n")[:-1] if path.suffix == ".jsonl" else [text][: path.suffix == ".json"]
        new = "\n".join(json.dumps(other_numbers(json.loads(line), value)) for line in lines)
        texts |= {f"numbers are {str(value)[:9]}": new.encode() + b"\n"} if lines else {}
    found: dict[str, Callable[[], object]] = {
        what: lambda new=new: path.write_bytes(new) for what, new in texts.items()
    }
    return found | {"missing": path.unlink, "a folder": lambda: (path.unlink(), path.mkdir())}


def told(run_dir: Path, file: str) -> list[Fault]:
    return [fault for fault in read_run(run_dir).faults if fault.file == file]


@pytest.mark.parametrize("file", TITLES)
def test_whatever_happened_to_a_file_the_run_is_read_and_one_sentence_says_what(run_dir: Path, file: str) -> None:
    """But where a file may well be missing, or may well hold what is no number."""
    assert read_run(run_dir).faults == []
    path = run_dir / file
    text = path.read_bytes()
    for what, damage in damages(path).items():
        path.write_bytes(text)
        damage()
        faults = told(run_dir, file)
        is_fine = (what == "missing" and file in (*NOT_ALL_HAVE, "pretrain-0123abcd/manifest.json")) or (
            what in ("numbers are nan", "numbers are 1e+308", "numbers are 100000000")
            and (path.name in ("summary.json", "sweep.json") or path.suffix == ".jsonl")
        )
        assert len(faults) == 1 or is_fine, what
        judge_run(read_run(run_dir))
        if path.is_dir():
            path.rmdir()


@pytest.mark.parametrize("file", TITLES)
def test_a_damaged_file_is_told_of_in_its_part_of_the_page_and_all_else_is_drawn(
    run_dir: Path, rlhf: Rlhf, file: str, undrawn: None
) -> None:
    (run_dir / file).write_bytes(b'{"a": [1')
    code, out, err = rlhf("report", str(run_dir))
    assert (code, out) == (0, f"{run_dir / 'report.html'}\n")
    assert err.startswith(f"warning: {run_dir / file}")
    assert err.count("\n") == 1
    html = (run_dir / "report.html").read_text(encoding="utf-8")
    before = html.partition(f"⚠ {file}</b>")[0]
    assert before != html
    assert re.findall("<h2[^>]*>(.*?)</h2>", before)[-1] == TITLES[file]
    headings = re.findall("<h2[^>]*>(.*?)</h2>", html)
    assert [title for title in dict.fromkeys(TITLES.values()) if title not in headings] == []
    kept = {  # text of the page, and the file without which it is not there
        "What it writes, from step 1": "pretrain-0123abcd/samples.jsonl",
        "The 2 pairs it is most wrong about": "reward-0123abcd/worst_pairs.jsonl",
        "of 1,234 pairs": "reward-0123abcd/card.json",
        "scores of nine in ten answers": "evaluation.json",
        "1 variants of pretraining": "sweep.json",
        "7 × too short": "pretrain-0123abcd/corpus.json",
        "seed: 7": "recipe.yaml",
        "SFT learned: held-out loss 3.42 → 1.17.": "nothing",
    }
    shown = words(html)
    assert {needs for text, needs in kept.items() if text not in shown} <= {file}


@pytest.mark.parametrize(("file", "place", "value"), [
    ("evaluation.json", ("models", "ppo", "score", "quantiles"), []),
    ("evaluation.json", ("best_of_n", 0, "kl"), 1e308),
    ("evaluation.json", ("best_of_n", 0, "n"), 10**400),
    ("reward-0123abcd/card.json", ("histogram", "edges"), []),
    ("reward-0123abcd/card.json", ("by_length", 0, "accuracy"), 5),
    ("reward-0123abcd/card.json", ("reliability", 0, "pairs"), 0),
    ("reward-0123abcd/card.json", ("compared",), [{"model": "other", "accuracy": 0.5}]),
    ("summary.json", ("stages", "sft", "folder"), 5),
    ("summary.json", ("stages", "sft", "folder"), "/etc"),
    ("summary.json", ("stages", "sft", "seconds"), float("inf")),
    ("summary.json", ("stages", "sft", "metrics"), []),
    ("summary.json", ("stages", "ppo", "metrics", "win_rate"), 5),
    ("summary.json", ("stages", "ppo", "metrics", "kl"), "far"),
    ("summary.json", ("stages", "ppo", "metrics", "findings"), 5),
    ("summary.json", ("stages", "pretrain", "metrics", "vocab_size"), -5),
    ("pretrain-0123abcd/manifest.json", ("made_with",), 5),
    ("sft-0123abcd/manifest.json", ("settings", "rollout_batch_size"), "x"),
    ("sweep.json", ("scaling", "tokens", "points", 0), [0.0, 1.0]),
    ("sweep.json", ("scaling", "tokens", "fit", "exponent"), 1e99),
    ("sweep.json", ("scaling", "tokens", "fit", "r_squared"), 1e101),
    ("sweep.json", ("scaling", "tokens", "fit"), 5),
    ("summary.json", ("stages", "sft"), 5),
])  # fmt: skip
def test_a_value_that_cannot_be_drawn_is_named_by_its_key(
    run_dir: Path, rlhf: Rlhf, file: str, place: tuple[Any, ...], value: Any, quick: None
) -> None:
    content = part = json.loads((run_dir / file).read_text(encoding="utf-8"))
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] = value
    (run_dir / file).write_text(json.dumps(content), encoding="utf-8")
    code, _, err = rlhf("report", str(run_dir))
    assert code == 0
    assert re.match(rf"warning: {re.escape(str(run_dir / file))}: .*(is|are) damaged.*\n\Z", err)
    assert str(place[-2 if isinstance(place[-1], int) else -1]) in err or place[0] in ("scaling", "compared")
    assert "instance" not in err  # of a class of ours, which says nothing to people


def test_a_part_of_which_nothing_can_be_drawn_says_why(run_dir: Path, rlhf: Rlhf, undrawn: None) -> None:
    for name in ("card.json", "worst_pairs.jsonl"):
        (run_dir / "reward-0123abcd" / name).unlink()
    assert rlhf("report", str(run_dir))[2].count("is missing; put it back") == 2
    shown = words((run_dir / "report.html").read_text(encoding="utf-8"))
    assert "The reward model's report card ⚠ reward-0123abcd/card.json : is missing; put it back as it was, or" in shown


def test_a_log_that_breaks_off_is_told_of_without_alarm_where_the_stage_was_killed(run_dir: Path, rlhf: Rlhf) -> None:
    (run_dir / "ppo-0123abcd" / "manifest.json").unlink()
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    summary["stages"]["ppo"]["status"] = "running"  # and no process has the folder
    (run_dir / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    for name in ("metrics.jsonl", "samples.jsonl"):
        with (run_dir / "ppo-0123abcd" / name).open("a", encoding="utf-8") as file:
            file.write('{"step": 99, "lo')
    assert rlhf("report", str(run_dir))[2] == ""
    html = (run_dir / "report.html").read_text(encoding="utf-8")
    assert "⚠" not in html
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert f"ppo-0123abcd/{name}: its last line was cut short, as by a kill, and is left out." in words(html)


def test_lines_that_cannot_be_read_are_counted_and_the_others_drawn(run_dir: Path) -> None:
    path = run_dir / "sft-0123abcd" / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join(["{", *lines[1:5], '{"step": 5, "loss": "low"}', *lines[6:]]) + "\n", encoding="utf-8")
    (fault,) = told(run_dir, "sft-0123abcd/metrics.jsonl")
    assert " line 1: is damaged (it breaks off at column 1), as are others, 2 of 10 lines, which are left out" in str(
        fault
    )
    assert [row["step"] for row in read_run(run_dir).stages["sft"].rows] == [1, 2, 3, 4, 6, 7, 8, 9]


def test_a_verdict_says_what_it_does_without(run_dir: Path, rlhf: Rlhf, undrawn: None) -> None:
    (run_dir / "ppo-0123abcd" / "metrics.jsonl").write_text("", encoding="utf-8")
    err = rlhf("report", str(run_dir))[2]
    assert "ppo-0123abcd/metrics.jsonl: was changed since it was sealed (0 bytes, not " in err
    shown = words((run_dir / "report.html").read_text(encoding="utf-8"))
    assert shown.count("The verdict does without metrics.jsonl, which cannot be read whole; the reason is below.") == 1


def test_without_a_summary_the_folders_tell_what_the_stages_brought(run_dir: Path, rlhf: Rlhf) -> None:
    """A sibling that was begun later and not finished is not taken for the stage."""
    (run_dir / "sft-feedbeef").mkdir()
    (run_dir / "summary.json").unlink()
    run = read_run(run_dir)
    assert {name: stage.folder for name, stage in run.stages.items()} == {s: f"{s}-0123abcd" for s in METRICS}
    assert judge_run(run)["sft"].sentence == "SFT learned: held-out loss 3.42 → 1.17."
    assert str(run.faults[0]) == (
        "summary.json: is missing; what is said of the stages is from their folders; the next `rlhf run` writes it anew"
    )
    assert run.seconds is None
    shutil.rmtree(run_dir / "sft-0123abcd")
    assert read_run(run_dir).stages["sft"].status == "interrupted"


def test_where_there_is_nothing_to_report_on_the_file_and_the_cure_are_named(tmp_path: Path, rlhf: Rlhf) -> None:
    (tmp_path / "summary.json").write_text('{"stages": {"sft": {"status": "done", "folder": 5}}}', encoding="utf-8")
    for command in ("report", "status"):
        code, _, err = rlhf(command, str(tmp_path))
        assert code == 2
        assert err == (
            f"error: {tmp_path / 'summary.json'}: not a summary of a run (stages.sft.folder is damaged, or of another "
            "version (Input should be a valid string)); delete it and run again\n"
        )


def test_a_stage_whose_folder_is_gone_is_not_judged(run_dir: Path, rlhf: Rlhf, undrawn: None) -> None:
    """Nor are its figures shown; how to get it back is."""
    shutil.rmtree(run_dir / "ppo-0123abcd")
    verdicts = judge_run(read_run(run_dir))
    assert [(verdict.name, verdict.tone) for verdict in verdicts.values()][-1] == ("missing", "open")
    assert verdicts["sft"].name == "learned"
    assert rlhf("report", str(run_dir))[0] == 0
    shown = words((run_dir / "report.html").read_text(encoding="utf-8"))
    assert "PPO ? missing PPO is finished, but not here, so it is not judged:" in shown
    assert (
        f"or rlhf run {run_dir}/recipe.yaml --run-dir {run_dir} makes it anew. done, folder missing 12.5 s"
        in " ".join(re.sub("</?code>", "", shown).split())
    )
    assert "PPO improved" not in shown
    assert "0.386 → 0.830" not in shown
    assert "The last finished model is run/sft-0123abcd/model." in shown
    shutil.rmtree(run_dir / "sft-0123abcd")  # the first that is not there is what the page begins with
    assert rlhf("report", str(run_dir))[0] == 0
    shown = words((run_dir / "report.html").read_text(encoding="utf-8"))
    assert "run report run SFT is finished, but not here, so it is not judged" in shown


def test_a_stage_whose_folder_may_not_be_looked_into_is_told_of_beside_the_others(
    run_dir: Path, rlhf: Rlhf, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, is_file = run_dir / "sft-0123abcd", Path.is_file

    def denied(path: Path) -> bool:
        if path.parent == folder:
            raise PermissionError(13, "Permission denied", str(path))
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", denied)
    code, out, _ = rlhf("status", str(run_dir))
    assert code == 0
    assert f"warning: {folder}: may not be looked into; change its mode" in out
    assert [verdict.name for verdict in judge_run(read_run(run_dir)).values()][:2] == ["learned", "missing"]


def test_a_number_that_no_table_can_hold_is_refused_by_status(tmp_path: Path, rlhf: Rlhf) -> None:
    run_dir = set_metrics(make_run(tmp_path, ["sft"]), "sft", eval_loss=10**400)
    code, _, err = rlhf("status", str(run_dir))
    assert code == 2
    assert "stages.sft.metrics is damaged, or of another version (eval_loss is no number that a stage measures)" in err


@pytest.mark.parametrize(
    "told", [{"metrics": {"eval_loss": 10**400}}, {"rows": {"data": {"kept": 10**400, "of": 1, "left_out": {}}}}]
)
def test_a_number_of_a_manifest_that_no_page_can_hold_is_left_out(
    tmp_path: Path, quick: None, told: dict[str, Any]
) -> None:
    run_dir = make_run(tmp_path, ["sft"])
    path = run_dir / "sft-0123abcd" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | told), encoding="utf-8")
    run = read_run(run_dir)
    assert [fault.file for fault in run.faults] == ["sft-0123abcd/manifest.json"]
    page(run)


@pytest.mark.parametrize("damage", ["[", "[]", "5", '{"step": 3}', '{"state": 5}', "[" * 10_000, b"\xff\xfe", None])
def test_the_status_of_a_run_says_where_it_cannot_tell_how_far_a_stage_is(
    run_dir: Path, rlhf: Rlhf, damage: str | bytes | None
) -> None:
    folder = run_dir / "ppo-0123abcd"
    (folder / "manifest.json").unlink()
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    summary["stages"]["ppo"] |= {"status": "failed", "metrics": {}}
    (run_dir / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    if damage is None:
        (folder / "status.json").mkdir()
    else:
        (folder / "status.json").write_bytes(damage if isinstance(damage, bytes) else damage.encode())
    code, out, _ = rlhf("status", str(run_dir))
    assert code == 0
    assert f"how far it is cannot be told: {folder}/status.json is damaged; running again goes on" in out
    assert "so there is no result yet: how far it is cannot be told" in judge_run(read_run(run_dir))["ppo"].sentence


def test_a_waiting_step_that_cannot_be_looked_into_is_told_of_beside_the_others(run_dir: Path, rlhf: Rlhf) -> None:
    folder = run_dir / "feedback-0123abcd"
    folder.mkdir()
    texts = {"status.json": '{"state": "waiting"}', "feedback.sqlite": "no store", "settings.yaml": "prompts: ["}
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    summary["stages"]["feedback"] = {"status": "waiting", "folder": folder.name}
    (run_dir / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    code, out, _ = rlhf("status", str(run_dir))
    assert code == 0
    assert re.search("^feedback +waiting", out, re.M)
    assert re.search(rf"^feedback: how far it is cannot be told: {folder}/settings\.yaml: cannot be", out, re.M)
    assert re.search("^ppo +done", out, re.M)
    assert "cannot be told" in judge_run(read_run(run_dir))["feedback"].sentence


def test_a_name_that_is_no_text_does_not_keep_a_page_from_being_written(tmp_path: Path) -> None:
    """As Python has that of a folder whose bytes are no UTF-8."""
    write(tmp_path / "page.html", "run\udcff")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == "run\ufffd"


def test_a_page_that_has_no_place_is_refused_before_it_is_drawn(
    run_dir: Path, rlhf: Rlhf, monkeypatch: pytest.MonkeyPatch
) -> None:
    def draws(*_: object) -> None:
        raise AssertionError("drawn")

    for name in ("page.draw", "compare.read_run"):
        monkeypatch.setattr(f"rlhf.pipeline.report.{name}", draws)
    other = make_run(run_dir.parent / "other", ["sft"])
    cases = [
        ("/", "is a folder, and a page is a file; name one in it"),
        (str(run_dir), "is a folder, and a page is a file; name one in it"),
        ("/dev/null", "is a device or a pipe, and a page is a file; name a file"),
        (str(run_dir / "none" / "x.html"), "cannot be written: No such file or directory; name a file in a folder"),
        (str(run_dir / "recipe.yaml" / "x.html"), "cannot be written: Not a directory; name a file in a folder"),
        (str(run_dir / "summary.json"), "is there already, and is no page; name another file"),
        (f"{run_dir}/{'x' * 300}", "cannot be written: File name too long; name a file in a folder"),
    ]
    for out, said in cases:
        code, _, err = rlhf("report", str(run_dir), str(other), "--out", out)
        assert (code, err.startswith(f"error: --out {out}: {said}")) == (2, True), err
    (run_dir / "report.html").mkdir()
    code, _, err = rlhf("report", str(run_dir))
    assert (code, err) == (2, f"error: {run_dir}/report.html: is a folder, and a page is a file; move it\n")


def test_an_unreadable_summary_is_refused_by_status(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", denied)
    with pytest.raises(SettingsError, match=r"summary\.json: cannot be read \(Permission denied\); change its mode"):
        read_summary(run_dir)
