"""The tokenizer as the gateway uses it: special tokens, streams, errors, on each host."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_support import CONTROL_TEXTS, HOSTS, host, section, tokenizer, trained

from engine.errors import BadArgument, BadData, BadState, EngineError, Unsupported
from knot.tokenizer import Tokenizer


@pytest.fixture(params=HOSTS)
def subject(request: pytest.FixtureRequest) -> Tokenizer:
    return tokenizer("qwen2", request.param)


START, END, END_LONG, TOOL, TOOL_LONG = range(len(trained("qwen2")[0]), len(trained("qwen2")[0]) + 5)


def test_control_tokens_are_text_unless_the_caller_allows_them(subject):
    text = "<|im_start|>user\nhi<|im_end|>"
    allowed = subject.encode(text, allow_special=True)
    assert (allowed[0], allowed[-1]) == (START, END)
    plain = subject.encode(text)
    assert not {START, END} & set(plain)
    assert subject.decode(plain) == subject.decode(allowed) == text


def test_the_longest_special_token_wins(subject):
    assert subject.encode("<|im_end|>|x", allow_special=True)[0] == END_LONG
    assert subject.encode("<tool_call>>") == [TOOL_LONG]
    assert subject.encode("<tool_call> >")[0] == TOOL


def test_a_beginning_of_text_is_not_doubled(subject):
    assert subject.encode("hi", add_bos=True)[0] == START
    assert subject.encode("<|im_start|>hi", allow_special=True, add_bos=True).count(START) == 1
    assert START not in subject.encode("hi")
    assert START not in subject.encode("hi", add_bos=False)


def test_the_section_decides_about_the_beginning_where_the_caller_does_not():
    subject = Tokenizer(host(), section("llama-bpe", add_bos=True))
    first = subject.info.bos_id
    assert subject.encode("hi")[0] == first
    assert first not in subject.encode("hi", add_bos=False)
    assert subject.encode("") == [first]


def test_a_character_cut_over_tokens_is_held_back(subject):
    stream = subject.stream()
    deltas = [stream.push(token) for token in subject.encode("\U00012a5e")]
    assert len(deltas) > 1
    assert deltas == [""] * (len(deltas) - 1) + ["\U00012a5e"]
    assert stream.finish() == ""


def test_an_unfinished_character_is_replaced_at_the_end_only(subject):
    ids = subject.encode("a\U00012a5e")[:-1]
    stream = subject.stream()
    assert "".join(map(stream.push, ids)) == "a"
    assert stream.finish() == "\ufffd"
    assert subject.decode(ids) == "a\ufffd"


@given(data=st.lists(st.binary(max_size=4) | st.text(max_size=2).map(str.encode), max_size=30).map(b"".join))
@settings(deadline=None, max_examples=300)
def test_any_bytes_are_streamed_as_python_decodes_the_whole(data):
    subject = tokenizer("qwen2")
    byte_ids = {subject.token_bytes(token): token for token in range(256)}
    stream, text = subject.stream(), ""
    for end, byte in enumerate(data, 1):
        text += stream.push(byte_ids[bytes([byte])])
        # What is out is the text of all bytes but the three last at most.
        assert text in {data[:cut].decode("utf-8", "replace") for cut in range(max(0, end - 3), end + 1)}
    assert text + stream.finish() == data.decode("utf-8", "replace")


def test_streams_do_not_mix(subject):
    first, second = subject.stream(), subject.stream()
    head, *rest = subject.encode("\U00012a5e")
    assert first.push(head) == ""
    assert second.push(subject.encode("a")[0]) == "a"
    assert second.finish() == ""
    assert "".join(map(first.push, rest)) == "\U00012a5e"
    assert first.finish() == ""


def test_a_stream_that_has_ended_is_an_error(subject):
    stream = subject.stream()
    stream.finish()
    with pytest.raises(BadState, match="stream"):
        stream.push(0)


@pytest.mark.parametrize("wrong", [-1, 10_000, 1 << 40])
def test_an_id_outside_the_vocabulary_is_named(subject, wrong):
    size = subject.info.n_tokens
    with pytest.raises(BadArgument, match=f"token {wrong} is outside the vocabulary of {size} tokens"):
        subject.decode([0, wrong])
    stream = subject.stream()
    with pytest.raises(BadArgument, match=f"token {wrong} is outside"):
        stream.push(wrong)
    assert stream.finish() == ""


def test_texts_and_ids_larger_than_the_mailbox_go_through_in_pieces(subject):
    text = "the world 世界 🚀\n" * 20_000
    ids = subject.encode(text)
    assert len(text.encode()) > 4 * 65536
    assert len(ids) > 65536
    assert subject.decode(ids) == text


def test_nothing_comes_of_nothing(subject):
    assert subject.encode("") == []
    assert subject.decode([]) == ""


def test_a_lone_surrogate_counts_as_a_replacement_character(subject):
    assert subject.decode(subject.encode("a\ud800b\udfff")) == "a\ufffdb\ufffd"
    assert subject.decode(subject.encode("\ud83d\ude80")) == "🚀"


def test_decomposed_text_is_composed_where_the_section_says_so():
    composing = tokenizer("qwen2", normalize=True)
    assert composing.encode("e\u0301") == composing.encode("é")
    as_it_is = tokenizer("qwen2", normalize=False)
    assert as_it_is.encode("e\u0301") != as_it_is.encode("é")
    other = Tokenizer(host(), section("smollm"))
    assert other.decode(other.encode("e\u0301")) == "e\u0301"


def test_composing_never_changes_a_special_token():
    subject = tokenizer("qwen2", normalize=True)
    # U+0338 would join the ">" before it.
    for control in CONTROL_TEXTS:
        ids = subject.encode(f"{control}\u0338e\u0301", allow_special=True)
        assert subject.decode(ids[:1]) == control
        assert subject.decode(ids[1:]) == "\u0338é"


@pytest.mark.parametrize("name", HOSTS)
def test_a_damaged_section_is_refused_and_leaves_the_engine_usable(name):
    engine = host(name)
    good = section("qwen2")
    broken = bytearray(good)
    broken[-1 - len(b"<tool_call>>") :] = b"\xff" * (len(b"<tool_call>>") + 1)
    with pytest.raises(BadData, match="not valid UTF-8"):
        Tokenizer(engine, broken)
    with pytest.raises(BadData, match="bytes, its header says"):
        Tokenizer(engine, good[:-1])
    assert Tokenizer(engine, good).encode("the") == tokenizer("qwen2").encode("the")


def test_a_section_larger_than_the_engine_may_be_is_refused():
    with pytest.raises(EngineError, match="limit"):
        Tokenizer(host(limit=100_000), section("qwen2") + bytes(200_000))


@pytest.mark.parametrize("name", HOSTS)
def test_a_closed_tokenizer_frees_its_number_and_ends_its_streams(name):
    engine = host(name)
    first = Tokenizer(engine, section("qwen2"))
    stream = first.stream()
    first.close()
    with pytest.raises(BadState):
        stream.push(0)
    with pytest.raises(BadState):
        first.encode("a")
    assert Tokenizer(engine, section("smollm")).encode("a") == tokenizer("smollm").encode("a")


@pytest.mark.parametrize("name", HOSTS)
@pytest.mark.parametrize(
    ("call", "error"),
    [
        (("tok_encode", 0, 8), BadArgument),
        (("tok_encode", 7, 0), BadState),
        (("tok_text", 0, 0, 0xFFFFFFFF), EngineError),
        (("tok_ids", 0, 1, 1, 0), EngineError),
        (("tok_ids", 0, 0xFFFFFFFF, 0xFFFFFFFF, 0), EngineError),
        (("tok_bytes", 0, 0, 1, 0), EngineError),
        (("tok_decode", 0, 0, 0xFFFFFFFF), EngineError),
        (("tok_append", 0, 0, 1), BadState),
        (("tok_open", 9), BadState),
        (("tok_stream_create", 9), BadState),
        (("tok_stream_push", 0, 0, 0), BadState),
    ],
)
def test_a_call_with_wrong_numbers_is_refused(name, call, error):
    engine = host(name)
    Tokenizer(engine, section("qwen2"))
    with pytest.raises(error):
        engine.call(*call)


def test_a_pre_tokenizer_of_a_later_version_is_refused():
    later = bytearray(section("qwen2"))
    later[6] = 4
    engine = host()
    number = engine.call("tok_create", len(later))
    engine.write(0, bytes(later[:60_000]))
    engine.call("tok_append", number, 0, min(len(later), 60_000))
    for start in range(60_000, len(later), 60_000):
        part = bytes(later[start : start + 60_000])
        engine.write(0, part)
        engine.call("tok_append", number, 0, len(part))
    with pytest.raises(Unsupported, match="pre-tokenizer 4"):
        engine.call("tok_open", number)
