"""Limits of the platform that no local runtime enforces but the emulator."""

from check_support import raises


def _notes(env, name="n"):
    return env.NOTES.get(env.NOTES.idFromName(name))


async def a_value_of_more_than_two_megabytes_isrefused(env, ctx):
    notes = _notes(env)
    await notes.keep("k", bytes(1_900_000))
    await raises(notes.keep("k", bytes(2_300_000)))
    assert len(await notes.kept("k")) == 1_900_000
