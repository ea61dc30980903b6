"""Which documents are trained on, which are held out, and what is said of the others."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rlhf.data import documents as module
from rlhf.data.documents import Documents, Found, summary
from rlhf.data.errors import DataError
from rlhf.data.sources import TextSource
from rlhf.data.split import place, split_by_prompt, train_and_eval


@dataclass
class Wanted:
    data: list[TextSource]
    eval_data: list[TextSource] | None = None
    eval_share: float = 0.2
    max_dropped: float = 0.0
    deduplicate: Any = None
    min_document_length: int = 1
    max_document_length: int | None = None


@dataclass
class World:
    folder: Path
    number: int = field(default=0)

    def write(self, *texts: str) -> TextSource:
        self.number += 1
        path = self.folder / f"{self.number}.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return TextSource(path=str(path))


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def sides(wanted: Wanted) -> tuple[list[str], list[str]]:
    documents = Documents(wanted, "pretrain")
    found = list(documents)
    train = [text for _, is_held_out, text in found if not is_held_out]
    assert list(documents.training()) == train
    return train, [text for _, is_held_out, text in found if is_held_out]


def names(found: list[Found]) -> dict[str, int]:
    return {part.name: part.documents for part in found}


@pytest.mark.parametrize("share", [0.001, 0.3, 0.999])
def test_documents_are_split_as_rows_of_other_stages_are(world: World, share: float) -> None:
    texts = [f"document {number % 30}" for number in range(40)]
    assert sides(Wanted([world.write(*texts)], eval_share=share)) == split_by_prompt(texts, str, share)


def test_documents_given_for_evaluation_are_all_held_out_and_left_out_of_training(world: World) -> None:
    data, given = ["a", "b", "a", "c"], ["a", "z", "z"]
    wanted = Wanted([world.write(*data)], [world.write(*given)])
    train, held_out, _ = train_and_eval(data, given, str, 0.2)
    assert sides(wanted) == (train, held_out) == (["b", "c"], given)
    assert Documents(wanted, "pretrain").survey()[0].left_out == {"in eval_data": 2}


def test_a_single_document_is_cut_near_its_end(world: World) -> None:
    assert sides(Wanted([world.write("0123456789")])) == (["01234567"], ["89"])


def test_of_two_sources_of_one_document_neither_is_held_out_whole(world: World) -> None:
    wanted = Wanted([world.write("0123456789"), world.write("abcdefghij")])
    assert sides(wanted) == (["01234567", "abcdefgh"], ["89", "ij"])
    assert [number for number, *_ in Documents(wanted, "pretrain")] == [0, 0, 1, 1]


def test_a_document_that_two_sources_hold_is_on_one_side(world: World) -> None:
    texts = [f"document {number}" for number in range(20)]
    train, held_out = sides(Wanted([world.write(*texts), world.write(*texts[:3])], eval_share=0.3))
    assert not set(train) & set(held_out)
    assert len(train) + len(held_out) == 23


def test_repeats_are_dropped_across_sources_the_first_one_stays(world: World) -> None:
    wanted = Wanted([world.write("aa", "bb", "aa"), world.write("cc", "bb")], deduplicate="exact")
    documents = Documents(wanted, "pretrain")
    assert names(documents.survey()) == {"data[0]": 2, "data[1]": 1}
    assert [part.left_out for part in documents.found] == [{"came before": 1}, {"came before": 1}]
    assert sorted(text for *_, text in documents if text in ("aa", "bb")) == ["aa", "bb"]


def test_near_repeats_are_dropped_too(world: World) -> None:
    words = " ".join(f"w{number}" for number in range(100))
    wanted = Wanted([world.write(words, words + " more", "else")], deduplicate="minhash")
    assert Documents(wanted, "pretrain").survey()[0].left_out == {"much like one that came before": 1}


def test_lengths_are_limits_in_characters_that_still_count_as_inside(world: World) -> None:
    wanted = Wanted([world.write("1", "22", "333", "4444")], min_document_length=2, max_document_length=3)
    train, held_out = sides(wanted)
    assert sorted(train + held_out) == ["22", "333"]
    found = Documents(wanted, "pretrain").survey()[0]
    assert found.left_out == {"shorter than 2 characters": 1, "longer than 3 characters": 1}
    assert summary(found.documents, found.left_out) == (
        "kept 2 of 4 documents; 1 × shorter than 2 characters; 1 × longer than 3 characters"
    )


def test_filters_leave_documents_given_for_evaluation_alone(world: World) -> None:
    wanted = Wanted([world.write("long enough")], [world.write("x", "x")], deduplicate="exact", min_document_length=5)
    assert sides(wanted) == (["long enough"], ["x", "x"])


def test_files_of_a_folder_are_counted_one_by_one_in_their_order(tmp_path: Path) -> None:
    for name, text in (("b.txt", "four"), ("a/z.txt", "sixsix"), ("c.txt", "")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    [found] = Documents(Wanted([TextSource(path=str(tmp_path))]), "pretrain").survey()
    assert (found.documents, found.characters) == (2, 10)
    assert found.report.files == [tmp_path / "a" / "z.txt", tmp_path / "b.txt", tmp_path / "c.txt"]
    counts = {tmp_path / "a" / "z.txt": [1, 6], tmp_path / "b.txt": [1, 4], tmp_path / "c.txt": [0, 0]}
    assert found.files == {str(path): count for path, count in counts.items()}


def test_a_broken_byte_in_a_folder_is_named_by_file_and_place(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("fine")
    (tmp_path / "b.txt").write_bytes(b"not\xff")
    with pytest.raises(DataError, match=r"b\.txt: byte 3 is not UTF-8"):
        list(Documents(Wanted([TextSource(path=str(tmp_path))]), "pretrain"))
    (tmp_path / "b.txt").unlink()
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "x"}\n{"text": "\xff"}\n')
    with pytest.raises(DataError, match=r"b\.jsonl row 2: not UTF-8, byte 11 of the line"):
        list(Documents(Wanted([TextSource(path=str(tmp_path))]), "pretrain"))


def test_equal_documents_alone_are_each_cut_as_a_single_one_is(world: World) -> None:
    equal = ["0123456789"] * 2
    assert sides(Wanted([world.write(*equal)])) == (["01234567"] * 2, ["89"] * 2)
    assert sides(Wanted([world.write(*equal)], deduplicate="exact")) == (["01234567"], ["89"])
    assert sides(Wanted([world.write(*equal), world.write(*equal)])) == (["01234567"] * 4, ["89"] * 4)
    assert sides(Wanted([world.write("x", "x")])) == (["x"] * 2, [""] * 2)  # there is something to train on


def test_equal_documents_beside_another_are_on_one_side_of_the_split(world: World) -> None:
    texts = ["0123456789", "0123456789", "abcdefghij"]
    train, held_out = sides(Wanted([world.write(*texts)]))
    assert sorted(train + held_out) == texts
    assert not set(train) & set(held_out)


def test_filters_that_leave_nothing_are_named(world: World) -> None:
    wanted = Wanted([world.write("a", "bb")], min_document_length=9)
    with pytest.raises(
        DataError, match=r"pretrain\.data: no document is left.*\. data: kept 0 of 2 documents; 2 × shorter than 9 ch"
    ):
        Documents(wanted, "pretrain").survey()


def test_unusable_rows_are_refused_as_everywhere(world: World) -> None:
    source = world.write("a", "b")
    Path(source.path).write_text('{"text": "a"}\n{"text": 3}\n{"text": "b"}\n')
    with pytest.raises(DataError, match=r"row 2: .*kept 2 of 3 rows"):
        Documents(Wanted([source]), "pretrain").survey()
    assert len(sides(Wanted([source], max_dropped=0.4))[0]) == 1


def test_many_short_documents_are_split_and_lose_their_repeats(tmp_path: Path) -> None:
    path = Path(__file__).parents[2].parent / "shared/data/text/names.txt"
    if not path.is_file():
        pytest.skip("names.txt is not here")
    names = path.read_text().split()
    (tmp_path / "names.jsonl").write_text("".join(json.dumps(name) + "\n" for name in names))
    wanted = Wanted([TextSource(path=str(tmp_path / "names.jsonl"))], deduplicate="exact", eval_share=0.1)
    train, held_out = sides(wanted)
    assert sorted(train + held_out) == sorted(set(names))
    assert 0.09 < len(held_out) / len(set(names)) < 0.11


def test_text_that_changes_between_two_readings_is_refused(world: World) -> None:
    source = world.write("a", "b", "c")
    documents = Documents(Wanted([source]), "pretrain")
    documents.survey()
    for texts in (["a", "b"], ["a", "b", "c", "d"]):
        Path(source.path).write_text("".join(json.dumps(text) + "\n" for text in texts))
        with pytest.raises(DataError, match=r"1\.jsonl: it holds another number of documents than when it was read"):
            list(documents)


def test_a_survey_that_another_process_saved_is_read_by(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PART", 4)
    wanted = Wanted([world.write("aa", "bbb", "aa", "c"), world.write("0123456789")], deduplicate="exact")
    ours, theirs = Documents(wanted, "pretrain"), Documents(wanted, "pretrain")
    ours.survey()
    ours.save(world.folder)
    theirs.load(world.folder)
    assert list(theirs) == list(ours)
    assert [found.ranges for found in theirs.found] == [[(0, 2), (2, 3)], [(0, 1)]]
    assert theirs.found[0].left_out == {"came before": 1}
    assert [text for _, text in theirs.of(1)] == ["01234567", "89"]


def test_where_held_out_places_end_is_decided_by_sources_of_several_documents_alone(world: World) -> None:
    low, high = sorted(["one text", "another text"], key=place)
    wanted = Wanted([world.write(low, low), world.write(high)], eval_share=place(low) / 2)
    train, held_out = sides(wanted)
    assert train[:2] == [low, low]  # equal to each other, so nothing of them is held out
    assert train[2] + held_out[0] == high
