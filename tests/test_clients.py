"""The clients that people have: the official `openai` packages for Python and Node, and the README's lines.

Everything here runs against `knot serve` (the emulator) and against `knot dev` (real workerd).
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from synth import make_tiny_knot
from test_commands import KNOT, ROOT, free_ports

from knot.reader import load_header
from knot.workerd import node

if TYPE_CHECKING:
    from openai import OpenAI

README = (ROOT / "README.md").read_text(encoding="utf-8")
KEY = "a-key-of-a-client"
OTHER_KEY = "another-clients-key"
RUNTIMES = [
    pytest.param("serve", marks=pytest.mark.wasm),
    pytest.param("dev", marks=[pytest.mark.wasm, pytest.mark.workerd]),
]


@dataclass
class Server:
    """A running cluster and everything that it has said."""

    ready: dict[str, Any]
    model: str
    said: list[str] = field(default_factory=list[str])

    @property
    def url(self) -> str:
        """Where OpenAI's clients find it."""
        return f"{self.ready['gateway']}/v1"

    def client(self, key: str = KEY, **more: Any) -> OpenAI:
        from openai import OpenAI

        return OpenAI(base_url=self.url, api_key=key, timeout=120, **{"max_retries": 0, **more})


@pytest.fixture(scope="module", params=RUNTIMES)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("clients")
    knot = make_tiny_knot(folder / "tiny.knot")
    command = [
        *KNOT, request.param, str(knot), "--port", str(free_ports(14)), "--data", str(folder / "data"),
        "--shards", "3",
    ]  # fmt: skip
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "API_KEYS": f"{KEY},{OTHER_KEY}"},
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    said: list[str] = []
    listening = threading.Thread(target=said.extend, args=(process.stderr,))
    listening.start()
    try:
        line = process.stdout.readline()
        assert line, "".join(said)
        yield Server(json.loads(line), load_header(knot).name, said)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        finally:
            process.kill()
            listening.join(10)


MESSAGES: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the quick brown"}]


def test_models_are_listed_and_found_by_name(server: Server) -> None:
    client = server.client()
    assert [model.id for model in client.models.list()] == [server.model]
    assert client.models.retrieve(server.model).owned_by == "knot"


