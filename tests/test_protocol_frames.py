"""AWFR frames: pinned to the byte, refused for every single thing that can be wrong with them."""

from __future__ import annotations

import json
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from protocol.frames import (
    ALIGNMENT,
    DTYPES,
    MAX_HEADER,
    MAX_PAYLOAD,
    MAX_RANK,
    MAX_STEPS,
    MAX_TENSORS,
    PREFIX,
    BadFrame,
    Frame,
    Kind,
    Part,
    Tensor,
    decode,
    encode,
    tensor_bytes,
)


def raw(
    header: bytes,
    payload: bytes = b"",
    *,
    magic: bytes = b"AWFR",
    version: int = 1,
    bits: int = 1,
    flags: int = 0,
    header_length: int | None = None,
    payload_length: int | None = None,
    crc: int | None = None,
    padding: bytes | None = None,
) -> bytes:
    """A frame put together by hand, right but for what is given."""
    pad = bytes(-(20 + len(header)) % 8) if padding is None else padding
    body = header + pad + payload
    prefix = struct.pack(
        "<4sBBHIII",
        magic,
        version,
        bits,
        flags,
        len(header) if header_length is None else header_length,
        len(payload) if payload_length is None else payload_length,
        zlib.crc32(body) if crc is None else crc,
    )
    return prefix + body


def stated(*tensors: dict[str, Any], steps: list[Any] | None = None) -> bytes:
    """A header that states these tensors in one step, or these steps."""
    return json.dumps({"steps": [{"tensors": list(tensors)}] if steps is None else steps}).encode()


def entry(**changes: Any) -> dict[str, Any]:
    return {"name": "x", "dtype": "f32", "shape": [2], "offset": 0, "length": 8, **changes}


def test_a_frames_bytes_are_these() -> None:
    header = (
        b'{"steps":[{"session":"s","tensors":'
        b'[{"name":"x","dtype":"f32","shape":[1,2],"offset":0,"length":8},'
        b'{"name":"n","dtype":"u8","shape":[3],"offset":8,"length":3}]}]}'
    )
    assert (20 + len(header)) % 8, "the padding is to be seen"
    padding = bytes(8 - (20 + len(header)) % 8)
    payload = bytes.fromhex("0000803f 000000c0  010203 0000000000")  # 1.0, -2.0; 1, 2, 3; zeros
    by_hand = (
        bytes.fromhex("41574652 01 81 0000")
        + len(header).to_bytes(4, "little")
        + (16).to_bytes(4, "little")
        + zlib.crc32(header + padding + payload).to_bytes(4, "little")
        + header
        + padding
        + payload
    )
    part = Part(
        {"session": "s"},
        {
            "x": Tensor("x", "f32", (1, 2), struct.pack("<2f", 1, -2)),
            "n": Tensor("n", "u8", (3,), b"\1\2\3"),
        },
    )
    assert encode(Kind.FORWARD, [part], answer=True) == by_hand
    frame = decode(by_hand)
    assert frame.kind is Kind.FORWARD
    assert frame.answer
    assert [dict(p.envelope) for p in frame.parts] == [{"session": "s"}]
    assert bytes(frame.parts[0].tensors["x"].data) == payload[:8]
    assert bytes(frame.parts[0].tensors["n"].data) == b"\1\2\3"


# One to four bytes of UTF-8 each, what JSON escapes, and what ends lines.
names = st.text('az09 _"\\/\n\t\x00\x7fé歪😀\u2028', min_size=1, max_size=12)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 58), 1 << 58) | st.floats(-1e30, 1e30) | names,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def tensors(draw: st.DrawFn, name: str) -> Tensor:
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    shape = tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=MAX_RANK)))
    if dtype == "q8_0":
        shape = (*shape[:-1], shape[-1] * 32)
    size = tensor_bytes(dtype, shape)
    return Tensor(name, dtype, shape, draw(st.binary(min_size=size, max_size=size)))


@st.composite
def parts(draw: st.DrawFn) -> Part:
    envelope = draw(st.dictionaries(names.filter(lambda name: name != "tensors"), values, max_size=4))
    chosen = draw(st.lists(names, max_size=4, unique=True))
    return Part(envelope, {name: draw(tensors(name)) for name in chosen})


