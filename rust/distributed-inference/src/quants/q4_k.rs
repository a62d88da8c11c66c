//! `Q4_K`: 256 elements in 144 bytes, in eight sub-blocks of 32.
//!
//! ```text
//! 0   f16      d
//! 2   f16      dmin
//! 4   12 × u8  six-bit scales and minimums of the sub-blocks (see `scales_and_mins`)
//! 16  128 × u8 four times 32 bytes: sub-block 2i in the low nibbles, 2i + 1 in the high ones
//! ```
//! value = (d · scale) · q − (dmin · min)

#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
use super::simd;
use super::{Block, half, scales_and_mins};

pub struct Q4K;

impl Block for Q4K {
    const ID: u32 = 12;
    const NAME: &'static str = "Q4_K";
    const ELEMENTS: usize = 256;
    const BYTES: usize = 144;

    fn dequantise(block: &[u8], out: &mut [f32]) {
        let (d, dmin) = (half(block, 0), half(block, 2));
        let packed = scales_and_mins(&block[4..16]);
        for (sub, values) in out.chunks_exact_mut(32).enumerate() {
            let (sub_d, sub_m) = (d * f32::from(packed[sub]), dmin * f32::from(packed[sub + 8]));
            let bytes = &block[16 + sub / 2 * 32..][..32];
            let shift = 4 * (sub % 2);
            for (value, byte) in values.iter_mut().zip(bytes) {
                *value = sub_d * f32::from(byte >> shift & 15) - sub_m;
            }
        }
    }
}

#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
impl simd::Sixteens for Q4K {
    #[inline(always)]
    fn sixteens(block: &[u8], mut take: impl FnMut(simd::Sixteen)) {
        let (d, dmin) = (half(block, 0), half(block, 2));
        let packed = simd::load(&scales_and_mins(&block[4..16]));
        let subs = simd::eight_and_eight(packed, d, dmin);
        for (pair, bytes) in block[16..144].chunks_exact(32).enumerate() {
            let first = simd::nibbles(simd::load(&bytes[..16]));
            let second = simd::nibbles(simd::load(&bytes[16..]));
            let (d, m) = (subs[2 * pair], subs[2 * pair + 8]);
            take(simd::scaled_minus(first.0, d, m));
            take(simd::scaled_minus(second.0, d, m));
            let (d, m) = (subs[2 * pair + 1], subs[2 * pair + 9]);
            take(simd::scaled_minus(first.1, d, m));
            take(simd::scaled_minus(second.1, d, m));
        }
    }
}
