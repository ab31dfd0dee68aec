"""The subcommands: one module each, with `add_parser` and `run`."""

from . import bench, chat, generate, init, logits, status, tokenize

COMMANDS = (generate, chat, status, init, logits, bench, tokenize)
