"""What a station is told to be: the layers it owns and the memory it may use, from its variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

from engine.fit import StationMemory
from knot.config import MAX_LAYERS
from knot.topology import role_of
from protocol.settings import Settings, SettingsError, Variables

# Role → (owns layer 0, owns the last layer).
ROLES: Final[Mapping[str, tuple[bool, bool]]] = {
    "entry": (True, False),
    "middle": (False, False),
    "exit": (False, True),
    "whole": (True, True),
}


@dataclass(frozen=True, slots=True)
class StationSettings(StationMemory):
    """A station's settings. Sizes in bytes, times in seconds."""

    knot_key: str
    role: str
    start_layer: int
    end_layer: int
    max_queue: int
    session_ttl: int
    session_idle: int
    max_prefixes: int
    use_warden: bool

    @property
    def boot_key(self) -> str:
        """What a booted station is kept under."""
        return f"{self.knot_key}|{self.role}|{self.start_layer}-{self.end_layer}"

    @property
    def is_exit(self) -> bool:
        """Whether the station owns the last layer, and so the norm before the head."""
        return ROLES[self.role][1]

    @classmethod
    def read(cls, variables: Variables) -> StationSettings:
        """Reads the variables. Raises `SettingsError` that names the one at fault."""
        env = Settings(variables)
        settings = cls(
            **asdict(StationMemory.of(env)),
            knot_key=env.text("KNOT_KEY"),
            role=env.choice("SPECIALIZATION_ROLE", tuple(ROLES)),
            start_layer=env.integer("SPECIALIZATION_START_LAYER", 0, MAX_LAYERS),
            end_layer=env.integer("SPECIALIZATION_END_LAYER", 1, MAX_LAYERS),
            max_queue=env.integer("MAX_QUEUE", 1, 100_000, 256),
            session_ttl=env.integer("SESSION_TTL_SECONDS", 1, 1_000_000, 600),
            session_idle=env.integer("SESSION_IDLE_SECONDS", 0, 1_000_000, 30),
            max_prefixes=env.integer("MAX_PREFIXES", 0, 4096, 16),
            use_warden=env.choice("USE_LAYER_WARDEN", ("on", "off"), "on") == "on",
        )
        if settings.start_layer >= settings.end_layer:
            raise SettingsError(
                f"SPECIALIZATION_END_LAYER is {settings.end_layer}, expected more than "
                f"SPECIALIZATION_START_LAYER, {settings.start_layer}"
            )
        return settings

    def check_layers(self, num_layers: int) -> None:
        """Raises `SettingsError` when the role or the layers do not fit a model of `num_layers`."""
        first, last = ROLES[self.role]
        if self.end_layer > num_layers:
            raise SettingsError(
                f"SPECIALIZATION_END_LAYER is {self.end_layer}, but {self.knot_key} has {num_layers} layers"
            )
        if (self.start_layer == 0, self.end_layer == num_layers) != (first, last):
            raise SettingsError(
                f"SPECIALIZATION_ROLE is {self.role!r}, but layers [{self.start_layer}, {self.end_layer}) of "
                f"{num_layers} are those of "
                f"{role_of(self.start_layer, self.end_layer, num_layers)!r}"
            )
