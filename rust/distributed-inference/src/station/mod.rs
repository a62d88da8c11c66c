//! A layer station: a contiguous range of transformer layers, their vectors and the sessions' KV pages.
//!
//! Weights come as row blocks and are forgotten; everything here is bookkeeping of what must come next.
//! The forward pass itself is in [`phases`](self), readable from top to bottom.

mod batch;
mod config;
mod phases;

pub use batch::Row;
pub use config::StationConfig;
pub use phases::{Phase, Stored, Tensor};

use crate::kv::Kv;
use crate::ops::{first_not_finite, rope};
use crate::region::Region;
use crate::{Error, Kind, Result, fail};
use batch::Batch;
use config::Layout;

/// A layer station.
pub struct Station {
    /// Its shapes and budget.
    pub config: StationConfig,
    /// Its sessions.
    pub kv: Kv,
    layout: Layout,
    frequencies: Vec<f64>,
    /// Which vectors of each layer have been set: bit `Vector as u32`.
    have: Vec<u32>,
    have_output_norm: bool,
    rows: Vec<Row>,
    batch: Option<Batch>,
    rows_peak: usize,
    arena_peak: usize,
}

/// The small vectors of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Vector {
    /// RMSNorm before the attention.
    AttnNorm = 0,
    /// RMSNorm before the feed-forward network.
    FfnNorm = 1,
    /// Bias of the queries.
    QBias = 2,
    /// Bias of the keys.
    KBias = 3,
    /// Bias of the values.
    VBias = 4,
    /// RMSNorm after the last layer.
    OutputNorm = 5,
    /// What RoPE's frequencies are divided by.
    RopeFreqs = 6,
    /// RMSNorm of each head of the queries.
    QNorm = 7,
    /// RMSNorm of each head of the keys.
    KNorm = 8,
}

const VECTORS: [Vector; 9] = [
    Vector::AttnNorm,
    Vector::FfnNorm,
    Vector::QBias,
    Vector::KBias,
    Vector::VBias,
    Vector::OutputNorm,
    Vector::RopeFreqs,
    Vector::QNorm,
    Vector::KNorm,
];

impl Vector {
    fn of(kind: u32) -> Result<Self> {
        match VECTORS.get(kind as usize) {
            Some(vector) => Ok(*vector),
            None => fail!(BadArgument, "vector kind {kind}, expected 0 to {}", VECTORS.len() - 1),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::AttnNorm => "attn_norm",
            Self::FfnNorm => "ffn_norm",
            Self::QBias => "attn_q bias",
            Self::KBias => "attn_k bias",
            Self::VBias => "attn_v bias",
            Self::OutputNorm => "output_norm",
            Self::RopeFreqs => "rope_freqs",
            Self::QNorm => "attn_q norm",
            Self::KNorm => "attn_k norm",
        }
    }
}

impl Station {
    /// A station without vectors or sessions; the region must have the configuration's part sizes.
    pub fn new(config: StationConfig) -> Self {
        Self {
            kv: Kv::new(config.max_sessions, config.kv_pages, (config.page_bytes() / 4) as usize),
            layout: Layout::new(&config),
            frequencies: rope::frequencies(config.rope_dim, config.rope_theta),
            have: vec![0; config.n_layers()],
            have_output_norm: false,
            rows: Vec::with_capacity(config.max_rows),
            batch: None,
            rows_peak: 0,
            arena_peak: 0,
            config,
        }
    }

    /// Keeps the `count` f32 values at `at` as a vector of `layer`.
    pub fn set_vector(
        &mut self,
        region: &mut Region,
        layer: u32,
        kind: u32,
        at: u32,
        count: u32,
    ) -> Result<()> {
        if self.batch.is_some() {
            fail!(BadState, "vectors cannot be set while a batch is open");
        }
        let vector = Vector::of(kind)?;
        let (inputs, persistent, _) = region.split();
        let expected = self.vector_length(vector)?;
        if count as usize != expected {
            fail!(BadArgument, "{}: expected {expected} values, found {count}", vector.name());
        }
        let bytes = inputs.slice(vector.name(), at, count * 4)?;
        let values = bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
        if let Some(index) = values.clone().position(|value| !value.is_finite()) {
            fail!(NonFinite, "{} of layer {layer}: value {index} is no finite number", vector.name());
        }
        match vector {
            Vector::RopeFreqs => {
                if values.clone().any(|value| value <= 0.0) {
                    fail!(BadArgument, "rope_freqs: expected positive factors");
                }
                self.frequencies = rope::frequencies(self.config.rope_dim, self.config.rope_theta);
                for (frequency, factor) in self.frequencies.iter_mut().zip(values) {
                    *frequency /= f64::from(factor);
                }
            }
            Vector::OutputNorm => {
                let at = self.layout.output_norm as usize;
                persistent[at..at + expected].iter_mut().zip(values).for_each(|(kept, value)| *kept = value);
                self.have_output_norm = true;
            }
            _ => {
                let index = self.layer_index(layer)?;
                let at = self.vector_at(index, vector);
                persistent[at..at + expected].iter_mut().zip(values).for_each(|(kept, value)| *kept = value);
                self.have[index] |= 1 << vector as u32;
            }
        }
        Ok(())
    }

