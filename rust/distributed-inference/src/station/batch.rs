//! One batch: rows of several sessions that go through all owned layers together.

use super::phases::{Open, Phase};
use super::{Station, require_finite};
use crate::fields::number;
use crate::kv::Grow;
use crate::ops::{norm, rope};
use crate::region::Region;
use crate::{Result, fail};

/// One row of a batch: a token of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// The session.
    pub slot: u32,
    /// The token's position in it.
    pub position: u32,
}

/// How far the open batch has come.
#[derive(Debug)]
pub(super) struct Batch {
    /// The next phase to begin, counted over the owned layers.
    pub(super) next: usize,
    /// The phase that is running.
    pub(super) open: Option<Open>,
}

/// The sessions of a batch and how many rows each has. Rows of one session are contiguous.
fn groups(rows: &[Row]) -> impl Iterator<Item = Grow> + Clone + '_ {
    rows.chunk_by(|a, b| a.slot == b.slot).map(|rows| Grow { slot: rows[0].slot, count: rows.len() })
}

impl Station {
    /// Opens a batch of the `n_rows` rows whose table lies at `rows_at`.
    pub fn batch_begin(&mut self, region: &mut Region, rows_at: u32, n_rows: u32) -> Result<()> {
        if self.batch.is_some() {
            fail!(BadState, "a batch is open already: end or abort it first");
        }
        self.require_vectors()?;
        if n_rows == 0 || n_rows as usize > self.config.max_rows {
            fail!(BadArgument, "a batch of {n_rows} rows, expected 1 to {}", self.config.max_rows);
        }
        let (inputs, persistent, scratch) = region.split();
        let table = inputs.slice("table of rows", rows_at, 8 * n_rows)?;
        self.rows.clear();
        self.rows.extend(
            (0..n_rows as usize)
                .map(|row| Row { slot: number(table, 2 * row), position: number(table, 2 * row + 1) }),
        );
        self.check_rows()?;
        let pages_at = self.layout.pages as usize;
        self.kv.grow(groups(&self.rows), &mut persistent[pages_at..])?;

        let angles = &mut scratch[self.layout.angles as usize..];
        for (row, angles) in self.rows.iter().zip(angles.chunks_exact_mut(self.config.rope_dim)) {
            rope::angles(row.position, &self.frequencies, angles);
        }
        self.rows_peak = self.rows_peak.max(self.rows.len());
        self.batch = Some(Batch { next: 0, open: None });
        Ok(())
    }

    /// Rows of one session are together, and their positions continue what the session has.
    fn check_rows(&self) -> Result<()> {
        let mut first = 0;
        for Grow { slot, count } in groups(&self.rows) {
            let length = self.kv.length(slot)?;
            if self.rows[..first].iter().any(|row| row.slot == slot) {
                fail!(BadArgument, "batch row {first}: rows of session {slot} must be together");
            }
            for (i, row) in self.rows[first..first + count].iter().enumerate() {
                if row.position as usize != length + i {
                    fail!(
                        BadState,
                        "batch row {}: session {slot} has {length} tokens, so position {} was expected, found {}",
                        first + i,
                        length + i,
                        row.position
                    );
                }
            }
            first += count;
        }
        Ok(())
    }

    /// Region offset of the residual stream, f32 [n_rows, hidden].
    pub fn batch_hidden_at(&self, region: &Region) -> Result<usize> {
        self.open_batch()?;
        Ok(region.scratch_offset())
    }

    /// Commits the batch.
    pub fn batch_end(&mut self) -> Result<()> {
        self.require_complete("batch_end")?;
        self.kv.commit(groups(&self.rows))?;
        self.batch = None;
        Ok(())
    }

    /// Forgets the batch, if there is one.
    pub fn batch_abort(&mut self) -> Result<()> {
        self.batch = None;
        self.kv.undo()
    }

    /// Normalises `n_rows` rows of the finished batch from `row` on; returns their region offset.
    pub fn output_norm(&mut self, region: &mut Region, row: u32, n_rows: u32) -> Result<usize> {
        if !self.config.output_norm {
            fail!(BadState, "output_norm: this station was not configured as the exit");
        }
        self.require_complete("output_norm")?;
        let rows = row as usize..(row as usize).saturating_add(n_rows as usize);
        if rows.is_empty() || rows.end > self.rows.len() {
            fail!(BadArgument, "output_norm: rows {row} to {} of a batch of {}", rows.end, self.rows.len());
        }
        let hidden = self.config.hidden;
        let scratch_at = region.scratch_offset();
        let (_, persistent, scratch) = region.split();
        let weight = &persistent[self.layout.output_norm as usize..][..hidden];
        let (residual, rest) = scratch.split_at_mut(self.layout.normed as usize);
        let span = rows.start * hidden..rows.end * hidden;
        for (x, out) in
            residual[span.clone()].chunks_exact(hidden).zip(rest[span.clone()].chunks_exact_mut(hidden))
        {
            norm::rms_norm(x, weight, self.config.norm_eps, out);
        }
        require_finite(&rest[span.clone()], hidden, "output_norm")?;
        Ok(scratch_at + 4 * (self.layout.normed as usize + span.start))
    }

    pub(super) fn open_batch(&self) -> Result<&Batch> {
        match &self.batch {
            Some(batch) => Ok(batch),
            None => fail!(BadState, "no batch is open: call batch_begin first"),
        }
    }

    fn require_complete(&self, what: &str) -> Result<()> {
        let batch = self.open_batch()?;
        let phases = self.config.n_layers() * Phase::ALL.len();
        if batch.open.is_some() || batch.next != phases {
            fail!(BadState, "{what}: {} of {phases} phases are complete", batch.next);
        }
        Ok(())
    }
}
