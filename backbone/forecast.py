"""Of a server: what a token takes where one answer is made alone, as it was and as it is predicted."""

from __future__ import annotations

from typing import Any

from kernels.cores import usable_cores

from .assumed import LOCAL_CALL_S, NETWORK_BYTES_PER_S, NETWORK_CALL_S, speed_of
from .clock import Clock
from .planning import layer_work, needs_of
from .prediction import BACKBONE, Actual, NodeSpeed, TokenTime, predict
from .session import Session


class TokenTimes:
    """Steps of one row are timed by `clock`; `add` says how long each took in all."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.tokens, self.seconds = 0, 0.0

    def add(self, seconds: float) -> None:
        """A step of one row took so long."""
        self.tokens += 1
        self.seconds += seconds

    def actual(self) -> Actual | None:
        """The mean of what was timed."""
        return Actual.of(self.clock, self.tokens, self.seconds) if self.tokens else None


class Forecast:
    """`read_bytes_per_s`: what this machine's memory gives to a plain read."""

    def __init__(self, session: Session, read_bytes_per_s: float) -> None:
        settings, cores = session.settings, session.settings.threads or usable_cores()
        self._session, self._core_bytes_per_s = session, read_bytes_per_s / usable_cores()
        self._needs = needs_of(
            session.model, context=session.engine.context, kv_cache=settings.kv_cache, wire=settings.wire
        )
        own = speed_of(session.model.backend.name, self._core_bytes_per_s, cores)
        self._backbone = NodeSpeed(name=BACKBONE, bytes_per_s=own)

    def predicted(self) -> TokenTime:
        """What a token takes with the workers that there are; one whose speed is not known counts as a core here."""
        swarm = self._session.swarm
        live = [] if swarm is None else swarm.live()
        nodes = [
            NodeSpeed(
                name=worker.name,
                bytes_per_s=worker.bytes_per_s or speed_of(worker.backend, self._core_bytes_per_s, 1),
                latency_s=LOCAL_CALL_S if worker.is_local else NETWORK_CALL_S,
                wire_bytes_per_s=float("inf") if worker.is_local else NETWORK_BYTES_PER_S,
            )
            for worker in live
        ]
        usage = swarm.usage if swarm is not None else None
        return predict(
            layer_work(self._needs, usage or None),
            {worker.name: worker.holds for worker in live},
            nodes,
            dense_bytes=self._needs.dense_read_bytes,
            backbone=self._backbone,
        )


def as_json(time: TokenTime | None) -> dict[str, Any] | None:
    """Seconds of a token and of its parts."""
    if time is None:
        return None
    parts = {"seconds": time.token_s, "dense": time.dense_s, "wire": time.wire_s, "straggler": time.straggler_s}
    return {name: round(value, 6) for name, value in parts.items()}
