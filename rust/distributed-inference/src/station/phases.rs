//! The forward pass of a layer in its four phases.
//!
//! ```text
//! attn      h = norm(x);  q, k, v = W·h + b;  turn q, k;  keep k, v;  x += Wo · attention(q)
//! ffn_gate  h = norm(x);  g = Wg · h
//! ffn_up    g = silu(g) · (Wu · h)
//! ffn_down  x += Wd · g
//! ```
//!
//! x is the residual stream, one row a token. Each product comes as row blocks of its weights, in order.

use super::{Station, Vector, require_finite};
use crate::kernels::matmul::{Weights, matmul};
use crate::kv::{KvType, PAGE_TOKENS};
use crate::ops::attention::Online;
use crate::ops::{norm, rope, silu::silu};
use crate::quants::Format;
use crate::region::{Inputs, Region};
use crate::{Result, fail};

/// Query heads that go through the pages of their keys and values together, which are opened once for them.
const HEADS_AT_ONCE: usize = 8;

/// A phase of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Attention.
    Attn,
    /// The gate of the feed-forward network.
    FfnGate,
    /// What the gate lets through.
    FfnUp,
    /// Back to the residual stream.
    FfnDown,
}

/// A matrix of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tensor {
    /// Queries.
    Q,
    /// Keys.
    K,
    /// Values.
    V,
    /// From the heads back to the residual stream.
    O,
    /// The gate.
    Gate,
    /// What the gate lets through.
    Up,
    /// Back to the residual stream.
    Down,
}

/// Rows of a tensor in the region: their ggml type, offset and bytes.
#[derive(Clone, Copy, Debug)]
pub struct Stored {
    /// ggml type id.
    pub format: u32,
    /// Region offset.
    pub at: u32,
    /// Bytes.
    pub length: u32,
}

/// The phase that is running and the row that comes next.
#[derive(Clone, Copy, Debug)]
pub(super) struct Open {
    layer: usize,
    phase: Phase,
    /// Index into the phase's tensors.
    tensor: usize,
    row: usize,
}

impl Phase {
    /// All phases, in the order they run.
    pub const ALL: [Phase; 4] = [Self::Attn, Self::FfnGate, Self::FfnUp, Self::FfnDown];

    /// The phase's tensors, in the order they come.
    pub fn tensors(self) -> &'static [Tensor] {
        match self {
            Self::Attn => &[Tensor::Q, Tensor::K, Tensor::V, Tensor::O],
            Self::FfnGate => &[Tensor::Gate],
            Self::FfnUp => &[Tensor::Up],
            Self::FfnDown => &[Tensor::Down],
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Attn => "attn",
            Self::FfnGate => "ffn_gate",
            Self::FfnUp => "ffn_up",
            Self::FfnDown => "ffn_down",
        }
    }
}

impl Tensor {
    const ALL: [Tensor; 7] = [Self::Q, Self::K, Self::V, Self::O, Self::Gate, Self::Up, Self::Down];

    fn of(id: u32) -> Result<Self> {
        match Self::ALL.get(id as usize) {
            Some(tensor) => Ok(*tensor),
            None => fail!(BadArgument, "tensor {id}, expected 0 to 6"),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Q => "attn_q",
            Self::K => "attn_k",
            Self::V => "attn_v",
            Self::O => "attn_output",
            Self::Gate => "ffn_gate",
            Self::Up => "ffn_up",
            Self::Down => "ffn_down",
        }
    }
}

impl Station {
    /// Begins a phase, which must be the next one.
    pub fn phase_begin(&mut self, region: &mut Region, layer: u32, phase: u32) -> Result<()> {
        let Some(phase) = Phase::ALL.get(phase as usize).copied() else {
            fail!(BadArgument, "phase {phase}, expected 0 to 3");
        };
        let index = self.layer_index(layer)?;
        let batch = self.open_batch()?;
        if let Some(open) = batch.open {
            fail!(BadState, "layer {}, phase {} has not ended", open.layer, open.phase.name());
        }
        let (next_index, next_phase) =
            (batch.next / Phase::ALL.len(), Phase::ALL[batch.next % Phase::ALL.len()]);
        if (index, phase) != (next_index, next_phase) {
            fail!(
                BadState,
                "expected {}, found layer {layer}, phase {}",
                if next_index == self.config.n_layers() {
                    "batch_end".to_string()
                } else {
                    format!("layer {}, phase {}", self.config.layer_start + next_index, next_phase.name())
                },
                phase.name()
            );
        }

        let (_, persistent, scratch) = region.split();
        let (hidden, n_rows) = (self.config.hidden, self.rows.len());
        let (residual, rest) = scratch.split_at_mut(self.layout.normed as usize);
        let (residual, normed) = (&residual[..n_rows * hidden], &mut rest[..n_rows * hidden]);
        if batch.next == 0 {
            require_finite(
                residual,
                hidden,
                format_args!("layer {layer}, phase attn, the hidden state that came in"),
            )?;
        }
        let weight = match phase {
            Phase::Attn => Some(Vector::AttnNorm),
            Phase::FfnGate => Some(Vector::FfnNorm),
            Phase::FfnUp | Phase::FfnDown => None,
        };
        if let Some(weight) = weight {
            let weight = &persistent[self.vector_at(index, weight)..][..hidden];
            for (x, out) in residual.chunks_exact(hidden).zip(normed.chunks_exact_mut(hidden)) {
                norm::rms_norm(x, weight, self.config.norm_eps, out);
            }
        }
        self.set_open(Some(Open { layer: layer as usize, phase, tensor: 0, row: 0 }));
        Ok(())
    }

