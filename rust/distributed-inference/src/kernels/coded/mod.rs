//! Products of integer activations with the integer codes of quantised weights.
//!
//! A weight is `scale · (code − offset)` or `scale · code − minimum`, with one scale for a unit of 16 or 32
//! elements; an activation is `step · X` (see [`crate::kernels::acts`]). One row's result is
//!
//! ```text
//! sum = 0
//! for every unit, in order:
//!     sum += (scale · step) · f32(Σ code · X − offset · ΣX)
//!     sum −= minimum · (step · f32(ΣX))                        where weights have minimums
//! ```
//!
//! in f32, each operation rounded on its own. The integers are exact and fit 32 bits, so nothing but this
//! order decides the bits: not the instructions, the lanes, nor the rows beside it. [`plain`] is that sentence
//! as code. One row of activations is multiplied by [`matvec`], with weight rows in the lanes of a vector;
//! more by [`tile::tile`], with activation rows in the lanes.

mod entries;
#[cfg(target_arch = "aarch64")]
mod neon;
mod tile;
#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
mod wasm;
#[cfg(target_arch = "x86_64")]
mod x86;

use super::acts::{Acts, BLOCK, Wanted, integers_of};
use crate::quants::{Codes, Subs};
pub use tile::Panel;

/// Most weight rows that are multiplied together.
const MOST_ROWS: usize = 8;
/// Elements of a row that are unpacked at a time: whole blocks of every format.
const PANEL: usize = 256;
/// Most units of a panel.
const PANEL_UNITS: usize = PANEL / 16;
/// Bytes of rows that are best asked for into the nearest cache; more would push out what is being read.
const NEAR: usize = 16 << 10;
/// Weight rows that [`Tile`] is called with at most: a multiple of [`MOST_ROWS`].
pub const BAND: usize = 64;

/// Weight rows: the first byte of each and how many there are.
#[derive(Clone, Copy)]
pub struct Rows<'a> {
    /// Whole rows.
    pub bytes: &'a [u8],
    /// Bytes of one.
    pub row_bytes: usize,
}

impl Rows<'_> {
    fn count(&self) -> usize {
        self.bytes.len() / self.row_bytes
    }

    /// The blocks of rows from `row` on, each row's first; the last row stands in for those after it.
    fn starts(&self, row: usize) -> [*const u8; MOST_ROWS] {
        let last = self.count() - 1;
        std::array::from_fn(|i| self.bytes[(row + i).min(last) * self.row_bytes..].as_ptr())
    }
}

/// Writes the product of every weight row with one row of activations.
pub type Matvec = unsafe fn(Rows<'_>, &Acts<'_>, &mut [f32]);
/// Writes the products of up to [`BAND`] weight rows with groups of activations: [weight row, activation row].
pub type Tile = unsafe fn(Rows<'_>, &Acts<'_>, Layout, Unpack, &mut [f32]);
/// Unpacks consecutive blocks of a few rows, whose first bytes are given.
pub type Unpack = unsafe fn(&[*const u8; MOST_ROWS], usize, &mut Panel);

/// The blocks of a format.
#[derive(Clone, Copy)]
pub struct Layout {
    elements: usize,
    bytes: usize,
}

/// The kernels of a format for some of this host's instructions.
#[derive(Clone, Copy)]
pub struct Kernels {
    /// What the instructions are called here.
    pub name: &'static str,
    /// For one row of activations.
    pub matvec: Matvec,
    /// For more, and the lanes that it wants them in.
    pub tile: (Tile, usize),
    /// For no more than fill its lanes, which are fewer.
    pub narrow: Option<(Tile, usize)>,
    /// For `tile` and `narrow`.
    pub unpack: Unpack,
    /// Whether they want 16-bit activations.
    pub wide: bool,
}

/// A coded format as the front of the kernels uses it.
pub struct Coded {
    reading: Reading,
    /// The kernels for what this host can do, by number, the fastest first; none where there is nothing but the
    /// plain twin.
    kernels: fn(usize) -> Option<Kernels>,
}

impl Coded {
    /// The kernels of a format.
    pub const fn of<F: Codes>() -> Self {
        Self {
            reading: Reading {
                layout: Layout { elements: F::ELEMENTS, bytes: F::BYTES },
                unit: F::UNIT,
                offset: F::OFFSET,
                mins: F::MINS,
                codes: F::codes,
                scale: scale::<F>,
            },
            kernels: |number| host::kernels::<F>().nth(number),
        }
    }

