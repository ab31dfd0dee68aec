"""A real chat model behind the server: its own template, long prompts beside answers, its end token."""

from __future__ import annotations

import concurrent.futures
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest
from real_models import real_model
from server_kit import serving

pytestmark = [pytest.mark.real_models, pytest.mark.timeout(900)]
SYSTEM = "You are a helpful assistant."
QUESTIONS = ["What is the capital of France?", "Name three colours.", "Count to five. " * 100, "Why is the sky blue?"]


def test_several_chats_at_once_are_what_generate_gives_each_alone(tmp_path: Path, cache: Path) -> None:
    model = str(real_model("smol-experts"))

    def alone(question: str, environ: Any) -> Any:
        args = ["--chat", "--system", SYSTEM, "-n", "24", "--json", "--workers", "0", "-m", model, question]
        command = [sys.executable, "-m", "backbone", "generate", *args]
        return json.loads(subprocess.run(command, capture_output=True, check=True, env=environ).stdout)

    (tmp_path / "here").mkdir()
    with (
        serving(tmp_path / "here", "-m", model, "--workers", "2", own_template=True, cache=cache) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client,
    ):

        def chat(question: str) -> Any:
            messages: Any = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
            return client.chat.completions.create(model="smol-experts", messages=messages, max_tokens=24)

        with concurrent.futures.ThreadPoolExecutor(len(QUESTIONS)) as pool:
            answers = list(pool.map(chat, QUESTIONS))
        for question, answer in zip(QUESTIONS, answers, strict=True):
            expected = alone(question, server.environ)
            assert answer.choices[0].message.content == expected["text"]
            assert answer.choices[0].finish_reason == {"eos": "stop", "limit": "length"}[expected["stop"]]
            assert answer.usage is not None
            assert answer.usage.prompt_tokens == len(expected["prompt_ids"])
            assert answer.usage.completion_tokens == len(expected["ids"])
    assert any(answer.choices[0].finish_reason == "stop" for answer in answers)
