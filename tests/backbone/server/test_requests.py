"""What a request asks for: fields out of foreign JSON, each checked, each fault told by its name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backbone.prompts import ChatPrompt, IdsPrompt, TextPrompt
from backbone.sampling import SamplingOptions
from backbone.server.errors import ApiError
from backbone.server.requests import Asked, parse_chat, parse_completion, parse_json, parse_private
from backbone.server.shapes import to_json

DEFAULTS = SamplingOptions(temperature=0.5, top_k=7)
HELLO = [{"role": "user", "content": "Hello"}]


def chat(**fields: Any) -> Asked:
    return parse_chat({"messages": HELLO} | fields, DEFAULTS)


def completion(**fields: Any) -> Asked:
    return parse_completion({"prompt": "Hello"} | fields, DEFAULTS)


def test_a_chat_with_everything() -> None:
    asked = chat(
        model="m", stream=True, stream_options={"include_usage": True}, stop=["a", "b"], seed=3, temperature=1,
        top_p=0.5, top_k=2, min_p=0.25, repeat_penalty=1.5, max_completion_tokens=9, ignore_eos=True,
    )  # fmt: skip
    assert asked.prompt == ChatPrompt([{"role": "user", "content": "Hello"}])
    assert (asked.model, asked.is_streamed, asked.wants_usage) == ("m", True, True)
    options = asked.options
    assert (options.max_tokens, options.stop, options.ignore_eos, options.digest) == (9, ("a", "b"), True, False)
    assert options.sampling == SamplingOptions(
        temperature=1.0, top_p=0.5, top_k=2, min_p=0.25, repeat_penalty=1.5, seed=3
    )


def test_what_a_request_leaves_open() -> None:
    assert chat().options.sampling == completion().options.sampling == DEFAULTS
    assert chat().options.max_tokens == 1 << 24  # the context ends it
    assert completion().options.max_tokens == 16
    assert (chat().is_streamed, chat().wants_usage, chat().model) == (False, False, None)
    assert chat(temperature=None, stop=None, tools=None, max_tokens=None) == chat()
    assert chat(max_tokens=4, max_completion_tokens=4).options.max_tokens == 4
    assert completion(stop="x").options.stop == ("x",)


def test_fields_that_ask_for_nothing_are_taken() -> None:
    nothing = {
        "n": 1,
        "logprobs": False,
        "tools": [],
        "tool_choice": "none",
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "logit_bias": {},
        "response_format": {"type": "text"},
        "store": False,
        "service_tier": "auto",
        "user": "somebody",
        "modalities": ["text"],
    }
    assert chat(**nothing) == chat()
    assert completion(best_of=1, echo=False, suffix="", user="x") == completion()


def test_messages() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    said = [
        {"role": "developer", "content": "s"},
        {"role": "user", "content": parts, "name": "eve"},
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None, "annotations": []},
    ]
    assert chat(messages=said).prompt == ChatPrompt(
        [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "ab", "name": "eve"},
            {"role": "assistant", "content": "c"},
        ]
    )


@pytest.mark.parametrize(
    ("prompt", "taken"),
    [
        ("a", TextPrompt("a")),
        (["a"], TextPrompt("a")),
        ([1, 2], IdsPrompt((1, 2))),
        ([[1, 2]], IdsPrompt((1, 2))),
        ("", TextPrompt("")),
    ],
)
def test_prompts(prompt: Any, taken: Any) -> None:
    assert completion(prompt=prompt).prompt == taken


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"messages": None}, "messages", "messages: is missing"),
        ({"messages": []}, "messages", "messages: is no list of messages, or empty"),
        ({"messages": "hi"}, "messages", "messages: is no list of messages, or empty"),
        ({"messages": ["hi"]}, "messages[0]", "messages[0]: is no object with role and content"),
        (
            {"messages": [{"role": "tool", "content": "x"}]},
            "messages[0].role",
            'messages[0].role: "tool" is not one of system, developer, user, assistant',
        ),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "messages[0].content: null is no string"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
            "messages[0].content[0]",
            'messages[0].content[0]: parts of type "image_url" are not supported; there is text alone',
        ),
        (
            {"messages": [*HELLO, {"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]},
            "messages[1].tool_calls",
            "messages[1].tool_calls: is not supported",
        ),
        ({"n": 2}, "n", "n: is not supported"),
        ({"n": True}, "n", "n: is not supported"),
        ({"logprobs": True}, "logprobs", "logprobs: is not supported"),
        ({"top_logprobs": 5}, "top_logprobs", "top_logprobs: is not supported"),
        ({"tools": [{"type": "function"}]}, "tools", "tools: is not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format", "response_format: is not supported"),
        ({"frequency_penalty": 0.5}, "frequency_penalty", "frequency_penalty: is not supported"),
        ({"backend": "numpy"}, "backend", "backend: is not supported"),
        ({"archdefs": "/etc"}, "archdefs", "archdefs: is not supported"),
        ({"template": "x"}, "template", "template: is not supported"),
        ({"prompt": "x"}, "prompt", "prompt: is not supported"),
        ({"temperature": "hot"}, "temperature", 'temperature: "hot" is no number'),
        ({"temperature": True}, "temperature", "temperature: true is no number"),
        ({"temperature": -1}, "temperature", "temperature: -1 is out of range; from 0 to 100 is allowed"),
        ({"top_p": 1.5}, "top_p", "top_p: 1.5 is out of range; from 0 to 1 is allowed"),
        ({"seed": 1.5}, "seed", "seed: 1.5 is no whole number"),
        ({"seed": -1}, "seed", "seed: -1 is out of range; from 0 to 9223372036854775807 is allowed"),
        ({"top_k": "3"}, "top_k", 'top_k: "3" is no whole number'),
        ({"max_tokens": 0}, "max_tokens", "max_tokens: 0 is out of range; from 1 to 16777216 is allowed"),
        ({"max_tokens": True}, "max_tokens", "max_tokens: true is no whole number"),
        (
            {"max_tokens": 1, "max_completion_tokens": 2},
            "max_completion_tokens",
            "max_completion_tokens: differs from max_tokens; give one of them",
        ),
        ({"stop": ["a"] * 5}, "stop", "stop: is neither a string nor a list of at most 4"),
        ({"stop": 3}, "stop", "stop: is neither a string nor a list of at most 4"),
        ({"stop": [1]}, "stop", "stop: 1 is no string"),
        ({"stop": ""}, "stop", "stop: a stop string is empty"),
        ({"stream": "yes"}, "stream", 'stream: "yes" is neither true nor false'),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream_options: belongs to stream: true"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options", "stream_options: only include_usage is supported"),
        ({"model": 3}, "model", "model: is no string"),
    ],
)  # fmt: skip
def test_what_a_chat_cannot_have_is_told_by_name(fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert (caught.value.status, caught.value.param, caught.value.message) == (400, param, message)
    assert caught.value.body["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": None}, "prompt: is missing"),
        ({"prompt": ["a", "b"]}, "prompt: several prompts in one request are not supported"),
        ({"prompt": [[1], [2]]}, "prompt: several prompts in one request are not supported"),
        ({"prompt": [1, "a"]}, "prompt: is neither a text nor a list of token ids"),
        ({"prompt": [True]}, "prompt: is neither a text nor a list of token ids"),
        ({"prompt": {"a": 1}}, "prompt: is neither a text nor a list of token ids"),
        ({"echo": True}, "echo: is not supported"),
        ({"logprobs": 0}, "logprobs: is not supported"),
        ({"suffix": "x"}, "suffix: is not supported"),
        ({"messages": HELLO}, "messages: is not supported"),
        ({"max_completion_tokens": 1}, "max_completion_tokens: is not supported"),
    ],
)
def test_what_a_completion_cannot_have(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError) as caught:
        completion(**fields)
    assert (caught.value.status, caught.value.message) == (400, message)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b'"a"', b"\xff{}", b'{"a": NaN}', b'{"a": -Infinity}', b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}"],
    ids=range(9),
)  # fmt: skip
def test_a_body_that_is_no_object_of_json(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_json(body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")
    assert "\n" not in caught.value.message


def test_private_requests_have_nothing_by_default() -> None:
    options = {"max_tokens": 5, "stop": [], "ignore_eos": False, "digest": True, "temperature": 0.0, "top_k": 0}
    name, asked = parse_private({"job": "j" * 32, "ids": [1, 2], "options": options})
    assert (name, asked.prompt) == ("j" * 32, IdsPrompt((1, 2)))
    assert asked.options.digest
    assert asked.options.sampling == SamplingOptions()
    _, asked = parse_private({"job": "j" * 32, "messages": HELLO, "template": "t", "options": options})
    assert asked.prompt == ChatPrompt(HELLO, "t")
    for wrong in (
        {"job": "short", "ids": [1], "options": options},
        {"job": "j" * 32, "ids": [1], "text": "a", "options": options},
        {"job": "j" * 32, "ids": [1], "template": "a", "options": options},
        {"job": "j" * 32, "ids": [1], "options": {}},
        {"job": "j" * 32, "ids": [1], "options": options | {"backend": "numpy"}},
        {"job": "j" * 32, "ids": [1], "options": options, "model": "/etc/passwd"},
        {"job": "j" * 32, "messages": HELLO, "template": "t" * ((1 << 20) + 1), "options": options},
    ):
        with pytest.raises(ApiError):
            parse_private(wrong)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(), max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
NAMES = st.sampled_from(
    "model messages prompt stream stream_options stop seed temperature top_p top_k min_p repeat_penalty max_tokens "
    "max_completion_tokens ignore_eos n logprobs tools user response_format job ids text options template".split()
)
MESSAGES = st.lists(
    st.dictionaries(st.sampled_from(["role", "content", "name", "tool_calls"]), JSON | st.just("user"), max_size=3)
)


@given(st.dictionaries(NAMES | st.text(max_size=5), JSON | MESSAGES | st.just({"include_usage": True}), max_size=6))
def test_no_body_does_more_than_be_taken_or_refused_in_one_line(body: dict[str, Any]) -> None:
    for parse in (lambda b: parse_chat(b, DEFAULTS), lambda b: parse_completion(b, DEFAULTS), parse_private):
        try:
            parse(body)
        except ApiError as error:
            assert error.status == 400
            assert "\n" not in error.message
            assert len(error.message) < 400
            json.loads(to_json(error.body).decode("utf-8"))


@given(st.binary(max_size=64))
def test_no_bytes_break_the_reader(data: bytes) -> None:
    try:
        parse_json(data)
    except ApiError as error:
        json.loads(to_json(error.body))
