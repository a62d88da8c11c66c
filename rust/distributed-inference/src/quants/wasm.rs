//! The few SIMD128 steps that the formats share: 32 codes are two vectors.

pub use crate::kernels::coded::Constants;
use core::arch::wasm32::*;

/// 32 codes.
pub type Pair = [v128; 2];

/// The low and the high nibbles of sixteen bytes.
#[inline(always)]
pub fn nibbles(k: &Constants, bytes: v128) -> (v128, v128) {
    (v128_and(bytes, k.nibbles), v128_and(u16x8_shr(bytes, 4), k.nibbles))
}

/// Bits 0 and 1, 2 and 3, 4 and 5, 6 and 7 of sixteen bytes, each pair at bits 4 and 5.
#[inline(always)]
pub fn pairs_of_bits(k: &Constants, bytes: v128) -> [v128; 4] {
    // Shifted as 16-bit numbers, for which there are instructions; what crosses into the next byte is masked.
    [u16x8_shl(bytes, 4), u16x8_shl(bytes, 2), bytes, u16x8_shr(bytes, 2)]
        .map(|shifted| v128_and(shifted, k.pairs))
}

/// The bits of both.
#[inline(always)]
pub fn joined(low: v128, high: v128) -> v128 {
    v128_or(low, high)
}

/// Sixteen bytes at an address that has them.
///
/// # Safety
/// There are sixteen bytes at `at`.
#[inline(always)]
pub unsafe fn sixteen(at: *const u8) -> v128 {
    // SAFETY: as said; v128 loads need no alignment.
    unsafe { v128_load(at.cast()) }
}

/// Two bytes of bits, which are sixteen fifth bits, as sixteen bytes of 16 or 0.
///
/// # Safety
/// There are two bytes at `at`.
#[inline(always)]
pub unsafe fn fifths(at: *const u8) -> v128 {
    // SAFETY: as said.
    let [low, high] = unsafe { at.cast::<[u8; 2]>().read_unaligned() };
    u64x2(FIFTHS[usize::from(low)], FIFTHS[usize::from(high)])
}

/// The bits of a byte as bytes of 16 or 0.
static FIFTHS: [u64; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut bit = 0;
        while bit < 8 {
            table[byte] |= ((byte >> bit & 1) as u64) << (8 * bit + 4);
            bit += 1;
        }
        byte += 1;
    }
    table
};

/// Signed bytes as unsigned ones that are 128 more.
#[inline(always)]
pub fn flipped(bytes: v128) -> v128 {
    v128_xor(bytes, u8x16_splat(0x80))
}

/// Bit `bit` of each byte, as 16 or 0.
#[inline(always)]
pub fn bit_as_fifth(k: &Constants, bytes: v128, bit: usize) -> v128 {
    let moved = if bit < 4 { u16x8_shl(bytes, 4 - bit as u32) } else { u16x8_shr(bytes, bit as u32 - 4) };
    v128_and(moved, k.fifths)
}
