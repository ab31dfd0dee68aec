"""What a server tells Prometheus of its workers."""

from __future__ import annotations

from backbone.server.metrics import exposition

WORKER = {"name": "w", "calls": 3, "rows": 7, "audits": 2, "audits_failed": 1, "seconds": 0.5, "state": "lost"}
LIVE = {
    "counts": {"answers": {"eos": 4}, "prompt_tokens": 1, "cached_tokens": 0, "answer_tokens": 2, "refused": 0},
    "load": {"running": 0, "waiting": 0, "kept": 1},
    "computed_locally": 5,
}


def test_all_failures_count_and_not_only_those_that_are_kept() -> None:
    text = exposition(LIVE | {"workers": [WORKER | {"failed": 20, "failures": ["it hung"] * 8}]}).decode()
    assert 'expertswarm_worker_failures_total{worker="w"} 20.0' in text
    assert 'expertswarm_worker_audits_failed_total{worker="w"} 1.0' in text
    assert 'expertswarm_worker_serving{worker="w"} 0.0' in text
