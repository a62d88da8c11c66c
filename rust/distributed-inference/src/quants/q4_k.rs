//! `Q4_K`: 256 elements in 144 bytes, in eight sub-blocks of 32.
//!
//! ```text
//! 0   f16      d
//! 2   f16      dmin
//! 4   12 × u8  six-bit scales and minimums of the sub-blocks (see `scale_and_min`)
//! 16  128 × u8 four times 32 bytes: sub-block 2i in the low nibbles, 2i + 1 in the high ones
//! ```
//! value = (d · scale) · q − (dmin · min)

#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
use super::simd;
use super::{Block, half, scale_and_min};

pub struct Q4K;

impl Block for Q4K {
    const ID: u32 = 12;
    const NAME: &'static str = "Q4_K";
    const ELEMENTS: usize = 256;
    const BYTES: usize = 144;

    fn dequantise(block: &[u8], out: &mut [f32]) {
        let (d, dmin) = (half(block, 0), half(block, 2));
        for (pair, (bytes, values)) in block[16..].chunks_exact(32).zip(out.chunks_exact_mut(64)).enumerate()
        {
            let (low_scale, low_min) = scale_and_min(&block[4..16], 2 * pair);
            let (high_scale, high_min) = scale_and_min(&block[4..16], 2 * pair + 1);
            let (low_d, low_m) = (d * low_scale, dmin * low_min);
            let (high_d, high_m) = (d * high_scale, dmin * high_min);
            let (low, high) = values.split_at_mut(32);
            for ((byte, low), high) in bytes.iter().zip(low).zip(high) {
                *low = low_d * f32::from(byte & 15) - low_m;
                *high = high_d * f32::from(byte >> 4) - high_m;
            }
        }
    }

    #[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
    fn dequantise_simd(block: &[u8], out: &mut [f32]) {
        let (d, dmin) = (half(block, 0), half(block, 2));
        for (pair, (bytes, values)) in block[16..].chunks_exact(32).zip(out.chunks_exact_mut(64)).enumerate()
        {
            let (low_scale, low_min) = scale_and_min(&block[4..16], 2 * pair);
            let (high_scale, high_min) = scale_and_min(&block[4..16], 2 * pair + 1);
            let (low_d, low_m) = (d * low_scale, dmin * low_min);
            let (high_d, high_m) = (d * high_scale, dmin * high_min);
            for (at, part) in bytes.chunks_exact(16).enumerate() {
                let (low, high) = simd::nibbles(simd::load(part));
                simd::store_scaled_minus(low, low_d, low_m, &mut values[16 * at..16 * at + 16]);
                simd::store_scaled_minus(high, high_d, high_m, &mut values[16 * at + 32..16 * at + 48]);
            }
        }
    }
}
