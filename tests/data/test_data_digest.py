"""The digest of a source: what is read, and never where it lies."""

import json
from pathlib import Path

from rlhf.data.sources import Source, TextSource, digest


def test_the_digest_of_a_saved_data_set_sees_its_rows_and_no_other_split(saved: Path) -> None:
    import datasets

    train, test = (digest(Source(path=str(saved), split=split)) for split in ("train", "test"))
    assert train != test
    (saved / "test" / "data-00000-of-00001.arrow").unlink()
    assert digest(Source(path=str(saved))) == train
    other = datasets.Dataset.from_list([{"text": "train 1"}, {"text": "train 3"}])
    other.save_to_disk(saved.parent / "other")
    assert digest(Source(path=str(saved.parent / "other"))) != train


def test_the_digest_sees_contents_and_not_places(tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_text(json.dumps({"text": "one"}))
    second.write_text(json.dumps({"text": "one"}))
    before = digest(Source(path=str(first)))
    assert before == digest(Source(path=str(second)))
    assert before != digest(Source(path=str(first), column="other"))
    assert before != digest(Source(path=str(first), map={"text": "other"}))
    first.write_text(json.dumps({"text": "two"}))  # the same size
    assert before != digest(Source(path=str(first)))


def test_the_digest_does_not_depend_on_the_order_of_the_map(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("{}")
    one, two = ({"prompt": "q", "response": "a"}, {"response": "a", "prompt": "q"})
    assert digest(Source(path=str(file), map=one)) == digest(Source(path=str(file), map=two))


def test_the_digest_of_a_folder_sees_names_and_contents(tmp_path: Path) -> None:
    source = Source(path=str(tmp_path))
    (tmp_path / "a.txt").write_text("one")
    before = digest(source)
    (tmp_path / "a.txt").rename(tmp_path / "b.txt")
    renamed = digest(source)
    (tmp_path / "c.txt").write_text("two")
    assert len({before, renamed, digest(source)}) == 3


def test_the_digest_of_a_function_is_that_of_its_rows(module: str) -> None:
    def of(**options: int) -> str:
        return digest(Source(path=f"{module}:rows", options=options))

    assert of(count=2) == of(count=2, start=0) != of(count=2, start=1)


def test_the_digest_of_a_hub_set_is_its_revision_and_never_downloads() -> None:
    one = digest(Source(path="owner/set", revision="a"))
    assert one == digest(Source(path="owner/set", revision="a")) != digest(Source(path="owner/set", revision="b"))


def test_a_weight_is_part_of_the_digest_and_no_weight_leaves_it_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    path = str(tmp_path / "a.txt")
    digests = {digest(TextSource(path=path, weight=weight)) for weight in (None, 1, 2)}
    assert len(digests) == 3
    assert digest(Source(path=path)) == digest(TextSource(path=path)) in digests