    /// Multiplies with `n_rows` rows from `row` on of a tensor, which lie at `at`.
    pub fn phase_block(
        &mut self,
        region: &mut Region,
        tensor: u32,
        row: u32,
        n_rows: u32,
        block: Stored,
    ) -> Result<()> {
        let tensor = Tensor::of(tensor)?;
        let Some(open) = self.open_batch()?.open else {
            fail!(BadState, "{}: no phase has begun: call phase_begin first", tensor.name());
        };
        let Open { layer, phase, .. } = open;
        let expected = phase.tensors().get(open.tensor).copied();
        if expected != Some(tensor) || row as usize != open.row {
            fail!(
                BadState,
                "layer {layer}, phase {}: expected {}, found row {row} of {}",
                phase.name(),
                expected.map_or("phase_end".into(), |tensor| format!(
                    "row {} of {}",
                    open.row,
                    tensor.name()
                )),
                tensor.name()
            );
        }
        let left = self.tensor_rows(tensor) - open.row;
        if n_rows == 0 || n_rows as usize > left {
            fail!(
                BadArgument,
                "layer {layer}, phase {}: {n_rows} rows of {} from row {row} on, expected 1 to {left}",
                phase.name(),
                tensor.name()
            );
        }
        let arena_at = region.arena_offset();
        let (inputs, persistent, scratch) = region.split();
        let weights = self.weights(&inputs, layer, phase, tensor, n_rows as usize, block)?;

        self.multiply(layer - self.config.layer_start, tensor, open.row, &weights, persistent, scratch);
        let (mut next, done) = (open, n_rows as usize == left);
        next.row += n_rows as usize;
        if done {
            (next.tensor, next.row) = (open.tensor + 1, 0);
            if tensor == Tensor::V {
                self.attend(layer - self.config.layer_start, persistent, scratch);
            }
        }
        self.set_open(Some(next));
        self.arena_peak =
            self.arena_peak.max((block.at as usize + block.length as usize).saturating_sub(arena_at));
        Ok(())
    }

    /// Ends the phase that is running, if all its rows have come and its result is finite.
    pub fn phase_end(&mut self, region: &mut Region) -> Result<()> {
        let Some(Open { layer, phase, tensor, row }) = self.open_batch()?.open else {
            fail!(BadState, "phase_end: no phase has begun");
        };
        if let Some(tensor) = phase.tensors().get(tensor) {
            fail!(
                BadState,
                "layer {layer}, phase {}: {} has {row} of {} rows",
                phase.name(),
                tensor.name(),
                self.tensor_rows(*tensor)
            );
        }
        let (_, _, scratch) = region.split();
        let (at, width) = match phase {
            Phase::Attn | Phase::FfnDown => (0, self.config.hidden),
            Phase::FfnGate | Phase::FfnUp => (self.layout.work as usize, self.config.ffn),
        };
        let result = &scratch[at..at + self.rows.len() * width];
        require_finite(result, width, format_args!("layer {layer}, phase {}", phase.name()))?;
        self.set_open(None);
        if let Some(batch) = &mut self.batch {
            batch.next += 1;
        }
        Ok(())
    }

    /// A phase whose tensors are all in the region. Nothing has begun when one of them is refused.
    pub fn whole_phase(
        &mut self,
        region: &mut Region,
        layer: u32,
        phase: Phase,
        tensors: &[Stored],
    ) -> Result<()> {
        self.layer_index(layer)?;
        let (inputs, _, _) = region.split();
        for (tensor, whole) in phase.tensors().iter().zip(tensors) {
            self.weights(&inputs, layer as usize, phase, *tensor, self.tensor_rows(*tensor), *whole)?;
        }
        self.phase_begin(region, layer, phase as u32)?;
        for (tensor, whole) in phase.tensors().iter().zip(tensors) {
            self.phase_block(region, *tensor as u32, 0, self.tensor_rows(*tensor) as u32, *whole)?;
        }
        self.phase_end(region)
    }

