"""The endpoints: a request in, an answer of the scheduler out. Nothing here touches the engine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ..chat_template import TEMPLATE_KEY, ChatTemplateError
from ..errors import BackboneError
from ..forecast import Forecast
from ..forecast import as_json as token_json
from ..presence import Presence
from ..prompts import ChatPrompt, Prompt, prompt_ids
from ..results import Result, computed_locally, failures_as_json, workers_as_json
from ..sampling import SamplingOptions
from ..scheduler import Done, Ending, Event, Failed, Job, Prompted, Scheduler, Text
from ..session import Session
from ..tokenizer import Tokenizer
from . import metrics
from .errors import ApiError, as_api_error
from .guard import HungUp, notes_of, read_body, send_body, send_error, send_json
from .requests import Asked, parse_chat, parse_completion, parse_job, parse_json, parse_private
from .rows import answered, held, parse_rows, parse_worker
from .shapes import DONE, Shape, event, to_json

Handler = Callable[[Scope, Receive, Send], Awaitable[None]]

RENDERERS = 2  #: chat templates and tokenizers at work at once, in threads of their own


@dataclass(slots=True, kw_only=True)
class Service:
    """What the endpoints answer from."""

    session: Session
    scheduler: Scheduler
    tokenizer: Tokenizer
    model: str  #: the id under which it is asked for
    template: str | None  #: the operator's, in place of the model's own
    defaults: SamplingOptions  #: where a request says nothing
    survey: Callable[[], Result]  #: what `status` shows of this machine
    url: str = ""  #: where it is served
    presence: Presence | None = None  #: at a broker
    forecast: Forecast | None = None
    started: int = field(default_factory=lambda: int(time.time()))
    renderers: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(RENDERERS, "prompts"))
    jobs: dict[str, Job] = field(
        default_factory=dict
    )  #: of the private endpoints, by the name that their client made up

    @property
    def has_template(self) -> bool:
        """Whether chats can be answered without a template of the client's."""
        return self.template is not None or TEMPLATE_KEY in self.session.model.gguf.metadata

    async def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt that the engine can take."""
        if isinstance(prompt, ChatPrompt) and prompt.template is None:
            if not self.has_template:
                raise ChatTemplateError(f"{self.model}: the model has no chat template; give one with --template FILE")
            prompt = ChatPrompt(prompt.messages, self.template)
        loop = asyncio.get_running_loop()
        ids = await loop.run_in_executor(self.renderers, prompt_ids, prompt, self.session.model, self.tokenizer)
        self.session.engine.refuse_unfit(ids)
        return ids

    @contextlib.asynccontextmanager
    async def answer(self, asked: Asked, name: str | None = None) -> AsyncIterator[AsyncIterator[Event]]:
        """The events of an answer, which is cancelled when the block is left before its end."""
        with self.scheduler.place():
            ids = await self.prompt_ids(asked.prompt)
            loop, queue = asyncio.get_running_loop(), asyncio.Queue[Event]()

            def emit(event: Event) -> None:
                with contextlib.suppress(RuntimeError):  # the loop has ended, and with it whoever would listen
                    loop.call_soon_threadsafe(queue.put_nowait, event)

            job = Job(ids, asked.options, emit)
            self.scheduler.submit(job)
            if name is not None:
                self.jobs[name] = job
            try:
                yield _until_the_end(queue)
            finally:
                self.jobs.pop(name or "", None)
                with contextlib.suppress(BackboneError):  # the scheduler has ended, and all jobs with it
                    self.scheduler.cancel(job)

    async def whole(self, done: Done) -> Result:
        """An answer's result with its provenance, for which the weights' sha256 may have to be waited for."""
        await asyncio.wrap_future(self.session.digest.future)
        return done.result | {"provenance": await self.ask(self.session.provenance)}

    async def ask(self, function: Callable[[], Result]) -> Result:
        """What a function of the session gives, called where that is allowed."""
        return await asyncio.wrap_future(self.scheduler.call(function))

    async def live(self) -> Result:
        """The server, its load and its workers, as they are now."""

        def look() -> Result:
            swarm = self.session.swarm
            return {
                "load": asdict(self.scheduler.load()),
                "counts": self.scheduler.counts.as_json(),
                "workers": workers_as_json(self.session),
                "earlier_workers": 0 if swarm is None else swarm.earlier.workers,
                "computed_locally": computed_locally(self.session),
                "failures": failures_as_json(self.session),
                "class_map": self.session.class_map().digest,
                "refused": 0 if swarm is None else swarm.refused,
                "dropped": 0 if swarm is None else swarm.dropped,
                "token": {
                    "timed": self.scheduler.token_times.tokens,
                    "actual": token_json(self.scheduler.token_times.actual()),
                    "predicted": None if self.forecast is None else token_json(self.forecast.predicted()),
                },
                "presence": None if self.presence is None else self.presence.status(),
            }

        fixed = {
            "url": self.url,
            "pid": os.getpid(),
            "started": self.started,
            "model": self.model,
            "has_template": self.has_template,
            "context": self.session.engine.context,
            "class": str(self.session.model.numeric_class),
        }
        return fixed | await self.ask(look)


async def _until_the_end(queue: asyncio.Queue[Event]) -> AsyncIterator[Event]:
    while True:
        yield (event := await queue.get())
        if isinstance(event, Done | Failed):
            return


# ---- OpenAI's


class Completions:
    """`/v1/chat/completions` or `/v1/completions`."""

    def __init__(self, service: Service, *, is_chat: bool) -> None:
        self._service, self._is_chat = service, is_chat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, whole or as a stream."""
        service = self._service
        parse = parse_chat if self._is_chat else parse_completion
        asked = parse(parse_json(await read_body(scope, receive)), service.defaults)
        _need_model(service, asked.model)
        shape = Shape(
            is_chat=self._is_chat,
            id=f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=service.model,
            wants_usage=asked.wants_usage,
        )
        answer = self._stream if asked.is_streamed else self._whole
        await _unless_hung_up(receive, answer(asked, shape, scope, send))

    async def _whole(self, asked: Asked, shape: Shape, scope: Scope, send: Send) -> None:
        async with self._service.answer(asked) as events:
            async for each in events:
                if isinstance(each, Failed):
                    raise each.error
                if isinstance(each, Done):
                    result = await self._ended(each, scope)
                    await send_json(shape.whole(result, each.cached), send)

    async def _stream(self, asked: Asked, shape: Shape, scope: Scope, send: Send) -> None:
        # The head is sent with the first text: what fails before that has a status of its own.
        stream = _Stream(send, "text/event-stream")
        async with self._service.answer(asked) as events:
            try:
                async for each in events:
                    if isinstance(each, Failed):
                        raise each.error
                    if isinstance(each, Text | Done) and not stream.has_begun and (first := shape.first()):
                        await stream.write(event(first))
                    if isinstance(each, Text):
                        await stream.write(event(shape.text(each.text)))
                    elif isinstance(each, Done):
                        result = await self._ended(each, scope)
                        await stream.write(event(shape.last(result)))
                        if asked.wants_usage:
                            await stream.write(event(shape.usage(result, each.cached)))
                        await stream.end(DONE)
            except Exception as error:
                if not stream.has_begun:
                    raise
                await stream.end(event(as_api_error(error).body))

    async def _ended(self, done: Done, scope: Scope) -> Result:
        result = await self._service.whole(done)
        notes_of(scope).tokens = len(result["prompt_ids"]), len(result["ids"])
        if result["stop"] == "cancelled":
            raise Ending("the server is ending, and broke the answer off")
        return result


