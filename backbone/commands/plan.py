"""`backbone plan`: who would hold what, what does not fit, what a token would take. Reads headers, starts nothing."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kernels.cores import usable_cores
from kernels.errors import BackendUnavailable
from kernels.registry import AUTO, refuse_unknown
from protocol.sizes import parse_size, size_text

from ..assumed import (
    LOCAL_CALL_S,
    NETWORK_BYTES_PER_S,
    NETWORK_CALL_S,
    OF_A_PLAIN_READ,
    OF_A_PLAIN_READ_COMPILED,
    speed_of,
)
from ..discovery import DEMO, DEMO_NAME, resolve_model
from ..errors import UsageError
from ..local_workers import parse_workers
from ..machine_memory import memory_bytes, read_bytes_per_s
from ..model import BoundModel, bind_model
from ..planning import Node, Statement, needs_of, state
from ..prediction import BACKBONE, NodeSpeed
from ..session import DEFAULT_CONTEXT, DEMO_WORKERS, open_library, worker_threads
from ..settings import Settings, add_flags, resolve
from ..terminal import table
from .generate import MODEL_FLAGS

MOST_NODES = 1024
COLUMNS = ("node", "class", "GB/s", "memory", "bytes", "experts", "calls", "to send")
NODE_FORM = "NAME=MEMORY[@GBPS][/CLASS]"


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "plan",
        help="say who would hold what, what does not fit, and what a token would take",
        description="State what a model asks of workers before anything is loaded: only its headers are read.",
    )
    add_flags(parser, *MODEL_FLAGS)
    parser.add_argument(
        "--node",
        action="append",
        default=[],
        metavar=NODE_FORM,
        help="a worker on another machine: memory for experts (0: no bound), GB/s of weights that it reads, class",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """State the plan. What does not fit is part of it, and no failure."""
    settings = resolve(args, os.environ)
    own_class = _class_of(settings.backend, settings)
    given = parse_nodes(args.node, own_class)
    path = resolve_model(settings.model, os.environ)
    local = parse_workers(settings.workers or _usual_workers(path, given), _named(settings.backend))
    for backend in dict.fromkeys([settings.backend, *local]):
        _refuse_unknown(backend)
    model = bind_model(path, open_library(settings))
    context = _context(settings, model)
    needs = needs_of(model, context=context, kv_cache=settings.kv_cache, wire=settings.wire)
    cores = settings.threads or usable_cores()
    read = read_bytes_per_s(cores)
    nodes = [*local_nodes(local, settings, read / cores), *given]
    backbone = NodeSpeed(name=BACKBONE, bytes_per_s=speed_of(settings.backend, read / cores, cores))
    found = state(needs, nodes, backbone)
    told, short = assumptions(nodes, read, cores), found.does_not_fit(memory_bytes())
    if args.json:
        print(json.dumps(as_json(settings, path, found, backbone, told, short)))
    else:
        print(as_text(settings, found, backbone, told, short))
    return 0


# ---- what is asked


def parse_nodes(texts: Sequence[str], own_class: str) -> list[Node]:
    """Workers on other machines as `--node` names them. UsageError says which one cannot be read."""
    found: dict[str, Node] = {}
    if len(texts) > MOST_NODES:
        raise UsageError(f"--node: {len(texts)} are too many; at most {MOST_NODES} can be planned for")
    for text in texts:
        name, equals, rest = text.partition("=")
        rest, slash, numeric_class = rest.partition("/")
        memory, at, speed = rest.partition("@")
        if not name or not name.isprintable() or not equals or (slash and not numeric_class):
            raise UsageError(
                f"--node {text[:80]!r}: is not {NODE_FORM}, such as phone=4GiB@12 or box=24GiB@600/canonical"
            )
        if name in found or name == BACKBONE or name.startswith("local-"):
            raise UsageError(f"--node {text[:80]!r}: the name {name[:60]!r} is taken")
        found[name] = Node(
            name=name,
            numeric_class=numeric_class or own_class,
            memory_bytes=_memory(memory, text),
            bytes_per_s=_gigabytes(speed, text) if at else None,
            latency_s=NETWORK_CALL_S,
            wire_bytes_per_s=NETWORK_BYTES_PER_S,
        )
    return list(found.values())


def _memory(size: str, text: str) -> int:
    try:
        return parse_size(size)
    except ValueError:
        raise UsageError(f"--node {text[:80]!r}: {size[:40]!r} is not a size such as 800M or 2GiB") from None


def _gigabytes(number: str, text: str) -> float:
    try:
        value = float(number) * 1e9
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise UsageError(f"--node {text[:80]!r}: {number[:40]!r} is no number of GB/s above 0")
    return value


def local_nodes(backends: Sequence[str], settings: Settings, core_bytes_per_s: float) -> list[Node]:
    """The local workers that `--workers` asks for. They share out the cores, and map the model's file."""
    threads = worker_threads(settings.threads, len(backends)) if backends else 0
    return [
        Node(
            name=f"local-{number}",
            backend=backend,
            numeric_class=_class_of(backend, settings),
            memory_bytes=settings.worker_memory,
            bytes_per_s=speed_of(backend, core_bytes_per_s, threads),
            latency_s=LOCAL_CALL_S,
            maps_file=True,
        )
        for number, backend in enumerate(backends, 1)
    ]


