"""Backends by name, and what they are asked to do."""

from __future__ import annotations

import pytest

from kernels import registry
from kernels.errors import BackendUnavailable
from kernels.interface import Options
from kernels.registry import make_backend


def test_a_factory_gets_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[Options]()

    def factory(options: Options) -> None:
        asked.append(options)

    monkeypatch.setattr(registry, "BACKENDS", {"far": factory})
    make_backend("far", Options(threads=3, activations="i16"))
    make_backend("far")
    assert asked == [Options(threads=3, activations="i16"), Options(threads=0, activations="f32")]


def test_numpy_has_one_thread_and_f32_alone() -> None:
    plain, asked = make_backend("numpy"), make_backend("numpy", Options(threads=7))
    assert getattr(asked, "threads", None) == 1
    assert asked.numeric_class == plain.numeric_class
    with pytest.raises(BackendUnavailable) as caught:
        make_backend("numpy", Options(activations="i16"))
    assert str(caught.value) == "numpy computes with f32 activations only; i16 needs --backend native"
    with pytest.raises(BackendUnavailable) as caught:
        make_backend("numpy", Options(kv_cache="f16"))
    assert str(caught.value) == "numpy keeps keys and values in f32; f16 needs --backend native"


def test_activations_that_nobody_has() -> None:
    with pytest.raises(BackendUnavailable, match="no activations 'i8'; there are f32, i16"):
        make_backend("numpy", Options(activations="i8"))


def test_a_cache_that_nobody_has() -> None:
    with pytest.raises(BackendUnavailable, match="no KV cache 'q8'; there are f32, f16"):
        make_backend("native", Options(kv_cache="q8"))


@pytest.mark.parametrize("asked", [Options(activations="i16"), Options(kv_cache="f16")])
def test_where_numpy_would_stand_in_it_is_not_asked_for_what_it_has_not(
    asked: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_a_compiler(options: Options) -> None:
        raise BackendUnavailable("native: there is no C compiler")

    monkeypatch.setattr(registry, "_native", without_a_compiler)
    with pytest.raises(BackendUnavailable, match="native: there is no C compiler"):
        make_backend("auto", asked)
    assert make_backend("auto").name == "numpy"
