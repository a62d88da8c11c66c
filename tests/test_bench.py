"""The front of the measurements: what it lists, and what it says of wrong inputs. Nothing is measured."""

from __future__ import annotations

import argparse

import pytest

from bench.__main__ import main, measurements

MEASUREMENTS = {one.name: one for one in measurements()}


@pytest.mark.parametrize("name", MEASUREMENTS)
def test_the_quick_form_of_a_measurement_is_one_that_its_own_options_allow(name: str) -> None:
    one = MEASUREMENTS[name]
    parser = argparse.ArgumentParser(exit_on_error=False)
    one.add_arguments(parser)
    parser.parse_args(one.quick or [])
    assert one.summary


def test_a_model_that_is_not_there_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["accuracy", "nothing"]) == 1
    assert capsys.readouterr().err.startswith("bench: the model nothing is not in models/")


@pytest.mark.parametrize("text", ["0", "-1", "x"])
def test_a_count_that_is_none_is_refused_with_what_was_expected(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["accuracy", f"--prompts={text}"])
    assert f"--prompts: '{text}', expected a whole number of at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "said"), [
    (["kernels", "--types", "Q9"], "--types: invalid choice: 'Q9' (choose from"),
    (["model", "--llama-cpp", "nowhere"], "nowhere has no llama_cpp: run `pip install --target nowhere"),
])  # fmt: skip
def test_a_type_or_folder_that_is_not_there_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(words)
    assert said in capsys.readouterr().err
