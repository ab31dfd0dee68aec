"""The plots of a report, drawn from its JSON alone. matplotlib comes with the extra `report`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

MISSING = "no plots: matplotlib is missing; pip install 'expertswarm[report]' and run 'backbone tolerance render'"


def draw(report: Mapping[str, Any], folder: Path) -> list[str]:
    """Draw what there is to draw; the names of the plots. ImportError without matplotlib."""
    import matplotlib as mpl  # imported here: it is an extra, and takes a second

    mpl.use("svg")
    # The same report gives the same file.
    mpl.rcParams.update({"svg.hashsalt": "expertswarm", "svg.fonttype": "none", "figure.figsize": (6.4, 4.0)})
    from matplotlib import pyplot

    found = {number: level["found"] for number, level in report["levels"].items()}
    makers = {"drift": ("2", _drift), "kl": ("3", _kl), "flips": ("4", _flips), "rows": ("1", _rows)}
    drawn = list[str]()
    for name, (level, make) in makers.items():
        path = folder / f"{name}.svg"
        path.unlink(missing_ok=True)
        if found[level] is None:
            continue
        figure, axes = pyplot.subplots(layout="constrained")
        if make(axes, found[level]):
            figure.savefig(path, metadata={"Date": None})
            drawn.append(name)
        pyplot.close(figure)
    return drawn


def _drift(axes: Any, found: Mapping[str, Any]) -> bool:
    layers = [each["layer"] + 1 for each in found["layers"]]
    means = [each["mean"] for each in found["layers"]]
    if not all(mean > 0 for mean in means):
        return False
    axes.loglog(layers, means, "o-", label="mean")
    axes.loglog(layers, [each["max"] for each in found["layers"]], ".:", label="max")
    axes.loglog(layers, [means[0] * (layer / layers[0]) ** 0.5 for layer in layers], "--", color="0.6", label="sqrt(L)")
    axes.loglog(layers, [means[0] * layer / layers[0] for layer in layers], ":", color="0.6", label="L")
    axes.set(xlabel="layer", ylabel="relative L2 of the residual")
    axes.legend()
    return True


def _kl(axes: Any, found: Mapping[str, Any]) -> bool:
    edges, counts = found["kl_histogram"]["edges"], found["kl_histogram"]["counts"]
    axes.stairs(counts, edges, fill=True)
    axes.set(xscale="log", xlabel="KL, nats (zero counts as the least)", ylabel="positions")
    return True


def _flips(axes: Any, found: Mapping[str, Any]) -> bool:
    if not found["flips"]:
        return False
    axes.loglog(
        [max(flip["margin_a"], 1e-12) for flip in found["flips"]],
        [max(flip["margin_b"], 1e-12) for flip in found["flips"]],
        ".",
    )
    axes.set(xlabel="A's margin", ylabel="B's margin")
    return True


def _rows(axes: Any, found: Mapping[str, Any]) -> bool:
    for case in found["cases"]:
        for side, style in (("a", ":"), ("b", "-")):
            if case[side] is not None:
                widths = sorted(case[side], key=int)
                worst = [max(case[side][width]["worst"] or 0.0, 1e-17) for width in widths]
                axes.loglog(list(map(int, widths)), worst, style, label=f"{side.upper()} {case['case'][:40]}")
    axes.set(xlabel="rows in a call", ylabel="worst row, relative L2 to float64")
    axes.legend(fontsize=5)
    return True
