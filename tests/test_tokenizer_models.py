"""The tokenizer on real vocabularies: llama.cpp's vectors, llama.cpp itself, and known texts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import httpx
import pytest
import xllamacpp
from jinja2.sandbox import ImmutableSandboxedEnvironment
from model_files import goldens, model_file
from tokenizer_support import HOSTS, host

from knot.chat import render
from knot.gguf_guard import read_gguf
from knot.tokenizer import Tokenizer
from knot.tokenizer_section import build_section
from scripts.fetch_vocab_vectors import fetch

pytestmark = pytest.mark.models

ROOT = Path(__file__).resolve().parent.parent
CHAT = (
    "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
SEPARATOR = "\n__ggml_vocab_test__\n"


@cache
def section(path: Path, pre: str | None = None) -> bytes:
    metadata = read_gguf(path, header_only=True).metadata
    return build_section({**metadata, "tokenizer.ggml.pre": pre} if pre else metadata)


@cache
def tokenizer(
    path: Path, pre: str | None = None, host_name: str = "native", normalize: bool = True
) -> Tokenizer:
    return Tokenizer(host(host_name), section(path, pre), normalize=normalize)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("host_name", HOSTS)
@pytest.mark.parametrize(
    ("name", "pre"),
    [("qwen2", None), ("llama-bpe", None), ("starcoder", "smollm"), ("refact", "smollm")],
)
def test_llama_cpps_vectors_are_met_one_and_all(name, pre, host_name, normalize):
    path = fetch() / f"ggml-vocab-{name}.gguf"
    subject = tokenizer(path, pre, host_name, normalize)
    texts = Path(f"{path}.inp").read_bytes().decode().split(SEPARATOR)
    expected = Path(f"{path}.out").read_text().split("\n")
    assert len(texts) == len(expected) >= 40
    for text, line in zip(texts, expected, strict=True):
        ids = [int(number) for number in line.split()]
        assert subject.encode(text, add_bos=False) == ids, repr(text)


def test_texts_that_others_got_wrong_are_right():
    qwen2 = tokenizer(fetch() / "ggml-vocab-qwen2.gguf")
    assert qwen2.encode("->") == [405]
    assert qwen2.encode("(x):\n") == [2075, 982]
    assert qwen2.encode("歪") == [107687]
    llama = tokenizer(fetch() / "ggml-vocab-llama-bpe.gguf")
    assert llama.encode("歪", add_bos=False) == [15722, 103]


def test_llama_adds_a_beginning_and_qwen2_none():
    llama = tokenizer(fetch() / "ggml-vocab-llama-bpe.gguf")
    assert llama.encode("hi")[0] == 128_000
    assert llama.encode("<|begin_of_text|>hi", allow_special=True).count(128_000) == 1
    assert tokenizer(fetch() / "ggml-vocab-qwen2.gguf").encode("hi") == [6023]


def test_a_split_character_of_a_real_vocabulary_is_held_back():
    subject = tokenizer(fetch() / "ggml-vocab-llama-bpe.gguf")
    stream = subject.stream()
    assert [stream.push(15722), stream.push(103), stream.finish()] == ["", "歪", ""]


@pytest.mark.shared
@pytest.mark.parametrize(
    ("golden", "key", "template"),
    [("smol", "smol", "{}"), ("q05", "q05", "{}"), ("q15", "q05", "{}"), ("q15_chat", "q05", CHAT)],
)
def test_the_goldens_prompts_give_the_goldens_ids(golden, key, template):
    subject = tokenizer(model_file(key))
    lines = goldens(golden)
    assert lines
    for entry in lines:
        prompt = template.format(entry["prompt"])
        assert subject.encode(prompt, allow_special=template != "{}") == entry["prompt_ids"]
        stream = subject.stream()
        streamed = "".join(map(stream.push, entry["gen_ids"]))
        # The goldens' texts show an unfinished last character as U+FFFD.
        assert streamed + stream.finish() == entry["text"]


@pytest.mark.parametrize("key", ["smol", "q05"])
def test_ids_marked_unused_have_no_text_that_gives_them(key):
    subject = tokenizer(model_file(key))
    for start, end in subject.info.unused:
        for token in (start, end - 1):
            text = subject.token_bytes(token).decode()
            assert token not in subject.encode(text, allow_special=True)
    assert subject.info.unused == ({"smol": (), "q05": ((151_665, 151_936),)}[key])


Tokenize = Callable[[str, bool], list[int]]


@pytest.fixture(scope="module", params=["smol", "q05"])
def llama_cpp(request: pytest.FixtureRequest) -> Iterator[tuple[str, Tokenize]]:
    """A model's key and llama.cpp's own tokenizer of it."""
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(model_file(request.param))
    parameters.n_ctx = 256
    parameters.warmup = False
    server = xllamacpp.Server(parameters)
    with httpx.Client(base_url=server.listening_address, trust_env=False, timeout=60) as client:

        def tokenize(text: str, special: bool) -> list[int]:
            question = {"content": text, "add_special": False, "parse_special": special}
            return client.post("/tokenize", json=question).json()["tokens"]

        yield request.param, tokenize


def test_llama_cpp_itself_gives_the_same_ids(llama_cpp):
    key, tokenize = llama_cpp
    subject = tokenizer(model_file(key), normalize=False)
    chance = random.Random(11)
    pieces = [
        *"abcXYZ 019.,!'\"\n\r\t  \u3000\u00a0\u0301é日本한글🚀½٣",
        "'s",
        "'LL",
        " the",
        "\r\n",
        "  ",
        "->",
    ]
    pieces += ["<|im_end|>", "<tool_call>", "<|endoftext|>", "def f(x):\n    ", "naïve", "١٢٣", "👩\u200d👧"]
    for _ in range(600):
        text = "".join(chance.choice(pieces) for _ in range(chance.randint(1, 40)))
        for special in (False, True):
            assert subject.encode(text, allow_special=special) == tokenize(text, special), (text, special)


@pytest.mark.parametrize("key", ["smol", "q05", "q15"])
def test_the_bounds_of_the_sandbox_change_nothing_of_what_real_templates_say(key: str):
    template = tokenizer(model_file(key)).info.chat_template
    assert template
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(template)
    user = {"role": "user", "content": "Why?"}
    for messages in (
        [user],
        [{"role": "system", "content": "Be brief."}, user, {"role": "assistant", "content": "So."}, user],
        [user, {"role": "system", "content": "Be brief."}, {"role": "user", "content": "歪 <b>&amp; " * 999}],
    ):
        variables = {"add_generation_prompt": True, "bos_token": "<s>", "eos_token": "</s>", "tools": None}
        assert render(template, messages, bos_token="<s>", eos_token="</s>") == plain.render(
            messages=messages, **variables
        )


@pytest.mark.shared
def test_a_chat_becomes_the_ids_that_llama_cpp_makes_of_it():
    [line] = goldens("q15_chat")
    subject = tokenizer(model_file("q15"))
    assert subject.info.chat_template
    text = render(subject.info.chat_template, [{"role": "user", "content": line["prompt"]}])
    assert subject.encode(text, allow_special=True) == line["prompt_ids"]