    /// The fastest kernels of this host.
    pub fn kernels(&self) -> Option<Kernels> {
        (self.kernels)(0)
    }

    /// All kernels of this host.
    #[cfg(test)]
    pub fn every(&self) -> impl Iterator<Item = Kernels> {
        (0..).map_while(self.kernels)
    }

    /// The blocks.
    pub fn layout(&self) -> Layout {
        self.reading.layout
    }

    /// The plain twin of all kernels: one weight row times one row of activations.
    pub fn plain(&self, row: &[u8], x: &[f32]) -> f32 {
        plain(&self.reading, row, x)
    }

    /// What the kernels want of activations.
    pub fn wanted(&self, cols: usize, lanes: usize, wide: bool) -> Wanted {
        let Reading { unit, offset, mins, .. } = self.reading;
        Wanted { cols, lanes, wide, unit, offset, mins }
    }
}

#[cfg(target_arch = "aarch64")]
use neon as host;
#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
use wasm as host;
#[cfg(target_arch = "x86_64")]
use x86 as host;

#[cfg(any(target_arch = "aarch64", all(target_arch = "wasm32", target_feature = "simd128")))]
pub use host::Constants;
#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
pub use wasm::has_dot;

/// A host that there are no kernels for.
#[cfg(not(any(
    target_arch = "aarch64",
    all(target_arch = "wasm32", target_feature = "simd128"),
    target_arch = "x86_64"
)))]
mod host {
    pub fn kernels<F: super::Codes>() -> impl Iterator<Item = super::Kernels> {
        std::iter::empty()
    }
}

/// The plain reading of a format: its units, and the functions that read codes and scales.
#[derive(Clone, Copy)]
struct Reading {
    layout: Layout,
    unit: usize,
    offset: i32,
    mins: bool,
    codes: fn(&[u8], &mut [u8]),
    scale: fn(&[u8], usize) -> (f32, f32),
}

/// The definition: one weight row times one row of activations.
fn plain(reading: &Reading, row: &[u8], x: &[f32]) -> f32 {
    let Reading { layout, unit, offset, mins, .. } = *reading;
    let mut sum = 0.0;
    let mut codes = [0u8; PANEL];
    let mut integers = [0i32; BLOCK];
    for (block, x) in row.chunks_exact(layout.bytes).zip(x.chunks_exact(layout.elements)) {
        (reading.codes)(block, &mut codes[..layout.elements]);
        let mut step = 0.0;
        for at in (0..layout.elements).step_by(unit) {
            if at % BLOCK == 0 {
                step = integers_of(x[at..at + BLOCK].try_into().expect("a block"), &mut integers);
            }
            let integers = &integers[at % BLOCK..][..unit];
            let total: i32 = integers.iter().sum();
            let products: i32 = codes[at..].iter().zip(integers).map(|(code, x)| i32::from(*code) * x).sum();
            let (scale, minimum) = (reading.scale)(block, at / unit);
            sum += (scale * step) * (products - offset * total) as f32;
            if mins {
                sum -= minimum * (step * total as f32);
            }
        }
    }
    sum
}

/// Scale and minimum of a unit.
fn scale<F: Codes>(block: &[u8], unit: usize) -> (f32, f32) {
    let [d, m] = F::halves(block).map(crate::quants::from_half);
    match F::SUBS {
        Subs::None => (d, -m),
        Subs::ScalesAndMins => {
            let subs = F::subs(block);
            (d * f32::from(subs[unit]), m * f32::from(subs[unit + 8]))
        }
        Subs::Scales { .. } => (d * f32::from(F::subs(block)[unit] as i8), 0.0),
    }
}

/// The instructions of a host, as the two kernels need them.
///
/// # Safety
/// Whoever calls a function of it has made sure that the processor has the instructions, and that pointers can
/// be read or written as far as the function's comment says.
#[allow(dead_code, missing_docs)]
trait Isa {
    /// Weight rows in a vector.
    const ROWS: usize;
    /// Activation rows in a vector.
    const LANES: usize;
    /// Weight rows whose sums [`tile::tile`] keeps in registers at once.
    const TILE_ROWS: usize;
    /// Whether activations are 16-bit integers.
    const WIDE: bool;

