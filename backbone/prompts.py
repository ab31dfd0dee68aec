"""What an answer begins with, as people and requests give it: a text, token ids, or the messages of a chat."""

from __future__ import annotations

from dataclasses import dataclass

from .chat_template import Messages, encode_chat, render_chat, template_of
from .model import Model
from .tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A text to continue."""

    text: str


@dataclass(frozen=True, slots=True)
class IdsPrompt:
    """Token ids, taken as they are."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages, for a chat template: the model's own where none is given."""

    messages: Messages
    template: str | None = None


Prompt = TextPrompt | IdsPrompt | ChatPrompt


def prompt_ids(prompt: Prompt, model: Model, tokenizer: Tokenizer) -> list[int]:
    """The token ids of a prompt. ChatTemplateError when there is no template, or it fails."""
    if isinstance(prompt, IdsPrompt):
        return list(prompt.ids)
    if isinstance(prompt, TextPrompt):
        return tokenizer.encode(prompt.text)
    template = prompt.template if prompt.template is not None else template_of(model.gguf.metadata, str(model.path))
    bos, eos = tokenizer.bos_text, tokenizer.eos_text
    return encode_chat(tokenizer, render_chat(template, prompt.messages, bos_token=bos, eos_token=eos))