def _usual_workers(path: Path, given: Sequence[Node]) -> str:
    return DEMO_WORKERS if path == DEMO and not given else "0"


def _named(backend: str) -> str:
    """What `auto` most likely is: whether it can be compiled here is not tried."""
    return "native" if backend == AUTO else backend


def _refuse_unknown(backend: str) -> None:
    try:
        refuse_unknown(_named(backend))
    except BackendUnavailable as error:
        raise UsageError(str(error)) from None


def _class_of(backend: str, settings: Settings) -> str:
    """A word for the class of a backend's rows. What it is to the last bit, only the backend can say."""
    return f"{'numpy' if backend == 'numpy' else 'canonical'}/{settings.activations}"


def _context(settings: Settings, model: BoundModel) -> int:
    return int(settings.context) or min(model.trained_context or DEFAULT_CONTEXT, DEFAULT_CONTEXT)


def assumptions(nodes: Sequence[Node], read: float, cores: int) -> list[str]:
    """What the prediction takes for granted, in words."""
    told = [
        f"{cores} core{'s' * (cores > 1)} of this machine read {read / 1e9:.1f} GB/s of memory (measured just now)",
        f"kernels read weights at {OF_A_PLAIN_READ_COMPILED:g} of that, numpy at "
        f"{OF_A_PLAIN_READ['numpy']:g} on one core; a GPU here is not asked and counts as cores",
        "every expert is as likely as the others of its layer; the context is at its beginning",
    ]
    if any(node.maps_file for node in nodes):
        told.append(f"a call to a local worker takes {LOCAL_CALL_S * 1e6:.0f} us there and back")
    if not all(node.maps_file for node in nodes):
        told.append(
            f"a call to another machine takes {NETWORK_CALL_S * 1e3:g} ms there and back, over "
            f"{NETWORK_BYTES_PER_S * 8 / 1e9:g} Gbit/s"
        )
    if unknown := [node.name for node in nodes if not node.bytes_per_s]:
        told.append(f"{', '.join(unknown)}: as fast as the median of the others, or else as this machine")
    return told


# ---- what is told


def as_json(
    settings: Settings,
    path: Path,
    found: Statement,
    backbone: NodeSpeed,
    assumed: Sequence[str],
    does_not_fit: Sequence[str],
) -> dict[str, Any]:
    """The result that scripts rely on. Bytes, seconds, bytes a second; shares sum to 1 where there are experts."""
    needs, prediction = found.needs, found.prediction
    left, left_bytes = found.left()
    return {
        "model": {
            "name": settings.model or DEMO_NAME,
            "path": str(path),
            "architecture": needs.architecture,
            "layers": needs.layers,
            "expert_layers": len(needs.expert_bytes),
            "experts": needs.experts,
            "chosen": sum(needs.chosen.values()),
            "bytes": needs.nbytes,
            "dense_bytes": needs.dense_bytes,
            "dense_read_bytes": needs.dense_read_bytes,
            "expert_bytes": needs.all_expert_bytes,
            "context": needs.context,
            "kv_bytes": needs.kv_bytes,
        },
        "backbone": {
            "bytes": needs.dense_bytes + needs.kv_bytes,
            "bytes_per_s": backbone.bytes_per_s,
            "experts": left,
            "expert_bytes": left_bytes,
            "share": prediction.shares[BACKBONE],
        },
        "nodes": [_node(found, node) for node in found.nodes],
        "token": {
            "seconds": prediction.token_s,
            "dense": prediction.dense_s,
            "wire": prediction.wire_s,
            "straggler": prediction.straggler_s,
        },
        "fits": not does_not_fit,
        "does_not_fit": list(does_not_fit),
        "shortfalls": [
            {
                "class": short.numeric_class,
                "experts": short.experts,
                "bytes": short.nbytes,
                "workers": list(short.workers),
                "memory_bytes": short.memory_bytes,
                "more_each_bytes": short.more_each_bytes,
                "more_on_one_bytes": short.more_on_one_bytes,
            }
            for short in (found.plan.shortfalls if found.nodes else ())
        ],
        "assumed": list(assumed),
    }


