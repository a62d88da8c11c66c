//! `Q6_K`: 256 elements in 210 bytes, in sixteen sub-blocks of 16.
//!
//! ```text
//! 0   128 × u8 low four bits
//! 128 64 × u8  high two bits
//! 192 16 × i8  scales of the sub-blocks
//! 208 f16      d
//! ```
//! Each half of 128 elements has 64 low and 32 high bytes. Its elements 0..32 and 32..64 take the low
//! nibbles of bytes 0..32 and 32..64, elements 64..96 and 96..128 the high ones; bits 2g and 2g + 1 of
//! high byte i belong to element i of the g-th 32.
//!
//! value = (d · scale) · (q − 32)

#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
use super::simd;
use super::{Block, half};

pub struct Q6K;

impl Block for Q6K {
    const ID: u32 = 14;
    const NAME: &'static str = "Q6_K";
    const ELEMENTS: usize = 256;
    const BYTES: usize = 210;

    fn dequantise(block: &[u8], out: &mut [f32]) {
        let d = half(block, 208);
        for (sub, values) in out.chunks_exact_mut(16).enumerate() {
            let scaled = d * f32::from(block[192 + sub] as i8);
            let (low, high, nibble, pair) = places(sub);
            for (i, value) in values.iter_mut().enumerate() {
                let q = (block[low + i] >> nibble & 15) | (block[high + i] >> pair & 3) << 4;
                *value = scaled * (f32::from(q) - 32.0);
            }
        }
    }
}

#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
impl simd::Sixteens for Q6K {
    #[inline(always)]
    fn sixteens(block: &[u8], mut take: impl FnMut(simd::Sixteen)) {
        let d = half(block, 208);
        for at in 0..2 {
            let low = |part: usize| simd::nibbles(simd::load(&block[64 * at + 16 * part..][..16]));
            let high =
                |part: usize| simd::pairs_of_bits(simd::load(&block[128 + 32 * at + 16 * part..][..16]));
            let (lows, highs) = ([low(0), low(1), low(2), low(3)], [high(0), high(1)]);
            for sub in 0..8 {
                let (group, part) = (sub / 2, sub % 2);
                let nibbles = lows[2 * (group % 2) + part];
                let nibble = if group < 2 { nibbles.0 } else { nibbles.1 };
                let q = simd::minus(simd::joined(nibble, highs[part][group]), 32);
                take(simd::scaled(q, d * f32::from(block[192 + 8 * at + sub] as i8)));
            }
        }
    }
}

/// Where a sub-block's low and high bits begin, and by how much each is shifted.
#[inline(always)]
fn places(sub: usize) -> (usize, usize, u32, u32) {
    let (half, group, part) = (sub / 8, sub % 8 / 2, sub % 2);
    let low = 64 * half + 32 * (group % 2) + 16 * part;
    let high = 128 + 32 * half + 16 * part;
    (low, high, 4 * (group / 2) as u32, 2 * group as u32)
}
