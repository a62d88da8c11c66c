//! NEON: products of 16-bit integers, and of bytes where the processor has the dot product extension.

use super::entries::{entries, four_rows};
use super::isa::Isa;
use super::{Kernels, Layout, MOST_ROWS, Panel, Rows, Tile, Unpack};
use crate::kernels::acts::Acts;
use crate::quants::Codes;
use core::arch::aarch64::*;
use core::arch::asm;
use std::arch::is_aarch64_feature_detected;

/// The compiler knows by itself what to keep in registers.
pub type Constants = ();

/// 16-bit activations; codes are widened.
struct Wide;

/// 8-bit planes of activations. Both sides of the dot product are signed, which codes below 128 may be taken for.
struct Dot;

entries!(Wide);
entries!(Dot, "dotprod");

/// The kernels of a format for everything that this processor has, the fastest first.
pub fn kernels<F: Codes>() -> impl Iterator<Item = Kernels> {
    let dot = F::LARGEST < 128 && is_aarch64_feature_detected!("dotprod");
    dot.then(Dot::kernels::<F>).into_iter().chain(std::iter::once(Wide::kernels::<F>()))
}

/// Adds products of eight pairs of numbers: four and four.
#[inline(always)]
fn add_products(sums: [int32x4_t; 2], a: int16x8_t, b: int16x8_t) -> [int32x4_t; 2] {
    // SAFETY: every processor of this kind has NEON.
    unsafe { [vmlal_s16(sums[0], vget_low_s16(a), vget_low_s16(b)), vmlal_high_s16(sums[1], a, b)] }
}

/// Adds to each sum the products of four bytes. The function that the compiler has for it is not stable.
#[inline]
#[target_feature(enable = "dotprod")]
fn add_dots(mut sums: int32x4_t, a: uint8x16_t, b: uint8x16_t) -> int32x4_t {
    // SAFETY: the instruction works on these registers alone, and the processor has it.
    unsafe {
        asm!(
            "sdot {sums:v}.4s, {a:v}.16b, {b:v}.16b",
            sums = inout(vreg) sums, a = in(vreg) a, b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sums
}

/// The values of half-precision numbers. The function that the compiler has for it is not stable.
#[inline(always)]
fn values_of_halves(bits: uint16x4_t) -> float32x4_t {
    let values;
    // SAFETY: the instruction works on these registers alone, and every processor of this kind has it.
    unsafe {
        asm!(
            "fcvtl {values:v}.4s, {bits:v}.4h",
            values = out(vreg) values, bits = in(vreg) bits,
            options(pure, nomem, nostack)
        );
    }
    values
}

/// Sixteen codes as 16-bit integers.
#[inline(always)]
fn widened(codes: uint8x16_t) -> [int16x8_t; 2] {
    // SAFETY: every processor of this kind has NEON.
    unsafe {
        [vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(codes))), vreinterpretq_s16_u16(vmovl_high_u8(codes))]
    }
}

/// Four sums across four vectors each.
#[inline(always)]
fn sums_of_four(v: [int32x4_t; 4]) -> int32x4_t {
    // SAFETY: every processor of this kind has NEON.
    unsafe { vpaddq_s32(vpaddq_s32(v[0], v[1]), vpaddq_s32(v[2], v[3])) }
}

