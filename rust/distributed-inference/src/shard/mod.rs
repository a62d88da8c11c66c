//! A vocabulary shard: a slice of the head's rows, and the slices of logits that it keeps.

mod gumbel;
mod select;

pub use gumbel::noise;

use crate::fields::{Fields, number, within};
use crate::kernels::matmul::{Weights, matmul};
use crate::ops::first_not_finite;
use crate::quants::Format;
use crate::region::Region;
use crate::{Result, fail};

const MOST_WIDTH: u32 = 1 << 20;
const MOST_ROWS: u32 = 8192;
const MOST_KEPT: u32 = 1 << 16;
const MOST_VOCABULARY: u32 = 1 << 24;

/// Kept slices begin at a multiple of this many floats.
const ALIGNED_FLOATS: usize = 16;

/// The slice and the budget of a vocabulary shard.
#[derive(Clone, Debug, PartialEq)]
pub struct ShardConfig {
    /// Width of the residual stream.
    pub hidden: usize,
    /// First id of the slice.
    pub vocab_start: u32,
    /// The id after the last one.
    pub vocab_end: u32,
    /// Most rows of one pass over the head.
    pub max_rows: usize,
    /// Slices of logits that are kept.
    pub kept: usize,
    /// Bytes for weights.
    pub arena_bytes: u64,
}

impl ShardConfig {
    /// Reads and checks the little-endian fields of a configuration.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        let mut fields = Fields::new("the shard configuration", bytes);
        fields.version(1)?;
        let hidden = within("hidden", fields.u32()?, MOST_WIDTH)?;
        let (vocab_start, vocab_end) = (fields.u32()?, fields.u32()?);
        if vocab_start >= vocab_end || vocab_end > MOST_VOCABULARY {
            fail!(
                BadArgument,
                "vocabulary {vocab_start} to {vocab_end}: expected at least one id, and none from {MOST_VOCABULARY} on"
            );
        }
        let max_rows = within("max_rows", fields.u32()?, MOST_ROWS)?;
        let kept = within("kept", fields.u32()?, MOST_KEPT)?;
        let arena_bytes = u64::from(fields.u32()?);
        fields.end()?;
        Ok(Self { hidden, vocab_start, vocab_end, max_rows, kept, arena_bytes })
    }

    /// Ids of the slice.
    pub fn ids(&self) -> usize {
        (self.vocab_end - self.vocab_start) as usize
    }

    /// Bytes of the persistent part (kept slices), the scratch (hidden rows or a selection) and the arena.
    pub fn part_bytes(&self) -> (u64, u64, u64) {
        let persistent = 4 * self.kept as u64 * self.stride() as u64;
        let scratch = 4 * (self.hidden_floats() + select::WORK_FLOATS as u64 * self.stride() as u64);
        (persistent, scratch, self.arena_bytes)
    }

    /// Floats of the hidden rows of a pass, at the start of the scratch.
    fn hidden_floats(&self) -> u64 {
        (self.max_rows as u64 * self.hidden as u64).next_multiple_of(ALIGNED_FLOATS as u64)
    }

    /// Floats from one kept slice to the next.
    fn stride(&self) -> usize {
        self.ids().next_multiple_of(ALIGNED_FLOATS)
    }

    /// The place of an id in the slice, if it is the shard's.
    fn index(&self, id: u32) -> Option<usize> {
        (self.vocab_start..self.vocab_end).contains(&id).then(|| (id - self.vocab_start) as usize)
    }
}

/// A vocabulary shard.
pub struct Shard {
    /// Its slice and budget.
    pub config: ShardConfig,
    banned: Vec<bool>,
    /// Which kept slices hold the logits of a pass that ended well.
    complete: Vec<bool>,
    /// Where each row of the pass goes.
    targets: Vec<usize>,
    /// The next row of the head, while a pass is running.
    next: Option<usize>,
    rows_peak: usize,
    arena_peak: usize,
}

impl Shard {
    /// A shard without logits; the region must have the configuration's part sizes.
    pub fn new(config: ShardConfig) -> Self {
        Self {
            banned: vec![false; config.ids()],
            complete: vec![false; config.kept],
            targets: Vec::with_capacity(config.max_rows),
            next: None,
            rows_peak: 0,
            arena_peak: 0,
            config,
        }
    }

    /// Ids in `start..end` are never selected. What lies outside of the slice is no matter.
    pub fn ban(&mut self, start: u32, end: u32) -> Result<()> {
        if start > end {
            fail!(BadArgument, "ids {start} to {end}: the end lies before the start");
        }
        let (first, last) = (self.config.vocab_start, self.config.vocab_end);
        let index = |id: u32| (id.clamp(first, last) - first) as usize;
        self.banned[index(start)..index(end)].fill(true);
        Ok(())
    }