def same(frame: Frame, kind: Kind, answer: bool, sent: list[Part]) -> bool:
    return (frame.kind, frame.answer, len(frame.parts)) == (kind, answer, len(sent)) and all(
        got.envelope == want.envelope
        and list(got.tensors) == list(want.tensors)
        and all(
            (a.name, a.dtype, a.shape, bytes(a.data)) == (b.name, b.dtype, b.shape, bytes(b.data))
            for a, b in zip(got.tensors.values(), want.tensors.values(), strict=True)
        )
        for got, want in zip(frame.parts, sent, strict=True)
    )


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(Kind), st.booleans(), st.lists(parts(), max_size=4))
def test_whatever_is_sent_arrives_as_it_was_sent(kind: Kind, answer: bool, sent: list[Part]) -> None:
    data = encode(kind, sent, answer)
    assert same(decode(data), kind, answer, sent)
    assert same(decode(memoryview(data)), kind, answer, sent)


def test_steps_of_several_sessions_keep_their_own_tensors() -> None:
    sent = [
        Part({"session": f"s{i}"}, {"hidden": Tensor("hidden", "u8", (i, 3), bytes([i] * 3 * i))})
        for i in range(5)
    ]
    frame = decode(encode(Kind.FORWARD, sent))
    for i, part in enumerate(frame.parts):
        assert part.envelope["session"] == f"s{i}"
        assert bytes(part.tensor("hidden", "u8", 2).data) == bytes([i] * 3 * i)


