"""The subcommands: one module each, with `add_parser` and `run`."""

from . import bench, chat, generate, init, invite, logits, serve, status, tokenize

COMMANDS = (generate, chat, serve, status, init, invite, logits, bench, tokenize)
