//! Plain numbers: `F32`, `F16` and `BF16`, one element a block.

use super::{Block, half};

pub struct F32;
pub struct F16;
pub struct Bf16;

impl Block for F32 {
    const ID: u32 = 0;
    const NAME: &'static str = "F32";
    const ELEMENTS: usize = 1;
    const BYTES: usize = 4;

    #[inline(always)]
    fn dequantise(block: &[u8], out: &mut [f32]) {
        out[0] = f32::from_le_bytes([block[0], block[1], block[2], block[3]]);
    }
}

impl Block for F16 {
    const ID: u32 = 1;
    const NAME: &'static str = "F16";
    const ELEMENTS: usize = 1;
    const BYTES: usize = 2;

    #[inline(always)]
    fn dequantise(block: &[u8], out: &mut [f32]) {
        out[0] = half(block, 0);
    }
}

impl Block for Bf16 {
    const ID: u32 = 30;
    const NAME: &'static str = "BF16";
    const ELEMENTS: usize = 1;
    const BYTES: usize = 2;

    #[inline(always)]
    fn dequantise(block: &[u8], out: &mut [f32]) {
        out[0] = f32::from_bits(u32::from(u16::from_le_bytes([block[0], block[1]])) << 16);
    }
}
