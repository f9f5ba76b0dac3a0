"""What every command shares: how it is made, how its errors are said, how it prints JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, is_dataclass
from functools import wraps
from typing import Any, Final, ParamSpec, TypeVar, cast

import click
from flask.cli import with_appcontext

from waitlist.errors import InvalidAddress, InvalidInput, SettingsError, UnknownClient, UnknownList, WaitlistError

P = ParamSpec("P")
R = TypeVar("R")

EXIT_FAULT: Final = 1
EXIT_BAD_USE: Final = 2

as_json_option = click.option("--json", "as_json", is_flag=True, help="For a machine to read.")


class BadSetting(click.ClickException):
    """A sentence without the usage of a command, which was typed well."""

    exit_code = EXIT_BAD_USE


def command(name: str, **attributes: Any) -> Callable[[Callable[..., None]], click.Command]:
    """A command in which an error of ours is one sentence: exit code 2 for what was typed or set, 1 for everything
    else.
    """

    def make(function: Callable[..., None]) -> click.Command:
        decorate = cast(Callable[[Callable[..., None]], click.Command], click.command(name, **attributes))
        return decorate(with_appcontext(_plainly(function)))

    return make


def echo_json(value: Any) -> None:
    click.echo(json.dumps(value, ensure_ascii=False, default=_plain))


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"no JSON for {type(value).__name__}")


def _plainly(function: Callable[P, R]) -> Callable[P, R]:
    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except (InvalidAddress, InvalidInput, UnknownList, UnknownClient) as error:
            raise click.UsageError(str(error)) from error
        except SettingsError as error:
            raise BadSetting(str(error)) from error
        except WaitlistError as error:
            raise click.ClickException(str(error)) from error

    return run
