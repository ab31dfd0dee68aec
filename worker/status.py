"""`worker status`: the workers that joined from this machine, and whether a backbone has each now."""

from __future__ import annotations

import argparse
import json
from typing import Any

from .doing import SERVING, doing
from .identity import Identities, checked_name


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "status",
        help="show the workers that joined from here, and whether a backbone has each now",
        description="Show the workers that joined from here. Exit code 0: there are some, and a backbone has each of "
        "them now. Else 1.",
    )
    parser.add_argument("--name", default="", metavar="NAME", help="this worker alone")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Show them; 1 when none is there, or one does not serve."""
    identities, name = Identities(), checked_name(args.name) if args.name else ""
    found: list[dict[str, Any]] = [
        {
            "name": identity.name,
            "hosts": list(identity.hosts),
            "port": identity.port,
            "enrolled": identity.is_enrolled,
            "state": doing(identities.doing_path(identity)),
        }
        for identity in identities.find(name=name)
    ]
    if args.json:
        print(json.dumps({"workers": found}))
    else:
        for worker in found:
            print(f"{worker['name']}: {worker['state']} ({', '.join(worker['hosts'])}, port {worker['port']})")
        if not found:
            print(f"no worker{f' named {name}' if name else ''} has joined from here")
    return 0 if found and all(worker["state"] == SERVING for worker in found) else 1