class _Stream:
    """A response in pieces. Its head goes out with the first of them."""

    def __init__(self, send: Send, kind: str) -> None:
        self._send, self._kind, self.has_begun = send, kind, False

    async def write(self, piece: bytes, *, more: bool = True) -> None:
        """Send a piece."""
        if not self.has_begun:
            self.has_begun = True
            headers = [(b"content-type", self._kind.encode()), (b"cache-control", b"no-store")]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": piece, "more_body": more})

    async def end(self, piece: bytes) -> None:
        """Send the last piece."""
        await self.write(piece, more=False)


def _need_model(service: Service, name: str | None) -> None:
    if name is not None and name != service.model:
        raise ApiError(
            404, f"no model {name[:100]!r}; there is {service.model!r}", param="model", code="model_not_found"
        )


async def _unless_hung_up(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do work as long as the client is there. HungUp when it has gone before that was done."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_hung_up(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise HungUp
        task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# ---- the app


class _Endpoint:
    """A handler whose errors are told in OpenAI's shape."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._handler(scope, receive, send)
        except HungUp:
            pass
        except Exception as error:
            await send_error(as_api_error(error), send)


def make_app(service: Service) -> Starlette:
    """The application. Without a guard around it, whoever reaches it may ask everything."""
    scheduler = service.scheduler

    async def models(scope: Scope, receive: Receive, send: Send) -> None:
        await send_json({"object": "list", "data": [_model(service)]}, send)

    async def model(scope: Scope, receive: Receive, send: Send) -> None:
        _need_model(service, scope["path_params"]["name"])
        await send_json(_model(service), send)

    async def health(scope: Scope, receive: Receive, send: Send) -> None:
        is_alive = scheduler.is_alive
        await send_json({"status": "ok" if is_alive else "failed"}, send, status=200 if is_alive else 503)

    async def status(scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(service.renderers, service.survey)
        await send_json(found | {"server": await service.live()}, send)

    async def prometheus(scope: Scope, receive: Receive, send: Send) -> None:
        await send_body(metrics.exposition(await service.live()), metrics.CONTENT_TYPE, send)

    async def private_status(scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(await service.live(), send)

    async def private_generate(scope: Scope, receive: Receive, send: Send) -> None:
        name, asked = parse_private(parse_json(await read_body(scope, receive)))
        await _unless_hung_up(receive, _generate(service, name, asked, scope, send))

    async def private_cancel(scope: Scope, receive: Receive, send: Send) -> None:
        name = parse_job(parse_json(await read_body(scope, receive)))
        if (job := service.jobs.get(name)) is not None:
            scheduler.cancel(job)
        await send_json({"cancelled": job is not None}, send)

    async def private_worker(scope: Scope, receive: Receive, send: Send) -> None:
        name = parse_worker(parse_json(await read_body(scope, receive)))
        await send_json(await service.ask(lambda: held(service.session.swarm, name)), send)

    async def private_rows(scope: Scope, receive: Receive, send: Send) -> None:
        asked = parse_rows(parse_json(await read_body(scope, receive)))
        await send_json(await service.ask(lambda: answered(service.session.swarm, asked)), send)

    async def no_such(request: Request, error: Exception) -> Any:
        status, detail = (error.status_code, error.detail) if isinstance(error, HTTPException) else (500, "failed")
        return _Refusal(status, f"{detail}: {request.method} {request.url.path[:200]}")

    routes = [
        Route("/v1/chat/completions", _Endpoint(Completions(service, is_chat=True)), methods=["POST"]),
        Route("/v1/completions", _Endpoint(Completions(service, is_chat=False)), methods=["POST"]),
        Route("/v1/models", _Endpoint(models), methods=["GET"]),
        Route("/v1/models/{name:path}", _Endpoint(model), methods=["GET"]),
        Route("/health", _Endpoint(health), methods=["GET"]),
        Route("/status", _Endpoint(status), methods=["GET"]),
        Route("/metrics", _Endpoint(prometheus), methods=["GET"]),
        Route("/private/status", _Endpoint(private_status), methods=["GET"]),
        Route("/private/generate", _Endpoint(private_generate), methods=["POST"]),
        Route("/private/cancel", _Endpoint(private_cancel), methods=["POST"]),
        Route("/private/worker", _Endpoint(private_worker), methods=["POST"]),
        Route("/private/rows", _Endpoint(private_rows), methods=["POST"]),
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: no_such})


class _Refusal:
    """What the router refuses, as a response."""

    def __init__(self, status: int, message: str) -> None:
        self._error = ApiError(status, message)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_error(self._error, send)


def _model(service: Service) -> dict[str, Any]:
    return {"id": service.model, "object": "model", "created": service.started, "owned_by": "expertswarm"}


async def _generate(service: Service, name: str, asked: Asked, scope: Scope, send: Send) -> None:
    """What `generate` shows and returns, line by line: how far the prompt is, text, the result."""
    stream = _Stream(send, "application/x-ndjson")

    async def line(value: Any) -> None:
        await stream.write(to_json(value) + b"\n")

    async with service.answer(asked, name) as events:
        async for each in events:
            if isinstance(each, Prompted):
                await line({"prompt": [each.done, each.total]})
            elif isinstance(each, Text):
                await line({"text": each.text})
            elif isinstance(each, Failed):
                await stream.end(to_json(as_api_error(each.error).body) + b"\n")
            else:
                result = await service.whole(each)
                notes_of(scope).tokens = len(result["prompt_ids"]), len(result["ids"])
                await stream.end(to_json({"result": result}) + b"\n")
