//! `Q4_0`: 32 elements in 18 bytes.
//!
//! ```text
//! 0   f16     d
//! 2   16 × u8 elements 0..16 in the low nibbles, 16..32 in the high ones
//! ```
//! value = d · (q − 8)

use super::{Block, half};

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
