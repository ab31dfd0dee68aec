"""A model's name to its file: a path, an Ollama `name:tag`, or a Hugging Face `org/repo` in the local caches.

Nothing is fetched. Names in manifests are foreign: a blob is only ever looked for by a digest of 64 hexadecimal digits.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from .errors import UsageError

DEMO = Path(__file__).parent / "demo" / "verse-moe-q4_k_m.gguf"
DEMO_NAME = "demo"
OLLAMA_SERVICE = Path("/usr/share/ollama/.ollama/models")  # of an Ollama that runs as a system service
MAX_MANIFEST_BYTES = 1 << 20
MAX_LISTED = 40
MAX_PARTS = 999  # of a split model, for listing
_MODEL_LAYER = "application/vnd.ollama.image.model"
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})\Z")
_NAME_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalModel:
    """A model in a local cache. `sha256` where the cache itself names content by it."""

    name: str
    path: Path
    origin: str  #: "ollama" or "huggingface"
    sha256: str | None


def resolve_model(name: str, environ: Mapping[str, str] = os.environ) -> Path:
    """The (first) file of a model. UsageError lists the places looked at, or the files to choose from."""
    if name in ("", DEMO_NAME):
        return DEMO
    if name.startswith("~/"):
        name = str(home_folder(environ) / name[2:])
    path = Path(name)
    if _is_file(path):
        return path
    if _is_dir(path) and (models := _ggufs(path)):
        return _only(path, models, str(path), "")
    ollama, hugging_face = _ollama_homes(environ), _hugging_face_homes(environ)
    for home in ollama:
        if (found := _in_ollama(home, name)) is not None:
            return found
    for hub in hugging_face:
        if (found := _in_hugging_face(hub, name)) is not None:
            return found
    raise UsageError(_not_found(name, path, [*ollama, *hugging_face], environ))


def list_models(environ: Mapping[str, str] = os.environ) -> list[LocalModel]:
    """Models in the local caches, by name. What cannot be read is left out: it is not ours to judge here."""
    found = list[LocalModel]()
    for home in _ollama_homes(environ):
        found += _list_ollama(home)
    for hub in _hugging_face_homes(environ):
        found += _list_hugging_face(hub)
    return sorted(found, key=lambda m: m.name)


def content_sha256(path: Path) -> str | None:
    """The sha256 of a file that its content-addressed store already names; None elsewhere."""
    try:
        real = path.resolve()
    except (OSError, RuntimeError):  # RuntimeError: symbolic links in a circle
        return None
    store = real.parent.parent
    if real.parent.name != "blobs":
        return None
    if (match := _DIGEST.match(real.name)) is not None and _is_dir(store / "manifests"):
        return match[1]
    if re.fullmatch(r"[0-9a-f]{64}", real.name) and _is_dir(store / "snapshots"):
        return real.name  # Hugging Face names large files by the sha256 of their content
    return None


def split_parts(path: Path) -> list[Path]:
    """The parts of a split model by its first one's name; only the file itself where it is whole."""
    split = _SPLIT.match(path.name)
    if split is None or not 1 <= int(split[3]) <= MAX_PARTS:
        return [path]
    return [path.with_name(f"{split[1]}-{i:05}-of-{split[3]}.gguf") for i in range(1, int(split[3]) + 1)]


def home_folder(environ: Mapping[str, str]) -> Path:
    """The user's home; a folder that is not there for a user without one."""
    try:
        return Path(environ.get("HOME") or Path.home())
    except RuntimeError:
        return Path("/nonexistent")


# A folder that may not be searched, or a name that is too long, holds nothing for us; pathlib raises for both.


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False


