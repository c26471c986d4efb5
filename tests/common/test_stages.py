"""Stage folders: complete or absent, whatever races or dies; and logs that outlive a kill."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from stable_forgetting.common.base import files
from stable_forgetting.common.base.errors import ConfigError, Damaged
from stable_forgetting.common.base.files import write_json
from stable_forgetting.common.store.stages import DONE, KEY_LENGTH, StageStore, check_writable
from stable_forgetting.common.train.tracking import Tracker, read_scalars

KEY = "0123456789abcdef" * 4


@pytest.fixture
def store(tmp_path):
    return StageStore(tmp_path / "store")


def leftovers(store):
    return sorted(path.name for path in (store.root / "stages").glob(".*"))


def dead_process() -> int:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid


# Writing -----------------------------------------------------------------------------------------


def test_a_complete_stage(store):
    about = {"seed": 3}
    assert store.done("score", KEY) is None
    with store.writing("score", KEY, about) as folder:
        (folder / "x.txt").write_text("content")
        assert store.done("score", KEY) is None, "not complete while being written"
        about["late"] = True
    digest = hashlib.sha256(b"content").hexdigest()
    about = {"key": KEY, "kind": "score", "seed": 3, "late": True, "files": {"x.txt": digest}}
    assert store.done("score", KEY) == about
    final = store.folder("score", KEY)
    assert final.name == f"score-{KEY[:KEY_LENGTH]}"
    assert sorted(path.name for path in final.iterdir()) == [DONE, "x.txt"]
    assert leftovers(store) == []


def test_done_is_written_last(store, monkeypatch):
    """At the moment of done.json everything else is in place, under a name nobody looks up."""
    seen = []

    def watch(path, value):
        seen.append((path.parent.name[0], sorted(p.name for p in path.parent.iterdir())))
        write_json(path, value)

    monkeypatch.setattr("stable_forgetting.common.store.stages.write_json", watch)
    with store.writing("a", KEY, {}) as folder:
        (folder / "weights").write_text("w")
    assert seen == [(".", ["weights"])]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_an_error_leaves_nothing_but_the_scratch(store, error):
    scratch = store.scratch("a", KEY)
    scratch.mkdir(parents=True)
    with pytest.raises(error), store.writing("a", KEY, {}) as folder:
        (folder / "half").write_text("x")
        raise error
    assert store.done("a", KEY) is None and leftovers(store) == []
    assert scratch.is_dir(), "checkpoints must outlive a failure"
    with pytest.raises(ValueError, match="JSON"), store.writing("a", KEY, {"x": float("nan")}):
        pass
    assert store.done("a", KEY) is None and leftovers(store) == [], "facts that JSON cannot hold"


def test_completion_removes_the_scratch(store):
    scratch = store.scratch("a", KEY)
    scratch.mkdir(parents=True)
    (scratch / "checkpoint").write_text("x")
    other = store.scratch("b", KEY)
    other.mkdir(parents=True)
    with store.writing("a", KEY, {}):
        pass
    assert not scratch.exists() and other.is_dir()


def test_folders_have_the_usual_permissions(store):
    """A store may be shared by people: no folder for its owner's eyes only."""
    with store.writing("a", KEY, {}):
        pass
    plain = store.root / "plain"
    plain.mkdir()
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (store.folder("a", KEY), plain)]
    assert modes[0] == modes[1]


def test_kinds_and_keys_do_not_meet(store):
    for kind, key in (("a", KEY), ("b", KEY), ("a", "f" * 64)):
        with store.writing(kind, key, {"me": kind + key}):
            pass
    assert store.done("a", KEY)["me"] == "a" + KEY
    assert len(list((store.root / "stages").iterdir())) == 3


# Races and kills ---------------------------------------------------------------------------------


def test_two_writers_end_with_one_folder(store):
    first = store.writing("a", KEY, {"who": "first"})
    second = store.writing("a", KEY, {"who": "second"})
    folder_1, folder_2 = first.__enter__(), second.__enter__()
    assert folder_1 != folder_2
    (folder_1 / "one").write_text("1")
    (folder_2 / "two").write_text("2")
    second.__exit__(None, None, None)
    first.__exit__(None, None, None)
    final = store.folder("a", KEY)
    assert store.done("a", KEY)["who"] == "second", "the first to finish wins, whole"
    assert sorted(path.name for path in final.iterdir()) == [DONE, "two"]
    assert leftovers(store) == []
    with pytest.raises(Damaged, match="another stage"):  # a key that only looks the same
        store.done("a", KEY[:KEY_LENGTH] + "f" * 44)


