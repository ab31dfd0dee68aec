"""Knobs: which source wins, what is refused and where, and that the example file is the truth."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backbone.errors import UsageError
from backbone.knobs import BY_NAME, KNOBS, Knob
from backbone.settings import Settings, add_flags, example, resolve, survey


def args(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_flags(parser, *BY_NAME)
    return parser.parse_args(argv)


def of_file(folder: Path, text: str | bytes) -> Path:
    path = folder / ".env"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def settings(folder: Path, text: str | bytes = "", *argv: str, **environ: str) -> Settings:
    return resolve(args(*argv), environ, of_file(folder, text))


def refusal(folder: Path, text: str | bytes = "", *argv: str, **environ: str) -> str:
    with pytest.raises(UsageError) as caught:
        settings(folder, text, *argv, **environ)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_flag_wins_over_the_environment_over_the_file_over_the_default(tmp_path: Path) -> None:
    file = "# ours\nEXPERTSWARM_TOP_K=3\n"
    found = settings(tmp_path, file, "--top-k", "1", EXPERTSWARM_TOP_K="2")["top_k"]
    assert (found.value, found.source) == (1, "flag --top-k")
    found = settings(tmp_path, file, EXPERTSWARM_TOP_K="2")["top_k"]
    assert (found.value, found.source) == (2, "environment")
    found = settings(tmp_path, file)["top_k"]
    assert (found.value, found.source) == (3, f"{tmp_path / '.env'}:2")
    found = settings(tmp_path)["top_k"]
    assert (found.value, found.source) == (0, "default")


def test_an_empty_variable_is_no_setting_and_an_empty_flag_is_one(tmp_path: Path) -> None:
    file = "EXPERTSWARM_MODEL=from-file"
    assert settings(tmp_path, file, EXPERTSWARM_MODEL="").model == "from-file"
    assert settings(tmp_path, file, "--model", "").model == ""


def test_the_current_folders_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_file(tmp_path, "EXPERTSWARM_PREDICT=7")
    monkeypatch.chdir(tmp_path)
    found = resolve(args(), {})["predict"]
    assert (found.value, found.source) == (7, ".env:1")


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("EXPERTSWARM_MODEL=a b", "a b"),
        ("  export EXPERTSWARM_MODEL = a  ", "a"),
        ("EXPERTSWARM_MODEL=a # note", "a"),
        ("EXPERTSWARM_MODEL=a#b", "a#b"),
        ("EXPERTSWARM_MODEL= # note", ""),
        ("EXPERTSWARM_MODEL='a # b' # note", "a # b"),
        ('EXPERTSWARM_MODEL="a\'b"', "a'b"),
        ("EXPERTSWARM_MODEL=a=b", "a=b"),
        ("EXPERTSWARM_MODEL=a\r", "a"),
        ("EXPERTSWARM_MODEL=a\x0cb", "a\x0cb"),
        ("\ufeffEXPERTSWARM_MODEL=a", "a"),
        ("EXPERTSWARM_MODEL=a\nEXPERTSWARM_MODEL=b", "b"),
        ("OTHER=1\nnonsense\n#EXPERTSWARM_MODEL=a\n\xff", ""),
    ],
)
def test_lines_of_a_settings_file(tmp_path: Path, line: str, value: str) -> None:
    assert settings(tmp_path, line).model == value


@pytest.mark.parametrize(
    ("line", "clause"),
    [
        ("EXPERTSWARM_TOP_K 40", "has no '='"),
        ("EXPERTSWARM_MODEL='a", "no closing"),
        ("EXPERTSWARM_MODEL='a'b", "text after the closing quote"),
        ("EXPERTSWARM_TOP_P=2", "out of range; from 0 to 1 is allowed"),
        ("EXPERTSWARM_TOP_K=many", "'many' is not a whole number"),
        ("EXPERTSWARM_TOPK=1", "did you mean EXPERTSWARM_TOP_K?"),
    ],
)
def test_a_bad_line_is_refused_with_its_place(tmp_path: Path, line: str, clause: str) -> None:
    message = refusal(tmp_path, f"# first\n{line}\n")
    assert message.startswith(f"{tmp_path / '.env'}:2: ")
    assert clause in message


def test_a_file_too_large_or_no_file_at_all(tmp_path: Path) -> None:
    assert "no settings file" in refusal(tmp_path, b"#" * ((1 << 20) + 1))
    assert resolve(args(), {}, tmp_path / "absent").predict == 128
    (tmp_path / "folder").mkdir()
    assert resolve(args(), {}, tmp_path / "folder").predict == 128


def test_a_file_that_cannot_be_read_is_a_problem(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: File name too long"):
        resolve(args(), {}, tmp_path / ("x" * 300))


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "101", "", "0,5", " "])
def test_numbers_that_no_temperature_has(tmp_path: Path, text: str) -> None:
    assert refusal(tmp_path, "", "--temp", text).startswith("--temperature: ")


def test_bounds_are_shown_in_full_and_hold_at_both_ends(tmp_path: Path) -> None:
    assert settings(tmp_path, "", "--seed", str((1 << 63) - 1)).seed == (1 << 63) - 1
    assert refusal(tmp_path, "", "--seed", str(1 << 63)).endswith("from 0 to 9223372036854775807 is allowed")
    assert "\n" not in refusal(tmp_path, EXPERTSWARM_SEED="-5\n")


def test_unknown_variables_are_refused_and_others_left_alone(tmp_path: Path) -> None:
    assert refusal(tmp_path, EXPERTSWARM_MODLE="x") == (
        "environment: no setting EXPERTSWARM_MODLE; did you mean EXPERTSWARM_MODEL?"
    )
    assert "there are EXPERTSWARM_ACCUMULATION, EXPERTSWARM_ACTIVATIONS, EXPERTSWARM_ADVERTISE" in refusal(
        tmp_path, EXPERTSWARM_ZZZZZZZZZZZZZZ="x"
    )
    assert settings(tmp_path, EXPERTSWAR="x", PATH="y").model == ""


def test_a_survey_goes_on_after_a_problem(tmp_path: Path) -> None:
    file = of_file(tmp_path, "EXPERTSWARM_TOP_K=x\nEXPERTSWARM_PREDICT=5\nEXPERTSWARM_NIX=1\n")
    found, problems = survey(args("--min-p", "7"), {}, file)
    assert [p.split(": ")[0] for p in problems] == [f"{file}:3", f"{file}:1", "--min-p"]
    assert (found.predict, found.top_k, found.min_p) == (5, 0, 0.0)


def test_the_example_with_every_line_uncommented_is_the_defaults(tmp_path: Path) -> None:
    lines = [line.removeprefix("#") if line.startswith("#EXPERTSWARM_") else line for line in example().splitlines()]
    found = settings(tmp_path, "\n".join(lines))
    for knob in KNOBS:
        assert found[knob.name].value == knob.default, knob.name
        assert f"\n#{knob.variable}=" in example()
        assert knob.help in example()
    assert settings(tmp_path, example())["predict"].source == "default"


def test_choices_are_named(tmp_path: Path) -> None:
    assert settings(tmp_path, "", "--activations", "i16").activations == "i16"
    assert refusal(tmp_path, "", "--activations", "i8") == "--activations: 'i8' is not one of f32, i16"
    assert refusal(tmp_path, "EXPERTSWARM_ACTIVATIONS=F32").endswith("'F32' is not one of f32, i16")
    assert settings(tmp_path, "EXPERTSWARM_KV_CACHE=f16").kv_cache == "f16"
    assert refusal(tmp_path, "", "--kv-cache", "q8_0") == "--kv-cache: 'q8_0' is not one of f32, f16"
    assert settings(tmp_path, "EXPERTSWARM_ACCUMULATION=f16").accumulation == "f16"
    assert refusal(tmp_path, "", "--accumulation", "i8") == "--accumulation: 'i8' is not one of f32, f16"


def test_the_example_says_what_a_cache_of_half_the_size_costs() -> None:
    assert (
        "\n# dtype in which keys and values are kept: f32, or f16, which takes half the memory and is less precise"
        " (--kv-cache)\n#EXPERTSWARM_KV_CACHE=f32\n" in example()
    )


def test_threads_have_a_bound(tmp_path: Path) -> None:
    assert settings(tmp_path).threads == 0
    assert settings(tmp_path, EXPERTSWARM_THREADS="1024").threads == 1024
    assert refusal(tmp_path, "", "--threads", "1025") == "--threads: 1025 is out of range; from 0 to 1024 is allowed"
    assert refusal(tmp_path, "", "--threads", "all") == "--threads: 'all' is not a whole number"


def test_a_text_that_is_no_size_is_refused(tmp_path: Path) -> None:
    assert settings(tmp_path, "", "--worker-memory", "1.5G").worker_memory == 1_500_000_000
    assert refusal(tmp_path, "", "--worker-memory", "much") == (
        "--worker-memory: 'much' is not a size such as 800M or 2GiB"
    )


@given(st.sampled_from(KNOBS), st.text(max_size=20))
def test_any_text_is_a_value_in_range_or_one_line(known: Knob, text: str) -> None:
    try:
        value = known.parse(text, "here")
    except UsageError as error:
        assert str(error).startswith("here: ")
        assert len(str(error).splitlines()) == 1
    else:
        assert known.kind is str or known.least <= value <= known.most
        assert not known.choices or value in known.choices


def test_a_name_that_is_no_knob_is_an_attribute_error(tmp_path: Path) -> None:
    with pytest.raises(AttributeError, match="top_q"):
        _ = settings(tmp_path).top_q


def test_a_secret_has_no_flag_and_a_broker_is_checked_where_it_is_named(tmp_path: Path) -> None:
    assert settings(tmp_path, "EXPERTSWARM_MQTT_PASSWORD=x")["mqtt_password"].value == "x"
    assert [knob.name for knob in KNOBS if not knob.flags] == [knob.name for knob in KNOBS if knob.is_secret]
    assert settings(tmp_path, "", "--mqtt", "mqtts://swarm@box").mqtt == "mqtts://swarm@box"
    told = refusal(tmp_path, EXPERTSWARM_MQTT="mqtt://swarm:hidden@box")
    assert told == (
        "environment: EXPERTSWARM_MQTT: a URL is no place for a password; set EXPERTSWARM_MQTT_PASSWORD or name a "
        "password file"
    )
    assert survey(args(), {"EXPERTSWARM_MQTT": "mqtt://swarm:hidden@box"}, tmp_path / "none")[0].mqtt == ""
    assert "#EXPERTSWARM_MQTT_PASSWORD=\n" in example()
