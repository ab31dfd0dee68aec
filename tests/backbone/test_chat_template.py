"""Chat templates: what transformers makes of them, and what a hostile one cannot do."""

from __future__ import annotations

import json
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from vocabularies import bpe

from backbone.chat_template import (
    MAX_TEMPLATE_BYTES,
    TEMPLATE_KEY,
    ChatTemplateError,
    encode_chat,
    read_template,
    render_chat,
    template_of,
)
from backbone.tokenizer import load_tokenizer

TALK = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": "Grüß Gott 🙂"},
    {"role": "assistant", "content": "Ja."},
    {"role": "user", "content": "Und?"},
]


ENDS = {"bos_token": "<s>", "eos_token": "</s>"}


def render(template: str, messages: list[dict[str, Any]] | None = None) -> str:
    return render_chat(template, TALK if messages is None else messages, **ENDS)


def failure(template: str, messages: list[dict[str, Any]] | None = None) -> str:
    with pytest.raises(ChatTemplateError) as caught:
        render(template, messages)
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 400
    begin, end = "the chat template failed: ", "; another: --template FILE"
    assert message.startswith(begin)
    assert message.endswith(end)
    return message[len(begin) : -len(end)]


# As transformers does it


def test_chatml() -> None:
    template = (
        "{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message.content"
        " + '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    assert render(template) == (
        "<s><|im_start|>system\nBe <brief> & kind.<|im_end|>\n<|im_start|>user\nGrüß Gott 🙂<|im_end|>\n"
        "<|im_start|>assistant\nJa.<|im_end|>\n<|im_start|>user\nUnd?<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("a\n{% if true %}\nb\n{% endif %}\nc", "a\nb\nc"),  # trim_blocks
        ("a\n   {% if true %}b{% endif %}", "a\nb"),  # lstrip_blocks
        ("a\n   {{ 'b' }}\n", "a\n   b"),  # neither touches an expression; the last newline goes
        ("{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}{{ m.role }} {% endfor %}", "system assistant user "),
        ("{% for m in messages %}{% if loop.index == 3 %}{% break %}{% endif %}{{ m.role }} {% endfor %}", "system user "),
        ("{{ messages[0] | tojson }}", '{"role": "system", "content": "Be <brief> & kind."}'),
        ("{{ 'é' | tojson }} {{ 'é' | tojson(ensure_ascii=true) }}", '"é" "\\u00e9"'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}", '{\n "a": 2,\n "b": 1\n}'),
        ("{{ [1, 2] | tojson(separators=(',', ':')) }}", "[1,2]"),
        ("{{ '<&>\"' }}", '<&>"'),  # nothing is escaped for HTML
        ("{{ nothing }}{{ nothing is defined }}", "False"),
        ("{{ tools is none }} {{ documents is none }} {{ tools is defined }}", "True True True"),
        ("{% generation %}a{% set x = 1 %}{% endgeneration %}{{ x }}", "a"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "4"),
        ("{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f(eos_token) }}", "[</s>]"),
        ("{{ messages[1:] | map(attribute='role') | join(',') }}", "user,assistant,user"),
        ("{{ ' x '.strip() + 'abc'[::-1] + 'a-b'.split('-')[1].upper() }}", "xcbaB"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "2"),
    ],
)  # fmt: skip
def test_what_templates_rely_on(template: str, text: str) -> None:
    assert render(template) == text


def test_the_date_of_today() -> None:
    before = datetime.now().strftime("%d %b %Y")
    assert render("{{ strftime_now('%d %b %Y') }}") in (before, datetime.now().strftime("%d %b %Y"))


def test_the_words_of_the_template_are_shown() -> None:
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported!') }}{% endif %}"
    assert failure(template) == "System role not supported!"


def test_what_the_template_says_cannot_drive_a_terminal() -> None:
    assert failure("{{ raise_exception('a\n\x1b[2Jb\u202ec' + 'x' * 1000) }}").startswith(r"a \x1b[2Jb\u202ecxxx")


def test_a_mistake_is_told_with_its_line() -> None:
    assert failure("a\n{% if %}") == "line 2: Expected an expression, got 'end of statement block'"
    assert failure("{{ messages[0].no.such }}") == "'dict object' has no attribute 'no'"


