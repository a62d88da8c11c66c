//! A station's configuration, checked field by field, and where its data lies.

use crate::fields::{Fields, within};
use crate::kv::{KvType, PAGE_TOKENS};
use crate::ops::rope::Pairing;
use crate::{Result, fail};

/// Bounds that keep every product below in 64 bits; far above any model.
const MOST_LAYERS: u32 = 4096;
const MOST_WIDTH: u32 = 1 << 20;
const MOST_ROWS: u32 = 8192;
const MOST_PAGES: u32 = 1 << 20;
const MOST_SESSIONS: u32 = 1 << 16;

/// Everything in the region begins at a multiple of this many floats.
const ALIGNED_FLOATS: u64 = 16;

/// The shapes and the budget of a layer station.
#[derive(Clone, Debug, PartialEq)]
pub struct StationConfig {
    /// First layer that the station owns.
    pub layer_start: usize,
    /// The layer after the last one it owns.
    pub layer_end: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the feed-forward network.
    pub ffn: usize,
    /// Query heads.
    pub n_heads: usize,
    /// Key and value heads; each serves `n_heads / n_kv_heads` query heads.
    pub n_kv_heads: usize,
    /// Width of a head (not always `hidden / n_heads`).
    pub head_dim: usize,
    /// Which elements of a head RoPE turns together.
    pub pairing: Pairing,
    /// Elements of a head that RoPE turns.
    pub rope_dim: usize,
    /// Base of RoPE's frequencies.
    pub rope_theta: f32,
    /// What RMSNorm adds to the mean square.
    pub norm_eps: f32,
    /// Whether q, k and v have biases.
    pub qkv_bias: bool,
    /// Whether this is the exit station, which has the output norm.
    pub output_norm: bool,
    /// Whether queries and keys are normalised head by head before RoPE.
    pub qk_norm: bool,
    /// Most rows of a batch.
    pub max_rows: usize,
    /// Most sessions that are open at once.
    pub max_sessions: usize,
    /// Pages of the pool.
    pub kv_pages: usize,
    /// What keys and values are kept as.
    pub kv_type: KvType,
    /// Bytes for weights.
    pub arena_bytes: u64,
}

