"""The application, and how a function becomes one of its commands."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import inspect
from collections.abc import Callable, Iterator
from typing import Annotated, Any, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup


class _Examples:
    """Ends the help with the examples, one a line, which Rich would run together."""

    epilog: str | None

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Writes the help, and what the epilogue has after it."""
        examples, self.epilog = self.epilog, None
        super().format_help(ctx, formatter)  # type: ignore[misc]
        self.epilog = examples
        formatter.write(examples)


class _Group(_Examples, TyperGroup):
    pass


class _Command(_Examples, TyperCommand):
    pass


def _listed(*examples: str) -> str:
    """The end of a help text."""
    head = "Example" if len(examples) == 1 else "Examples"
    return "\n".join([f" {head}:", *(f"   {example}" for example in examples), ""])


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Benchmark machine unlearning: run suites, and print leaderboards with a noise floor.",
    epilog=_listed("unlearn demo", "unlearn run digits-class", "unlearn show gd_sine"),
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"stable-forgetting {importlib.metadata.version('stable-forgetting')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Takes the options of all commands; the application has its own help."""


F = TypeVar("F", bound=Callable[..., None])


def command(*examples: str) -> Callable[[F], F]:
    """Registers a function as a command whose help ends with examples.

    A parameter whose type is a dataclass stands for a group of options: each of its fields becomes
    an option, and the function is given the whole.  Groups may share a field.
    """

    def register(function: F) -> F:
        app.command(cls=_Command, epilog=_listed(*examples))(_flat(function))
        return function

    return register


def _flat(function: Callable[..., None]) -> Callable[..., None]:
    """The function with one keyword per option."""
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {k: h for k, h in hints.items() if dataclasses.is_dataclass(h)}

    def flat(**values: Any) -> None:
        given = {key: value for key, value in values.items() if key in hints}
        for key, group in groups.items():
            names = [field.name for field in dataclasses.fields(group)]
            given[key] = group(**{each: values[each] for each in names})
        function(**given)

    def parameters() -> Iterator[inspect.Parameter]:
        for key, parameter in inspect.signature(function).parameters.items():
            if key in groups:
                yield from inspect.signature(groups[key], eval_str=True).parameters.values()
            else:
                yield parameter.replace(annotation=hints[key])

    options = {
        parameter.name: parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in parameters()
    }
    flat.__name__, flat.__doc__ = function.__name__, function.__doc__
    flat.__signature__ = inspect.Signature([*options.values()])  # type: ignore[attr-defined]
    return flat
