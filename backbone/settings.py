"""Every `EXPERTSWARM_*` knob: flag, then process environment, then `.env` in the current folder, then default.

One table; whoever shows or reads a setting goes through it. A value that cannot be used is an error with its place.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from .errors import UsageError
from .knobs import BY_NAME, KNOBS, PREFIX, Knob

MAX_DOTENV_BYTES = 1 << 20
_COMMENT = re.compile(r"(?:^|\s+)#")


@dataclass(frozen=True, slots=True)
class Setting:
    """A value and where it came from."""

    value: Any
    source: str


class Settings:
    """Every knob's value with its source. `settings.top_k` is the value."""

    def __init__(self, found: Mapping[str, Setting]) -> None:
        self._found = dict(found)

    def __getitem__(self, name: str) -> Setting:
        return self._found[name]

    def but(self, other: Mapping[str, Setting]) -> Settings:
        """These, with others in place of some."""
        return Settings({**self._found, **other})

    def __getattr__(self, name: str) -> Any:
        try:
            return self._found[name].value
        except KeyError:
            raise AttributeError(name) from None


def add_flags(parser: argparse.ArgumentParser, *names: str) -> None:
    """Add the flags of some knobs. Their values stay text, so that every source is checked in one place."""
    for name in names:
        knob = BY_NAME[name]
        if knob.flags:
            parser.add_argument(*knob.flags, dest=knob.name, metavar=knob.metavar, help=knob.help, default=None)


def resolve(args: argparse.Namespace, environ: Mapping[str, str], dotenv: Path = Path(".env")) -> Settings:
    """All settings of a run. UsageError for a value that cannot be used, or a variable that is no knob's."""
    settings, problems = survey(args, environ, dotenv)
    if problems:
        raise UsageError(problems[0])
    return settings


def survey(
    args: argparse.Namespace, environ: Mapping[str, str], dotenv: Path = Path(".env")
) -> tuple[Settings, list[str]]:
    """All settings, and everything that is wrong with them; what cannot be used has its default."""
    problems = list[str]()
    file = _read_dotenv(dotenv, problems)
    _find_unknown({key: (value, "environment") for key, value in environ.items()} | file, problems)
    found = dict[str, Setting]()
    for knob in KNOBS:
        try:
            found[knob.name] = _resolved(knob, args, environ, file)
        except UsageError as error:
            problems.append(str(error))
            found[knob.name] = Setting(knob.default, "default")
    return Settings(found), problems


def _resolved(
    knob: Knob, args: argparse.Namespace, environ: Mapping[str, str], file: Mapping[str, tuple[str, str]]
) -> Setting:
    given = getattr(args, knob.name, None)
    if given is not None:
        return Setting(knob.parse(given, knob.flags[-1]), f"flag {knob.flags[-1]}")
    if environ.get(knob.variable):
        return Setting(knob.parse(environ[knob.variable], f"environment: {knob.variable}"), "environment")
    if knob.variable in file and file[knob.variable][0]:
        text, place = file[knob.variable]
        return Setting(knob.parse(text, f"{place}: {knob.variable}"), place)
    return Setting(knob.default, "default")


def _find_unknown(given: Mapping[str, tuple[str, str]], problems: list[str]) -> None:
    known = {knob.variable for knob in KNOBS}
    for key, (_, place) in given.items():
        if key.startswith(PREFIX) and key not in known:
            near = get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(known))}"
            problems.append(f"{place}: no setting {key}; {hint}")


def _read_dotenv(path: Path, problems: list[str]) -> dict[str, tuple[str, str]]:
    """Our variables of a `.env` file, each with its place. Other programs' lines are left alone."""
    found = dict[str, tuple[str, str]]()
    try:
        if not path.is_file():
            return {}
        with path.open("rb") as file:
            data = file.read(MAX_DOTENV_BYTES + 1)
    except OSError as error:
        problems.append(f"{path}: cannot be read: {error.strerror}")
        return {}
    if len(data) > MAX_DOTENV_BYTES:
        problems.append(f"{path}: larger than {MAX_DOTENV_BYTES} bytes; this is no settings file")
        return {}
    for number, line in enumerate(data.decode("utf-8-sig", errors="replace").split("\n"), 1):
        key, equals, text = line.strip().removeprefix("export ").partition("=")
        key = key.strip()
        if not key.startswith(PREFIX):
            continue
        try:
            if not equals:
                raise UsageError(f"{key[:60]!r} has no '='")
            found[key] = (_unquoted(key, text.strip()), f"{path}:{number}")
        except UsageError as error:
            problems.append(f"{path}:{number}: {error}")
    return found


def _unquoted(key: str, text: str) -> str:
    """The value of a line: without its quotes, or without the comment after it."""
    if text[:1] not in ("'", '"'):
        return _COMMENT.split(text, maxsplit=1)[0]
    value, quote, rest = text[1:].partition(text[0])
    if not quote:
        raise UsageError(f"{key} has an opening quote and no closing one")
    if rest.strip() and not _COMMENT.match(rest):
        raise UsageError(f"{key} has text after the closing quote")
    return value


def example() -> str:
    """The text of `.env.example`: every knob, commented out, with its meaning and default."""
    lines = [
        "# Settings of expertswarm. Copy to .env and take out the # of what you set; flags and the environment win."
    ]
    for knob in KNOBS:
        default = "" if knob.default in (None, "") else str(knob.default)
        flag = f" ({knob.flags[-1]})" if knob.flags else ""
        lines += ["", f"# {knob.help}{flag}", f"#{knob.variable}={default}"]
    return "\n".join(lines) + "\n"
