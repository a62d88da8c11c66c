//! `Q4_0`: 32 elements in 18 bytes.
//!
//! ```text
//! 0   f16     d
//! 2   16 × u8 elements 0..16 in the low nibbles, 16..32 in the high ones
//! ```
//! value = d · (q − 8)

#[cfg(any(target_arch = "aarch64", all(target_arch = "wasm32", target_feature = "simd128")))]
use super::simd;
#[cfg(target_arch = "x86_64")]
use super::x86;
use super::{Block, Codes, half, half_bits, nibbles};

pub struct Q4_0;

impl Block for Q4_0 {
    const ID: u32 = 2;
    const NAME: &'static str = "Q4_0";
    const ELEMENTS: usize = 32;
    const BYTES: usize = 18;

    fn dequantise(block: &[u8], out: &mut [f32]) {
        let d = half(block, 0);
        let (low, high) = out.split_at_mut(16);
        for ((byte, low), high) in block[2..18].iter().zip(low).zip(high) {
            *low = d * (f32::from(byte & 15) - 8.0);
            *high = d * (f32::from(byte >> 4) - 8.0);
        }
    }
}

impl Codes for Q4_0 {
    const OFFSET: i32 = 8;
    const LARGEST: u32 = 15;

    #[inline(always)]
    fn halves(block: &[u8]) -> [u16; 2] {
        [half_bits(block, 0), 0]
    }

    fn codes(block: &[u8], out: &mut [u8]) {
        nibbles(&block[2..18], out);
    }

    #[cfg(any(target_arch = "aarch64", all(target_arch = "wasm32", target_feature = "simd128")))]
    #[inline(always)]
    unsafe fn pairs(k: &simd::Constants, block: *const u8, mut take: impl FnMut(usize, simd::Pair)) {
        // SAFETY: everything lies within the block.
        unsafe {
            let (low, high) = simd::nibbles(k, simd::sixteen(block.add(2)));
            take(0, [low, high]);
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn pairs(block: *const u8, mut take: impl FnMut(usize, core::arch::x86_64::__m256i)) {
        // SAFETY: everything lies within the block.
        unsafe {
            take(0, x86::nibbles(block.add(2)));
        }
    }
}
