//! `Q8_0`: 32 elements in 34 bytes.
//!
//! ```text
//! 0   f16     d
//! 2   32 × i8 elements
//! ```
//! value = q · d

#[cfg(any(target_arch = "aarch64", all(target_arch = "wasm32", target_feature = "simd128")))]
use super::simd;
#[cfg(target_arch = "x86_64")]
use super::x86;
use super::{Block, Codes, half, half_bits};

pub struct Q8_0;

impl Block for Q8_0 {
    const ID: u32 = 8;
    const NAME: &'static str = "Q8_0";
    const ELEMENTS: usize = 32;
    const BYTES: usize = 34;

    fn dequantise(block: &[u8], out: &mut [f32]) {
        let d = half(block, 0);
        for (value, byte) in out.iter_mut().zip(&block[2..34]) {
            *value = f32::from(*byte as i8) * d;
        }
    }
}

impl Codes for Q8_0 {
    const OFFSET: i32 = 128;
    const LARGEST: u32 = 255;

    #[inline(always)]
    fn halves(block: &[u8]) -> [u16; 2] {
        [half_bits(block, 0), 0]
    }

    fn codes(block: &[u8], out: &mut [u8]) {
        for (code, byte) in out.iter_mut().zip(&block[2..34]) {
            *code = byte ^ 0x80;
        }
    }

    #[cfg(any(target_arch = "aarch64", all(target_arch = "wasm32", target_feature = "simd128")))]
    #[inline(always)]
    unsafe fn pairs(_: &simd::Constants, block: *const u8, mut take: impl FnMut(usize, simd::Pair)) {
        // SAFETY: everything lies within the block.
        unsafe {
            take(
                0,
                [simd::flipped(simd::sixteen(block.add(2))), simd::flipped(simd::sixteen(block.add(18)))],
            );
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn pairs(block: *const u8, mut take: impl FnMut(usize, core::arch::x86_64::__m256i)) {
        // SAFETY: everything lies within the block.
        unsafe {
            use core::arch::x86_64::{_mm256_set1_epi8, _mm256_xor_si256};
            take(0, _mm256_xor_si256(x86::load(block.add(2)), _mm256_set1_epi8(-128)));
        }
    }
}
