//! `Q4_1`: 32 elements in 20 bytes.
//!
//! ```text
//! 0   f16     d
//! 2   f16     m
//! 4   16 × u8 elements 0..16 in the low nibbles, 16..32 in the high ones
//! ```
//! value = d · q + m

#[cfg(any(target_arch = "aarch64", all(target_arch = "wasm32", target_feature = "simd128")))]
use super::simd;
#[cfg(target_arch = "x86_64")]
use super::x86;
use super::{Block, Codes, half, half_bits, nibbles};

pub struct Q4_1;

impl Block for Q4_1 {
    const ID: u32 = 3;
    const NAME: &'static str = "Q4_1";
    const ELEMENTS: usize = 32;
    const BYTES: usize = 20;

    fn dequantise(block: &[u8], out: &mut [f32]) {
        let (d, m) = (half(block, 0), half(block, 2));
        let (low, high) = out.split_at_mut(16);
        for ((byte, low), high) in block[4..20].iter().zip(low).zip(high) {
            *low = d * f32::from(byte & 15) + m;
            *high = d * f32::from(byte >> 4) + m;
        }
    }
}

impl Codes for Q4_1 {
    const MINS: bool = true;
    const LARGEST: u32 = 15;

    #[inline(always)]
    fn halves(block: &[u8]) -> [u16; 2] {
        [half_bits(block, 0), half_bits(block, 2)]
    }

    fn codes(block: &[u8], out: &mut [u8]) {
        nibbles(&block[4..20], out);
    }

    #[cfg(any(target_arch = "aarch64", all(target_arch = "wasm32", target_feature = "simd128")))]
    #[inline(always)]
    unsafe fn pairs(k: &simd::Constants, block: *const u8, mut take: impl FnMut(usize, simd::Pair)) {
        // SAFETY: everything lies within the block.
        unsafe {
            let (low, high) = simd::nibbles(k, simd::sixteen(block.add(4)));
            take(0, [low, high]);
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn pairs(block: *const u8, mut take: impl FnMut(usize, core::arch::x86_64::__m256i)) {
        // SAFETY: everything lies within the block.
        unsafe {
            take(0, x86::nibbles(block.add(4)));
        }
    }
}
