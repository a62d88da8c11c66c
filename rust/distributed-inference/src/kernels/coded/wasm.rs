//! WebAssembly SIMD: with relaxed dot products of bytes where the build has them, else with 16-bit integers.

use super::entries::{entries, four_rows};
use super::isa::Isa;
use super::{Kernels, Layout, MOST_ROWS, Panel, Rows, Tile, Unpack};
use crate::kernels::acts::Acts;
use crate::quants::Codes;
use core::arch::wasm32::*;

/// Constants of the inner loops. V8 makes a constant anew, with three instructions, wherever it is used, also in
/// loops; what it does not know to be constant it keeps. So they pass through a black box once a product.
#[derive(Clone, Copy)]
pub struct Constants {
    /// 15 in every byte.
    pub nibbles: v128,
    /// 16 in every byte.
    pub fifths: v128,
    /// 0x30 in every byte.
    pub pairs: v128,
    /// For 32-bit lanes.
    sign: v128,
    magnitude: v128,
    smallest: v128,
    bias: v128,
    normal: v128,
    large: v128,
    infinite: v128,
    byte: v128,
}

impl Constants {
    #[inline(always)]
    fn new() -> Self {
        std::hint::black_box(Self {
            nibbles: u8x16_splat(15),
            fifths: u8x16_splat(16),
            pairs: u8x16_splat(0x30),
            sign: u32x4_splat(0x8000),
            magnitude: u32x4_splat(0x7FFF),
            smallest: f32x4_splat(1.0 / 16_777_216.0),
            bias: i32x4_splat(112 << 23),
            normal: i32x4_splat(0x3FF),
            large: i32x4_splat(0x7BFF),
            infinite: u32x4_splat(0x7F80_0000),
            byte: u32x4_splat(0xFF),
        })
    }
}

/// 16-bit activations; codes are widened.
struct Wide;

/// 8-bit planes of activations. The dot product is the same on every machine while its second side is 0..=127.
#[cfg(target_feature = "relaxed-simd")]
struct Relaxed;

entries!(Wide);
#[cfg(target_feature = "relaxed-simd")]
entries!(Relaxed);

/// Whether the relaxed dot product of bytes is one instruction here. Where it is not, three stand in its place, and
/// they clip sums of two products to 16 bits, as kernels never let it come to; then the other build is faster.
pub fn has_dot() -> bool {
    #[cfg(target_feature = "relaxed-simd")]
    {
        let (x, codes) = std::hint::black_box((i8x16_splat(127), u8x16_splat(255)));
        let sum = i32x4_relaxed_dot_i8x16_i7x16_add(x, codes, i32x4_splat(0));
        i32x4_extract_lane::<0>(sum) != 2 * i32::from(i16::MAX)
    }
    #[cfg(not(target_feature = "relaxed-simd"))]
    false
}

/// The kernels of a format: without relaxed SIMD, or for codes of eight bits, the wide ones.
pub fn kernels<F: Codes>() -> impl Iterator<Item = Kernels> {
    #[cfg(target_feature = "relaxed-simd")]
    if F::LARGEST < 128 {
        return std::iter::once(Relaxed::kernels::<F>());
    }
    std::iter::once(Wide::kernels::<F>())
}

/// Four sums across four vectors each.
#[inline(always)]
fn sums_of_four(v: [v128; 4]) -> v128 {
    let two = |a, b| i32x4_add(i32x4_shuffle::<0, 4, 1, 5>(a, b), i32x4_shuffle::<2, 6, 3, 7>(a, b));
    let (ab, cd) = (two(v[0], v[1]), two(v[2], v[3]));
    i32x4_add(i64x2_shuffle::<0, 2>(ab, cd), i64x2_shuffle::<1, 3>(ab, cd))
}