def test_a_chat_streamed_and_whole_say_the_same(server: Server) -> None:
    client = server.client()
    asked: dict[str, Any] = {"model": server.model, "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    [choice] = whole.choices
    assert choice.message.role == "assistant"
    assert choice.finish_reason in ("length", "stop")
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == choice.message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == choice.finish_reason
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_the_clients_own_accumulator_of_streams_ends_with_the_whole_answer(server: Server) -> None:
    client = server.client()
    asked: dict[str, Any] = {"model": server.model, "messages": MESSAGES, "max_tokens": 6, "seed": 11}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    with client.chat.completions.stream(**asked, logprobs=True, top_logprobs=2) as stream:
        for _ in stream:
            pass
        found = stream.current_completion_snapshot
    assert found.choices[0].message.content == whole.choices[0].message.content
    assert found.choices[0].logprobs is not None
    assert whole.choices[0].logprobs is not None
    assert found.choices[0].logprobs.content is not None
    assert whole.choices[0].logprobs.content is not None
    assert [entry.logprob for entry in found.choices[0].logprobs.content] == [
        entry.logprob for entry in whole.choices[0].logprobs.content
    ]
    assert all(len(entry.top_logprobs) == 2 for entry in whole.choices[0].logprobs.content)


def test_completions_take_all_that_is_theirs(server: Server) -> None:
    client = server.client()
    found = client.completions.create(
        model=server.model, prompt=[[5, 17, 42], [7, 8]], n=2, max_tokens=4, temperature=1.2, top_p=0.9,
        presence_penalty=0.5, frequency_penalty=0.5, logit_bias={"7": 2}, seed=3, stop=["zzz", "@@@"],
        logprobs=3, echo=True, user="somebody",
        extra_body={"top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1, "details": True},
    )  # fmt: skip
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    assert found.model_extra is not None
    made = found.model_extra["knot"]["choices"]
    assert [one["seed"] for one in made] == [3, 4, 3, 4]
    assert {"ttft_ms", "prefill_tok_s", "decode_tok_s", "cached_tokens"} <= made[0]["timings"].keys()
    for choice, prompt in zip(found.choices, [3, 3, 2, 2], strict=True):
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs is not None
        assert choice.logprobs.token_logprobs[0] is None
        assert len(choice.logprobs.token_logprobs) <= prompt + 4
    again = client.completions.create(
        model=server.model, prompt=[5, 17, 42], max_tokens=4, temperature=1.2, seed=3, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in again)


def test_errors_are_the_clients_own_types_with_what_is_wrong(server: Server) -> None:
    import openai

    client = server.client()
    ask = client.chat.completions.create
    with pytest.raises(openai.BadRequestError) as bad:
        ask(model=server.model, messages=MESSAGES, temperature=3)
    assert (bad.value.param, bad.value.code, bad.value.type) == (
        "temperature", "invalid_value", "invalid_request_error",
    )  # fmt: skip
    with pytest.raises(openai.BadRequestError) as unknown:
        ask(model=server.model, messages=MESSAGES, extra_body={"temprature": 1})
    assert (unknown.value.param, unknown.value.code) == ("temprature", "unknown_parameter")
    with pytest.raises(openai.NotFoundError) as missing:
        ask(model="gpt-4", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=server.model, input="x")
    with pytest.raises(openai.BadRequestError) as long:
        ask(model=server.model, messages=[{"role": "user", "content": "z" * 600}])
    assert long.value.code == "context_length_exceeded"
    assert "512" in str(long.value)


def test_keys_open_the_gateway_and_are_never_said(server: Server) -> None:
    import openai

    for key in (KEY, OTHER_KEY, server.ready["secret"]):
        assert server.client(key).models.list().data
    wrong = "a-key-that-is-wrong"
    for key in (wrong, KEY[:-1], KEY + "x", f"{KEY},{OTHER_KEY}"):
        with pytest.raises(openai.AuthenticationError) as caught:
            server.client(key).models.list()
        assert caught.value.code == "invalid_api_key"
        assert key not in str(caught.value)
    with pytest.raises(openai.AuthenticationError):
        server.client(wrong).chat.completions.create(model=server.model, messages=MESSAGES)
    said = "".join(server.said)
    for key in (KEY, OTHER_KEY, wrong):
        assert key not in said


def test_a_client_that_leaves_a_stream_disturbs_nobody(server: Server) -> None:
    client = server.client()
    asked: dict[str, Any] = {"model": server.model, "messages": MESSAGES, "max_tokens": 200}
    for _ in range(3):
        stream = client.chat.completions.create(**asked, stream=True, extra_body={"ignore_eos": True})
        assert next(iter(stream)).choices
        stream.close()
    whole = client.chat.completions.create(**{**asked, "max_tokens": 2}, extra_body={"ignore_eos": True})
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 2


def test_the_nodes_client_reads_what_the_pythons_does(server: Server) -> None:
    whole = server.client().chat.completions.create(
        model=server.model, messages=MESSAGES, max_tokens=6, temperature=0
    )
    done = subprocess.run(
        [node(), str(ROOT / "tests" / "openai_client.mjs"), server.url, server.model, json.dumps(MESSAGES)],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "OPENAI_API_KEY": KEY},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["models"] == [server.model]
    assert found["whole"] == found["streamed"] == whole.choices[0].message.content
    assert found["completion"]
    assert found["usage"] == whole.usage.total_tokens if whole.usage else False
    assert found["error"] == {"status": 400, "param": "temperature", "code": "invalid_value"}
    assert found["stranger"] == {"status": 401, "code": "invalid_api_key"}


def test_the_readmes_examples_of_clients_run_as_they_stand(server: Server, tmp_path: Path) -> None:
    section = README.split("## Ask it as you ask OpenAI")[1].split("\n## ")[0]
    [python] = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    [shell] = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    environment = {**os.environ, "SECRET": server.ready["secret"]}
    python, shell = (
        text.replace("http://localhost:8080", server.ready["gateway"]) for text in (python, shell)
    )
    assert server.ready["gateway"] in python
    assert server.ready["gateway"] in shell
    done = subprocess.run(
        [sys.executable, "-c", python],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip().splitlines()) >= 2
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", shell],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert '"chat.completion"' in done.stdout
    assert "data: [DONE]" in done.stdout
    assert '"error"' not in done.stdout
