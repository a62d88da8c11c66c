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

#[cfg(any(target_arch = "aarch64", all(target_arch = "wasm32", target_feature = "simd128")))]
use super::simd;
#[cfg(target_arch = "x86_64")]
use super::x86;
use super::{Block, Codes, Subs, half, half_bits};

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

/// Where a sub-block's low and high bits begin, and by how much each is shifted.
#[inline(always)]
fn places(sub: usize) -> (usize, usize, u32, u32) {
    let (half, group, part) = (sub / 8, sub % 8 / 2, sub % 2);
    let low = 64 * half + 32 * (group % 2) + 16 * part;
    let high = 128 + 32 * half + 16 * part;
    (low, high, 4 * (group / 2) as u32, 2 * group as u32)
}

impl Codes for Q6K {
    const UNIT: usize = 16;
    const OFFSET: i32 = 32;
    const LARGEST: u32 = 63;
    const SUBS: Subs = Subs::Scales { at: 192, d: 208 };

    #[inline(always)]
    fn halves(block: &[u8]) -> [u16; 2] {
        [half_bits(block, 208), 0]
    }

    #[inline(always)]
    fn subs(block: &[u8]) -> [u8; 16] {
        block[192..208].try_into().expect("sixteen bytes")
    }

    fn codes(block: &[u8], out: &mut [u8]) {
        for (sub, out) in out.chunks_exact_mut(16).enumerate() {
            let (low, high, nibble, pair) = places(sub);
            for (i, code) in out.iter_mut().enumerate() {
                *code = (block[low + i] >> nibble & 15) | (block[high + i] >> pair & 3) << 4;
            }
        }
    }

    #[cfg(any(target_arch = "aarch64", all(target_arch = "wasm32", target_feature = "simd128")))]
    #[inline(always)]
    unsafe fn pairs(k: &simd::Constants, block: *const u8, mut take: impl FnMut(usize, simd::Pair)) {
        // SAFETY: everything lies within the block.
        unsafe {
            for at in 0..2 {
                let low = |part: usize| simd::nibbles(k, simd::sixteen(block.add(64 * at + 16 * part)));
                let high =
                    |part: usize| simd::pairs_of_bits(k, simd::sixteen(block.add(128 + 32 * at + 16 * part)));
                let (lows, highs) = ([low(0), low(1), low(2), low(3)], [high(0), high(1)]);
                // Written out, so that all stays in registers.
                let joined = |one, group: usize, other| {
                    [simd::joined(one, highs[0][group]), simd::joined(other, highs[1][group])]
                };
                take(4 * at, joined(lows[0].0, 0, lows[1].0));
                take(4 * at + 1, joined(lows[2].0, 1, lows[3].0));
                take(4 * at + 2, joined(lows[0].1, 2, lows[1].1));
                take(4 * at + 3, joined(lows[2].1, 3, lows[3].1));
            }
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn pairs(block: *const u8, mut take: impl FnMut(usize, core::arch::x86_64::__m256i)) {
        // SAFETY: everything lies within the block.
        unsafe {
            use core::arch::x86_64::{_mm256_and_si256, _mm256_or_si256, _mm256_set1_epi8};
            use core::arch::x86_64::{_mm256_slli_epi16, _mm256_srli_epi16};
            for at in 0..2 {
                let (first, second) = (x86::load(block.add(64 * at)), x86::load(block.add(64 * at + 32)));
                let high = x86::load(block.add(128 + 32 * at));
                let pair = |shifted| _mm256_and_si256(shifted, _mm256_set1_epi8(0x30));
                take(4 * at, _mm256_or_si256(x86::low::<0>(first), pair(_mm256_slli_epi16::<4>(high))));
                take(4 * at + 1, _mm256_or_si256(x86::low::<0>(second), pair(_mm256_slli_epi16::<2>(high))));
                take(4 * at + 2, _mm256_or_si256(x86::low::<4>(first), pair(high)));
                take(4 * at + 3, _mm256_or_si256(x86::low::<4>(second), pair(_mm256_srli_epi16::<2>(high))));
            }
        }
    }
}