WRITER = """
import sys, time
from pathlib import Path
from stable_forgetting.common.store.stages import StageStore
store = StageStore(Path(sys.argv[1]))
with store.lease("a", sys.argv[2]), store.writing("a", sys.argv[2], {}) as folder:
    (folder / "half").write_text("x")
    print("writing", flush=True)
    time.sleep(60)
"""


def test_sweep_spares_what_is_worked_on_and_strangers(store):
    stages, unfinished = store.root / "stages", store.root / "unfinished"
    with store.writing("done", KEY, {}):
        pass
    name = KEY[:KEY_LENGTH]
    stays = {
        stages / f".a-{name}.0011aabb": False,
        stages / f".b-{name}.0011aabb": True,
        stages / ".notes": True,
        unfinished / f"done-{name}": False,
        unfinished / f"half-{name}": True,
    }
    for folder in stays:
        folder.mkdir(parents=True)
    with store.lease("b", KEY) as free, store.writing("a", KEY, {}) as folder:
        assert free
        other = subprocess.run([sys.executable, "-c", SWEEP, str(store.root)], check=True)
        assert other.returncode == 0
        assert not folder.exists(), "whoever writes without a lease has no claim"
        folder.mkdir()
    assert {folder: folder.is_dir() for folder in stays} == stays
    StageStore(store.root / "nowhere").sweep()


SWEEP = """
import sys
from pathlib import Path
from stable_forgetting.common.store.stages import StageStore
StageStore(Path(sys.argv[1])).sweep()
"""


def test_a_lease_is_held_by_one_and_ends_with_its_process(store):
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(store.root), KEY], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline().strip() == "writing"
        with store.lease("a", KEY) as free:
            assert not free
        with store.lease("b", KEY) as free:
            assert free
        (store.root / "leases" / f"c-{KEY[:20]}").touch()  # of a process that was killed
        store.sweep()
        assert len(leftovers(store)) == 1, "a living process keeps its folder"
        assert len(list((store.root / "leases").iterdir())) == 1, "and its lease, alone"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    with store.lease("a", KEY, wait=True) as free:
        assert free
        assert len(list((store.root / "leases").iterdir())) == 1
    assert not list((store.root / "leases").iterdir()), "no file stays behind"
    store.sweep()
    assert leftovers(store) == []


def test_who_gives_a_lease_back_leaves_the_next_holders_file(tmp_path, monkeypatch):
    """Which a lock of filelock before 3.30 removes, so that a third holder finds no lock."""
    lease = tmp_path / "lease"

    def taken_at_once(path):
        monkeypatch.undo()
        path.unlink()
        path.write_text("the next holder's")

    with files.held(lease) as free:
        assert free
        monkeypatch.setattr(Path, "unlink", taken_at_once)
    assert lease.read_text() == "the next holder's"


# Damage ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"{}", b"\xff\xfe\x00", b'"key"'])
def test_a_damaged_done_is_one_clear_line(store, content):
    with store.writing("a", KEY, {}):
        pass
    (store.folder("a", KEY) / DONE).write_bytes(content)
    with pytest.raises(Damaged, match="made again by a run") as error:
        store.done("a", KEY)
    assert "\n" not in str(error.value) and str(store.folder("a", KEY)) in str(error.value)
    assert error.value.set_aside and store.done("a", KEY) is None
    assert [path.name for path in (store.root / "damaged").glob("*/*")] == [DONE]


def written(store, kind="a", key=KEY, content="content"):
    with store.writing(kind, key, {"seed": 3}) as folder:
        (folder / "deep").mkdir()
        (folder / "deep" / "x.txt").write_text(content)
    return store.folder(kind, key)


def test_every_flipped_byte_is_found(store):
    for position in range(7):
        path = written(store) / "deep" / "x.txt"
        assert store.checked("a", KEY, "deep/x.txt") == store.folder("a", KEY)
        content = bytearray(path.read_bytes())
        content[position] ^= 1
        path.write_bytes(content)
        with pytest.raises(Damaged, match="not what was written"):
            store.checked("a", KEY)
        assert store.done("a", KEY) is None, "so that a run makes it again"
    assert store.checked("a", KEY, "no such file") if written(store) else None
    (store.folder("a", KEY) / "deep" / "x.txt").unlink()
    with pytest.raises(Damaged, match="cannot be read"):
        store.checked("a", KEY)


def test_damage_that_another_process_has_set_aside_is_no_error_to_mend(store, monkeypatch):
    folder, rename = written(store), os.rename
    (folder / "deep" / "x.txt").write_text("damaged")

    def late(source, target):
        rename(source, f"{target}-of-another")
        rename(source, target)

    monkeypatch.setattr(os, "rename", late)
    with pytest.raises(Damaged, match=r"is now in .*damaged and is made again") as caught:
        store.checked("a", KEY)
    assert caught.value.set_aside and not folder.exists()