macro_rules! common {
    () => {
        four_rows!();
        type Ints = v128;
        type Floats = v128;
        type LaneSums = v128;

        #[inline(always)]
        unsafe fn constants() -> Constants {
            Constants::new()
        }
        #[inline(always)]
        unsafe fn byte<const BYTE: usize>(k: &Constants, a: v128) -> v128 {
            let moved = u32x4_shr(a, 8 * BYTE as u32);
            f32x4_convert_i32x4(if BYTE == 3 { moved } else { v128_and(moved, k.byte) })
        }
        #[inline(always)]
        unsafe fn no_part() -> Self::Part {
            [i32x4_splat(0); 2]
        }
        #[inline(always)]
        unsafe fn less(a: v128, b: i32) -> v128 {
            i32x4_sub(a, i32x4_splat(b))
        }
        #[inline(always)]
        unsafe fn floats(a: v128) -> v128 {
            f32x4_convert_i32x4(a)
        }
        #[inline(always)]
        unsafe fn splat(a: f32) -> v128 {
            f32x4_splat(a)
        }
        #[inline(always)]
        unsafe fn mul(a: v128, b: v128) -> v128 {
            f32x4_mul(a, b)
        }
        #[inline(always)]
        unsafe fn add(a: v128, b: v128) -> v128 {
            f32x4_add(a, b)
        }
        #[inline(always)]
        unsafe fn sub(a: v128, b: v128) -> v128 {
            f32x4_sub(a, b)
        }
        #[inline(always)]
        unsafe fn halves(k: &Constants, blocks: &[*const u8; MOST_ROWS], at: usize) -> v128 {
            let bits = i32x4_splat(0);
            unsafe {
                let bits = v128_load16_lane::<0>(bits, blocks[0].add(at).cast());
                let bits = v128_load16_lane::<2>(bits, blocks[1].add(at).cast());
                let bits = v128_load16_lane::<4>(bits, blocks[2].add(at).cast());
                Self::halves_of(k, v128_load16_lane::<6>(bits, blocks[3].add(at).cast()))
            }
        }
        #[inline(always)]
        unsafe fn halves_of(k: &Constants, bits: v128) -> v128 {
            let sign = u32x4_shl(v128_and(bits, k.sign), 16);
            let magnitude = v128_and(bits, k.magnitude);
            let fraction = u32x4_shl(magnitude, 13);
            // As in `from_half`: subnormal, ordinary, and infinite or no number.
            let small = f32x4_mul(f32x4_convert_i32x4(magnitude), k.smallest);
            let normal = i32x4_add(fraction, k.bias);
            let large = v128_and(i32x4_gt(magnitude, k.large), k.infinite);
            let value = v128_bitselect(normal, small, i32x4_gt(magnitude, k.normal));
            v128_or(v128_or(value, large), sign)
        }
        #[inline(always)]
        unsafe fn words(blocks: &[*const u8; MOST_ROWS], at: usize) -> [v128; 4] {
            let row = |i: usize| unsafe { v128_load(blocks[i].add(at).cast()) };
            let (a, b) = (row(0), row(1));
            let (low, high) = (i32x4_shuffle::<0, 4, 1, 5>(a, b), i32x4_shuffle::<2, 6, 3, 7>(a, b));
            let (c, d) = (row(2), row(3));
            let (low_2, high_2) = (i32x4_shuffle::<0, 4, 1, 5>(c, d), i32x4_shuffle::<2, 6, 3, 7>(c, d));
            [
                i64x2_shuffle::<0, 2>(low, low_2),
                i64x2_shuffle::<1, 3>(low, low_2),
                i64x2_shuffle::<0, 2>(high, high_2),
                i64x2_shuffle::<1, 3>(high, high_2),
            ]
        }
        #[inline(always)]
        unsafe fn and(a: v128, b: u32) -> v128 {
            v128_and(a, u32x4_splat(b))
        }
        #[inline(always)]
        unsafe fn or(a: v128, b: v128) -> v128 {
            v128_or(a, b)
        }
        #[inline(always)]
        unsafe fn left<const BITS: u32>(a: v128) -> v128 {
            i32x4_shl(a, BITS)
        }
        #[inline(always)]
        unsafe fn right<const BITS: u32>(a: v128) -> v128 {
            u32x4_shr(a, BITS)
        }
        #[inline(always)]
        unsafe fn signed_byte<const BYTE: usize>(a: v128) -> v128 {
            let high = if BYTE == 3 { a } else { i32x4_shl(a, 24 - 8 * BYTE as u32) };
            f32x4_convert_i32x4(i32x4_shr(high, 24))
        }
        #[inline(always)]
        unsafe fn store(a: v128, out: *mut f32) {
            unsafe { v128_store(out.cast(), a) }
        }
        #[inline(always)]
        unsafe fn lane_zero() -> v128 {
            i32x4_splat(0)
        }
        #[inline(always)]
        unsafe fn lane_splat(word: *const u8) -> v128 {
            unsafe { v128_load32_splat(word.cast()) }
        }
        #[inline(always)]
        unsafe fn lane_load(at: *const u8) -> v128 {
            unsafe { v128_load(at.cast()) }
        }
        #[inline(always)]
        unsafe fn lane_shift(a: v128) -> v128 {
            i32x4_shl(a, 8)
        }
        #[inline(always)]
        unsafe fn lane_ints(a: v128) -> v128 {
            a
        }
        #[inline(always)]
        unsafe fn lane_less(a: v128, b: v128) -> v128 {
            i32x4_sub(a, b)
        }
        #[inline(always)]
        unsafe fn lane_load_floats(at: *const f32) -> v128 {
            unsafe { v128_load(at.cast()) }
        }
    };
}