macro_rules! common {
    () => {
        four_rows!();
        type Ints = int32x4_t;
        type Floats = float32x4_t;

        #[inline(always)]
        unsafe fn constants() {}
        #[inline(always)]
        unsafe fn no_part() -> Self::Part {
            unsafe { [vdupq_n_s32(0); 2] }
        }
        #[inline(always)]
        unsafe fn less(a: int32x4_t, b: i32) -> int32x4_t {
            unsafe { vsubq_s32(a, vdupq_n_s32(b)) }
        }
        #[inline(always)]
        unsafe fn floats(a: int32x4_t) -> float32x4_t {
            unsafe { vcvtq_f32_s32(a) }
        }
        #[inline(always)]
        unsafe fn splat(a: f32) -> float32x4_t {
            unsafe { vdupq_n_f32(a) }
        }
        #[inline(always)]
        unsafe fn mul(a: float32x4_t, b: float32x4_t) -> float32x4_t {
            unsafe { vmulq_f32(a, b) }
        }
        #[inline(always)]
        unsafe fn add(a: float32x4_t, b: float32x4_t) -> float32x4_t {
            unsafe { vaddq_f32(a, b) }
        }
        #[inline(always)]
        unsafe fn sub(a: float32x4_t, b: float32x4_t) -> float32x4_t {
            unsafe { vsubq_f32(a, b) }
        }
        #[inline(always)]
        unsafe fn halves(_: &(), blocks: &[*const u8; MOST_ROWS], at: usize) -> float32x4_t {
            unsafe {
                let bits = |i: usize| blocks[i].add(at).cast::<u16>().read_unaligned();
                values_of_halves(vld1_u16([bits(0), bits(1), bits(2), bits(3)].as_ptr()))
            }
        }
        #[inline(always)]
        unsafe fn halves_of(_: &(), bits: int32x4_t) -> float32x4_t {
            unsafe { values_of_halves(vmovn_u32(vreinterpretq_u32_s32(bits))) }
        }
        #[inline(always)]
        unsafe fn words(blocks: &[*const u8; MOST_ROWS], at: usize) -> [int32x4_t; 4] {
            unsafe {
                let row = |i: usize| vreinterpretq_s32_u8(vld1q_u8(blocks[i].add(at)));
                let (a, b, c, d) = (row(0), row(1), row(2), row(3));
                // First and second words of two rows, then third and fourth ones.
                let ab = [vzip1q_s32(a, b), vzip2q_s32(a, b)].map(|words| vreinterpretq_s64_s32(words));
                let cd = [vzip1q_s32(c, d), vzip2q_s32(c, d)].map(|words| vreinterpretq_s64_s32(words));
                [
                    vreinterpretq_s32_s64(vzip1q_s64(ab[0], cd[0])),
                    vreinterpretq_s32_s64(vzip2q_s64(ab[0], cd[0])),
                    vreinterpretq_s32_s64(vzip1q_s64(ab[1], cd[1])),
                    vreinterpretq_s32_s64(vzip2q_s64(ab[1], cd[1])),
                ]
            }
        }
        #[inline(always)]
        unsafe fn and(a: int32x4_t, b: u32) -> int32x4_t {
            unsafe { vandq_s32(a, vdupq_n_s32(b as i32)) }
        }
        #[inline(always)]
        unsafe fn or(a: int32x4_t, b: int32x4_t) -> int32x4_t {
            unsafe { vorrq_s32(a, b) }
        }
        #[inline(always)]
        unsafe fn left<const BITS: u32>(a: int32x4_t) -> int32x4_t {
            unsafe { vshlq_s32(a, vdupq_n_s32(BITS as i32)) }
        }
        #[inline(always)]
        unsafe fn right<const BITS: u32>(a: int32x4_t) -> int32x4_t {
            unsafe { vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(a), vdupq_n_s32(-(BITS as i32)))) }
        }
        #[inline(always)]
        unsafe fn byte<const BYTE: usize>(_: &(), a: int32x4_t) -> float32x4_t {
            unsafe {
                let moved = vshlq_u32(vreinterpretq_u32_s32(a), vdupq_n_s32(-8 * BYTE as i32));
                vcvtq_f32_u32(vandq_u32(moved, vdupq_n_u32(0xFF)))
            }
        }
        #[inline(always)]
        unsafe fn signed_byte<const BYTE: usize>(a: int32x4_t) -> float32x4_t {
            unsafe { vcvtq_f32_s32(vshrq_n_s32::<24>(vshlq_s32(a, vdupq_n_s32(24 - 8 * BYTE as i32)))) }
        }
        #[inline(always)]
        unsafe fn store(a: float32x4_t, out: *mut f32) {
            unsafe { vst1q_f32(out, a) }
        }
        #[inline(always)]
        unsafe fn prefetch<const NEAREST: bool>(at: *const u8) {
            // The function that the compiler has for it is not stable.
            unsafe {
                if NEAREST {
                    asm!("prfm pldl1keep, [{at}]", at = in(reg) at, options(readonly, nostack, preserves_flags));
                } else {
                    asm!("prfm pldl2keep, [{at}]", at = in(reg) at, options(readonly, nostack, preserves_flags));
                }
            }
        }
        #[inline(always)]
        unsafe fn lane_splat(word: *const u8) -> int32x4_t {
            unsafe { vdupq_n_s32(word.cast::<i32>().read_unaligned()) }
        }
        #[inline(always)]
        unsafe fn lane_load(at: *const u8) -> int32x4_t {
            unsafe { vreinterpretq_s32_u8(vld1q_u8(at)) }
        }
        #[inline(always)]
        unsafe fn lane_less(a: int32x4_t, b: int32x4_t) -> int32x4_t {
            unsafe { vsubq_s32(a, b) }
        }
        #[inline(always)]
        unsafe fn lane_load_floats(at: *const f32) -> float32x4_t {
            unsafe { vld1q_f32(at) }
        }
    };
}

