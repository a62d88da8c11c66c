//! `Q5_0`: 32 elements in 22 bytes.
//!
//! ```text
//! 0   f16     d
//! 2   u32     bit i is the fifth bit of element i
//! 6   16 × u8 elements 0..16 in the low nibbles, 16..32 in the high ones
//! ```
//! value = d · (q − 16)

#[cfg(any(target_arch = "aarch64", all(target_arch = "wasm32", target_feature = "simd128")))]
use super::simd;
#[cfg(target_arch = "x86_64")]
use super::x86;
use super::{Block, Codes, five_bits, half, half_bits};

pub struct Q5_0;

impl Block for Q5_0 {
    const ID: u32 = 6;
    const NAME: &'static str = "Q5_0";
    const ELEMENTS: usize = 32;
    const BYTES: usize = 22;

    fn dequantise(block: &[u8], out: &mut [f32]) {
        let d = half(block, 0);
        let fifth = u32::from_le_bytes([block[2], block[3], block[4], block[5]]);
        for (i, byte) in block[6..22].iter().enumerate() {
            let low = u32::from(byte & 15) | (fifth >> i & 1) << 4;
            let high = u32::from(byte >> 4) | (fifth >> (i + 16) & 1) << 4;
            out[i] = d * (low as f32 - 16.0);
            out[i + 16] = d * (high as f32 - 16.0);
        }
    }
}

impl Codes for Q5_0 {
    const OFFSET: i32 = 16;
    const LARGEST: u32 = 31;

    #[inline(always)]
    fn halves(block: &[u8]) -> [u16; 2] {
        [half_bits(block, 0), 0]
    }

    fn codes(block: &[u8], out: &mut [u8]) {
        five_bits(&block[2..6], &block[6..22], out);
    }

    #[cfg(any(target_arch = "aarch64", all(target_arch = "wasm32", target_feature = "simd128")))]
    #[inline(always)]
    unsafe fn pairs(k: &simd::Constants, block: *const u8, mut take: impl FnMut(usize, simd::Pair)) {
        // SAFETY: everything lies within the block.
        unsafe {
            let (low, high) = simd::nibbles(k, simd::sixteen(block.add(6)));
            let (first, second) = (simd::fifths(block.add(2)), simd::fifths(block.add(4)));
            take(0, [simd::joined(low, first), simd::joined(high, second)]);
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn pairs(block: *const u8, mut take: impl FnMut(usize, core::arch::x86_64::__m256i)) {
        // SAFETY: everything lies within the block.
        unsafe {
            let (low, fifth) = (x86::nibbles(block.add(6)), x86::fifths(block.add(2)));
            take(0, core::arch::x86_64::_mm256_or_si256(low, fifth));
        }
    }
}
