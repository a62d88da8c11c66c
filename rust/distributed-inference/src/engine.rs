//! The engine: one region and what has been configured in it.

use crate::region::Region;
use crate::shard::{Shard, ShardConfig};
use crate::station::{Station, StationConfig};
use crate::tokenizer::Tokenizers;
use crate::{Result, fail};

/// What an engine is configured as. One region serves one of them at a time.
pub enum Role {
    /// Nothing: an arena for single kernels.
    Arena,
    /// A range of layers.
    Station(Box<Station>),
    /// A slice of the vocabulary.
    Shard(Box<Shard>),
}

/// One engine. A wasm instance or a Python process may own several.
pub struct Engine {
    /// The memory that host and engine share.
    pub region: Region,
    /// Bytes the region may never exceed.
    pub limit: usize,
    /// What the region is laid out for.
    pub role: Role,
    /// The tokenizers that the host has loaded.
    pub tokenizers: Tokenizers,
}

impl Engine {
    /// An engine with a mailbox and nothing else, whose region may grow to `limit` bytes.
    pub fn new(limit: usize) -> Result<Self> {
        let region = Region::reserve(0, 0, 0, limit)?;
        Ok(Self { region, limit, role: Role::Arena, tokenizers: Tokenizers::default() })
    }

    /// Reserves an arena of `bytes` and nothing else: for single kernels.
    pub fn reserve_arena(&mut self, bytes: u64) -> Result<()> {
        self.reserve(0, 0, bytes)
    }

    /// Becomes a station; whatever the region held is gone.
    pub fn configure_station(&mut self, config: StationConfig) -> Result<()> {
        let (persistent, scratch, arena) = config.part_bytes();
        self.reserve(persistent, scratch, arena)?;
        self.role = Role::Station(Box::new(Station::new(config)));
        Ok(())
    }

    /// Becomes a shard; whatever the region held is gone.
    pub fn configure_shard(&mut self, config: ShardConfig) -> Result<()> {
        let (persistent, scratch, arena) = config.part_bytes();
        self.reserve(persistent, scratch, arena)?;
        self.role = Role::Shard(Box::new(Shard::new(config)));
        Ok(())
    }

    /// The station and its region.
    pub fn station(&mut self) -> Result<(&mut Station, &mut Region)> {
        match &mut self.role {
            Role::Station(station) => Ok((station, &mut self.region)),
            _ => fail!(BadState, "this engine is no layer station: call station_configure first"),
        }
    }

    /// The shard and its region.
    pub fn shard(&mut self) -> Result<(&mut Shard, &mut Region)> {
        match &mut self.role {
            Role::Shard(shard) => Ok((shard, &mut self.region)),
            _ => fail!(BadState, "this engine is no vocabulary shard: call shard_configure first"),
        }
    }

    /// What is reserved and was used at most: bytes of the region, the persistent part, the scratch and the arena;
    /// KV pages, free ones, most used at once; most rows of a batch; most bytes of the arena.
    pub fn memory(&self) -> [usize; 9] {
        let region = &self.region;
        let (persistent, scratch, arena) =
            (region.persistent_offset(), region.scratch_offset(), region.arena_offset());
        let (pages, free, used_peak, rows_peak, arena_peak) = match &self.role {
            Role::Arena => (0, 0, 0, 0, 0),
            Role::Station(station) => {
                let kv = &station.kv;
                (kv.pages(), kv.free_pages(), kv.used_peak(), station.rows_peak(), station.arena_peak())
            }
            Role::Shard(shard) => (0, 0, 0, shard.rows_peak(), shard.arena_peak()),
        };
        [
            region.len(),
            scratch - persistent,
            arena - scratch,
            region.len() - arena,
            pages,
            free,
            used_peak,
            rows_peak,
            arena_peak,
        ]
    }

    /// A new region, or the old one untouched when the new one is over the limit.
    fn reserve(&mut self, persistent: u64, scratch: u64, arena: u64) -> Result<()> {
        Region::check_budget(persistent, scratch, arena, self.limit)?;
        // The old region goes first: both together could be more than the host has.
        self.role = Role::Arena;
        self.region = Region::reserve(0, 0, 0, self.limit)?;
        self.region = Region::reserve(persistent, scratch, arena, self.limit)?;
        crate::kernels::matmul::prepare();
        Ok(())
    }
}
