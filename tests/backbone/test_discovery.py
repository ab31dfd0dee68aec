"""Names to files: paths, and caches laid out as Ollama and huggingface_hub lay them out, also by someone hostile."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from backbone import discovery
from backbone.discovery import DEMO, content_sha256, list_models, resolve_model, split_parts
from backbone.errors import UsageError

SHA = "0123456789abcdef" * 4
OTHER = "f" * 64
MODEL = "application/vnd.ollama.image.model"
COMMIT = "a" * 40


@pytest.fixture(autouse=True)
def _no_service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The machine's own Ollama has no part in this."""
    monkeypatch.setattr(discovery, "OLLAMA_SERVICE", tmp_path / "service")


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"HOME": str(tmp_path / "home")}


@pytest.fixture
def ollama(tmp_path: Path) -> Path:
    return tmp_path / "home" / ".ollama" / "models"


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    return tmp_path / "home" / ".cache" / "huggingface" / "hub"


def put(path: Path, content: bytes = b"GGUF") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def pull(home: Path, name: str, *, digest: Any = f"sha256:{SHA}", blob: bool = True) -> Path:
    """A model as `ollama pull` leaves it; `name` is host/space/model/tag."""
    layers = [
        {"mediaType": "application/vnd.ollama.image.license", "digest": f"sha256:{OTHER}", "size": 3},
        {"mediaType": MODEL, "digest": digest, "size": 4},
    ]
    put(home / "manifests" / name, json.dumps({"schemaVersion": 2, "layers": layers}).encode())
    path = home / "blobs" / f"sha256-{SHA}"
    return put(path) if blob else path


def download(hub: Path, repo: str, files: dict[str, str], commit: str = COMMIT, ref: str | None = None) -> Path:
    """A repository as huggingface_hub leaves it: name -> blob; a snapshot of links, and the commit of `main`."""
    folder = hub / f"models--{repo.replace('/', '--')}"
    for name, blob in files.items():
        put(folder / "blobs" / blob, blob.encode())
        link = folder / "snapshots" / commit / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(folder / "blobs" / blob, link.parent))
    put(folder / "refs" / "main", (commit if ref is None else ref).encode())
    return folder / "snapshots" / commit


def refusal(name: str, environ: dict[str, str]) -> str:
    with pytest.raises(UsageError) as caught:
        resolve_model(name, environ)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- paths


def test_the_demo_is_meant_by_no_name_and_by_its_own(environ: dict[str, str]) -> None:
    assert resolve_model("", environ) == resolve_model("demo", environ) == DEMO
    assert DEMO.is_file()


def test_a_path_wins_over_the_caches(tmp_path: Path, environ: dict[str, str], ollama: Path) -> None:
    pull(ollama, "registry.ollama.ai/library/m/latest")
    file = put(tmp_path / "m.gguf")
    assert resolve_model(str(file), environ) == file
    assert resolve_model("~/x.gguf", environ | {"HOME": str(put(tmp_path / "h" / "x.gguf").parent)}).name == "x.gguf"


def test_a_folder_means_its_only_model(tmp_path: Path, environ: dict[str, str]) -> None:
    folder = tmp_path / "models"
    one = put(folder / "sub" / "one-Q8_0.gguf")
    put(folder / "mmproj-one.gguf")
    put(folder / "one-mmproj-f16.gguf")
    put(folder / "readme.md")
    put(folder / "a" / "b" / "c" / "too-deep.gguf")
    assert resolve_model(str(folder), environ) == one
    put(folder / "two.gguf")
    message = refusal(str(folder), environ)
    assert "several models: sub/one-Q8_0.gguf (0.00 GB), two.gguf (0.00 GB); name one" in message