    /// What the loops need again and again.
    type Constants;
    /// The codes of 32 elements.
    type Pair: Copy;
    /// Partial sums of the products of 32 elements, of each unit apart.
    type Part: Copy;
    /// An integer for each weight row.
    type Ints: Copy;
    /// A float for each weight row.
    type Floats: Copy;

    unsafe fn constants() -> Self::Constants;
    unsafe fn pairs<F: Codes>(k: &Self::Constants, block: *const u8, take: impl FnMut(usize, Self::Pair));
    unsafe fn no_part() -> Self::Part;
    /// Keeps of a part what `reduce` looks at.
    #[inline(always)]
    unsafe fn keep<F: Codes>(part: Self::Part, place: &mut Self::Part) {
        *place = part;
    }
    /// Products of 32 codes and the 64 bytes of their activations.
    unsafe fn part<const UNIT: usize>(codes: Self::Pair, x: *const u8) -> Self::Part;
    /// Whole sums of each unit.
    unsafe fn reduce<const UNIT: usize>(parts: &[Self::Part; MOST_ROWS]) -> [Self::Ints; 2];
    unsafe fn less(a: Self::Ints, b: i32) -> Self::Ints;
    unsafe fn floats(a: Self::Ints) -> Self::Floats;
    unsafe fn splat(a: f32) -> Self::Floats;
    unsafe fn mul(a: Self::Floats, b: Self::Floats) -> Self::Floats;
    unsafe fn add(a: Self::Floats, b: Self::Floats) -> Self::Floats;
    unsafe fn sub(a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// The half-precision numbers `at` bytes into each block.
    unsafe fn halves(k: &Self::Constants, blocks: &[*const u8; MOST_ROWS], at: usize) -> Self::Floats;
    /// The half-precision numbers in the lower halves of integers.
    unsafe fn halves_of(k: &Self::Constants, bits: Self::Ints) -> Self::Floats;
    /// The four words `at` bytes into each block: first of all rows, then second, and so on.
    unsafe fn words(blocks: &[*const u8; MOST_ROWS], at: usize) -> [Self::Ints; 4];
    unsafe fn and(a: Self::Ints, b: u32) -> Self::Ints;
    unsafe fn or(a: Self::Ints, b: Self::Ints) -> Self::Ints;
    unsafe fn left<const BITS: u32>(a: Self::Ints) -> Self::Ints;
    unsafe fn right<const BITS: u32>(a: Self::Ints) -> Self::Ints;
    /// Byte `BYTE` of each integer, unsigned and signed.
    unsafe fn byte<const BYTE: usize>(k: &Self::Constants, a: Self::Ints) -> Self::Floats;
    unsafe fn signed_byte<const BYTE: usize>(a: Self::Ints) -> Self::Floats;
    unsafe fn store(a: Self::Floats, out: *mut f32);
    /// Asks for the line of 64 bytes at an address, which need not be there, without waiting for it: into the
    /// nearest cache, or the next one.
    #[inline(always)]
    unsafe fn prefetch<const NEAREST: bool>(_at: *const u8) {}

    /// An integer for each activation row.
    type LaneInts: Copy;
    /// A float for each activation row.
    type LaneFloats: Copy;

    /// Partial sums of products for each activation row.
    type LaneSums: Copy;

    /// Writes 32 codes in their order: as bytes, or as 16-bit integers.
    unsafe fn write(codes: Self::Pair, out: *mut u8);
    unsafe fn lane_zero() -> Self::LaneSums;
    /// Four bytes, for every lane.
    unsafe fn lane_splat(word: *const u8) -> Self::LaneInts;
    unsafe fn lane_load(at: *const u8) -> Self::LaneInts;
    /// `sums` plus the products of codes and activations.
    unsafe fn lane_dot(sums: Self::LaneSums, codes: Self::LaneInts, x: Self::LaneInts) -> Self::LaneSums;
    /// Times 256.
    unsafe fn lane_shift(a: Self::LaneSums) -> Self::LaneSums;
    /// Whole sums.
    unsafe fn lane_ints(a: Self::LaneSums) -> Self::LaneInts;
    unsafe fn lane_less(a: Self::LaneInts, b: Self::LaneInts) -> Self::LaneInts;
    unsafe fn lane_floats(a: Self::LaneInts) -> Self::LaneFloats;
    unsafe fn lane_load_floats(at: *const f32) -> Self::LaneFloats;
    unsafe fn lane_store_floats(a: Self::LaneFloats, at: *mut f32);
    unsafe fn lane_float(a: f32) -> Self::LaneFloats;
    unsafe fn lane_mul(a: Self::LaneFloats, b: Self::LaneFloats) -> Self::LaneFloats;
    unsafe fn lane_add(a: Self::LaneFloats, b: Self::LaneFloats) -> Self::LaneFloats;
    unsafe fn lane_sub(a: Self::LaneFloats, b: Self::LaneFloats) -> Self::LaneFloats;
}

/// Scales and minimums of the units of one block of [`Isa::ROWS`] rows.
#[inline(always)]
unsafe fn scales<S: Isa, F: Codes>(
    k: &S::Constants,
    blocks: &[*const u8; MOST_ROWS],
    s: &mut [S::Floats; PANEL_UNITS],
    m: &mut [S::Floats; PANEL_UNITS],
) {
    // SAFETY: a block has `F::BYTES` bytes, and whoever calls has made sure of the instructions.
    unsafe {
        match F::SUBS {
            Subs::None => {
                s[0] = S::halves(k, blocks, 0);
                if F::MINS {
                    m[0] = S::mul(S::halves(k, blocks, 2), S::splat(-1.0));
                }
            }
            Subs::ScalesAndMins => {
                // As `scales_and_mins`, for all rows at once.
                let [both, scales, mins, rest] = S::words(blocks, 0);
                let (d, dmin) = (S::halves_of(k, both), S::halves_of(k, S::right::<16>(both)));
                let high = |word| S::left::<4>(S::and(S::right::<6>(word), 0x0303_0303));
                let words = [
                    S::and(scales, 0x3F3F_3F3F),
                    S::or(S::and(rest, 0x0F0F_0F0F), high(scales)),
                    S::and(mins, 0x3F3F_3F3F),
                    S::or(S::and(S::right::<4>(rest), 0x0F0F_0F0F), high(mins)),
                ];
                for i in 0..2 {
                    let (scales, mins) = (words[i], words[i + 2]);
                    s[4 * i] = S::mul(d, S::byte::<0>(k, scales));
                    s[4 * i + 1] = S::mul(d, S::byte::<1>(k, scales));
                    s[4 * i + 2] = S::mul(d, S::byte::<2>(k, scales));
                    s[4 * i + 3] = S::mul(d, S::byte::<3>(k, scales));
                    m[4 * i] = S::mul(dmin, S::byte::<0>(k, mins));
                    m[4 * i + 1] = S::mul(dmin, S::byte::<1>(k, mins));
                    m[4 * i + 2] = S::mul(dmin, S::byte::<2>(k, mins));
                    m[4 * i + 3] = S::mul(dmin, S::byte::<3>(k, mins));
                }
            }
            Subs::Scales { at, d } => {
                let d = S::halves(k, blocks, d);
                for (i, word) in S::words(blocks, at).into_iter().enumerate() {
                    s[4 * i] = S::mul(d, S::signed_byte::<0>(word));
                    s[4 * i + 1] = S::mul(d, S::signed_byte::<1>(word));
                    s[4 * i + 2] = S::mul(d, S::signed_byte::<2>(word));
                    s[4 * i + 3] = S::mul(d, S::signed_byte::<3>(word));
                }
            }
        }
    }
}

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
struct Ahead {
    next: *const u8,
    nearest: bool,
}

impl Ahead {
    /// `n_rows` rows at `first` come next, which the nearest cache holds beside this many others or not.
    fn of(first: *const u8, n_rows: usize, row_bytes: usize) -> Self {
        let bytes = n_rows * row_bytes;
        Self { next: first.wrapping_add(bytes), nearest: bytes <= NEAR }
    }

    /// A stretch of them.
    #[inline(always)]
    unsafe fn prefetch<S: Isa>(self, from: usize, length: usize) {
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
unsafe fn matvec<S: Isa, F: Codes>(rows: Rows<'_>, acts: &Acts<'_>, out: &mut [f32]) {
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
