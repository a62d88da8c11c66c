//! `Q4_1`: 32 elements in 20 bytes.
//!
//! ```text
//! 0   f16     d
//! 2   f16     m
//! 4   16 × u8 elements 0..16 in the low nibbles, 16..32 in the high ones
//! ```
//! value = d · q + m

#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
use super::simd;
use super::{Block, half};

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

#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
impl simd::Sixteens for Q4_1 {
    #[inline(always)]
    fn sixteens(block: &[u8], mut take: impl FnMut(simd::Sixteen)) {
        let (d, m) = (half(block, 0), half(block, 2));
        let (low, high) = simd::nibbles(simd::load(&block[4..20]));
        take(simd::scaled_plus(low, d, m));
        take(simd::scaled_plus(high, d, m));
    }
}
