//! `Q2_K`: 256 elements in 84 bytes, in sixteen sub-blocks of 16.
//!
//! ```text
//! 0   16 × u8  scale of a sub-block in the low nibble, its minimum in the high one
//! 16  64 × u8  two bits an element
//! 80  f16      d
//! 82  f16      dmin
//! ```
//! Each half of 128 elements has 32 bytes; bits 2g and 2g + 1 of byte i belong to element i of the g-th 32.
//!
//! value = (d · scale) · q − (dmin · min)

use super::{Block, half};

pub struct Q2K;

impl Block for Q2K {
    const ID: u32 = 10;
    const NAME: &'static str = "Q2_K";
    const ELEMENTS: usize = 256;
    const BYTES: usize = 84;

    fn dequantise(block: &[u8], out: &mut [f32]) {
        let (d, dmin) = (half(block, 80), half(block, 82));
        for (sub, values) in out.chunks_exact_mut(16).enumerate() {
            let (scaled, min) = (d * f32::from(block[sub] & 15), dmin * f32::from(block[sub] >> 4));
            let (at, shift) = (16 + sub / 8 * 32 + sub % 2 * 16, sub % 8 / 2 * 2);
            for (value, byte) in values.iter_mut().zip(&block[at..at + 16]) {
                *value = scaled * f32::from(byte >> shift & 3) - min;
            }
        }
    }
}
