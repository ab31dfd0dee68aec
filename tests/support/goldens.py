"""Golden cases of the architecture families: which there are, and where their model files come from."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from shared_data import GOLDEN, SHARED

from archdefs import Library, load_definition, load_library
from backbone.experts import LocalExperts
from backbone.model import Model, load_model
from kernels.interface import F32, I32, Options
from kernels.registry import make_backend

ARCHS = GOLDEN / "archs"
#: Families whose definitions a later change brings: their goldens must fail until then, and say so when they pass.
LATER = ("deepseek2", "gpt-oss", "qwen35moe", "qwen3next")
F32_BAR = 2e-4  #: largest absolute difference of logits; llama.cpp's own batch and single steps differ by up to 7e-5
GELU_TABLE_BAR = 1e-2  #: where llama.cpp rounded GELU to half precision


@dataclass(frozen=True)
class Golden:
    """One recorded run."""

    name: str

    @property
    def model_name(self) -> str:
        """The model file's name without its ending."""
        return self.name.removesuffix("-deq").removesuffix("-gelu32")

    @property
    def family(self) -> str:
        """The name before any size or quantisation."""
        return re.sub(r"(-k256)?(-Q.*)?$", "", self.model_name)

    @property
    def is_quantised(self) -> bool:
        """Whether the model file came from llama.cpp's quantiser."""
        return "-Q" in self.model_name

    def data(self) -> Any:
        """The recorded arrays."""
        with np.load(ARCHS / f"{self.name}.npz") as file:
            return dict(file)


def golden_params() -> list[Any]:
    """Every golden in the folder that an engine multiplying in F32 can be held to, as pytest parameters."""
    params = []
    for path in sorted(ARCHS.glob("*.npz")):
        golden = Golden(path.stem)
        if str(golden.data()["tolerance"]) == "int8-activations":
            continue
        marks: list[Any] = []
        if golden.is_quantised and quantised_file(golden.model_name) is None:
            marks.append(
                pytest.mark.skip(reason=f"{golden.model_name}.gguf is only in the larger golden set (../shared)")
            )
        elif golden.family in LATER:
            marks.append(pytest.mark.xfail(strict=True, reason=f"no definition of {golden.family} yet"))
        params.append(pytest.param(golden, id=golden.name, marks=marks))
    return params


def quantised_file(name: str) -> Path | None:
    """A quantised model file: in the repository, else in the larger set."""
    places = [ARCHS] if SHARED is None else [ARCHS, SHARED / "golden" / "archs"]
    return next((p for place in places if (p := place / f"{name}.gguf").is_file()), None)


def write_f32_models(folder: Path) -> None:
    """Write every F32 model and check that it came out byte for byte."""
    script = Path(__file__).with_name("make_arch_models.py")
    sums = [line.split() for line in (ARCHS / "SHA256SUMS").read_text().splitlines()]
    names = [name.removesuffix(".gguf") for _, name in sums]
    subprocess.run([sys.executable, str(script), str(folder), *names], check=True, capture_output=True, timeout=120)
    for digest, name in sums:
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest, name


def load(
    path: Path, library: Library | None = None, backend: str = "numpy", threads: int = 0, activations: str = "f32"
) -> Model:
    """A model on a backend, the reference unless another is named."""
    options = Options(threads=threads, activations=activations)
    return load_model(path, library or load_library(), make_backend(backend, options))


def relative_l2(ours: F32, theirs: F32) -> float:
    """How far apart logits are, as a part of them."""
    return float(np.linalg.norm(ours.astype(np.float64) - theirs) / np.linalg.norm(theirs.astype(np.float64)))


class Elsewhere:
    """Experts that this process has and pretends to ask others for: the program is left at each `experts`."""

    is_here = False
    busiest_ns = 0
    class_changes = ()
    doubts = 0

    def __init__(self, inner: LocalExperts) -> None:
        self._inner = inner
        self.asked: set[int] = set()

    def send(self, layer: int, x: F32, ids: I32) -> F32:
        """Computes at once."""
        self.asked.add(layer)
        return self._inner.send(layer, x, ids)

    def ready(self, ticket: F32) -> bool:
        """Never."""
        return False

    def wait(self, ticket: F32) -> F32:
        """The rows."""
        return ticket

    def abandon(self) -> None:
        """There is nothing to forget."""


def renamed(path: Path, name: str, folder: Path) -> tuple[Path, Library]:
    """A model with another architecture's name, metadata prefix and all, and a library with its definition alike."""
    reader = gguf.GGUFReader(path)
    old = reader.fields["general.architecture"].contents()
    out = folder / f"{path.stem}-{name}.gguf"
    writer = gguf.GGUFWriter(out, name)
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        kind = field.types[0]
        sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        key = f"{name}.{key.removeprefix(f'{old}.')}" if key.startswith(f"{old}.") else key
        writer.add_key_value(key, field.contents(), kind, sub_type=sub)
    for tensor in reader.tensors:
        is_plain = tensor.tensor_type in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16)
        writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=None if is_plain else tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    text = load_library().get(old).text.replace(f"arch {old}\n", f"arch {name}\n")
    (folder / f"{name}.archdef").write_text(text, encoding="utf-8")
    load_definition(folder / f"{name}.archdef")
    return out, load_library(folder)
