"""The subcommands: one module each, with `add_parser` and `run`."""

from . import chat, generate, init, logits, status, tokenize

COMMANDS = (generate, chat, status, init, logits, tokenize)
