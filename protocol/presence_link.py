"""A member's connection to the broker: kept up in a thread of its own, for as long as the process lives.

What every topic is to hold is kept here, one state a topic: a newer one takes the place of one that is not out yet, and
all of them are said again after each connection. Nothing here waits for the broker but this thread. aiomqtt is of an
extra: nothing else imports it, and that only when it is asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from .backoff import MOST_S, delay_s
from .broker import Broker
from .errors import ProtocolError
from .presence import WILL
from .schema import one_line

TICK_S = 1.0
CLOSE_S = 3.0  #: for the last words; after that the last will speaks
MOMENT_S = 0.5  #: to end where nobody hears them
QOS = 1
#: MQTT's codes for who may not come in, as paho names both versions' codes.
_KEPT_OUT = {
    134: "the broker does not know this user with this password; see EXPERTSWARM_MQTT_PASSWORD",
    135: "the broker does not let this user in with this password; see EXPERTSWARM_MQTT_PASSWORD",
}


def connector(broker: Broker, client_id: str, will_topic: str) -> Callable[[], AbstractAsyncContextManager[Any]]:
    """What makes a Link's connections. ProtocolError when aiomqtt is missing."""
    try:
        import aiomqtt
    except ModuleNotFoundError:
        raise ProtocolError("needs aiomqtt: pip install expertswarm[mqtt]") from None
    options, will = broker.client_options(client_id), aiomqtt.Will(will_topic, WILL, qos=QOS, retain=True)
    return lambda: aiomqtt.Client(will=will, **options)


class Link:
    """`start` it, `publish` states, `close` it; all three may be called from any one thread.

    `on_connected`, `on_message` (topic, payload) and `on_tick` (about once a second) are called in the link's thread.
    `is_connected` once all states are out. `say` gets one line when something changes: connected, and why not.
    """

    def __init__(
        self,
        connect: Callable[[], AbstractAsyncContextManager[Any]],
        *,
        place: str,
        topics: Sequence[str],
        say: Callable[[str], None],
        on_message: Callable[[str, bytes], None],
        on_connected: Callable[[], None] = lambda: None,
        on_tick: Callable[[], None] = lambda: None,
    ) -> None:
        self._connect, self._place, self._topics, self._say = connect, place, topics, say
        self._on_message, self._on_connected, self._on_tick = on_message, on_connected, on_tick
        self._lock = threading.Lock()
        self._states: dict[str, bytes] = {}
        self._pending: set[str] = set()  #: topics whose state is not out yet
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news = asyncio.Event()  #: a state is pending, or an end is wanted
        self._is_closing = False
        self._said = ""
        self.is_connected = False
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="presence", daemon=True)

    def start(self) -> None:
        """Begin to connect."""
        self._thread.start()

    def publish(self, said: Mapping[str, bytes]) -> None:
        """What topics are to hold from now on, retained."""
        with self._lock:
            if self._is_closing:
                return
            self._pending.update(topic for topic, payload in said.items() if self._states.get(topic) != payload)
            self._states.update(said)
        self._wake()

    def close(self, last: Mapping[str, bytes]) -> None:
        """Say the last words if there is somebody to hear them, and end."""
        with self._lock:  # from now on nobody else has a word
            self._states.update(last)
            self._pending.update(last)
            self._is_closing = True
        self._wake()
        self._thread.join(CLOSE_S if self.is_connected else MOMENT_S)

    def _wake(self) -> None:
        if (loop := self._loop) is not None:
            with contextlib.suppress(RuntimeError):  # it has ended
                loop.call_soon_threadsafe(self._news.set)

    # ---- the thread

    async def _run(self) -> None:
        self._loop, failures = asyncio.get_running_loop(), 0
        while not self._is_closing:
            began = self._loop.time()
            try:
                async with self._connect() as client:
                    await self._hold(client)
                return
            except Exception as error:  # whatever a broker or a library does: the process goes on without presence
                reason = "the connection is lost" if self.is_connected else _reason(error)
                self._tell(f"{reason}; going on without presence, trying again")
            finally:
                self.is_connected = False
            failures = 1 if self._loop.time() - began > MOST_S else failures + 1
            await self._pause(self._loop, delay_s(failures, random.random()))  # noqa: S311 - no secret

    async def _hold(self, client: Any) -> None:
        """Use a connection until an end is wanted; raises when it breaks."""
        self._on_connected()
        for topic in self._topics:
            await client.subscribe(topic, qos=QOS)
        with self._lock:
            self._pending = set(self._states)
        reader = asyncio.create_task(self._read(client))
        try:
            while not reader.done():
                self._on_tick()
                await self._say_pending(client)
                if not self.is_connected:
                    self.is_connected = True
                    self._tell("connected")
                if self._is_closing:
                    return
                await self._wait(reader)
            reader.result()
        finally:
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await reader

    async def _read(self, client: Any) -> None:
        async for message in client.messages:
            payload = message.payload if isinstance(message.payload, bytes) else b""
            self._on_message(str(message.topic), payload)

    async def _say_pending(self, client: Any) -> None:
        while True:
            with self._lock:
                if not self._pending:
                    return
                topic = next(topic for topic in self._states if topic in self._pending)  # as they were first said
                self._pending.discard(topic)
                payload = self._states[topic]
            await client.publish(topic, payload, qos=QOS, retain=True)

    async def _wait(self, reader: asyncio.Task[None]) -> None:
        """Wait for news, a tick, or the end of the connection."""
        news = asyncio.create_task(self._news.wait())
        await asyncio.wait({reader, news}, timeout=TICK_S, return_when=asyncio.FIRST_COMPLETED)
        news.cancel()
        self._news.clear()

    async def _pause(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        """Wait, unless an end is wanted."""
        until = loop.time() + seconds
        while not self._is_closing and (left := until - loop.time()) > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), left)
            self._news.clear()

    def _tell(self, line: str) -> None:
        """Say what has changed; a broker that stays away is no news."""
        if line != self._said and not self._is_closing:
            self._said = line
            self._say(f"{self._place}: {line}")


def _reason(error: Exception) -> str:
    """Why a connection came to nothing or to an end, for people."""
    code = getattr(getattr(error, "rc", None), "value", None)
    text = one_line(error, 200) or type(error).__name__
    if code in _KEPT_OUT:
        return _KEPT_OUT[code]
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return f"the broker's certificate is not one to trust here ({text}); see EXPERTSWARM_MQTT_CA"
    return f"the broker cannot be used: {text}"
