"""Names -> things, lazily.  Registering imports nothing; looking up imports one module.

``METHODS`` and ``BENCHMARKS`` are the two registries of a suite; ``PROBLEMS`` holds what the
contract checks run a modality's methods on.  The packages ``vision`` and ``language`` register
their entries in their ``__init__``; third parties use the entry-point group
``stable_forgetting.plugins`` or a file given with ``--plugin``.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from stable_forgetting.common.base.config import canonical, did_you_mean
from stable_forgetting.common.base.errors import ConfigError, named_line

T = TypeVar("T")
ENTRY_POINT_GROUP = "stable_forgetting.plugins"
OURS = "stable_forgetting"
"""The package whose versions say when the same config would give other numbers."""
_OLD_NAMES = ("common", "vision", "language", "benchmarks")
"""What the package's parts were imported as before they had a package of their own."""
_FILE_PLUGIN = "stable_forgetting_plugin_"
"""How the modules of plugin files begin."""
_DIGEST = "__source_digest__"


class Table(Protocol):
    """Names of which some may come from plugins."""

    def foreign(self) -> bool:
        """Whether any name does."""

    def code(self, name: str) -> set[str]:
        """Digests of the plugins' sources that a name stands for; none for ours or unknown."""


TABLES: list[Table] = []
"""Every registry, and every other table that plugins may add names to."""


@dataclass(frozen=True)
class Entry:
    """One registered name: what it points to, a one-line summary, and who registered it.

    Attributes:
        stored: Its name in stage keys and records, where it was renamed later.
    """

    name: str
    target: Any
    summary: str
    origin: str
    stored: str = ""


class Registry(Generic[T]):
    """A lazy mapping from names to classes.

    Args:
        kind: Word for error messages, such as ``method``.
        base: ``module:attr`` of the base class that every entry must derive from.
        derived: ``module:attr`` of a function: name -> the entry that an unregistered name stands
            for, or None.
    """

    def __init__(self, kind: str, base: str, derived: str | None = None):
        self.kind = kind
        self._base = base
        self._derived = derived
        self._entries: dict[str, Entry] = {}
        TABLES.append(self)

    def register(
        self, name: str, target: str | type[T] | None = None, *, summary: str = "", stored: str = ""
    ) -> Callable[[type[T]], type[T]]:
        """Registers ``module:attr``, or decorates a class.

        Args:
            target: ``module:attr``, of what is imported when it is needed.
            summary: One line for lists.
            stored: An earlier name, which stage keys and records keep and which is still found.

        Raises:
            ConfigError: The name is taken; both origins are named.
        """
        frame = sys._getframe(1)
        origin = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if target is not None:
            self._add(Entry(name, target, summary, origin, stored))

        def decorate(cls: type[T]) -> type[T]:
            first = (cls.__doc__ or "").strip().partition("\n")[0]
            self._add(Entry(name, cls, summary or first, origin, stored))
            return cls

        return decorate

    def _add(self, entry: Entry) -> None:
        old = self._entries.get(entry.name)
        if old is not None and (old.origin, _path(old)) != (entry.origin, _path(entry)):
            raise ConfigError(
                f"{self.kind} '{entry.name}' is registered twice: {old.origin} and {entry.origin}"
            )
        self._entries[entry.name] = entry

    def names(self) -> list[str]:
        """All names, in the order of registration."""
        return list(self._entries)

    def entry(self, name: str) -> Entry:
        """The entry of a name, without importing its target if it is registered."""
        entry = self._find(name)
        if entry is None:
            hint = did_you_mean(name, self.names())
            raise ConfigError(f"unknown {self.kind} '{name}'{hint}")
        return entry

    def stored_name(self, name: str) -> str:
        """The name in stage keys and records."""
        entry = self.entry(name)
        return entry.stored or entry.name

    def foreign(self) -> bool:
        """Whether any entry was registered by a plugin."""
        return any(is_foreign(_path(entry)) for entry in self)

    def code(self, name: str) -> set[str]:
        """Digests of the plugins' sources that the class of a name and its bases come from."""
        entry = self._find(name)
        if entry is None or not is_foreign(_path(entry)):
            return set()
        base = _import(self._base, self.kind)
        modules = {cls.__module__ for cls in self[name].__mro__ if issubclass(cls, base)}
        return {source_digest(module) for module in modules if is_foreign(module)}

    def __contains__(self, name: str) -> bool:
        return self._find(name) is not None

    def _find(self, name: str) -> Entry | None:
        if name in self._entries:
            return self._entries[name]
        if self._derived is None:
            return next((entry for entry in self if entry.stored == name), None)
        entry: Entry | None = _import(self._derived, self.kind)(name)
        return entry

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def __getitem__(self, name: str) -> type[T]:
        entry = self.entry(name)
        target = entry.target
        if isinstance(target, str):
            target = _import(target, f"{self.kind} '{name}' ({entry.origin})")
        base = _import(self._base, self.kind)
        if not (isinstance(target, type) and issubclass(target, base)):
            raise ConfigError(f"{self.kind} '{name}' ({entry.origin}) is not a {base.__name__}")
        return target


