"""What a simulated power cut takes, and what it must leave."""

from __future__ import annotations

import os
from random import Random

from tools.faults.power import Book, cut


def test_a_cut_takes_what_was_not_synced_and_leaves_what_was(tmp_path):
    outcomes = set()
    for seed in range(60):
        root = tmp_path / str(seed)
        place, folder = root / "place", root / "place" / "stages"
        folder.mkdir(parents=True)
        (root / "book").mkdir()
        book = Book(place, book=root / "book")
        for name in ("safe", "grown", "loose"):
            (folder / name).write_bytes(b"12345678")
        for name in ("safe", "grown"):
            book.seen("fsync", str(folder / name))
        (folder / "old").write_bytes(b"old")
        for path in (folder / "old", folder, place):
            book.seen("fsync", str(path))
        with (folder / "grown").open("ab") as file:
            file.write(b"tail")
        (folder / "new").write_bytes(b"new")
        book.seen("fsync", str(folder / "new"))
        book.seen("os.rename", str(folder / "new"), str(folder / "old"))
        os.replace(folder / "new", folder / "old")
        book.seen("os.remove", str(folder / "safe"))
        (folder / "safe").unlink()
        (folder / "late").mkdir()
        lost = cut(place, root / "book", Random(seed))
        here = {
            path.name: path.read_bytes() if path.is_file() else b"" for path in folder.iterdir()
        }
        assert here["old"] in (b"old", b"new"), "a rename is done or not"
        assert here.get("safe", b"12345678") == b"12345678", "a removed file is back whole"
        assert here["grown"][:8] == b"12345678", "synced bytes stay"
        assert lost == ["grown", "loose", "old"], "no stages: none has what completes it"
        outcomes.add((here["old"], "safe" in here, "late" in here, here["grown"], here["loose"]))
    assert {outcome[0] for outcome in outcomes} == {b"old", b"new"}
    assert all({outcome[place] for outcome in outcomes} == {True, False} for place in (1, 2))
    assert {b"12345678tail", b"12345678", b"12345678\0\0\0\0"} <= {o[3] for o in outcomes}
    assert {b"", b"\0" * 8} <= {o[4] for o in outcomes}
