"""What a request gets in place of an answer: a status and OpenAI's error object."""

from __future__ import annotations

import logging
from typing import Any

from kernels.errors import KernelError

from ..chat_template import ChatTemplateError
from ..errors import BackboneError, ContextFull, UsageError
from ..scheduler import Busy, Ending

log = logging.getLogger(__name__)
RETRY_AFTER_S = 1


class ApiError(Exception):
    """A request that is refused. `param` is the field at fault, `code` a word for programs."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, **headers: str
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's object."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def field_error(param: str, message: str, code: str | None = None) -> ApiError:
    """A field that cannot be used; the message begins with its name."""
    return ApiError(400, f"{param}: {message}", param=param, code=code)


def as_api_error(error: Exception) -> ApiError:
    """Any error as what the client is told. What nobody foresaw is logged, and not told."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Busy):
        return ApiError(503, str(error), code="queue_full", retry_after=str(RETRY_AFTER_S))
    if isinstance(error, Ending):
        return ApiError(503, str(error), code="cancelled")
    if isinstance(error, ContextFull):
        return ApiError(400, str(error), code="context_length_exceeded")
    if isinstance(error, ChatTemplateError):
        return ApiError(400, str(error), code="chat_template")
    if isinstance(error, UsageError):
        return ApiError(400, str(error), code="usage")
    if isinstance(error, BackboneError | KernelError):
        return ApiError(500, str(error))
    log.error("a request failed", exc_info=error)
    return ApiError(500, "the server failed; its log says how")
