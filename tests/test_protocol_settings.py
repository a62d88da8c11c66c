"""Settings from environment variables: every one is strict, and an error names the one at fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from core_support import header_of, knot_of

from protocol.settings import MIB, Settings, SettingsError
from route import GatewaySettings
from slice_settings import ShardSettings
from specialization import StationSettings

STATION = {
    "KNOT_KEY": "m.knot",
    "SPECIALIZATION_ROLE": "entry",
    "SPECIALIZATION_START_LAYER": "0",
    "SPECIALIZATION_END_LAYER": "14",
}
SHARD = {"KNOT_KEY": "m.knot", "VOCAB_START": "100", "VOCAB_END": "300"}
GATEWAY = {
    "KNOT_KEY": "m.knot",
    "STATION_RANGES": "0-14,14-28",
    "SHARD_RANGES": "0-100,100-300",
    "CLUSTER_SECRET": "sixteen letters!",
}
PARTS: dict[str, tuple[Callable[[Any], Any], dict[str, str]]] = {
    "station": (StationSettings.read, STATION),
    "shard": (ShardSettings.read, SHARD),
    "gateway": (GatewaySettings.read, GATEWAY),
}
# part, variable, lowest and highest value, and what it is when nothing is said.
INTEGERS = [
    ("station", "SPECIALIZATION_START_LAYER", 0, 1024, None),
    ("station", "SPECIALIZATION_END_LAYER", 1, 1024, None),
    ("station", "ENGINE_BYTES", MIB, 1024 * MIB, 44 * MIB),
    ("station", "ISOLATE_BYTES", MIB, 1 << 40, 120_000_000),
    ("station", "KV_BYTES", 0, 1024 * MIB, 12 * MIB),
    ("station", "BLOCK_BYTES", 1, 64 * MIB, 4 * MIB),
    ("station", "ANSWER_BYTES", 0, 64 * MIB, 2 * MIB),
    ("station", "MAX_BATCH_ROWS", 1, 4096, 128),
    ("station", "MAX_SESSIONS", 1, 4096, 64),
    ("station", "MAX_QUEUE", 1, 100_000, 256),
    ("station", "SESSION_TTL_SECONDS", 1, 1_000_000, 600),
    ("station", "SESSION_IDLE_SECONDS", 0, 1_000_000, 30),
    ("shard", "VOCAB_START", 0, 1 << 24, None),
    ("shard", "VOCAB_END", 1, 1 << 24, None),
    ("shard", "ENGINE_BYTES", MIB, 1024 * MIB, 44 * MIB),
    ("shard", "ISOLATE_BYTES", MIB, 1 << 40, 120_000_000),
    ("shard", "KEPT_LOGITS_BYTES", 0, 256 * MIB, 6 * MIB),
    ("shard", "BLOCK_BYTES", 1, 64 * MIB, 4 * MIB),
    ("shard", "MAX_BATCH_ROWS", 1, 4096, 32),
    ("shard", "MAX_QUEUE", 1, 100_000, 256),
    ("shard", "MAX_TOKENS", 1, 1_000_000, 65_536),
    ("shard", "KV_TTL_SECONDS", 60, 365 * 86_400, 86_400),
    ("gateway", "STEP_DEADLINE_SECONDS", 1, 3600, 120),
    ("gateway", "MAX_ATTEMPTS", 1, 100, 3),
    ("gateway", "MAX_GENERATED_TOKENS", 1, 1 << 20, 4096),
]
FIELDS = {
    "SPECIALIZATION_START_LAYER": "start_layer",
    "SPECIALIZATION_END_LAYER": "end_layer",
    "MAX_BATCH_ROWS": "max_rows",
    "SESSION_TTL_SECONDS": "session_ttl",
    "SESSION_IDLE_SECONDS": "session_idle",
    "KEPT_LOGITS_BYTES": "kept_bytes",
    "KV_TTL_SECONDS": "kv_ttl",
    "STEP_DEADLINE_SECONDS": "deadline",
    "MAX_ATTEMPTS": "attempts",
    "MAX_GENERATED_TOKENS": "max_tokens",
}
CHOICES = [
    ("station", "SPECIALIZATION_ROLE", ("entry", "middle", "exit", "whole")),
    ("station", "RESIDENCY", ("fluid", "pinned-prefix", "resident")),
    ("station", "KV_TYPE", ("f32", "f16", "q8_0")),
    ("station", "USE_LAYER_WARDEN", ("on", "off")),
    ("shard", "RESIDENCY", ("fluid", "pinned-prefix", "resident")),
    ("shard", "USE_COBORDISM_WARDEN", ("on", "off")),
    ("shard", "USE_KV", ("on", "off")),
]
REQUIRED = [
    *(("station", name) for name in STATION),
    *(("shard", name) for name in SHARD),
    *(("gateway", name) for name in GATEWAY),
]


def read(part: str, **changes: str) -> Any:
    reader, variables = PARTS[part]
    return reader({**variables, **changes}.get)


@pytest.mark.parametrize(("part", "name", "low", "high", "default"), INTEGERS)
def test_a_number_is_taken_within_its_bounds_and_nowhere_else(
    part: str, name: str, low: int, high: int, default: int | None
) -> None:
    field = FIELDS.get(name, name.lower())
    if default is not None:
        assert getattr(read(part), field) == default
        for value in {low, high, default}:
            assert getattr(read(part, **{name: str(value)}), field) == value
    wrong = [
        str(low - 1),
        str(high + 1),
        "",
        "1.5",
        "1e3",
        "0x10",
        " 5",
        "5 ",
        "+5",
        "--5",
        "-",
        "5MB",
        "five",
    ]
    wrong += ["٣", "²", "1_000", "9" * 5000, "-" + "9" * 5000, "NaN", "True"]
    for value in wrong:
        if value == "" and default is not None:
            assert getattr(read(part, **{name: value}), field) == default, "empty counts as not set"
            continue
        with pytest.raises(SettingsError, match=f"^{name} is ") as caught:
            read(part, **{name: value})
        assert len(str(caught.value)) < 300
        if value:
            assert f"expected a whole number from {low} to {high}" in str(caught.value)


@pytest.mark.parametrize(("part", "name", "words"), CHOICES)
def test_a_word_is_one_of_its_few(part: str, name: str, words: tuple[str, ...]) -> None:
    for word in words:
        read(part, **{name: word})
    for word in ("On", "true", "1", words[0].upper(), words[0] + " "):
        with pytest.raises(SettingsError, match=f"{name} is .*expected one of {', '.join(words)}"):
            read(part, **{name: word})


@pytest.mark.parametrize(("part", "name"), REQUIRED)
@pytest.mark.parametrize("empty", [False, True])
def test_what_must_be_set_is_missed_by_name(part: str, name: str, empty: bool) -> None:
    reader, variables = PARTS[part]
    left = {key: value for key, value in variables.items() if key != name}
    with pytest.raises(SettingsError, match=f"^{name} is not set"):
        reader({**left, **({name: ""} if empty else {})}.get)


@pytest.mark.parametrize("name", ["STATION_RANGES", "SHARD_RANGES"])
@pytest.mark.parametrize(
    "value",
    [
        "0", "0-", "-14", "14", "0-14,15-28", "0-14,13-28", "1-28", "0-0", "0-14,14-14", "14-0", "0-14,",
        ",0-14",
        "0-14;14-28", "0-14-28", "0--14", "a-b", "0-²", "0-٣", "0-" + "9" * 5000, "0 - 14", "0-14,14-+28",
    ],
)  # fmt: skip
def test_ranges_that_do_not_meet_end_to_end_from_zero_are_refused(name: str, value: str) -> None:
    with pytest.raises(
        SettingsError, match=f"^{name} is .*a range that begins at (0|14) was expected"
    ) as caught:
        read("gateway", **{name: value})
    assert len(str(caught.value)) < 700


def test_ranges_are_read_as_they_are_written() -> None:
    assert read("gateway").stations == ((0, 14), (14, 28))
    assert read("gateway", SHARD_RANGES="0-7").shards == ((0, 7),)
    assert read("gateway", SHARD_RANGES="0-7, 7-9").shards == ((0, 7), (7, 9))


@pytest.mark.parametrize("secret", [None, "", "hush", "fifteen letters"])
def test_without_a_secret_of_sixteen_characters_nothing_is_served(secret: str | None) -> None:
    with pytest.raises(SettingsError, match=r"CLUSTER_SECRET is .*nothing is served openly") as caught:
        Settings({"CLUSTER_SECRET": secret}.get).secret()
    if secret:
        assert secret not in str(caught.value), "a secret, even a bad one, is not for logs"


def test_a_secret_of_sixteen_characters_will_do() -> None:
    assert Settings({"CLUSTER_SECRET": "sixteen letters!"}.get).secret() == "sixteen letters!"


def test_api_keys_come_apart_at_commas_and_none_means_none() -> None:
    assert read("gateway").api_keys == ()
    assert read("gateway", API_KEYS="one").api_keys == ("one",)
    assert read("gateway", API_KEYS="one,,two,").api_keys == ("one", "two")


def test_a_slice_or_a_range_of_layers_that_ends_before_it_begins_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"SPECIALIZATION_END_LAYER is 3, expected more than .*, 3"):
        read("station", SPECIALIZATION_START_LAYER="3", SPECIALIZATION_END_LAYER="3")
    with pytest.raises(SettingsError, match="VOCAB_END is 100, expected more than VOCAB_START, 100"):
        read("shard", VOCAB_END="100")


@pytest.mark.parametrize(
    ("role", "start", "end", "right"),
    [
        ("exit", 0, 14, "entry"),
        ("whole", 0, 14, "entry"),
        ("entry", 14, 28, "exit"),
        ("middle", 0, 28, "whole"),
        ("entry", 7, 14, "middle"),
    ],
)
def test_a_role_that_does_not_fit_its_layers_is_refused_and_the_right_one_named(
    role: str, start: int, end: int, right: str
) -> None:
    changes = {"SPECIALIZATION_START_LAYER": str(start), "SPECIALIZATION_END_LAYER": str(end)}
    with pytest.raises(SettingsError, match=f"SPECIALIZATION_ROLE is '{role}'.*are those of '{right}'"):
        read("station", SPECIALIZATION_ROLE=role, **changes).check_layers(28)
    read("station", SPECIALIZATION_ROLE=right, **changes).check_layers(28)


def test_layers_or_ids_that_the_model_does_not_have_are_refused_with_both_numbers() -> None:
    with pytest.raises(SettingsError, match=r"SPECIALIZATION_END_LAYER is 14, but m\.knot has 3 layers"):
        read("station").check_layers(3)
    config = header_of(knot_of(padded_rows=12)).config
    assert (config.vocab_size, config.embedding_rows) == (300, 312)
    read("shard", VOCAB_END="300").check_vocabulary(config)
    with pytest.raises(
        SettingsError, match=r"VOCAB_END is 301, but m\.knot has 300 ids \(its table: 312 rows"
    ):
        read("shard", VOCAB_END="301").check_vocabulary(config)


def test_a_gateway_covers_every_layer_and_every_id_and_no_more() -> None:
    header = header_of(knot_of())
    read("gateway", STATION_RANGES="0-1,1-3", SHARD_RANGES="0-300").check(header)
    for ranges in ("0-2", "0-4"):
        with pytest.raises(
            SettingsError, match=rf"STATION_RANGES ends at layer {ranges[2]}, but m\.knot has 3"
        ):
            read("gateway", STATION_RANGES=ranges, SHARD_RANGES="0-300").check(header)
    for ranges in ("0-299", "0-303"):
        with pytest.raises(
            SettingsError, match=rf"SHARD_RANGES ends at id {ranges[2:]}, but m\.knot has 300"
        ):
            read("gateway", STATION_RANGES="0-3", SHARD_RANGES=ranges).check(header)


def test_a_boot_is_kept_under_key_role_and_range() -> None:
    assert read("station").boot_key == "m.knot|entry|0-14"
    assert read("shard").boot_key == "m.knot|100-300"
