"""Stage keys of four suites, one with a grid: what must not move when code only changes place.

A stage's key hashes everything that its numbers depend on, so an equal key says that stored work
stays valid.  After a deliberate change of what is hashed, ``python -m tests.test_pinned_keys``
writes the keys anew.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from stable_forgetting.benchmarks.pipeline.planner import make_plan
from stable_forgetting.benchmarks.suite.resolve import load_suite
from stable_forgetting.common.store.stages import StageStore

PINNED = Path(__file__).parent / "golden" / "stage_keys.json"
NAMES = ("digits-class", "lethevit-cifar10-small", "tofu-small", "digits-class-sweep")


def keys(name: str, store: Path) -> dict[str, str]:
    """``kind name`` -> first 16 digits of the key."""
    return {
        f"{s.kind} {s.name}": s.key[:16]
        for s in make_plan(load_suite(name), StageStore(store)).stages()
    }


@pytest.mark.parametrize("name", NAMES)
def test_stage_keys_are_as_pinned(name, tmp_path):
    pinned = json.loads(PINNED.read_text(encoding="utf-8"))[name]
    assert keys(name, tmp_path) == pinned


def test_a_key_moves_with_what_its_numbers_depend_on(tmp_path):
    pinned = json.loads(PINNED.read_text(encoding="utf-8"))["digits-class"]
    plan = make_plan(load_suite("digits-class", ["budget.amount=7"]), StageStore(tmp_path))
    moved = {f"{s.kind} {s.name}" for s in plan.stages() if s.key[:16] not in pinned.values()}
    assert any(name.startswith("unlearn gd_sine") for name in moved)
    assert not any(name.startswith(("split", "original", "retrain")) for name in moved)


def test_a_renamed_benchmark_keeps_its_keys_and_its_earlier_name(tmp_path):
    for name, earlier in (("tofu-small", "language"), ("digits-class", "vision")):
        path = tmp_path / f"{earlier}.yaml"
        path.write_text(f"extends: {name}\nsuite: mine\nbenchmark: {earlier}\n", encoding="utf-8")
        now, old = load_suite(name), load_suite(str(path))
        assert now.spec.benchmark == old.spec.benchmark != earlier
        stages = [
            {s.key for s in make_plan(suite, StageStore(tmp_path)).stages()} for suite in (now, old)
        ]
        assert stages[0] == stages[1]
        (stage, *_) = make_plan(now, StageStore(tmp_path)).stages()
        assert stage.spec.benchmark == earlier, "records and keys keep the earlier name"


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        every = {name: keys(name, Path(folder)) for name in NAMES}
    PINNED.write_text(json.dumps(every, indent=1, sort_keys=True) + "\n", encoding="utf-8")
