//! What the kernels ask of a host's instructions, and the scales of blocks in terms of it.

use super::{MOST_ROWS, PANEL_UNITS};
use crate::quants::{Codes, Subs};

/// The instructions of a host, as the two kernels need them.
///
/// # Safety
/// Whoever calls a function of it has made sure that the processor has the instructions, and that pointers can
/// be read or written as far as the function's comment says.
#[allow(dead_code, missing_docs)]
pub trait Isa {
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
pub unsafe fn scales<S: Isa, F: Codes>(
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