def _path(entry: Entry) -> str:
    target = entry.target
    if isinstance(target, type):
        return f"{target.__module__}:{target.__qualname__}"
    return str(target)


def _import(path: str, who: str) -> Any:
    module_name, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{who}: cannot import '{path}': {error}") from error


def is_foreign(path: str) -> bool:
    """Whether a module, or ``module:attr``, belongs to a plugin."""
    return path.partition(":")[0].partition(".")[0] != OURS


def source_digest(module: str) -> str:
    """SHA-256 of a plugin's source: of its one file as it was run, or of its whole package."""
    digest = getattr(sys.modules[module], _DIGEST, None)
    return str(digest) if digest else _package_digest(module)


@cache
def _package_digest(module: str) -> str:
    package = sys.modules.get(module.partition(".")[0])
    roots = [Path(root) for root in getattr(package, "__path__", ())]
    files = sorted(file for root in roots for file in root.rglob("*.py"))
    own = getattr(sys.modules[module], "__file__", None)
    files = files or [Path(own)] if own else files
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def any_plugin() -> bool:
    """Whether a plugin has registered anything."""
    return any(table.foreign() for table in TABLES)


def plugin_code(value: Any) -> list[str]:
    """Digests of the plugins' sources that any text inside a value stands for, sorted."""

    def texts(item: Any) -> Iterator[str]:
        if isinstance(item, str):
            yield item
        elif isinstance(item, Mapping | list):
            for inner in item.values() if isinstance(item, Mapping) else item:
                yield from texts(inner)

    if not any_plugin():
        return []
    names = set(texts(canonical(value)))
    return sorted({digest for name in names for table in TABLES for digest in table.code(name)})


def plugin_files() -> tuple[str, ...]:
    """The plugin files that this process has loaded."""
    return tuple(_loaded_files())


def _loaded_files() -> dict[str, str]:
    """Plugin file -> digest of the source that this process has run."""
    modules = [m for name, m in sys.modules.items() if name.startswith(_FILE_PLUGIN)]
    return {str(module.__file__): getattr(module, _DIGEST) for module in modules}


def load_plugins(files: Iterable[str] = (), *, installed: bool = True) -> None:
    """Imports plugin files and installed entry points, so that they register their entries."""
    for file in files:
        _load_file(Path(file))
    if installed:
        for point in entry_points(group=ENTRY_POINT_GROUP):
            try:
                point.load()
            except ConfigError:
                raise
            except Exception as error:
                raise ConfigError(
                    f"installed plugin '{point.name}' ({point.value}): {_why(error)}; "
                    "mend it or uninstall it"
                ) from error


def _load_file(path: Path) -> None:
    if not path.is_file():
        raise ConfigError(
            f"--plugin {path}: no such file; give the path of a Python file that is there"
        )
    try:
        source = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"--plugin {path}: {_why(error)}") from error
    code, loaded = hashlib.sha256(source).hexdigest(), _loaded_files()
    if (place := str(path.resolve())) in loaded:
        if loaded[place] != code:
            raise ConfigError(
                f"--plugin {path}: was edited after this process had loaded it; start Python, or "
                "the notebook's kernel, again"
            )
        return
    name = f"{_FILE_PLUGIN}{path.stem}"
    while name in sys.modules:  # another folder's file of this name keeps its module and its digest
        name += "_"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.origin is None:
        raise ConfigError(f"--plugin {path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        setattr(module, _DIGEST, code)
        # run from these bytes: Python's own cache misses an edit within one second
        exec(compile(source, spec.origin, "exec"), module.__dict__)  # noqa: S102 - a plugin
    except ConfigError:
        del sys.modules[name]
        raise
    except (Exception, SystemExit, GeneratorExit) as error:
        del sys.modules[name]
        raise ConfigError(f"--plugin {path}: {_why(error)}") from error


def _why(error: BaseException) -> str:
    """Why a plugin does not load; of an old import, the new one."""
    old = str(error.name) if isinstance(error, ImportError) else ""
    if old.partition(".")[0] in _OLD_NAMES or old.startswith(OURS):
        return f"{named_line(error)}; write: from stable_forgetting.common import METHODS, ..."
    return named_line(error)


_HERE = "stable_forgetting.common"
METHODS: Registry[Any] = Registry(
    "method", f"{_HERE}.methods.base:UnlearningMethod", f"{_HERE}.methods.variants:crossed_entry"
)
BENCHMARKS: Registry[Any] = Registry("benchmark", f"{_HERE}.protocol.benchmark:Benchmark")
PROBLEMS: Registry[Any] = Registry("tiny problem", f"{_HERE}.checks.tiny_task:TinyProblem")
