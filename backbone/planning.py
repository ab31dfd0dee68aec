"""What a model asks of the machines there are, before any weight is read: who would hold what, and what a token takes.

Pure but for the headers that a bound model has read. Nodes come as values: named by an operator, or told by a swarm.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from archdefs import OPS, Step
from protocol.sizes import size_text

from .model import BoundModel
from .placement import Candidate, Key, Plan, place
from .prediction import LayerWork, NodeSpeed, Prediction, predict
from .weights import expert_bytes

CACHE_BYTES = {"f32": 4, "f16": 2}  #: of a value in the cache of keys and values
ROW_BYTES = {"f32": 4, "f16": 2}  #: of a value of a row on the wire


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """A model in numbers, from its headers."""

    architecture: str
    layers: int
    nbytes: int  #: of all tensors
    dense_bytes: int  #: of all that are no experts' and that a step uses
    dense_read_bytes: int  #: that the backbone reads of them for one token
    context: int  #: tokens
    kv_cache: str  #: "f32" or "f16"
    kv_bytes: int  #: of the keys and values of so many tokens
    expert_bytes: Mapping[int, Sequence[int]]  #: layer to bytes of each expert
    chosen: Mapping[int, int]  #: layer to the experts that a token asks for
    row_bytes: Mapping[int, tuple[int, int]]  #: layer to bytes of a row to a worker, and of one from it

    @property
    def experts(self) -> int:
        """Experts of all layers."""
        return sum(map(len, self.expert_bytes.values()))

    @property
    def all_expert_bytes(self) -> int:
        """Bytes of all experts."""
        return sum(map(sum, self.expert_bytes.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A worker that there is, or might be."""

    name: str
    numeric_class: str
    memory_bytes: int = 0  #: for experts; 0: no bound
    backend: str = ""
    bytes_per_s: float | None = None  #: of weights that its rows read; None: not known
    latency_s: float = 0.0  #: of a call there and back
    wire_bytes_per_s: float = math.inf
    maps_file: bool = False  #: it has the model's file: nothing is sent to it
    held: Mapping[int, Collection[int]] = field(default_factory=dict)  #: layer to experts that it has got already


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """Who would hold what, and what a token would take."""

    needs: Needs
    nodes: tuple[Node, ...]
    plan: Plan
    prediction: Prediction

    def held(self, node: str) -> tuple[int, int]:
        """Experts and bytes of a node."""
        layers = self.plan.holds[node]
        sizes = [self.needs.expert_bytes[layer][expert] for layer, experts in layers.items() for expert in experts]
        return len(sizes), sum(sizes)

    def does_not_fit(self, machine_bytes: int) -> list[str]:
        """Each thing that does not fit, in a line that says what would make it fit.

        `machine_bytes`: memory of the backbone's machine; 0: not known.
        """
        found = [self.plan.describe()] if self.nodes and self.plan.left_over else []
        needs, room = self.needs, machine_bytes - self.needs.dense_bytes
        if machine_bytes and needs.kv_bytes > room:
            what = (
                f"dense weights ({size_text(needs.dense_bytes)}) with keys and values of {needs.context} tokens "
                f"({size_text(needs.kv_bytes)}) do not fit the {size_text(machine_bytes)} of this machine"
            )
            tokens = max(0, room) * needs.context // needs.kv_bytes
            half = f", or -c {2 * tokens} with --kv-cache f16" if needs.kv_cache == "f32" else ""
            less = f"it takes at most -c {tokens}{half}" if tokens else "it takes a machine with more"
            found.append(f"{what}: {less}")
        return found

    def left(self) -> tuple[int, int]:
        """Experts that no node holds, and their bytes: the backbone's."""
        sizes = [
            self.needs.expert_bytes[la][expert] for la, experts in self.plan.left_over.items() for expert in experts
        ]
        return len(sizes), sum(sizes)