def test_a_folder_without_models_hides_no_cached_model(
    tmp_path: Path, environ: dict[str, str], ollama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    assert f"looked at {tmp_path / 'm'} (a folder without .gguf files), " in refusal("m", environ)
    assert (
        resolve_model(
            "m", environ | {"OLLAMA_MODELS": str(pull(ollama, "registry.ollama.ai/library/m/latest").parents[1])}
        )
        == ollama / "blobs" / f"sha256-{SHA}"
    )


def test_a_split_model_is_its_first_part(tmp_path: Path, environ: dict[str, str]) -> None:
    parts = [put(tmp_path / "s" / f"big-0000{i}-of-00003.gguf") for i in (1, 2, 3)]
    assert resolve_model(str(tmp_path / "s"), environ) == parts[0]
    assert split_parts(parts[0]) == parts
    assert split_parts(tmp_path / "whole.gguf") == [tmp_path / "whole.gguf"]
    endless = tmp_path / "x-00001-of-99999.gguf"
    assert split_parts(endless) == [endless]


@pytest.mark.parametrize(
    "name", ["x" * 300, "a\0b", "~nobody-there/x", "..", "../../etc/passwd/x", "a:b:c", "a//b", "é/ü", "\ud800"]
)
def test_odd_names_are_not_found_in_one_line(
    name: str, environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = tmp_path / "p" / "q"
    empty.mkdir(parents=True)
    monkeypatch.chdir(empty)
    assert refusal(name, environ | {"HOME": "/nonexistent"}).startswith("no model ")


# ---- Ollama


@pytest.mark.parametrize(
    ("name", "manifest"),
    [
        ("m", "registry.ollama.ai/library/m/latest"),
        ("m:8b", "registry.ollama.ai/library/m/8b"),
        ("me/m:8b", "registry.ollama.ai/me/m/8b"),
        ("hf.co/org/m-GGUF:Q4_K_M", "hf.co/org/m-GGUF/Q4_K_M"),
    ],
)
def test_ollama_names(name: str, manifest: str, environ: dict[str, str], ollama: Path) -> None:
    blob = pull(ollama, manifest)
    assert resolve_model(name, environ) == blob
    (listed,) = list_models(environ)
    assert (listed.path, listed.origin, listed.sha256) == (blob, "ollama", SHA)
    assert resolve_model(listed.name, environ) == blob
    assert listed.name == (name if ":" in name else f"{name}:latest")


def test_ollama_models_is_honoured_instead_of_the_home(tmp_path: Path, environ: dict[str, str], ollama: Path) -> None:
    pull(ollama, "registry.ollama.ai/library/home/latest")
    blob = pull(tmp_path / "home" / "elsewhere", "registry.ollama.ai/library/m/latest")
    for value in (str(tmp_path / "home" / "elsewhere"), "~/elsewhere"):
        moved = environ | {"OLLAMA_MODELS": value}
        assert resolve_model("m", moved) == blob
        assert [m.name for m in list_models(moved)] == ["m:latest"]
        assert str(ollama) not in refusal("home", moved)


def test_the_system_services_store_is_looked_at_too(environ: dict[str, str]) -> None:
    blob = pull(discovery.OLLAMA_SERVICE, "registry.ollama.ai/library/m/latest")
    assert resolve_model("m", environ) == blob


@pytest.mark.parametrize(
    "digest",
    [
        "sha256:../../../../etc/passwd",
        f"sha256:{SHA[:-1]}",
        f"sha256:{SHA}/../x",
        f"sha256:{SHA}\n",
        f"sha256:{SHA.upper()}",
        "/etc/passwd",
        "",
        None,
        7,
        [SHA],
        {},
    ],
)
def test_a_digest_that_is_none_opens_no_file(digest: Any, environ: dict[str, str], ollama: Path) -> None:
    pull(ollama, "registry.ollama.ai/library/m/latest", digest=digest)
    assert "names no model with a sha256 digest" in refusal("m", environ)
    assert list_models(environ) == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"null",
        b"[]",
        b"7",
        b'{"layers": 7}',
        b'{"layers": [7, null, []]}',
        b"[" * 100_000,
        b'{"layers": {}}',
    ],
)
def test_a_manifest_that_is_none_is_refused_with_its_path(
    content: bytes, environ: dict[str, str], ollama: Path
) -> None:
    manifest = put(ollama / "manifests" / "registry.ollama.ai" / "library" / "m" / "latest", content)
    message = refusal("m", environ)
    assert message.startswith(f"{manifest}: ")
    assert "pull the model again" in message
    assert list_models(environ) == []


def test_manifests_too_large_with_two_models_or_without_their_blob(environ: dict[str, str], ollama: Path) -> None:
    library = ollama / "manifests" / "registry.ollama.ai" / "library"
    put(library / "large" / "latest", b" " * ((1 << 20) + 1))
    assert "larger than 1048576 bytes" in refusal("large", environ)
    layer = {"mediaType": MODEL, "digest": f"sha256:{SHA}"}
    put(library / "two" / "latest", json.dumps({"layers": [layer, layer]}).encode())
    assert "names no model" in refusal("two", environ)
    blob = pull(ollama, "registry.ollama.ai/library/gone/latest", blob=False)
    assert f"its model {blob} is missing" in refusal("gone", environ)