LISTED: list[Any] = [0] * 9
VIOLATIONS: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "prefix, got 0 bytes"),
    "half a prefix": (b"AWFR\1\1", "prefix, got 6 bytes"),
    "another magic": (raw(stated(), magic=b"AWFs"), "begins with b'AWFR', got b'AWFs'"),
    "version 0": (raw(stated(), version=0), "version 0 and flags 0"),
    "version 2": (raw(stated(), version=2), "version 2 and flags 0"),
    "a flag": (raw(stated(), flags=1), "version 1 and flags 1"),
    "kind 0": (raw(stated(), bits=0), "kind is 0, expected 1 to 5"),
    "kind 6": (raw(stated(), bits=6), "kind is 6"),
    "kind 0 of an answer": (raw(stated(), bits=0x80), "kind is 0"),
    "a header over the cap": (raw(b"", header_length=MAX_HEADER + 1), f"{MAX_HEADER + 1} bytes of header"),
    "a payload over the cap": (raw(b"", payload_length=MAX_PAYLOAD + 1), f"{MAX_PAYLOAD + 1} of payload"),
    "a header of 4 GB": (raw(b"", header_length=0xFFFFFFFF), "4294967295 bytes of header"),
    "a header longer than the frame": (raw(stated(), header_length=500), "bytes in all, got"),
    "a payload longer than the frame": (raw(stated(), payload_length=8), "bytes in all, got"),
    "a trailing byte": (raw(stated()) + b"\0", "bytes in all, got"),
    "a wrong checksum": (raw(stated(), crc=1), "CRC-32 does not match"),
    "padding that is not zero": (raw(b'{"steps":[]}  ', padding=b"\0\0\0\0\0\1"), "padding .* is not zero"),
    "no JSON": (raw(b"steps"), "is not JSON"),
    "an empty header": (raw(b""), "is not JSON"),
    "JSON that is no object": (raw(b"[]"), "header is a list, expected an object"),
    "bytes that are no UTF-8": (raw(b'{"steps":["\xff"]}'), "is not UTF-8"),
    "half a character": (raw(b'{"steps":[{"a":"\\ud800"}]}'), "half a character"),
    "a key twice": (raw(b'{"steps":[],"steps":[]}'), "the key 'steps' twice"),
    "a key twice in a step": (raw(b'{"steps":[{"a":1,"a":2}]}'), "the key 'a' twice"),
    "NaN": (raw(b'{"steps":[{"a":NaN}]}'), "number NaN"),
    "a number without end": (raw(b'{"steps":[{"a":' + b"9" * 20 + b"}]}"), "number of 20 characters"),
    "deep nesting": (raw(b'{"steps":' + b"[" * 50_000 + b"]" * 50_000 + b"}"), "nested more than 8 deep"),
    "no steps": (raw(b"{}"), "steps are null, expected a list"),
    "steps that are no list": (raw(b'{"steps":{}}'), "steps are an object, expected a list"),
    "a step that is no object": (raw(stated(steps=[1])), "a step is the number 1"),
    "too many steps": (raw(stated(steps=[{}] * (MAX_STEPS + 1))), "1025 steps, at most 1024"),
    "tensors that are no list": (raw(stated(steps=[{"tensors": 3}])), "tensors are the number 3"),
    "too many tensors": (
        raw(stated(*[entry(name=f"x{i}", shape=[0], length=0) for i in range(MAX_TENSORS + 1)])),
        "a list of at most 16",
    ),
    "a tensor that is no object": (raw(stated("x")), "a tensor is the string 'x'"),  # type: ignore[arg-type]
    "a tensor with a key too many": (raw(stated(entry(more=1)), bytes(8)), "'more'"),
    "a tensor with a key too few": (
        raw(stated({"name": "x", "dtype": "f32", "shape": [2], "offset": 0}), bytes(8)),
        r"\['dtype', 'name', 'offset', 'shape'\]",
    ),
    "a name that is no text": (raw(stated(entry(name=3)), bytes(8)), "name is the number 3"),
    "an empty name": (raw(stated(entry(name="")), bytes(8)), "name is the string ''"),
    "a name too long": (raw(stated(entry(name="n" * 65)), bytes(8)), "expected 1 to 64 characters"),
    "a tensor twice": (
        raw(stated(entry(), entry(offset=8)), bytes(16)),
        "the tensor 'x' twice",
    ),
    "a dtype that is no text": (raw(stated(entry(dtype=None)), bytes(8)), "dtype of tensor 'x' is null"),
    "an unknown dtype": (raw(stated(entry(dtype="f64")), bytes(8)), "dtype 'f64' is not known"),
    "a shape that is no list": (raw(stated(entry(shape=2)), bytes(8)), "shape of tensor 'x' is 2, expected"),
    "a shape of no dimension": (raw(stated(entry(shape=[])), bytes(8)), "expected 1 to 4 sizes"),
    "a shape of five dimensions": (raw(stated(entry(shape=[1, 1, 1, 1, 2])), bytes(8)), "expected 1 to 4"),
    "a negative size": (raw(stated(entry(shape=[-2])), bytes(8)), "expected 1 to 4 sizes"),
    "a size that is true": (raw(stated(entry(shape=[True])), bytes(8)), "expected 1 to 4 sizes"),
    "a size that is no integer": (raw(stated(entry(shape=[2.0])), bytes(8)), "expected 1 to 4 sizes"),
    "a size over the cap": (raw(stated(entry(shape=[MAX_PAYLOAD + 1])), bytes(8)), "expected 1 to 4 sizes"),
    "sizes whose product overflows": (
        raw(stated(entry(shape=[MAX_PAYLOAD] * 4, length=8)), bytes(8)),
        r"\d{30,} bytes, but 8 is stated",
    ),
    "a shape that disagrees with the length": (
        raw(stated(entry(shape=[3])), bytes(8)),
        r"f32 of shape \[3\] is 12 bytes, but 8 is stated",
    ),
    "a length that is no integer": (raw(stated(entry(length="8")), bytes(8)), "but the string '8' is stated"),
    "a length that is true": (
        raw(stated(entry(dtype="u8", shape=[1], length=True)), bytes(8)),
        "but true is stated",
    ),
    "q8_0 rows that are no blocks": (
        raw(stated(entry(dtype="q8_0", shape=[2, 16], length=34)), bytes(40)),
        r"blocks of 32 elements, which \[2, 16\] does not hold",
    ),
    "a first tensor that begins late": (raw(stated(entry(offset=8)), bytes(16)), "begins at 8, expected 0"),
    "a gap between tensors": (
        raw(stated(entry(), entry(name="y", offset=16)), bytes(24)),
        "'y' begins at 16, expected 8",
    ),
    "tensors that overlap": (
        raw(stated(entry(), entry(name="y", offset=0)), bytes(8)),
        "'y' begins at 0, expected 8",
    ),
    "tensors of two steps that overlap": (
        raw(stated(steps=[{"tensors": [entry()]}, {"tensors": [entry()]}]), bytes(8)),
        "begins at 0, expected 8",
    ),
    "an offset that is not aligned": (
        raw(stated(entry(dtype="u8", shape=[3], length=3), entry(name="y", offset=3)), bytes(16)),
        "'y' begins at 3, expected 8",
    ),
    "a negative offset": (raw(stated(entry(offset=-8)), bytes(8)), "begins at -8"),
    "an offset that is false": (raw(stated(entry(offset=False)), bytes(8)), "begins at false"),
    "a tensor that leaves the payload": (
        raw(stated(entry(shape=[4], length=16)), bytes(8)),
        "ends at 16, but the payload has 8",
    ),
    "payload that belongs to nobody": (raw(stated(entry()), bytes(16)), "end at byte 8 of a payload of 16"),
    "payload without a step": (raw(stated(steps=[]), bytes(8)), "end at byte 0 of a payload of 8"),
}  # fmt: skip


