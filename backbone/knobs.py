"""Every setting there is: its name, flag, kind, bounds and default. A row for each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kernels.registry import ACCUMULATION_DTYPES, ACTIVATION_DTYPES, CACHE_DTYPES
from protocol.broker import parse_broker
from protocol.capabilities import WIRE_DTYPES
from protocol.errors import ProtocolError
from protocol.sizes import parse_size

from .audit import EVERY
from .errors import UsageError
from .listening import DEFAULT_LISTEN

PREFIX = "EXPERTSWARM_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One setting. `kind` is str, int, float or "size"; bounds hold for numbers, both ends included.

    `choices` are all the texts that a str may be; without any it may be each. What `is_secret` is shown nowhere, and
    has no flag, since everybody on a machine sees the arguments of its processes. `check` raises ProtocolError for a
    text that cannot be.
    """

    name: str
    flags: tuple[str, ...]
    kind: Any
    default: Any
    help: str
    least: float = -math.inf
    most: float = math.inf
    metavar: str = "N"
    choices: tuple[str, ...] = ()
    is_secret: bool = False
    check: Callable[[str], object] | None = None

    @property
    def variable(self) -> str:
        """The environment variable."""
        return PREFIX + self.name.upper()

    def parse(self, text: str, place: str) -> Any:
        """The value of a text. UsageError names the place it came from."""
        if self.choices and text not in self.choices:
            raise UsageError(f"{place}: {text!r} is not one of {', '.join(self.choices)}")
        if self.kind is str:
            try:
                if self.check is not None and text:
                    self.check(text)
            except ProtocolError as error:
                raise UsageError(f"{place}: {error}") from None
            return text
        try:
            value = parse_size(text) if self.kind == "size" else self.kind(text)
        except ValueError:
            what = {int: "a whole number", float: "a number"}.get(self.kind, "a size such as 800M or 2GiB")
            raise UsageError(f"{place}: {text!r} is not {what}") from None
        if not self.least <= value <= self.most:  # NaN is out of every range
            least, most = (format(end, "g" if self.kind is float else "d") for end in (self.least, self.most))
            raise UsageError(f"{place}: {text.strip()} is out of range; from {least} to {most} is allowed")
        return value


