//! `Q5_0`: 32 elements in 22 bytes.
//!
//! ```text
//! 0   f16     d
//! 2   u32     bit i is the fifth bit of element i
//! 6   16 × u8 elements 0..16 in the low nibbles, 16..32 in the high ones
//! ```
//! value = d · (q − 16)

#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
use super::simd;
use super::{Block, half};

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

#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
impl simd::Sixteens for Q5_0 {
    #[inline(always)]
    fn sixteens(block: &[u8], mut take: impl FnMut(simd::Sixteen)) {
        let d = half(block, 0);
        let (low, high) = simd::nibbles(simd::load(&block[6..22]));
        let low = simd::with_bit(low, simd::spread_bits([block[2], block[3]]), 16);
        let high = simd::with_bit(high, simd::spread_bits([block[4], block[5]]), 16);
        take(simd::scaled(simd::minus(low, 16), d));
        take(simd::scaled(simd::minus(high, 16), d));
    }
}
