"""What there is to watch, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..results import Result

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "expertswarm_"


class _Live(Collector):
    def __init__(self, live: Result) -> None:
        self._live = live

    def collect(self) -> Iterator[Metric]:
        counts, load, workers = self._live["counts"], self._live["load"], self._live["workers"]
        answers = CounterMetricFamily(f"{PREFIX}answers", "Answers that ended, by why.", labels=["stop"])
        for stop in ("eos", "stop", "limit", "length", "cancelled", "failed"):
            answers.add_metric([stop], counts["answers"].get(stop, 0))
        yield answers
        tokens = CounterMetricFamily(f"{PREFIX}tokens", "Tokens of answers that ended.", labels=["kind"])
        for kind in ("prompt", "cached", "answer"):
            tokens.add_metric([kind], counts[f"{kind}_tokens"])
        yield tokens
        yield CounterMetricFamily(f"{PREFIX}refused", "Requests refused since the queue was full.", counts["refused"])
        yield GaugeMetricFamily(f"{PREFIX}running", "Answers under way.", load["running"])
        yield GaugeMetricFamily(f"{PREFIX}waiting", "Requests that wait for their turn.", load["waiting"])
        yield GaugeMetricFamily(f"{PREFIX}kept_sequences", "Sequences kept for prompts that begin alike.", load["kept"])
        yield CounterMetricFamily(
            f"{PREFIX}calls_computed_locally",
            "Expert calls that the backbone computed because no worker did.",
            self._live["computed_locally"] or 0,
        )
        named = {
            "calls": "Calls answered.",
            "rows": "Rows computed.",
            "failures": "Times it was lost, or found to be wrong.",
            "audits": "Answers of it that were computed again.",
            "audits_failed": "Of those, answers that were wrong.",
        }
        for name, text in named.items():
            family = CounterMetricFamily(f"{PREFIX}worker_{name}", text, labels=["worker"])
            for worker in workers:
                family.add_metric([worker["name"]], worker["failed" if name == "failures" else name])
            yield family
        seconds = CounterMetricFamily(f"{PREFIX}worker_seconds", "Seconds that it computed.", labels=["worker"])
        serving = GaugeMetricFamily(f"{PREFIX}worker_serving", "1 while it takes calls.", labels=["worker"])
        for worker in workers:
            seconds.add_metric([worker["name"]], worker["seconds"])
            serving.add_metric([worker["name"]], worker["state"] == "serving")
        yield from (seconds, serving)


def exposition(live: Result) -> bytes:
    """The text for what a server, its load and its workers are now."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Live(live))
    return generate_latest(registry)
