"""What a prompt on the command line means: text, ids, or a message in the model's own chat form."""

from __future__ import annotations

from pathlib import Path

from engine.host import EngineHost
from knot.chat import render
from knot.errors import KnotError
from knot.reader import load_header
from knot.tokenizer import Tokenizer


class PromptError(KnotError):
    """A prompt that cannot be had from what was given."""


def read_ids(text: str) -> list[int]:
    """Ids such as `1,2,3`. Raises `PromptError`."""
    try:
        return [int(piece) for piece in text.replace(" ", ",").split(",") if piece]
    except ValueError:
        raise PromptError(f"--ids is {text[:80]!r}, expected numbers such as 750,282,579") from None


def chat_ids(knot: Path, host: EngineHost, text: str) -> list[int]:
    """The ids of one user message in the chat form that the knot carries. Raises `PromptError`."""
    header = load_header(knot)
    section = header.tokenizer
    if section is None:
        raise PromptError(f"{knot.name} has no tokenizer; give --ids, or repair it with --tokenizer-from")
    with knot.open("rb") as file:
        file.seek(header.file_offset(section.offset))
        tokenizer = Tokenizer(host, file.read(section.length))
    info = tokenizer.info
    if info.chat_template is None:
        raise PromptError(f"{knot.name} has no chat template; leave --chat out")

    def word(token: int | None) -> str:
        return "" if token is None else tokenizer.token_bytes(token).decode(errors="replace")

    prompt = render(
        info.chat_template,
        [{"role": "user", "content": text}],
        bos_token=word(info.bos_id),
        eos_token=word(info.eos_id),
    )
    return tokenizer.encode(prompt, allow_special=True)