    /// Begins a pass over the head for the rows at `hidden_at`, forgetting one that has not ended. Row i goes to
    /// the kept slice that the i-th number at `kept_at` names.
    pub fn logits_begin(
        &mut self,
        region: &mut Region,
        kept_at: u32,
        n_rows: u32,
        hidden_at: u32,
    ) -> Result<()> {
        if n_rows == 0 || n_rows as usize > self.config.max_rows {
            fail!(
                BadArgument,
                "a pass over the head for {n_rows} rows, expected 1 to {}",
                self.config.max_rows
            );
        }
        let hidden = self.config.hidden;
        let table = region.slice("table of kept slices", kept_at, 4 * n_rows)?;
        self.next = None;
        self.targets.clear();
        for row in 0..n_rows as usize {
            let kept = number(table, row) as usize;
            if kept >= self.config.kept || self.targets.contains(&kept) {
                fail!(
                    BadArgument,
                    "row {row} goes to the kept slice {kept}, expected one of 0 to {} that no other row has",
                    self.config.kept - 1
                );
            }
            self.targets.push(kept);
        }
        let bytes = region
            .slice(
                "hidden rows",
                hidden_at,
                u32::try_from(4 * hidden as u64 * u64::from(n_rows)).unwrap_or(u32::MAX),
            )?
            .len();
        let scratch_at = region.scratch_offset();
        region.bytes_mut().copy_within(hidden_at as usize..hidden_at as usize + bytes, scratch_at);
        let (_, _, scratch) = region.split();
        if let Some(at) = first_not_finite(&scratch[..n_rows as usize * hidden]) {
            fail!(NonFinite, "the hidden row {} has {} at element {}", at / hidden, scratch[at], at % hidden);
        }
        self.targets.iter().for_each(|kept| self.complete[*kept] = false);
        self.rows_peak = self.rows_peak.max(self.targets.len());
        self.next = Some(0);
        Ok(())
    }

    /// Multiplies with `n_rows` rows of the head, `row` counting from the slice's first id.
    pub fn logits_block(
        &mut self,
        region: &mut Region,
        format: u32,
        row: u32,
        n_rows: u32,
        (at, length): (u32, u32),
    ) -> Result<()> {
        let next = self.running("logits_block")?;
        let left = self.config.ids() - next;
        if row as usize != next || n_rows == 0 || n_rows as usize > left {
            fail!(
                BadState,
                "logits: expected up to {left} rows of the head from row {next} on, found {n_rows} from row {row} on"
            );
        }
        let (hidden, stride) = (self.config.hidden, self.config.stride());
        let arena_at = region.arena_offset();
        let (inputs, persistent, scratch) = region.split();
        let bytes = inputs.slice("rows of the head", at, length)?;
        let weights =
            Weights::new("rows of the head", Format::of_type(format)?, hidden, n_rows as usize, bytes)?;
        matmul(&weights, &scratch[..self.targets.len() * hidden], |first, batch_row, values| {
            let at = self.targets[batch_row] * stride + next + first;
            persistent[at..at + values.len()].copy_from_slice(values);
        });
        self.next = Some(next + n_rows as usize);
        self.arena_peak = self.arena_peak.max((at as usize + length as usize).saturating_sub(arena_at));
        Ok(())
    }

    /// Ends the pass, if all rows of the head have come and every logit is finite.
    pub fn logits_end(&mut self, region: &mut Region) -> Result<()> {
        let next = self.running("logits_end")?;
        let (ids, stride) = (self.config.ids(), self.config.stride());
        if next != ids {
            fail!(BadState, "logits_end: {next} of {ids} rows of the head have come");
        }
        let (_, persistent, _) = region.split();
        for (row, kept) in self.targets.iter().enumerate() {
            let slice = &persistent[kept * stride..][..ids];
            if let Some(index) = first_not_finite(slice) {
                let id = self.config.vocab_start as usize + index;
                fail!(NonFinite, "the logit of token {id} is {} for row {row}", slice[index]);
            }
        }
        self.targets.iter().for_each(|kept| self.complete[*kept] = true);
        self.next = None;
        Ok(())
    }

    /// Region offset of a kept slice.
    pub fn logits_at(&self, region: &Region, kept: u32) -> Result<usize> {
        Ok(region.persistent_offset() + 4 * self.kept_at(kept)?)
    }

    /// Rows of the largest pass so far.
    pub fn rows_peak(&self) -> usize {
        self.rows_peak
    }

    /// The most bytes of the arena that a block has reached so far.
    pub fn arena_peak(&self) -> usize {
        self.arena_peak
    }

    /// Offset in the persistent floats of a kept slice that is complete.
    fn kept_at(&self, kept: u32) -> Result<usize> {
        match self.complete.get(kept as usize) {
            Some(true) => Ok(kept as usize * self.config.stride()),
            Some(false) => fail!(BadState, "the kept slice {kept} holds no logits"),
            None => fail!(BadArgument, "kept slice {kept}, expected 0 to {}", self.config.kept - 1),
        }
    }

    fn running(&self, what: &str) -> Result<usize> {
        match self.next {
            Some(next) => Ok(next),
            None => fail!(BadState, "{what}: no pass over the head is running: call logits_begin first"),
        }
    }
}