impl StationConfig {
    /// Reads and checks the little-endian fields of a configuration.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        let mut fields = Fields::new("the station configuration", bytes);
        fields.version(1)?;
        let (layer_start, layer_end) = (fields.u32()?, fields.u32()?);
        if layer_start >= layer_end || layer_end > MOST_LAYERS {
            fail!(
                BadArgument,
                "layers {layer_start} to {layer_end}: expected at least one, and at most {MOST_LAYERS}"
            );
        }
        let hidden = within("hidden", fields.u32()?, MOST_WIDTH)?;
        let ffn = within("ffn", fields.u32()?, MOST_WIDTH)?;
        let n_heads = within("n_heads", fields.u32()?, MOST_WIDTH)?;
        let n_kv_heads = within("n_kv_heads", fields.u32()?, MOST_WIDTH)?;
        let head_dim = within("head_dim", fields.u32()?, MOST_WIDTH)?;
        if !n_heads.is_multiple_of(n_kv_heads) {
            fail!(
                BadArgument,
                "n_heads is {n_heads}, expected a multiple of n_kv_heads, which is {n_kv_heads}"
            );
        }
        within(
            "n_heads · head_dim",
            n_heads.saturating_mul(head_dim).try_into().unwrap_or(u32::MAX),
            MOST_WIDTH,
        )?;
        let pairing = match fields.u32()? {
            0 => Pairing::Interleaved,
            1 => Pairing::Halves,
            other => fail!(Unsupported, "rope_type {other}, expected 0 (norm) or 1 (neox)"),
        };
        let rope_dim = within("rope_dim", fields.u32()?, head_dim as u32)?;
        if !rope_dim.is_multiple_of(2) {
            fail!(BadArgument, "rope_dim is {rope_dim}, expected an even number");
        }
        let rope_theta = positive("rope_theta", fields.f32()?)?;
        let norm_eps = positive("norm_eps", fields.f32()?)?;
        let flags = fields.u32()?;
        if flags > 7 {
            fail!(
                Unsupported,
                "flags {flags:#x}, of which only 1 (qkv_bias), 2 (output_norm) and 4 (qk_norm) are known"
            );
        }
        let max_rows = within("max_rows", fields.u32()?, MOST_ROWS)?;
        let max_sessions = within("max_sessions", fields.u32()?, MOST_SESSIONS)?;
        let kv_pages = within("kv_pages", fields.u32()?, MOST_PAGES)?;
        let kv_type = KvType::of(fields.u32()?, head_dim)?;
        let arena_bytes = u64::from(fields.u32()?);
        fields.end()?;
        Ok(Self {
            layer_start: layer_start as usize,
            layer_end: layer_end as usize,
            hidden,
            ffn,
            n_heads,
            n_kv_heads,
            head_dim,
            pairing,
            rope_dim,
            rope_theta,
            norm_eps,
            qkv_bias: flags & 1 != 0,
            output_norm: flags & 2 != 0,
            qk_norm: flags & 4 != 0,
            max_rows,
            max_sessions,
            kv_pages,
            kv_type,
            arena_bytes,
        })
    }

    /// Layers that the station owns.
    pub fn n_layers(&self) -> usize {
        self.layer_end - self.layer_start
    }

    /// Width of all query heads.
    pub fn q_dim(&self) -> usize {
        self.n_heads * self.head_dim
    }

    /// Width of all key heads, and of all value heads.
    pub fn kv_dim(&self) -> usize {
        self.n_kv_heads * self.head_dim
    }

    /// Bytes of one head's keys (or values) of one layer in a page.
    pub fn unit_bytes(&self) -> usize {
        PAGE_TOKENS * self.kv_type.bytes(self.head_dim)
    }

    /// Bytes of a page; in 64 bits, since nothing has been reserved yet when it is asked first.
    pub fn page_bytes(&self) -> u64 {
        2 * (self.n_layers() * self.n_kv_heads) as u64 * self.unit_bytes() as u64
    }

    /// Bytes of the persistent part, the scratch and the arena.
    pub fn part_bytes(&self) -> (u64, u64, u64) {
        let layout = Layout::new(self);
        (4 * layout.persistent_floats, 4 * layout.scratch_floats, self.arena_bytes)
    }
}

fn positive(what: &str, value: f32) -> Result<f32> {
    if !(value.is_finite() && value > 0.0) {
        fail!(BadArgument, "{what} is {value}, expected a positive number");
    }
    Ok(value)
}

/// Offsets in floats: vectors and pages in the persistent part, activations in the scratch.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// First layer's vectors.
    pub vectors: u64,
    /// Floats of one layer's vectors.
    pub layer_vectors: u64,
    /// Output norm.
    pub output_norm: u64,
    /// First KV page.
    pub pages: u64,
    /// Normalised rows, [max_rows, hidden]. The residual stream lies before them, at 0.
    pub normed: u64,
    /// RoPE's cosines and sines, [max_rows, rope_dim].
    pub angles: u64,
    /// What phases work on: q, k, v and the attention's result, or the gate.
    pub work: u64,
    /// Keys and values of one head in one page as f32, unless they are kept so.
    pub opened: u64,
    persistent_floats: u64,
    scratch_floats: u64,
}