    /// Rows of the largest batch so far.
    pub fn rows_peak(&self) -> usize {
        self.rows_peak
    }

    /// The most bytes of the arena that a block has reached so far.
    pub fn arena_peak(&self) -> usize {
        self.arena_peak
    }

    /// Region offset of a session's page.
    pub fn page_at(&self, region: &Region, slot: u32, index: u32) -> Result<usize> {
        let pages = self.kv.session_pages(slot)?;
        let Some(page) = pages.get(index as usize) else {
            fail!(BadArgument, "session {slot} has {} pages, no page {index}", pages.len());
        };
        Ok(region.persistent_offset() + 4 * self.pages_at() + *page as usize * self.page_bytes())
    }

    /// Bytes of a page.
    pub fn page_bytes(&self) -> usize {
        self.config.page_bytes() as usize
    }

    /// A new session that begins like `slot`; see [`Kv::fork`].
    pub fn fork(&mut self, region: &mut Region, slot: u32, length: usize) -> Result<u32> {
        let pages_at = self.pages_at();
        self.kv.fork(slot, length, &mut region.split().1[pages_at..])
    }

    fn pages_at(&self) -> usize {
        self.layout.pages as usize
    }

    fn layer_index(&self, layer: u32) -> Result<usize> {
        let owned = self.config.layer_start..self.config.layer_end;
        if !owned.contains(&(layer as usize)) {
            fail!(
                BadArgument,
                "layer {layer} is not this station's, which owns {} to {}",
                owned.start,
                owned.end
            );
        }
        Ok(layer as usize - owned.start)
    }

    fn vector_length(&self, vector: Vector) -> Result<usize> {
        let config = &self.config;
        match vector {
            Vector::QBias | Vector::KBias | Vector::VBias if !config.qkv_bias => {
                fail!(BadArgument, "{}: this station was configured without biases", vector.name())
            }
            Vector::QNorm | Vector::KNorm if !config.qk_norm => {
                fail!(BadArgument, "{}: this station was configured without norms of heads", vector.name())
            }
            Vector::OutputNorm if !config.output_norm => {
                fail!(BadArgument, "output_norm: this station was not configured as the exit")
            }
            Vector::AttnNorm | Vector::FfnNorm | Vector::OutputNorm => Ok(config.hidden),
            Vector::QBias => Ok(config.q_dim()),
            Vector::KBias | Vector::VBias => Ok(config.kv_dim()),
            Vector::RopeFreqs => Ok(config.rope_dim / 2),
            Vector::QNorm | Vector::KNorm => Ok(config.head_dim),
        }
    }

    /// Offset in the persistent floats of a vector of the `index`-th owned layer.
    fn vector_at(&self, index: usize, vector: Vector) -> usize {
        let (hidden, q_dim, kv_dim) = (self.config.hidden, self.config.q_dim(), self.config.kv_dim());
        let norms = 2 * hidden + if self.config.qkv_bias { q_dim + 2 * kv_dim } else { 0 };
        let within_layer = match vector {
            Vector::AttnNorm => 0,
            Vector::FfnNorm => hidden,
            Vector::QBias => 2 * hidden,
            Vector::KBias => 2 * hidden + q_dim,
            Vector::VBias => 2 * hidden + q_dim + kv_dim,
            Vector::QNorm => norms,
            Vector::KNorm => norms + self.config.head_dim,
            Vector::OutputNorm | Vector::RopeFreqs => 0,
        };
        (self.layout.vectors + index as u64 * self.layout.layer_vectors) as usize + within_layer
    }

    /// Refuses a forward pass while a vector is missing.
    fn require_vectors(&self) -> Result<()> {
        let wanted = |vector: Vector| match vector {
            Vector::AttnNorm | Vector::FfnNorm => true,
            Vector::QBias | Vector::KBias | Vector::VBias => self.config.qkv_bias,
            Vector::QNorm | Vector::KNorm => self.config.qk_norm,
            Vector::OutputNorm | Vector::RopeFreqs => false,
        };
        for (index, have) in self.have.iter().enumerate() {
            if let Some(missing) =
                VECTORS.iter().find(|vector| wanted(**vector) && have >> **vector as u32 & 1 == 0)
            {
                let layer = self.config.layer_start + index;
                fail!(BadState, "{} of layer {layer} is missing: call set_vector first", missing.name());
            }
        }
        if self.config.output_norm && !self.have_output_norm {
            fail!(BadState, "output_norm is missing: call set_vector first");
        }
        Ok(())
    }
}

/// Refuses a NaN or an infinity in rows of `width` values, naming the first.
fn require_finite(values: &[f32], width: usize, place: impl std::fmt::Display) -> Result<()> {
    match first_not_finite(values) {
        None => Ok(()),
        Some(at) => Err(Error::new(
            Kind::NonFinite,
            format!("{place}: batch row {} has {} at element {}", at / width, values[at], at % width),
        )),
    }
}
