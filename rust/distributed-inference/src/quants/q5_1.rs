//! `Q5_1`: 32 elements in 24 bytes.
//!
//! ```text
//! 0   f16     d
//! 2   f16     m
//! 4   u32     bit i is the fifth bit of element i
//! 8   16 × u8 elements 0..16 in the low nibbles, 16..32 in the high ones
//! ```
//! value = d · q + m

#[cfg(any(target_arch = "aarch64", all(target_arch = "wasm32", target_feature = "simd128")))]
use super::simd;
#[cfg(target_arch = "x86_64")]
use super::x86;
use super::{Block, Codes, five_bits, half, half_bits};

pub struct Q5_1;

impl Block for Q5_1 {
    const ID: u32 = 7;
    const NAME: &'static str = "Q5_1";
    const ELEMENTS: usize = 32;
    const BYTES: usize = 24;

    fn dequantise(block: &[u8], out: &mut [f32]) {
        let (d, m) = (half(block, 0), half(block, 2));
        let fifth = u32::from_le_bytes([block[4], block[5], block[6], block[7]]);
        for (i, byte) in block[8..24].iter().enumerate() {
            let low = u32::from(byte & 15) | (fifth >> i & 1) << 4;
            let high = u32::from(byte >> 4) | (fifth >> (i + 16) & 1) << 4;
            out[i] = d * low as f32 + m;
            out[i + 16] = d * high as f32 + m;
        }
    }
}

impl Codes for Q5_1 {
    const MINS: bool = true;
    const LARGEST: u32 = 31;

    #[inline(always)]
    fn halves(block: &[u8]) -> [u16; 2] {
        [half_bits(block, 0), half_bits(block, 2)]
    }

    fn codes(block: &[u8], out: &mut [u8]) {
        five_bits(&block[4..8], &block[8..24], out);
    }

    #[cfg(any(target_arch = "aarch64", all(target_arch = "wasm32", target_feature = "simd128")))]
    #[inline(always)]
    unsafe fn pairs(k: &simd::Constants, block: *const u8, mut take: impl FnMut(usize, simd::Pair)) {
        // SAFETY: everything lies within the block.
        unsafe {
            let (low, high) = simd::nibbles(k, simd::sixteen(block.add(8)));
            let (first, second) = (simd::fifths(block.add(4)), simd::fifths(block.add(6)));
            take(0, [simd::joined(low, first), simd::joined(high, second)]);
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn pairs(block: *const u8, mut take: impl FnMut(usize, core::arch::x86_64::__m256i)) {
        // SAFETY: everything lies within the block.
        unsafe {
            let (low, fifth) = (x86::nibbles(block.add(8)), x86::fifths(block.add(4)));
            take(0, core::arch::x86_64::_mm256_or_si256(low, fifth));
        }
    }
}
