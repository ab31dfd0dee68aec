"""Renders one chat template. Runs as a program of its own, isolated and limited: a template is foreign code.

Standard input: JSON with template, messages and variables. Standard output: JSON with "text" or "error". Imports
nothing of ours; the caller starts it with an empty environment.
"""

import json
import resource
import signal
import sys
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY_BYTES = 256 * 1024 * 1024
SECONDS = 2.0
MAX_TEXT_BYTES = 16 * 1024 * 1024


class _Generation(Extension):
    """`{% generation %}` marks what the assistant said, for training; here it is no more than its content."""

    tags = {"generation"}  # noqa: RUF012 # the base class declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        """The block as a scope of its own."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Unlike jinja2's own filter this escapes nothing for HTML, as transformers does it.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def render(template: str, variables: dict[str, Any]) -> str:
    """The text of a template, in the environment that transformers gives it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template).render(**variables)


def main() -> None:
    """Read, render, answer."""
    request = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.setitimer(signal.ITIMER_REAL, SECONDS)  # unhandled on purpose: it ends the process, whatever C code runs
    try:
        text = render(request["template"], request["variables"])
        answer = {"text": text} if len(text.encode()) <= MAX_TEXT_BYTES else {"error": "the text is larger than 16 MiB"}
    except jinja2.exceptions.TemplateSyntaxError as error:
        answer = {"error": f"line {error.lineno}: {error.message}"}
    except (MemoryError, RecursionError) as error:
        answer = {"error": f"too much memory or too deep ({type(error).__name__})"}
    except Exception as error:  # whatever a foreign template raises is its own doing
        answer = {"error": f"{error}" or type(error).__name__}
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
