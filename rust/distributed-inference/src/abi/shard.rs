//! A vocabulary shard behind the ABI. Fields of configurations and tables are little-endian u32 or f32.

use super::abi;
use crate::Result;
use crate::engine::Engine;
use crate::region::Region;
use crate::shard::ShardConfig;

fn config(engine: &Engine, at: u32, length: u32) -> Result<ShardConfig> {
    ShardConfig::parse(engine.region.slice("the shard configuration", at, length)?)
}

abi! {
    /// Region bytes that a configuration would take.
    fn shard_bytes(engine, cfg_at, cfg_len) {
        let (persistent, scratch, arena) = config(engine, cfg_at, cfg_len)?.part_bytes();
        Ok(Region::bytes_for(persistent, scratch, arena)? as u32)
    }

    /// Reserves the region for a configuration; whatever the engine held is gone.
    fn shard_configure(engine, cfg_at, cfg_len) {
        let config = config(engine, cfg_at, cfg_len)?;
        engine.configure_shard(config)?;
        Ok(0)
    }

    /// Ids in `start..end` are never selected; what lies outside of the slice is no matter.
    fn shard_ban(engine, start, end) {
        engine.shard()?.0.ban(start, end)?;
        Ok(0)
    }

    /// Begins a pass over the head for f32 [n_rows, hidden] at `hidden_at`; at `kept_at` one kept slice a row.
    fn logits_begin(engine, kept_at, n_rows, hidden_at) {
        let (shard, region) = engine.shard()?;
        shard.logits_begin(region, kept_at, n_rows, hidden_at)?;
        Ok(0)
    }

    /// Multiplies with `n_rows` rows of the head, `row` counting from the slice's first id.
    fn logits_block(engine, format, row, n_rows, at, length) {
        let (shard, region) = engine.shard()?;
        shard.logits_block(region, format, row, n_rows, (at, length))?;
        Ok(0)
    }

    /// Ends the pass over the head.
    fn logits_end(engine) {
        let (shard, region) = engine.shard()?;
        shard.logits_end(region)?;
        Ok(0)
    }

    /// Region offset of a kept slice, f32 [vocab_end - vocab_start].
    fn logits_at(engine, kept) {
        let (shard, region) = engine.shard()?;
        Ok(shard.logits_at(region, kept)? as u32)
    }

    /// Selects from a kept slice; returns the bytes of the answer at `out_at`.
    ///
    /// Parameters: version = 1, top_k, mode (0 by adjusted logit, 1 Gumbel), temperature f32, seed (low, high),
    /// n_adjust, n_wanted, then n_adjust times {id, multiply f32, add f32}, then the wanted ids. Answer:
    /// log-sum-exp raw and adjusted (f64), n, m, then n + m times {id, raw f32, adjusted f32, key f32}.
    fn logits_select(engine, kept, params_at, params_length, out_at, out_capacity) {
        let (shard, region) = engine.shard()?;
        Ok(shard.select(region, kept, (params_at, params_length), (out_at, out_capacity))? as u32)
    }
}