@pytest.mark.parametrize(("data", "reason"), VIOLATIONS.values(), ids=VIOLATIONS)
def test_every_violation_is_a_bad_frame_that_says_what_is_wrong(data: bytes, reason: str) -> None:
    with pytest.raises(BadFrame, match=reason):
        decode(data)


@pytest.mark.parametrize(
    ("header", "payload"),
    [
        (stated(entry(dtype="z" * 500_000)), bytes(8)),
        (stated(entry(shape=[9] * 200_000)), bytes(8)),
        (stated(entry(**{"k" * 500_000: 1})), bytes(8)),
        (stated(entry(length="9" * 500_000)), bytes(8)),
        (stated(entry(offset="9" * 500_000)), bytes(8)),
        (b'{"' + b"k" * 400_000 + b'":1,"' + b"k" * 400_000 + b'":2}', b""),
    ],
    ids=["dtype", "shape", "key", "length", "offset", "twice"],
)
def test_a_reason_is_short_however_long_what_is_wrong(header: bytes, payload: bytes) -> None:
    with pytest.raises(BadFrame) as caught:
        decode(raw(header, payload))
    assert len(str(caught.value)) < 500


def a_frame() -> bytes:
    sent = [
        Part({"session": "a", "n": 1}, {"x": Tensor("x", "f32", (2, 3), bytes(range(24)))}),
        Part(
            {"session": "b"},
            {"y": Tensor("y", "q8_0", (1, 32), bytes(34)), "z": Tensor("z", "i32", (1,), bytes(4))},
        ),
    ]
    return encode(Kind.EMBED, sent)


def test_a_frame_cut_at_any_byte_is_a_bad_frame() -> None:
    data = a_frame()
    for end in range(len(data)):
        with pytest.raises(BadFrame):
            decode(data[:end])


def test_a_frame_with_any_one_byte_changed_is_a_bad_frame() -> None:
    data = a_frame()
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 0x5A
        with pytest.raises(BadFrame):
            decode(bytes(changed))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_mutations_with_a_right_checksum_decode_or_are_a_bad_frame_and_nothing_else(
    data: st.DataObject,
) -> None:
    body = bytearray(a_frame())
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(body) - 1))
        match data.draw(st.sampled_from(["set", "insert", "delete", "digit"])):
            case "set":
                body[at] = data.draw(st.integers(0, 255))
            case "insert":
                body[at:at] = data.draw(st.binary(max_size=4))
            case "delete":
                del body[at : at + data.draw(st.integers(1, 4))]
            case _:
                body[at] = data.draw(st.sampled_from(b'0123456789-[]{}",:'))
        assume(len(body) > PREFIX.size)
    body[16:20] = zlib.crc32(body[20:]).to_bytes(4, "little")
    try:
        frame = decode(bytes(body))
    except BadFrame:
        return
    # What decodes is a frame: it can be sent again as it is.
    assert same(
        decode(encode(frame.kind, frame.parts, frame.answer)), frame.kind, frame.answer, [*frame.parts]
    )


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_a_bad_frame(data: bytes) -> None:
    with pytest.raises(BadFrame):
        decode(data)
    with pytest.raises(BadFrame):
        decode(b"AWFR\1\1\0\0" + data)


@settings(max_examples=40, deadline=None)
@given(st.recursive(values, lambda inner: st.fixed_dictionaries({"steps": st.lists(inner)}), max_leaves=8))
def test_headers_of_any_json_decode_or_are_a_bad_frame(value: Any) -> None:
    for text in (value, {"steps": value}, {"steps": [value]}, {"steps": [{"tensors": value}]}):
        try:
            decode(raw(json.dumps(text).encode()))
        except BadFrame:
            continue


