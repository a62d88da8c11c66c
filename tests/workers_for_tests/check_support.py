"""What checks have in common."""


async def raises(awaitable, *words):
    """Asserts that something fails, by a sentence that has these words."""
    sentence = None
    try:
        await awaitable
    except Exception as error:
        sentence = str(error)
    assert sentence is not None, "nothing was raised"
    for word in words:
        assert word in sentence, sentence


def refused(make):
    """Whether a plain call fails."""
    try:
        make()
    except Exception:
        return True
    return False


def object_of(env, name="n"):
    """An object of this check, which may share its Worker with others."""
    return env.NOTES.get(env.NOTES.idFromName(f"{getattr(env, 'number', '')}{name}"))