def _node(found: Statement, node: Node) -> dict[str, Any]:
    experts, nbytes = found.held(node.name)
    return {
        "name": node.name,
        "backend": node.backend or None,
        "class": node.numeric_class,
        "memory_bytes": node.memory_bytes,
        "bytes_per_s": node.bytes_per_s,
        "latency_s": node.latency_s,
        "wire_bytes_per_s": None if math.isinf(node.wire_bytes_per_s) else node.wire_bytes_per_s,
        "experts": experts,
        "bytes": nbytes,
        "bytes_to_send": 0 if node.maps_file else found.plan.moves[node.name],
        "share": found.prediction.shares[node.name],
    }


def as_text(
    settings: Settings,
    found: Statement,
    backbone: NodeSpeed,
    assumed: Sequence[str],
    does_not_fit: Sequence[str],
) -> str:
    """The plan for people: the model, a row a node, a token's time, what does not fit, and what is assumed."""
    needs, token = found.needs, found.prediction
    lines = [
        f"model {Path(settings.model or DEMO_NAME).name} ({needs.architecture}): {needs.layers} layers, "
        f"dense {size_text(needs.dense_bytes)}, {_experts(found)}, "
        f"keys and values of {needs.context} tokens {size_text(needs.kv_bytes)}"
    ]
    rows: list[tuple[str, ...]] = [COLUMNS]
    for node in found.nodes:
        experts, nbytes = found.held(node.name)
        rows.append(
            (
                node.name,
                node.numeric_class,
                f"{node.bytes_per_s / 1e9:.2f}" if node.bytes_per_s else "?",
                size_text(node.memory_bytes) if node.memory_bytes else "no bound",
                size_text(nbytes),
                str(experts),
                f"{token.shares[node.name]:.1%}",
                "nothing" if node.maps_file else size_text(found.plan.moves[node.name]),
            )
        )
    own = size_text(needs.dense_bytes + needs.kv_bytes)
    speed, share = f"{backbone.bytes_per_s / 1e9:.2f}", f"{token.shares[BACKBONE]:.1%}"
    rows.append((BACKBONE, _class_of(settings.backend, settings), speed, "", own, str(found.left()[0]), share, ""))
    lines += [table(rows), ""]
    rate = f"{1 / token.token_s:.1f} tokens/s" if token.token_s else "no time"
    lines.append(
        f"predicted: a token takes {_time(token.token_s)} ({rate}): dense {_time(token.dense_s)}, "
        f"wire {_time(token.wire_s)}, straggler {_time(token.straggler_s)}"
    )
    if not needs.expert_bytes:
        lines.append("a dense model: workers have nothing to do")
    elif not found.nodes:
        lines.append("no workers: the backbone computes all experts; ask for some with --workers or --node")
    lines += [f"does not fit: {text}" for text in does_not_fit] or ["everything fits"]
    return "\n".join([*lines, *(f"assumed: {text}" for text in assumed)])


def _experts(found: Statement) -> str:
    needs = found.needs
    if not needs.expert_bytes:
        return "no experts"
    counts = sorted({(needs.chosen[layer], len(sizes)) for layer, sizes in needs.expert_bytes.items()})
    each = " or ".join(f"{chosen} of {count}" for chosen, count in counts)
    return f"{needs.experts} experts {size_text(needs.all_expert_bytes)} ({each} a token and layer)"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
