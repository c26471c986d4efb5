"""Registries: lazy, collision-proof, and clear about what went wrong in whose code."""

from __future__ import annotations

import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from stable_forgetting.common.base import registry as module
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.base.registry import METHODS, Registry, load_plugins
from stable_forgetting.common.methods.base import UnlearningMethod

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


def complaint(function, *args, **kwargs) -> str:
    with pytest.raises(ConfigError) as error:
        function(*args, **kwargs)
    text = str(error.value)
    assert text and "\n" not in text
    return text


@pytest.fixture
def fresh():
    return Registry("method", BASE)


@pytest.fixture(autouse=True)
def untouched(monkeypatch):
    """Plugins of these tests leave nothing behind."""
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


def test_a_missing_attribute_is_named(fresh):
    fresh.register("typo", "stable_forgetting.common.methods.base:UnlearnMethod")
    assert "UnlearnMethod" in complaint(fresh.__getitem__, "typo")


def test_unknown_names_get_a_hint(fresh):
    fresh.register("gd_sine", BASE)
    assert "unknown method 'gd_sin'; did you mean 'gd_sine'?" in complaint(
        fresh.__getitem__, "gd_sin"
    )
    assert "known: gd_sine" in complaint(fresh.entry, "xyz")


def test_collisions_name_both_origins(fresh):
    fresh.register("a", "one:A")
    message = complaint(fresh.register, "a", "two:B")
    assert message.count("test_registry.py:") + message.count("registry") >= 2
    first, second = fresh.entry("a").origin, message.rpartition(" and ")[2]
    assert first in message and first != second
    assert fresh.entry("a").target == "one:A", "the first one stays"


def test_collisions_from_one_line_count_too(fresh):
    with pytest.raises(ConfigError, match="registered twice"):
        for target in ("one:A", "two:B"):
            fresh.register("a", target)


def test_registering_the_same_again_is_harmless(fresh):
    for _ in range(2):
        fresh.register("a", "one:A", summary="same line, same thing")
    assert fresh.names() == ["a"]


def test_wrong_base_class(fresh):
    class Stranger:
        """Not a method."""

    fresh.register("stranger")(Stranger)
    assert "'stranger'" in complaint(fresh.__getitem__, "stranger")
    fresh.register("function", "stable_forgetting.common.methods.base:resolve_config")
    message = complaint(fresh.__getitem__, "function")
    assert "is not a UnlearningMethod" in message and "test_registry.py" in message


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


def test_a_plugin_file_registers_and_loads_once(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(PLUGIN.format(name="plugin_method"))
    load_plugins([str(path)], installed=False)
    cls = METHODS["plugin_method"]
    load_plugins([str(path)], installed=False)
    assert METHODS["plugin_method"] is cls
    assert METHODS.entry("plugin_method").summary == "Does nothing, politely."
    assert str(path) in METHODS.entry("plugin_method").origin


def test_two_plugins_of_one_file_name(tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(PLUGIN.format(name=f"plugin_{folder}"))
    load_plugins([str(tmp_path / f / "mine.py") for f in ("one", "two")], installed=False)
    assert {"plugin_one", "plugin_two"} <= set(METHODS.names())


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


def test_missing_and_foreign_files(tmp_path):
    assert "no such file" in complaint(load_plugins, [str(tmp_path / "x.py")], installed=False)
    assert "no such file" in complaint(load_plugins, [str(tmp_path)], installed=False)
    other = tmp_path / "plugin.txt"
    other.write_text("x = 1")
    assert "not a Python file" in complaint(load_plugins, [str(other)], installed=False)


def test_a_broken_installed_plugin_is_named(monkeypatch):
    def load():
        raise RuntimeError("built for\nanother version")

    point = SimpleNamespace(name="theirs", value="theirs.module", load=load)
    monkeypatch.setattr(module, "entry_points", lambda group: [point])
    message = complaint(load_plugins)
    assert "theirs" in message and "built for another version" in message


def test_installed_plugins_are_loaded_unless_told_otherwise(monkeypatch):
    seen = []
    point = SimpleNamespace(name="p", value="p", load=lambda: seen.append(1))
    groups = []
    monkeypatch.setattr(module, "entry_points", lambda group: groups.append(group) or [point])
    load_plugins(installed=False)
    assert not seen
    load_plugins()
    assert seen == [1] and groups == ["stable_forgetting.plugins"]


def test_tests_have_no_network():
    """The guard in conftest.py: other machines are out of reach, this one is not."""
    for address in ("192.0.2.1", "2001:db8::1", "example.invalid"):
        with pytest.raises(OSError, match="tests have no network"):
            socket.create_connection((address, 80), timeout=0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), timeout=5).close()
