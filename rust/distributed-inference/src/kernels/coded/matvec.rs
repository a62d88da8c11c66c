//! One row of activations: weight rows stand in the lanes of a vector.

use super::isa::{Isa, scales};
use super::{MOST_ROWS, PANEL, PANEL_UNITS, Rows};
use crate::kernels::acts::{Acts, BLOCK};
use crate::quants::Codes;

/// Bytes of rows that are best asked for into the nearest cache; more would push out what is being read.
const NEAR: usize = 16 << 10;

/// The partial sums of one row's block.
#[inline(always)]
unsafe fn parts_of<S: Isa, F: Codes>(
    k: &S::Constants,
    block: *const u8,
    x: *const u8,
    mut keep: impl FnMut(usize, S::Part),
) {
    // SAFETY: as in `matvec`.
    unsafe {
        S::pairs::<F>(k, block, |pair, codes| {
            let x = x.add(pair * 2 * BLOCK);
            keep(pair, if F::UNIT == 16 { S::part::<16>(codes, x) } else { S::part::<32>(codes, x) });
        });
    }
}

/// Asks for bytes of the rows after those that are multiplied. These are read a block of each at a time, in which
/// no processor sees what comes next.
#[derive(Clone, Copy)]
pub struct Ahead {
    next: *const u8,
    nearest: bool,
}

impl Ahead {
    /// `n_rows` rows at `first` come next, which the nearest cache holds beside this many others or not.
    pub fn of(first: *const u8, n_rows: usize, row_bytes: usize) -> Self {
        let bytes = n_rows * row_bytes;
        Self { next: first.wrapping_add(bytes), nearest: bytes <= NEAR }
    }

    /// A stretch of them.
    #[inline(always)]
    pub unsafe fn prefetch<S: Isa>(self, from: usize, length: usize) {
        let from = self.next.wrapping_add(from);
        // SAFETY: as in `prefetch`.
        unsafe {
            if self.nearest {
                prefetch::<S, true>(from, length);
            } else {
                prefetch::<S, false>(from, length);
            }
        }
    }
}

/// Asks for `length` bytes, into the nearest cache or the next one.
#[inline(always)]
unsafe fn prefetch<S: Isa, const NEAREST: bool>(from: *const u8, length: usize) {
    for at in (0..length).step_by(64) {
        // SAFETY: nothing is read; whoever calls has made sure of the instructions.
        unsafe { S::prefetch::<NEAREST>(from.wrapping_add(at)) }
    }
}

/// One row of activations.
#[inline(always)]
pub unsafe fn matvec<S: Isa, F: Codes>(rows: Rows<'_>, acts: &Acts<'_>, out: &mut [f32]) {
    let n_rows = rows.count();
    let n_blocks = rows.row_bytes / F::BYTES;
    let (pairs, units) = (F::ELEMENTS / BLOCK, F::ELEMENTS / F::UNIT);
    assert!(out.len() == n_rows && acts.wanted.lanes == 1 && acts.wanted.wide == S::WIDE);
    assert!(acts.data.len() >= n_blocks * pairs * 16 && acts.steps.len() >= n_blocks * pairs);
    assert!(acts.sums.len() >= n_blocks * units && acts.wanted.unit == F::UNIT);
    // SAFETY: every row has `n_blocks` blocks and the activations have as many, as asserted. Whoever calls has
    // made sure of the instructions.
    unsafe {
        let k = S::constants();
        let mut s = [S::splat(0.0); PANEL_UNITS];
        let mut m = s;
        let mut parts = [[S::no_part(); MOST_ROWS]; PANEL / BLOCK];
        for (index, out) in out.chunks_mut(S::ROWS).enumerate() {
            let starts = rows.starts(index * S::ROWS);
            let ahead = Ahead::of(starts[0], S::ROWS, rows.row_bytes);
            let mut sum = S::splat(0.0);
            for block in 0..n_blocks {
                let next = block * S::ROWS * F::BYTES;
                let blocks = starts.map(|start| start.add(block * F::BYTES));
                let x = acts.data.as_ptr().cast::<u8>().add(block * pairs * 2 * BLOCK);
                if pairs == 1 {
                    // Without a choice, which is felt in so short a loop.
                    prefetch::<S, true>(ahead.next.wrapping_add(next), S::ROWS * F::BYTES);
                    // Written out, so that the parts stay in registers.
                    let parts = &mut parts[0];
                    parts_of::<S, F>(&k, blocks[0], x, |_, part| parts[0] = part);
                    parts_of::<S, F>(&k, blocks[1], x, |_, part| parts[1] = part);
                    parts_of::<S, F>(&k, blocks[2], x, |_, part| parts[2] = part);
                    parts_of::<S, F>(&k, blocks[3], x, |_, part| parts[3] = part);
                    if S::ROWS == MOST_ROWS {
                        parts_of::<S, F>(&k, blocks[4], x, |_, part| parts[4] = part);
                        parts_of::<S, F>(&k, blocks[5], x, |_, part| parts[5] = part);
                        parts_of::<S, F>(&k, blocks[6], x, |_, part| parts[6] = part);
                        parts_of::<S, F>(&k, blocks[7], x, |_, part| parts[7] = part);
                    }
                } else {
                    for (row, block) in blocks.into_iter().take(S::ROWS).enumerate() {
                        // A row at a time: more would wait for each other.
                        ahead.prefetch::<S>(next + row * F::BYTES, F::BYTES);
                        parts_of::<S, F>(&k, block, x, |pair, part| {
                            S::keep::<F>(part, &mut parts[pair][row])
                        });
                    }
                }
                scales::<S, F>(&k, &blocks, &mut s, &mut m);
                for (pair, parts) in parts.iter().enumerate().take(pairs) {
                    let step = S::splat(*acts.steps.get_unchecked(block * pairs + pair));
                    let ints = if F::UNIT == 16 { S::reduce::<16>(parts) } else { S::reduce::<32>(parts) };
                    for (i, ints) in ints.into_iter().enumerate().take(BLOCK / F::UNIT) {
                        let unit = pair * (BLOCK / F::UNIT) + i;
                        let kept = *acts.sums.get_unchecked(block * units + unit);
                        let ints = if F::MINS { ints } else { S::less(ints, kept as i32) };
                        sum = S::add(sum, S::mul(S::mul(s[unit], step), S::floats(ints)));
                        if F::MINS {
                            sum = S::sub(sum, S::mul(m[unit], S::splat(f32::from_bits(kept))));
                        }
                    }
                }
            }
            let mut sums = [0.0; MOST_ROWS];
            S::store(sum, sums.as_mut_ptr());
            out.copy_from_slice(&sums[..out.len()]);
        }
    }
}
