"""Several processes in one feedback store, one of which is killed."""

import sqlite3
import subprocess
import sys
from pathlib import Path

from feedback_world import asked

from rlhf.data.feedback.store import Store

# Ranks and says so until nothing is left; or is killed after so many, with one more stored but not ended.
WORK = """
import os, signal, sys, uuid
from rlhf.data.feedback.store import Store

def rank():
    ranks = {answer.id: place for place, answer in enumerate(task.answers, 1)}
    return store.rank(str(uuid.uuid4()), task.prompt_id, rater, ranks)

with Store.open(sys.argv[1]) as store:
    rater, left = store.add_rater(sys.argv[2]), int(sys.argv[3])
    while (task := store.next_prompt(rater)) is not None:
        if left == 0:
            with store.batch():
                rank()
                os.kill(os.getpid(), signal.SIGKILL)
        print(rank(), flush=True)
        left -= 1
"""


def test_nothing_that_was_acknowledged_is_lost_by_a_kill_and_nothing_is_there_twice(tmp_path: Path) -> None:
    path = tmp_path / "f.sqlite"
    with Store.create(path) as store, store.batch():
        for number in range(40):
            asked(store, str(number), "a", "b", overlap=True)
    words = [sys.executable, "-c", WORK, str(path)]
    killed, other = (
        subprocess.Popen([*words, name, kill], stdout=subprocess.PIPE, text=True)
        for name, kill in (("anna", "20"), ("bob", "-1"))
    )
    told = [process.communicate()[0].split() for process in (killed, other)]
    assert (killed.returncode, other.returncode) == (-9, 0)
    assert [len(own) for own in told] == [20, 40]
    with Store.open(path) as store:
        assert sorted((own.rater.name, own.num_rated) for own in store.progress().raters) == [("anna", 20), ("bob", 40)]
        assert sum(len(one.votes) for one in store.rankings()) == 60
    with sqlite3.connect(path) as db:
        assert {row[0] for row in db.execute("SELECT id FROM acts")} == set(map(int, told[0] + told[1]))
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    db.close()