def needs_of(model: BoundModel, *, context: int, kv_cache: str, wire: str = "f32") -> Needs:
    """A model in numbers. `context`: tokens for which keys and values are kept, as `kv_cache` ("f32" or "f16").

    `wire`: in which of the two rows go to workers.
    """
    experts = {name for names in model.expert_tensors.values() for name in names.values()}
    dense = [step for step in model.program.steps if step.op != "experts"]
    tensors = model.gguf.tensors
    used = {name for step in dense for name in step.tensors.values()} - experts
    kept = sum(step.kept for step in model.program.steps)
    return Needs(
        architecture=model.definition.name,
        layers=len(model.program.layers),
        nbytes=sum(info.nbytes for info in tensors.values()),
        dense_bytes=sum(tensors[name].nbytes for name in used),
        dense_read_bytes=sum(_read_bytes(model, step) for step in dense),
        context=context,
        kv_cache=kv_cache,
        kv_bytes=kept * context * CACHE_BYTES[kv_cache],
        expert_bytes=expert_bytes(model),
        chosen={layer: _chosen(model, layer) for layer in model.expert_tensors},
        row_bytes={
            layer: (ROW_BYTES[wire] * tensors[names["gate"]].dims[0], ROW_BYTES[wire] * model.expert_width(layer))
            for layer, names in model.expert_tensors.items()
        },
    )


def _read_bytes(model: BoundModel, step: Step) -> int:
    """Bytes of weights that a step reads for one token: of a table it is one row, of all else the whole."""
    whole = sum(model.gguf.tensors[name].nbytes for name in step.tensors.values())
    if step.op == "embed":
        return whole // model.gguf.tensors[step.tensors["weight"]].dims[1]
    return whole


def _chosen(model: BoundModel, layer: int) -> int:
    """Experts that a token asks for in a layer: what was chosen last into the slot that its experts read."""
    counts = dict[int, int]()
    for step in model.program.layers[layer]:
        if step.op == "top_k":
            counts[step.outputs[0]] = int(step.constants["count"])  # type: ignore[arg-type]
        if step.op == "experts":
            at = [arg.name for arg in OPS["experts"].positional if arg.kind.is_register].index("w")
            return counts[step.inputs[at]]
    raise AssertionError(f"layer {layer} has no experts")


def layer_work(needs: Needs, usage: Mapping[Key, int] | None) -> dict[int, LayerWork]:
    """What a row asks of each layer's experts. `usage`: rows of each (layer, expert) so far."""
    return {
        layer: LayerWork(
            expert_bytes=tuple(sizes),
            chosen=needs.chosen[layer],
            row_bytes=needs.row_bytes[layer][0],
            result_bytes=needs.row_bytes[layer][1],
            usage=None if usage is None else tuple(usage.get((layer, e), 0) for e in range(len(sizes))),
        )
        for layer, sizes in needs.expert_bytes.items()
    }


def state(
    needs: Needs, nodes: Sequence[Node], backbone: NodeSpeed, *, usage: Mapping[Key, int] | None = None
) -> Statement:
    """Place the experts on these nodes and predict a token. A node of unknown speed counts as the median of the others,
    and where none is known, as the backbone. `usage`: rows of each (layer, expert) so far.
    """
    known = [node.bytes_per_s for node in nodes if node.bytes_per_s]
    usual = statistics.median(known) if known else backbone.bytes_per_s
    candidates = [
        Candidate(
            name=node.name,
            memory_bytes=node.memory_bytes,
            # A copy costs nothing where the file is mapped; one that is sent has to be asked for, by a bound.
            takes_copies=node.maps_file or node.memory_bytes > 0,
            numeric_class=node.numeric_class,
            speed=node.bytes_per_s or usual,
            held=node.held,
        )
        for node in nodes
    ]
    plan = place(needs.expert_bytes, candidates, usage=usage)
    layers = layer_work(needs, usage)
    speeds = [
        NodeSpeed(
            name=node.name,
            bytes_per_s=node.bytes_per_s or usual,
            latency_s=node.latency_s,
            wire_bytes_per_s=node.wire_bytes_per_s,
        )
        for node in nodes
    ]
    prediction = predict(layers, plan.holds, speeds, dense_bytes=needs.dense_read_bytes, backbone=backbone)
    return Statement(needs=needs, nodes=tuple(nodes), plan=plan, prediction=prediction)
