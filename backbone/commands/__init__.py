"""The subcommands: one module each, with `add_parser` and `run`."""

from . import bench, chat, generate, init, invite, logits, plan, serve, status, tokenize, tolerance

COMMANDS = (generate, chat, serve, status, init, invite, logits, bench, plan, tolerance, tokenize)
