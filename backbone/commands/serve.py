"""`backbone serve`: one model with its workers, for as long as the process lives, and OpenAI's API to it."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kernels.cores import usable_cores
from kernels.memory import keep_heap_steady
from protocol.broker import Broker
from protocol.presence import Endpoint

from .. import run_file, status
from ..chat_template import read_template
from ..discovery import DEMO, DEMO_NAME
from ..door import Door
from ..errors import UsageError
from ..forecast import Forecast
from ..invite_book import InviteBook
from ..knobs import KNOBS
from ..listening import Address, parse_address, reachable_hosts
from ..machine_memory import read_bytes_per_s
from ..presence import Presence, broker_of, enrolled
from ..provenance import engine_version
from ..run_file import RunFile
from ..sampling import SamplingOptions
from ..session import Session, open_session
from ..settings import Settings, add_flags, resolve
from .generate import MODEL_FLAGS, SAMPLING_FLAGS

log = logging.getLogger(__name__)
MAX_KEY_BYTES = 4096
MQTT = ("mqtt", "mqtt_ca", "mqtt_password_file")


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP, with OpenAI's API",
        description="Serve a model over HTTP until a signal ends the process: /v1/chat/completions, /v1/completions, "
        "/v1/models, /health, /status, /metrics. generate, chat and status use it while it runs. The flags of sampling "
        "are what holds where a request says nothing.",
    )
    add_flags(
        parser, *MODEL_FLAGS, "listen", "advertise", "http", "api_key_file", "parallel", "queue", *MQTT, *SAMPLING_FLAGS
    )
    parser.add_argument("--template", metavar="FILE", help="chat template, in place of the model's own")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Serve until told to end."""
    from ..scheduler import Scheduler  # no other command needs it

    try:
        from ..server.app import Service, make_app
        from ..server.guard import Guard
        from ..server.serving import LOCAL_NAMES, bind, serve
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("backbone", "kernels", "archdefs", "protocol"):
            raise
        raise UsageError(
            f"serve needs {error.name}: pip install 'expertswarm[serve]' (in a clone: pip install -e '.[serve]')"
        ) from None
    settings = resolve(args, os.environ)
    asked = parse_address(settings.http, f"http ({settings['http'].source})", least_port=0)
    key = _api_key(settings)
    if key is None and not asked.is_loopback:
        raise UsageError(f"--http {settings.http}: others can reach it, so it needs --api-key-file FILE")
    template = read_template(args.template) if args.template is not None else None
    broker, book = broker_of(settings), InviteBook()
    door = Door(parse_address(settings.listen, f"listen ({settings['listen'].source})", least_port=0), book)
    reachable_hosts(door.address, settings.advertise)  # what it says that is wrong is said now
    _log_requests()
    keep_heap_steady()
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(bind(asked))  # before the model is loaded: it may be taken
        read = read_bytes_per_s(usable_cores())  # before anything else is done with these cores
        session = stack.enter_context(open_session(settings, door))
        swarm = None if session.swarm is None else door.address.at_port_of(session.swarm.endpoint)
        presence = None
        if broker is not None and swarm is not None:
            presence = stack.enter_context(_presence(broker, book, swarm, settings))
        tokenizer = session.tokenizer()
        scheduler = Scheduler(session, tokenizer, parallel=settings.parallel, queue=settings.queue)
        stack.enter_context(scheduler)
        address = Address(asked.host, listener.getsockname()[1])
        service = Service(
            session=session,
            scheduler=scheduler,
            tokenizer=tokenizer,
            model=model_id(settings, session),
            template=template,
            defaults=SamplingOptions(**{name: getattr(settings, name) for name in SAMPLING_FLAGS}),
            survey=_survey(args),
            url=f"http://{address}",
            presence=presence,
            forecast=Forecast(session, read),
        )
        stack.callback(service.renderers.shutdown, wait=False, cancel_futures=True)
        token = secrets.token_urlsafe(32)
        hosts = LOCAL_NAMES | {address.host.lower()} if address.is_loopback else None
        app = Guard(make_app(service), token=token, api_key=key, hosts=hosts)
        near = "localhost" if address.is_any else address.host
        model = str(session.model.path.absolute())
        word = RunFile(host=near, port=address.port, token=token, pid=os.getpid(), model=model, swarm=str(swarm or ""))
        stack.enter_context(_announced(word))

        def ready() -> None:
            print(f"{service.model} is served on {service.url} (OpenAI's API: {service.url}/v1)", flush=True)
            if swarm is not None:
                whose = "this machine" if swarm.is_loopback else "any machine that has an invite"
                print(f"workers of {whose} can join at {swarm} ('backbone invite' lets one in)", flush=True)

        serve(app, listener, on_ready=ready, on_end=scheduler.cancel_all)
    return 0


def _presence(broker: Broker, book: InviteBook, swarm: Address, settings: Settings) -> Presence:
    hosts = reachable_hosts(swarm, settings.advertise)
    return Presence(
        broker,
        server_key=book.server_keys()[0],
        endpoints=[Endpoint(host, swarm.port) for host in hosts],
        build=engine_version(),
        name_of=enrolled(book),
    )


def model_id(settings: Settings, session: Session) -> str:
    """The name under which clients ask for the model: as the operator gave it, but no path of this machine."""
    path = session.model.path
    if path == DEMO:
        return DEMO_NAME
    name: str = settings.model
    return path.stem if Path(name).exists() or name.startswith("~/") else name


def _api_key(settings: Settings) -> str | None:
    """The key that clients have to show. None: none."""
    if not settings.api_key_file:
        key = settings.api_key
    else:
        try:
            with Path(settings.api_key_file).open("rb") as file:
                key = file.readline(MAX_KEY_BYTES).decode("utf-8").strip()
        except OSError as error:
            raise UsageError(f"{settings.api_key_file}: cannot be read: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise UsageError(f"{settings.api_key_file}: byte {error.start} is not UTF-8") from None
        if not key:
            raise UsageError(f"{settings.api_key_file}: its first line is empty; put the key there")
    return key or None


def _survey(args: argparse.Namespace) -> Callable[[], dict[str, Any]]:
    """What `status` would show of the settings that the server was started with."""
    given = argparse.Namespace(**{knob.name: getattr(args, knob.name, None) for knob in KNOBS})
    return lambda: status.collect(given, os.environ)


def _log_requests() -> None:
    """A line for each request, and for each worker that serves, whatever else is said."""
    for name in ("expertswarm.access", "expertswarm.workers"):
        logging.getLogger(name).setLevel(logging.INFO)


@contextlib.contextmanager
def _announced(word: RunFile) -> Iterator[None]:
    """Our commands find the server within the block."""
    try:
        run_file.write(word)
    except OSError as error:
        log.warning("%s: cannot be written: %s; commands will not find this server", run_file.path_of(), error.strerror)
    try:
        yield
    finally:
        run_file.remove(word)