impl Isa for Wide {
    const WIDE: bool = true;
    common!();

    #[inline(always)]
    unsafe fn part<const UNIT: usize>(codes: [v128; 2], x: *const u8) -> [v128; 2] {
        let x = |i: usize| unsafe { v128_load(x.add(16 * i).cast()) };
        let sixteen = |codes, i| {
            i32x4_add(
                i32x4_dot_i16x8(u16x8_extend_low_u8x16(codes), x(i)),
                i32x4_dot_i16x8(u16x8_extend_high_u8x16(codes), x(i + 1)),
            )
        };
        let (first, second) = (sixteen(codes[0], 0), sixteen(codes[1], 2));
        if UNIT == 32 {
            let sum = i32x4_add(first, second);
            return [sum, sum];
        }
        [first, second]
    }
    #[inline(always)]
    unsafe fn write(codes: [v128; 2], out: *mut u8) {
        for (i, codes) in codes.into_iter().enumerate() {
            unsafe {
                v128_store(out.add(32 * i).cast(), u16x8_extend_low_u8x16(codes));
                v128_store(out.add(32 * i + 16).cast(), u16x8_extend_high_u8x16(codes));
            }
        }
    }
    #[inline(always)]
    unsafe fn lane_dot(sums: v128, codes: v128, x: v128) -> v128 {
        i32x4_add(sums, i32x4_dot_i16x8(codes, x))
    }
}

#[cfg(target_feature = "relaxed-simd")]
impl Isa for Relaxed {
    const WIDE: bool = false;
    common!();

    #[inline(always)]
    unsafe fn part<const UNIT: usize>(codes: [v128; 2], x: *const u8) -> [v128; 2] {
        let x = |i: usize| unsafe { v128_load(x.add(16 * i).cast()) };
        let dot = |x, codes, sum| i32x4_relaxed_dot_i8x16_i7x16_add(x, codes, sum);
        let zero = i32x4_splat(0);
        if UNIT == 32 {
            let high = dot(x(1), codes[1], dot(x(0), codes[0], zero));
            let sum = dot(x(3), codes[1], dot(x(2), codes[0], i32x4_shl(high, 8)));
            return [sum, sum];
        }
        [0, 1].map(|i| dot(x(i + 2), codes[i], i32x4_shl(dot(x(i), codes[i], zero), 8)))
    }
    #[inline(always)]
    unsafe fn write(codes: [v128; 2], out: *mut u8) {
        unsafe {
            v128_store(out.cast(), codes[0]);
            v128_store(out.add(16).cast(), codes[1]);
        }
    }
    #[inline(always)]
    unsafe fn lane_dot(sums: v128, codes: v128, x: v128) -> v128 {
        i32x4_relaxed_dot_i8x16_i7x16_add(x, codes, sums)
    }
}
