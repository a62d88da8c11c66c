//! Formats whose four bits name one of sixteen values: `IQ4_NL`, `IQ4_XS` and `MXFP4`.
//!
//! ```text
//! IQ4_NL  32 elements in 18 bytes     0 f16 d · 2 sixteen bytes
//! MXFP4   32 elements in 17 bytes     0 u8 exponent · 1 sixteen bytes
//! IQ4_XS  256 elements in 136 bytes   0 f16 d · 2 u16 high bits of scales · 4 low bits of scales, 4 bytes
//!                                     8 eight times sixteen bytes
//! ```
//! Sixteen bytes are 32 elements: 0..16 in the low nibbles, 16..32 in the high ones.
//!
//! value = d · V\[q\] for IQ4_NL, 2^(exponent − 128) · E\[q\] for MXFP4, (d · (scale − 32)) · V\[q\] for IQ4_XS

use super::{Block, half};

/// The values of IQ4_NL and IQ4_XS: denser around zero, like weights.
pub const V: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// Twice the values of the four-bit floats (OCP Microscaling Formats 1.0: E2M1).
pub const E: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

pub struct Iq4Nl;
pub struct Iq4Xs;
pub struct Mxfp4;

fn look_up(table: &[i8; 16], d: f32, bytes: &[u8], out: &mut [f32]) {
    let (low, high) = out.split_at_mut(16);
    for ((byte, low), high) in bytes.iter().zip(low).zip(high) {
        *low = d * f32::from(table[usize::from(byte & 15)]);
        *high = d * f32::from(table[usize::from(byte >> 4)]);
    }
}

impl Block for Iq4Nl {
    const ID: u32 = 20;
    const NAME: &'static str = "IQ4_NL";
    const ELEMENTS: usize = 32;
    const BYTES: usize = 18;

    fn dequantise(block: &[u8], out: &mut [f32]) {
        look_up(&V, half(block, 0), &block[2..18], out);
    }
}

impl Block for Mxfp4 {
    const ID: u32 = 39;
    const NAME: &'static str = "MXFP4";
    const ELEMENTS: usize = 32;
    const BYTES: usize = 17;

    fn dequantise(block: &[u8], out: &mut [f32]) {
        look_up(&E, half_power(block[0]), &block[1..17], out);
    }
}

impl Block for Iq4Xs {
    const ID: u32 = 23;
    const NAME: &'static str = "IQ4_XS";
    const ELEMENTS: usize = 256;
    const BYTES: usize = 136;

    fn dequantise(block: &[u8], out: &mut [f32]) {
        let d = half(block, 0);
        let high = u16::from_le_bytes([block[2], block[3]]);
        for (sub, values) in out.chunks_exact_mut(32).enumerate() {
            let low = block[4 + sub / 2] >> (4 * (sub % 2)) & 15;
            let scale = i16::from(low) | ((high >> (2 * sub) & 3) << 4) as i16;
            look_up(&V, d * f32::from(scale - 32), &block[8 + 16 * sub..][..16], values);
        }
    }
}

/// 2^(exponent − 128): half of what the exponent says, since the table has twice the values.
#[inline(always)]
pub fn half_power(exponent: u8) -> f32 {
    // The two smallest are subnormal.
    f32::from_bits(if exponent < 2 { 0x0020_0000 << exponent } else { u32::from(exponent - 1) << 23 })
}
