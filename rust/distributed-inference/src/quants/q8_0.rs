//! `Q8_0`: 32 elements in 34 bytes.
//!
//! ```text
//! 0   f16     d
//! 2   32 × i8 elements
//! ```
//! value = q · d

#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
use super::simd;
use super::{Block, half};

pub struct Q8_0;

impl Block for Q8_0 {
    const ID: u32 = 8;
    const NAME: &'static str = "Q8_0";
    const ELEMENTS: usize = 32;
    const BYTES: usize = 34;

    fn dequantise(block: &[u8], out: &mut [f32]) {
        let d = half(block, 0);
        for (value, byte) in out.iter_mut().zip(&block[2..34]) {
            *value = f32::from(*byte as i8) * d;
        }
    }
}

#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
impl simd::Sixteens for Q8_0 {
    #[inline(always)]
    fn sixteens(block: &[u8], mut take: impl FnMut(simd::Sixteen)) {
        let d = half(block, 0);
        take(simd::scaled(simd::load(&block[2..18]), d));
        take(simd::scaled(simd::load(&block[18..34]), d));
    }
}
