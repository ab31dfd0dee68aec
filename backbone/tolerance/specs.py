"""`--a` and `--b` as people write them, and the sides that they name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kernels.backends.float64_cpu import Float64Backend
from kernels.errors import BackendUnavailable
from kernels.interface import DenseBackend, Options
from kernels.native import build
from kernels.registry import BACKENDS, refuse_unknown

from ..errors import UsageError
from ..knobs import BY_NAME
from ..local_workers import parse_workers
from ..session import Session, open_session
from ..settings import Setting, Settings
from .kld import open_kld
from .live import open_live
from .outside_server import open_server
from .saved import open_saved
from .sides import HalfWire, ModelSide, Side

FLOAT64 = "float64"
FORM = "BACKEND[/KEY=VALUE...]"
MOST_SPEC = 300
#: Keys that are settings, too.
SETTINGS = ("activations", "accumulation", "kv_cache", "threads", "workers", "worker_memory")
WORDS = "worker:NAME, saved:FILE, kld:FILE and server:URL"
WIRES, LANES = ("f32", "f16"), ("native", "plain")


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """A backend with what it is to do in its own way."""

    text: str
    backend: str
    settings: Mapping[str, Any]
    wire: str = "f32"
    lanes: str = "native"

    @property
    def precision(self) -> str:
        """By which bars it is judged: those of what is least precise in it."""
        if self.backend == FLOAT64:
            return "f64"
        given = self.settings
        if "f16" in (self.wire, given.get("accumulation"), given.get("kv_cache")):
            return "f16"
        return "i16" if given.get("activations") == "i16" else "f32"


def parse_backend(text: str, flag: str) -> BackendSpec:
    """UsageError says what cannot be read."""
    if len(text) > MOST_SPEC or not text.isprintable():
        raise UsageError(f"{flag} {text[:80]!r}: is no {FORM} of at most {MOST_SPEC} characters")
    backend, *pairs = text.split("/")
    try:
        if backend != FLOAT64:
            refuse_unknown(backend)
    except BackendUnavailable as error:
        raise UsageError(f"{flag} {text[:80]}: {error}; an oracle is {FLOAT64!r}; others are {WORDS}") from None
    found, settings, seen = {"wire": "f32", "lanes": "native"}, dict[str, Any](), set[str]()
    for pair in pairs:
        key, equals, value = pair.partition("=")
        name, place = key.replace("-", "_"), f"{flag} {text[:80]}: {key[:40]}"
        if pair in seen or (name in seen and equals):
            raise UsageError(f"{place}: is given twice")
        seen |= {name, pair}
        if not equals or name not in (*SETTINGS, *found):
            raise UsageError(f"{flag} {text[:80]}: {pair[:40]!r} is no KEY=VALUE of {', '.join((*SETTINGS, *found))}")
        if name in SETTINGS:
            settings[name] = BY_NAME[name].parse(value, place)
            continue
        choices = WIRES if name == "wire" else LANES
        if value not in choices:
            raise UsageError(f"{place}: {value[:40]!r} is not one of {', '.join(choices)}")
        found[name] = value
    if "workers" in settings and not parse_workers(settings["workers"] or "0", backend):
        raise UsageError(f"{flag} {text[:80]}: workers: names none; leave it out to compute in one process")
    if backend == FLOAT64 and pairs:
        raise UsageError(f"{flag} {text[:80]}: {FLOAT64} has nothing to choose")
    if found["lanes"] != "native" and (backend != "native" or "workers" in settings):
        raise UsageError(f"{flag} {text[:80]}: lanes are native's, in one process")
    return BackendSpec(text, backend, settings, found["wire"], found["lanes"])


def _own_backend(spec: BackendSpec, settings: Settings) -> DenseBackend | None:
    """One that the registry has not."""
    if spec.backend == FLOAT64:
        return Float64Backend()
    if spec.lanes == "plain":
        from kernels.backends.native_cpu import NativeBackend  # imported here: it compiles at first use

        options = Options(threads=settings.threads, activations=settings.activations, kv_cache=settings.kv_cache)
        try:
            return NativeBackend(options, build.load(flags=build.PLAIN))
        except BackendUnavailable as error:
            raise UsageError(str(error)) from None
    return None


@contextmanager
def open_backend_side(spec: BackendSpec, settings: Settings, *, context: int) -> Iterator[Side]:
    """A model on a backend, with workers where the side names some."""
    values = {"backend": spec.backend if spec.backend in BACKENDS else "auto", "workers": "0", **spec.settings}
    values |= {"context": context, "wire": spec.wire}
    mine = settings.but({name: Setting(value, "side") for name, value in values.items()})
    with open_session(mine, backend=_own_backend(spec, mine)) as session:
        if "workers" in spec.settings and session.swarm is None:
            raise UsageError(f"{spec.text}: a dense model has nothing for workers to do")
        if idle := [worker.name for worker in session.workers() if not worker.experts]:
            raise UsageError(f"{spec.text}: {', '.join(idle)} would hold no expert; give fewer workers, or more memory")
        experts, classes = session.engine.experts, session.class_map().digest
        is_emulated = spec.wire == "f16" and session.swarm is None
        yield ModelSide(
            session,
            HalfWire(experts) if is_emulated else experts,
            _told(spec, session),
            numeric_class=f"{classes} wire f16" if is_emulated else classes,
            precision=spec.precision,
        )


def _told(spec: BackendSpec, session: Session) -> dict[str, Any]:
    model, classes = session.model, session.class_map()
    return {
        "asked": spec.text,
        "kind": "placement" if session.swarm is not None else "backend",
        "backend": model.backend.name,
        "class": classes.dense,
        "class_map": classes.digest,
        "device": model.backend.device,
        "precision": spec.precision,
        "wire": spec.wire,
        "workers": [{"name": w.name, "backend": w.backend, "class": w.numeric_class} for w in session.workers()],
    }


Opener = Callable[[str, str, Settings, int], Any]
#: Sides that are no backends, by the word before the colon; each opens `--a` or `--b` (flag, rest, settings, context).
OTHERS: Mapping[str, Opener] = {"worker": open_live, "saved": open_saved, "kld": open_kld, "server": open_server}


def dictates(text: str) -> bool:
    """Whether a side has figures of certain tokens alone, so that it has to be opened first."""
    return text.partition(":")[0] in ("saved", "kld")


@contextmanager
def open_side(text: str, flag: str, settings: Settings, *, context: int) -> Iterator[Side]:
    """Any side. UsageError says what is wrong with it."""
    word, colon, rest = text.partition(":")
    if colon and word in OTHERS:
        with OTHERS[word](flag, rest, settings, context) as side:
            yield side
    else:
        with open_backend_side(parse_backend(text, flag), settings, context=context) as side:
            yield side
