"""Messages to a prompt by the model's own chat template, rendered in a child process with bounds on time and memory.

There is no other template to fall back to: what goes wrong is told, and `--template FILE` is the way out.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import UsageError
from .tokenizer import Tokenizer

MAX_TEMPLATE_BYTES = 1 << 20
#: For starting the child, whose own limit is much tighter once it renders.
START_TIMEOUT_S = 30.0
_RENDERER = Path(__file__).with_name("template_renderer.py")
_LIMITS = "it takes more than 2 s or 256 MB"
TEMPLATE_KEY = "tokenizer.chat_template"

Messages = Sequence[Mapping[str, Any]]


class ChatTemplateError(UsageError):
    """A template that cannot be used, with its own words where it has some."""


def render_chat(template: str, messages: Messages, *, bos_token: str, eos_token: str) -> str:
    """The prompt for messages, with the beginning of the assistant's answer. ChatTemplateError when it cannot be."""
    variables = {
        "messages": list(messages),
        "bos_token": bos_token,
        "eos_token": eos_token,
        "add_generation_prompt": True,
        # Templates ask whether these are none, which what is not there at all is not.
        "tools": None,
        "documents": None,
    }
    request = json.dumps({"template": template, "variables": variables})
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-X", "utf8", str(_RENDERER)],
            input=request.encode(),
            capture_output=True,
            timeout=START_TIMEOUT_S,
            env={},
            check=False,
        )
        answer = json.loads(done.stdout) if done.returncode == 0 else {"error": _end_of(done)}
    except (subprocess.TimeoutExpired, ValueError):
        answer = {}
    if "text" in answer:
        return str(answer["text"])
    reason = " ".join(str(answer.get("error", _LIMITS)).split())[:300]
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in reason)
    raise ChatTemplateError(f"the chat template failed: {shown}; another: --template FILE")


def _end_of(done: subprocess.CompletedProcess[bytes]) -> str:
    """Why the child gave no answer: a signal is what its limits end it with, else its last words."""
    words = done.stderr.decode("utf-8", "replace").split("\n")
    return _LIMITS if done.returncode < 0 else next((line for line in reversed(words) if line.strip()), _LIMITS)


def read_template(file: str) -> str:
    """The chat template that a file holds. ChatTemplateError when it cannot be one."""
    try:
        with Path(file).open("rb") as stream:
            template = stream.read(MAX_TEMPLATE_BYTES + 1).decode("utf-8")
    except OSError as error:
        raise ChatTemplateError(f"{file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ChatTemplateError(f"{file}: byte {error.start} is not UTF-8") from None
    return _bounded(template, file)


def template_of(metadata: Mapping[str, Any], source: str) -> str:
    """The model's own chat template. ChatTemplateError when there is none."""
    template = metadata.get(TEMPLATE_KEY)
    if not isinstance(template, str):
        raise ChatTemplateError(f"{source}: the model has no chat template; give one with --template FILE")
    return _bounded(template, source)


def _bounded(template: str, source: str) -> str:
    if len(template.encode("utf-8", "replace")) > MAX_TEMPLATE_BYTES:
        raise ChatTemplateError(f"{source}: the chat template is larger than {MAX_TEMPLATE_BYTES >> 20} MiB")
    return template


def encode_chat(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a rendered template: its control tokens count as such, and BOS is added only where it wrote none."""
    writes_bos = bool(tokenizer.bos_text) and text.startswith(tokenizer.bos_text)
    return tokenizer.encode(text, add_special=not writes_bos)