impl Layout {
    /// The layout of a configuration.
    pub fn new(config: &StationConfig) -> Self {
        let aligned = |floats: u64| floats.next_multiple_of(ALIGNED_FLOATS);
        let [hidden, ffn, q_dim, kv_dim, rows] =
            [config.hidden, config.ffn, config.q_dim(), config.kv_dim(), config.max_rows].map(|n| n as u64);
        let biases = if config.qkv_bias { q_dim + 2 * kv_dim } else { 0 };
        let vectors = 0;
        let norms = if config.qk_norm { 2 * config.head_dim as u64 } else { 0 };
        let layer_vectors = aligned(2 * hidden + biases + norms);
        let output_norm = vectors + config.n_layers() as u64 * layer_vectors;
        let pages = output_norm + if config.output_norm { aligned(hidden) } else { 0 };
        let normed = aligned(rows * hidden);
        let angles = normed + aligned(rows * hidden);
        let work = angles + aligned(rows * config.rope_dim as u64);
        let opened = work + aligned(rows * (2 * q_dim + 2 * kv_dim).max(ffn));
        let unit = match config.kv_type {
            KvType::F32 => 0,
            _ => 2 * (PAGE_TOKENS * config.head_dim) as u64,
        };
        Self {
            vectors,
            layer_vectors,
            output_norm,
            pages,
            normed,
            angles,
            work,
            opened,
            persistent_floats: pages + config.kv_pages as u64 * (config.page_bytes() / 4),
            scratch_floats: opened + unit,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packed(changes: &[(usize, u32)]) -> Vec<u8> {
        let mut fields = [
            1u32,
            2,
            5,
            576,
            1536,
            9,
            3,
            64,
            0,
            64,
            1e5f32.to_bits(),
            1e-5f32.to_bits(),
            2,
            8,
            4,
            10,
            0,
            4096,
        ];
        for (index, value) in changes {
            fields[*index] = *value;
        }
        fields.iter().flat_map(|field| field.to_le_bytes()).collect()
    }

    #[test]
    fn odd_head_counts_are_fine() {
        let config = StationConfig::parse(&packed(&[])).unwrap();
        assert_eq!((config.q_dim(), config.kv_dim(), config.n_layers()), (576, 192, 3));
        assert!(config.output_norm && !config.qkv_bias);
    }

    #[test]
    fn every_field_is_checked() {
        let bad: &[(usize, u32, &str)] = &[
            (0, 2, "version"),
            (1, 5, "layers"),
            (2, u32::MAX, "layers"),
            (3, 0, "hidden"),
            (4, u32::MAX, "ffn"),
            (5, 10, "multiple of n_kv_heads"),
            (6, 0, "n_kv_heads"),
            (7, 1 << 20, "head_dim"),
            (8, 2, "rope_type"),
            (9, 66, "rope_dim"),
            (9, 63, "even"),
            (10, f32::NAN.to_bits(), "rope_theta"),
            (11, f32::INFINITY.to_bits(), "norm_eps"),
            (11, 0, "norm_eps"),
            (12, 8, "flags"),
            (13, 0, "max_rows"),
            (14, 0, "max_sessions"),
            (15, u32::MAX, "kv_pages"),
            (16, 2, "kv_type"),
        ];
        for (index, value, name) in bad {
            let error = StationConfig::parse(&packed(&[(*index, *value)])).unwrap_err();
            assert!(error.message.contains(name), "{index}: {error}");
        }
    }

    #[test]
    fn a_configuration_of_another_length_is_refused() {
        let whole = packed(&[]);
        assert!(StationConfig::parse(&whole[..70]).is_err());
        assert!(
            StationConfig::parse(&[&whole[..], &[0]].concat()).unwrap_err().message.contains("expected 72")
        );
    }

    #[test]
    fn the_largest_configuration_overflows_nothing() {
        let most = [
            (1, 0),
            (2, MOST_LAYERS),
            (3, MOST_WIDTH),
            (4, MOST_WIDTH),
            (5, MOST_WIDTH / 2),
            (6, MOST_WIDTH / 2),
            (7, 2),
            (9, 2),
            (12, 3),
            (13, MOST_ROWS),
            (15, MOST_PAGES),
        ];
        let (persistent, scratch, _) = StationConfig::parse(&packed(&most)).unwrap().part_bytes();
        assert!(persistent > 1 << 58 && scratch > 1 << 36);
    }
}
