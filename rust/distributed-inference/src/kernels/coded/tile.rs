//! Tiles: several rows of activations, in the lanes of a vector, share weight rows that are unpacked once.

use super::isa::{Isa, scales};
use super::matvec::Ahead;
use super::{BAND, Layout, MOST_ROWS, PANEL, PANEL_UNITS, Rows, Unpack};
use crate::kernels::acts::{Acts, BLOCK};
use crate::quants::Codes;

/// Unpacked codes and scales of a few rows.
#[repr(C, align(64))]
pub struct Panel {
    codes: [[u8; 2 * PANEL]; MOST_ROWS],
    s: [[f32; MOST_ROWS]; PANEL_UNITS],
    m: [[f32; MOST_ROWS]; PANEL_UNITS],
}

/// Unpacks `count` blocks of every row.
#[inline(always)]
pub unsafe fn unpack<S: Isa, F: Codes>(starts: &[*const u8; MOST_ROWS], count: usize, panel: &mut Panel) {
    let (pairs, units) = (F::ELEMENTS / BLOCK, F::ELEMENTS / F::UNIT);
    let bytes = if S::WIDE { 2 * BLOCK } else { BLOCK };
    assert!(count * F::ELEMENTS <= PANEL);
    // SAFETY: rows have as many blocks, and whoever calls has made sure of the instructions.
    unsafe {
        let k = S::constants();
        let mut s = [S::splat(0.0); PANEL_UNITS];
        let mut m = s;
        for block in 0..count {
            let blocks = starts.map(|start| start.add(block * F::BYTES));
            for (codes, block_of_row) in panel.codes.iter_mut().zip(blocks).take(S::ROWS) {
                let codes = codes.as_mut_ptr();
                S::pairs::<F>(&k, block_of_row, |pair, values| {
                    S::write(values, codes.add((block * pairs + pair) * bytes));
                });
            }
            scales::<S, F>(&k, &blocks, &mut s, &mut m);
            for unit in 0..units {
                S::store(s[unit], panel.s[block * units + unit].as_mut_ptr());
                if F::MINS {
                    S::store(m[unit], panel.m[block * units + unit].as_mut_ptr());
                }
            }
        }
    }
}

/// Groups of rows of activations; `UNIT` and `MINS` are the format's.
#[inline(always)]
pub unsafe fn tile<S: Isa, const UNIT: usize, const MINS: bool>(
    rows: Rows<'_>,
    acts: &Acts<'_>,
    layout: Layout,
    unpack: Unpack,
    out: &mut [f32],
) {
    let n_rows = rows.count();
    let cols = acts.wanted.cols;
    let groups = acts.steps.len() / (S::LANES * cols / BLOCK);
    let stride = groups * S::LANES;
    let (padded, n_blocks) = (n_rows.next_multiple_of(MOST_ROWS), rows.row_bytes / layout.bytes);
    assert!(n_rows <= BAND && out.len() >= padded * stride && cols == n_blocks * layout.elements);
    assert!(acts.wanted.lanes == S::LANES && acts.wanted.wide == S::WIDE && acts.wanted.unit == UNIT);
    assert!(acts.data.len() == stride * cols / 2 && acts.sums.len() == stride * cols / UNIT);
    out[..padded * stride].fill(0.0);
    let mut panel = Panel {
        codes: [[0; 2 * PANEL]; MOST_ROWS],
        s: [[0.0; MOST_ROWS]; PANEL_UNITS],
        m: [[0.0; MOST_ROWS]; PANEL_UNITS],
    };
    let blocks_of_panel = PANEL / layout.elements;
    let code_bytes = if S::WIDE { 2 * UNIT } else { UNIT };
    // The compiler must not know how often the innermost loop runs. It would write out all of it and sort the
    // products by sum, each a chain of dependent instructions, with everything else on the stack.
    let steps_of_unit = std::hint::black_box(code_bytes / 4);
    // SAFETY: every row has `n_blocks` blocks, and activations and results are as long as asserted. Whoever calls
    // has made sure of the instructions.
    unsafe {
        for row in (0..n_rows).step_by(S::ROWS) {
            let starts = rows.starts(row);
            let ahead = Ahead::of(starts[0], S::ROWS, rows.row_bytes);
            for first in (0..n_blocks).step_by(blocks_of_panel) {
                let count = blocks_of_panel.min(n_blocks - first);
                let from = first * layout.bytes;
                ahead.prefetch::<S>(S::ROWS * from, S::ROWS * count * layout.bytes);
                unpack(&starts.map(|start| start.add(from)), count, &mut panel);
                let (from, n_units) = (first * layout.elements, count * layout.elements / UNIT);
                let place = Place {
                    n_units,
                    steps_of_unit,
                    data: acts.data.as_ptr().cast::<u8>().add(from * S::LANES * 2),
                    steps: acts.steps.as_ptr().add(from / BLOCK * S::LANES),
                    sums: acts.sums.as_ptr().add(from / UNIT * S::LANES),
                    cols,
                    stride,
                };
                for i in (0..S::ROWS).step_by(S::TILE_ROWS) {
                    let out = out.as_mut_ptr().add((row + i) * stride);
                    let mut group = 0;
                    while group + 2 <= groups {
                        multiply::<S, UNIT, MINS, 2>(&panel, i, place, group, out);
                        group += 2;
                    }
                    if group < groups {
                        multiply::<S, UNIT, MINS, 1>(&panel, i, place, group, out);
                    }
                }
            }
        }
    }
}

