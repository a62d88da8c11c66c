//! `Q5_K`: 256 elements in 176 bytes, in eight sub-blocks of 32.
//!
//! ```text
//! 0   f16      d
//! 2   f16      dmin
//! 4   12 × u8  six-bit scales and minimums of the sub-blocks (see `scales_and_mins`)
//! 16  32 × u8  bit s of byte i is the fifth bit of element i of sub-block s
//! 48  128 × u8 four times 32 bytes: sub-block 2i in the low nibbles, 2i + 1 in the high ones
//! ```
//! value = (d · scale) · q − (dmin · min)

use super::{Block, half, scales_and_mins};

pub struct Q5K;

impl Block for Q5K {
    const ID: u32 = 13;
    const NAME: &'static str = "Q5_K";
    const ELEMENTS: usize = 256;
    const BYTES: usize = 176;

    fn dequantise(block: &[u8], out: &mut [f32]) {
        let (d, dmin) = (half(block, 0), half(block, 2));
        let packed = scales_and_mins(&block[4..16]);
        let fifth = &block[16..48];
        for (sub, values) in out.chunks_exact_mut(32).enumerate() {
            let (sub_d, sub_m) = (d * f32::from(packed[sub]), dmin * f32::from(packed[sub + 8]));
            let bytes = &block[48 + sub / 2 * 32..][..32];
            let shift = 4 * (sub % 2);
            for ((value, byte), high) in values.iter_mut().zip(bytes).zip(fifth) {
                let q = (byte >> shift & 15) | (high >> sub & 1) << 4;
                *value = sub_d * f32::from(q) - sub_m;
            }
        }
    }
}
