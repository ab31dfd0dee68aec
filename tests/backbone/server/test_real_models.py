"""A real chat model behind the server: its own template, long prompts beside answers, its end token."""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import subprocess
import sys
import threading
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


def test_eight_streaming_chats_over_three_workers_one_of_which_is_killed(tmp_path: Path, cache: Path) -> None:
    model = str(real_model("smol-experts"))
    questions = [f"Tell me one thing about the number {number}." for number in range(8)]
    (tmp_path / "here").mkdir()
    flags = ("-m", model, "--workers", "3", "--parallel", "8")
    with (
        serving(tmp_path / "here", *flags, own_template=True, cache=cache) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client,
    ):
        begun = [threading.Event() for _ in questions]

        def chat(number: int) -> str:
            messages: Any = [{"role": "user", "content": questions[number]}]
            pieces = list[str]()
            for event in client.chat.completions.create(
                model="smol-experts", messages=messages, max_tokens=40, stream=True
            ):
                pieces += [choice.delta.content or "" for choice in event.choices]
                if len(pieces) == 6:
                    begun[number].set()
            return "".join(pieces)

        with concurrent.futures.ThreadPoolExecutor(len(questions)) as pool:
            chats = [pool.submit(chat, number) for number in range(len(questions))]
            for event in begun:
                assert event.wait(300)
            os.kill(server.workers()[0], signal.SIGKILL)
            texts = [each.result() for each in chats]
        states = [worker["state"] for worker in server.get("/status")["server"]["workers"]]
        assert sorted(states) == ["lost", "serving", "serving"]
        for question, text in zip(questions, texts, strict=True):
            args = ["--chat", "-n", "40", "--json", "--workers", "0", "-m", model, question]
            command = [sys.executable, "-m", "backbone", "generate", *args]
            done = subprocess.run(command, capture_output=True, check=True, env=server.environ)
            assert text == json.loads(done.stdout)["text"]