def test_names_with_dots_do_not_leave_the_manifests(
    environ: dict[str, str], ollama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "p" / "q" / "r").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "p" / "q" / "r")
    pull(ollama, "registry.ollama.ai/library/m/latest")
    put(ollama / "latest", b"{")  # what `../../..` would name
    for name in ("../../..", "..:latest", "library/..:latest", "m:../m/latest", ".:latest"):
        assert refusal(name, environ).startswith("no model "), name


def test_listing_waits_for_no_pipe_and_leaves_folders_out(environ: dict[str, str], ollama: Path) -> None:
    library = ollama / "manifests" / "registry.ollama.ai" / "library"
    (library / "m" / "folder").mkdir(parents=True)
    os.mkfifo(library / "m" / "pipe")
    pull(ollama, "registry.ollama.ai/library/m/real")
    assert [m.name for m in list_models(environ)] == ["m:real"]


# ---- Hugging Face


def test_the_only_model_of_a_repository(environ: dict[str, str], hub: Path) -> None:
    snapshot = download(hub, "org/repo-GGUF", {"m-Q4_K_M.gguf": SHA, "mmproj-m.gguf": OTHER, "README.md": "b" * 40})
    assert resolve_model("org/repo-GGUF", environ) == snapshot / "m-Q4_K_M.gguf"
    (listed,) = list_models(environ)
    assert listed.name == "org/repo-GGUF:m-Q4_K_M.gguf"
    assert (listed.origin, listed.sha256) == ("huggingface", SHA)
    assert resolve_model(listed.name, environ) == snapshot / "m-Q4_K_M.gguf"


def test_several_models_are_listed_and_one_is_chosen(environ: dict[str, str], hub: Path) -> None:
    files = {"m-Q4_K_M.gguf": "1" * 64, "m-Q4_K_S.gguf": "2" * 64, "m-Q8_0.gguf": "3" * 64, "F32/m.gguf": "4" * 64}
    snapshot = download(hub, "org/repo", files)
    message = refusal("org/repo", environ)
    for name in files:
        assert f"{name} (0.00 GB)" in message
    assert "choose one as org/repo:FILE" in message
    assert resolve_model("org/repo:q8_0", environ) == snapshot / "m-Q8_0.gguf"
    assert resolve_model("org/repo:F32/m.gguf", environ) == snapshot / "F32" / "m.gguf"
    assert resolve_model("org/repo:m.gguf", environ) == snapshot / "F32" / "m.gguf"
    message = refusal("org/repo:Q4_K", environ)
    assert "m-Q4_K_S.gguf" in message
    assert "m-Q8_0.gguf" not in message
    assert "holds no model 'Q2_K': " in refusal("org/repo:Q2_K", environ)
    for model in list_models(environ):
        assert resolve_model(model.name, environ) == model.path


def test_a_long_list_is_cut(environ: dict[str, str], tmp_path: Path) -> None:
    for i in range(45):
        put(tmp_path / "many" / f"m{i:02}.gguf")
    message = refusal(str(tmp_path / "many"), environ)
    assert "m39.gguf (0.00 GB) and 5 more; name one" in message
    assert "m40" not in message


def test_a_split_model_of_a_repository_is_one_model(environ: dict[str, str], hub: Path) -> None:
    parts = {f"Q8_0/m-0000{i}-of-00002.gguf": str(i) * 64 for i in (1, 2)}
    snapshot = download(hub, "org/repo", parts)
    assert resolve_model("org/repo", environ) == snapshot / "Q8_0" / "m-00001-of-00002.gguf"
    assert len(list_models(environ)) == 1


def test_main_names_the_snapshot_else_the_newest_is_taken(environ: dict[str, str], hub: Path) -> None:
    old = download(hub, "org/repo", {"m.gguf": SHA}, commit="0" * 40)
    new = download(hub, "org/repo", {"m.gguf": OTHER}, commit="1" * 40, ref="0" * 40)
    os.utime(old, (1, 1))
    assert resolve_model("org/repo", environ) == old / "m.gguf"
    for ref in ("2" * 40, "../snapshots/" + "0" * 40, "..", "", "\xff", "x" * 500):
        put(hub / "models--org--repo" / "refs" / "main", ref.encode("latin-1"))
        assert resolve_model("org/repo", environ) == new / "m.gguf", ref