/// Where the activations of a panel lie.
#[derive(Clone, Copy)]
struct Place {
    n_units: usize,
    steps_of_unit: usize,
    data: *const u8,
    steps: *const f32,
    sums: *const u32,
    cols: usize,
    stride: usize,
}

/// Adds the products of a panel's rows from `first` on and `G` groups to `out`.
#[inline(always)]
unsafe fn multiply<S: Isa, const UNIT: usize, const MINS: bool, const G: usize>(
    panel: &Panel,
    first: usize,
    place: Place,
    group: usize,
    out: *mut f32,
) {
    // Bytes of a unit's codes in a plane; a step takes eight of them, and as many of every activation row.
    let code_bytes = if S::WIDE { 2 * UNIT } else { UNIT };
    // SAFETY: as in `tile`, which has checked all lengths.
    unsafe {
        let data: [*const u8; G] =
            std::array::from_fn(|g| place.data.add((group + g) * S::LANES * place.cols * 2));
        let steps: [*const f32; G] =
            std::array::from_fn(|g| place.steps.add((group + g) * S::LANES * (place.cols / BLOCK)));
        let kept: [*const u32; G] =
            std::array::from_fn(|g| place.sums.add((group + g) * S::LANES * (place.cols / UNIT)));
        let apart = S::LANES * place.cols * 2;
        for unit in 0..place.n_units {
            let mut sums = [[S::lane_zero(); G]; MOST_ROWS];
            // Within a block of 32 the units follow each other, in each plane.
            let (block, part) = (unit * UNIT / BLOCK, unit * UNIT % BLOCK);
            let at = (block * 2 * BLOCK + if S::WIDE { 2 * part } else { part }) * S::LANES;
            for plane in 0..if S::WIDE { 1 } else { 2 } {
                if plane == 1 {
                    for sum in sums[..S::TILE_ROWS].as_flattened_mut() {
                        *sum = S::lane_shift(*sum);
                    }
                }
                let mut codes: *const u8 = panel.codes[first].as_ptr().add(unit * code_bytes);
                let mut x = data[0].add(at + plane * BLOCK * S::LANES);
                for _ in 0..place.steps_of_unit {
                    let now: [S::LaneInts; G] = std::array::from_fn(|g| S::lane_load(x.add(g * apart)));
                    for (row, sums) in sums.iter_mut().enumerate().take(S::TILE_ROWS) {
                        let codes = S::lane_splat(codes.add(row * 2 * PANEL));
                        for (sum, x) in sums.iter_mut().zip(now) {
                            *sum = S::lane_dot(*sum, codes, x);
                        }
                    }
                    codes = codes.add(4);
                    x = x.add(4 * S::LANES);
                }
            }
            for g in 0..G {
                let step = S::lane_load_floats(steps[g].add(block * S::LANES));
                let kept = kept[g].add(unit * S::LANES);
                for (row, sums) in sums.iter().enumerate().take(S::TILE_ROWS) {
                    let at = out.add(row * place.stride + (group + g) * S::LANES);
                    let scale = S::lane_mul(S::lane_float(panel.s[unit][first + row]), step);
                    let ints = S::lane_ints(sums[g]);
                    let ints = if MINS { ints } else { S::lane_less(ints, S::lane_load(kept.cast())) };
                    let mut sum = S::lane_load_floats(at);
                    sum = S::lane_add(sum, S::lane_mul(scale, S::lane_floats(ints)));
                    if MINS {
                        let minimum = S::lane_float(panel.m[unit][first + row]);
                        sum = S::lane_sub(sum, S::lane_mul(minimum, S::lane_load_floats(kept.cast())));
                    }
                    S::lane_store_floats(sum, at);
                }
            }
        }
    }
}