# Hostile


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "more than 2 s"),
        ("{% set n = namespace(x=[1]) %}{% for i in range(64) %}{% set n.x = n.x + n.x %}{% endfor %}", "memory"),
        ("{{ 'x' * 10**9 }}", "memory"),
        ("{{ ('x' * 10**8)[:1] * 10**8 }}", "memory"),
        ("{{ 'x' * (20 * 1024 * 1024) }}", "the text is larger than 16 MiB"),
        ("{{ 9 ** 999999999 }}", "more than 2 s"),
        ("{{ 'a' | center(10**10) }}", "memory"),
        ("{{ '%1000000000d' % 1 }}", "memory"),
        ("{{ range(10**9) | list }}", "Range too big"),
        ("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "too deep (RecursionError)"),
        ("{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}", ""),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "access to attribute '__class__' of 'str' object is unsafe"),
        ("{{ raise_exception.__globals__.os }}", "access to attribute '__globals__'"),
        ("{{ cycler.__init__.__globals__.os.environ }}", "access to attribute '__init__'"),
        ("{{ ''['__class__']['__base__'] }}", "access to attribute '__class__' of 'str' object is unsafe"),
        ("{{ ('' | attr('__class__')).x }}", "access to attribute '__class__' of 'str' object is unsafe"),
        ("{{ '{0.__class__.__base__}'.format('') }}", "access to attribute '__class__' of 'str' object is unsafe"),
        ("{{ messages.append(1) }}", "access to attribute 'append' of 'list' object is unsafe"),
        ("{% include '/etc/passwd' %}", "no loader for this environment"),
        ("{% import 'os' as os %}", "no loader for this environment"),
    ],
)  # fmt: skip
def test_hostile_templates_end_in_one_line_soon(template: str, reason: str) -> None:
    started = time.monotonic()
    assert reason in failure(template)
    assert time.monotonic() - started < 15


def test_the_template_finds_no_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither the environment's words nor its modules reach the child."""
    (tmp_path / "jinja2.py").write_text("raise SystemExit('taken over')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONSTARTUP", "x")
    monkeypatch.setenv("TZ", "Pacific/Kiritimati")
    assert render("{{ strftime_now('%Z') }}") != "+14"


def test_messages_that_are_no_unicode() -> None:
    assert "surrogates not allowed" in failure("{{ messages[0].content }}", [{"role": "user", "content": "\ud800"}])


# Where the template comes from


def test_the_models_own_template() -> None:
    assert template_of({TEMPLATE_KEY: "abc"}, "m.gguf") == "abc"


@pytest.mark.parametrize("metadata", [{}, {TEMPLATE_KEY: 3}, {TEMPLATE_KEY: ["a"]}])
def test_no_template(metadata: dict[str, Any]) -> None:
    with pytest.raises(
        ChatTemplateError, match="^m.gguf: the model has no chat template; give one with --template FILE$"
    ):
        template_of(metadata, "m.gguf")


def test_a_template_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "t.jinja"
    path.write_bytes("ä\r\n".encode())
    assert read_template(str(path)) == "ä\r\n"


def test_a_file_that_cannot_be_used(tmp_path: Path) -> None:
    path = tmp_path / "t.jinja"
    with pytest.raises(ChatTemplateError, match="t.jinja: cannot be read: No such file or directory$"):
        read_template(str(path))
    path.write_bytes(b"ab\xff")
    with pytest.raises(ChatTemplateError, match="t.jinja: byte 2 is not UTF-8$"):
        read_template(str(path))
    path.write_bytes(b"a" * (MAX_TEMPLATE_BYTES + 1))
    with pytest.raises(ChatTemplateError, match="t.jinja: the chat template is larger than 1 MiB$"):
        read_template(str(path))


def test_a_template_too_large_in_the_model() -> None:
    with pytest.raises(ChatTemplateError, match="^m.gguf: the chat template is larger than 1 MiB$"):
        template_of({TEMPLATE_KEY: "é" * (MAX_TEMPLATE_BYTES // 2 + 1)}, "m.gguf")
    assert len(template_of({TEMPLATE_KEY: "a" * MAX_TEMPLATE_BYTES}, "m.gguf")) == MAX_TEMPLATE_BYTES


def test_bos_is_added_only_where_the_template_wrote_none() -> None:
    metadata = bpe(["<s>"], token_type=[1] * 256 + [3], bos_token_id=256, add_bos_token=True)
    tokenizer = load_tokenizer(metadata, "x")
    assert encode_chat(tokenizer, "<s>a") == [256, ord("a")]
    assert encode_chat(tokenizer, "a") == [256, ord("a")]
    without = load_tokenizer(metadata | {"tokenizer.ggml.add_bos_token": False}, "x")
    assert encode_chat(without, "a") == [ord("a")]


def test_the_request_is_data() -> None:
    """What a message holds is never run as a template."""
    assert render("{{ messages[0].content }}", [{"role": "user", "content": "{{ 1 + 1 }}"}]) == "{{ 1 + 1 }}"
    assert json.loads(render("{{ messages | tojson }}")) == TALK
