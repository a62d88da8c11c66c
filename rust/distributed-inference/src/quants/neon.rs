//! The few NEON steps that the formats share: 32 codes are two vectors.

pub use crate::kernels::coded::Constants;
use core::arch::aarch64::*;

/// 32 codes.
pub type Pair = [uint8x16_t; 2];

/// The low and the high nibbles of sixteen bytes.
#[inline(always)]
pub fn nibbles(_: &Constants, bytes: uint8x16_t) -> (uint8x16_t, uint8x16_t) {
    // SAFETY: every processor of this kind has NEON.
    unsafe { (vandq_u8(bytes, vdupq_n_u8(15)), vshrq_n_u8::<4>(bytes)) }
}

/// Bits 0 and 1, 2 and 3, 4 and 5, 6 and 7 of sixteen bytes, each pair at bits 4 and 5.
#[inline(always)]
pub fn pairs_of_bits(_: &Constants, bytes: uint8x16_t) -> [uint8x16_t; 4] {
    // SAFETY: every processor of this kind has NEON.
    unsafe {
        [vshlq_n_u8::<4>(bytes), vshlq_n_u8::<2>(bytes), bytes, vshrq_n_u8::<2>(bytes)]
            .map(|shifted| vandq_u8(shifted, vdupq_n_u8(0x30)))
    }
}

/// The bits of both.
#[inline(always)]
pub fn joined(low: uint8x16_t, high: uint8x16_t) -> uint8x16_t {
    // SAFETY: every processor of this kind has NEON.
    unsafe { vorrq_u8(low, high) }
}

/// Sixteen bytes at an address that has them.
///
/// # Safety
/// There are sixteen bytes at `at`.
#[inline(always)]
pub unsafe fn sixteen(at: *const u8) -> uint8x16_t {
    // SAFETY: as said; these loads need no alignment.
    unsafe { vld1q_u8(at) }
}

/// Two bytes of bits, which are sixteen fifth bits, as sixteen bytes of 16 or 0.
///
/// # Safety
/// There are two bytes at `at`.
#[inline(always)]
pub unsafe fn fifths(at: *const u8) -> uint8x16_t {
    // SAFETY: as said.
    unsafe {
        let bits = vcombine_u8(vdup_n_u8(at.read()), vdup_n_u8(at.add(1).read()));
        let own = vreinterpretq_u8_u64(vdupq_n_u64(0x8040_2010_0804_0201));
        vandq_u8(vtstq_u8(bits, own), vdupq_n_u8(16))
    }
}

/// Signed bytes as unsigned ones that are 128 more.
#[inline(always)]
pub fn flipped(bytes: uint8x16_t) -> uint8x16_t {
    // SAFETY: every processor of this kind has NEON.
    unsafe { veorq_u8(bytes, vdupq_n_u8(0x80)) }
}

/// Bit `bit` of each byte, as 16 or 0.
#[inline(always)]
pub fn bit_as_fifth(_: &Constants, bytes: uint8x16_t, bit: usize) -> uint8x16_t {
    // SAFETY: every processor of this kind has NEON.
    unsafe { vandq_u8(vshlq_u8(bytes, vdupq_n_s8(4 - bit as i8)), vdupq_n_u8(16)) }
}
