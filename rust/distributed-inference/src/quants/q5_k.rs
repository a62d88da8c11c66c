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

#[cfg(any(target_arch = "aarch64", all(target_arch = "wasm32", target_feature = "simd128")))]
use super::simd;
#[cfg(target_arch = "x86_64")]
use super::x86;
use super::{Block, Codes, Subs, half, half_bits, scales_and_mins};

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

impl Codes for Q5K {
    const MINS: bool = true;
    const LARGEST: u32 = 31;
    const SUBS: Subs = Subs::ScalesAndMins;

    #[inline(always)]
    fn halves(block: &[u8]) -> [u16; 2] {
        [half_bits(block, 0), half_bits(block, 2)]
    }

    #[inline(always)]
    fn subs(block: &[u8]) -> [u8; 16] {
        scales_and_mins(&block[4..16])
    }

    fn codes(block: &[u8], out: &mut [u8]) {
        for (sub, out) in out.chunks_exact_mut(32).enumerate() {
            let bytes = &block[48 + sub / 2 * 32..][..32];
            for (i, (code, byte)) in out.iter_mut().zip(bytes).enumerate() {
                *code = byte >> (4 * (sub % 2)) & 15 | (block[16 + i] >> sub & 1) << 4;
            }
        }
    }

    #[cfg(any(target_arch = "aarch64", all(target_arch = "wasm32", target_feature = "simd128")))]
    #[inline(always)]
    unsafe fn pairs(k: &simd::Constants, block: *const u8, mut take: impl FnMut(usize, simd::Pair)) {
        // SAFETY: everything lies within the block.
        unsafe {
            let fifths = [simd::sixteen(block.add(16)), simd::sixteen(block.add(32))];
            for i in 0..4 {
                let first = simd::nibbles(k, simd::sixteen(block.add(48 + 32 * i)));
                let second = simd::nibbles(k, simd::sixteen(block.add(64 + 32 * i)));
                let bit = |part: usize, sub: usize| simd::bit_as_fifth(k, fifths[part], sub);
                take(2 * i, [simd::joined(first.0, bit(0, 2 * i)), simd::joined(second.0, bit(1, 2 * i))]);
                take(
                    2 * i + 1,
                    [simd::joined(first.1, bit(0, 2 * i + 1)), simd::joined(second.1, bit(1, 2 * i + 1))],
                );
            }
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn pairs(block: *const u8, mut take: impl FnMut(usize, core::arch::x86_64::__m256i)) {
        // SAFETY: everything lies within the block.
        unsafe {
            let fifths = x86::load(block.add(16));
            for i in 0..4 {
                let bytes = x86::load(block.add(48 + 32 * i));
                let with =
                    |low, sub| core::arch::x86_64::_mm256_or_si256(low, x86::bit_as_fifth(fifths, sub));
                take(2 * i, with(x86::low::<0>(bytes), 2 * i));
                take(2 * i + 1, with(x86::low::<4>(bytes), 2 * i + 1));
            }
        }
    }
}