impl Isa for Wide {
    const WIDE: bool = true;
    common!();
    /// Of rows 0 and 1, and of rows 2 and 3: each has two sums, which are added only at the end.
    type LaneSums = [int32x4_t; 2];

    #[inline(always)]
    unsafe fn part<const UNIT: usize>(codes: [uint8x16_t; 2], x: *const u8) -> [int32x4_t; 2] {
        unsafe {
            let x = |i: usize| vreinterpretq_s16_u8(vld1q_u8(x.add(16 * i)));
            let sixteen = |sums, codes, i| {
                let codes = widened(codes);
                add_products(add_products(sums, codes[0], x(i)), codes[1], x(i + 1))
            };
            let zero = [vdupq_n_s32(0); 2];
            let first = sixteen(zero, codes[0], 0);
            if UNIT == 32 {
                let [a, b] = sixteen(first, codes[1], 2);
                return [vaddq_s32(a, b); 2];
            }
            [first, sixteen(zero, codes[1], 2)].map(|[a, b]| vaddq_s32(a, b))
        }
    }
    #[inline(always)]
    unsafe fn write(codes: [uint8x16_t; 2], out: *mut u8) {
        for (i, codes) in codes.map(widened).as_flattened().iter().enumerate() {
            unsafe { vst1q_s16(out.add(16 * i).cast(), *codes) }
        }
    }
    #[inline(always)]
    unsafe fn lane_zero() -> [int32x4_t; 2] {
        unsafe { [vdupq_n_s32(0); 2] }
    }
    #[inline(always)]
    unsafe fn lane_dot(sums: [int32x4_t; 2], codes: int32x4_t, x: int32x4_t) -> [int32x4_t; 2] {
        unsafe { add_products(sums, vreinterpretq_s16_s32(codes), vreinterpretq_s16_s32(x)) }
    }
    #[inline(always)]
    unsafe fn lane_shift(a: [int32x4_t; 2]) -> [int32x4_t; 2] {
        a.map(|a| unsafe { vshlq_n_s32::<8>(a) })
    }
    #[inline(always)]
    unsafe fn lane_ints(a: [int32x4_t; 2]) -> int32x4_t {
        unsafe { vpaddq_s32(a[0], a[1]) }
    }
}

impl Isa for Dot {
    const WIDE: bool = false;
    common!();
    type LaneSums = int32x4_t;

    #[inline(always)]
    unsafe fn part<const UNIT: usize>(codes: [uint8x16_t; 2], x: *const u8) -> [int32x4_t; 2] {
        unsafe {
            let dot = |sums, i: usize| add_dots(sums, codes[i % 2], vld1q_u8(x.add(16 * i)));
            let zero = vdupq_n_s32(0);
            if UNIT == 32 {
                let high = dot(dot(zero, 0), 1);
                return [dot(dot(vshlq_n_s32::<8>(high), 2), 3); 2];
            }
            [0, 1].map(|i| dot(vshlq_n_s32::<8>(dot(zero, i)), i + 2))
        }
    }
    #[inline(always)]
    unsafe fn write(codes: [uint8x16_t; 2], out: *mut u8) {
        unsafe {
            vst1q_u8(out, codes[0]);
            vst1q_u8(out.add(16), codes[1]);
        }
    }
    #[inline(always)]
    unsafe fn lane_zero() -> int32x4_t {
        unsafe { vdupq_n_s32(0) }
    }
    #[inline(always)]
    unsafe fn lane_dot(sums: int32x4_t, codes: int32x4_t, x: int32x4_t) -> int32x4_t {
        unsafe { add_dots(sums, vreinterpretq_u8_s32(codes), vreinterpretq_u8_s32(x)) }
    }
    #[inline(always)]
    unsafe fn lane_shift(a: int32x4_t) -> int32x4_t {
        unsafe { vshlq_n_s32::<8>(a) }
    }
    #[inline(always)]
    unsafe fn lane_ints(a: int32x4_t) -> int32x4_t {
        a
    }
}
