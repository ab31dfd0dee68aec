"""The subcommands: one module each, with `add_parser` and `run`."""

from . import bench, chat, generate, init, invite, logits, plan, status, tokenize

COMMANDS = (generate, chat, status, init, invite, logits, bench, plan, tokenize)