def test_a_ref_does_not_leave_the_repository(environ: dict[str, str], hub: Path, tmp_path: Path) -> None:
    put(tmp_path / "home" / "secret.gguf")
    download(hub, "org/repo", {"m.gguf": SHA}, ref="../../../../../..")
    assert resolve_model("org/repo", environ).name == "m.gguf"
    assert refusal("org/..", environ).startswith("no model ")


def test_a_repository_without_snapshot_or_models(environ: dict[str, str], hub: Path) -> None:
    (hub / "models--org--empty").mkdir(parents=True)
    assert "holds no snapshot" in refusal("org/empty", environ)
    snapshot = download(hub, "org/text", {"README.md": "b" * 40})
    assert f"{snapshot} holds no .gguf file" in refusal("org/text", environ)
    put(hub / "models--a--b--c" / "snapshots" / COMMIT / "m.gguf")
    assert list_models(environ) == []


def test_a_link_to_a_blob_that_is_gone_is_no_model(environ: dict[str, str], hub: Path) -> None:
    snapshot = download(hub, "org/repo", {"m.gguf": SHA, "n.gguf": OTHER})
    (snapshot / "m.gguf").resolve().unlink()
    (snapshot / "o.gguf").symlink_to("o.gguf")
    assert resolve_model("org/repo", environ) == snapshot / "n.gguf"


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"])
def test_the_places_of_the_hub_cache(variable: str, environ: dict[str, str], hub: Path, tmp_path: Path) -> None:
    download(hub, "org/home", {"m.gguf": SHA})
    below = {"HF_HUB_CACHE": "", "HF_HOME": "hub", "XDG_CACHE_HOME": "huggingface/hub"}[variable]
    snapshot = download(tmp_path / "moved" / below, "org/repo", {"m.gguf": SHA})
    moved = environ | {variable: str(tmp_path / "moved")}
    assert resolve_model("org/repo", moved) == snapshot / "m.gguf"
    assert str(tmp_path / "moved" / below) in refusal("org/home", moved)


def test_hf_hub_cache_wins_over_hf_home(environ: dict[str, str], tmp_path: Path) -> None:
    snapshot = download(tmp_path / "one", "org/repo", {"m.gguf": SHA})
    both = environ | {"HF_HUB_CACHE": str(tmp_path / "one"), "HF_HOME": str(tmp_path / "two")}
    assert resolve_model("org/repo", both) == snapshot / "m.gguf"


# ---- not found


def test_not_found_names_every_place_with_its_real_path(
    tmp_path: Path, environ: dict[str, str], ollama: Path, hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pull(ollama, "registry.ollama.ai/library/llama3.2/1b")
    message = refusal("lama3.2:1b", environ)
    assert message == (
        f"no model 'lama3.2:1b'; did you mean llama3.2:1b?; looked at {tmp_path / 'lama3.2:1b'}, {ollama}, "
        f"{tmp_path / 'service'} (no such folder), {hub} (no such folder). "
        "Nothing is downloaded: fetch it first, or give a GGUF file"
    )


def test_places_that_cannot_be_looked_at_hold_nothing(environ: dict[str, str]) -> None:
    for variable in ("OLLAMA_MODELS", "HF_HUB_CACHE", "HF_HOME"):
        odd = environ | {variable: "/" + "x" * 300}  # fails as a folder does that may not be searched
        assert refusal("org/m", odd).startswith("no model ")
        assert list_models(odd) == []


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nobody)
    assert "/nonexistent/.ollama/models (no such folder)" in refusal("m", {})


# ---- content names


def test_a_file_named_by_its_content_only_inside_of_a_store(tmp_path: Path) -> None:
    assert content_sha256(put(tmp_path / "blobs" / f"sha256-{SHA}")) is None
    assert content_sha256(put(tmp_path / "blobs" / SHA)) is None
    (tmp_path / "manifests").mkdir()
    assert content_sha256(tmp_path / "blobs" / f"sha256-{SHA}") == SHA
    assert content_sha256(tmp_path / "blobs" / SHA) is None
    (tmp_path / "snapshots").mkdir()
    assert content_sha256(tmp_path / "blobs" / SHA) == SHA
    assert content_sha256(put(tmp_path / "blobs" / ("b" * 40))) is None  # a small file: git's sha1
    assert content_sha256(put(tmp_path / SHA)) is None
    circle = tmp_path / "blobs" / OTHER
    circle.symlink_to(circle)
    assert content_sha256(circle) in (None, OTHER)