def _is_dir(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False


# ---- Ollama


def _ollama_homes(environ: Mapping[str, str]) -> list[Path]:
    if environ.get("OLLAMA_MODELS"):
        return [_folder(environ["OLLAMA_MODELS"], environ)]
    return [home_folder(environ) / ".ollama" / "models", OLLAMA_SERVICE]


def _folder(text: str, environ: Mapping[str, str]) -> Path:
    return home_folder(environ) / text[2:] if text.startswith("~/") else Path(text)


def _in_ollama(home: Path, name: str) -> Path | None:
    base, _, tag = name.partition(":")
    parts = base.split("/")
    tag = tag or "latest"
    if not all(_NAME_PART.match(part) for part in (*parts, tag)) or len(parts) > 3:
        return None
    defaults = ["registry.ollama.ai", "library"]
    manifest = home.joinpath("manifests", *defaults[: 3 - len(parts)], *parts, tag)
    if not _is_file(manifest):
        return None
    return _blob(home, manifest, _manifest(manifest))


def _manifest(path: Path) -> Any:
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise UsageError(f"{path}: larger than {MAX_MANIFEST_BYTES} bytes; this is no Ollama manifest")
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise UsageError(f"{path}: the Ollama manifest is no JSON; pull the model again") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None


def _blob(home: Path, manifest: Path, content: Any) -> Path:
    layers = content.get("layers") if isinstance(content, dict) else None
    digests = [
        layer.get("digest")
        for layer in (layers if isinstance(layers, list) else [])
        if isinstance(layer, dict) and layer.get("mediaType") == _MODEL_LAYER
    ]
    match = _DIGEST.match(digests[0]) if len(digests) == 1 and isinstance(digests[0], str) else None
    if match is None:
        raise UsageError(f"{manifest}: the Ollama manifest names no model with a sha256 digest; pull the model again")
    path = home / "blobs" / f"sha256-{match[1]}"
    if not _is_file(path):
        raise UsageError(f"{manifest}: its model {path} is missing; pull the model again")
    return path


def _list_ollama(home: Path) -> Iterator[LocalModel]:
    manifests = home / "manifests"
    for path in sorted(manifests.glob("*/*/*/*")) if _is_dir(manifests) else ():
        if not _is_file(path):  # a pipe would be waited for
            continue
        host, space, model, tag = path.relative_to(manifests).parts
        prefix = "" if (host, space) == ("registry.ollama.ai", "library") else f"{space}/"
        prefix = prefix if host == "registry.ollama.ai" else f"{host}/{prefix}"
        try:
            blob = _blob(home, path, _manifest(path))
        except UsageError:
            continue
        yield LocalModel(name=f"{prefix}{model}:{tag}", path=blob, origin="ollama", sha256=content_sha256(blob))


# ---- Hugging Face


def _hugging_face_homes(environ: Mapping[str, str]) -> list[Path]:
    if environ.get("HF_HUB_CACHE"):
        return [_folder(environ["HF_HUB_CACHE"], environ)]
    if environ.get("HF_HOME"):
        return [_folder(environ["HF_HOME"], environ) / "hub"]
    cache = environ.get("XDG_CACHE_HOME") or home_folder(environ) / ".cache"
    return [Path(cache) / "huggingface" / "hub"]


def _snapshot(repo: Path) -> Path | None:
    """The folder of the commit that `main` means, else the newest one."""
    ref = repo / "refs" / "main"
    if _is_file(ref) and ref.stat().st_size < 200:
        with contextlib.suppress(OSError):
            commit = ref.read_text(encoding="utf-8", errors="replace").strip()
            if re.fullmatch(r"[0-9a-zA-Z]+", commit) and _is_dir(repo / "snapshots" / commit):
                return repo / "snapshots" / commit
    snapshots = [p for p in (repo / "snapshots").glob("*") if _is_dir(p)]
    return max(snapshots, key=lambda p: p.stat().st_mtime, default=None)


def _in_hugging_face(hub: Path, name: str) -> Path | None:
    base, _, choice = name.partition(":")
    parts = base.split("/")
    if len(parts) != 2 or not all(_NAME_PART.match(part) for part in parts):
        return None
    repo = hub / f"models--{parts[0]}--{parts[1]}"
    if not _is_dir(repo):
        return None
    snapshot = _snapshot(repo)
    if snapshot is None:
        raise UsageError(f"{repo}: holds no snapshot; download the model again")
    return _only(snapshot, _ggufs(snapshot), base, choice)


def _list_hugging_face(hub: Path) -> Iterator[LocalModel]:
    for repo in sorted(hub.glob("models--*--*")) if _is_dir(hub) else ():
        _, *parts = repo.name.split("--")
        snapshot = _snapshot(repo)
        if len(parts) != 2 or snapshot is None:
            continue
        for path in _ggufs(snapshot):
            name = f"{parts[0]}/{parts[1]}:{path.relative_to(snapshot).as_posix()}"
            yield LocalModel(name=name, path=path, origin="huggingface", sha256=content_sha256(path))


# ---- choosing


def _ggufs(folder: Path) -> list[Path]:
    """Models in a folder and two levels below: a split one by its first part, no image projectors."""
    found = []
    for path in sorted(path for depth in ("", "*/", "*/*/") for path in folder.glob(f"{depth}*.gguf")):
        split = _SPLIT.match(path.name)
        if _is_file(path) and "mmproj" not in path.name.lower() and (split is None or int(split[2]) == 1):
            found.append(path)
    return found


def _only(folder: Path, models: list[Path], name: str, choice: str) -> Path:
    """The only model, or the one chosen: by its whole name below the folder, or by a part of it that no other has."""
    if not models:
        raise UsageError(f"{name}: {folder} holds no .gguf file")
    names = {path.relative_to(folder).as_posix(): path for path in models}
    if choice in names:
        return names[choice]
    chosen = {shown: path for shown, path in names.items() if choice.lower() in shown.lower()}
    exact = [path for path in models if path.name == choice]
    if len(exact) == 1 or len(chosen) == 1:
        return (exact or list(chosen.values()))[0]
    offered = list((chosen or names).items())
    listed = ", ".join(f"{shown} ({_gigabytes(path)})" for shown, path in offered[:MAX_LISTED])
    more = f" and {len(offered) - MAX_LISTED} more" if len(offered) > MAX_LISTED else ""
    how = "name one" if _is_dir(Path(name)) else f"choose one as {name}:FILE, or by a part of its name"
    what = "several models" if chosen else f"no model {choice!r}"
    raise UsageError(f"{name}: holds {what}: {listed}{more}; {how}")


def _gigabytes(path: Path) -> str:
    return f"{sum(part.stat().st_size for part in split_parts(path) if _is_file(part)) / 1e9:.2f} GB"


def _not_found(name: str, path: Path, places: list[Path], environ: Mapping[str, str]) -> str:
    known = [model.name for model in list_models(environ)]
    near = get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    here = f"{path.absolute()}{' (a folder without .gguf files)' if _is_dir(path) else ''}"
    looked = ", ".join([here, *(f"{place}{'' if _is_dir(place) else ' (no such folder)'}" for place in places)])
    return f"no model {name!r}{hint}; looked at {looked}. Nothing is downloaded: fetch it first, or give a GGUF file"
