//! `Q4_K`: 256 elements in 144 bytes, in eight sub-blocks of 32.
//!
//! ```text
//! 0   f16      d
//! 2   f16      dmin
//! 4   12 × u8  six-bit scales and minimums of the sub-blocks (see `scales_and_mins`)
//! 16  128 × u8 four times 32 bytes: sub-block 2i in the low nibbles, 2i + 1 in the high ones
//! ```
//! value = (d · scale) · q − (dmin · min)

#[cfg(any(target_arch = "aarch64", all(target_arch = "wasm32", target_feature = "simd128")))]
use super::simd;
#[cfg(target_arch = "x86_64")]
use super::x86;
use super::{Block, Codes, Subs, half, half_bits, scales_and_mins};

pub struct Q4K;

impl Block for Q4K {
    const ID: u32 = 12;
    const NAME: &'static str = "Q4_K";
    const ELEMENTS: usize = 256;
    const BYTES: usize = 144;

    fn dequantise(block: &[u8], out: &mut [f32]) {
        let (d, dmin) = (half(block, 0), half(block, 2));
        let packed = scales_and_mins(&block[4..16]);
        for (sub, values) in out.chunks_exact_mut(32).enumerate() {
            let (sub_d, sub_m) = (d * f32::from(packed[sub]), dmin * f32::from(packed[sub + 8]));
            let bytes = &block[16 + sub / 2 * 32..][..32];
            let shift = 4 * (sub % 2);
            for (value, byte) in values.iter_mut().zip(bytes) {
                *value = sub_d * f32::from(byte >> shift & 15) - sub_m;
            }
        }
    }
}

impl Codes for Q4K {
    const MINS: bool = true;
    const LARGEST: u32 = 15;
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
            let bytes = &block[16 + sub / 2 * 32..][..32];
            for (code, byte) in out.iter_mut().zip(bytes) {
                *code = byte >> (4 * (sub % 2)) & 15;
            }
        }
    }

    #[cfg(any(target_arch = "aarch64", all(target_arch = "wasm32", target_feature = "simd128")))]
    #[inline(always)]
    unsafe fn pairs(k: &simd::Constants, block: *const u8, mut take: impl FnMut(usize, simd::Pair)) {
        // SAFETY: everything lies within the block.
        unsafe {
            // Written out, so that addresses are known when it is compiled.
            let mut two = |i: usize| {
                let first = simd::nibbles(k, simd::sixteen(block.add(16 + 32 * i)));
                let second = simd::nibbles(k, simd::sixteen(block.add(32 + 32 * i)));
                take(2 * i, [first.0, second.0]);
                take(2 * i + 1, [first.1, second.1]);
            };
            two(0);
            two(1);
            two(2);
            two(3);
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn pairs(block: *const u8, mut take: impl FnMut(usize, core::arch::x86_64::__m256i)) {
        // SAFETY: everything lies within the block.
        unsafe {
            for i in 0..4 {
                let bytes = x86::load(block.add(16 + 32 * i));
                take(2 * i, x86::low::<0>(bytes));
                take(2 * i + 1, x86::low::<4>(bytes));
            }
        }
    }
}
