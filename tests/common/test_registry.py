"""Registries: lazy, collision-proof, and clear about what went wrong in whose code."""

from __future__ import annotations

import hashlib
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from stable_forgetting.common.base import registry as module
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.base.registry import METHODS, Registry, load_plugins
from stable_forgetting.common.methods.base import UnlearningMethod
from tests.common.made import complaint

BASE = "stable_forgetting.common.methods.base:UnlearningMethod"
PLUGIN = '''
from stable_forgetting.common.methods.base import MethodInfo, UnlearningMethod
from stable_forgetting.common.base.registry import METHODS

@METHODS.register("{name}")
class Mine(UnlearningMethod):
    """Does nothing, politely."""
    info = MethodInfo(1, "-", frozenset())
    def unlearn(self, task):
        return task.model
'''


@pytest.fixture
def fresh():
    return Registry("method", BASE)


@pytest.fixture(autouse=True)
def untouched(monkeypatch):
    """Plugins and registries of these tests leave nothing behind."""
    monkeypatch.setattr(module, "TABLES", list(module.TABLES))
    monkeypatch.setattr(METHODS, "_entries", dict(METHODS._entries))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("stable_forgetting_plugin"):
            del sys.modules[name]


def test_listing_and_configuring_do_not_import_torch():
    """Whatever a method's module imports at its top; the activations and presets, too."""
    code = (
        "import importlib, sys\n"
        "from stable_forgetting.common import AUDITS, METHODS, PHIS, PRESETS, GradientMethod\n"
        "from stable_forgetting.common.methods.base import resolve_config\n"
        "for entry in METHODS:\n"
        "    importlib.import_module(entry.target.partition(':')[0])\n"
        "METHODS['retrain']\n"
        "resolve_config('gd_sine', None, {'adapter': {'rank': 2}}, origin='x')\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_every_shipped_method_resolves():
    names = [
        entry.name for entry in METHODS if str(entry.target).startswith("stable_forgetting.common.")
    ]
    assert len(names) >= 20
    for name in names:
        cls = METHODS[name]
        assert issubclass(cls, UnlearningMethod) and cls.info.version >= 1
        assert METHODS.entry(name).summary
        cls(cls.Config())


def test_looking_up_imports_only_then(fresh):
    fresh.register("lazy", "no.such.module:Thing", summary="never imported")
    assert fresh.names() == ["lazy"] and "lazy" in fresh
    assert fresh.entry("lazy").summary == "never imported"
    message = complaint(fresh.__getitem__, "lazy")
    assert "no.such.module:Thing" in message and "test_registry.py" in message


@pytest.mark.parametrize(
    ("target", "clue"),
    [
        ("stable_forgetting.common.methods.base:UnlearnMethod", "UnlearnMethod"),
        ("stable_forgetting.common.methods.base:resolve_config", "is not a UnlearningMethod"),
        (SimpleNamespace, "is not a UnlearningMethod"),
    ],
)
def test_what_is_no_method_is_named(fresh, target, clue):
    fresh.register("typo", target) if isinstance(target, str) else fresh.register("typo")(target)
    message = complaint(fresh.__getitem__, "typo")
    assert clue in message and "'typo'" in message and "test_registry.py" in message


def test_unknown_names_get_a_hint(fresh):
    fresh.register("gd_sine", BASE)
    hint = "unknown method 'gd_sin'; did you mean 'gd_sine'?"
    assert hint in complaint(fresh.__getitem__, "gd_sin")
    assert "known: gd_sine" in complaint(fresh.entry, "xyz")


def test_collisions_name_both_origins(fresh):
    fresh.register("a", "one:A")
    message = complaint(fresh.register, "a", "two:B")
    assert message.count("test_registry.py:") + message.count("registry") >= 2
    first, second = fresh.entry("a").origin, message.rpartition(" and ")[2]
    assert first in message and first != second
    assert fresh.entry("a").target == "one:A", "the first one stays"
    with pytest.raises(ConfigError, match="registered twice"):
        for target in ("one:B", "two:B"):  # from one line
            fresh.register("b", target)


def test_registering_the_same_again_is_harmless(fresh):
    for _ in range(2):
        fresh.register("a", "one:A", summary="same line, same thing")
    assert fresh.names() == ["a"]


def test_decorated_classes_keep_their_first_doc_line(fresh):
    @fresh.register("documented")
    class One(UnlearningMethod):
        """First line.

        Second.
        """

    @fresh.register("bare", summary="given")
    class Two(UnlearningMethod):
        pass

    @fresh.register("mute")
    class Three(UnlearningMethod):
        pass

    assert [entry.summary for entry in fresh] == ["First line.", "given", ""]
    assert fresh["documented"] is One and fresh["bare"] is Two and fresh["mute"] is Three


# Plugins -----------------------------------------------------------------------------------------


def test_plugin_files_register_and_load_once_even_under_one_file_name(tmp_path):
    paths = [str(tmp_path / folder / "mine.py") for folder in ("one", "two")]
    for path in map(Path, paths):
        path.parent.mkdir()
        path.write_text(PLUGIN.format(name=f"plugin_{path.parent.name}"))
    load_plugins(paths, installed=False)
    classes = METHODS["plugin_one"], METHODS["plugin_two"]
    load_plugins(paths, installed=False)
    assert (METHODS["plugin_one"], METHODS["plugin_two"]) == classes
    assert METHODS.entry("plugin_one").summary == "Does nothing, politely."
    assert paths[0] in METHODS.entry("plugin_one").origin
    assert set(paths) <= set(module.plugin_files()), "a worker process loads both"
    codes = [METHODS.code(f"plugin_{name}") for name in ("one", "two")]
    assert codes == [{hashlib.sha256(Path(path).read_bytes()).hexdigest()} for path in paths]


def test_an_edited_plugin_is_not_taken_for_the_loaded_one(tmp_path):
    path = tmp_path / "edited.py"
    path.write_text(PLUGIN.format(name="plugin_edited"))
    load_plugins([str(path)], installed=False)
    text = path.read_text()
    path.write_text(f"{text}# changed\n")
    message = complaint(load_plugins, [str(path)], installed=False)
    assert str(path) in message and "edited" in message and "kernel" in message
    path.write_text(text)
    load_plugins([str(path)], installed=False)


def test_a_plugin_cannot_take_a_shipped_name(tmp_path):
    path = tmp_path / "thief.py"
    path.write_text(PLUGIN.format(name="gd_sine"))
    message = complaint(load_plugins, [str(path)], installed=False)
    assert "'gd_sine' is registered twice" in message
    assert str(path) in message and "catalogue.py" in message


@pytest.mark.parametrize(
    ("text", "clue"),
    [
        ("def broken(:\n", "SyntaxError"),
        ("1 / 0\n", "ZeroDivisionError"),
        ("import no_such_module_anywhere\n", "no_such_module_anywhere"),
        ("raise RuntimeError('two\\nlines')\n", "two lines"),
    ],
)
def test_a_broken_plugin_is_one_line(tmp_path, text, clue):
    path = tmp_path / "broken.py"
    path.write_text(text)
    message = complaint(load_plugins, [str(path)], installed=False)
    assert clue in message and str(path) in message
    assert "stable_forgetting_plugin_broken" not in sys.modules


def test_files_that_are_no_plugins(tmp_path):
    (tmp_path / "plugin.txt").write_text("x = 1")
    for name, clue in (
        ("x.py", "no such file"),
        ("", "no such file"),
        ("plugin.txt", "not a Py"),
    ):
        assert clue in complaint(load_plugins, [str(tmp_path / name)], installed=False)


def test_installed_plugins_are_loaded_unless_told_otherwise(monkeypatch):
    def load():
        seen.append(1)
        if len(seen) > 1:
            raise RuntimeError("built for\nanother version")

    seen, groups = [], []
    point = SimpleNamespace(name="theirs", value="theirs.module", load=load)
    monkeypatch.setattr(module, "entry_points", lambda group: groups.append(group) or [point])
    load_plugins(installed=False)
    assert not seen
    load_plugins()
    assert seen == [1] and groups == ["stable_forgetting.plugins"]
    message = complaint(load_plugins)
    assert "theirs" in message and "built for another version" in message


def test_tests_have_no_network():
    """The guard in conftest.py: other machines are out of reach, this one is not."""
    for address in ("192.0.2.1", "2001:db8::1", "example.invalid"):
        with pytest.raises(OSError, match="tests have no network"):
            socket.create_connection((address, 80), timeout=0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), timeout=5).close()
