"""Policies: defaults, what a file changes, and what is wrong with one; verdicts by hand-made findings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from backbone.errors import UsageError
from backbone.tolerance.judge import judge
from backbone.tolerance.policy import Policy, coarser, load_policy


def test_the_defaults_are_the_contracts_bars() -> None:
    bars = load_policy(None).of("f32")
    assert bars["expert_relative_l2"] == 1e-5
    assert (bars["mean_kl"], bars["max_kl"], bars["top1_agreement"]) == (1e-6, 1e-3, 0.9999)
    assert bars["least_positions"] == 10_000
    assert load_policy(None).of("f16")["expert_relative_l2"] == 2e-3
    assert load_policy(None).of("f64") == bars


def test_a_file_takes_the_place_of_some_bars(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text("[f32]\nmean_kl = 0.5\n[i16]\nleast_positions = 7\n")
    policy, usual = load_policy(path), load_policy(None)
    assert policy.of("f32") == {**usual.of("f32"), "mean_kl": 0.5}
    assert policy.of("i16") == {**usual.of("i16"), "least_positions": 7}
    assert policy.source == str(path)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"[f32\n", "policy.toml: "),
        (b"\xff", "policy.toml: "),
        (b"[f23]\nmean_kl = 1\n", "no section 'f23'; did you mean 'f32'?"),
        (b"f32 = 3\n", "[f32] is no table"),
        (b"[f32]\nmean_ki = 1\n", "no bar 'mean_ki'; did you mean 'mean_kl'?"),
        (b"[f32]\nmean_kl = 'a'\n", "mean_kl: 'a' is no number"),
        (b"[f32]\nmean_kl = -1\n", "is no number from 0 to 1e+09"),
        (b"[f32]\nmean_kl = nan\n", "is no number from 0 to 1e+09"),
        (b"[f32]\nmean_kl = inf\n", "is no number from 0 to 1e+09"),
        (b"[f32]\nmean_kl = true\n", "is no number from 0 to 1e+09"),
        (b"[f32]\nmean_kl = 1" + b"0" * 400, "is no number from 0 to 1e+09"),
        (b"[f32]\nmean_kl = 1" + b"0" * 5000, "policy.toml: "),
        (b"#" * (1 << 20) + b"#", "larger than 1 MiB"),
    ],
)
def test_what_is_wrong_with_a_policy_is_told(tmp_path: Path, text: bytes, told: str) -> None:
    path = tmp_path / "policy.toml"
    path.write_bytes(text)
    with pytest.raises(UsageError) as caught:
        load_policy(path)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_policy_that_is_not_there() -> None:
    with pytest.raises(UsageError, match="--policy nowhere.toml: cannot be read"):
        load_policy(Path("nowhere.toml"))


def test_the_coarser_of_two() -> None:
    assert coarser("f64", "f32") == "f32"
    assert coarser("f16", "i16") == "f16"
    assert coarser("outside", "f16") == "outside"


# ---- verdicts


def a_window(**changes: Any) -> dict[str, Any]:
    """Findings of a window of four positions in which nothing differs."""
    zeros = [0.0] * 4
    return {
        "kl": zeros, "l_inf": zeros, "l2": zeros, "nll_a": [1.0] * 3, "nll_b": [1.0] * 3, "counted": 4, "identical": 4,
        "flips": [], "drift": {}, "residuals_identical": False, "decisions": 0, "agreed": 0, "routing_flips": [],
    } | changes  # fmt: skip


def verdicts(
    policy: Policy,
    precision: str = "f32",
    *,
    is_one_class: bool = False,
    levels: tuple[int, ...] = (2, 3, 4, 5, 6),
    **of: Any,
) -> dict[str, Any]:
    findings = {"window 1 of 1": a_window(**of)}
    return judge(findings, levels, policy, precisions=("f32", precision), coarser=precision, is_one_class=is_one_class)


@pytest.fixture
def policy(tmp_path: Path) -> Policy:
    path = tmp_path / "policy.toml"
    path.write_text("".join(f"[{kind}]\nleast_positions = 4\n" for kind in ("f32", "i16", "f16", "outside")))
    return load_policy(path)


def test_what_is_not_there_is_not_available_and_never_passed(policy: Policy) -> None:
    found = verdicts(policy, levels=(2, 3, 5))
    assert {number: level["state"] for number, level in found.items()} == {
        "1": "not asked for", "2": "not available", "3": "pass", "4": "not asked for", "5": "not available",
        "6": "not asked for",
    }  # fmt: skip
    assert [level["pass"] for level in found.values()] == [None, None, True, None, None, None]


def test_few_positions_say_nothing(policy: Policy) -> None:
    found = verdicts(load_policy(None))
    assert (found["3"]["state"], found["3"]["pass"]) == ("too few positions", None)
    assert (found["4"]["state"], found["4"]["pass"]) == ("too few positions", None)
    assert verdicts(load_policy(None), kl=[0.0, 0.0, 0.0, 1.0])["3"]["pass"] is False  # but a miss is one


def test_each_bar_fails_by_itself(policy: Policy) -> None:
    flip = {"position": 1, "a": 1, "b": 2, "margin_a": 0.1, "margin_b": 0.1}
    assert verdicts(policy, kl=[0.0, 0.0, 0.0, 2e-3])["3"]["pass"] is False
    assert verdicts(policy, flips=[flip])["4"]["pass"] is False
    assert verdicts(policy, decisions=100, agreed=99)["4"]["pass"] is False
    assert verdicts(policy, nll_b=[1.0, 1.0, 1.001])["6"]["pass"] is False
    far = {str(layer): {"mean": 2e-5, "max": 2e-5} for layer in range(3)}
    assert verdicts(policy, drift=far)["2"]["pass"] is False
    assert all(
        level["pass"]
        for number, level in verdicts(policy, drift={"0": {"mean": 1e-7, "max": 1e-7}}).items()
        if number in "2346"
    )


def test_a_coarser_side_is_not_fit_for_sensitive_layers(policy: Policy) -> None:
    found = verdicts(policy, "f16", kl=[1e-5] * 4)
    assert (found["3"]["state"], found["3"]["pass"]) == ("not fit for sensitive layers", True)
    assert verdicts(policy, "f16", kl=[1e-9] * 4)["3"]["state"] == "pass"
    assert verdicts(policy, "f16", kl=[1e-3] * 4)["3"]["state"] == "fail"


def test_sides_of_one_class_have_to_be_identical(policy: Policy) -> None:
    assert verdicts(policy, is_one_class=True)["3"]["pass"] is True
    found = verdicts(policy, is_one_class=True, identical=3)["3"]
    assert found["pass"] is False
    assert [bar["name"] for bar in found["bars"] if not bar["holds"]] == ["identical"]
    assert verdicts(policy, identical=3)["3"]["pass"] is True
