"""What a shard is told to be: the slice of the vocabulary it owns and the memory it may use."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from engine.fit import ShardMemory
from knot.config import MAX_VOCAB, ModelConfig
from protocol.settings import Settings, SettingsError, Variables

DAY_SECONDS = 24 * 3600


@dataclass(frozen=True, slots=True)
class ShardSettings(ShardMemory):
    """A shard's settings. Times in seconds. `use_kv` says whether rows seen twice are kept in Workers KV."""

    knot_key: str
    vocab_start: int
    vocab_end: int
    max_queue: int
    use_warden: bool
    use_kv: bool
    kv_ttl: int

    @property
    def slice(self) -> tuple[int, int]:
        """The ids it owns, [vocab_start, vocab_end)."""
        return self.vocab_start, self.vocab_end

    @property
    def boot_key(self) -> str:
        """What a booted shard is kept under."""
        return f"{self.knot_key}|{self.vocab_start}-{self.vocab_end}"

    @classmethod
    def read(cls, variables: Variables) -> ShardSettings:
        """Reads the variables. Raises `SettingsError` that names the one at fault."""
        env = Settings(variables)
        settings = cls(
            **asdict(ShardMemory.of(env)),
            knot_key=env.text("KNOT_KEY"),
            vocab_start=env.integer("VOCAB_START", 0, MAX_VOCAB),
            vocab_end=env.integer("VOCAB_END", 1, MAX_VOCAB),
            max_queue=env.integer("MAX_QUEUE", 1, 100_000, 256),
            use_warden=env.choice("USE_COBORDISM_WARDEN", ("on", "off"), "on") == "on",
            use_kv=env.choice("USE_KV", ("on", "off"), "on") == "on",
            kv_ttl=env.integer("KV_TTL_SECONDS", 60, 365 * DAY_SECONDS, DAY_SECONDS),
        )
        if settings.vocab_start >= settings.vocab_end:
            raise SettingsError(
                f"VOCAB_END is {settings.vocab_end}, expected more than VOCAB_START, {settings.vocab_start}"
            )
        return settings

    def check_vocabulary(self, model: ModelConfig) -> None:
        """Raises `SettingsError` when the slice leaves the vocabulary; rows beyond it belong to no shard."""
        if self.vocab_end > model.vocab_size:
            raise SettingsError(
                f"VOCAB_END is {self.vocab_end}, but {self.knot_key} has {model.vocab_size} ids (its table: "
                f"{model.embedding_rows} rows, of which those beyond the ids belong to no shard)"
            )
