"""The subcommands: one module each, with `add_parser` and `run`."""

from . import generate, logits, tokenize

COMMANDS = (generate, logits, tokenize)
