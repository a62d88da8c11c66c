//! A layer station behind the ABI. Fields of configurations and tables are little-endian u32 or f32.

use super::abi;
use crate::Result;
use crate::engine::Engine;
use crate::fields::number;
use crate::kv::PAGE_TOKENS;
use crate::region::Region;
use crate::station::{Phase, StationConfig, Stored};

fn config(engine: &Engine, at: u32, length: u32) -> Result<StationConfig> {
    StationConfig::parse(engine.region.slice("the station configuration", at, length)?)
}

/// `N` times {type, at, length}.
fn table<const N: usize>(region: &Region, at: u32) -> Result<[Stored; N]> {
    let bytes = region.slice("table of tensors", at, 12 * N as u32)?;
    Ok(std::array::from_fn(|i| Stored {
        format: number(bytes, 3 * i),
        at: number(bytes, 3 * i + 1),
        length: number(bytes, 3 * i + 2),
    }))
}

abi! {
    /// Region bytes that a configuration would take.
    fn station_bytes(engine, cfg_at, cfg_len) {
        let (persistent, scratch, arena) = config(engine, cfg_at, cfg_len)?.part_bytes();
        Ok(Region::bytes_for(persistent, scratch, arena)? as u32)
    }

    /// Reserves the region for a configuration; whatever the engine held is gone.
    fn station_configure(engine, cfg_at, cfg_len) {
        let config = config(engine, cfg_at, cfg_len)?;
        engine.configure_station(config)?;
        Ok(0)
    }

    /// Keeps the `count` f32 values at `at` as a vector of `layer`.
    ///
    /// `kind`: 0 attn_norm, 1 ffn_norm, 2 q_bias, 3 k_bias, 4 v_bias, 5 output_norm, 6 rope_freqs, 7 q_norm,
    /// 8 k_norm; 5 and 6 ignore `layer`.
    fn set_vector(engine, layer, kind, at, count) {
        let (station, region) = engine.station()?;
        station.set_vector(region, layer, kind, at, count)?;
        Ok(0)
    }

    /// Tokens in a KV page.
    fn kv_page_tokens(_engine) {
        Ok(PAGE_TOKENS as u32)
    }

    /// Bytes of a KV page.
    fn kv_page_bytes(engine) {
        Ok(engine.station()?.0.page_bytes() as u32)
    }

    /// KV pages that belong to no session.
    fn kv_free_pages(engine) {
        Ok(engine.station()?.0.kv.free_pages() as u32)
    }

    /// A new, empty session; returns its slot.
    fn kv_open(engine) {
        engine.station()?.0.kv.open()
    }

    /// Ends a session.
    fn kv_close(engine, slot) {
        engine.station()?.0.kv.close(slot)?;
        Ok(0)
    }

    /// Tokens that a session has committed.
    fn kv_length(engine, slot) {
        Ok(engine.station()?.0.kv.length(slot)? as u32)
    }

    /// Forgets a session's tokens from `length` on.
    fn kv_truncate(engine, slot, length) {
        engine.station()?.0.kv.truncate(slot, length as usize)?;
        Ok(0)
    }

    /// A new session that begins with the first `length` tokens of `slot`; returns its slot.
    fn kv_fork(engine, slot, length) {
        let (station, region) = engine.station()?;
        station.fork(region, slot, length as usize)
    }

    /// Region offset of a session's page.
    fn kv_page_at(engine, slot, index) {
        let (station, region) = engine.station()?;
        Ok(station.page_at(region, slot, index)? as u32)
    }

    /// Gives an empty session pages for `length` tokens, for the host to write.
    fn kv_restore(engine, slot, length) {
        engine.station()?.0.kv.restore(slot, length as usize)?;
        Ok(0)
    }

    /// Opens a batch: `n_rows` times {slot, position} at `rows_at`.
    fn batch_begin(engine, rows_at, n_rows) {
        let (station, region) = engine.station()?;
        station.batch_begin(region, rows_at, n_rows)?;
        Ok(0)
    }

    /// Offset of the batch's residual stream, f32 [n_rows, hidden].
    fn batch_hidden_at(engine) {
        let (station, region) = engine.station()?;
        Ok(station.batch_hidden_at(region)? as u32)
    }

    /// Commits the batch.
    fn batch_end(engine) {
        engine.station()?.0.batch_end()?;
        Ok(0)
    }

    /// Forgets the batch, if there is one.
    fn batch_abort(engine) {
        engine.station()?.0.batch_abort()?;
        Ok(0)
    }

    /// Begins a phase: 0 attn, 1 ffn_gate, 2 ffn_up, 3 ffn_down.
    fn phase_begin(engine, layer, phase) {
        let (station, region) = engine.station()?;
        station.phase_begin(region, layer, phase)?;
        Ok(0)
    }

    /// Multiplies with `n_rows` rows from `row` on of a tensor: 0 q, 1 k, 2 v, 3 o, 4 gate, 5 up, 6 down.
    fn phase_block(engine, tensor, format, row, n_rows, at, length) {
        let (station, region) = engine.station()?;
        station.phase_block(region, tensor, row, n_rows, Stored { format, at, length })?;
        Ok(0)
    }

    /// Ends the phase that is running.
    fn phase_end(engine) {
        let (station, region) = engine.station()?;
        station.phase_end(region)?;
        Ok(0)
    }

    /// The whole attention phase; at `table_at` four times {type, at, length} for q, k, v and o.
    fn forward_range_attn_chunk(engine, layer, table_at) {
        let (station, region) = engine.station()?;
        let tensors = table::<4>(region, table_at)?;
        station.whole_phase(region, layer, Phase::Attn, &tensors)?;
        Ok(0)
    }

    /// The whole gate phase.
    fn forward_range_ffn_gate_chunk(engine, layer, format, at, length) {
        let (station, region) = engine.station()?;
        station.whole_phase(region, layer, Phase::FfnGate, &[Stored { format, at, length }])?;
        Ok(0)
    }

    /// The whole up phase.
    fn forward_range_ffn_up_chunk(engine, layer, format, at, length) {
        let (station, region) = engine.station()?;
        station.whole_phase(region, layer, Phase::FfnUp, &[Stored { format, at, length }])?;
        Ok(0)
    }

    /// The whole down phase.
    fn forward_range_ffn_down_chunk(engine, layer, format, at, length) {
        let (station, region) = engine.station()?;
        station.whole_phase(region, layer, Phase::FfnDown, &[Stored { format, at, length }])?;
        Ok(0)
    }

    /// The gate and the up phase; at `table_at` {type, at, length} for each.
    fn forward_range_ffn_gate_up_chunk(engine, layer, table_at) {
        let (station, region) = engine.station()?;
        let [gate, up] = table(region, table_at)?;
        station.whole_phase(region, layer, Phase::FfnGate, &[gate])?;
        station.whole_phase(region, layer, Phase::FfnUp, &[up])?;
        Ok(0)
    }

    /// Normalises rows of the finished batch; returns the offset of f32 [n_rows, hidden].
    fn output_norm(engine, row, n_rows) {
        let (station, region) = engine.station()?;
        Ok(station.output_norm(region, row, n_rows)? as u32)
    }
}
