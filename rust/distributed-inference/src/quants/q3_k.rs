//! `Q3_K`: 256 elements in 110 bytes, in sixteen sub-blocks of 16.
//!
//! ```text
//! 0   32 × u8  bit s of byte i, inverted, takes 4 from element i of the s-th 32
//! 32  64 × u8  low two bits an element
//! 96  12 × u8  six-bit scales of the sub-blocks (see `scales`)
//! 108 f16      d
//! ```
//! Each half of 128 elements has 32 bytes of low bits; bits 2g and 2g + 1 of byte i belong to element i of the
//! g-th 32.
//!
//! value = (d · (scale − 32)) · q

use super::{Block, half};

pub struct Q3K;

impl Block for Q3K {
    const ID: u32 = 11;
    const NAME: &'static str = "Q3_K";
    const ELEMENTS: usize = 256;
    const BYTES: usize = 110;

    fn dequantise(block: &[u8], out: &mut [f32]) {
        let d = half(block, 108);
        let scales = scales(&block[96..108]);
        for (sub, values) in out.chunks_exact_mut(16).enumerate() {
            let scaled = d * (f32::from(scales[sub]) - 32.0);
            let (high, low) = (sub % 2 * 16, 32 + sub / 8 * 32 + sub % 2 * 16);
            let (bit, shift) = (sub / 2, sub % 8 / 2 * 2);
            for (i, value) in values.iter_mut().enumerate() {
                let q = (block[low + i] >> shift & 3) | (block[high + i] >> bit & 1) << 2;
                *value = scaled * (f32::from(q) - 4.0);
            }
        }
    }
}

/// The sixteen scales in 12 bytes. Byte i < 8 has the low four bits of scales i and i + 8; bits 2g and 2g + 1 of
/// byte 8 + i are the upper two of scale 4g + i.
#[inline(always)]
fn scales(packed: &[u8]) -> [u8; 16] {
    let four = |at: usize| u32::from_le_bytes([packed[at], packed[at + 1], packed[at + 2], packed[at + 3]]);
    let (low_four, high_two) = (0x0F0F_0F0F, 0x0303_0303);
    let (first, second, high) = (four(0), four(4), four(8));
    let words = [
        first & low_four | (high & high_two) << 4,
        second & low_four | (high >> 2 & high_two) << 4,
        first >> 4 & low_four | (high >> 4 & high_two) << 4,
        second >> 4 & low_four | (high >> 6 & high_two) << 4,
    ];
    bytemuck::cast(words.map(u32::to_le))
}