def test_a_changed_fact_and_a_swapped_file_are_found(store):
    done = written(store) / DONE
    done.write_text(done.read_text().replace('"seed": 3', '"seed": 4'))
    with pytest.raises(Damaged, match="not what was written"):
        store.done("a", KEY)
    first, second = written(store), written(store, key="f" * 64, content="another")
    shutil.copy(second / "deep" / "x.txt", first / "deep" / "x.txt")
    with pytest.raises(Damaged):
        store.checked("a", KEY)
    write_json(written(store, "old") / DONE, {"key": KEY, "kind": "old"})
    assert store.checked("old", KEY), "an older stage is taken as it is"
    assert "unchecked" in [text for _, text in store.verify()]


def test_verify_reads_everything_once(store):
    written(store)
    path = written(store, kind="b") / "deep" / "x.txt"
    assert [text for _, text in store.verify()] == ["", ""]
    path.write_text("other")
    os.utime(path, (1, 1))
    assert [bool(text) for _, text in store.verify()] == [False, True]
    assert [text for _, text in store.verify()] == [""]


def test_whatever_is_renamed_was_synced_before(store, monkeypatch):
    events = []
    fsync, rename, replace = os.fsync, os.rename, os.replace
    monkeypatch.setattr(files.os, "fsync", lambda n: (events.append("fsync"), fsync(n))[1])
    monkeypatch.setattr(files.os, "rename", lambda *a: (events.append("rename"), rename(*a))[1])
    monkeypatch.setattr(files.os, "replace", lambda *a: (events.append("rename"), replace(*a))[1])
    written(store)
    # new folders, done.json; then x.txt, done.json, both folders, the rename, the folder of stages
    assert events == ["fsync"] * 3 + ["rename"] + ["fsync"] * 5 + ["rename", "fsync"]


def test_a_file_system_that_syncs_no_folder_is_written(store, monkeypatch):
    sync = os.fsync

    def refuse(handle):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        sync(handle)

    monkeypatch.setattr(os, "fsync", refuse)
    written(store)
    assert all(not problem for _, problem in store.verify())
    monkeypatch.setattr(os, "fsync", lambda handle: os.fstat(-1))
    with pytest.raises(OSError, match="Bad file descriptor"):
        written(store)


# JSON --------------------------------------------------------------------------------------------


def test_json_is_strict_and_replaced_whole(tmp_path):
    path = tmp_path / "deep" / "x.json"
    write_json(path, {"a": 1.5, "b": None})
    write_json(path, {"a": "é"})
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": "é"}
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"a": float("inf")})
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": "é"}
    assert [entry.name for entry in path.parent.iterdir()] == ["x.json"]


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_what_lies_in_a_stages_place_is_set_aside(store, kind):
    place = store.folder("a", KEY)
    place.parent.mkdir(parents=True)
    if kind == "folder":
        place.mkdir()
        (place / "half").write_text("x")
    else:
        place.write_text("x")
    with store.writing("a", KEY, {}) as folder:
        (folder / "whole").write_text("w")
    assert store.done("a", KEY) is not None and (place / "whole").is_file()
    assert len(list((store.root / "damaged").iterdir())) == 1 and leftovers(store) == []


def test_a_place_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    for path, words in (
        (tmp_path / "missing" / "..", "is not there; name the folder itself"),
        (tmp_path / "file" / "new", "is not a folder that can be written"),
    ):
        with pytest.raises(ConfigError, match=words) as caught:
            check_writable(path, "--out")
        assert str(caught.value).startswith(f"--out {path}: ")
    check_writable(tmp_path / "missing" / "new", "--out")
    assert not (tmp_path / "missing").exists()


# Logs --------------------------------------------------------------------------------------------


def test_a_resumed_log_goes_on_after_a_torn_line(tmp_path):
    log = tmp_path / "deep" / "scalars.jsonl"
    with closing(Tracker(log)) as tracker:
        tracker.scalars(1, {"loss": 1.0})
        tracker.scalars(2, {"loss": 0.5, "bad": float("nan")})
    with log.open("a") as file:
        file.write('{"step": 3, "lo')
    with closing(Tracker(log)) as tracker:
        tracker.scalars(2, {"loss": 0.25})
        tracker.scalars(3, {"loss": 0.1})
    rows = read_scalars(log)
    assert rows == [
        {"step": 1, "loss": 1.0},
        {"step": 2, "loss": 0.25, "bad": None},
        {"step": 3, "loss": 0.1},
    ]
    assert read_scalars(tmp_path / "none") == []
    before = log.read_bytes()
    with closing(Tracker(log)) as tracker:
        tracker.scalars(4, {"bad": float("inf")})
    assert log.read_bytes() == before + b'{"step": 4, "bad": null}\n', "a clean log is only longer"
