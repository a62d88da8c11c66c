"""The crate's tokenizer, over any host of the engine. Standard library only: it also runs in Workers.

Text goes in and ids come out; the vocabulary lives in the engine alone. One `Tokenizer` serves one
thread at a time: a call is several calls of the engine.
"""

from __future__ import annotations

import re
import struct
import unicodedata
from collections.abc import Iterable, Sequence

from engine.errors import BadArgument
from engine.host import EngineHost
from knot.tokenizer_layout import SpecialToken, TokenizerInfo, read_section_info

_ALLOW_SPECIAL, _DECIDE_BOS, _ADD_BOS = 1, 2, 4


class Tokenizer:
    """Text to ids and back, as the section of a knot says.

    `info` is everything the section says besides vocabulary and merges: special ids, the ids that end
    a generation, unused ids, the chat template.

    Where the section records NFC, text is normalised first, as the model's own tokenizer does; with
    `normalize=False` it is taken as it is, as llama.cpp does.
    """

    def __init__(self, host: EngineHost, section: bytes | bytearray | memoryview, *, normalize: bool = True):
        self.info: TokenizerInfo = read_section_info(section)
        self._host = host
        self._mailbox = host.call("engine_mailbox_bytes")
        self._normalize = normalize and self.info.normalizer == "nfc"
        self._always = _pattern(token for token in self.info.special_tokens if not token.control)
        self._allowed = _pattern(self.info.special_tokens)
        self._number = host.call("tok_create", len(section))
        try:
            self._send("tok_append", section)
        except BaseException:
            self.close()
            raise
        # A section that cannot be opened is dropped by the engine itself.
        host.call("tok_open", self._number)

    def encode(self, text: str, allow_special: bool = False, add_bos: bool | None = None) -> list[int]:
        """The ids of `text`.

        Control tokens (`<|im_start|>`) are honoured only with `allow_special`, otherwise their text is text;
        tokens that the vocabulary defines for texts (`<tool_call>`) always are. `add_bos` puts the
        beginning-of-text token first unless it is there already; left out, the section decides.
        A lone surrogate counts as U+FFFD.
        """
        text = self._normalized(_valid(text), allow_special)
        flags = _ALLOW_SPECIAL if allow_special else 0
        if add_bos is not None:
            flags |= _DECIDE_BOS | (_ADD_BOS if add_bos else 0)
        self._send("tok_text", text.encode())
        count = self._host.call("tok_encode", self._number, flags)
        ids: list[int] = []
        while len(ids) < count:
            part = min(count - len(ids), self._mailbox // 4)
            self._host.call("tok_ids", self._number, len(ids), part, 0)
            ids.extend(struct.unpack(f"<{part}I", self._host.read(0, 4 * part)))
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; bytes that are no text become U+FFFD. Special tokens are their text."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """The bytes of `ids`. Raises `BadArgument` for an id outside the vocabulary."""
        parts: list[bytes] = []
        for start in range(0, len(ids), self._mailbox // 4):
            some = ids[start : start + self._mailbox // 4]
            try:
                packed = struct.pack(f"<{len(some)}I", *some)
            except struct.error:
                wrong = next(token for token in some if not 0 <= token < self.info.n_tokens)
                raise self._unknown(wrong) from None
            self._host.write(0, packed)
            length = self._host.call("tok_decode", self._number, 0, len(some))
            for at in range(0, length, self._mailbox):
                part = min(length - at, self._mailbox)
                self._host.call("tok_bytes", self._number, at, part, 0)
                parts.append(self._host.read(0, part))
        return b"".join(parts)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, not always whole characters."""
        return self.decode_bytes((token_id,))

    def stream(self) -> StreamDecoder:
        """A decoder for ids that come one by one. Its `finish` frees what it holds in the engine."""
        return StreamDecoder(self._host, self._number, self.info.n_tokens)

    def memory_bytes(self) -> int:
        """Bytes that the engine holds for this tokenizer, beside its region."""
        return self._host.call("tok_memory", self._number)

    def close(self) -> None:
        """Frees what the engine holds, streams included. The tokenizer must not be used after."""
        self._host.call("tok_destroy", self._number)

    def _send(self, name: str, data: bytes | bytearray | memoryview) -> None:
        with memoryview(data) as view:
            for start in range(0, len(view), self._mailbox):
                # A host in JavaScript copies `bytes` fast and anything else byte by byte.
                part = bytes(view[start : start + self._mailbox])
                self._host.write(0, part)
                self._host.call(name, self._number, 0, len(part))

    def _normalized(self, text: str, allow_special: bool) -> str:
        if not self._normalize or unicodedata.is_normalized("NFC", text):
            return text
        pattern = self._allowed if allow_special else self._always
        # A special token ends where it ends: a combining mark after it must not change its last character.
        pieces = [text] if pattern is None else pattern.split(text)
        return "".join(
            piece if at % 2 else unicodedata.normalize("NFC", piece) for at, piece in enumerate(pieces)
        )

    def _unknown(self, token_id: int) -> BadArgument:
        return BadArgument(f"token {token_id} is outside the vocabulary of {self.info.n_tokens} tokens")


class StreamDecoder:
    """Text out of ids that come one by one: a character is held back until it is whole."""

    def __init__(self, host: EngineHost, tokenizer: int, n_tokens: int):
        self._host = host
        self._n_tokens = n_tokens
        self._number = host.call("tok_stream_create", tokenizer)

    def push(self, token_id: int) -> str:
        """The text that is certain after one more token: perhaps none.

        Raises `BadArgument` for an id outside the vocabulary.
        """
        if not 0 <= token_id < self._n_tokens:
            raise BadArgument(f"token {token_id} is outside the vocabulary of {self._n_tokens} tokens")
        return self._text(self._host.call("tok_stream_push", self._number, token_id, 0))

    def finish(self) -> str:
        """What was held back, as U+FFFD; frees the stream, which must not be used after."""
        return self._text(self._host.call("tok_stream_finish", self._number, 0))

    def _text(self, length: int) -> str:
        return self._host.read(0, length).decode() if length else ""


def _pattern(tokens: Iterable[SpecialToken]) -> re.Pattern[str] | None:
    """Matches the tokens' texts, the longest first; None for no tokens."""
    texts = sorted((token.text for token in tokens), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, texts))})") if texts else None


def _valid(text: str) -> str:
    """`text` with lone surrogates as U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
