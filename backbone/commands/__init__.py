"""The subcommands: one module each, with `add_parser` and `run`."""

from . import bench, chat, generate, init, logits, serve, status, tokenize

COMMANDS = (generate, chat, serve, status, init, logits, bench, tokenize)
