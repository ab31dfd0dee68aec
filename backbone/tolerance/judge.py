"""From what a run found to levels that pass or do not. Pure.

A level's `state` is pass, fail, not fit for sensitive layers, too few positions, not available, or not asked for; its
`pass` is true for the first and the third, false for a fail, and null where nothing can be said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

import numpy as np

from . import measures
from .measures import F64
from .policy import Policy
from .runner import LEVELS, Found, unit_kind

TITLES = {
    1: "operations and experts against float64",
    2: "drift by layer",
    3: "logits",
    4: "decisions",
    5: "generation",
    6: "perplexity",
}
#: Bars of each level; of those marked "least" a value must not be below.
LEAST = frozenset({"top1_agreement", "routing_agreement"})
MOST_FLIPS = 1000  #: that a report lists
UNAVAILABLE, NOT_ASKED, FEW = "not available", "not asked for", "too few positions"
PASS, FAIL, NOT_SENSITIVE = "pass", "fail", "not fit for sensitive layers"


def judge(
    findings: Mapping[str, Found],
    levels: Sequence[int],
    policy: Policy,
    *,
    precisions: tuple[str, str],
    coarser: str,
    is_one_class: bool,
) -> dict[str, Found]:
    """Every level by its number. `precisions` of A and B; `coarser`: that by which both are judged together."""
    windows = [found for unit, found in findings.items() if unit_kind(unit) == "window" and found]
    makers = {
        1: lambda: _operations(findings),
        2: lambda: _drift(windows),
        3: lambda: _logits(windows),
        4: lambda: _decisions(windows),
        5: lambda: _generations(findings),
        6: lambda: _perplexity(windows),
    }
    told = dict[str, Found]()
    for level in LEVELS:
        level_found = makers[level]() if level in levels else None
        made: Found = {"title": TITLES[level], "identical": None, "bars": [], "found": level_found}
        if level_found is None:
            made |= {"state": UNAVAILABLE if level in levels else NOT_ASKED, "pass": None}
        else:
            made["identical"] = level_found.pop("identical")
            made |= _judged(level, made, policy, precisions, coarser, is_one_class=is_one_class)
        told[str(level)] = made
    return told


def _judged(
    level: int, made: Found, policy: Policy, precisions: tuple[str, str], coarser: str, *, is_one_class: bool
) -> Found:
    found = made["found"]
    sides = list(zip(("a", "b"), precisions, strict=True)) if level == 1 else [("", coarser)]
    bars = [bar for side, precision in sides for bar in _bars(found, side, policy.of(precision))]
    strict = [bar for side, _ in sides for bar in _bars(found, side, policy.of("f32"))]
    if is_one_class and made["identical"] is not None:
        bars.append(
            {"name": "identical", "value": bool(made["identical"]), "bar": True, "holds": bool(made["identical"])}
        )
    if level == 1:
        # The oracle promises no bits: it multiplies all rows at once, as its BLAS likes.
        for side, precision in sides:
            if precision != "f64" and (same := found["equals_wider"][side]) is not None:
                bars.append({"name": f"{side} same bits at every width", "value": same, "bar": True, "holds": same})
    few = level in (3, 4) and found["positions"] < policy.of(coarser)["least_positions"]
    if not bars:
        return {"bars": bars, "state": UNAVAILABLE, "pass": None}
    if not all(bar["holds"] for bar in bars):
        return {"bars": bars, "state": FAIL, "pass": False}
    if few:
        return {"bars": bars, "state": FEW, "pass": None}
    fit = all(bar["holds"] for bar in strict)
    return {"bars": bars, "state": PASS if fit else NOT_SENSITIVE, "pass": True}


def _bars(found: Found, side: str, bars: Mapping[str, float]) -> list[Found]:
    """What of `found["values"]` has a bar. `side`: whose values, where each side has its own."""
    told = list[Found]()
    for key, value in found["values"].items():
        owner, _, name = key.rpartition(" ")
        if owner != side or name not in bars:
            continue
        bar = bars[name]
        holds = value is not None and (value >= bar if name in LEAST else value <= bar)
        told.append({"name": key, "value": value, "bar": bar, "holds": bool(holds)})
    return told


# ---- level 1


def _worst(values: Sequence[float | None]) -> float | None:
    """The largest; None, which keeps no bar, where one was not finite."""
    known = [value for value in values if value is not None]
    return max(known) if known and len(known) == len(values) else None


def _operations(findings: Mapping[str, Found]) -> Found | None:
    cases = [found for unit, found in findings.items() if unit_kind(unit) == "operation"]
    values, equals_wider = dict[str, float | None](), dict[str, bool | None]()
    for side in ("a", "b"):
        for is_expert, name in ((True, "expert_relative_l2"), (False, "operation_relative_l2")):
            mine = [case[side] for case in cases if case["is_expert"] is is_expert and case[side] is not None]
            failed = any(f"{side}_failed" in case for case in cases if case["is_expert"] is is_expert)
            if mine or failed:
                values[f"{side} {name}"] = (
                    None if failed else _worst([w["worst"] for case in mine for w in case.values()])
                )
        widths = [width for case in cases if case[side] is not None for width in case[side].values()]
        equals_wider[side] = all(width["equals_wider"] for width in widths) if widths else None
    if not values:
        return None
    both = [case for case in cases if case["a"] is not None and case["b"] is not None]
    return {
        "values": values,
        "equals_wider": equals_wider,
        "identical": all(case["identical"] for case in both) if both else None,
        "cases": cases,
        "merging": findings.get("merging"),
    }


# ---- levels 2, 3, 4, 6


def _joined(windows: Sequence[Found], name: str) -> F64:
    return np.concatenate([np.asarray(found[name], np.float64) for found in windows]) if windows else np.empty(0)


def _drift(windows: Sequence[Found]) -> Found | None:
    windows = [found for found in windows if found["drift"]]
    if not windows:
        return None
    layers = sorted(map(int, windows[0]["drift"]))
    by_window = np.asarray([[found["drift"][str(layer)]["mean"] for layer in layers] for found in windows])
    fit = measures.growth([layer + 1 for layer in layers], by_window)
    return {
        "values": {"drift_relative_l2": float(by_window[:, -1].mean())},
        "identical": all(found["residuals_identical"] for found in windows),
        "layers": [
            {
                "layer": layer,
                "mean": float(by_window[:, i].mean()),
                "max": max(found["drift"][str(layer)]["max"] for found in windows),
            }
            for i, layer in enumerate(layers)
        ],
        "exponent": None if fit is None else asdict(fit),
    }


def _logits(windows: Sequence[Found]) -> Found | None:
    kl = _joined(windows, "kl")
    if not len(kl):
        return None
    figures = {name: measures.summary(_joined(windows, name)) for name in ("kl", "l_inf", "l2")}
    return {
        "values": {"mean_kl": figures["kl"]["mean"], "max_kl": figures["kl"]["max"]},
        "identical": all(found["identical"] == found["counted"] for found in windows),
        "positions": len(kl),
        **figures,
        "kl_histogram": measures.histogram(kl),
    }


def _decisions(windows: Sequence[Found]) -> Found | None:
    positions = sum(found["counted"] for found in windows)
    if not positions:
        return None
    flips = [{"window": i} | flip for i, found in enumerate(windows) for flip in found["flips"]]
    decisions, agreed = (sum(found[name] for found in windows) for name in ("decisions", "agreed"))
    routing = [{"window": i} | flip for i, found in enumerate(windows) for flip in found["routing_flips"]]
    values = {"top1_agreement": 1 - len(flips) / positions}
    if decisions:
        values["routing_agreement"] = agreed / decisions
    return {
        "values": values,
        "identical": not flips and agreed == decisions,
        "positions": positions,
        "flips": flips[:MOST_FLIPS],
        "flips_in_all": len(flips),
        "routing": {
            "decisions": decisions,
            "differing": decisions - agreed,
            "flips": routing[:MOST_FLIPS],
        },
    }


def _perplexity(windows: Sequence[Found]) -> Found | None:
    a, b = _joined(windows, "nll_a"), _joined(windows, "nll_b")
    if not len(a) or not len(b):
        return None
    mine, theirs, apart = measures.perplexity(a), measures.perplexity(b), measures.mean_of(b - a)
    return {
        "values": {"perplexity_difference": abs(apart.value)},
        "identical": bool(np.array_equal(a, b)),
        "tokens": len(a),
        "a": asdict(mine),
        "b": asdict(theirs),
        "log_ratio": asdict(apart),
    }


# ---- level 5


def _generations(findings: Mapping[str, Found]) -> Found | None:
    prompts = [found for unit, found in findings.items() if unit_kind(unit) == "generation" and found]
    if not prompts:
        return None
    diverged = [found["diverged"] for found in prompts if found["diverged"] is not None]
    return {
        "values": {"diverged_prompts": len(diverged) / len(prompts)},
        "identical": not diverged,
        "first_divergence": min(diverged, default=None),
        "prompts": prompts,
    }
