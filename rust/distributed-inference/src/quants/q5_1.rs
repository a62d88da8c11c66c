//! `Q5_1`: 32 elements in 24 bytes.
//!
//! ```text
//! 0   f16     d
//! 2   f16     m
//! 4   u32     bit i is the fifth bit of element i
//! 8   16 × u8 elements 0..16 in the low nibbles, 16..32 in the high ones
//! ```
//! value = d · q + m

use super::{Block, half};

pub struct Q5_1;

impl Block for Q5_1 {
    const ID: u32 = 7;
    const NAME: &'static str = "Q5_1";
    const ELEMENTS: usize = 32;
    const BYTES: usize = 24;

    fn dequantise(block: &[u8], out: &mut [f32]) {
        let (d, m) = (half(block, 0), half(block, 2));
        let fifth = u32::from_le_bytes([block[4], block[5], block[6], block[7]]);
        for (i, byte) in block[8..24].iter().enumerate() {
            let low = u32::from(byte & 15) | (fifth >> i & 1) << 4;
            let high = u32::from(byte >> 4) | (fifth >> (i + 16) & 1) << 4;
            out[i] = d * low as f32 + m;
            out[i + 16] = d * high as f32 + m;
        }
    }
}