KNOBS: tuple[Knob, ...] = (
    Knob(
        name="model",
        flags=("-m", "--model"),
        kind=str,
        default="",
        metavar="MODEL",
        help="GGUF file, or Ollama name:tag or Hugging Face org/repo in a local cache (default: the embedded demo)",
    ),
    Knob(
        name="backend",
        flags=("--backend",),
        kind=str,
        default="auto",
        metavar="NAME",
        help="what the backbone itself computes with (auto: native where it works, else numpy)",
    ),
    Knob(
        name="threads",
        flags=("--threads",),
        kind=int,
        default=0,
        least=0,
        most=1024,
        help="compute threads of this process (0: one for each physical core); local workers share as many out",
    ),
    Knob(
        name="activations",
        flags=("--activations",),
        kind=str,
        default="f32",
        metavar="|".join(ACTIVATION_DTYPES),
        choices=ACTIVATION_DTYPES,
        help="dtype of the activations that are multiplied: f32, or i16: less precise, faster with VNNI or dotprod",
    ),
    Knob(
        name="wire",
        flags=("--wire",),
        kind=str,
        default="f32",
        choices=WIRE_DTYPES,
        metavar="|".join(WIRE_DTYPES),
        help="dtype in which rows go to workers and back: f32, or f16: half the bytes on a slow line, and less precise",
    ),
    Knob(
        name="kv_cache",
        flags=("--kv-cache",),
        kind=str,
        default="f32",
        choices=CACHE_DTYPES,
        metavar="|".join(CACHE_DTYPES),
        help="dtype in which keys and values are kept: f32, or f16, which takes half the memory and is less precise",
    ),
    Knob(
        name="accumulation",
        flags=("--accumulation",),
        kind=str,
        default="f32",
        choices=ACCUMULATION_DTYPES,
        metavar="|".join(ACCUMULATION_DTYPES),
        help="dtype in which workers, and a backbone on a device, sum products: f32, or f16 where the device has it",
    ),
    Knob(
        name="archdefs",
        flags=("--archdefs",),
        kind=str,
        default="",
        metavar="DIR",
        help="folder of .archdef files that add to the built-in definitions or replace them",
    ),
    Knob(
        name="workers",
        flags=("--workers",),
        kind=str,
        default="",
        metavar="N",
        help="local worker processes: 2, or numpy:2; 0 for none (default: 2 for the demo model, else 0)",
    ),
    Knob(
        name="worker_memory",
        flags=("--worker-memory",),
        kind="size",
        default=0,
        least=0,
        most=1 << 60,
        metavar="SIZE",
        help="what each local worker may hold, such as 800M or 2GiB; copies fill what is left (0: no bound)",
    ),
    Knob(
        name="audit",
        flags=("--audit",),
        kind=int,
        default=EVERY,
        least=0,
        most=1 << 24,
        help="one in N answers of workers is computed again by somebody else, to find who is wrong (0: none)",
    ),
    Knob(
        name="listen",
        flags=("--listen",),
        kind=str,
        default=DEFAULT_LISTEN,
        metavar="HOST:PORT",
        help="where the swarm takes workers from other machines, such as 0.0.0.0:7610; loopback is this machine alone",
    ),
    Knob(
        name="advertise",
        flags=("--advertise",),
        kind=str,
        default="",
        metavar="HOST",
        help="by what host workers reach this machine, where it cannot know (default: the one it listens at)",
    ),
    Knob(
        name="mqtt",
        flags=("--mqtt",),
        kind=str,
        default="",
        metavar="URL",
        check=parse_broker,
        help="MQTT broker for presence, such as mqtts://swarm@broker.lan; its password is in no URL",
    ),
    Knob(
        name="mqtt_ca",
        flags=("--mqtt-ca",),
        kind=str,
        default="",
        metavar="FILE",
        help="certificate of the CA of an mqtts:// broker (default: the system's)",
    ),
    Knob(
        name="mqtt_password_file",
        flags=("--mqtt-password-file",),
        kind=str,
        default="",
        metavar="FILE",
        help="file whose first line is the broker's password",
    ),
    Knob(
        name="mqtt_password",
        flags=(),
        kind=str,
        default="",
        help="that password itself",
        is_secret=True,
    ),
    Knob(
        name="context",
        flags=("-c", "--context"),
        kind=int,
        default=0,
        least=0,
        most=1 << 24,
        help="tokens of context (0: the model's, at most 4096)",
    ),
    Knob(
        name="predict",
        flags=("-n", "--predict"),
        kind=int,
        default=128,
        least=0,
        most=1 << 24,
        help="tokens to generate at most",
    ),
    Knob(
        name="temperature",
        flags=("--temp", "--temperature"),
        kind=float,
        default=0.0,
        least=0,
        most=100,
        metavar="T",
        help="randomness; 0 takes the likeliest token",
    ),
    Knob(
        name="top_k",
        flags=("--top-k",),
        kind=int,
        default=0,
        least=0,
        most=1 << 24,
        help="draw from the N likeliest tokens (0: all)",
    ),
    Knob(
        name="top_p",
        flags=("--top-p",),
        kind=float,
        default=1.0,
        least=0,
        most=1,
        metavar="P",
        help="draw from the likeliest tokens that together have probability P",
    ),
    Knob(
        name="min_p",
        flags=("--min-p",),
        kind=float,
        default=0.0,
        least=0,
        most=1,
        metavar="P",
        help="draw from tokens at least P times as likely as the likeliest",
    ),
    Knob(
        name="repeat_penalty",
        flags=("--repeat-penalty",),
        kind=float,
        default=1.0,
        least=0.01,
        most=100,
        metavar="F",
        help="make the last 64 tokens less likely by this factor (1: off)",
    ),
    Knob(
        name="seed",
        flags=("--seed",),
        kind=int,
        default=None,
        least=0,
        most=(1 << 63) - 1,
        help="seed of the draw; the same seed gives the same text (default: from the system)",
    ),
    Knob(
        name="http",
        flags=("--http",),
        kind=str,
        default="127.0.0.1:8080",
        metavar="HOST:PORT",
        help="where serve answers; beyond this machine it needs an API key (port 0: any that is free)",
    ),
    Knob(
        name="api_key_file",
        flags=("--api-key-file",),
        kind=str,
        default="",
        metavar="FILE",
        help="file whose first line is the key that serve wants of its clients",
    ),
    Knob(
        name="api_key",
        flags=(),
        kind=str,
        default="",
        help="that key itself",
        is_secret=True,
    ),
    Knob(
        name="parallel",
        flags=("--parallel",),
        kind=int,
        default=4,
        least=1,
        most=256,
        help="answers that serve makes at once; each keeps its keys and values",
    ),
    Knob(
        name="queue",
        flags=("--queue",),
        kind=int,
        default=64,
        least=0,
        most=1 << 16,
        help="requests that may wait for their turn; more are refused with 503",
    ),
)
BY_NAME: Mapping[str, Knob] = {knob.name: knob for knob in KNOBS}
