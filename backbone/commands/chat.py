"""`backbone chat`: a conversation on a terminal, with the model's own template; the memory of what was said is kept."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path
from typing import Any

from ..answerers import Answerer, open_answerer
from ..chat_template import read_template
from ..errors import BackboneError, ContextFull, UsageError
from ..prompts import ChatPrompt
from ..provenance import cache_folder
from ..results import STOPS, change_lines
from ..settings import Settings, add_flags, resolve
from ..terminal import ProgressLine, dim
from .generate import MODEL_FLAGS, SAMPLING_FLAGS, generate_options, shower

HELP = "/reset forgets the conversation, /system TEXT sets the system message and forgets, /quit ends (or Ctrl-D)"


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "chat",
        help="talk with a model that has a chat template",
        description=f"Talk with a model. In the chat: {HELP}. Ctrl-C stops an answer and keeps the chat.",
    )
    add_flags(parser, *MODEL_FLAGS, "predict", *SAMPLING_FLAGS)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--template", metavar="FILE", help="chat template, for a model that has none")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end an answer at this text")
    parser.set_defaults(func=run, ignore_eos=False, digest=False)


def run(args: argparse.Namespace) -> int:
    """Talk until the other side leaves."""
    settings = resolve(args, os.environ)
    with open_answerer(settings) as answerer:
        chat = Chat(answerer, settings, args)
        is_piped = not sys.stdin.isatty()
        if not is_piped:
            print(dim(f"{answerer.name}: {HELP}", sys.stderr), file=sys.stderr)
            with _history():
                chat.loop(lambda: input("> "))
        else:
            chat.loop(_line_of_pipe)
    return 1 if is_piped and chat.failed else 0


def _line_of_pipe() -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")


@contextlib.contextmanager
def _history() -> Any:
    """Lines typed, kept between chats where the terminal library can."""
    try:
        import readline
    except ImportError:  # not on every Python
        yield
        return
    file = cache_folder() / "chat-history"
    with contextlib.suppress(OSError):
        readline.read_history_file(file)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            readline.set_history_length(1000)
            readline.write_history_file(file)
            Path(file).chmod(0o600)


class Chat:
    """One conversation. Whoever answers keeps the keys and values of everything that two prompts have in common."""

    def __init__(self, answerer: Answerer, settings: Settings, args: argparse.Namespace) -> None:
        self._answerer = answerer
        self._template = read_template(args.template) if args.template is not None else None
        if self._template is None:
            answerer.need_template()  # said before the first line
        self._options = generate_options(settings, args)
        self._system: str | None = args.system
        self.failed = False  #: whether any line got an error in place of an answer
        self._messages: list[dict[str, str]] = []
        self._reset()

    def _reset(self) -> None:
        self._messages = [] if self._system is None else [{"role": "system", "content": self._system}]

    def loop(self, ask: Any) -> None:
        """Answer line after line until the input ends."""
        while True:
            try:
                line = ask().strip()
            except KeyboardInterrupt:
                print(dim(f"\n{HELP}", sys.stderr), file=sys.stderr)
                continue
            except EOFError:
                print(file=sys.stderr)
                return
            if line == "/quit":
                return
            if line.startswith("/"):
                self._command(line)
            elif line:
                try:
                    self._answer(line)
                except BackboneError as error:
                    self.failed = True
                    print(f"backbone: error: {error}", file=sys.stderr)
                except KeyboardInterrupt:  # before the first token: there is nothing to keep of it
                    print(dim("(stopped)", sys.stderr), file=sys.stderr)

    def _command(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word == "/system":
            self._system = rest.strip() or None
        if word in ("/reset", "/system"):
            self._reset()
            print(dim("the conversation begins anew", sys.stderr), file=sys.stderr)
        else:
            print(dim(HELP, sys.stderr), file=sys.stderr)

    def _answer(self, line: str) -> None:
        said = [*self._messages, {"role": "user", "content": line}]
        progress = ProgressLine(sys.stderr)
        try:
            result = self._answerer.answer(
                ChatPrompt(said, self._template),
                self._options,
                on_text=shower(progress),
                on_prompt=lambda done, total: progress.show("prompt", done, total),
            )
        except ContextFull as error:
            raise UsageError(f"the conversation fills the context: {error}, or /reset") from None
        if result["stop"] == "length" and not result["ids"]:
            raise UsageError("the conversation fills the context; /reset, or a larger -c")
        sys.stdout.write("\n")
        sys.stdout.flush()
        if result["stop"] in ("limit", "length", "cancelled"):
            print(dim(f"(stopped: {STOPS[result['stop']]})", sys.stderr), file=sys.stderr)
        for change in change_lines(result):
            print(dim(f"({change})", sys.stderr), file=sys.stderr)
        # What was said stays said, also when it was broken off.
        self._messages = [*said, {"role": "assistant", "content": result["text"]}]