@pytest.mark.parametrize(
    "make",
    [
        lambda: raw(b"", header_length=MAX_HEADER, payload_length=MAX_PAYLOAD),
        lambda: raw(stated(entry(shape=[MAX_PAYLOAD], dtype="u8", length=MAX_PAYLOAD)), bytes(8)),
        lambda: raw(stated(entry(shape=[MAX_PAYLOAD] * 4)), bytes(8)),
    ],
    ids=["lengths", "a tensor of 64 MiB", "a shape of 10^31"],
)
def test_a_length_that_is_only_stated_takes_no_memory(make: Callable[[], bytes]) -> None:
    data = make()
    tracemalloc.start()
    try:
        with pytest.raises(BadFrame):
            decode(data)
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()


def test_tensors_are_views_into_the_frame_and_not_copies() -> None:
    data = encode(Kind.FORWARD, [Part({}, {"x": Tensor("x", "u8", (1 << 20,), bytes(1 << 20))})])
    tracemalloc.start()
    try:
        found = decode(data).parts[0].tensors["x"].data
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()
    assert isinstance(found, memoryview)
    assert found.obj is data


def test_a_tensor_whose_bytes_are_not_what_its_shape_says_cannot_be_made() -> None:
    with pytest.raises(BadFrame, match=r"'x': f32 of shape \[2, 3\] is 24 bytes, got 23"):
        Tensor("x", "f32", (2, 3), bytes(23))
    with pytest.raises(BadFrame, match="q8_0 rows have blocks of 32"):
        Tensor("x", "q8_0", (33,), bytes(34))


def test_a_part_hands_out_a_tensor_only_as_what_it_is() -> None:
    part = Part({}, {"x": Tensor("x", "f32", (1, 2), bytes(8))})
    assert part.tensor("x", "f32", 2).shape == (1, 2)
    with pytest.raises(BadFrame, match=r"no tensor 'y'; it has \['x'\]"):
        part.tensor("y", "f32", 2)
    with pytest.raises(BadFrame, match=r"'x' is f32 \[1, 2\], expected i32 of 2 dimensions"):
        part.tensor("x", "i32", 2)
    with pytest.raises(BadFrame, match="expected f32 of 1 dimensions"):
        part.tensor("x", "f32", 1)


def one(name: str = "x", shape: tuple[int, ...] = (0,)) -> dict[str, Tensor]:
    return {name: Tensor(name, "u8", shape, b"")}


@pytest.mark.parametrize(
    "sent",
    [
        [Part({})] * (MAX_STEPS + 1),
        [Part({"text": "x" * MAX_HEADER})],
        [Part({}, {"x": Tensor("x", "u8", (MAX_PAYLOAD // 2 + 1,), bytes(MAX_PAYLOAD // 2 + 1))})] * 2,
        [Part({}, {f"x{i}": Tensor(f"x{i}", "u8", (0,), b"") for i in range(MAX_TENSORS + 1)})],
        [Part({}, one(name="n" * 65))],
        [Part({}, one(name=""))],
        [Part({}, one(shape=(0,) * 5))],
        [Part({}, {"x": Tensor("x", "u8", (), b"\1")})],
        [Part({"temperature": float("nan")})],
        [Part({"name": "\ud800"})],
        [Part({"tensors": []})],
        [Part({"deep": [[[[[[[[]]]]]]]]})],
        [Part({"big": 10**20})],
    ],
    ids=["steps", "header", "payload", "tensors", "name", "no name", "rank", "scalar", "nan", "surrogate",
         "tensors in the envelope", "depth", "digits"],
)  # fmt: skip
def test_what_a_decoder_would_refuse_is_not_sent(sent: list[Part]) -> None:
    with pytest.raises(BadFrame):
        encode(Kind.FORWARD, sent)


def test_offsets_are_aligned_whatever_the_length_before() -> None:
    sizes = range(1, 2 * ALIGNMENT + 1)
    sent = [Part({}, {"x": Tensor("x", "u8", (n,), bytes([n] * n))}) for n in sizes]
    data = encode(Kind.ROWS, sent)
    length = PREFIX.unpack_from(data)[4]
    for step in json.loads(data[PREFIX.size : PREFIX.size + length])["steps"]:
        assert step["tensors"][0]["offset"] % ALIGNMENT == 0
    assert [bytes(part.tensors["x"].data) for part in decode(data).parts] == [bytes([n] * n) for n in sizes]
