"""What a request asks for, out of foreign JSON. Pure. A field that cannot be done is refused by its name.

No field names a path, a definition, a backend or an environment: those are the operator's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..chat_template import MAX_TEMPLATE_BYTES
from ..engine import GenerateOptions
from ..knobs import BY_NAME
from ..prompts import ChatPrompt, IdsPrompt, Prompt, TextPrompt
from ..sampling import SamplingOptions
from .errors import ApiError, field_error

Fields = Mapping[str, Any]

MOST_STOPS = 4
MOST_STOP_CHARACTERS = 1024  #: a text that goes on as a stop string begins is compared with it at every token
COMPLETION_TOKENS = 16  #: OpenAI's default for completions; a chat's answer may fill the context
MOST_TOKENS = int(BY_NAME["predict"].most)
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "seed")
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

_SHARED = {"model", "stream", "stream_options", "stop", "max_tokens", "ignore_eos", *SAMPLING}
CHAT_FIELDS = frozenset(_SHARED | {"messages", "max_completion_tokens"})
COMPLETION_FIELDS = frozenset(_SHARED | {"prompt"})
#: Fields of OpenAI's that clients send also where they ask for nothing, with the values that ask for nothing.
NOTHING: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "store": (False,),
    "service_tier": ("auto", "default"),
}
IGNORED = frozenset({"user", "safety_identifier"})  #: who the end user is changes nothing here


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request for an answer, checked."""

    prompt: Prompt
    options: GenerateOptions
    model: str | None
    is_streamed: bool = False
    wants_usage: bool = False  #: in the stream; a whole answer always has it