    fn set_open(&mut self, open: Option<Open>) {
        if let Some(batch) = &mut self.batch {
            batch.open = open;
        }
    }

    fn tensor_rows(&self, tensor: Tensor) -> usize {
        match tensor {
            Tensor::Q => self.config.q_dim(),
            Tensor::K | Tensor::V => self.config.kv_dim(),
            Tensor::O | Tensor::Down => self.config.hidden,
            Tensor::Gate | Tensor::Up => self.config.ffn,
        }
    }

    fn tensor_cols(&self, tensor: Tensor) -> usize {
        match tensor {
            Tensor::O => self.config.q_dim(),
            Tensor::Down => self.config.ffn,
            _ => self.config.hidden,
        }
    }

    fn weights<'a>(
        &self,
        inputs: &Inputs<'a>,
        layer: usize,
        phase: Phase,
        tensor: Tensor,
        rows: usize,
        whole: Stored,
    ) -> Result<Weights<'a>> {
        let place = format_args!("layer {layer}, phase {}, {}", phase.name(), tensor.name());
        let bytes = inputs.slice(place, whole.at, whole.length)?;
        Weights::new(place, Format::of_type(whole.format)?, self.tensor_cols(tensor), rows, bytes)
    }

    /// One block of a product: rows of the weights from `row` on, for every row of the batch.
    fn multiply(
        &self,
        layer: usize,
        tensor: Tensor,
        row: usize,
        weights: &Weights<'_>,
        persistent: &[f32],
        scratch: &mut [f32],
    ) {
        let (hidden, ffn, n_rows) = (self.config.hidden, self.config.ffn, self.rows.len());
        let bias = |vector| {
            self.config
                .qkv_bias
                .then(|| &persistent[self.vector_at(layer, vector)..][row..row + weights.rows()])
        };
        let (residual, rest) = scratch.split_at_mut(self.layout.normed as usize);
        let (normed, work) = rest.split_at_mut((self.layout.work - self.layout.normed) as usize);
        let normed = &normed[..n_rows * hidden];
        match tensor {
            Tensor::Q | Tensor::K | Tensor::V => {
                let Heads { q, k, v, .. } = self.heads(work);
                let (out, width, bias) = match tensor {
                    Tensor::Q => (q, self.config.q_dim(), bias(Vector::QBias)),
                    Tensor::K => (k, self.config.kv_dim(), bias(Vector::KBias)),
                    _ => (v, self.config.kv_dim(), bias(Vector::VBias)),
                };
                matmul(weights, normed, |first, batch_row, values| {
                    let out = &mut out[batch_row * width + row + first..][..values.len()];
                    match bias {
                        Some(bias) => {
                            for ((out, value), bias) in out.iter_mut().zip(values).zip(&bias[first..]) {
                                *out = value + bias;
                            }
                        }
                        None => out.copy_from_slice(values),
                    }
                });
            }
            Tensor::O | Tensor::Down => {
                let inputs = match tensor {
                    Tensor::O => self.heads(work).mixed,
                    _ => &mut work[..n_rows * ffn],
                };
                matmul(weights, inputs, |first, batch_row, values| {
                    let residual = &mut residual[batch_row * hidden + row + first..][..values.len()];
                    residual.iter_mut().zip(values).for_each(|(residual, value)| *residual += value);
                });
            }
            Tensor::Gate => matmul(weights, normed, |first, batch_row, values| {
                work[batch_row * ffn + row + first..][..values.len()].copy_from_slice(values);
            }),
            Tensor::Up => matmul(weights, normed, |first, batch_row, values| {
                let gates = &mut work[batch_row * ffn + row + first..][..values.len()];
                gates.iter_mut().zip(values).for_each(|(gate, value)| *gate = silu(*gate) * value);
            }),
        }
    }

    /// Normalises and turns queries and keys, keeps keys and values, and mixes the values that each row attends to.
    fn attend(&self, layer: usize, persistent: &mut [f32], scratch: &mut [f32]) {
        let config = &self.config;
        let (head_dim, q_dim, kv_dim, n_rows) =
            (config.head_dim, config.q_dim(), config.kv_dim(), self.rows.len());
        let (before, rest) = scratch.split_at_mut(self.layout.work as usize);
        let (work, opened) = rest.split_at_mut((self.layout.opened - self.layout.work) as usize);
        let angles = &before[self.layout.angles as usize..][..n_rows * config.rope_dim];
        let Heads { q, k, v, mixed } = self.heads(work);
        if config.qk_norm {
            for (heads, vector) in [(&mut *q, Vector::QNorm), (&mut *k, Vector::KNorm)] {
                let weight = &persistent[self.vector_at(layer, vector)..][..head_dim];
                heads
                    .chunks_exact_mut(head_dim)
                    .for_each(|head| norm::rms_norm_in_place(head, weight, config.norm_eps));
            }
        }
        for ((q, k), angles) in q
            .chunks_exact_mut(q_dim)
            .zip(k.chunks_exact_mut(kv_dim))
            .zip(angles.chunks_exact(config.rope_dim))
        {
            rope::rotate(q, head_dim, config.pairing, angles);
            rope::rotate(k, head_dim, config.pairing, angles);
        }

        let pages: &mut [u8] = bytemuck::cast_slice_mut(&mut persistent[self.layout.pages as usize..]);
        let (page_bytes, unit) = (config.page_bytes() as usize, config.unit_bytes());
        let half = config.n_kv_heads * unit;
        // Where the keys of one head of this layer begin in a page; the values follow half a layer later.
        let head_at = |page: u32, head: usize| page as usize * page_bytes + layer * 2 * half + head * unit;
        let session_pages = |slot| self.kv.session_pages(slot).unwrap_or_default();
        let token_bytes = config.kv_type.bytes(head_dim);
        for (row, (k, v)) in self.rows.iter().zip(k.chunks_exact(kv_dim).zip(v.chunks_exact(kv_dim))) {
            let (page, token) = place(row.position);
            let page = session_pages(row.slot)[page];
            for (head, (k, v)) in k.chunks_exact(head_dim).zip(v.chunks_exact(head_dim)).enumerate() {
                let at = head_at(page, head) + token * token_bytes;
                config.kv_type.keep(k, &mut pages[at..at + token_bytes]);
                config.kv_type.keep(v, &mut pages[at + half..][..token_bytes]);
            }
        }

        let scale = (1.0 / libm::sqrt(head_dim as f64)) as f32;
        let group = config.n_heads / config.n_kv_heads * head_dim;
        for (row, (q, mixed)) in
            self.rows.iter().zip(q.chunks_exact(q_dim).zip(mixed.chunks_exact_mut(q_dim)))
        {
            let tokens = row.position as usize + 1;
            let held = &session_pages(row.slot)[..=place(row.position).0];
            for (head, (q, mixed)) in q.chunks_exact(group).zip(mixed.chunks_exact_mut(group)).enumerate() {
                let some = HEADS_AT_ONCE * head_dim;
                for (q, mixed) in q.chunks(some).zip(mixed.chunks_mut(some)) {
                    let mut heads = q.chunks_exact(head_dim).zip(mixed.chunks_exact_mut(head_dim));
                    let mut heads: [Option<Online<'_>>; HEADS_AT_ONCE] =
                        std::array::from_fn(|_| heads.next().map(|(q, mixed)| Online::new(q, scale, mixed)));
                    for (index, page) in held.iter().enumerate() {
                        let at = head_at(*page, head);
                        let (keys, values) = (&pages[at..at + unit], &pages[at + half..][..unit]);
                        let here = PAGE_TOKENS.min(tokens - index * PAGE_TOKENS);
                        let (keys, values): (&[f32], &[f32]) = match config.kv_type {
                            KvType::F32 => (bytemuck::cast_slice(keys), bytemuck::cast_slice(values)),
                            kept => {
                                let (as_keys, as_values) = opened.split_at_mut(PAGE_TOKENS * head_dim);
                                let (kept_bytes, floats) = (here * token_bytes, here * head_dim);
                                kept.open(&keys[..kept_bytes], &mut as_keys[..floats]);
                                kept.open(&values[..kept_bytes], &mut as_values[..floats]);
                                (as_keys, as_values)
                            }
                        };
                        heads.iter_mut().flatten().for_each(|head| head.page(keys, values, here));
                    }
                    heads.into_iter().flatten().for_each(Online::end);
                }
            }
        }
    }

    /// The attention's rows within the working space.
    fn heads<'a>(&self, work: &'a mut [f32]) -> Heads<'a> {
        let (q_dim, kv_dim, n_rows) = (self.config.q_dim(), self.config.kv_dim(), self.rows.len());
        let (q, rest) = work.split_at_mut(n_rows * q_dim);
        let (k, rest) = rest.split_at_mut(n_rows * kv_dim);
        let (v, rest) = rest.split_at_mut(n_rows * kv_dim);
        Heads { q, k, v, mixed: &mut rest[..n_rows * q_dim] }
    }
}

/// Queries, keys, values and what the attention makes of them, each f32 [n_rows, heads · head_dim].
struct Heads<'a> {
    q: &'a mut [f32],
    k: &'a mut [f32],
    v: &'a mut [f32],
    mixed: &'a mut [f32],
}

/// The page of a position, and its place in it.
fn place(position: u32) -> (usize, usize) {
    (position as usize / PAGE_TOKENS, position as usize % PAGE_TOKENS)
}
