"""The subcommands: one module each, with `add_parser` and `run`."""

from . import chat, generate, logits, tokenize

COMMANDS = (generate, chat, logits, tokenize)