def parse_json(data: bytes) -> Fields:
    """The object of a body."""
    try:
        body = json.loads(data, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())[:200]
        raise ApiError(400, f"the body is no JSON: {reason}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError(400, "the body is no JSON object", code="invalid_json")
    return body


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def parse_chat(body: Fields, defaults: SamplingOptions) -> Asked:
    """`/v1/chat/completions`."""
    fields = _known(body, CHAT_FIELDS)
    given = [name for name in ("max_tokens", "max_completion_tokens") if name in fields]
    if len(given) == 2 and fields[given[0]] != fields[given[1]]:
        raise field_error(given[1], "differs from max_tokens; give one of them")
    if "messages" not in fields:
        raise field_error("messages", "is missing")
    most = _whole(fields, given[-1], 1, MOST_TOKENS) if given else MOST_TOKENS
    return _asked(fields, ChatPrompt(parse_messages(fields["messages"])), most, defaults)


def parse_completion(body: Fields, defaults: SamplingOptions) -> Asked:
    """`/v1/completions`."""
    fields = _known(body, COMPLETION_FIELDS)
    if "prompt" not in fields:
        raise field_error("prompt", "is missing")
    most = _whole(fields, "max_tokens", 0, MOST_TOKENS) if "max_tokens" in fields else COMPLETION_TOKENS
    return _asked(fields, _text_or_ids(fields["prompt"]), most, defaults)


def _asked(fields: Fields, prompt: Prompt, most: int, defaults: SamplingOptions) -> Asked:
    streamed = _flag(fields, "stream")
    usage = fields.get("stream_options", {})
    if not isinstance(usage, dict) or set(usage) - {"include_usage", "include_obfuscation"}:
        raise field_error("stream_options", "only include_usage is supported")
    if usage and not streamed:
        raise field_error("stream_options", "belongs to stream: true")
    if usage.get("include_obfuscation"):
        raise field_error("stream_options", "include_obfuscation is not supported")
    model = fields.get("model")
    if not isinstance(model, str | None):
        raise field_error("model", "is no string")
    options = GenerateOptions(
        max_tokens=most,
        stop=_stops(fields.get("stop", [])),
        ignore_eos=_flag(fields, "ignore_eos"),
        sampling=_sampling(fields, defaults),
    )
    wants = _flag(usage, "include_usage")
    return Asked(prompt=prompt, options=options, model=model, is_streamed=streamed, wants_usage=wants)


def parse_private(body: Fields) -> tuple[str, Asked]:
    """`/private/generate`: the job's name and what is asked. Exactly what `generate` has: nothing is a default here."""
    prompts: Mapping[str, Callable[[Any], Prompt]] = {
        "text": lambda text: TextPrompt(_text("text", text)),
        "ids": lambda ids: IdsPrompt(_ids("ids", ids)),
        "messages": lambda messages: ChatPrompt(parse_messages(messages), _template(body)),
    }
    named = [name for name in prompts if name in body]
    unknown = set(body) - {"job", "options", "template", *prompts}
    if unknown or len(named) != 1 or ("template" in body and named != ["messages"]):
        raise ApiError(400, "the body holds job, options, and one of text, ids, messages (with template)")
    options = body.get("options")
    known = {"max_tokens", "stop", "ignore_eos", "digest", *SAMPLING}
    if not isinstance(options, dict) or set(options) - known:
        raise field_error("options", f"holds {', '.join(sorted(known))}")
    stop = options.get("stop", [])
    if not isinstance(stop, list):
        raise field_error("stop", "is no list")
    generate = GenerateOptions(
        max_tokens=_whole(options, "max_tokens", 0, MOST_TOKENS),
        stop=tuple(_text("stop", each) for each in stop),
        ignore_eos=_flag(options, "ignore_eos"),
        digest=_flag(options, "digest"),
        sampling=_sampling(options, SamplingOptions()),
    )
    return parse_job(body), Asked(prompt=prompts[named[0]](body[named[0]]), options=generate, model=None)


def parse_job(body: Fields) -> str:
    """A job's name, which its client made up."""
    name = body.get("job")
    if not isinstance(name, str) or not 16 <= len(name) <= 64:
        raise field_error("job", "is no name of 16 to 64 characters")
    return name


def parse_messages(messages: Any) -> list[dict[str, str]]:
    """The messages of a chat, each with role and text; content in parts is put together."""
    if not isinstance(messages, list) or not messages:
        raise field_error("messages", "is no list of messages, or empty")
    return [_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _message(place: str, message: Any) -> dict[str, str]:
    if not isinstance(message, dict):
        raise field_error(place, "is no object with role and content")
    fields = {name: value for name, value in message.items() if value is not None}
    role = fields.pop("role", None)
    if not isinstance(role, str) or role not in ROLES:
        raise field_error(f"{place}.role", f"{_shown(role)} is not one of {', '.join(ROLES)}")
    found = {"role": ROLES[role], "content": _content(f"{place}.content", fields.pop("content", None))}
    if "name" in fields:
        found["name"] = _text(f"{place}.name", fields.pop("name"))
    for name, value in fields.items():
        if value not in ([], {}):
            raise field_error(f"{place}.{_name(name)}", "is not supported", "unsupported_field")
    return found


def _content(place: str, content: Any) -> str:
    if not isinstance(content, list):
        return _text(place, content)
    texts = list[str]()
    for i, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else part
            raise field_error(f"{place}[{i}]", f"parts of type {_shown(kind)} are not supported; there is text alone")
        texts.append(_text(f"{place}[{i}].text", part.get("text")))
    return "".join(texts)


def _text_or_ids(prompt: Any) -> Prompt:
    if isinstance(prompt, str):
        return TextPrompt(_text("prompt", prompt))
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        return _text_or_ids(prompt[0]) if isinstance(prompt[0], str) else IdsPrompt(_ids("prompt", prompt[0]))
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        raise field_error("prompt", "several prompts in one request are not supported", "unsupported_field")
    return IdsPrompt(_ids("prompt", prompt))


# ---- fields


def _known(body: Fields, known: frozenset[str]) -> Fields:
    """The fields that are given: null is as good as nothing. ApiError names the first that is not supported."""
    given = {name: value for name, value in body.items() if value is not None}
    for name in given.keys() - known - IGNORED:
        if not any(_same(given[name], nothing) for nothing in NOTHING.get(name, ())):
            raise field_error(_name(name), "is not supported", "unsupported_field")
    return {name: value for name, value in given.items() if name in known}


def _same(value: Any, nothing: Any) -> bool:
    """Equal, and no number for a truth value."""
    return bool(value == nothing) and isinstance(value, bool) == isinstance(nothing, bool)


def _flag(fields: Fields, name: str) -> bool:
    value = fields.get(name, False)
    if not isinstance(value, bool):
        raise field_error(name, f"{_shown(value)} is neither true nor false")
    return value


def _whole(fields: Fields, name: str, least: int, most: int) -> int:
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise field_error(name, f"{_shown(value)} is no whole number")
    if not least <= value <= most:
        raise field_error(name, f"{_shown(value)} is out of range; from {least} to {most} is allowed")
    return value


def _sampling(fields: Fields, defaults: SamplingOptions) -> SamplingOptions:
    """How tokens are chosen; bounds are those of the settings of the same names."""
    found: dict[str, Any] = {name: getattr(defaults, name) for name in SAMPLING}
    for name in SAMPLING:
        if name not in fields:
            continue
        knob, value = BY_NAME[name], fields[name]
        if knob.kind is int:
            found[name] = _whole(fields, name, int(knob.least), int(knob.most))
        elif isinstance(value, bool) or not isinstance(value, int | float):
            raise field_error(name, f"{_shown(value)} is no number")
        elif not knob.least <= value <= knob.most:
            raise field_error(name, f"{_shown(value)} is out of range; from {knob.least:g} to {knob.most:g} is allowed")
        else:
            found[name] = float(value)
    return SamplingOptions(**found)


def _stops(stop: Any) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or len(stops) > MOST_STOPS:
        raise field_error("stop", f"is neither a string nor a list of at most {MOST_STOPS}")
    if "" in stops:
        raise field_error("stop", "a stop string is empty")
    texts = tuple(_text("stop", each) for each in stops)
    if any(len(text) > MOST_STOP_CHARACTERS for text in texts):
        raise field_error("stop", f"a stop string is longer than {MOST_STOP_CHARACTERS} characters")
    return texts


def _text(place: str, text: Any) -> str:
    if not isinstance(text, str):
        raise field_error(place, f"{_shown(text)} is no string")
    return text


def _ids(place: str, ids: Any) -> tuple[int, ...]:
    if not isinstance(ids, list) or not all(type(each) is int for each in ids):
        raise field_error(
            place, "is neither a text nor a list of token ids" if place == "prompt" else "is no list of ids"
        )
    return tuple(ids)


def _template(body: Fields) -> str | None:
    if "template" not in body:
        return None
    template = _text("template", body["template"])
    if len(template.encode("utf-8", "replace")) > MAX_TEMPLATE_BYTES:
        raise field_error("template", f"is larger than {MAX_TEMPLATE_BYTES >> 20} MiB")
    return template


def _shown(value: Any) -> str:
    """A foreign value in a message: short."""
    return json.dumps(value, default=str)[:60]


def _name(name: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in name[:60])
